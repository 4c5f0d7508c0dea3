"""Read records of a file before they are needed, and keep what a lookup has read for its update."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.ops import cpu_cache
from hotbed.store.keyed import distinct, gathered, positions
from hotbed.store.records import Records, RecordsAbove, Use

MOST_BATCHES_AHEAD = 32
"""Prefetches whose records may wait to be used."""
MOST_LOOKUPS_KEPT = 4
"""Lookups whose records may wait for an update."""


class _BatchAhead(NamedTuple):
    """Records that were read before they were needed: those that exist, by rising slot."""

    slots: Tensor
    records: Tensor
    fresh: Tensor
    """``[n]`` bool: not written since, and of what was read ahead, not looked up."""

    def outdate(self, written: Tensor) -> None:
        """Note which were written after they were read, or while."""
        at = positions(self.slots, written)
        self.fresh[at[at >= 0]] = False


class ReadAhead(RecordsAbove):
    """Read records of a file before they are needed, and once for a lookup and the update that follows it.

    One thread may `prefetch` while another, the only one that writes, looks up and updates.

    Parameters
    ----------
    below
        Where they are.
    keeps
        Whether what a lookup has read is kept for an update, as where no cache does so.
    """

    reads_ahead = True

    def __init__(self, below: Records, *, keeps: bool = False) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self._batches: list[_BatchAhead] = []
        self._looked_up: deque[_BatchAhead] = deque(maxlen=MOST_LOOKUPS_KEPT if keeps else 0)
        self._written: list[Tensor] | None = None
        """What was written since the prefetch under way began."""

    @property
    @override
    def nbytes(self) -> int:
        return sum(batch.records.nbytes for batch in [*self._batches, *self._looked_up])

    @override
    def prefetch(self, slots: Tensor) -> None:
        if not len(slots):
            return
        slots, _ = distinct(slots)
        with self._lock:
            self._written = []
        records = torch.empty(len(slots), self.record_bytes, dtype=torch.uint8)
        there = self.below.read(slots, records, use="ahead")
        with self._lock:
            at = there.nonzero()[:, 0]
            if len(at) < len(slots):
                slots, records = slots[at], gathered(records, at)
            batch = _BatchAhead(slots, records, torch.ones(len(slots), dtype=torch.bool))
            for written in self._written or ():
                batch.outdate(written)
            self._written = None
            if len(slots):
                self._batches = [*self._batches, batch][-MOST_BATCHES_AHEAD:]

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
            records = gathered(records, at)
        with self._lock:
            self._looked_up.append(_BatchAhead(kept, records, torch.ones(len(kept), dtype=torch.bool)))
        return there

    def _read(self, slots: Tensor, out: Tensor, use: Use) -> Tensor:
        kept = list(self._looked_up) if use == "update" else []
        if not kept and not self._batches:
            return self.below.read(slots, out, use=use)
        left = slots.clone()
        with self._lock:
            for number, batch in enumerate([*kept, *self._batches]):
                at = positions(batch.slots, left)
                at.masked_fill_(~batch.fresh[at] & (at >= 0), -1)
                cpu_cache.read_rows(batch.records, at, out)
                found = at >= 0
                left.masked_fill_(found, -1)
                if number >= len(kept):
                    self.counted.ahead += int(found.sum())
                    if use == "lookup":
                        batch.fresh[at[found]] = False
            self._batches = [batch for batch in self._batches if bool(batch.fresh.any())]
        there = left < 0
        rest = (~there).nonzero()[:, 0]
        if len(rest):
            found_below = torch.empty(len(rest), out.shape[1], dtype=torch.uint8)
            below = self.below.read(slots[rest], found_below, use=use)
            cpu_cache.write_rows(out, rest.masked_fill(~below, -1), found_below)
            there[rest] = below
        return there

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        # First, so that what is read ahead from now on is what was written; what was read before is marked then.
        self.below.write(slots, records)
        with self._lock:
            for batch in [*self._batches, *self._looked_up]:
                batch.outdate(slots)
            while self._looked_up and not bool(self._looked_up[0].fresh.any()):
                self._looked_up.popleft()
            if self._written is not None:
                self._written.append(slots)

    @override
    def clear(self) -> None:
        with self._lock:
            self._batches.clear()
            self._looked_up.clear()
        self.below.clear()
