"""Put a cache over slow records; `hotbed.store.read_ahead` is another layer.

`hotbed.store.tiers` stacks them once, when a store is built, and only those that this machine needs::

    disk, cache:    CachedRecords ─ ReadAhead ─ FileRecords
    disk, no cache: ReadAhead ─ FileRecords

A record is dirty while only the cache has its newest bytes; it is written to the layer below when another takes its
place (write-back).

A cache in a device's memory is apart from the records below, which are the host's: a read waits for the list of what is
not here. What a write did not find is listed, and what is evicted copied, while the host goes on; both are looked at
when the cache is used again, and by a read before it asks the records below.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.config.parallel_memory import CachePolicy
from hotbed.ops import BackendName, CacheTags
from hotbed.ops.layout import FREE
from hotbed.store import memory
from hotbed.store.hash_index import distinct, gather_records
from hotbed.store.listing import Listed, Listing
from hotbed.store.records import InPlace, Records, Use
from hotbed.store.rising import RisingSlots
from hotbed.store.touched import Touched

WAYS = 32
"""Places of a set (Neo's row cache)."""
_SETTLED_BYTES = 4 << 20
"""Bytes of new records that go to the layer below together."""


def needs_staging(device: torch.device) -> bool:
    """Whether a device reads and writes records of the host's memory or of files through copies."""
    return device.type != "cpu"


class CachedRecords(Records):
    """Keep the most used records in a set-associative cache, written back to the records below.

    Reads and writes insert records in place of the least used ones. Records of the same read or write never evict each
    other; records without a place go to the records below. On a GPU, threads must use one stream.
    """

    def __init__(
        self,
        below: Records,  # all records, on the host
        rows: int,  # capacity, rounded up to whole sets
        policy: CachePolicy = "lru",  # "lru" evicts the least recently, "lfu" the least often used record of a set
        *,
        # rows of each table; a cache on the host counts their hits and misses in `served` [spans, 2]
        spans: Sequence[int] = (),
        device: torch.device | None = None,  # of the cache, and so of its arguments and results; None: the host
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(below.record_bytes)
        self.backend_name: BackendName = backend
        self.below, self._on_host, self.reads_ahead = below, device is None, below.reads_ahead
        self._place(device or below.device)
        ways = min(WAYS, rows)
        places = -(-rows // ways) * ways
        self._slab = memory.allocate_zeros((places, self.record_bytes), torch.uint8, self.device)
        free = torch.full((places,), FREE, dtype=torch.int64, device=self.device)
        self._tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, policy == "lfu")
        self._dirty = torch.zeros(places + 1, dtype=torch.bool, device=self.device)  # the last is of place −1: none
        self._now = 0
        self._is_changed = False  # whether any record ever was dirty
        self._written: tuple[Listing, Tensor] | None = None
        self._leaving: list[memory.Arriving] = []
        self._lock = threading.Lock()
        self._ends = torch.tensor(spans, dtype=torch.int64).cumsum(0)
        self.served = torch.zeros(len(spans), 2, dtype=torch.int64)

    def _place(self, device: torch.device) -> None:
        self.device, self._is_apart = device, needs_staging(device) and not self._on_host

    @override
    def layers(self) -> list[Records]:
        return [self, *self.below.layers()]

    @property
    def ops(self) -> ops.Backend:
        """The kernels that serve this cache."""
        return ops.select(self.device, self.backend_name)

    @property
    def rows(self) -> int:
        """How many records there is room for."""
        return len(self._slab)

    @property
    @override
    def nbytes(self) -> int:
        kept = [self._slab, self._tags.keys, self._tags.times, self._tags.counts, self._dirty, *self._leaving]
        return sum(t.nbytes for t in kept) + (self._written[1].nbytes if self._written else 0)

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        absent = self.read_or_list(slots, out, use=use)
        return torch.ones(len(slots), dtype=torch.bool, device=self.device).index_fill_(0, absent.at, False)

    @override
    def read_or_list(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Listed:
        kernels = self.ops
        with self._lock:
            self._insert_written()
            places = kernels.cache_find(self._tags, slots)
            kernels.cache_read(self._slab, places, out)
            if use == "lookup":  # updates are of what has been looked up
                self._now += 1
                kernels.cache_use(self._tags, places, self._now)
            missing = self._listing(places < 0, slots).wait()
            self._write_back()
        if use == "lookup":
            self._count(slots, missing)
        if not len(missing.at):
            return missing
        found = self._staging(len(missing.slots))
        there = self.below.read(missing.slots, found, use=use)
        numbers = there.nonzero()[:, 0]
        absent = missing.picked((~there).nonzero()[:, 0])
        if not len(numbers):
            return absent
        if len(absent.at):
            missing = missing.picked(numbers)
            found = torch.index_select(found, 0, numbers, out=self._staging(len(numbers)))
        if self._is_apart:
            self.counted.to_device_bytes += found.nbytes
        records = found.to(self.device, non_blocking=True)
        kernels.cache_write(out, missing.at, records)
        if use != "once":
            kept, first = distinct(missing.slots)
            if len(first) < len(missing.slots) or not bool((first[1:] > first[:-1]).all()):
                records = self._gathered(records, memory.to_device(first, self.device))
            with self._lock:
                self._insert_written()  # or an older record would be kept of what was written meanwhile
                self._insert(kept, records, dirty=False)
                self._write_back_on_host()
        return absent

    def _count(self, slots: Tensor, missing: Listed) -> None:
        """Count the hits and misses of a lookup."""
        self.counted.hits += len(slots) - len(missing.at)
        self.counted.misses += len(missing.at)
        if len(self.served) and self.device.type == "cpu":  # a device would have to launch five kernels
            hit_or_missed = torch.bucketize(slots, self._ends, right=True).mul_(2)
            hit_or_missed[missing.at] += 1
            self.served += torch.bincount(hit_or_missed, minlength=self.served.numel()).view(-1, 2)

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        kernels = self.ops
        with self._lock:
            self._insert_written()
            self._write_back(but_last=1)  # which may still be on its way
            places = kernels.cache_find(self._tags, slots)
            kernels.cache_write(self._slab, places, records)
            self._dirty[places] = self._is_changed = True
            self._written = self._listing(places < 0, slots), records
            if not self._is_apart:
                self._insert_written()

    @override
    @contextmanager
    def changed_in_place(self, slots: Tensor) -> Generator[InPlace | None]:
        if self.device.type != "cpu":
            yield None
            return
        with self._lock:
            self._insert_written()
            places = self.ops.cache_find(self._tags, slots)
            self._dirty[places] = self._is_changed = True
            yield InPlace(self._slab, places)

    @override
    def settle(self) -> None:
        with self._lock:
            self._insert_written()
            self._write_back()
            step = max(_SETTLED_BYTES // self.record_bytes, 1)
            for start in range(0, len(self._slab), step):
                keys = self._tags.keys[start : start + step].cpu()
                dirty = self._dirty[start : start + len(keys)].cpu()
                at = (dirty & (keys != FREE)).nonzero()[:, 0]
                at = at[~self.below.has(keys[at])]
                if len(at):
                    places = (start + at).to(self.device)
                    self.below.write(keys[at], self._gathered(self._slab, places).cpu())
                    self._dirty[places] = False
        self.below.settle()

    @override
    def slots(self) -> RisingSlots:
        self.settle()
        return self.below.slots()

    @override
    def touched(self) -> Touched:
        self.settle()
        return self.below.touched()

    @override
    def clear(self) -> None:
        self.forget()
        self.below.clear()

    def forget(self, slots: Tensor | None = None) -> None:
        """Drop the records of these slots, or all, unwritten: those below are other ones now."""
        with self._lock:
            if slots is None:
                self._written, self._leaving = None, []
                self._tags.keys.fill_(FREE)
                self._dirty.fill_(False)
                return
            self._insert_written()
            self._write_back(but=slots)
            places = self.ops.cache_find(self._tags, slots.to(self.device))
            places = places[places >= 0]
            self._tags.keys[places] = FREE
            self._dirty[places] = False

    @override
    def prefetch(self, slots: Tensor) -> None:
        with self._lock:
            missing = self._listing(self.ops.cache_find(self._tags, slots) < 0, slots)
        self.below.prefetch(missing.wait().slots)

    @override
    def to(self, device: torch.device) -> None:
        if self._on_host:
            return
        with self._lock:
            self._insert_written()
            self._write_back()
            self._place(device)
            keys, times, counts = (t.to(device) for t in (self._tags.keys, self._tags.times, self._tags.counts))
            self._tags = replace(self._tags, keys=keys, times=times, counts=counts)
            self._slab, self._dirty = self._slab.to(device), self._dirty.to(device)

    def _listing(self, mask: Tensor, slots: Tensor) -> Listing:
        return Listing(mask, slots, is_apart=self._is_apart)

    def _staging(self, count: int) -> Tensor:
        return memory.staging((count, self.record_bytes), torch.uint8, self.device)

    def _gathered(self, records: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), self.record_bytes, dtype=torch.uint8, device=self.device)
        self.ops.cache_read(records, at, out)
        return out

    # -- with the lock ---------------------------------------------------------------------------------------------

    def _insert_written(self) -> None:
        """Keep what was written last of what was not here."""
        if self._written is not None:
            listing, records = self._written
            missing = listing.wait()
            if len(missing.at):
                self._insert(missing.slots, self._gathered(records, missing.at), dirty=True)
            self._written = None
            self._write_back_on_host()

    def _insert(self, slots: Tensor, records: Tensor, *, dirty: bool) -> None:
        """Keep records of distinct slots, on the host; what is evicted, or finds no place, leaves."""
        kernels, wanted = self.ops, memory.to_device(slots, self.device)
        old = records.clone() if self._is_apart and (dirty or self._is_changed) else records
        if not dirty:  # what was read without the lock may be here by now, perhaps changed
            wanted = wanted.masked_fill(kernels.cache_find(self._tags, wanted) >= 0, FREE)
        places, evicted = kernels.cache_take(self._tags, wanted, self._now)
        leaving = torch.where(self._dirty[places], evicted, FREE)
        if dirty:
            leaving = torch.where(places < 0, wanted, leaving)
        if self._is_changed or dirty:
            self._leave(leaving, places, old)
        kernels.cache_write(self._slab, places, records)
        self._dirty[places] = dirty

    def _leave(self, slots: Tensor, places: Tensor, records: Tensor) -> None:
        """Send records to those below: of places that are about to be taken, which overwrite these; of place −1 these.

        Those of slot `FREE` stay. Before anyone can miss what leaves, `_write_back` writes it.
        """
        if not self._is_apart:
            leaving = (slots != FREE).nonzero()[:, 0]
            if not len(leaving):
                return
            slots, places, records = slots[leaving], places[leaving], self._gathered(records, leaving)
        self.ops.cache_read(self._slab, places, records)
        self._leaving.append(memory.Arriving(slots, records))

    def _write_back_on_host(self) -> None:
        """Write what left at once where nothing has to arrive first."""
        if not self._is_apart:
            self._write_back()

    def _write_back(self, but: Tensor | None = None, but_last: int = 0) -> None:
        """Write what left to the records below, but for these slots, and for what left last."""
        while len(self._leaving) > but_last:
            slots, records = self._leaving[0].wait()
            written = slots != FREE
            if but is not None:
                written &= ~torch.isin(slots, but.cpu())
            numbers = written.nonzero()[:, 0]
            sent = records.nbytes if self._is_apart else 0
            if len(numbers) < len(slots):
                slots, records = slots[numbers], gather_records(records, numbers)
            if len(slots):
                self.below.write(slots, records)
            self.counted.from_device_bytes += sent
            self._leaving.pop(0)
