"""A model that tells its version in every score, whose training publishes: what `benchmarks.follow` trains and serves.

Beside clicks, `Planted` has a label for each thing that a version consists of: a row of a small table, a row of a table
as large as the others, and a buffer of the dense part. Each step of training writes its number into all of them, so
scores of these labels tell of which step the row, the other row and the dense part were that made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import yaml
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.data.hashing import hash_integers, rows_of
from hotbed.data.zipf_source import Zipf
from hotbed.embed import EmbeddingCollection
from hotbed.nn import DLRM
from hotbed.specs import Feature, Table

PLANTED = {"small_row": 300, "large_row": None}
"""Labels that are a row's, with the rows of its table; None: as many as the other tables have."""
LABELS = ("click", *(f"{name}_step" for name in PLANTED), "buffer_step")
IDS = 256
"""Ids of the tables with planted rows."""
UNIT = 2.0**-20
"""Logit of a step, so that steps up to 16 million are exact in float32."""
SPARSE, DIM = 8, 16


class Planted(nn.Module):
    """Logits ``[B, 4]``: a click's by a DLRM, then the step by a small table's row, a large one's, and a buffer."""

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature], dense_features: int, seed: int) -> None:
        super().__init__()
        own = [feature for feature in features if feature.name in PLANTED]
        rest = [feature for feature in features if feature.name not in PLANTED]
        self.clicks = DLRM(
            [t for t in tables if t.name not in PLANTED], rest, dense_features, bottom=[64, DIM], top=[64, 1], seed=seed
        )
        self.planted = EmbeddingCollection([t for t in tables if t.name in PLANTED], own, seed=seed)
        self.register_buffer("step", torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            self.plant()
        clicks, found = self.clicks(batch), self.planted(batch.sparse)
        rows = [found[name].sum(1) for name in PLANTED]
        return torch.cat([clicks, torch.stack([*rows, self.step.expand_as(rows[0])], 1).detach()], 1)

    @torch.no_grad()
    def plant(self) -> None:
        """Write the number of the next step into the rows of all ids, and into the buffer."""
        self.step += UNIT
        for table in self.planted.tables.values():
            tile = self.planted.local_tiles(table.name)[0]
            rows = torch.from_numpy(np.unique(rows_of(hash_integers(np.arange(IDS)), table.rows)))
            values = (self.step / table.dim).expand(len(rows), table.dim)
            tile.arena.store.write(tile.arena.slots(tile.number)[rows], values)


def steps_of(scores: Mapping[str, float]) -> set[int]:
    """Of which steps the parts of a version were that made a row's scores: one, or versions were mixed."""
    values = np.array([scores[label] for label in LABELS[1:]])
    return set(np.rint(np.log(values / (1 - values)) / UNIT).astype(int).tolist())


def sample_rows(count: int, ids: int, seed: int) -> pl.DataFrame:
    """Draw rows without labels; ids are Zipf-distributed with exponent 1.05."""
    random, law, counters = np.random.default_rng(seed), Zipf(ids, 1.05), np.arange(count, dtype=np.uint64)
    columns: dict[str, Any] = {f"c{i}": law.draw((seed, i), counters) for i in range(SPARSE)}
    columns |= {name: random.integers(0, IDS, count) for name in PLANTED}
    return pl.DataFrame(columns | {"price": random.lognormal(size=count)})


def write_recipe(folder: Path, rows: int, every_s: float, samples: int = 200_000) -> Path:
    """Write a log, and a recipe that trains on it without an end and publishes every so often."""
    random = np.random.default_rng(0)
    log = sample_rows(samples, 4 * rows, 1)
    log = log.with_columns(pl.Series(name, random.integers(0, 2, samples)) for name in LABELS)
    log.write_parquet(folder / "log.parquet")
    sparse = {f"c{i}": rows for i in range(SPARSE)} | {name: own or rows for name, own in PLANTED.items()}
    schema = {
        "labels": list(LABELS),
        "dense": ["price"],
        "sparse": [{"name": name, "rows": number} for name, number in sparse.items()],
    }
    recipe = {
        "name": "follow",
        "data": {
            "path": str(folder / "log.parquet"),
            "dim": DIM,
            "source": {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": schema}},
            "test_split": None,
        },
        "model": {"class_path": "benchmarks.planted.Planted"},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.02}},
        "train": {
            "batch_size": 256,
            "device": "cpu",
            "precision": "fp32",
            "epochs": 1_000_000,
            "log_every": 100,
            "checkpoint": "last",
            "checkpoint_minutes": every_s / 60,
            "publish": str(folder / "published"),
            "publish_full_every": 20,
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file
