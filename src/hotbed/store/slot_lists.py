"""List slots of a store in ascending order, and collect the slots of updated rows.

A checkpoint writes rows in the order of their slots. Eight bytes for each of a billion rows may be more memory than is
free. Therefore a list (`SortedSlots`) consists of pieces of at most `PIECE` slots, and a piece is computed when it is
read. For example, with pieces of two slots::

    materialized slots  9 4 7 1 5          in the order of their first update
    pieces              1 4 | 5 7 | 9      each computed by one pass over the slots above

Differential checkpoints and averages of replicas need only the rows that have been updated (`Changes`). Collection
begins with `RowStore.track`. Each method that updates rows calls `RowStore.changing` first. A row counts as updated
even if its bits stay equal. After a method that overwrites whole tables (`RowStore.replaced`), the updated rows are
unknown until `RowStore.track` is called again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.store.device_selection import sort_slots

PIECE = 1 << 20
"""Upper limit of the slots in a piece."""


class SortedSlots(ABC):
    """Distinct slots in ascending order. Only one thread at a time may read them.

    Parameters
    ----------
    starts
        ``[P + 1]``: the slot at which each piece begins, and an exclusive upper bound of all slots.
    counts
        ``[P]``: number of slots in each piece.
    """

    def __init__(self, starts: list[int], counts: list[int]) -> None:
        self._starts = torch.tensor(starts, dtype=torch.int64)
        self._firsts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64)
        self._last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, at: slice) -> Tensor:
        """Return the slots ``[n]`` int64 at these positions, on the CPU. The slice must have no step."""
        start, stop, _ = at.indices(len(self))
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        first, last = torch.searchsorted(self._firsts, torch.tensor([start, stop - 1]), right=True).sub_(1).tolist()
        parts: list[Tensor] = []
        for number in range(first, last + 1):
            before = int(self._firsts[number])
            parts.append(self._piece(number)[max(start - before, 0) : stop - before])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def below(self, slot: int) -> int:
        """Return the number of slots less than ``slot``."""
        number = int(torch.searchsorted(self._starts, slot, right=True)) - 1
        if number < 0:
            return 0
        if number >= len(self._firsts) - 1:
            return len(self)
        return int(self._firsts[number]) + int(torch.searchsorted(self._piece(number), slot))

    def piece_starts(self, start: int, stop: int) -> Tensor:
        """Return the first slots of the pieces that begin between these two positions."""
        first, last = torch.searchsorted(self._firsts[:-1], torch.tensor([start, stop]), right=True).tolist()
        return self._starts[:-1][first:last]

    def part(self, start: int, stop: int) -> SlotRange:
        """Return the slots at positions ``start … stop − 1``."""
        return SlotRange(self, start, stop)

    @property
    @abstractmethod
    def numbers(self) -> int:
        """Exclusive upper limit of the results of `number`."""

    @abstractmethod
    def number(self, slots: Tensor) -> Tensor:
        """Return a distinct number for each slot ``[n]`` in the list, and −1 for slots outside the list, on the CPU."""

    @abstractmethod
    def _read(self, start: int, stop: int, count: int) -> Tensor:
        """Compute the ``count`` slots of a piece, which are at least ``start`` and less than ``stop``."""

    def _piece(self, number: int) -> Tensor:
        if self._last is None or self._last[0] != number:
            self._last = None  # first, because two pieces would take twice the memory
            start, stop = self._starts[number : number + 2].tolist()
            count = int(self._firsts[number + 1] - self._firsts[number])
            self._last = number, self._read(start, stop, count)
        return self._last[1]


class SlotRange:
    """A range of positions in a list of sorted slots."""

    def __init__(self, of: SortedSlots, start: int, stop: int) -> None:
        self._of, self._start, self._stop = of, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(len(self))
        return self._of[self._start + start : self._start + stop]

    def below(self, slot: int) -> int:
        """Return the number of slots in this range that are less than ``slot``."""
        return min(max(self._of.below(slot) - self._start, 0), len(self))

    def chunks(self, count: int) -> Iterator[Tensor]:
        """Yield the slots in chunks of at most ``count``."""
        for start in range(0, len(self), count):
            yield self[start : start + count]

    def part(self, start: int, stop: int) -> SlotRange:
        """Return the range of positions ``start … stop − 1``, relative to this range."""
        return SlotRange(self._of, self._start + start, self._start + stop)

    def cuts(self, count: int) -> Tensor:
        """Return slots that divide the range into at most ``count`` equal parts, or into whole pieces if it is long."""
        starts = self._of.piece_starts(self._start, self._stop)
        if len(starts) > 1:
            return starts[:: -(-len(starts) // (count - 1))].contiguous()
        return torch.cat([self[:0], *(self[at : at + 1] for at in (len(self) * i // count for i in range(1, count)))])


class SlotTensor(SortedSlots):
    """Ascending slots ``[n]`` int64 of a CPU tensor."""

    def __init__(self, slots: Tensor) -> None:
        super().__init__([0, int(slots[-1]) + 1] if len(slots) else [0], [len(slots)] if len(slots) else [])
        self._slots = slots

    @property
    @override
    def numbers(self) -> int:
        return len(self._slots)

    @override
    def number(self, slots: Tensor) -> Tensor:
        if not len(self._slots):
            return torch.full((len(slots),), -1)
        slots = slots.cpu()
        at = torch.searchsorted(self._slots, slots).clamp_(max=len(self._slots) - 1)
        return at.masked_fill_(self._slots[at] != slots, -1)

    @override
    def _read(self, start: int, stop: int, count: int) -> Tensor:
        return self._slots


class MaskedSlots(SortedSlots):
    """The slots that a mask ``[slots]`` bool selects. The mask may be on any device and is copied."""

    def __init__(self, mask: Tensor) -> None:
        parts = mask.split(PIECE)
        counts = torch.stack([part.sum() for part in parts]).tolist() if len(mask) else []
        super().__init__([*range(0, len(mask), PIECE), len(mask)], counts)
        packed = [np.packbits(part.cpu().numpy(), bitorder="little") for part in parts]
        self._bits = np.concatenate(packed)
        self._count = len(mask)

    @property
    @override
    def numbers(self) -> int:
        return self._count

    @override
    def number(self, slots: Tensor) -> Tensor:
        slots = slots.cpu()
        return slots.masked_fill(~are_set(torch.from_numpy(self._bits), slots), -1)

    @override
    def _read(self, start: int, stop: int, count: int) -> Tensor:
        bits = np.unpackbits(self._bits[start // 8 : -(-stop // 8)], count=stop - start, bitorder="little")
        return torch.from_numpy(np.flatnonzero(bits)).add_(start)


def are_set(bits: Tensor, positions: Tensor) -> Tensor:
    """Return ``[n]`` bool: whether the bits at ``positions [n]`` are set in ``bits`` uint8, with bit 0 first."""
    return (bits[positions >> 3] >> (positions & 7).to(torch.uint8) & 1).bool()


# -- updated slots ---------------------------------------------------------------------------------------------------


class UpdatedSlots(ABC):
    """Collect the slots of updated rows."""

    @abstractmethod
    def add(self, slots: Tensor) -> None:
        """Add slots ``[n]`` int64. Slots may be added repeatedly."""

    @abstractmethod
    def slots(self) -> SortedSlots:
        """Return the slots that have been added so far. Later additions do not change this list."""


class UpdatedMask(UpdatedSlots):
    """Collect slots in a mask with one byte per slot, for a store with all rows in memory."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._mask = torch.zeros(count, dtype=torch.bool, device=device)

    @override
    def add(self, slots: Tensor) -> None:
        self._mask.index_fill_(0, slots, True)

    @override
    def slots(self) -> SortedSlots:
        return MaskedSlots(self._mask)


