"""Read rows as they were at one moment while training changes them.

A copy of all tables would take as much memory again. Instead, a row that changes before the reader has reached it is
copied first. In the first steps these are most rows of a batch, and soon few, because a popular row is copied once.
When the copies reach a limit, training waits until the reader has passed some of them; the time is reported.

A row may change while the reader copies it, and the reader's copy is then torn. Such a row was kept before it changed,
so the kept row replaces the reader's copy.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hotbed.checkpoint.tensor_files import as_bits
from hotbed.machine import apart
from hotbed.ops import cpu_cache
from hotbed.store import DenseStore, LazyStore, RowStore, SelectedArray, SelectedRows, SortedSlots

KEPT_BYTES = 16 << 20
"""Limit of the rows that are kept, by default."""
_BYTES_AT_ONCE = 1 << 20
_RANGES = 16
"""Ranges of an array whose kept rows are freed together."""


class _Kept:
    """Rows of an array before a step changed them, by rising place."""

    def __init__(self, places: Tensor, rows: Tensor) -> None:
        self.places, self.rows = places, rows
        self.first, self.last = int(places[0]), int(places[-1])
        self.nbytes = rows.nbytes + places.nbytes


class _Array:
    """One array of a store, how far it has been read, and what was kept of the rest.

    The place of a row is its position in the array, or its slot if only some rows are saved.
    """

    def __init__(self, values: Tensor | SelectedArray) -> None:
        self.values, self.dtype = values, values.dtype
        self.read_to = 0
        """Rows of lower places have been read."""
        self.kept: list[_Kept] = []
        if isinstance(values, Tensor):
            self.cuts = torch.arange(1, _RANGES, device=values.device) * len(values) // _RANGES
        else:
            self.cuts = values.slots.cuts(_RANGES)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copy the bits of rows ``start … stop − 1`` to the CPU, and return their places."""
        if isinstance(self.values, Tensor):
            # torch cannot index all narrow dtypes
            return as_bits(self.values)[start:stop].to("cpu", copy=True), torch.arange(start, stop)
        slots = self.values.slots[start:stop]
        return as_bits(self.values.read(slots)), slots


