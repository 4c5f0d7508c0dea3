"""Read some rows of a store as arrays, piece by piece: the rows that a checkpoint saves, if it does not save all.

A store whose rows are materialized on their first update saves the materialized rows. A differential checkpoint saves
the rows of any store that have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.store.dense import MOMENT, DenseStore
from hotbed.store.lazy_store import LazyStore
from hotbed.store.rising import RisingSlots, SlotRange

_BYTES_AT_ONCE = 1 << 20


class PickedArray:
    """One array of the rows, read on indexing.

    Attributes
    ----------
    slots
        The slots of its rows.
    dtype, shape
        Of the values.
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
        """Read the rows of these rising slots, on the CPU."""
        return self._store.stored_array(self._name, slots)


class PickedRows:
    """Some rows of a store as arrays.

    Parameters
    ----------
    store
        The store.
    slots
        Which rows.

    Attributes
    ----------
    all_slots
        Which rows.
    slots
        Those of each span.
    arrays
        By span and name (as in `RowStore.raw`, and ``moment.NAME``); those without rows are left out.
    first
        Of each array, the position of its first row among those of its span.
    """

    def __init__(self, store: DenseStore | LazyStore, slots: RisingSlots) -> None:
        firsts = [0, *accumulate(span.rows for span in store.spans)]
        self._store, self._firsts = store, torch.tensor(firsts, dtype=torch.int64)
        self.all_slots = slots
        cuts = [slots.below(first) for first in firsts]
        self.slots: Sequence[SlotRange] = [slots.part(first, last) for first, last in pairwise(cuts)]
        self.arrays: dict[str, PickedArray] = {}
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
                    self.arrays[key] = PickedArray(store, own.part(start, stop), name)

    def read(self, slots: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Read all arrays of some of the rows: keys of `arrays`, with the slots and values that each has of these rows.

        Parameters
        ----------
        slots
            Rising ``[n]``, on the CPU.
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
        """How many rows `read` should be asked for at once, so that they take a few megabytes."""
        widest = max((array.row_bytes for array in self.arrays.values()), default=1)
        return max(_BYTES_AT_ONCE // max(widest, 1), 1)

    def of(self, span: int) -> dict[str, str]:
        """Map the names of the arrays of a span to keys of `arrays`."""
        return {key.split(".", 1)[1]: key for key in self.arrays if key.startswith(f"{span}.")}
