"""A model whose embeddings the tests of optimizers train, and every optimizer there is."""

from __future__ import annotations

import torch
from torch import nn

from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.optim import SparseOptimizer
from hotbed.specs import Feature, Table
from tests.ops.naive_rules import optimizers

ROWS, DIM = 12, 4
OPTIMIZERS = optimizers()


class Tower(nn.Module):
    """Two tables and a head, so that models can hold several collections with equal table names."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        tables = [Table("a", rows=rows, dim=DIM), Table("b", rows=rows, dim=DIM)]
        self.embeddings = EmbeddingCollection(tables, [Feature("a", table="a"), Feature("b", table="b")])

    def forward(self, batch: Jagged) -> torch.Tensor:
        return self.embeddings(batch).concatenate()

    def values(self) -> torch.Tensor:
        return torch.cat([self.embeddings.weight("a"), self.embeddings.weight("b")])


def batch(seed: int = 0, size: int = 16, rows: int = ROWS) -> Jagged:
    """Random ids below ``rows``."""
    draw = torch.Generator().manual_seed(seed)
    return Jagged.from_dict({n: torch.randint(0, rows, (size,), generator=draw) for n in "ab"})


def loss(model: nn.Module, ids: Jagged) -> torch.Tensor:
    return (model(ids) - torch.linspace(-1, 1, 2 * DIM)).square().sum(1).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Jagged]) -> None:
    for ids in batches:
        optimizer.zero_grad()
        loss(model, ids).backward()
        optimizer.step()


def state(optimizer: SparseOptimizer) -> list[dict[str, torch.Tensor]]:
    """Copies of the state of each table."""
    saved = optimizer.state_dict()["state"]
    return [{name: t.clone() for name, t in saved[i].items()} for i in sorted(saved)]
