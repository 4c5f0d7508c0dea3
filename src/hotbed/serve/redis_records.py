"""Cache rows of an exported model in Redis, in front of its files, for several servers.

A key holds a block of neighbouring rows, about a kilobyte, because each key costs Redis some 100 bytes. Missing blocks
are read from the file and written to Redis. A key contains the state of the exported model, so
servers of different models can share a Redis. Changed rows are not in Redis; they are looked up first
(`hotbed.serve.row_files`)::

    hotbed:STATE:TABLE:17    rows 17 · 8 … 17 · 8 + 7 of 128 bytes

While Redis does not answer, rows are read from the files, and Redis is tried again every second.
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
"""Approximate bytes of a key's value."""
KEYS_AT_ONCE = 1024
"""Largest number of keys per request."""
TIMEOUT_S = 0.5
"""Timeout of a request."""
RETRY_S = 1.0
"""Time between a failed request and the next one."""
KEPT_S = 24 * 3600
"""Lifetime of keys."""
CLUSTER = "redis+cluster://"
"""Prefix of a cluster's address."""


class RedisRecords(RecordsAbove):
    """Read records from Redis, or else from the layer ``below``.

    ``tables`` has the name and number of rows of each table, in the order of their slots. ``address`` begins with
    ``redis://``, ``rediss://`` (TLS), ``unix://``, or ``redis+cluster://``.
    """

    def __init__(self, below: Records, tables: Sequence[tuple[str, int]], state: str, address: str) -> None:
        super().__init__(below)
        self._address = address
        self._client = connect(address)
        self._block_rows = max(BLOCK_BYTES // self.record_bytes, 1)
        self._prefixes = [f"hotbed:{state[:32]}:{name}:" for name, _ in tables]
        rows = [rows for _, rows in tables]
        self._firsts = torch.tensor([0, *accumulate(rows)])
        blocks = [-(-r // self._block_rows) for r in rows]
        self._first_blocks = torch.tensor([0, *accumulate(blocks)])
        self._retry_at = self._put_at = 0.0
        # found blocks, missing blocks, failed requests
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
        """Read blocks into rows ``at`` of ``data``; return the rows of missing blocks, or None if Redis fails."""
        try:
            values: list[Any] = self._client.mget(self._keys(blocks))
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
        """Read whole blocks from the files, with zeros after a table's end."""
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
        """Write blocks to Redis unless it refuses them."""
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

        # Missing nodes of a cluster raise no RedisError.
        if not isinstance(error, redis.RedisError | RedisClusterException | OSError):
            raise error
        self.failures += 1
        self._put_at = time.monotonic() + RETRY_S
        if not isinstance(error, redis.ResponseError):  # after a ResponseError, Redis may be full, but can be read
            self._retry_at = self._put_at

    @override
    def close(self) -> None:
        self._client.close()
        self.below.close()


class _ClusterClient:
    """A client of a cluster that connects on first use."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._cluster: Any = None

    def _connected(self) -> Any:
        if self._cluster is None:
            self._cluster = self._connect()
        return self._cluster

    def mget(self, keys: list[str]) -> list[Any]:
        return self._connected().mget_nonatomic(keys)

    def pipeline(self, transaction: bool) -> Any:
        return self._connected().pipeline()

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


def check_address(address: str) -> None:
    """Raise `StoreError` unless a text has the form of a Redis address."""
    if not re.match(r"(redis|rediss|redis\+cluster|unix)://", address):
        raise StoreError(
            f"Redis address: got '{hide_password(address)}', expected redis://HOST:PORT/DATABASE or unix://PATH"
        )


def connect(address: str) -> Any:
    """Create a client, which connects on first use.

    Raise `StoreError` if the address is invalid, or the package ``redis`` is not installed.
    """
    check_address(address)
    try:
        import redis
    except ImportError:
        raise StoreError("rows in Redis need the package redis. Run pip install 'hotbed[serve]'") from None
    wait = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    try:
        if address.startswith(CLUSTER):
            url = f"redis://{address.removeprefix(CLUSTER)}"
            redis.Redis.from_url(url, **wait).close()  # checks the address
            return _ClusterClient(lambda: redis.RedisCluster.from_url(url, **wait))
        return redis.Redis.from_url(address, **wait)
    except (redis.RedisError, ValueError) as error:
        raise StoreError(f"Redis address {hide_password(address)} is invalid ({error}). Correct the address") from None


def hide_password(address: str) -> str:
    """Return an address without its password."""
    return re.sub(r"://[^@/]*@", "://…@", address)
