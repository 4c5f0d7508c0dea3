"""Read rows as they were at one moment, while training goes on to change them.

A copy of all tables would take as much memory again. Instead, before rows change that have not been read yet, they are
copied: at first most of a batch, soon few, because popular rows are copied once. When these copies reach a limit,
training waits until the reader has passed some of them; what it waited is reported.

A reader's copy may be torn where rows change under it. These are rows that were kept before they changed, so putting
those in the place of what was read makes it right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from hotbed.store import DenseStore, LazyStore, PickedArray, PickedRows, RowStore

KEPT_BYTES = 512 << 20
"""Limit of the rows that are kept, by default."""
_RANGES = 16
"""Ranges of an array whose kept rows are freed together."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Kept:
    """Rows of an array before a step changed them, by rising place."""

    def __init__(self, places: Tensor, rows: Tensor) -> None:
        self.places, self.rows = places, rows
        self.first, self.last = int(places[0]), int(places[-1])
        self.nbytes = rows.nbytes + places.nbytes


class _Array:
    """One array of a store: which of its rows nobody has read or kept yet, and what was kept."""

    def __init__(self, tensor: Tensor | PickedArray) -> None:
        # torch cannot index all narrow dtypes
        self.bits = tensor.view(_BITS[tensor.element_size()]) if isinstance(tensor, Tensor) else tensor
        self.dtype = tensor.dtype
        self.pending = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
        self.cuts = torch.arange(1, _RANGES, device=tensor.device) * len(tensor) // _RANGES
        self.kept: list[_Kept] = []


class Snapshot:
    """Keep the present rows and moments of some stores; `read` them in rising order, then `close` it.

    Parameters
    ----------
    stores
        They must not be written to but by ``update``, ``write`` and ``put`` until it is closed.
    limit_bytes
        How many bytes of rows may be kept at once, beside those of one step.
    changed
        Of each store, the slots that are meant, rising ``[n]``; None: all rows.

    Attributes
    ----------
    waited_s
        Seconds that updates were held up, for keeping rows and for room to keep them.
    most_bytes
        Most bytes that were kept at once.
    is_waiting
        Whether an update waits for room at present.
    """

    def __init__(
        self,
        stores: Iterable[RowStore],
        limit_bytes: int | None = None,
        changed: Mapping[RowStore, Tensor] | None = None,
    ) -> None:
        self._limit = KEPT_BYTES if limit_bytes is None else limit_bytes
        self._lock = threading.Condition()
        self._bytes = 0
        self._closed = False
        self.waited_s = 0.0
        self.most_bytes = 0
        self.is_waiting = False
        self.rows = {store: rows_of(store, changed) for store in stores}
        """What is there now, by store."""
        self._arrays: dict[RowStore, dict[str, _Array]] = {
            store: {name: _Array(t) for name, t in arrays_of(rows).items() if len(t)}
            for store, rows in self.rows.items()
        }
        for store in self._arrays:
            store.on_change = partial(self._keep, store)

    def read(self, store: RowStore, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start … stop − 1`` of an array, on the CPU; each once, in rising order."""
        array = self._arrays[store][name]
        rows = array.bits[start:stop].to("cpu", copy=True)
        with self._lock:
            array.pending[start:stop] = False
            kept = [_between(k, start, stop) for k in array.kept if k.first < stop and k.last >= start]
            self._forget(array, stop)
        for places, old in kept:
            rows[(places - start).cpu()] = old.cpu()
        return rows.view(array.dtype)

    def close(self) -> None:
        """Forget everything; the stores are free."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            for store in self._arrays:
                store.on_change = None
            self._arrays.clear()
            self.rows.clear()

    def _keep(self, store: RowStore, slots: Tensor) -> None:
        """Copy the rows at these slots that nobody has read or kept."""
        start = time.perf_counter()
        with self._lock:
            arrays = self._arrays.get(store, {})
            for name, places in self.rows[store].places(slots).items() if arrays else ():
                array = arrays.get(name)
                if array is None:
                    continue
                places = places[array.pending[places]]
                if not len(places):
                    continue
                places = torch.unique(places)
                array.pending[places] = False
                # In ranges of places, so that the reader frees one after the other.
                firsts = torch.searchsorted(places, array.cuts).tolist()
                for first, last in pairwise([0, *firsts, len(places)]):
                    if first < last:
                        own = places[first:last].clone()
                        array.kept.append(_Kept(own, array.bits.index_select(0, own)))
                        self._bytes += array.kept[-1].nbytes
            self.most_bytes = max(self.most_bytes, self._bytes)
            self.is_waiting = True
            self._lock.wait_for(lambda: self._bytes <= self._limit or self._closed)
            self.is_waiting = False
        self.waited_s += time.perf_counter() - start

    def _forget(self, array: _Array, stop: int) -> None:
        """Free what was kept of rows before ``stop``, range by range."""
        remaining = [kept for kept in array.kept if kept.last >= stop]
        self._bytes -= sum(kept.nbytes for kept in array.kept if kept.last < stop)
        array.kept = remaining
        self._lock.notify_all()


def rows_of(store: RowStore, changed: Mapping[RowStore, Tensor] | None = None) -> DenseStore | PickedRows:
    """Return the rows of a store that are to be saved: all that there are, or those that have changed."""
    assert isinstance(store, DenseStore | LazyStore)
    if changed is not None:
        return PickedRows(store, changed[store])
    return PickedRows(store, store.records.keys()) if isinstance(store, LazyStore) else store


def arrays_of(rows: DenseStore | PickedRows) -> Mapping[str, Tensor | PickedArray]:
    """Return the arrays that they are in."""
    return rows.arrays() if isinstance(rows, DenseStore) else rows.arrays


def _between(kept: _Kept, start: int, stop: int) -> tuple[Tensor, Tensor]:
    bounds = torch.searchsorted(kept.places, torch.tensor([start, stop], device=kept.places.device))
    first, last = bounds.tolist()
    return kept.places[first:last], kept.rows[first:last]
