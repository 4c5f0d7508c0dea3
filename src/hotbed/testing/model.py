"""Check a model: the contract of a recipe's ``model``, as tests that any class can run.

A test class of a model subclasses `ModelContract` and says which columns the model is given::

    class TestTwoTower(ModelContract):
        model = Component(class_path="two_tower.TwoTower", init_args={"width": 16})
        schema = Schema(sparse=(SparseColumn(name="user", rows=90), SparseColumn(name="item", rows=60)))

Its samples are drawn: ids of all columns, lists of up to `LONGEST` where their number varies, and labels that depend on
the ids. Tests go the way of ``hotbed train``, ``predict``, ``export`` and ``serve``, in several processes, too, which
must be able to import the test's module.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow ships no types.

from __future__ import annotations

import hashlib
import io
from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.config import Component, Recipe
from hotbed.data import Loader, Schema
from hotbed.serve.model import ServedModel
from hotbed.testing.processes import World, run_in_processes
from hotbed.train.build import build_trainer, open_source
from hotbed.train.callbacks import Callback
from hotbed.train.export import export_model
from hotbed.train.predict import predict
from hotbed.train.report import RunDirectory
from hotbed.train.run import train
from hotbed.train.trainer import Trainer

Group = dist.ProcessGroup | None

RANKS = 3
"""Processes of a world: of two, sums have one order."""
BATCH, STEPS = 24, 4
LONGEST = 5
"""Ids of a drawn list."""
DIM = 32
"""Columns of the tables, so that they can be cut in two."""

PLANS: dict[str, Any] = {
    "whole tables": "table",
    "cut into rows": "row",
    "cut into columns": "column",
    "grid of rows and columns": "grid",
    "copies on all ranks": "dp",
    "popular rows copied": {"*": {"hot_rows": 2, "rows": 0}},
    "in the host's memory": {"*": {"rows": 0, "tier": "host"}},
    "on disk, cached": {"*": {"rows": 0, "tier": "disk", "cache_rows": 8}},
}
"""What the same model is trained under: values of ``parallel.plan``."""

_ON_DISK = {"tier": "disk", "cache_rows": 8}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "RowWiseAdagrad": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
    "Adam": {"class_path": "hotbed.optim.Adam", "init_args": {"lr": 0.01}},
}


class ModelContract(ABC):
    """What every model must do; the tests of a subclass run for the model that its attributes name.

    Attributes
    ----------
    model
        As in a recipe: the class, and arguments besides those that hotbed gives.
    schema
        Columns; ``labels`` may be several.
    dim
        Columns of the tables, or by table; multiples of 32 can be cut into columns.
    """

    model: ClassVar[Component]
    schema: ClassVar[Schema]
    dim: ClassVar[int | Mapping[str, int]] = DIM

    @pytest.fixture
    def world(self) -> World:
        """What runs a function in several processes; override it where some are running already."""
        return run_in_processes

    @pytest.fixture
    def recipe(self, tmp_path: Path) -> dict[str, Any]:
        """A recipe of the model, as plain values, with drawn samples."""
        path = tmp_path / "samples.parquet"
        pq.write_table(drawn(self.schema, 8 * BATCH), path)
        source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": self.schema.to_dict()}}
        return {
            "name": "contract",
            "data": {"path": str(path), "dim": self.dim, "source": source, "test_split": None},
            "model": asdict(self.model),
            "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
            "sparse_optimizer": OPTIMIZERS["RowWiseAdagrad"],
            "train": {"batch_size": BATCH, "steps": STEPS, "device": "cpu", "precision": "fp32"},
        }

    def test_every_plan_trains_the_same_model(self, recipe: dict[str, Any], world: World) -> None:
        """To the bit, wherever rows are."""
        found = world(RANKS, trained_under, recipe, PLANS)[0]
        assert found == dict.fromkeys(PLANS, found["whole tables"])

    def test_every_plan_trains_the_same_model_with_adam(self, recipe: dict[str, Any], world: World) -> None:
        """Whose moments are as large as rows, and whose bias is corrected by steps."""
        plans = {name: PLANS[name] for name in ("whole tables", "grid of rows and columns", "on disk, cached")}
        found = world(RANKS, trained_under, recipe | {"sparse_optimizer": OPTIMIZERS["Adam"]}, plans)[0]
        assert found == dict.fromkeys(plans, found["whole tables"])

    def test_replicas_train_the_same_model_under_every_plan(self, recipe: dict[str, Any], world: World) -> None:
        """Two groups of two processes, whose copies are averaged."""
        plans = {name: PLANS[name] for name in ("whole tables", "cut into rows", "cut into columns")}
        found = world(4, trained_under, recipe | {"parallel": {"replicas": 2}}, plans)[0]
        assert found == dict.fromkeys(plans, found["whole tables"])

    def test_a_run_goes_on_under_another_plan(self, recipe: dict[str, Any], world: World, tmp_path: Path) -> None:
        """From a checkpoint, to the bit of the run that was not stopped."""
        plans = {name: PLANS[name] for name in ("on disk, cached", "cut into columns")}
        straight = world(RANKS, trained_under, recipe, {"": "row"})[0][""]
        assert world(RANKS, trained_in_two, recipe, plans, str(tmp_path / "checkpoint"))[0] == straight

    def test_one_process_with_rows_on_disk_trains_the_same_model(self, recipe: dict[str, Any]) -> None:
        """As with rows in the host's memory; with all in the device's, a model with dropout draws other numbers."""
        in_memory, on_disk = (recipe | {"memory": memory} for memory in ({"tier": "host"}, _ON_DISK))
        assert trained(None, in_memory) == trained(None, on_disk)

    def test_it_learns(self, recipe: dict[str, Any]) -> None:
        """Samples that it sees again and again; losses are finite."""
        recipe["train"] |= {"steps": 80, "epochs": 10}
        losses = _Losses()
        _fit(Recipe.from_dict(recipe), losses)
        first, last = np.mean(losses.found[:8]), np.mean(losses.found[-8:])
        assert last < 0.95 * first, f"the mean loss is {last:.4f} after ten epochs, and was {first:.4f} in the first"

    def test_a_batch_without_samples(self, recipe: dict[str, Any]) -> None:
        """As ranks get them where a batch has fewer samples than there are ranks."""
        source = open_source(Recipe.from_dict(recipe).data)
        trainer = build_trainer(Recipe.from_dict(recipe), source)
        empty = source.read("train", 0).take(torch.empty(0, dtype=torch.int64))
        logits = trainer.model.train()(empty)
        assert logits.shape[-2:] == (0, len(self.schema.labels))
        logits.sum().backward()
        assert all(p.isfinite().all() for p in trainer.model.state_dict().values())

    def test_predictions_are_those_that_are_served(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        """To the bit, by the exported model, whichever rows are beside a row, and without what training has beside."""
        run = RunDirectory(tmp_path / "runs", "contract")
        train(Recipe.from_dict(recipe), run, Console(file=io.StringIO()))
        data, out = Path(recipe["data"]["path"]), tmp_path / "scores.parquet"
        predict(run.path, data, out, trust_recipe=True)
        names = self.schema.labels
        columns = ["score"] if len(names) == 1 else [f"score_{name}" for name in names]
        expected = np.stack([c.to_numpy() for c in pq.read_table(out).select(columns).columns], axis=1)
        assert len(np.unique(expected)) > len(expected) // 2, "nearly all rows have one score"
        export_model(run.path, tmp_path / "model", trust_recipe=True)
        rows = pq.read_table(data).drop_columns(list(names)).combine_chunks()
        served = ServedModel.open(tmp_path / "model")
        try:
            np.testing.assert_array_equal(served.score(rows)[0], expected)
            for i in (0, 7):
                np.testing.assert_array_equal(served.score(rows.slice(i, 1))[0], expected[i : i + 1])
        finally:
            served.close()


# -- samples -----------------------------------------------------------------------------------------------------------


def drawn(schema: Schema, samples: int, seed: int = 0) -> Any:
    """Draw samples of a schema, an Arrow table; labels depend on whether ids are odd, and on the first numerical."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    score = rng.normal(0, 0.2, samples)
    for column in schema.sparse:
        most = column.ids or LONGEST
        ids = rng.integers(0, column.rows, (samples, most))
        lengths = np.full(samples, most) if column.ids else rng.integers(0, LONGEST + 1, samples)
        here = np.arange(most) < lengths[:, None]
        score += ((ids % 2 * 2 - 1) * here).sum(1) / np.maximum(lengths, 1)
        columns[column.name] = ids[:, 0] if column.ids == 1 else _lists(ids[here], lengths)
    for i, name in enumerate(schema.dense):
        values = rng.normal(0, 1, samples).astype(np.float32)
        score += values * (i == 0)
        columns[name] = values
    for i, name in enumerate(schema.labels):
        columns[name] = (score > 0.3 * i).astype(np.float32)
    return pa.table(columns)