class UpdatedSlotList(UpdatedSlots):
    """Collect slots of a store that may have more slots than memory, with memory for the updated slots only.

    Slot −1 is ignored.
    """

    def __init__(self) -> None:
        self._slots: list[Tensor] = []
        self._distinct = 0

    @override
    def add(self, slots: Tensor) -> None:
        self._slots.append(slots.clone())  # a view would keep its whole tensor in memory
        if sum(map(len, self._slots)) > 2 * max(self._distinct, 1 << 18):
            self._merge(slots.device)

    @override
    def slots(self) -> SortedSlots:
        self._merge(torch.device("cpu"))
        return SlotTensor(self._slots[0])

    def take(self, device: torch.device) -> Tensor:
        """Return the collected slots ``[n]``, ascending, and clear this collector."""
        self._merge(device)
        found = self._slots[0]
        self._slots, self._distinct = [], 0
        return found

    def _merge(self, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._slots = [sort_slots(torch.cat([nothing, *(earlier.to(device) for earlier in self._slots)]))]
        self._distinct = len(self._slots[0])


class Changes:
    """The slots of a store that have changed since a checkpoint."""

    def __init__(self, since: str, touched: UpdatedSlots) -> None:
        self.since: str | None = since  # token of the checkpoint; None if the changed rows are no longer known
        self._touched = touched

    def __deepcopy__(self, memo: object) -> Changes:
        """Return an empty copy with unknown changes, because no checkpoint of a copied store exists."""
        copy = Changes("", self._touched)
        copy.lose()
        return copy

    def add(self, slots: Tensor) -> None:
        """Add changed slots ``[n]``. Slots may be repeated."""
        if self.since is not None:
            self._touched.add(slots)

    def lose(self) -> None:
        """Mark the changed rows as unknown."""
        self.since = None
        self._touched = UpdatedSlotList()  # frees the memory of the collected slots, which are useless now

    def slots(self) -> SortedSlots:
        """Return the slots that have changed so far."""
        return self._touched.slots()
