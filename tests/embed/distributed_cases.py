"""Cases: a model with two collections, distributed by several plans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

import hotbed as hb
from hotbed import optim
from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.plan import Cut
from hotbed.specs import Feature, Table

SIZE = 3
SAMPLES = 6
"""Per rank."""

PLANS: Mapping[str, Mapping[str, str | Cut]] = {
    "a": {"left.t": "grid", "u": "row", "right.t": "dp", "v": "row"},
    "b": {"left.t": Cut(rows=0, hot_rows=5), "u": "column", "right.t": "column", "v": "column"},
}
"""Two plans by the names that `Model` has for its tables."""


class Model(nn.Module):
    """Two collections with a table of the same name, and a head."""

    note = "an attribute"

    def __init__(self) -> None:
        super().__init__()
        self.left = EmbeddingCollection(
            [Table("t", rows=40, dim=32), Table("u", rows=9, dim=20, dtype="bf16")],
            [Feature("bag", "t", pooling="mean"), Feature("user", "u"), Feature("walk", "t", pooling="none")],
            seed=1,
        )
        self.right = EmbeddingCollection(
            [Table("t", rows=25, dim=32), Table("v", rows=12, dim=32)],
            [Feature("pair", "t"), Feature("item", "v")],
            seed=2,
        )
        torch.manual_seed(3)
        self.head = nn.Linear(32 + 20 + 2 * 32, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: Jagged) -> torch.Tensor:
        left, right = self.left(ids), self.right(ids)
        score = self.head(torch.cat([left["bag"], left["user"], right["pair"], right["item"]], dim=1))[:, 0]
        return score + left["walk"].to_padded_tensor(0.0).float().square().sum((1, 2))


def ids(step: int, rank: int, dtype: torch.dtype = torch.int64) -> Jagged:
    """What a rank sees in a step, with a feature that no collection knows."""
    draw = torch.Generator().manual_seed(100 * step + rank)

    def drawn(rows: int, *shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=draw) ** 2 * rows).to(dtype)

    offsets = torch.tensor([0, 2, 2, 5, 6, 9, 9])
    return Jagged.from_dict(
        {
            "item": drawn(12, SAMPLES),
            "pair": drawn(25, SAMPLES, 2),
            "unknown": drawn(9, SAMPLES),
            "walk": (drawn(40, 9), offsets),
            "user": drawn(9, SAMPLES),
            "bag": (drawn(40, 9), offsets),
        }
    )


def distributed(group: dist.ProcessGroup, plan: str) -> nn.Module:
    return hb.distribute(Model(), PLANS[plan], group=group)


def one_table(dtype: str = "fp32") -> EmbeddingCollection:
    return EmbeddingCollection([Table("t", 9, 256, dtype=dtype)], [Feature("f", "t")])


Optimizers = list[torch.optim.Optimizer]


def loss(model: nn.Module, step: int, here: list[int]) -> torch.Tensor:
    """Mean over the samples of these ranks."""
    return torch.stack([(model(ids(step, r)) - step - r).square().mean() for r in here]).mean()


def both(model: nn.Module) -> Optimizers:
    """Of dense parameters and of tables."""
    groups = [{"tables": ["left.t"], "lr": 0.1, "initial_accumulator": 0.1}]
    return [torch.optim.SGD(model.parameters(), lr=0.05), optim.RowWiseAdagrad(model, lr=0.05, groups=groups)]


def step_all(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def finished(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """Parameters, tables, and state of the optimizers."""
    found = dict(model.state_dict())
    for number, optimizer in enumerate(optimizers):
        for i, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{i}.{name}": value for name, value in state.items() if value is not None}
    return {name: value.detach().clone() for name, value in found.items()}


@contextmanager
def said() -> Iterator[list[str]]:
    """Warnings of the library."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("hotbed")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
