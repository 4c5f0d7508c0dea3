"""Put layers over slow records: a cache, and staging for a device; `hotbed.store.read_ahead` is a third.

`hotbed.store.tiers` stacks them once, when a store is built, and only those that this machine needs::

    disk, cache on a GPU:   CachedRecords ─ DeviceStaging ─ ReadAhead ─ FileRecords
    disk, cache on the CPU: CachedRecords ─ ReadAhead ─ FileRecords
    disk, no cache:         ReadAhead ─ FileRecords

A record is dirty while only the cache has its newest bytes; it is written to the layer below when another takes its
place (write-back).
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
from hotbed.config.places import CachePolicy
from hotbed.ops import BackendName, CacheTags
from hotbed.ops.layout import FREE
from hotbed.store import memory
from hotbed.store.keyed import distinct
from hotbed.store.records import InPlace, Records, RecordsAbove, Use

WAYS = 32
"""Places of a set (Neo's row cache)."""


def needs_staging(device: torch.device) -> bool:
    """Whether a device reads and writes records of the host's memory or of files through copies."""
    return device.type != "cpu"


class CachedRecords(Records):
    """Keep the records that are used most in a set-associative cache, written back to the records below.

    What is read or written is kept, in the place of what was used least; records of the same read or write never make
    room for each other, and what finds no place goes to the records below. On a GPU, threads must use one stream.

    Parameters
    ----------
    below
        Where all records are, on the host.
    rows
        How many of them to keep; rounded up to whole sets.
    policy
        ``"lru"`` evicts the least recently, ``"lfu"`` the least often used record of a set.
    device
        Where the cache is, so where records are given and taken; None: on the host, whatever device computes.
    backend
        Kernels to use; ``"auto"`` goes by device.
    spans
        Rows of each table, whose hits and misses a cache on the host counts in ``served`` ``[spans, 2]``.
    """

    def __init__(
        self,
        below: Records,
        rows: int,
        policy: CachePolicy = "lru",
        *,
        spans: Sequence[int] = (),
        device: torch.device | None = None,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(below.record_bytes)
        self.backend_name: BackendName = backend
        self._on_host = device is None
        self._place(below, device or below.device)
        ways = min(WAYS, rows)
        places = -(-rows // ways) * ways
        self._slab = memory.zeros((places, self.record_bytes), torch.uint8, self.device)
        free = torch.full((places,), FREE, dtype=torch.int64, device=self.device)
        self._tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, policy == "lfu")
        self._dirty = torch.zeros(places + 1, dtype=torch.bool, device=self.device)  # the last is of place −1: none
        self._now = 0
        self._lock = threading.Lock()
        self._ends = torch.tensor(spans, dtype=torch.int64).cumsum(0)
        self.served = torch.zeros(len(spans), 2, dtype=torch.int64)

    def _place(self, below: Records, device: torch.device) -> None:
        """Put the cache on a device, over records of the host."""
        self.device = device
        self.below = DeviceStaging(below, device) if needs_staging(device) and not self._on_host else below
        self.reads_ahead = below.reads_ahead

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
        return sum(t.nbytes for t in (self._slab, self._tags.keys, self._tags.times, self._tags.counts, self._dirty))

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        kernels = self.ops
        with self._lock:
            places = kernels.cache_find(self._tags, slots)
            kernels.cache_read(self._slab, places, out)
            if use == "lookup":  # updates are of what has been looked up
                self._now += 1
                kernels.cache_use(self._tags, places, self._now)
        here = places >= 0
        missing = (~here).nonzero()[:, 0]
        if use == "lookup":
            self.counted.hits += len(slots) - len(missing)
            self.counted.misses += len(missing)
            if len(self.served) and self.device.type == "cpu":  # a device would have to launch five kernels
                hit_or_missed = torch.bucketize(slots, self._ends, right=True).mul_(2).add_(~here)
                self.served += torch.bincount(hit_or_missed, minlength=self.served.numel()).view(-1, 2)
        if not len(missing):
            return here
        found = torch.empty(len(missing), self.record_bytes, dtype=torch.uint8, device=self.device)
        there = self.below.read(slots[missing], found, use=use).nonzero()[:, 0]
        if not len(there):
            return here
        if len(there) < len(missing):
            missing, found = missing[there], found[there]
        kernels.cache_write(out, missing, found)
        here[missing] = True
        if use != "once":
            absent, first = distinct(slots[missing])
            self._insert(absent, self._gathered(found, first), dirty=False)
        return here

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        kernels = self.ops
        with self._lock:
            places = kernels.cache_find(self._tags, slots)
            kernels.cache_write(self._slab, places, records)
            missing = (places < 0).nonzero()[:, 0]
            self._dirty[places] = True
        if len(missing):
            self._insert(slots[missing], self._gathered(records, missing), dirty=True)

    @override
    @contextmanager
    def changed_in_place(self, slots: Tensor) -> Generator[InPlace | None]:
        if self.device.type != "cpu":
            yield None
            return
        with self._lock:
            places = self.ops.cache_find(self._tags, slots)
            self._dirty[places] = True
            yield InPlace(self._slab, places)

    @override
    def keys(self) -> Tensor:
        with self._lock:
            own = self._tags.keys[self._tags.keys != FREE].cpu()
        return torch.cat([self.below.keys(), own]).unique()

    @override
    def clear(self) -> None:
        self.forget()
        self.below.clear()

    def forget(self, slots: Tensor | None = None) -> None:
        """Drop the records of these slots, or all, unwritten: those below are other ones now."""
        with self._lock:
            if slots is None:
                self._tags.keys.fill_(FREE)
                self._dirty.fill_(False)
                return
            places = self.ops.cache_find(self._tags, slots.to(self.device))
            places = places[places >= 0]
            self._tags.keys[places] = FREE
            self._dirty[places] = False

    @override
    def prefetch(self, slots: Tensor) -> None:
        with self._lock:
            places = self.ops.cache_find(self._tags, slots)
        self.below.prefetch(slots[places < 0])

    @override
    def to(self, device: torch.device) -> None:
        if self._on_host:
            return
        with self._lock:
            self._place(self.below.below if isinstance(self.below, DeviceStaging) else self.below, device)
            keys, times, counts = (t.to(device) for t in (self._tags.keys, self._tags.times, self._tags.counts))
            self._tags = replace(self._tags, keys=keys, times=times, counts=counts)
            self._slab, self._dirty = self._slab.to(device), self._dirty.to(device)

    def _gathered(self, records: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), self.record_bytes, dtype=torch.uint8, device=self.device)
        self.ops.cache_read(records, at, out)
        return out

    def _insert(self, slots: Tensor, records: Tensor, *, dirty: bool) -> None:
        """Keep records of distinct slots that are not here; write back what is evicted, or finds no place."""
        kernels = self.ops
        with self._lock:
            if not dirty:  # what was read without the lock may be here by now, perhaps changed
                absent = (kernels.cache_find(self._tags, slots) < 0).nonzero()[:, 0]
                if len(absent) < len(slots):
                    slots, records = slots[absent], self._gathered(records, absent)
            places, evicted = kernels.cache_take(self._tags, slots, self._now)
            leaves = (evicted != FREE) & self._dirty[places]
            leaving = (leaves | (places < 0) if dirty else leaves).nonzero()[:, 0]
            if len(leaving):  # written below before anyone can miss it here
                at, out = places[leaving], self._gathered(records, leaving)
                kernels.cache_read(self._slab, at, out)  # but for what finds no place
                self.below.write(torch.where(at < 0, slots[leaving], evicted[leaving]), out)
            kernels.cache_write(self._slab, places, records)
            self._dirty[places] = dirty


class DeviceStaging(RecordsAbove):
    """Copy records between the host, where they are, and a device that reads and writes them.

    Copies go through page-locked memory. Those to the device are asynchronous, those from it wait for the device.

    Parameters
    ----------
    below
        Where the records are.
    device
        Where they are given and taken.
    """

    def __init__(self, below: Records, device: torch.device) -> None:
        super().__init__(below)
        self.device, self.reads_ahead = device, below.reads_ahead

    @property
    @override
    def nbytes(self) -> int:
        return 0

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        found = memory.staging(out.shape, torch.uint8, self.device)
        there = self.below.read(slots.cpu(), found, use=use)
        at = there.nonzero()[:, 0]
        self.counted.to_device_bytes += len(at) * out.shape[1]
        if len(at) == len(there):
            out.copy_(found, non_blocking=True)
        elif len(at):  # only records that were found are copied
            sent = memory.staging((len(at), out.shape[1]), torch.uint8, self.device)
            torch.index_select(found, 0, at, out=sent)
            came = sent.to(self.device, non_blocking=True)
            out.view(torch.int32).index_copy_(0, memory.to_device(at, self.device), came.view(torch.int32))
        return memory.to_device(there, self.device)

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        sent = memory.staging(records.shape, torch.uint8, self.device)
        sent.copy_(records)
        self.counted.from_device_bytes += sent.nbytes
        self.below.write(slots.cpu(), sent)

    @override
    def prefetch(self, slots: Tensor) -> None:
        self.below.prefetch(slots.cpu())