class _Marks:
    """A mark for each of some numbers; bits on the CPU, bytes on a device, whose kernels do not set single bits."""

    def __init__(self, count: int, device: torch.device) -> None:
        packed = device.type == "cpu"
        self._marks = torch.zeros(count // 8 + 1 if packed else count, dtype=torch.uint8, device=device)

    def add(self, numbers: Tensor) -> Tensor:
        """Mark numbers ``[n]``, on the CPU −1 for none; return which were not marked before, as ``[n]`` bool."""
        if self._marks.device.type != "cpu":
            new = self._marks[numbers] == 0
            self._marks[numbers] = 1
            return new
        found = np.empty(len(numbers), np.bool_)
        cpu_cache.mark(self._marks.numpy(), numbers.numpy(), found)
        return torch.from_numpy(found)


class Snapshot:
    """Keep the present rows and moments of some stores; `read` them in rising order, then `close` it.

    Until it is closed, only ``update``, ``write`` and ``put`` may write to the stores. ``limit_bytes`` of rows may be
    kept at once, and one megabyte. ``changed`` are the slots to save of each store; None: all rows. ``waited_s`` counts
    seconds that updates were held up, ``most_bytes`` the most bytes that were kept at once; ``is_waiting`` tells
    whether an update waits for room at present.
    """

    def __init__(
        self,
        stores: Iterable[RowStore],
        limit_bytes: int | None = None,
        changed: Mapping[RowStore, SortedSlots] | None = None,
    ) -> None:
        self._limit = KEPT_BYTES if limit_bytes is None else limit_bytes
        self._lock = threading.Condition()
        self._bytes = 0
        self._closed = False
        self.waited_s = 0.0
        self.most_bytes = 0
        self.is_waiting = False
        self.rows = {store: select_rows(store, changed) for store in stores}
        """What is there now, by store."""
        self._arrays: dict[RowStore, dict[str, _Array]] = {
            store: {name: _Array(t) for name, t in list_arrays(rows).items() if len(t)}
            for store, rows in self.rows.items()
        }
        self._marks = {store: _marks_of(store, rows) for store, rows in self.rows.items()}
        for store in self._arrays:
            store.on_change = partial(self._keep, store)

    def read(self, store: RowStore, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start … stop − 1`` of an array, on the CPU; each once, in rising order."""
        array = self._arrays[store][name]
        rows, places = array.read(start, stop)
        with self._lock:
            array.read_to = int(places[-1]) + 1
            first = int(places[0])
            kept = [_between(k, first, array.read_to) for k in array.kept if k.last >= first]
            self._forget(array)
        for own, old in kept:
            rows[torch.searchsorted(places, own.cpu())] = old.cpu()
        return rows.view(array.dtype)

    def close(self) -> None:
        """Forget everything; the stores are free."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            for store in self._arrays:
                store.on_change = None
            self._arrays.clear()
            self._marks.clear()
            self.rows.clear()

    def _keep(self, store: RowStore, slots: Tensor) -> None:
        """Copy the rows at these slots that have neither been read nor kept."""
        start = time.perf_counter()
        with self._lock:
            arrays = self._arrays.get(store, {})
            for name, places, rows in self._unread(store, slots) if arrays else ():
                array = arrays[name]
                unread = places >= array.read_to
                own, old = places[unread], rows[unread]
                # In ranges of places, so that the reader frees one after the other.
                firsts = torch.searchsorted(own, array.cuts).tolist()
                for first, last in pairwise([0, *firsts, len(own)]):
                    if first < last:
                        array.kept.append(_Kept(_copy_apart(own[first:last]), _copy_apart(old[first:last])))
                        self._bytes += array.kept[-1].nbytes
                self.most_bytes = max(self.most_bytes, self._bytes)
                # Nothing has changed yet, so the reader may pass rows of this step meanwhile.
                self.is_waiting = self._bytes > self._limit
                self._lock.wait_for(lambda: self._bytes <= self._limit or self._closed)
                self.is_waiting = False
                if self._closed:
                    break
        self.waited_s += time.perf_counter() - start

    def _unread(self, store: RowStore, slots: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each array's ascending positions and bits of the rows at ``slots`` that were not yielded before."""
        rows, marks = self.rows[store], self._marks[store]
        if isinstance(rows, DenseStore):
            new, arrays = torch.unique(slots[marks.add(slots)]), rows.arrays()
            step = max(_BYTES_AT_ONCE // max(sum(t[:1].nbytes for t in arrays.values()), 1), 1)
            for some in new.split(step):
                for name, positions in rows.positions(some).items():
                    if len(positions) and len(arrays[name]):
                        positions = torch.unique(positions)
                        yield name, positions, as_bits(arrays[name]).index_select(0, positions)
            return
        slots = slots.cpu()
        new = slots[marks.add(rows.all_slots.number(slots))].sort().values
        for some in new.split(rows.rows_at_once):
            for name, own, values in rows.read(some):
                yield name, own, as_bits(values)

    def _forget(self, array: _Array) -> None:
        """Free what was kept of rows that have been read, range by range."""
        remaining = [kept for kept in array.kept if kept.last >= array.read_to]
        self._bytes -= sum(kept.nbytes for kept in array.kept if kept.last < array.read_to)
        array.kept = remaining
        self._lock.notify_all()


def select_rows(store: RowStore, changed: Mapping[RowStore, SortedSlots] | None = None) -> DenseStore | SelectedRows:
    """Return the rows of a store that are to be saved: all that there are, or those that have changed."""
    assert isinstance(store, DenseStore | LazyStore)
    if changed is not None:
        return SelectedRows(store, changed[store])
    return SelectedRows(store, store.existing()) if isinstance(store, LazyStore) else store


def list_arrays(rows: DenseStore | SelectedRows) -> Mapping[str, Tensor | SelectedArray]:
    """Return the arrays that they are in."""
    return rows.arrays() if isinstance(rows, DenseStore) else rows.arrays


def _copy_apart(values: Tensor) -> Tensor:
    """Copy values that stay for many steps; on the CPU to memory that is no part of the heap."""
    if values.device.type != "cpu" or values.nbytes < mmap.PAGESIZE:
        return values.clone()
    memory = np.frombuffer(apart(values.nbytes), np.uint8, values.nbytes)
    return torch.from_numpy(memory).view(values.dtype).view(values.shape).copy_(values)


def _marks_of(store: RowStore, rows: DenseStore | SelectedRows) -> _Marks:
    if isinstance(rows, DenseStore):
        return _Marks(store.slots, store.device)
    return _Marks(rows.all_slots.numbers, torch.device("cpu"))


def _between(kept: _Kept, start: int, stop: int) -> tuple[Tensor, Tensor]:
    bounds = torch.searchsorted(kept.places, torch.tensor([start, stop], device=kept.places.device))
    first, last = bounds.tolist()
    return kept.places[first:last], kept.rows[first:last]
