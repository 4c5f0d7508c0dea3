"""Read a consistent snapshot of rows while training changes them.

A copy of all tables would double the memory. Instead, rows are copied on write: before a row changes that the reader
has not reached, its old value is kept. In the first steps, these are most rows of a batch. Soon there are few, because
popular rows are copied once. If the copies reach a memory limit, training waits until the reader has passed some of
them, and the waiting time is reported.

A row may change while the reader copies it, so that the reader's copy is inconsistent. Such a row was kept before it
changed, so the kept row replaces the reader's copy.
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
"""Default limit of the bytes of kept rows."""
_BYTES_AT_ONCE = 1 << 20
_RANGES = 16
"""Number of ranges of an array. The kept rows of a range are freed together."""


class _Kept:
    """Rows of an array before a step changed them, in ascending order of their positions."""

    def __init__(self, positions: Tensor, rows: Tensor) -> None:
        self.positions, self.rows = positions, rows
        self.first, self.last = int(positions[0]), int(positions[-1])
        self.nbytes = rows.nbytes + positions.nbytes


class _Array:
    """An array of a store, the position of its reader, and the kept rows after this position.

    The position of a row is its index in the array, or its slot if only some rows are saved.
    """

    def __init__(self, values: Tensor | SelectedArray) -> None:
        self.values, self.dtype = values, values.dtype
        self.read_to = 0
        """Rows of lower positions have been read."""
        self.kept: list[_Kept] = []
        if isinstance(values, Tensor):
            self.cuts = torch.arange(1, _RANGES, device=values.device) * len(values) // _RANGES
        else:
            self.cuts = values.slots.cuts(_RANGES)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copy the bits of rows ``start … stop − 1`` to the CPU. Return them and their positions."""
        if isinstance(self.values, Tensor):
            # torch cannot index all low-precision dtypes
            return as_bits(self.values)[start:stop].to("cpu", copy=True), torch.arange(start, stop)
        slots = self.values.slots[start:stop]
        return as_bits(self.values.read(slots)), slots


class _Marks:
    """A set of numbers below a limit. It uses bits on the CPU, and bytes on a device, where kernels cannot set bits."""

    def __init__(self, count: int, device: torch.device) -> None:
        packed = device.type == "cpu"
        self._marks = torch.zeros(count // 8 + 1 if packed else count, dtype=torch.uint8, device=device)

    def add(self, numbers: Tensor) -> Tensor:
        """Add numbers ``[n]``. Return ``[n]`` bool, whether each number is new. On the CPU, −1 is ignored."""
        if self._marks.device.type != "cpu":
            new = self._marks[numbers] == 0
            self._marks[numbers] = 1
            return new
        found = np.empty(len(numbers), np.bool_)
        cpu_cache.mark(self._marks.numpy(), numbers.numpy(), found)
        return torch.from_numpy(found)


class Snapshot:
    """A snapshot of the rows and moments of some stores. Call `read` in ascending order, then `close`.

    Until the snapshot is closed, only ``update``, ``write`` and ``put`` may change the stores.

    Parameters
    ----------
    stores
        The stores.
    limit_bytes
        Upper limit of the bytes of kept rows, which may be exceeded by one megabyte. Default: `KEPT_BYTES`.
    changed
        The slots to save, by store. Default: all rows.

    Attributes
    ----------
    waited_s
        Seconds that updates were blocked.
    most_bytes
        Maximum of the bytes of kept rows.
    is_waiting
        Whether an update is blocked now.
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
        """The rows of the snapshot, by store."""
        self._arrays: dict[RowStore, dict[str, _Array]] = {
            store: {name: _Array(t) for name, t in list_arrays(rows).items() if len(t)}
            for store, rows in self.rows.items()
        }
        self._marks = {store: _marks_of(store, rows) for store, rows in self.rows.items()}
        for store in self._arrays:
            store.on_change = partial(self._keep, store)

    def read(self, store: RowStore, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start … stop − 1`` of an array on the CPU. Read each row once, in ascending order."""
        array = self._arrays[store][name]
        rows, positions = array.read(start, stop)
        with self._lock:
            array.read_to = int(positions[-1]) + 1
            first = int(positions[0])
            kept = [_between(k, first, array.read_to) for k in array.kept if k.last >= first]
            self._free_read(array)
        for own, old in kept:
            rows[torch.searchsorted(positions, own.cpu())] = old.cpu()
        return rows.view(array.dtype)

    def close(self) -> None:
        """Free the kept rows, and stop tracking changes of the stores."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            for store in self._arrays:
                store.on_change = None
            self._arrays.clear()
            self._marks.clear()
            self.rows.clear()

    def _keep(self, store: RowStore, slots: Tensor) -> None:
        """Copy the rows at these slots that have been neither read nor kept."""
        start = time.perf_counter()
        with self._lock:
            arrays = self._arrays.get(store, {})
            for name, positions, rows in self._unread(store, slots) if arrays else ():
                array = arrays[name]
                unread = positions >= array.read_to
                own, old = positions[unread], rows[unread]
                # Split by ranges of positions, so that the reader can free them one by one.
                firsts = torch.searchsorted(own, array.cuts).tolist()
                for first, last in pairwise([0, *firsts, len(own)]):
                    if first < last:
                        array.kept.append(_Kept(_copy_apart(own[first:last]), _copy_apart(old[first:last])))
                        self._bytes += array.kept[-1].nbytes
                self.most_bytes = max(self.most_bytes, self._bytes)
                # The update has not changed any row yet, so the reader may read rows of this step meanwhile.
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

    def _free_read(self, array: _Array) -> None:
        """Free the kept ranges that have been read."""
        remaining = [kept for kept in array.kept if kept.last >= array.read_to]
        self._bytes -= sum(kept.nbytes for kept in array.kept if kept.last < array.read_to)
        array.kept = remaining
        self._lock.notify_all()


def select_rows(store: RowStore, changed: Mapping[RowStore, SortedSlots] | None = None) -> DenseStore | SelectedRows:
    """Return the rows of a store to save: all existing rows, or the changed rows."""
    assert isinstance(store, DenseStore | LazyStore)
    if changed is not None:
        return SelectedRows(store, changed[store])
    return SelectedRows(store, store.existing()) if isinstance(store, LazyStore) else store


def list_arrays(rows: DenseStore | SelectedRows) -> Mapping[str, Tensor | SelectedArray]:
    """Return the arrays of the rows."""
    return rows.arrays() if isinstance(rows, DenseStore) else rows.arrays


def _copy_apart(values: Tensor) -> Tensor:
    """Copy values that are kept for many steps. On the CPU, the copy is outside of the heap."""
    if values.device.type != "cpu" or values.nbytes < mmap.PAGESIZE:
        return values.clone()
    memory = np.frombuffer(apart(values.nbytes), np.uint8, values.nbytes)
    return torch.from_numpy(memory).view(values.dtype).view(values.shape).copy_(values)


def _marks_of(store: RowStore, rows: DenseStore | SelectedRows) -> _Marks:
    if isinstance(rows, DenseStore):
        return _Marks(store.slots, store.device)
    return _Marks(rows.all_slots.numbers, torch.device("cpu"))


def _between(kept: _Kept, start: int, stop: int) -> tuple[Tensor, Tensor]:
    bounds = torch.searchsorted(kept.positions, torch.tensor([start, stop], device=kept.positions.device))
    first, last = bounds.tolist()
    return kept.positions[first:last], kept.rows[first:last]
