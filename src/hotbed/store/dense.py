"""All rows in one tensor, in the memory of the device or of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.ops import BackendName, BagLayout, Occurrences, RuleStep, cpu_memory
from hotbed.optim import Moment
from hotbed.store.base import RowStore, Tier


class DenseStore(RowStore):
    """Rows ``[slots, dim]`` and moments as plain tensors on one device.

    Parameters
    ----------
    slots, dim
        Size; ``dim`` in float32 columns.
    device
        ``cpu`` (tier ``host``; huge pages on Linux) or ``cuda`` (tier ``device``).
    backend
        Kernels to use; ``"auto"`` goes by device.
    """

    def __init__(
        self, slots: int, dim: int, *, device: torch.device | str = "cpu", backend: BackendName = "auto"
    ) -> None:
        self.slots = slots
        self.dim = dim
        self.backend_name: BackendName = backend
        self.weight = _zeros((slots, dim), torch.device(device))
        self.moments: dict[str, Tensor] = {}

    @property
    def ops(self) -> ops.Backend:
        """The kernels that serve this store."""
        return ops.select(self.weight.device, self.backend_name)

    @property
    @override
    def device(self) -> torch.device:
        return self.weight.device

    @property
    @override
    def tier(self) -> Tier:
        return "host" if self.weight.device.type == "cpu" else "device"

    @property
    @override
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weight, *self.moments.values()))

    @override
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        self.ops.initial_values_(self.weight[slot : slot + len(rows)], seed=seed, rows=rows, cols=cols, bound=bound)

    @override
    def occurrences(self, bags: BagLayout) -> Occurrences:
        return self.ops.occurrences(bags)

    @override
    def lookup(self, bags: BagLayout) -> Tensor:
        return self.ops.lookup(self.weight, bags)

    @override
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        groups = self.ops.group(occurrences.slots)
        self.ops.update(step, self.weight, self.moments, occurrences, groups, grad)

    @override
    def add_moment(self, moment: Moment) -> None:
        if moment.name not in self.moments:
            shape = (self.slots,) if moment.per == "row" else (self.slots, self.dim)
            self.moments[moment.name] = _zeros(shape, self.weight.device)

    @override
    def read(self, slots: Tensor, moment: str | None = None) -> Tensor:
        return self._tensor(moment)[slots]

    @override
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None) -> None:
        self._tensor(moment)[slots] = values

    @override
    def view(self, slots: slice, moment: str | None = None) -> Tensor:
        return self._tensor(moment)[slots]

    @override
    def to(self, device: torch.device) -> Self:
        if device == self.weight.device:
            return self
        moved = type(self)(0, self.dim, device=device, backend=self.backend_name)
        moved.slots = self.slots
        moved.weight = _zeros(self.weight.shape, device).copy_(self.weight)
        moved.moments = {name: _zeros(t.shape, device).copy_(t) for name, t in self.moments.items()}
        return moved

    def _tensor(self, moment: str | None) -> Tensor:
        return self.weight if moment is None else self.moments[moment]


def _zeros(shape: Sequence[int], device: torch.device) -> Tensor:
    return cpu_memory.zeros(shape) if device.type == "cpu" else torch.zeros(*shape, dtype=torch.float32, device=device)
