"""Tell the host which elements a device has picked, with one wait for a list instead of one for its length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.store.memory import Arriving, to_device, to_host


class Listed(NamedTuple):
    """A selection of slots that is known to the device and the host, so that they need not synchronize."""

    at: Tensor  # [n] int64, ascending: positions, on the device
    slots: Tensor  # [n] int64: the slots, on the host

    def picked(self, numbers: Tensor) -> Listed:
        """Keep those with these numbers ``[k]`` int64, on the host."""
        return Listed(self.at[to_device(numbers, self.at.device)], self.slots[numbers])


class Listing:
    """List the slots ``[n]`` that a mask ``[n]`` selects; `wait` returns them for the host.

    ``is_apart`` means that they are in the memory of a device, which the host waits for.
    """

    def __init__(self, mask: Tensor, slots: Tensor, *, is_apart: bool) -> None:
        self._is_padded = is_apart and len(slots) > 0
        if not self._is_padded:
            self._at = mask.nonzero()[:, 0]
            self._arriving = Arriving(slots[self._at])
            return
        self._at, count = padded_positions(mask)
        self._arriving = Arriving(torch.cat([count, slots[self._at]]))

    def wait(self) -> Listed:
        """Wait for what the device was given before the list was asked for."""
        (slots,) = self._arriving.wait()
        if not self._is_padded:
            return Listed(self._at, slots)
        count = int(slots[0])
        return Listed(self._at[:count], slots[1 : count + 1])


def list_set_bits(mask: Tensor) -> Tensor:
    """List where a mask ``[n]`` is true, rising ``[k]`` int64: one wait for a device, for what it was given so far."""
    if mask.device.type == "cpu" or not len(mask):
        return mask.nonzero()[:, 0]
    at, count = padded_positions(mask)
    return at[: int(to_host(count))]


def sort_slots(slots: Tensor) -> Tensor:
    """List the distinct slots among ``[n]`` int64, rising, without negative ones; one wait as in `list_set_bits`."""
    ordered = slots.sort().values
    is_first = ordered >= 0
    is_first[1:] &= ordered[1:] != ordered[:-1]
    return ordered[list_set_bits(is_first)]


def padded_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """List the positions ``[n]`` where a mask ``[n]`` is true, and their number ``[1]``, without synchronizing.

    The last position pads the list: ``[0, 1, 0, 1]`` becomes ``[1, 3, 3, 3]`` and ``[2]``.
    """
    so_far = mask.cumsum(0)
    numbers = torch.arange(1, len(mask) + 1, device=mask.device)
    return torch.searchsorted(so_far, numbers).clamp_(max=len(mask) - 1), so_far[-1:]
