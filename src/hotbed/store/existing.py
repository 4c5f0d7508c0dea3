"""`ExistingRows`: the rows of a `LazyStore` that exist at some moment, in the form of arrays; for checkpoints."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from hotbed.store.dense import MOMENT
from hotbed.store.lazy import LazyStore

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ExistingArray:
    """One array of the rows that exist, read when it is asked for; values are given as integers of their bits.

    Attributes
    ----------
    dtype, shape
        Of the values.
    """

    device = torch.device("cpu")

    def __init__(self, store: LazyStore, slots: Tensor, name: str) -> None:
        self._store, self._slots, self._name = store, slots, name
        sample = store.stored(slots[:1])[name]
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
        return self._store.stored(self._slots[at])[self._name].view(_BITS[self.dtype.itemsize])

    def index_select(self, _: int, at: Tensor) -> Tensor:
        """Rows at these rising positions."""
        return self[at]


class ExistingRows:
    """The rows of a store that exist now.

    Attributes
    ----------
    slots
        Of each span, rising.
    arrays
        By span and name (as in `RowStore.raw`, and ``moment.NAME``); those without rows are left out.
    first
        Of each array, the position of its first row among those of its span.
    """

    def __init__(self, store: LazyStore) -> None:
        self.slots = store.keys_by_span()
        self.arrays: dict[str, ExistingArray] = {}
        self.first: dict[str, int] = {}
        self._slots_of: dict[str, Tensor] = {}
        for span, slots in enumerate(self.slots):
            wide = store.count_wide(slots)
            for name in store.stored_names(span) if len(slots) else ():
                start, stop = 0, len(slots)
                if name == "fp32_weight":
                    stop = wide
                elif not name.startswith(MOMENT) and store.has_narrow(span):
                    start = wide
                if start < stop:
                    key = f"{span}.{name}"
                    self.first[key], self._slots_of[key] = start, slots[start:stop]
                    self.arrays[key] = ExistingArray(store, slots[start:stop], name)

    def of(self, span: int) -> dict[str, str]:
        """What the arrays of a span are called here, by their names."""
        return {key.split(".", 1)[1]: key for key in self.arrays if key.startswith(f"{span}.")}

    def places(self, slots: Tensor) -> dict[str, Tensor]:
        """By array, which of its rows belong to these slots ``[n]``; slots that did not exist have none."""
        slots = slots.cpu()
        found: dict[str, Tensor] = {}
        for key, own in self._slots_of.items():
            at = torch.searchsorted(own, slots).clamp_(max=len(own) - 1)
            found[key] = at[own[at] == slots]
        return found
