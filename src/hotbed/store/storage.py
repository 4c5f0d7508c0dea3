"""`Storage`: in which memory an arena's rows are, and the store that this takes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from hotbed.errors import StoreError
from hotbed.ops import BackendName, host_backend
from hotbed.specs import RowDtype
from hotbed.store.ahead import ReadAhead
from hotbed.store.base import RowStore, Span, Tier
from hotbed.store.cached import CachedRecords, Policy
from hotbed.store.crossing import DeviceStaging
from hotbed.store.dense import DenseStore
from hotbed.store.keyed import FileRecords, MemoryRecords
from hotbed.store.lazy import LazyStore
from hotbed.store.records import Records

CacheTier = Literal["device", "host"]
HostRows = Literal["records", "uva"]


@dataclass(frozen=True)
class Storage:
    """Where rows are.

    Records are read ahead where that is worth it on the device that they are made for; a store that is moved to another
    one keeps what it has.

    Parameters
    ----------
    tier
        ``"device"``: the compute device's memory, all rows at once. ``"host"`` and ``"disk"``: the host's memory, or a
        file; rows come to be when they are trained.
    cache_rows
        Rows of a cache before them; 0: none.
    policy
        Which rows the cache gives up.
    cache_tier
        Where the cache is: in the compute device's memory, or in the ``"host"``'s.
    host
        How rows are in tier ``"host"``: ``"records"`` come to be when they are trained, and are brought to the device
        batch by batch; with ``"uva"`` all rows are there at once, and a CUDA device reads and writes them in place.
    directory
        Where files are made; default: that of temporary files.
    """

    tier: Tier = "device"
    cache_rows: int = 0
    policy: Policy = "lru"
    cache_tier: CacheTier = "device"
    host: HostRows = "records"
    directory: str | Path | None = None

    def make(
        self, spans: Sequence[Span], dim: int, *, dtype: RowDtype, device: torch.device, backend: BackendName
    ) -> RowStore:
        """A store for these spans, as in `DenseStore`.

        Raises
        ------
        StoreError
            If rows that are read in place are to have a cache.
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
        records = partial(self._records, backend)
        return LazyStore(spans, dim, records, tier=self.tier, dtype=dtype, device=device, backend=backend)

    def _records(self, backend: BackendName, record_bytes: int, slots: int, device: torch.device) -> Records:
        on_device = self.cache_rows > 0 and self.cache_tier == "device"
        if self.tier == "host":
            records: Records = MemoryRecords(record_bytes, slots)
        else:
            records = FileRecords(record_bytes, self.directory or tempfile.gettempdir())
        if self.tier == "disk" or (on_device and device.type != "cpu"):
            records = ReadAhead(records)
        if on_device:
            records = DeviceStaging(records, device)
        elif self.cache_rows:
            backend = host_backend(backend, device)
        return (
            CachedRecords(records, min(self.cache_rows, slots), self.policy, backend=backend)
            if self.cache_rows
            else records
        )
