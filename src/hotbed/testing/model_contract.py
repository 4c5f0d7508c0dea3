"""Test a model: the contract of a recipe's ``model``.

::

    class TestTwoTower(ModelContract):
        model = Component(class_path="two_tower.TwoTower", init_args={"width": 16})
        schema = Schema(sparse=(SparseColumn(name="user", rows=90), SparseColumn(name="item", rows=60)))

The samples are random: ids of all columns (lists of up to `LONGEST` ids), weights of ids, and labels that depend on the
ids. Tests train, predict, export and serve in the same way as the commands. Some tests run in several processes, which
must be able to import the test's module.
"""
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import get_context
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

from hotbed.batch import Batch
from hotbed.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from hotbed.config import Component, Recipe
from hotbed.data import Loader, Schema
from hotbed.serve.model_files import ChangeSet
from hotbed.serve.served_model import ServedModel
from hotbed.train.ranks.process_group import end_groups
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.callbacks import Callback
from hotbed.train.runs.model_export import export_model, export_single
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.run import train
from hotbed.train.runs.stored_model import evaluate_checkpoint
from hotbed.train.trainer import Trainer
from hotbed.train.workflows.prediction import predict

Group = dist.ProcessGroup | None

RANKS = 3
"""Number of processes. The sum of three numbers may depend on their order, unlike the sum of two."""
BATCH, STEPS = 24, 4
LONGEST = 5
"""Largest number of ids in a drawn list."""
DIM = 32
"""Columns of the tables, which are enough to cut tables into two parts."""

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
"""Values of ``parallel.plan`` under which every model must train to the same bits."""


