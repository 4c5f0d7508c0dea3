"""Cache slow records in faster memory.

`hotbed.store.tiers` stacks the layers that this machine needs when a store is built::

    disk, cache:    CachedRecords ─ ReadAhead ─ FileRecords
    disk, no cache: ReadAhead ─ FileRecords

A record is dirty while only the cache has its newest bytes. It is written to the layer below when it is evicted
(write-back).

A cache may be in a device's memory while the records below are in the host's memory. Then a read synchronizes once, to
get the list of missing records. A write does not synchronize: the list of the records that it did not find, and the
copies of evicted records, arrive during later work. The next use of the cache processes both before it reads the
records below.
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
from hotbed.store.device_selection import PendingSelection, Selection
from hotbed.store.hash_index import distinct, gather_records
from hotbed.store.records import InPlace, Records, Use
from hotbed.store.slot_lists import SortedSlots, UpdatedSlots

WAYS = 32
"""Associativity: positions per set (32, as in Neo's row cache)."""
_SETTLED_BYTES = 4 << 20
"""Bytes of new records that are written together to the layer below."""


def needs_staging(device: torch.device) -> bool:
    """Return whether a device needs copies to access records in the host's memory or in files."""
    return device.type != "cpu"


class CachedRecords(Records):
    """Keep the most used records in a set-associative write-back cache.

    Reads and writes insert records and evict the least used records. Records of the same read or write never evict each
    other: if a set is full of them, further records go to the layer below. On a GPU, all threads must use one stream.
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
        self._set_device(device or below.device)
        ways = min(WAYS, rows)
        positions = -(-rows // ways) * ways
        self._slab = memory.allocate_zeros((positions, self.record_bytes), torch.uint8, self.device)
        free = torch.full((positions,), FREE, dtype=torch.int64, device=self.device)
        self._tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, policy == "lfu")
        # The last element belongs to position −1, which means that a record is not in the cache.
        self._dirty = torch.zeros(positions + 1, dtype=torch.bool, device=self.device)
        self._now = 0
        self._is_changed = False  # whether any record was ever dirty
        self._written: tuple[PendingSelection, Tensor] | None = None
        self._leaving: list[memory.HostCopy] = []
        self._lock = threading.Lock()
        self._ends = torch.tensor(spans, dtype=torch.int64).cumsum(0)
        self.served = torch.zeros(len(spans), 2, dtype=torch.int64)

    def _set_device(self, device: torch.device) -> None:
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
        """Capacity in records."""
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
    def read_or_list(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Selection:
        kernels = self.ops
        with self._lock:
            self._insert_written()
            positions = kernels.cache_find(self._tags, slots)
            kernels.cache_read(self._slab, positions, out)
            if use == "lookup":  # an update does not count as a use, because a lookup precedes it
                self._now += 1
                kernels.cache_use(self._tags, positions, self._now)
            missing = self._select(positions < 0, slots).wait()
            self._write_back()
        if use == "lookup":
            self._count(slots, missing)
        if not len(missing.at):
            return missing
        found = self._staging(len(missing.slots))
        there = self.below.read(missing.slots, found, use=use)
        numbers = there.nonzero()[:, 0]
        absent = missing.subset((~there).nonzero()[:, 0])
        if not len(numbers):
            return absent
        if len(absent.at):
            missing = missing.subset(numbers)
            found = torch.index_select(found, 0, numbers, out=self._staging(len(numbers)))
        if self._is_apart:
            self.counted.to_device_bytes += found.nbytes
        records = found.to(self.device, non_blocking=True)
        kernels.cache_write(out, missing.at, records)
        if use != "once":
            kept, first = distinct(missing.slots)
            if len(first) < len(missing.slots) or not bool((first[1:] > first[:-1]).all()):
                records = self._gather(records, memory.to_device(first, self.device))
            with self._lock:
                self._insert_written()  # first, because these records are newer than those just read
                self._insert(kept, records, dirty=False)
                self._write_back_on_host()
        return absent

    def _count(self, slots: Tensor, missing: Selection) -> None:
        """Count the hits and misses of a lookup."""
        self.counted.hits += len(slots) - len(missing.at)
        self.counted.misses += len(missing.at)
        if len(self.served) and self.device.type == "cpu":  # on a device this would take five kernels
            hit_or_missed = torch.bucketize(slots, self._ends, right=True).mul_(2)
            hit_or_missed[missing.at] += 1
            self.served += torch.bincount(hit_or_missed, minlength=self.served.numel()).view(-1, 2)

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        kernels = self.ops
        with self._lock:
            self._insert_written()
            self._write_back(but_last=1)  # the last copy may still be running
            positions = kernels.cache_find(self._tags, slots)
            kernels.cache_write(self._slab, positions, records)
            self._dirty[positions] = self._is_changed = True
            self._written = self._select(positions < 0, slots), records
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
            positions = self.ops.cache_find(self._tags, slots)
            self._dirty[positions] = self._is_changed = True
            yield InPlace(self._slab, positions)

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
                    positions = (start + at).to(self.device)
                    self.below.write(keys[at], self._gather(self._slab, positions).cpu())
                    self._dirty[positions] = False
        self.below.settle()

    @override
    def slots(self) -> SortedSlots:
        self.settle()
        return self.below.slots()

    @override
    def update_collector(self) -> UpdatedSlots:
        self.settle()
        return self.below.update_collector()

    @override
    def clear(self) -> None:
        self.forget()
        self.below.clear()

    def forget(self, slots: Tensor | None = None) -> None:
        """Drop the records of these slots, or all, without writing them, because the layer below has changed."""
        with self._lock:
            if slots is None:
                self._written, self._leaving = None, []
                self._tags.keys.fill_(FREE)
                self._dirty.fill_(False)
                return
            self._insert_written()
            self._write_back(but=slots)
            positions = self.ops.cache_find(self._tags, slots.to(self.device))
            positions = positions[positions >= 0]
            self._tags.keys[positions] = FREE
            self._dirty[positions] = False

    @override
    def prefetch(self, slots: Tensor) -> None:
        with self._lock:
            missing = self._select(self.ops.cache_find(self._tags, slots) < 0, slots)
        self.below.prefetch(missing.wait().slots)

    @override
    def to(self, device: torch.device) -> None:
        if self._on_host:
            return
        with self._lock:
            self._insert_written()
            self._write_back()
            self._set_device(device)
            keys, times, counts = (t.to(device) for t in (self._tags.keys, self._tags.times, self._tags.counts))
            self._tags = replace(self._tags, keys=keys, times=times, counts=counts)
            self._slab, self._dirty = self._slab.to(device), self._dirty.to(device)

    def _select(self, mask: Tensor, slots: Tensor) -> PendingSelection:
        return PendingSelection(mask, slots, is_apart=self._is_apart)

    def _staging(self, count: int) -> Tensor:
        return memory.staging((count, self.record_bytes), torch.uint8, self.device)

    def _gather(self, records: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), self.record_bytes, dtype=torch.uint8, device=self.device)
        self.ops.cache_read(records, at, out)
        return out

    # -- called with the lock held ---------------------------------------------------------------------------------

    def _insert_written(self) -> None:
        """Insert the records of the last write that were not in the cache."""
        if self._written is not None:
            listing, records = self._written
            missing = listing.wait()
            if len(missing.at):
                self._insert(missing.slots, self._gather(records, missing.at), dirty=True)
            self._written = None
            self._write_back_on_host()

    def _insert(self, slots: Tensor, records: Tensor, *, dirty: bool) -> None:
        """Insert records of distinct slots, which are on the host. Evicted and uninserted records leave the cache."""
        kernels, wanted = self.ops, memory.to_device(slots, self.device)
        old = records.clone() if self._is_apart and (dirty or self._is_changed) else records
        if not dirty:  # a record that was read without the lock may have been inserted and changed meanwhile
            wanted = wanted.masked_fill(kernels.cache_find(self._tags, wanted) >= 0, FREE)
        positions, evicted = kernels.cache_take(self._tags, wanted, self._now)
        leaving = torch.where(self._dirty[positions], evicted, FREE)
        if dirty:
            leaving = torch.where(positions < 0, wanted, leaving)
        if self._is_changed or dirty:
            self._leave(leaving, positions, old)
        kernels.cache_write(self._slab, positions, records)
        self._dirty[positions] = dirty

    def _leave(self, slots: Tensor, positions: Tensor, records: Tensor) -> None:
        """Start copies of the leaving records; `_write_back` writes them to the layer below before the next read there.

        For a position of the cache, the leaving record is the one stored there, and it overwrites the row of
        ``records``. For position −1, it is the row of ``records`` itself. Rows with slot `FREE` do not leave.
        """
        if not self._is_apart:
            leaving = (slots != FREE).nonzero()[:, 0]
            if not len(leaving):
                return
            slots, positions, records = slots[leaving], positions[leaving], self._gather(records, leaving)
        self.ops.cache_read(self._slab, positions, records)
        self._leaving.append(memory.HostCopy(slots, records))

    def _write_back_on_host(self) -> None:
        """Write leaving records now if they are on the host already."""
        if not self._is_apart:
            self._write_back()

    def _write_back(self, but: Tensor | None = None, but_last: int = 0) -> None:
        """Write leaving records to the layer below, except the slots ``but`` and the last ``but_last`` copies."""
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
