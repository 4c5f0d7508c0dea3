"""List slots of a store in rising order, piece by piece, so that a long list is never in memory as a whole.

A checkpoint writes rows in the order of their slots. Eight bytes for each of a billion rows would be more memory than a
run has left, so a list is cut into pieces of at most `PIECE` slots when it is made, and a piece is made when it is
read. An example with pieces of two slots::

    slots that exist   9 4 7 1 5          in the order in which they were added
    pieces             1 4 | 5 7 | 9      each found by one pass over the slots above
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

PIECE = 1 << 20
"""Upper limit of the slots of a piece."""


class RisingSlots(ABC):
    """Distinct slots in rising order; one thread at a time may read them.

    Parameters
    ----------
    starts
        The slot at which each piece begins, and an upper bound of all slots, ``[P + 1]``.
    counts
        How many slots each piece has, ``[P]``.
    """

    def __init__(self, starts: list[int], counts: list[int]) -> None:
        self._starts = torch.tensor(starts, dtype=torch.int64)
        self._firsts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64)
        self._last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, at: slice) -> Tensor:
        """Return the slots ``[n]`` int64 at these positions, on the CPU; the slice has no step."""
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
        """Count the slots below this one."""
        number = int(torch.searchsorted(self._starts, slot, right=True)) - 1
        if number < 0:
            return 0
        if number >= len(self._firsts) - 1:
            return len(self)
        return int(self._firsts[number]) + int(torch.searchsorted(self._piece(number), slot))

    def piece_starts(self, start: int, stop: int) -> Tensor:
        """Return where pieces begin whose first positions are between these."""
        first, last = torch.searchsorted(self._firsts[:-1], torch.tensor([start, stop]), right=True).tolist()
        return self._starts[:-1][first:last]

    def part(self, start: int, stop: int) -> SlotRange:
        """Return the positions ``start … stop − 1`` as a list of its own."""
        return SlotRange(self, start, stop)

    @property
    @abstractmethod
    def numbers(self) -> int:
        """Upper limit of what `number` returns."""

    @abstractmethod
    def number(self, slots: Tensor) -> Tensor:
        """Return a number of its own for each slot ``[n]`` of the list, and −1 for all others, on the CPU."""

    @abstractmethod
    def _read(self, start: int, stop: int, count: int) -> Tensor:
        """Find the slots of a piece ``[count]``, which begins at slot ``start`` and ends before ``stop``."""

    def _piece(self, number: int) -> Tensor:
        if self._last is None or self._last[0] != number:
            self._last = None  # two pieces would take twice the memory
            start, stop = self._starts[number : number + 2].tolist()
            count = int(self._firsts[number + 1] - self._firsts[number])
            self._last = number, self._read(start, stop, count)
        return self._last[1]


class SlotRange:
    """Some neighbours of a list of rising slots."""

    def __init__(self, of: RisingSlots, start: int, stop: int) -> None:
        self._of, self._start, self._stop = of, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(len(self))
        return self._of[self._start + start : self._start + stop]

    def below(self, slot: int) -> int:
        """Count the slots of this range below this one."""
        return min(max(self._of.below(slot) - self._start, 0), len(self))

    def chunks(self, count: int) -> Iterator[Tensor]:
        """Yield the slots, at most ``count`` at a time."""
        for start in range(0, len(self), count):
            yield self[start : start + count]

    def part(self, start: int, stop: int) -> SlotRange:
        """Return the positions ``start … stop − 1`` of this range as a list of its own."""
        return SlotRange(self._of, self._start + start, self._start + stop)

    def cuts(self, count: int) -> Tensor:
        """Return slots that cut the range into at most ``count`` parts: equal ones, or whole pieces of a long range."""
        starts = self._of.piece_starts(self._start, self._stop)
        if len(starts) > 1:
            return starts[:: -(-len(starts) // (count - 1))].contiguous()
        return torch.cat([self[:0], *(self[at : at + 1] for at in (len(self) * i // count for i in range(1, count)))])


class ListedSlots(RisingSlots):
    """Ascending slots ``[n]`` int64 that are in memory on the CPU anyway."""

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


class MarkedSlots(RisingSlots):
    """Slots of a store whose rows are all in memory, by a mask ``[slots]`` bool on any device, which is copied."""

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
        bits = torch.from_numpy(self._bits)[slots >> 3] >> (slots & 7).to(torch.uint8)
        return slots.masked_fill((bits & 1) == 0, -1)

    @override
    def _read(self, start: int, stop: int, count: int) -> Tensor:
        bits = np.unpackbits(self._bits[start // 8 : -(-stop // 8)], count=stop - start, bitorder="little")
        return torch.from_numpy(np.flatnonzero(bits)).add_(start)
