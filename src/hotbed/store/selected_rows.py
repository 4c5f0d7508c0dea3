"""Read selected rows of a store as arrays, in chunks, for a checkpoint that does not save all rows.

A `LazyStore` saves its materialized rows. A differential checkpoint saves the rows that have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.store.device_store import MOMENT, DenseStore
from hotbed.store.lazy_store import LazyStore
from hotbed.store.slot_lists import SlotRange, SortedSlots

_BYTES_AT_ONCE = 1 << 20


class SelectedArray:
    """One array of the selected rows, e.g. a moment. Indexing with a slice reads rows from the store.

    Attributes
    ----------
    slots
        Slots of the rows.
    dtype, shape
        Dtype and shape of the array.
    """

    def __init__(self, store: DenseStore | LazyStore, slots: SlotRange, name: str) -> None:
        self._store, self.slots, self._name = store, slots, name
        sample = store.stored_array(name, slots[:1])
        self.dtype, self.shape = sample.dtype, (len(slots), *sample.shape[1:])
        self.row_bytes = sample.nbytes

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, at: slice) -> Tensor:
        return self.read(self.slots[at])

    def read(self, slots: Tensor) -> Tensor:
        """Return the values at these ascending slots, on the CPU."""
        return self._store.stored_array(self._name, slots)


class SelectedRows:
    """Selected rows of a store as arrays.

    Parameters
    ----------
    store
        Store of the rows.
    slots
        Slots of the selected rows.

    Attributes
    ----------
    all_slots
        Slots of the selected rows.
    slots
        The same slots, by span.
    arrays
        Arrays with at least one row. A key is ``SPAN.NAME`` with a name of `RowStore.raw`, or ``moment.NAME``.
    first
        For each array, the position of its first row among the selected rows of its span.
    """

    def __init__(self, store: DenseStore | LazyStore, slots: SortedSlots) -> None:
        firsts = [0, *accumulate(span.rows for span in store.spans)]
        self._store, self._firsts = store, torch.tensor(firsts, dtype=torch.int64)
        self.all_slots = slots
        cuts = [slots.below(first) for first in firsts]
        self.slots: Sequence[SlotRange] = [slots.part(first, last) for first, last in pairwise(cuts)]
        self.arrays: dict[str, SelectedArray] = {}
        self.first: dict[str, int] = {}
        for number, (span, own) in enumerate(zip(store.spans, self.slots, strict=True)):
            wide = own.below(firsts[number] + span.fp32_rows)
            for name in store.stored_names(number) if len(own) else ():
                start, stop = 0, len(own)
                if name == "fp32_weight":
                    stop = wide
                elif not name.startswith(MOMENT) and span.fp32_rows < span.rows:
                    start = wide
                if start < stop:
                    key = f"{number}.{name}"
                    self.first[key] = start
                    self.arrays[key] = SelectedArray(store, own.part(start, stop), name)

    def read(self, slots: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the key of each array of `arrays`, and the slots and values of the requested rows in this array.

        Parameters
        ----------
        slots
            ``[n]``, ascending, on the CPU.
        """
        for number, (first, last) in enumerate(pairwise(torch.searchsorted(slots, self._firsts).tolist())):
            own = slots[first:last]
            if not len(own):
                continue
            wide = int(torch.searchsorted(own, self._firsts[number] + self._store.spans[number].fp32_rows))
            stored = self._store.stored(own) if isinstance(self._store, LazyStore) else {}
            for name, key in self.of(number).items():
                of_array = own
                if name == "fp32_weight":
                    of_array = own[:wide]
                elif not name.startswith(MOMENT) and self.first[key]:
                    of_array = own[wide:]
                if len(of_array):
                    yield key, of_array, stored[name] if stored else self._store.stored_array(name, of_array)

    @property
    def rows_at_once(self) -> int:
        """Recommended number of rows per call of `read`, which take about a megabyte."""
        widest = max((array.row_bytes for array in self.arrays.values()), default=1)
        return max(_BYTES_AT_ONCE // max(widest, 1), 1)

    def of(self, span: int) -> dict[str, str]:
        """Return the keys of `arrays` by the names of the arrays of a span."""
        return {key.split(".", 1)[1]: key for key in self.arrays if key.startswith(f"{span}.")}
