"""Number records with a hash table by slot, and keep them in memory. `hotbed.store.file_records` keeps them in a file.

Only updated slots have a record, so a table may have more rows than fit into memory. Records are numbered in the order
in which they were added. A hash table maps each slot to the number of its record::

    write slots [700, 5], then [5, 9]   →   700: number 0, 5: number 1 (overwritten), 9: number 2
    slab                                    | record of 700 | record of 5 | record of 9 |
"""

from __future__ import annotations

import mmap
import sys
import threading
from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.ops import cpu_cache
from hotbed.ops.cpu_runtime import launch
from hotbed.store import memory
from hotbed.store.records import InPlace, Records, Use
from hotbed.store.slot_lists import PIECE, SortedSlots, UpdatedSlots, are_set

_FIRST = 1 << 10
"""Capacity of a new hash table, a power of two."""
_INTERVALS = 1 << 16
"""Number of intervals of a histogram of slots, which divides a list of slots into pieces."""
_WAITING = 1 << 18
"""Slots that may wait to be marked, so that not every step synchronizes with the device."""
_NORESERVE = 0x4000  # Linux: reserve no swap space for memory that is never written


class KeyedRecords(Records):
    """Number records by slot. Any thread may `read` while one thread writes."""

    def __init__(self, record_bytes: int) -> None:
        super().__init__(record_bytes)
        self._lock = threading.Lock()
        self._forget()

    def __len__(self) -> int:
        return self._count

    @property
    def key_bytes(self) -> int:
        """Bytes of memory of slots and numbers."""
        return self._keys.nbytes + self._table_keys.nbytes + self._table_numbers.nbytes

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        numbers = self.numbers_of(slots)
        there = numbers >= 0
        if self._count:
            self._read(numbers, out, use)
        return there

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        if not len(slots):
            return
        numbers = self.numbers_of(slots)
        new = (numbers < 0).nonzero()[:, 0]
        self._make_room(self._count + len(new))
        numbers[new] = torch.arange(self._count, self._count + len(new))
        self._write(numbers, records)
        if len(new):
            self._add(slots[new])  # last, so that a thread that finds a record can read it

    @override
    def slots(self) -> SortedSlots:
        return RecordSlots(self, self._count)

    @override
    def update_collector(self) -> UpdatedSlots:
        return UpdatedRecords(self)

    @override
    def has(self, slots: Tensor) -> Tensor:
        return self.numbers_of(slots) >= 0

    def numbered(self, count: int) -> Tensor:
        """Return the slots of the first ``count`` records, in the order of their numbers."""
        return self._keys[:count]

    def numbers_of(self, slots: Tensor) -> Tensor:
        """Return the numbers of the records of slots ``[n]``, or −1 for slots without a record."""
        numbers = torch.empty(len(slots), dtype=torch.int64)
        with self._lock:
            launch(
                cpu_cache.find_numbers,
                self._table_keys.numpy(),
                self._table_numbers.numpy(),
                slots.numpy(),
                numbers.numpy(),
            )
        return numbers

    def _add(self, slots: Tensor) -> None:
        """Number distinct slots that have no record yet."""
        with self._lock:
            first, count = self._count, self._count + len(slots)
            if count > len(self._keys):
                grown = torch.empty(max(count, 2 * len(self._keys)), dtype=torch.int64)
                grown[:first] = self._keys[:first]
                self._keys = grown
            self._keys[first:count] = slots
            size = len(self._table_keys)
            if 2 * count > size:  # at most half full, so that searches stay short
                while 2 * count > size:
                    size *= 2
                self._table_keys = torch.full((size,), cpu_cache.EMPTY, dtype=torch.int64)
                self._table_numbers = torch.empty(size, dtype=torch.int64)
                cpu_cache.add_numbers(
                    self._table_keys.numpy(), self._table_numbers.numpy(), self._keys[:first].numpy(), 0
                )
            cpu_cache.add_numbers(self._table_keys.numpy(), self._table_numbers.numpy(), slots.numpy(), first)
            self._count = count

    def _forget(self) -> None:
        """Delete all slots and numbers."""
        with self._lock:
            self._count = 0
            self._keys = torch.empty(_FIRST // 2, dtype=torch.int64)
            self._table_keys = torch.full((_FIRST,), cpu_cache.EMPTY, dtype=torch.int64)
            self._table_numbers = torch.empty(_FIRST, dtype=torch.int64)

    @abstractmethod
    def _make_room(self, count: int) -> None:
        """Prepare for ``count`` records."""

    @abstractmethod
    def _read(self, numbers: Tensor, out: Tensor, use: Use) -> None:
        """Copy the records with these numbers to ``out``. Rows with number −1 are not changed."""

    @abstractmethod
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        """Overwrite or append the records with these numbers."""


class MemoryRecords(KeyedRecords):
    """Keep records of at most ``slots`` slots in memory, which is allocated on first use."""

    def __init__(self, record_bytes: int, slots: int) -> None:
        super().__init__(record_bytes)
        self._most = max(min(slots, memory.host_bytes() // record_bytes), 1)
        self.clear()

    @property
    @override
    def nbytes(self) -> int:
        return self._count * self.record_bytes + self.key_bytes

    @override
    def clear(self) -> None:
        self._forget()
        # The system allocates a page on the first write to it. Huge pages would allocate memory for missing rows.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sys.platform == "linux" else 0)
        slab = np.frombuffer(mmap.mmap(-1, self._most * self.record_bytes, flags=flags), np.uint8)
        self._slab = torch.from_numpy(slab).view(self._most, self.record_bytes)

    @override
    @contextmanager
    def changed_in_place(self, slots: Tensor) -> Generator[InPlace | None]:
        yield InPlace(self._slab, self.numbers_of(slots))

    @override
    def _make_room(self, count: int) -> None:
        if count > self._most:
            raise StoreError(
                f"rows with moments in the host's memory: got {count:,} of {self.record_bytes:,} bytes each, expected "
                f"at most {memory.host_bytes():,} bytes. Use tier 'disk' for the table, or more ranks"
            )

    @override
    def _read(self, numbers: Tensor, out: Tensor, use: Use) -> None:
        cpu_cache.read_rows(self._slab, numbers, out)

    @override
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        cpu_cache.write_rows(self._slab, numbers, records)


class RecordSlots(SortedSlots):
    """The slots of the first ``count`` records, or of the marked records among them.

    Later records do not change the list. Each record below ``all_from`` is marked if its bit in ``bits`` is set. All
    records from ``all_from`` on are marked.
    """

    def __init__(self, records: KeyedRecords, count: int, bits: Tensor | None = None, all_from: int = 0) -> None:
        self._records, self._count, self._all_from = records, count, all_from
        self._bits = torch.zeros(1, dtype=torch.uint8) if bits is None else bits
        keys = records.numbered(count)
        end = int(keys.max()) + 1 if count else 0
        pieces = list(self._cut(0, end)) if count else []
        super().__init__([*(start for start, _ in pieces), end], [slots for _, slots in pieces])

    def _cut(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Divide the slots in ``low … high − 1`` into pieces. Yield the start and the number of slots of each."""
        width = -(-(high - low) // (_INTERVALS if self._count > PIECE else 1))
        counts = np.zeros(-(-(high - low) // width), np.int64)
        keys = self._records.numbered(self._count).numpy()
        cpu_cache.count_keys(keys, self._bits.numpy(), self._all_from, low, high, width, counts)
        begin, total = low, 0
        for i, count in enumerate(counts.tolist()):
            start = low + i * width
            if total and total + count > PIECE:
                yield begin, total
                begin, total = start, 0
            if count > PIECE:
                yield from self._cut(start, min(start + width, high))
                begin = start + width
            else:
                total += count
        if total:
            yield begin, total

    @property
    @override
    def numbers(self) -> int:
        return self._count

    @override
    def number(self, slots: Tensor) -> Tensor:
        numbers = self._records.numbers_of(slots.cpu())
        numbers.masked_fill_(numbers >= self._count, -1)
        if self._all_from:
            is_marked = are_set(self._bits, numbers.clamp(0, self._all_from - 1))
            numbers.masked_fill_((numbers < self._all_from) & ~is_marked, -1)
        return numbers

    @override
    def _read(self, start: int, stop: int, count: int) -> Tensor:
        found = np.empty(count, np.int64)
        keys = self._records.numbered(self._count).numpy()
        cpu_cache.select_keys(keys, self._bits.numpy(), self._all_from, start, stop, found)
        found.sort()
        return torch.from_numpy(found)


class UpdatedRecords(UpdatedSlots):
    """Collect updated slots with one bit per existing record. All later records count as updated."""

    def __init__(self, records: KeyedRecords) -> None:
        self._records, self._count = records, len(records)
        self._bits = torch.zeros(self._count // 8 + 1, dtype=torch.uint8)
        self._waiting: list[Tensor] = []
        self._waiting_slots = 0

    @override
    def add(self, slots: Tensor) -> None:
        self._waiting.append(slots.clone())  # a view would keep its whole tensor in memory
        self._waiting_slots += len(slots)
        if self._waiting_slots > _WAITING:
            self._mark()

    @override
    def slots(self) -> SortedSlots:
        self._mark()
        return RecordSlots(self._records, len(self._records), self._bits.clone(), self._count)

    def _mark(self) -> None:
        if self._waiting:
            numbers = self._records.numbers_of(torch.cat(self._waiting).cpu())
            numbers.masked_fill_(numbers >= self._count, -1)
            cpu_cache.mark(self._bits.numpy(), numbers.numpy(), np.empty(len(numbers), np.bool_))
        self._waiting, self._waiting_slots = [], 0


def find_positions(of: Tensor, wanted: Tensor) -> Tensor:
    """Return the position of each wanted value ``[n]`` in the ascending tensor ``of``, or −1.

    Ascending wanted values are fastest.
    """
    found = torch.empty_like(wanted)
    cpu_cache.find_rising(of.numpy(), wanted.numpy(), found.numpy())
    return found


def gather_records(records: Tensor, at: Tensor) -> Tensor:
    """Return a copy of the records ``[m, bytes]`` at the positions ``[n]``, using all threads."""
    out = torch.empty(len(at), records.shape[1], dtype=torch.uint8)
    cpu_cache.read_rows(records, at, out)
    return out


def distinct(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct slots, ascending, and the first position of each."""
    ordered, order = slots.sort(stable=True)
    new = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
    new[1:] = ordered[1:] != ordered[:-1]
    at = new.nonzero()[:, 0]
    return ordered[at], order[at]
