"""List some rows of a store as arrays, which are read piece by piece: what a checkpoint saves of it, if not all rows.

Of a store whose rows are materialized on their first update these are the materialized ones; of any store, for a
differential checkpoint, those that have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import overload

import torch
from torch import Tensor

from hotbed.store.dense import MOMENT, DenseStore
from hotbed.store.lazy import LazyStore

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class PickedArray:
    """Read one array of the rows, on indexing; values are given as integers of their bits.

    Attributes
    ----------
    dtype, shape
        Of the values.
    """

    device = torch.device("cpu")

    def __init__(self, store: DenseStore | LazyStore, slots: Tensor, name: str) -> None:
        self._store, self._slots, self._name = store, slots, name
        sample = store.stored_array(name, slots[:1])
        self.dtype, self.shape = sample.dtype, (len(slots), *sample.shape[1:])

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self[:1].nbytes

    @overload
    def __getitem__(self, at: slice) -> Tensor: ...
    @overload
    def __getitem__(self, at: Tensor) -> Tensor: ...
    def __getitem__(self, at: slice | Tensor) -> Tensor:
        return self._store.stored_array(self._name, self._slots[at]).view(_BITS[self.dtype.itemsize])

    def index_select(self, _: int, at: Tensor) -> Tensor:
        """Rows at these rising positions."""
        return self[at]


class PickedRows:
    """List rows of a store as arrays.

    Parameters
    ----------
    store
        The store.
    slots
        Which rows, rising ``[n]``, on the CPU.

    Attributes
    ----------
    slots
        Of each span, rising.
    arrays
        By span and name (as in `RowStore.raw`, and ``moment.NAME``); those without rows are left out.
    first
        Of each array, the position of its first row among those of its span.
    """

    def __init__(self, store: DenseStore | LazyStore, slots: Tensor) -> None:
        firsts = [0, *accumulate(span.rows for span in store.spans)]
        cuts = torch.searchsorted(slots, torch.tensor(firsts, dtype=torch.int64)).tolist()
        self.slots: Sequence[Tensor] = [slots[first:last] for first, last in pairwise(cuts)]
        self.arrays: dict[str, PickedArray] = {}
        self.first: dict[str, int] = {}
        self._slots_of: dict[str, Tensor] = {}
        for number, (span, own) in enumerate(zip(store.spans, self.slots, strict=True)):
            wide = int(torch.searchsorted(own, firsts[number] + span.fp32_rows))
            for name in store.stored_names(number) if len(own) else ():
                start, stop = 0, len(own)
                if name == "fp32_weight":
                    stop = wide
                elif not name.startswith(MOMENT) and span.fp32_rows < span.rows:
                    start = wide
                if start < stop:
                    key = f"{number}.{name}"
                    self.first[key], self._slots_of[key] = start, own[start:stop]
                    self.arrays[key] = PickedArray(store, own[start:stop], name)

    def of(self, span: int) -> dict[str, str]:
        """Map the names of the arrays of a span to keys of `arrays`."""
        return {key.split(".", 1)[1]: key for key in self.arrays if key.startswith(f"{span}.")}

    def places(self, slots: Tensor) -> dict[str, Tensor]:
        """Find by array which of its rows belong to these slots ``[n]``; slots that were not picked have none."""
        slots = slots.cpu()
        found: dict[str, Tensor] = {}
        for key, own in self._slots_of.items():
            at = torch.searchsorted(own, slots).clamp_(max=len(own) - 1)
            found[key] = at[own[at] == slots]
        return found
