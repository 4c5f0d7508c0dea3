"""Choose the memory of a store's rows (its tier), and stack the layers of records that this machine needs.

To add a tier, write a subclass of `Records`, and add it to `RECORDS` and its name to `hotbed.specs.Tier`. Tests run the
contract of stores on every registered tier.
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
from hotbed.store import row_cache
from hotbed.store.base import RowStore, Span
from hotbed.store.device_store import DenseStore
from hotbed.store.file_records import FileRecords
from hotbed.store.hash_index import MemoryRecords
from hotbed.store.lazy_store import LazyStore
from hotbed.store.read_ahead import ReadAhead
from hotbed.store.records import Records
from hotbed.store.row_cache import CachedRecords


class TierRecords(NamedTuple):
    """How a tier keeps records.

    Attributes
    ----------
    make
        Creates the records. Arguments: bytes per record, maximal number of slots, and directory of files.
    is_slow
        Whether prefetching pays even if the records stay on the host.
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
"""Tiers with rows that are materialized on their first update. Tier ``"device"`` is a `DenseStore`."""


@dataclass(frozen=True)
class Storage:
    """Choice of the memory of rows, and factory of stores.

    Prefetching is chosen for the device on which the store is created. A store that is moved later keeps this choice.
    """

    # "device": memory of the compute device, all rows at once. "host" and "disk": memory of the host, or a file; rows
    # are materialized on their first update.
    tier: Tier = "device"
    cache_rows: int = 0  # capacity of a cache above the rows; 0: no cache
    policy: CachePolicy = "lru"  # eviction policy of the cache
    cache_tier: CacheTier = "device"  # memory of the cache: the compute device's, or the host's
    # rows in tier "host": "records" are materialized on their first update and copied to the device by batch;
    # with "uva" all rows are allocated at once, and a CUDA device reads and writes them in place
    host: HostRows = "records"
    directory: str | Path | None = None  # for files; default: the directory of temporary files

    def make(
        self, spans: Sequence[Span], dim: int, *, dtype: RowDtype, device: torch.device, backend: BackendName
    ) -> RowStore:
        """Create a store for spans. See `DenseStore` for the parameters.

        Raise `StoreError` for a cache above rows that a device reads in place.
        """
        if self.tier == "device" or not spans or device.type == "meta":
            return DenseStore(spans, dim, dtype=dtype, device=device, backend=backend)
        if self.tier == "host" and self.host == "uva":
            if self.cache_rows:
                raise StoreError(
                    f"cache rows: got {self.cache_rows:,}, expected 0 for rows that a device reads in place in the "
                    "host's memory (host 'uva'). Use host 'records', or a cache of 0 rows"
                )
            return DenseStore(spans, dim, dtype=dtype, device=device, backend=backend, tier="host")
        records = partial(self._records, backend, [span.rows for span in spans])
        return LazyStore(spans, dim, records, tier=self.tier, dtype=dtype, device=device, backend=backend)

    def _records(
        self, backend: BackendName, spans: Sequence[int], record_bytes: int, slots: int, device: torch.device
    ) -> Records:
        """Create the layers of records that this tier needs on ``device``."""
        make, is_slow = RECORDS[self.tier]
        records = make(record_bytes, slots, self.directory or tempfile.gettempdir())
        on_device = self.cache_rows > 0 and self.cache_tier == "device"
        if is_slow or (on_device and row_cache.needs_staging(device)):
            records = ReadAhead(records, keeps=not self.cache_rows)
        if not self.cache_rows:
            return records
        rows = min(self.cache_rows, slots)
        if on_device:
            return CachedRecords(records, rows, self.policy, device=device, backend=backend, spans=spans)
        return CachedRecords(records, rows, self.policy, backend=host_backend(backend, device), spans=spans)
