"""Tests of loaders by reader."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from rich.console import Console

from hotbed.cli.demo import demo_recipe
from hotbed.config import Component, Recipe
from hotbed.data import Schema, SparseColumn, write_synthetic_log
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.testing.model_contract import ModelContract, contract_recipe
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.callbacks import Callback
from hotbed.train.runs.loaders import training_loader
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.run import train
from hotbed.train.trainer import Trainer
from tests.ranks import TIMEOUT_S, Ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small log with splits."""
    folder = tmp_path_factory.mktemp("readers")
    write_synthetic_log(folder / "log.tsv", 1500, seed=0, test_fraction=0.2)
    prepare(folder / "log.tsv", folder / "data", threshold=2, test_fraction=0.2)
    return folder / "data"


def trained(group: dist.ProcessGroup, data: Path, out: Path, parallel: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run."""
    values = demo_recipe(data, 1200).to_dict()
    values["train"] |= {"batch_size": 250, "device": "cpu", "checkpoint": "none"}
    values["data"] |= {"shuffle": True, "workers": 1}
    values["parallel"] = {"timeout_s": TIMEOUT_S, **parallel}
    return train(Recipe.from_dict(values), RunDirectory(out, "run"), Console(file=io.StringIO()))


def test_who_reads_changes_nothing(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for reader in ("each", "first"):
        by_rank = ranks.run(3, trained, data, tmp_path / reader, {"reader": reader, "plan": "table"})
        assert all(summary["test"] == by_rank[0]["test"] for summary in by_rank)
        found[reader] = by_rank[0]
    assert found["each"]["steps"] == 5
    for what in ("test", "steps", "samples", "ids_out_of_range"):
        assert found["first"][what] == found["each"][what], what


def trained_by_reader(group: dist.ProcessGroup, recipe: Mapping[str, Any], reader: str) -> tuple[list[float], str]:
    """Losses, and the SHA-256 of all that was learned."""
    values = Recipe.from_dict({**recipe, "parallel": {"timeout_s": TIMEOUT_S, "reader": reader, "plan": "table"}})
    source = open_source(values.data)
    trainer, losses = build(values, source), Losses()
    trainer.callbacks.append(losses)
    trainer.fit(training_loader(values, source, trainer.ranks, trainer.model))
    state = trainer.model.state_dict()
    return losses.found, hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


class Losses(Callback):
    """Keeps them."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.found.append(loss)


class OfWeightedIds:
    """A model of three tables, of which one has ids with weights."""

    model = Component(class_path="hotbed.nn.DCNv2", init_args={"layers": 1, "top": [8, 1]})
    schema = Schema(
        sparse=(
            SparseColumn(name="user", rows=60),
            SparseColumn(name="tags", rows=40, ids=None, weights="times"),
            SparseColumn(name="item", rows=50),
        ),
        labels=("click",),
    )
    dim = 16
    retrieval = None


def test_who_reads_weights_of_ids_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    recipe = contract_recipe(cast("type[ModelContract]", OfWeightedIds), tmp_path)
    recipe["data"]["shuffle"] = False
    found = {reader: ranks.run(3, trained_by_reader, recipe, reader) for reader in ("each", "first")}
    assert found["first"] == found["each"]
