"""Copy a device-side selection to the host with a single synchronization.

Reading first the number of selected elements and then the elements would synchronize twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.store.memory import HostCopy, to_device, to_host


class Selection(NamedTuple):
    """Selected slots: their positions on the device, and the slots on the host."""

    at: Tensor  # [n] int64, ascending: positions, on the device
    slots: Tensor  # [n] int64: the slots, on the host

    def subset(self, numbers: Tensor) -> Selection:
        """Return the elements ``numbers [k]`` int64 of the selection. ``numbers`` is on the host."""
        return Selection(self.at[to_device(numbers, self.at.device)], self.slots[numbers])


class PendingSelection:
    """Start a copy to the host of the slots ``[n]`` that a mask ``[n]`` selects. `wait` returns the copy.

    ``is_apart`` means that the slots are in the memory of a different device.
    """

    def __init__(self, mask: Tensor, slots: Tensor, *, is_apart: bool) -> None:
        self._is_padded = is_apart and len(slots) > 0
        if not self._is_padded:
            self._at = mask.nonzero()[:, 0]
            self._arriving = HostCopy(slots[self._at])
            return
        self._at, count = padded_positions(mask)
        self._arriving = HostCopy(torch.cat([count, slots[self._at]]))

    def wait(self) -> Selection:
        """Wait for the copy, and so for all device work that was queued before it."""
        (slots,) = self._arriving.wait()
        if not self._is_padded:
            return Selection(self._at, slots)
        count = int(slots[0])
        return Selection(self._at[:count], slots[1 : count + 1])


def list_set_bits(mask: Tensor) -> Tensor:
    """Return the ascending positions ``[k]`` int64 where a mask ``[n]`` is true, with one synchronization."""
    if mask.device.type == "cpu" or not len(mask):
        return mask.nonzero()[:, 0]
    at, count = padded_positions(mask)
    return at[: int(to_host(count))]


def sort_slots(slots: Tensor) -> Tensor:
    """Return the distinct non-negative slots among ``[n]`` int64, ascending, with one synchronization."""
    ordered = slots.sort().values
    is_first = ordered >= 0
    is_first[1:] &= ordered[1:] != ordered[:-1]
    return ordered[list_set_bits(is_first)]


def padded_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions where a mask ``[n]`` is true, padded to ``[n]``, and their number ``[1]``.

    This does not synchronize. The last position is the padding: ``[0, 1, 0, 1]`` gives ``[1, 3, 3, 3]`` and ``[2]``.
    """
    so_far = mask.cumsum(0)
    numbers = torch.arange(1, len(mask) + 1, device=mask.device)
    return torch.searchsorted(so_far, numbers).clamp_(max=len(mask) - 1), so_far[-1:]
