"""Read records of a file before they are needed, and keep what the last lookups have read.

Most rows of a batch were in the batch before it. So what a lookup has read is kept for its update and for the lookups
that follow, and whatever is kept is overwritten with what is written: it is never older than what the file will have.
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
"""Prefetches whose records may wait to be used."""
MOST_LOOKUPS_KEPT = 4
"""Lookups whose records are kept; a step may take several."""


class _Written(NamedTuple):
    """Records that were written, by slot."""

    slots: Tensor
    records: Tensor


class _Batch(NamedTuple):
    """Records that were read together: those that exist, by rising slot."""

    slots: Tensor
    records: Tensor
    waiting: Tensor
    """``[n]`` bool: not looked up since they were read."""

    def overwrite(self, written: _Written) -> None:
        """Overwrite those that were written after they were read, or while."""
        cpu_cache.write_rows(self.records, find_positions(self.slots, written.slots), written.records)


class ReadAhead(RecordsAbove):
    """Prefetch records of a file, and read them once for consecutive lookups and updates.

    One thread may `prefetch` while another, the only writer, looks up and updates. ``keeps`` retains the records of
    lookups, for use without a cache.
    """

    reads_ahead = True

    def __init__(self, below: Records, *, keeps: bool = False) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self._batches: list[_Batch] = []
        self._looked_up: deque[_Batch] = deque(maxlen=MOST_LOOKUPS_KEPT if keeps else 0)
        self._written: list[_Written] | None = None
        """What was written since the prefetch under way began."""

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
        """Forget batches after a lookup that has found so many waiting records in each; the caller holds the lock.

        Those of which nothing waits any more. And behind a cache, which gets some records before they are asked for:
        those of earlier lookups, which nearly always come in the order of their prefetches. So a batch goes that some
        lookup has taken from, if this one has found most in a later batch.
        """
        of_this = 0 if self._looked_up.maxlen else found.index(max(found))
        self._batches = [
            batch
            for i, batch in enumerate(self._batches)
            if bool(batch.waiting.any()) and (i >= of_this or bool(batch.waiting.all()))
        ]

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        # First, so that what is read ahead from now on is what was written; what was read before is overwritten then.
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
