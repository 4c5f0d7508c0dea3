"""A log of clicks, a recipe of two towers for it, and a catalogue of three items, for tests of retrieval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

import hotbed as hb
from hotbed.config import Recipe
from hotbed.data import Schema, SparseColumn
from hotbed.data.items import ItemSet
from hotbed.train.runs.build import build, open_source

SCHEMA = Schema(
    sparse=(
        SparseColumn(name="user", rows=30),
        SparseColumn(name="item", rows=50),
        SparseColumn(name="genre", rows=9, ids=None, pooling="mean"),
        SparseColumn(name="refused", rows=50, table="item", ids=None, pooling="mean"),
    ),
    dense=("age",),
    labels=("click",),
)
MODEL: dict[str, Any] = {"class_path": "hotbed.nn.TwoTower", "init_args": {"item": ["item", "genre"], "widths": [8]}}


def log(rows: int = 60, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    items = rng.zipf(1.5, rows) % 40
    return pa.table(
        {
            "user": rng.integers(0, 30, rows),
            "item": items,
            "genre": [[int(i % 8), int(i % 3)][: int(i % 3)] for i in items],
            "refused": [rng.choice(items, n).tolist() for n in rng.integers(0, 3, rows)],
            "age": rng.normal(size=rows).astype(np.float32),
            "click": (rng.random(rows) < 0.6).astype(np.float32),
        }
    )


def recipe_for(folder: Path, **retrieval: Any) -> dict[str, Any]:
    path = folder / "log.parquet"
    pq.write_table(log(), path, row_group_size=20)
    source = {
        "class_path": "hotbed.data.ParquetSource",
        "init_args": {"schema": SCHEMA.to_dict(), "ids": "raw"},
    }
    return {
        "name": "retrieval",
        "data": {"path": str(path), "dim": 16, "source": source, "test_split": None},
        "model": MODEL,
        "retrieval": retrieval,
        "dense_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "sparse_optimizer": {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 20, "steps": 3, "device": "cpu", "precision": "fp32"},
    }


def catalogue() -> ItemSet:
    features = hb.Jagged.from_dict({"item": [2, 5, 7], "genre": [[1], [], [0, 2]]})
    return ItemSet(torch.tensor([2, 5, 7]), features, torch.tensor([3, 0, 1]))


def learned(_: dist.ProcessGroup | None, values: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and everything that was learned, by the recipe's steps."""
    recipe = Recipe.from_dict(values)
    trainer = build(recipe, source := open_source(recipe.data))
    losses: list[float] = []

    class Keep(hb.Callback):
        def on_step(self, trainer: hb.Trainer, loss: float) -> None:
            losses.append(loss)

    trainer.callbacks.append(Keep())
    whole = [source.read("train", i) for i in range(3)]
    virtual = trainer.ranks.virtual
    own = [replace(b.take(torch.arange(len(b))[virtual.share(len(b))]), slices=virtual.slices(len(b))) for b in whole]
    trainer.fit(own)
    state = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    correction: Any = trainer.parts()["retrieval"].state_dict().get("correction", {})
    return losses, state | {f"correction.{k}": v.clone() for k, v in correction.items()}
