"""Keep rows of an exported model in Redis, in front of its files, for several servers to share.

A key holds some neighbouring rows of a table, about a kilobyte, as they are in its file: less than a row per key takes,
where each key costs Redis some 100 bytes, and much less than a disk reads for one row. What Redis does not have is read
from the file and put there. A key carries the state of the model that was exported, whose rows never change, so two
models never mix; rows that changed since are read before Redis is asked (`hotbed.serve.row_files`)::

    hotbed:STATE:TABLE:17    rows 17 · 8 … 17 · 8 + 7 of 128 bytes

While Redis does not answer, rows come from the files, and it is tried again every second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.store.records import Records, RecordsAbove, Use

BLOCK_BYTES = 1024
"""About how many bytes one key holds."""
KEYS_AT_ONCE = 1024
"""Keys of one request."""
TIMEOUT_S = 0.5
"""How long an answer is waited for."""
RETRY_S = 1.0
"""How long Redis is left alone after it did not answer."""
KEPT_S = 24 * 3600
"""How long keys are kept."""
CLUSTER = "redis+cluster://"
"""What addresses of a cluster begin with."""


class RedisRecords(RecordsAbove):
    """Read records from Redis, and missing records from the records below.

    ``tables`` has the name and number of rows of each table, in the order of their slots. ``address`` begins with
    ``redis://``, ``rediss://`` (TLS), ``unix://``, or ``redis+cluster://``.
    """

    def __init__(self, below: Records, tables: Sequence[tuple[str, int]], state: str, address: str) -> None:
        super().__init__(below)
        self._address = address
        self._client = client(address)
        self._block_rows = max(BLOCK_BYTES // self.record_bytes, 1)
        self._prefixes = [f"hotbed:{state[:32]}:{name}:" for name, _ in tables]
        rows = [rows for _, rows in tables]
        self._firsts = torch.tensor([0, *accumulate(rows)])
        blocks = [-(-r // self._block_rows) for r in rows]
        self._first_blocks = torch.tensor([0, *accumulate(blocks)])
        self._retry_at = self._put_at = 0.0
        # blocks that Redis had, blocks that it lacked, requests without an answer
        self.hits = self.misses = self.failures = 0

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
        """Fill in blocks at places ``at`` of ``data``; return the places of those that are not there.

        None if Redis does not answer.
        """
        try:
            values: list[Any] = self._client.mget(self._keys(blocks))
        except Exception as error:
            self._failed(error)
            return None
        size = self._block_rows * self.record_bytes
        here = [isinstance(value, bytes) and len(value) == size for value in values]
        found = b"".join(value for value, is_here in zip(values, here, strict=True) if is_here)
        has = torch.tensor(here)
        data[at[has]] = torch.from_numpy(np.frombuffer(bytearray(found), np.uint8)).view(-1, *data.shape[1:])
        self.hits += int(has.sum())
        self.misses += int((~has).sum())
        return at[~has]

    def _from_below(self, blocks: Tensor, data: Tensor, at: Tensor) -> None:
        """Read whole blocks from below; rows past the end of a table are zeros."""
        table = torch.searchsorted(self._first_blocks, blocks, right=True) - 1
        first = (blocks - self._first_blocks[table]) * self._block_rows
        rows = first[:, None] + torch.arange(self._block_rows)
        there = rows < (self._firsts[table + 1] - self._firsts[table])[:, None]
        records = torch.zeros(len(blocks), self._block_rows, self.record_bytes, dtype=torch.uint8)
        wanted = (rows + self._firsts[table, None])[there]
        found = torch.empty(len(wanted), self.record_bytes, dtype=torch.uint8)
        self.below.read(wanted, found, use="once")
        records[there] = found
        data[at] = records

    def _put(self, blocks: Tensor, data: Tensor) -> None:
        """Write blocks to Redis, if it takes them."""
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

        # A cluster whose nodes are gone, or that has no node for a slot, is no RedisError.
        if not isinstance(error, redis.RedisError | RedisClusterException | OSError):
            raise error
        self.failures += 1
        self._put_at = time.monotonic() + RETRY_S
        if not isinstance(error, redis.ResponseError):  # else it answers: it is full, perhaps, and can be read
            self._retry_at = self._put_at

    @override
    def close(self) -> None:
        self._client.close()
        self.below.close()


class _ClusterClient:
    """A client of a cluster, whose keys are on several servers; it connects when it is used first."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._cluster: Any = None

    def _connected(self) -> Any:
        if self._cluster is None:
            self._cluster = self._connect()  # which asks for its nodes
        return self._cluster

    def mget(self, keys: list[str]) -> list[Any]:
        return self._connected().mget_nonatomic(keys)

    def pipeline(self, transaction: bool) -> Any:
        return self._connected().pipeline()

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


def check_address(address: str) -> None:
    """Refuse what is no address of Redis; whether one answers there is found out when it is used."""
    if not re.match(r"(redis|rediss|redis\+cluster|unix)://", address):
        raise StoreError(f"'{shown(address)}' is no address of Redis; give redis://HOST:PORT/DATABASE or unix://PATH")


def client(address: str) -> Any:
    """Create a client, which connects on first use.

    Raise `StoreError` if the address is not of Redis, or the package ``redis`` is not installed.
    """
    check_address(address)
    try:
        import redis
    except ImportError:
        raise StoreError("rows in Redis need the package redis; pip install 'hotbed[serve]'") from None
    wait = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    try:
        if address.startswith(CLUSTER):
            url = f"redis://{address.removeprefix(CLUSTER)}"
            redis.Redis.from_url(url, **wait).close()  # whether the address can be one
            return _ClusterClient(lambda: redis.RedisCluster.from_url(url, **wait))
        return redis.Redis.from_url(address, **wait)
    except (redis.RedisError, ValueError) as error:
        raise StoreError(f"Redis at {shown(address)} cannot be used ({error})") from None


def shown(address: str) -> str:
    """An address without its password."""
    return re.sub(r"://[^@/]*@", "://…@", address)
