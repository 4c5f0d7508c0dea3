"""`CachedRecords`: the records that are used most in memory, over records in a file or elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.ops import cpu_cache, cpu_memory
from hotbed.ops.cpu_runtime import launch
from hotbed.store.records import Records, Traffic, positions

Policy = Literal["lru", "lfu"]
WAYS = 32
"""Places of a set (Neo's row cache)."""
_MOST_AHEAD = 8
"""Reads ahead that may wait to be used."""


class _Over(Records):
    """Records that are kept by others."""

    def __init__(self, below: Records) -> None:
        self.below, self.record_bytes = below, below.record_bytes

    @property
    @override
    def disk_bytes(self) -> int:
        return self.below.disk_bytes

    @override
    def close(self) -> None:
        self.below.close()


class CachedRecords(_Over):
    """A set-associative cache that is written back.

    What is read or written is kept, in the place of what was used least; records of the same read or write never make
    room for each other, and what finds no place goes to the records below.

    Parameters
    ----------
    below
        Where all records are.
    rows
        How many of them to keep; rounded up to whole sets.
    policy
        ``"lru"`` gives up the least recently, ``"lfu"`` the least often used record of a set.
    """

    def __init__(self, below: Records, rows: int, policy: Policy = "lru") -> None:
        super().__init__(below)
        self.policy = policy
        self._ways = min(WAYS, rows)
        self._sets = -(-rows // self._ways)
        places = self._sets * self._ways
        self._slab = cpu_memory.zeros((places, self.record_bytes), torch.uint8)
        self._keys = torch.full((places,), cpu_cache.FREE, dtype=torch.int64)
        self._times = torch.zeros(places, dtype=torch.int64)
        self._counts = torch.zeros(places, dtype=torch.int64)
        self._dirty = torch.zeros(places, dtype=torch.bool)
        self._now = 0
        self._lock = threading.Lock()
        self._counted = Traffic()

    @property
    def rows(self) -> int:
        """How many records there is room for."""
        return len(self._keys)

    @property
    @override
    def nbytes(self) -> int:
        own = (self._slab, self._keys, self._times, self._counts, self._dirty)
        return sum(t.nbytes for t in own) + self.below.nbytes

    @property
    @override
    def traffic(self) -> Traffic:
        return self._counted + self.below.traffic

    @override
    def read(self, slots: Tensor, out: Tensor, *, keep: bool = True) -> Tensor:
        with self._lock:
            places = self._find(slots)
            here = places >= 0
            _copy(self._slab, places, here, out)
            if keep:
                self._now += 1
                self._use(places[here])
                self._counted.hits += int(here.sum())
                self._counted.misses += int((~here).sum())
        if bool(here.all()):
            return here
        missing = (~here).nonzero()[:, 0]
        found = torch.empty(len(missing), self.record_bytes, dtype=torch.uint8)
        there = self.below.read(slots[missing], found, keep=keep)
        missing, found = missing[there], found[there]
        out[missing] = found
        here[missing] = True
        if keep:
            absent, first = _distinct(slots[missing])
            self._insert(absent, found[first], dirty=False)
        return here

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        with self._lock:
            places = self._find(slots)
            here = places >= 0
            self._slab[places[here]] = records[here]
            self._dirty[places[here]] = True
            self._use(places[here])
        if not bool(here.all()):
            self._insert(slots[~here], records[~here], dirty=True)

    @override
    def keys(self) -> Tensor:
        with self._lock:
            own = self._keys[self._keys != cpu_cache.FREE]
        return torch.cat([self.below.keys(), own]).unique()

    @override
    def clear(self) -> None:
        with self._lock:
            self._keys.fill_(cpu_cache.FREE)
            self._dirty.fill_(False)
            self.below.clear()

    @override
    def prefetch(self, slots: Tensor) -> None:
        with self._lock:
            absent = slots[self._find(slots) < 0]
        self.below.prefetch(absent)

    def _find(self, slots: Tensor) -> Tensor:
        out = torch.empty(len(slots), dtype=torch.int64)
        launch(cpu_cache.find, self._keys.numpy(), self._sets, 0, self._ways, slots.numpy(), out.numpy())
        return out

    def _use(self, places: Tensor) -> None:
        cpu_cache.use(self._times.numpy(), self._counts.numpy(), places.numpy(), self._now)

    def _insert(self, slots: Tensor, records: Tensor, *, dirty: bool) -> None:
        """Keep records of distinct slots that are not here; write back what makes room, or finds none."""
        with self._lock:
            places, evicted = torch.empty_like(slots), torch.empty_like(slots)
            state = self._keys.numpy(), self._times.numpy(), self._counts.numpy()
            by_count = self.policy == "lfu"
            where = self._sets, 0, self._ways
            cpu_cache.take(
                *state, *where, by_count, slots.numpy(), self._now, self._now, places.numpy(), evicted.numpy()
            )
            kept = places >= 0
            lost = kept & (evicted >= 0)
            lost[kept] &= self._dirty[places[kept]]
            out_slots, out = evicted[lost], self._slab[places[lost]]
            if dirty and not bool(kept.all()):
                out_slots, out = torch.cat([out_slots, slots[~kept]]), torch.cat([out, records[~kept]])
            # Before anyone can miss it here: it must be there.
            self.below.write(out_slots, out)
            self._slab[places[kept]] = records[kept]
            self._dirty[places[kept]] = dirty


class _Ahead:
    """Records that were read before they were needed: those that exist, by rising slot."""

    def __init__(self, slots: Tensor, records: Tensor) -> None:
        self.slots, order = slots.sort()
        self.records = records[order]
        self.fresh = torch.ones(len(slots), dtype=torch.bool)
        """Which were not written since."""


class ReadAhead(_Over):
    """Records that are slow to read, some of them before they are needed.

    Parameters
    ----------
    below
        Where they are.
    """

    def __init__(self, below: Records) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self._ahead: list[_Ahead] = []
        self._written: list[Tensor] | None = None
        self._count = 0

    @property
    @override
    def nbytes(self) -> int:
        return self.below.nbytes + sum(ahead.records.nbytes for ahead in list(self._ahead))

    @property
    @override
    def traffic(self) -> Traffic:
        return replace(self.below.traffic, ahead=self._count)

    @override
    def prefetch(self, slots: Tensor) -> None:
        slots, _ = _distinct(slots)
        with self._lock:
            self._written = []
        records = torch.empty(len(slots), self.record_bytes, dtype=torch.uint8)
        there = self.below.read(slots, records)
        with self._lock:
            ahead = _Ahead(slots[there], records[there])
            for written in self._written or ():
                _mark(ahead, written)
            self._written = None
            self._ahead = [*self._ahead, ahead][-_MOST_AHEAD:]

    @override
    def read(self, slots: Tensor, out: Tensor, *, keep: bool = True) -> Tensor:
        there = torch.zeros(len(slots), dtype=torch.bool)
        rest = torch.arange(len(slots))
        with self._lock:
            unused: list[_Ahead] = []
            for ahead in self._ahead:
                at, found = positions(ahead.slots, slots[rest])
                found &= ahead.fresh[at] if len(ahead.slots) else False
                out[rest[found]] = ahead.records[at[found]]
                there[rest[found]] = True
                self._count += int(found.sum())
                rest = rest[~found]
                if not bool(found.any()) or not keep:
                    unused.append(ahead)
            self._ahead = unused
        if len(rest):
            found_below = torch.empty(len(rest), self.record_bytes, dtype=torch.uint8)
            below = self.below.read(slots[rest], found_below, keep=keep)
            out[rest[below]] = found_below[below]
            there[rest[below]] = True
        return there

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        with self._lock:
            for ahead in self._ahead:
                _mark(ahead, slots)
            if self._written is not None:
                self._written.append(slots)
        self.below.write(slots, records)

    @override
    def keys(self) -> Tensor:
        return self.below.keys()

    @override
    def clear(self) -> None:
        with self._lock:
            self._ahead.clear()
        self.below.clear()


def _mark(ahead: _Ahead, written: Tensor) -> None:
    """Note which were written after they were read, or while."""
    at, found = positions(ahead.slots, written)
    ahead.fresh[at[found]] = False


def _distinct(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct slots, rising, and where each first stands."""
    ordered, order = slots.sort(stable=True)
    new = torch.ones(len(slots), dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new], order[new]


def _copy(slab: Tensor, places: Tensor, here: Tensor, out: Tensor) -> None:
    if bool(here.all()):
        torch.index_select(slab, 0, places, out=out)
    else:
        out[here] = slab[places[here]]
