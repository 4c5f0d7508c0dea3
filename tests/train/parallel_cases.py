"""A model, its data and a run of it, for tests of training over several ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.config import Recipe, TrainRecipe
from hotbed.data import Loader, Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.nn import DLRM
from hotbed.train import Callback, Trainer
from tests.ranks import TIMEOUT_S
from tests.train import planted

Group = dist.ProcessGroup | None
TABLES = [hb.Table(name, rows=rows, dim=32) for name, rows in planted.ROWS.items()]  # a row can be cut in two
FEATURES = [hb.Feature(name, table=name) for name in planted.ROWS]
TIMEOUT = timedelta(seconds=TIMEOUT_S)
TRAIN = TrainRecipe(batch_size=64, device="cpu", precision="fp32", log_every=5)
RECIPE = Recipe.from_dict(
    {
        "name": "test",
        "data": {"path": "nowhere", "valid_split": "valid"},
        "model": {"class_path": "hotbed.nn.DLRM"},
        "dense_optimizer": {"class_path": "torch.optim.Adam"},
        "sparse_optimizer": {"class_path": "hotbed.optim.SGD"},
        "train": {"batch_size": 64},
    }
)


def make_trainer(
    group: Group,
    scheme: str | hb.Cut = "table",
    recipe: TrainRecipe = TRAIN,
    *,
    callbacks: Sequence[Callback] = (),
    overlap: bool = True,
    sgd: bool = False,
    timeout: timedelta = TIMEOUT,
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    model: nn.Module = DLRM(TABLES, FEATURES, planted.DENSE, bottom=(16, 32), top=(16, 1), seed=0)
    if group is not None or isinstance(scheme, hb.Cut):
        model = hb.distribute(model, scheme, hb.ParallelOptions(**options), group=group, timeout=timeout)
    dense = torch.optim.SGD(model.parameters(), lr=0.2) if sgd else torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = hb.optim.SGD(model, lr=0.5) if sgd else hb.optim.RowWiseAdagrad(model, lr=0.05)
    return Trainer(model, dense, sparse, recipe=recipe, callbacks=callbacks, overlap=overlap, group="user")


def place(group: Group) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def shares(batches: Iterable[Batch], group: Group) -> list[Batch]:
    """This rank's samples of every batch."""
    rank, size = place(group)
    return [b.take(torch.arange(len(b) * rank // size, len(b) * (rank + 1) // size)) for b in batches]


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters, tables and moments, whole; all ranks must call this."""
    found = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        state: dict[Any, dict[str, Tensor]] = optimizer.state_dict()["state"]
        found |= {f"{name}.{i}.{key}": t.detach().clone() for i, entry in state.items() for key, t in entry.items()}
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def hotbed_threads() -> list[str]:
    """Threads of iterations; that of the dense gradients lives as long as its model."""
    names = [thread.name for thread in threading.enumerate()]
    return [n for n in names if n.startswith(("hotbed-prefetch", "hotbed-broadcast", "hotbed-loader"))]


class InMemory(Source):
    """The planted data, a chunk per batch."""

    def __init__(self, count: int = 9, size: int = 30, last: int = 10) -> None:
        dense = tuple(f"x{i}" for i in range(planted.DENSE))
        sparse = tuple(SparseColumn(name=n, rows=r) for n, r in planted.ROWS.items())
        self.schema = Schema(sparse=sparse, dense=dense, labels=("click",), group="user")
        self.splits = ("train",)
        self._data = planted.batches(count, size, last=last)

    def _chunks(self, split: str) -> list[int]:
        return [len(batch) for batch in self._data]

    def _read(self, split: str, i: int) -> Batch:
        return self._data[i]


def loader_of(group: Group) -> Loader:
    """This rank's samples of the planted data, shuffled."""
    rank, size = place(group)
    return Loader(InMemory(), "train", 40, shuffle=True, window=3, rank=rank, world_size=size)
