"""Cache rows of an exported model in Redis, in front of its files, for several servers.

Each key stores a block of neighbouring rows, about a kilobyte, because a key costs Redis some 100 bytes. If Redis lacks
a block, the block is read from the file and written to Redis. Keys contain the *state* of the exported
model, a hash that identifies its parameters, so several models can share one Redis. Rows that have changed since the
export are not in Redis, but in files of each server, which lookups search first (`hotbed.serve.row_files`). This is a
key for rows of 128 bytes, i.e. 8 rows per block::

    hotbed:STATE:TABLE:17    rows 136 … 143 of the table

While Redis does not answer, rows are read from the files, and Redis is tried again every second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.store.records import Records, RecordsAbove, Use

BLOCK_BYTES = 1024  # approximate size of a key's value
KEYS_AT_ONCE = 1024  # largest number of keys per request
TIMEOUT_S = 0.5  # timeout of a request
RETRY_S = 1.0  # time between a failed request and the next request
KEPT_S = 24 * 3600  # lifetime of keys
CLUSTER = "redis+cluster://"  # prefix of a cluster's address


class RedisRecords(RecordsAbove):
    """Read records from Redis, and read records that Redis lacks from the layer ``below``.

    ``tables`` lists the name and the number of rows of each table, in the order of their slots. ``address`` begins with
    ``redis://``, ``rediss://`` (TLS), ``unix://``, or ``redis+cluster://``.
    """

    def __init__(self, below: Records, tables: Sequence[tuple[str, int]], state: str, address: str) -> None:
        super().__init__(below)
        self._connect = connector(address)
        self._block_rows = max(BLOCK_BYTES // self.record_bytes, 1)
        self._prefixes = [f"hotbed:{state[:32]}:{name}:" for name, _ in tables]
        rows = [rows for _, rows in tables]
        self._firsts = torch.tensor([0, *accumulate(rows)])
        blocks = [-(-r // self._block_rows) for r in rows]
        self._first_blocks = torch.tensor([0, *accumulate(blocks)])
        self._retry_at = self._put_at = 0.0
        # numbers of blocks that Redis had, of blocks that it lacked, and of failed requests
        self.hits = self.misses = self.failures = 0

    @cached_property
    def _client(self) -> Any:
        """The client of Redis. It is created at the first read, because the client of a cluster connects at once."""
        return self._connect()

    @property
    @override
    def nbytes(self) -> int:
        return 0

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        if time.monotonic() < self._retry_at:
            return self.below.read(slots, out, use=use)
        table = torch.searchsorted(self._firsts, slots, right=True) - 1
        rows = slots - self._firsts[table]
        blocks, inverse = (self._first_blocks[table] + rows // self._block_rows).unique(return_inverse=True)
        data = torch.empty(len(blocks), self._block_rows, self.record_bytes, dtype=torch.uint8)
        for some in torch.arange(len(blocks)).split(KEYS_AT_ONCE):
            missing = self._from_redis(blocks[some], data, some)
            if missing is None:
                return self.below.read(slots, out, use=use)
            if len(missing):
                self._from_below(blocks[missing], data, missing)
                if time.monotonic() >= self._put_at:
                    self._put(blocks[missing], data[missing])
        records = data.view(-1, self.record_bytes)[:, : out.shape[1]]
        torch.index_select(records, 0, inverse * self._block_rows + rows % self._block_rows, out=out)
        return torch.ones(len(slots), dtype=torch.bool)

    def _from_redis(self, blocks: Tensor, data: Tensor, at: Tensor) -> Tensor | None:
        """Copy blocks from Redis to ``data[at]``. Return the entries of ``at`` with blocks that Redis lacks.

        Return None if Redis does not answer.
        """
        try:
            # A cluster stores keys on several nodes, and has no atomic mget over nodes.
            mget = getattr(self._client, "mget_nonatomic", self._client.mget)
            values: list[Any] = mget(self._keys(blocks))
        except Exception as error:
            self._failed(error)
            return None
        size = self._block_rows * self.record_bytes
        hit = [isinstance(value, bytes) and len(value) == size for value in values]
        found = b"".join(value for value, is_hit in zip(values, hit, strict=True) if is_hit)
        has = torch.tensor(hit)
        data[at[has]] = torch.from_numpy(np.frombuffer(bytearray(found), np.uint8)).view(-1, *data.shape[1:])
        self.hits += int(has.sum())
        self.misses += int((~has).sum())
        return at[~has]

    def _from_below(self, blocks: Tensor, data: Tensor, at: Tensor) -> None:
        """Read whole blocks from the files to ``data[at]``. The last block of a table is filled up with zeros."""
        table = torch.searchsorted(self._first_blocks, blocks, right=True) - 1
        first = (blocks - self._first_blocks[table]) * self._block_rows
        rows = first[:, None] + torch.arange(self._block_rows)
        exists = rows < (self._firsts[table + 1] - self._firsts[table])[:, None]
        records = torch.zeros(len(blocks), self._block_rows, self.record_bytes, dtype=torch.uint8)
        wanted = (rows + self._firsts[table, None])[exists]
        found = torch.empty(len(wanted), self.record_bytes, dtype=torch.uint8)
        self.below.read(wanted, found, use="once")
        records[exists] = found
        data[at] = records

    def _put(self, blocks: Tensor, data: Tensor) -> None:
        """Write blocks to Redis. A failure is only counted, because the blocks are also in the files."""
        try:
            pipe = self._client.pipeline(transaction=False)
            for key, block in zip(self._keys(blocks), data.numpy(), strict=True):
                pipe.set(key, block.tobytes(), ex=KEPT_S)
            pipe.execute()
        except Exception as error:
            self._failed(error)

    def _keys(self, blocks: Tensor) -> list[str]:
        table = torch.searchsorted(self._first_blocks, blocks, right=True) - 1
        own = blocks - self._first_blocks[table]
        return [f"{self._prefixes[t]}{block}" for t, block in zip(table.tolist(), own.tolist(), strict=True)]

    def _failed(self, error: Exception) -> None:
        import redis
        from redis.exceptions import RedisClusterException

        # The client of a cluster without reachable nodes raises RedisClusterException, which is no RedisError.
        if not isinstance(error, redis.RedisError | RedisClusterException | OSError):
            raise error
        self.failures += 1
        self._put_at = time.monotonic() + RETRY_S
        if not isinstance(error, redis.ResponseError):  # e.g. a full Redis raises ResponseError, but can still be read
            self._retry_at = self._put_at

    @override
    def close(self) -> None:
        if "_client" in vars(self):
            self._client.close()
        self.below.close()


def check_address(address: str) -> None:
    """Raise `StoreError` unless ``address`` has the form of a Redis address."""
    if not re.match(r"(redis|rediss|redis\+cluster|unix)://", address):
        raise StoreError(
            f"Redis address: got '{hide_password(address)}', expected redis://HOST:PORT/DATABASE or unix://PATH"
        )


def connector(address: str) -> Callable[[], Any]:
    """Return a function that creates the client for an address.

    Raise `StoreError` if the address is invalid, or if the package ``redis`` is not installed.
    """
    check_address(address)
    try:
        import redis
    except ImportError:
        raise StoreError("rows in Redis need the package redis. Run pip install 'hotbed[serve]'") from None
    is_cluster = address.startswith(CLUSTER)
    url = f"redis://{address.removeprefix(CLUSTER)}" if is_cluster else address
    wait = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    try:
        redis.Redis.from_url(url, **wait).close()  # raises for an invalid address, without connecting
    except (redis.RedisError, ValueError) as error:
        raise StoreError(f"Redis address {hide_password(address)} is invalid ({error}). Correct the address") from None
    return partial(redis.RedisCluster.from_url if is_cluster else redis.Redis.from_url, url, **wait)


def hide_password(address: str) -> str:
    """Return an address without its password."""
    return re.sub(r"://[^@/]*@", "://…@", address)