class ModelContract(ABC):
    """Tests that every model must pass."""

    model: ClassVar[Component]  # as in a recipe: the class and its own arguments
    schema: ClassVar[Schema]  # columns of the samples; there may be several labels
    dim: ClassVar[int | Mapping[str, int]] = DIM  # columns of all tables, or by table; multiples of 32 can be cut
    retrieval: ClassVar[Mapping[str, Any] | None] = None  # `retrieval` of the recipe, for a model that retrieves items

    @pytest.fixture
    def world(self) -> World:
        """Return the function that runs tests in several processes. Override this fixture to reuse processes."""
        return run_in_processes

    @pytest.fixture
    def recipe(self, tmp_path: Path) -> dict[str, Any]:
        """Return a recipe of the model with random samples."""
        return contract_recipe(self, tmp_path)

    def test_every_plan_trains_to_the_same_bits(self, recipe: dict[str, Any], world: World) -> None:
        found = world(RANKS, train_all, with_plans(recipe, PLANS))[0]
        assert found == dict.fromkeys(PLANS, found["whole tables"])

    def test_any_number_of_processes_trains_to_the_same_bits(
        self, recipe: dict[str, Any], world: World, tmp_path: Path
    ) -> None:
        if self.retrieval is not None:
            pytest.skip("a retrieval has one virtual rank per process")
        recipe["parallel"] = {"virtual_ranks": 4, "plan": "row"}
        straight = world(1, train_all, {"": recipe})[0][""]
        checkpoint = str(tmp_path / "checkpoint")
        losses = world(RANKS, train_first_half, recipe, checkpoint)[0]
        assert world(1, train_second_half, recipe, checkpoint, losses)[0] == straight

    def test_replicas_train_to_the_same_bits_under_every_plan(self, recipe: dict[str, Any], world: World) -> None:
        plans = ("whole tables", "cut into rows", "cut into columns")
        found = world(4, train_all, with_plans(recipe | {"parallel": {"replicas": 2}}, plans))[0]
        assert found == dict.fromkeys(plans, found["whole tables"])

    def test_a_run_resumes_under_another_plan_to_the_same_bits(
        self, recipe: dict[str, Any], world: World, tmp_path: Path
    ) -> None:
        recipes = with_plans(recipe, ("cut into rows", "on disk, cached", "cut into columns"))
        straight = world(RANKS, train_all, {"": recipes.pop("cut into rows")})[0][""]
        assert world(RANKS, train_halves, *recipes.values(), str(tmp_path / "checkpoint"))[0] == straight

    def test_rows_on_disk_train_to_the_same_bits(self, recipe: dict[str, Any]) -> None:
        memories = {"host": {"tier": "host"}, "disk": {"tier": "disk", "cache_rows": 8}}
        found = train_all(None, {name: recipe | {"memory": memory} for name, memory in memories.items()})
        assert found["host"] == found["disk"]

    def test_it_learns(self, recipe: dict[str, Any]) -> None:
        recipe["train"] |= {"steps": 80, "epochs": 10}
        losses, _ = _fit(recipe)
        first, last = np.mean(losses[:8]), np.mean(losses[-8:])
        assert last < 0.95 * first, (
            f"mean loss after ten epochs: got {last:.4f}, expected less than 0.95 of the first, {first:.4f}"
        )

    def test_a_batch_without_samples(self, recipe: dict[str, Any]) -> None:
        source = open_source(Recipe.from_dict(recipe).data)
        trainer = build(Recipe.from_dict(recipe), source)
        empty = source.read("train", 0).take(torch.empty(0, dtype=torch.int64))
        logits = trainer.model.train()(empty)
        assert logits.shape[-2:] == (0, len(self.schema.labels))
        logits.sum().backward()
        assert all(p.isfinite().all() for p in trainer.model.state_dict().values())

    def test_served_scores_have_the_bits_of_predictions(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        run = run_of(recipe, tmp_path / "runs")
        expected = _predicted(run, recipe)
        assert len(np.unique(expected)) > len(expected) // 2, "nearly all rows have the same score"
        export_model(run, tmp_path / "model", trust_recipe=True)
        rows = _inputs(recipe)
        with closing(ServedModel.open(tmp_path / "model")) as served:
            np.testing.assert_array_equal(served.score(rows)[0], expected)
            for i in (0, 7):
                np.testing.assert_array_equal(served.score(rows.slice(i, 1))[0], expected[i : i + 1])

    def test_an_exported_program_has_the_predictions(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        run = run_of(recipe, tmp_path / "runs")
        export_single(run, tmp_path / "program.pt2", trust_recipe=True)
        program = torch.export.load(tmp_path / "program.pt2").module()
        source = open_source(Recipe.from_dict(recipe).data)
        batch = Batch.concatenate([source.read("train", i) for i in range(len(source.chunks("train")))])
        weighted = [column.name for column in self.schema.sparse if column.weights is not None]
        ids: dict[str, Any] = {}
        weights: dict[str, torch.Tensor] = {}
        for name in batch.sparse.names:
            bags = batch.sparse[name]
            values = bags.values.long()
            ids[name] = (values, bags.lengths()) if bags.fixed is None else values.view(-1, bags.fixed)
            if name in weighted and bags.weights is not None:
                weights[name] = bags.weights if bags.fixed is None else bags.weights.view(-1, bags.fixed)
        logits = program(batch.dense, ids, *([weights] if weights else []))
        np.testing.assert_allclose(logits.detach().double().sigmoid().numpy(), _predicted(run, recipe), atol=1e-6)

    def test_evaluation_uses_the_predictions(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        run = run_of(recipe, tmp_path / "runs")
        found = evaluate_checkpoint(run, "train", trust_recipe=True)[2]
        scores, labels = _predicted(run, recipe), pq.read_table(recipe["data"]["path"])
        for i, name in enumerate(self.schema.labels):
            p, y = scores[:, i], labels[name].to_numpy()
            of_label = found.tasks[name] if found.tasks else found
            assert of_label.logloss == pytest.approx(-np.mean(np.log(np.where(y > 0, p, 1 - p))), rel=1e-5)
            positive, negative = p[y > 0][:, None], p[y == 0]
            above = (positive > negative) + 0.5 * (positive == negative)
            assert of_label.auc == pytest.approx(np.mean(above), abs=1e-5)

    def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        straight = run_of(recipe, tmp_path / "straight")
        stopped = run_of(recipe, tmp_path / "runs", steps=STEPS // 2)
        resumed = run_of(recipe, tmp_path / "runs", resume=str(stopped))
        assert resumed != stopped
        learned: list[str] = []
        for run in (straight, resumed, stopped):
            trainer = build(Recipe.from_dict(recipe))
            load_checkpoint(find_checkpoint(run), trainer.parts())
            learned.append(_digest([], trainer))
        assert learned[0] == learned[1] != learned[2]
        losses = _losses_by_step(straight)
        assert _losses_by_step(resumed) == {step: loss for step, loss in losses.items() if step > STEPS // 2}

    def test_a_server_applies_published_changes_to_the_bit(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        published, rows = tmp_path / "published", _inputs(recipe)
        recipe["train"] |= {"publish": str(published)}
        run = run_of(recipe, tmp_path / "runs", steps=STEPS // 2)
        with closing(ServedModel.open(published / f"model-{STEPS // 2:012}")) as served:
            before = _predicted(run, recipe)
            np.testing.assert_array_equal(served.score(rows)[0], before)
            assert run_of(recipe, tmp_path / "runs", resume="auto") == run
            served.apply(ChangeSet.open(published / f"change-{STEPS:012}"))
            after = _predicted(run, recipe)
            np.testing.assert_array_equal(served.score(rows)[0], after)
            assert (before != after).any()


# -- samples -----------------------------------------------------------------------------------------------------------


def contract_recipe(contract: ModelContract | type[ModelContract], folder: Path) -> dict[str, Any]:
    """Write random samples to a folder, and return a recipe that trains a contract's model on these samples."""
    path = folder / "samples.parquet"
    pq.write_table(draw_samples(contract.schema, 8 * BATCH), path)
    source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": contract.schema.to_dict()}}
    return {
        "name": "contract",
        "data": {"path": str(path), "dim": contract.dim, "source": source, "test_split": None},
        "model": asdict(contract.model),
        "retrieval": contract.retrieval,
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": BATCH, "steps": STEPS, "device": "cpu", "precision": "fp32"},
    }


def draw_samples(schema: Schema, samples: int, seed: int = 0) -> Any:
    """Draw samples as an Arrow table. Labels depend on the parity of ids, and on the first dense column."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    score = rng.normal(0, 0.2, samples)
    for column in schema.sparse:
        most = column.ids or LONGEST
        ids = rng.integers(0, column.rows, (samples, most))
        stored: dict[str, NDArray[Any]] = {column.name: ids}
        lengths = np.full(samples, most) if column.ids else rng.integers(0, LONGEST + 1, samples)
        here, weights = np.arange(most) < lengths[:, None], np.ones(ids.shape, np.float32)
        if column.weights is not None:
            weights[:] = rng.uniform(-0.5, 2, ids.shape)
            stored[column.weights] = weights
        score += ((ids % 2 * 2 - 1) * weights * here).sum(1) / np.maximum(lengths, 1)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
        for name, values in stored.items():
            flat = pa.array(values[here])
            columns[name] = flat if column.ids == 1 else pa.ListArray.from_arrays(offsets, flat)
    for i, name in enumerate(schema.dense):
        columns[name] = values = rng.normal(0, 1, samples).astype(np.float32)
        score += values * (i == 0)
    for i, name in enumerate(schema.labels):
        columns[name] = (score > 0.3 * i).astype(np.float32)
    return pa.table(columns)


# -- runs, also as one rank of several -----------------------------------------------------------------------------


def with_plans(recipe: Mapping[str, Any], plans: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return one copy of the recipe per plan. ``plans`` and the keys of the result are names in `PLANS`."""
    return {n: {**recipe, "parallel": {**recipe.get("parallel", {}), "plan": PLANS[n]}} for n in plans}


def train_all(_: Group, recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Train each recipe. For each name of a recipe, return the SHA-256 of losses, model and moments together."""
    return {name: _digest(*_fit(recipe)) for name, recipe in recipes.items()}


def train_halves(_: Group, first: Mapping[str, Any], second: Mapping[str, Any], checkpoint: str) -> str:
    """Train half of the steps with ``first``, and resume from the checkpoint with ``second``.

    Return the SHA-256 of all losses, the model and the moments, as in `train_all`.
    """
    return train_second_half(_, second, checkpoint, train_first_half(_, first, checkpoint))


def train_first_half(_: Group, recipe: Mapping[str, Any], checkpoint: str) -> list[float]:
    """Train half of the steps and save a checkpoint. Return the losses."""
    losses, trainer = _fit({**recipe, "train": {**recipe["train"], "steps": STEPS // 2}})
    save_checkpoint(checkpoint, trainer.parts(), step=trainer.step).wait()
    trainer.ranks.add(0)  # other ranks wait for the checkpoint
    return losses


def train_second_half(_: Group, recipe: Mapping[str, Any], checkpoint: str, losses: list[float]) -> str:
    """Train the other steps. Return the SHA-256 of all losses, the model and the moments, as in `train_all`."""
    later, trainer = _fit(recipe, checkpoint)
    return _digest(losses + later, trainer)


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.found.append(loss)


def _fit(values: Mapping[str, Any], checkpoint: str | None = None) -> tuple[list[float], Trainer]:
    """Train a recipe, from a checkpoint if one is given. Return the loss of each step, and the trainer."""
    recipe = Recipe.from_dict(dict(values))
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    ranks = trainer.ranks
    total = ranks.virtual.total
    loader = Loader(
        source, "train", recipe.train.batch_size, rank=ranks.rank, world_size=ranks.size, virtual_ranks=total
    )
    if checkpoint is not None:
        load_checkpoint(checkpoint, trainer.parts())
        trainer.resume_data(loader)
    trainer.callbacks.append(losses := _Losses())
    trainer.fit(loader)
    return losses.found, trainer


def run_of(recipe: Mapping[str, Any], root: Path, *, steps: int = STEPS, resume: str | None = None) -> Path:
    """Train like ``hotbed train``, with a checkpoint at the end. Return the run's directory."""
    values = {"checkpoint": "last", "log_every": 1, **recipe["train"], "steps": steps}
    found = Recipe.from_dict({**recipe, "train": values})
    summary = train(found, RunDirectory(root, found.name), Console(file=io.StringIO()), resume=resume)
    return Path(summary["run"])


def _losses_by_step(run: Path) -> dict[int, float]:
    entries = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def _predicted(run: Path, recipe: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the scores ``[B, T]`` that ``hotbed predict`` writes for the samples of the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scores.parquet"
        predict(run, Path(recipe["data"]["path"]), out, trust_recipe=True)
        names = _labels(recipe)
        columns = ["score"] if len(names) == 1 else [f"score_{name}" for name in names]
        return np.stack([c.to_numpy() for c in pq.read_table(out).select(columns).columns], axis=1)


def _inputs(recipe: Mapping[str, Any]) -> Any:
    """Return the samples without labels as an Arrow table."""
    return pq.read_table(recipe["data"]["path"]).drop_columns(_labels(recipe)).combine_chunks()


def _labels(recipe: Mapping[str, Any]) -> list[str]:
    return list(recipe["data"]["source"]["init_args"]["schema"]["labels"])


def _digest(losses: list[float], trainer: Trainer) -> str:
    state = dict(trainer.model.state_dict())
    for name, optimizer in trainer.optimizers.items():
        entries: Mapping[Any, Mapping[str, Any]] = optimizer.state_dict()["state"]
        state |= {f"{name}.{i}.{key}": t for i, entry in entries.items() for key, t in entry.items()}
    digest = hashlib.sha256(np.array(losses).tobytes())
    for name in sorted(state):
        values = state[name].detach().contiguous()
        digest.update(name.encode() + values.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- processes ---------------------------------------------------------------------------------------------------------


World = Callable[..., list[Any]]
"""A function such as `run_in_processes`."""


def run_in_processes(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(group, *args)``, which must be importable, in new processes. Return the results by rank."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, get_context("spawn")) as pool:
        store = str(Path(folder) / "store")
        # Each call waits for all others, so each call needs its own process.
        return [f.result() for f in [pool.submit(_run_rank, rank, size, store, function, args) for rank in range(size)]]


def _run_rank(rank: int, size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)  # other ranks may compile kernels on a busy machine
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        return function(dist.group.WORLD, *args)
    finally:
        end_groups()
        dist.destroy_process_group()
