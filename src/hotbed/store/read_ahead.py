"""Prefetch records from a file, and keep the records of the last lookups in memory.

Most rows of a batch were also in the previous batch. Therefore the records of a lookup are kept for its update and for
the next lookups. Writes also overwrite the kept records, so they are never older than the file.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.ops import cpu_cache
from hotbed.store.hash_index import distinct, find_positions, gather_records
from hotbed.store.records import Records, RecordsAbove, Use

MOST_BATCHES_AHEAD = 32
"""Number of prefetches that may wait for their lookups."""
MOST_LOOKUPS_KEPT = 4
"""Number of lookups that keep their records. A step may have several lookups."""


class _Written(NamedTuple):
    """Records of a write, with their slots."""

    slots: Tensor
    records: Tensor


class _Batch(NamedTuple):
    """Records that were read together, in ascending order of their slots."""

    slots: Tensor
    records: Tensor
    waiting: Tensor
    """``[n]`` bool: whether a record was not looked up since it was read."""

    def overwrite(self, written: _Written) -> None:
        """Overwrite the records that a later or concurrent write has changed."""
        cpu_cache.write_rows(self.records, find_positions(self.slots, written.slots), written.records)


class ReadAhead(RecordsAbove):
    """Prefetch records, and read them once for consecutive lookups and updates.

    One thread may call `prefetch` while one other thread calls the other methods. ``keeps`` retains the records of
    lookups, which is useful without a cache above this layer.
    """

    reads_ahead = True

    def __init__(self, below: Records, *, keeps: bool = False) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self._batches: list[_Batch] = []
        self._looked_up: deque[_Batch] = deque(maxlen=MOST_LOOKUPS_KEPT if keeps else 0)
        self._written: list[_Written] | None = None
        """Writes since the running prefetch began. None if no prefetch is running."""

    @property
    @override
    def nbytes(self) -> int:
        with self._lock:
            return sum(batch.records.nbytes for batch in [*self._batches, *self._looked_up])

    @override
    def prefetch(self, slots: Tensor) -> None:
        if not len(slots):
            return
        slots, _ = distinct(slots)
        written = list[_Written]()
        with self._lock:
            self._written = written
        try:
            records = torch.empty(len(slots), self.record_bytes, dtype=torch.uint8)
            there = self._read(slots, records, "ahead")
            with self._lock:
                at = there.nonzero()[:, 0]
                if len(at) < len(slots):
                    slots, records = slots[at], gather_records(records, at)
                batch = _Batch(slots, records, torch.ones(len(slots), dtype=torch.bool))
                for since in written:
                    batch.overwrite(since)
                if len(slots):
                    self._batches = [*self._batches, batch][-MOST_BATCHES_AHEAD:]
        finally:
            with self._lock:
                self._written = None

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        if use != "lookup" or not self._looked_up.maxlen:
            return self._read(slots, out, use)
        records = torch.empty(len(slots), self.record_bytes, dtype=torch.uint8)
        there = self._read(slots, records, use)
        cpu_cache.read_rows(records, torch.arange(len(slots)).masked_fill_(~there, -1), out)
        at = there.nonzero()[:, 0]
        if not len(at):
            return there
        kept = slots if len(at) == len(slots) else slots[at]
        if not bool((kept[1:] > kept[:-1]).all()):
            kept, first = distinct(kept)
            at = at[first]
        if kept is not slots:
            records = gather_records(records, at)
        with self._lock:
            self._looked_up.append(_Batch(kept, records, torch.zeros(len(kept), dtype=torch.bool)))
        return there

    def _read(self, slots: Tensor, out: Tensor, use: Use) -> Tensor:
        if not self._looked_up and not self._batches:
            return self.below.read(slots, out, use=use)
        there, at = torch.zeros(len(slots), dtype=torch.bool), torch.empty_like(slots)
        found = list[int]()
        with self._lock:
            for batch in [*self._batches, *self._looked_up]:
                tensors = batch.slots, batch.waiting, slots, there, at
                ahead, of_batch = cpu_cache.find_more(*(t.numpy() for t in tensors), use == "lookup")
                self.counted.ahead += ahead
                found.append(of_batch)
                cpu_cache.read_rows(batch.records, at, out)
            if any(found):
                self._forget(found)
        rest = (~there).nonzero()[:, 0]
        if len(rest):
            found_below = torch.empty(len(rest), out.shape[1], dtype=torch.uint8)
            below = self.below.read(slots[rest], found_below, use=use)
            cpu_cache.write_rows(out, rest.masked_fill(~below, -1), found_below)
            there[rest] = below
        return there

    def _forget(self, found: list[int]) -> None:
        """Drop prefetched batches after a lookup. ``found`` is the number of records that it used from each batch.

        The caller holds the lock. A batch is dropped when no record waits any more. Behind a cache, some prefetched
        records are never requested, because the cache got them earlier. Lookups nearly always come in the order of
        their prefetches. Therefore a partly used batch is also dropped if this lookup used a later batch most.
        """
        of_this = 0 if self._looked_up.maxlen else found.index(max(found))
        self._batches = [
            batch
            for i, batch in enumerate(self._batches)
            if bool(batch.waiting.any()) and (i >= of_this or bool(batch.waiting.all()))
        ]

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        # This comes first: later prefetches read the new records, and earlier prefetches are overwritten below.
        self.below.write(slots, records)
        written = _Written(slots, records)
        with self._lock:
            for batch in [*self._batches, *self._looked_up]:
                batch.overwrite(written)
            if self._written is not None:
                self._written.append(written)

    @override
    def clear(self) -> None:
        with self._lock:
            self._batches.clear()
            self._looked_up.clear()
        self.below.clear()
