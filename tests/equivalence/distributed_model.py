"""Cases: a DLRM trained by a user's own loop, in processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hotbed as hb
from hotbed.batch import Batch
from hotbed.jagged import Jagged
from hotbed.nn import DLRM

TABLES = [hb.Table("a", rows=50, dim=32), hb.Table("b", rows=7, dim=32), hb.Table("c", rows=400, dim=32)]
FEATURES = [hb.Feature(t.name, table=t.name) for t in TABLES]


def make_model(device: str = "cpu") -> DLRM:
    torch.manual_seed(5)
    with torch.device(device):
        return DLRM(TABLES, FEATURES, dense_features=4, bottom=(16, 32), top=(16, 1), seed=2)


def samples(step: int, size: int) -> Batch:
    """The global batch of a step."""
    draw = torch.Generator().manual_seed(step)
    ids = {t.name: (torch.rand(size, generator=draw) ** 2 * t.rows).long() for t in TABLES}
    return Batch(
        sparse=Jagged.from_dict(ids),
        dense=torch.randn(size, 4, generator=draw),
        labels=torch.rand(size, 1, generator=draw).round(),
    )


def part(batch: Batch, rank: int, size: int, sizes: tuple[int, ...] | None = None) -> Batch:
    """A rank's samples."""
    counts = sizes or tuple(len(batch) // size for _ in range(size))
    first = sum(counts[:rank])
    return batch.take(torch.arange(first, first + counts[rank]))


def trained(
    group: dist.ProcessGroup | None,
    scheme: Any,
    steps: int,
    *,
    size: int = 24,
    sizes: tuple[int, ...] | None = None,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    clear_of_warnings: bool = False,
) -> dict[str, torch.Tensor]:
    """Global loss by step, and all parameters and tables."""
    if clear_of_warnings:
        logging.getLogger("hotbed").setLevel(logging.ERROR)
    model = make_model(device)
    rank, world = 0, 1
    if group is not None:
        model = hb.distribute(model, scheme, hb.ParallelOptions(**(options or {})), group=group)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.1)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        batch = part(samples(step, size), rank, world, sizes)
        assert batch.labels is not None
        total = F.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="sum")
        loss = hb.mean_over_ranks(total, len(batch), model)
        losses.append(loss.detach() / world)
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    if group is not None:
        own = torch.stack(losses)
        dist.all_reduce(own, group=group)
        return state | {"losses": own}
    return state | {"losses": torch.stack(losses)}
