"""Note which rows of a store change, so that a checkpoint, or an average of replicas, takes only these.

`RowStore.track` begins; every method that is about to change rows tells `RowStore.changing` first. A row counts as
changed though its new bits may be the old ones. What overwrites whole tables does not name rows (`RowStore.replaced`):
then nobody can say what changed, until tracking begins anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.store.listing import sort_slots
from hotbed.store.rising import ListedSlots, MarkedSlots, RisingSlots


class Touched(ABC):
    """Collect slots."""

    @abstractmethod
    def add(self, slots: Tensor) -> None:
        """Add slots ``[n]`` int64, of which some may have been added before."""

    @abstractmethod
    def slots(self) -> RisingSlots:
        """List the slots that have been added so far; later additions do not change the list."""


class TouchedMask(Touched):
    """Collect slots of a store whose rows are all in memory: a byte per slot."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._mask = torch.zeros(count, dtype=torch.bool, device=device)

    @override
    def add(self, slots: Tensor) -> None:
        self._mask.index_fill_(0, slots, True)

    @override
    def slots(self) -> RisingSlots:
        return MarkedSlots(self._mask)


class TouchedSlots(Touched):
    """Collect slots of a store with more slots than memory, for those that were touched only; −1 is none."""

    def __init__(self) -> None:
        self._slots: list[Tensor] = []
        self._distinct = 0

    @override
    def add(self, slots: Tensor) -> None:
        self._slots.append(slots.clone())  # a view would keep all of its tensor
        if sum(map(len, self._slots)) > 2 * max(self._distinct, 1 << 18):
            self._merge(slots.device)

    @override
    def slots(self) -> RisingSlots:
        self._merge(torch.device("cpu"))
        return ListedSlots(self._slots[0])

    def take(self, device: torch.device) -> Tensor:
        """List them, rising ``[n]``, and forget them."""
        self._merge(device)
        found = self._slots[0]
        self._slots, self._distinct = [], 0
        return found

    def _merge(self, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._slots = [sort_slots(torch.cat([nothing, *(earlier.to(device) for earlier in self._slots)]))]
        self._distinct = len(self._slots[0])


class Changes:
    """Slots of a store that have changed since a checkpoint began."""

    def __init__(self, since: str, touched: Touched) -> None:
        self.since: str | None = since  # token of the checkpoint; None if the changed rows are no longer known
        self._touched = touched

    def __deepcopy__(self, memo: object) -> Changes:
        """Return marks of nothing: a copy of a store is no store that any checkpoint has been saved of."""
        copy = Changes("", self._touched)
        copy.lose()
        return copy

    def add(self, slots: Tensor) -> None:
        """Note slots ``[n]``, repetitions included."""
        if self.since is not None:
            self._touched.add(slots)

    def lose(self) -> None:
        """Note that rows may have changed which nobody named."""
        self.since = None
        self._touched = TouchedSlots()  # what was noted is of no use and takes memory

    def slots(self) -> RisingSlots:
        """List the slots that have changed so far."""
        return self._touched.slots()
