"""`CachedRecords`: the records that are used most in faster memory, over records in a file or elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.ops import BackendName, CacheTags
from hotbed.ops.layout import FREE
from hotbed.store import memory
from hotbed.store.records import Over, Records, Traffic, Use, distinct

Policy = Literal["lru", "lfu"]
WAYS = 32
"""Places of a set (Neo's row cache)."""


class CachedRecords(Over):
    """A set-associative cache that is written back, on the device of the records below.

    What is read or written is kept, in the place of what was used least; records of the same read or write never make
    room for each other, and what finds no place goes to the records below. On a GPU, threads must use one stream.

    Parameters
    ----------
    below
        Where all records are.
    rows
        How many of them to keep; rounded up to whole sets.
    policy
        ``"lru"`` gives up the least recently, ``"lfu"`` the least often used record of a set.
    backend
        Kernels to use; ``"auto"`` goes by device.
    """

    def __init__(self, below: Records, rows: int, policy: Policy = "lru", *, backend: BackendName = "auto") -> None:
        super().__init__(below)
        self.backend_name: BackendName = backend
        ways = min(WAYS, rows)
        places = -(-rows // ways) * ways
        self._slab = memory.zeros((places, self.record_bytes), torch.uint8, self.device)
        free = torch.full((places,), FREE, dtype=torch.int64, device=self.device)
        self._tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, policy == "lfu")
        self._dirty = torch.zeros(places, dtype=torch.bool, device=self.device)
        self._now = 0
        self._lock = threading.Lock()
        self._counted = Traffic()

    @property
    def ops(self) -> ops.Backend:
        """The kernels that serve this cache."""
        return ops.select(self.device, self.backend_name)

    @property
    def rows(self) -> int:
        """How many records there is room for."""
        return len(self._dirty)

    @property
    @override
    def nbytes(self) -> int:
        own = (self._slab, self._tags.keys, self._tags.times, self._tags.counts, self._dirty)
        return sum(t.nbytes for t in own) + self.below.nbytes

    @property
    @override
    def traffic(self) -> Traffic:
        return self._counted + self.below.traffic

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        with self._lock:
            places = self.ops.cache_find(self._tags, slots)
            self.ops.cache_read(self._slab, places, out)
            if use != "once":
                self._now += 1
                self.ops.cache_use(self._tags, places, self._now)
        here = places >= 0
        missing = (~here).nonzero()[:, 0]
        if use == "lookup":
            self._counted.hits += len(slots) - len(missing)
            self._counted.misses += len(missing)
        if not len(missing):
            return here
        found = torch.empty(len(missing), self.record_bytes, dtype=torch.uint8, device=self.device)
        there = self.below.read(slots[missing], found, use=use)
        if not bool(there.all()):
            missing, found = missing[there], found[there]
        self.ops.cache_write(out, missing, found)
        here[missing] = True
        if use != "once":
            absent, first = distinct(slots[missing])
            self._insert(absent, self._gathered(found, first), dirty=False)
        return here

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        with self._lock:
            places = self.ops.cache_find(self._tags, slots)
            self.ops.cache_write(self._slab, places, records)
            self.ops.cache_use(self._tags, places, self._now)
            missing = (places < 0).nonzero()[:, 0]
            self._dirty[places if not len(missing) else places[places >= 0]] = True
        if len(missing):
            self._insert(slots[missing], self._gathered(records, missing), dirty=True)

    @override
    def keys(self) -> Tensor:
        with self._lock:
            own = self._tags.keys[self._tags.keys != FREE].cpu()
        return torch.cat([self.below.keys(), own]).unique()

    @override
    def clear(self) -> None:
        with self._lock:
            self._tags.keys.fill_(FREE)
            self._dirty.fill_(False)
            self.below.clear()

    @override
    def prefetch(self, slots: Tensor) -> None:
        with self._lock:
            places = self.ops.cache_find(self._tags, slots)
        self.below.prefetch(slots[places < 0])

    @override
    def to(self, device: torch.device) -> None:
        with self._lock:
            super().to(device)
            keys, times, counts = (t.to(self.device) for t in (self._tags.keys, self._tags.times, self._tags.counts))
            self._tags = replace(self._tags, keys=keys, times=times, counts=counts)
            self._slab, self._dirty = self._slab.to(self.device), self._dirty.to(self.device)

    def _gathered(self, records: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), self.record_bytes, dtype=torch.uint8, device=self.device)
        self.ops.cache_read(records, at, out)
        return out

    def _insert(self, slots: Tensor, records: Tensor, *, dirty: bool) -> None:
        """Keep records of distinct slots that are not here; write back what makes room, or finds none."""
        with self._lock:
            if not dirty:  # what was read without the lock may be here by now, perhaps changed
                absent = (self.ops.cache_find(self._tags, slots) < 0).nonzero()[:, 0]
                if len(absent) < len(slots):
                    slots, records = slots[absent], self._gathered(records, absent)
            places, evicted = self.ops.cache_take(self._tags, slots, self._now)
            kept = places >= 0
            lost = (kept & (evicted != FREE) & self._dirty[places.clamp(min=0)]).nonzero()[:, 0]
            out_slots, out = evicted[lost], self._gathered(self._slab, places[lost])
            if dirty and not bool(kept.all()):
                out_slots, out = torch.cat([out_slots, slots[~kept]]), torch.cat([out, records[~kept]])
            # Before anyone can miss it here: it must be there.
            self.below.write(out_slots, out)
            self.ops.cache_write(self._slab, places, records)
            self._dirty[places[kept]] = dirty
