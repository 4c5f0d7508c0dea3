"""`Storage`: in which memory an arena's rows are, and the store that this takes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hotbed.ops import BackendName
from hotbed.specs import RowDtype
from hotbed.store.base import RowStore, Span, Tier
from hotbed.store.cached import CachedRecords, Policy, ReadAhead
from hotbed.store.dense import DenseStore
from hotbed.store.keyed import FileRecords, MemoryRecords
from hotbed.store.lazy import LazyStore
from hotbed.store.records import Records


@dataclass(frozen=True)
class Storage:
    """Where rows are.

    Parameters
    ----------
    tier
        ``"device"``: the compute device's memory, all rows at once. ``"host"`` and ``"disk"``: the host's memory, or a
        file; rows come to be when they are trained.
    cache_rows
        Rows of a cache in memory before them; 0: none.
    policy
        Which rows the cache gives up.
    directory
        Where files are made; default: that of temporary files.
    """

    tier: Tier = "device"
    cache_rows: int = 0
    policy: Policy = "lru"
    directory: str | Path | None = None

    def make(
        self, spans: Sequence[Span], dim: int, *, dtype: RowDtype, device: torch.device, backend: BackendName
    ) -> RowStore:
        """A store for these spans, as in `DenseStore`."""
        if self.tier == "device" or not spans or device.type == "meta":
            return DenseStore(spans, dim, dtype=dtype, device=device, backend=backend)
        return LazyStore(spans, dim, self._records, tier=self.tier, dtype=dtype, device=device, backend=backend)

    def _records(self, record_bytes: int, slots: int) -> Records:
        if self.tier == "host":
            records: Records = MemoryRecords(record_bytes, slots)
        else:
            records = ReadAhead(FileRecords(record_bytes, self.directory or tempfile.gettempdir()))
        return CachedRecords(records, min(self.cache_rows, slots), self.policy) if self.cache_rows else records
