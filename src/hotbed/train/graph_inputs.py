"""Put what differs from step to step where a captured step reads it: its batch, and learning rates of torch.optim.

Hyperparameters of sparse optimizers are there already (`hotbed.embed.step_state`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hotbed.bags import Bags
from hotbed.batch import Batch
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.optim import SparseOptimizer


class Rates:
    """Learning rates of torch's optimizers, where kernels of a graph read them: in the device's memory."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = [o for o in optimizers if not isinstance(o, SparseOptimizer)], device
        self._written: dict[tuple[int, int], tuple[float, Tensor]] = {}

    def _groups(self) -> Generator[tuple[tuple[int, int], dict[str, Any]]]:
        """Yield what groups have a learning rate that is not on the device already."""
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if not isinstance(group["lr"], Tensor) or group["lr"].device != self._device:
                    yield (i, j), group

    def write(self) -> None:
        """Write those that have changed."""
        for place, group in self._groups():
            rate = float(group["lr"])
            last = self._written.get(place)
            if last is None:
                last = rate, torch.full((), rate, dtype=torch.float32, device=self._device)
            elif last[0] != rate:
                last[1].fill_(rate)
            self._written[place] = rate, last[1]

    @contextmanager
    def in_memory(self, *, capturing: bool = False) -> Generator[None]:
        """Let optimizers read them there inside; everybody else has numbers."""
        groups = list(self._groups())
        before = [dict(group) for _, group in groups]
        for place, group in groups:
            group["lr"] = self._written[place][1]
            if capturing and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for (_, group), own in zip(groups, before, strict=True):
                group.update(own)


class _StaticIds(Jagged):
    """Ids that a captured step reads."""

    __slots__ = ()

    @override
    def __getitem__(self, name: str) -> Bags:
        if self.fixed[self.index(name)] is None:
            raise BatchError(f"the model reads the ids of '{name}' itself, of which each batch has another number")
        return super().__getitem__(name)


def columns(batch: Batch) -> list[Tensor]:
    """List the tensors of a batch."""
    ids = batch.sparse
    given = (ids.values, ids.offsets, ids.weights, batch.dense, batch.labels, batch.weights, *batch.extra.values())
    return [t for t in given if t is not None]


def copy_of(batch: Batch) -> Batch:
    """Copy a batch to memory that it is to stay in."""

    def copied(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.clone()

    ids = batch.sparse
    static = _StaticIds(
        ids.names,
        ids.values.clone(),
        batch_size=ids.batch_size,
        fixed=ids.fixed,
        offsets=copied(ids.offsets),
        weights=copied(ids.weights),
        starts=ids.starts,
    )
    static.mark_verified(ids.verified)
    return replace(
        batch,
        sparse=static,
        dense=copied(batch.dense),
        labels=copied(batch.labels),
        weights=copied(batch.weights),
        extra={name: t.clone() for name, t in batch.extra.items()},
    )
