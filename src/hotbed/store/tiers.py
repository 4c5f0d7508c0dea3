"""Choose the memory of a store's rows, and stack the layers that this takes on this machine; tiers register here.

A tier is a way to keep records, in `RECORDS`: a new one is a file with its `Records`, its row there, and its name in
`hotbed.specs.Tier`. Tests run the store's contract on every tier that is registered.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from hotbed.config.parallel_memory import CachePolicy, CacheTier, HostRows
from hotbed.errors import StoreError
from hotbed.ops import BackendName, host_backend
from hotbed.specs import RowDtype, Tier
from hotbed.store import cached
from hotbed.store.base import RowStore, Span
from hotbed.store.cached import CachedRecords
from hotbed.store.dense import DenseStore
from hotbed.store.file_records import FileRecords
from hotbed.store.hash_index import MemoryRecords
from hotbed.store.lazy_store import LazyStore
from hotbed.store.read_ahead import ReadAhead
from hotbed.store.records import Records


class TierRecords(NamedTuple):
    """Say how a tier keeps records.

    Attributes
    ----------
    make
        Makes records of so many bytes, for at most so many slots, with files in this directory if it has any.
    is_slow
        Whether records are worth reading ahead also when they stay on the host.
    """

    make: Callable[[int, int, str | Path], Records]
    is_slow: bool


def _in_memory(record_bytes: int, slots: int, directory: str | Path) -> Records:
    return MemoryRecords(record_bytes, slots)


def _in_file(record_bytes: int, slots: int, directory: str | Path) -> Records:
    return FileRecords(record_bytes, directory)


RECORDS: dict[Tier, TierRecords] = {
    "host": TierRecords(_in_memory, is_slow=False),
    "disk": TierRecords(_in_file, is_slow=True),
}
"""Tiers whose rows are materialized on their first update; ``"device"`` is a `DenseStore`."""


@dataclass(frozen=True)
class Storage:
    """Choose where rows are stored, and create the store.

    Read-ahead is decided for the device that the records are made for; a store that is moved to another device keeps
    that decision.
    """

    # "device": memory of the compute device, all rows at once. "host" and "disk": memory of the host, or a file; rows
    # are materialized on their first update.
    tier: Tier = "device"
    cache_rows: int = 0  # rows of a cache over them; 0: none
    policy: CachePolicy = "lru"  # eviction policy of the cache
    cache_tier: CacheTier = "device"  # memory of the cache: the compute device's, or the host's
    # rows in tier "host": "records" are materialized on their first update, and copied to the device batch by batch;
    # with "uva" all rows are there at once, and a CUDA device reads and writes them in place
    host: HostRows = "records"
    directory: str | Path | None = None  # for files; default: the directory of temporary files

    def make(
        self, spans: Sequence[Span], dim: int, *, dtype: RowDtype, device: torch.device, backend: BackendName
    ) -> RowStore:
        """Create a store for these spans, as in `DenseStore`.

        Raise `StoreError` for a cache over rows that are read in place.
        """
        if self.tier == "device" or not spans or device.type == "meta":
            return DenseStore(spans, dim, dtype=dtype, device=device, backend=backend)
        if self.tier == "host" and self.host == "uva":
            if self.cache_rows:
                raise StoreError(
                    f"a cache of {self.cache_rows:,} rows is asked for before rows in the host's memory that are read "
                    "in place (host 'uva'); use host 'records', or a cache of 0 rows"
                )
            return DenseStore(spans, dim, dtype=dtype, device=device, backend=backend, tier="host")
        records = partial(self._records, backend, [span.rows for span in spans])
        return LazyStore(spans, dim, records, tier=self.tier, dtype=dtype, device=device, backend=backend)

    def _records(
        self, backend: BackendName, spans: Sequence[int], record_bytes: int, slots: int, device: torch.device
    ) -> Records:
        """Stack the layers that records of this tier need on this device."""
        make, is_slow = RECORDS[self.tier]
        records = make(record_bytes, slots, self.directory or tempfile.gettempdir())
        on_device = self.cache_rows > 0 and self.cache_tier == "device"
        if is_slow or (on_device and cached.needs_staging(device)):
            records = ReadAhead(records, keeps=not self.cache_rows)
        if not self.cache_rows:
            return records
        rows = min(self.cache_rows, slots)
        if on_device:
            return CachedRecords(records, rows, self.policy, device=device, backend=backend, spans=spans)
        return CachedRecords(records, rows, self.policy, backend=host_backend(backend, device), spans=spans)