def _lists(values: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
    return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), pa.array(values))


# -- runs, also as one rank of several -----------------------------------------------------------------------------


def trained_under(group: Group, recipe: Mapping[str, Any], plans: Mapping[str, Any]) -> dict[str, str]:
    """Train by a recipe under one plan after the other; by plan, what `trained` returns."""
    return {name: trained(group, _with_plan(recipe, plan)) for name, plan in plans.items()}


def trained(_: Group, recipe: Mapping[str, Any]) -> str:
    """Train by a recipe, and return the SHA-256 of the losses, and of everything that was learned."""
    losses = _Losses()
    return _digest(losses, _fit(Recipe.from_dict(recipe), losses))


def trained_in_two(_: Group, recipe: Mapping[str, Any], plans: Mapping[str, Any], checkpoint: str) -> str:
    """Train half of the steps under each of two plans, the second from a checkpoint of the first."""
    first, second = (Recipe.from_dict(_with_plan(recipe, plan)) for plan in plans.values())
    losses = _Losses(stop_at=STEPS // 2)
    trainer = _fit(first, losses)
    save_checkpoint(checkpoint, trainer.parts(), step=trainer.step).wait()
    trainer.ranks.add(0)  # nobody reads before it is there
    losses.stop_at = None
    return _digest(losses, _fit(second, losses, checkpoint))


def _with_plan(recipe: Mapping[str, Any], plan: Any) -> dict[str, Any]:
    return {**recipe, "parallel": {**recipe.get("parallel", {}), "plan": plan}}


class _Losses(Callback):
    """Keeps the losses, and ends a run at a step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.found: list[float] = []
        self.stop_at = stop_at

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.found.append(loss)
        if trainer.step == self.stop_at:
            trainer.stop = True


def _fit(recipe: Recipe, losses: _Losses, checkpoint: str | None = None) -> Trainer:
    source = open_source(recipe.data)
    trainer = build_trainer(recipe, source)
    ranks = trainer.ranks
    loader = Loader(source, "train", recipe.train.batch_size, rank=ranks.rank, world_size=ranks.size)
    if checkpoint is not None:
        load_checkpoint(checkpoint, trainer.parts())
        trainer.resume_data(loader)
    trainer.callbacks.append(losses)
    trainer.fit(loader)
    return trainer


def _digest(losses: _Losses, trainer: Trainer) -> str:
    state = dict(trainer.model.state_dict())
    for name, optimizer in trainer.optimizers.items():
        entries: Mapping[Any, Mapping[str, Any]] = optimizer.state_dict()["state"]
        state |= {f"{name}.{i}.{key}": t for i, entry in entries.items() for key, t in entry.items()}
    digest = hashlib.sha256(np.array(losses.found).tobytes())
    for name in sorted(state):
        values = (state[name].detach() + 0.0).contiguous()  # −0 is 0: tables that begin with zeros have both
        digest.update(name.encode() + values.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
