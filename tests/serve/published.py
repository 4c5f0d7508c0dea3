"""A tiny model whose scores tell the version of its rows and dense parameters, and what training publishes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import hotbed as hb
from hotbed.checkpoint import save_checkpoint
from hotbed.checkpoint.storage import directory
from hotbed.data import Schema
from hotbed.data.columns import SparseColumn
from hotbed.data.encoding.encoder import Encoder
from hotbed.nn.dense_program import DensePart, trace_dense_part
from hotbed.serve.model_files import ChangeSet, ExportedModel
from hotbed.serve.scorer import Scorer
from hotbed.train.runs.model_export import Model, write_change, write_model

DYNAMIC = hb.Table("users", rows="dynamic", dim=4, init_bound=0.5, dynamic=hb.Dynamic(256 * 16))
TABLES = [
    hb.Table("items", rows=300, dim=4),
    hb.Table("more", rows=70, dim=4),
    hb.Table("bf16", rows=300, dim=4, dtype="bf16", fp32_rows=5),
    hb.Table("int8", rows=200, dim=8, dtype="int8"),
    hb.Table("fp8", rows=150, dim=8, dtype="fp8"),
    DYNAMIC,
]
FEATURES = [
    hb.Feature("item", table="items"),
    hb.Feature("history", table="items", pooling="mean"),
    hb.Feature("other", table="more"),
    *(hb.Feature(name, table=name) for name in ("bf16", "int8", "fp8")),
    hb.Feature("user", table="users"),
]
SMALL = ([TABLES[0]], [FEATURES[0]])
WITH_IDS = ([TABLES[0], DYNAMIC], [FEATURES[0], FEATURES[-1]])
"""A table of rows and a dynamic table."""


class Planted(nn.Module):
    """Logits ``[B, features + 1]``: the sum of each feature's vector, then a dense parameter."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables, features, seed=3)
        self.version = nn.Parameter(torch.zeros(1))

    def forward(self, batch: hb.Batch) -> Tensor:
        found = self.embeddings(batch.sparse)
        sums = [found[f.name].sum(1) for f in self.embeddings.features]
        return torch.stack([*sums, self.version.expand_as(sums[0])], 1)

    def plant(self, version: float) -> None:
        """Make all rows of tables that are not dynamic this over their columns, and the parameter as well."""
        with torch.no_grad():
            self.version.fill_(version)
            for table in self.embeddings.tables.values():
                if table.dynamic is None:
                    tile = self.embeddings.local_tiles(table.name)[0]
                    values = torch.full((table.rows, table.dim), version / table.dim)
                    tile.arena.store.write(tile.arena.slots(tile.number), values)

    def train_some(self, seed: int, most_id: int = 10_000) -> None:
        """Take a step with some random ids."""
        optimizer = hb.optim.Adagrad(self, lr=0.1) if not hasattr(self, "_sparse") else self._sparse
        self._sparse = optimizer
        self.train()
        self(batch_of(self, 64, seed, most_id)).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            self.version += 1


def batch_of(model: Planted, size: int, seed: int, most_id: int = 10_000) -> hb.Batch:
    generator = torch.Generator().manual_seed(seed)
    ids: dict[str, Any] = {}
    for feature in model.embeddings.features:
        table = model.embeddings.tables[feature.table]
        most = most_id if table.dynamic is not None else table.rows
        if feature.name == "history":
            lengths = torch.randint(0, 4, (size,), generator=generator)
            values = torch.randint(most, (int(lengths.sum()),), generator=generator)
            ids[feature.name] = (values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
        else:
            ids[feature.name] = torch.randint(most, (size,), generator=generator)
    return hb.Batch(sparse=hb.Jagged.from_dict(ids))


@dataclass
class Publisher:
    """Saves checkpoints of a model, and publishes them in a directory as training does."""

    model: Planted
    root: Path
    step: int = 0

    def __post_init__(self) -> None:
        self.published = self.root / "published"

    def checkpoint(self, step: int) -> Path:
        return self.root / f"checkpoint-{step}"

    def save(self) -> int:
        self.step += 10
        save_checkpoint(self.checkpoint(self.step), {"model": self.model}, step=self.step).wait()
        return self.step

    def export(self) -> ExportedModel:
        """Export the newest checkpoint, which is of the model as it is."""
        place, described = self.published / f"model-{self.step:012}", self._described()
        program = _traced(tuple(self.model.embeddings.tables.values()), tuple(self.model.embeddings.features))
        with torch.no_grad():
            program.state_dict["model.version"].copy_(described.state["model.version"])
        write_model(place, directory(self.checkpoint(self.step)), described, program)
        return ExportedModel.open(place)

    def change(
        self, base: int, sequence: int, *, name: str | None = None, dense: dict[str, Tensor] | None = None
    ) -> ChangeSet:
        """Publish what changed between two checkpoints; the newer one is of the model as it is."""
        place = self.published / (name or f"change-{sequence:012}")
        old, new = (directory(self.checkpoint(step)) for step in (base, sequence))
        model = self._described()
        write_change(place, new, old, model if dense is None else replace(model, state=dense))
        return ChangeSet.open(place)

    def step_to_model(self, seed: int) -> ExportedModel:
        """Train, save and export the newest checkpoint, without publishing the changes that lead to it."""
        self.model.train_some(seed, most_id=400)
        self.save()
        return self.export()

    def _described(self) -> Model:
        collection = self.model.embeddings
        columns = tuple(SparseColumn(name=f.name, rows=1000) for f in collection.features)
        return Model(
            name="planted",
            labels=tuple(f"label {i}" for i in range(len(columns) + 1)),
            encoder=Encoder(Schema(sparse=columns).inputs, ids="raw"),
            hash=None,
            collections={"embeddings": collection},
            state={"model.version": self.model.version.detach().clone()},
            inputs=0,
            dtype=torch.float32,
        )

    def step_on(self, seed: int) -> ChangeSet:
        """Train, save and publish the changes since the newest checkpoint."""
        base = self.step
        self.model.train_some(seed)
        return self.change(base, self.save())


@cache
def _traced(tables: tuple[hb.Table, ...], features: tuple[hb.Feature, ...]) -> ExportedProgram:
    """Trace once per process, because tracing takes most of the time of a small export."""
    return trace_dense_part(DensePart(Planted(list(tables), list(features))), 0)


def _copied(model: Planted) -> Planted:
    copy = Planted(list(model.embeddings.tables.values()), list(model.embeddings.features))
    copy.load_state_dict(model.state_dict())
    return copy


def scores_of(model: Planted, batch: hb.Batch) -> np.ndarray:
    """What prediction computes."""
    with Scorer.of_model(_copied(model).eval(), torch.device("cpu")) as scorer:
        return scorer(batch)
