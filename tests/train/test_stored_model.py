"""Protects that derived inputs are the same in training, after a resume, in evaluation and in predictions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from rich.console import Console

import hotbed as hb
from hotbed.checkpoint import find_checkpoint, read_manifest
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.errors import DataError
from hotbed.train.runs.build import open_source
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.run import train
from hotbed.train.runs.stored_model import encoder_of, evaluate_checkpoint, load_features
from tests.cli.cases import Output, inspected, refused
from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def log(n: int, seed: int = 0) -> pl.DataFrame:
    """Samples whose label is the parity of user plus category, which only a cross of both shows."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 8, n), rng.integers(0, 40, n)
    age = rng.normal(40, 10, n)
    return pl.DataFrame(
        {
            "user": user,
            "item": [f"i{i}" for i in item],
            "age": [None if a > 60 else a for a in age],
            "seen": [[f"i{j}" for j in range(i % 3)] for i in item],
            "label": (user + item // 2) % 2,
        }
    )


def write_items(path: Path, more: int = 0) -> None:
    items = range(40 + more)
    pl.DataFrame(
        {"id": [f"i{i}" for i in items], "kind": [f"k{i // 2 % 5 * 2 + i // 2 % 2}" for i in items], "price": items}
    ).cast({"price": pl.Float64}).write_parquet(path)


def features(items: Path) -> list[dict[str, Any]]:
    of = {"lookup": "item", "file": str(items), "key": "id"}
    return [
        {"name": "kind", **of, "value": "kind", "rows": 64},
        {"name": "price", **of, "value": "price", "rule": "log", "missing": "indicator"},
        {"name": "seen_kinds", **of, "lookup": "seen", "value": "kind", "rows": 64, "table": "kind", "ids": None},
        {"name": "age_group", "bucket": "age", "quantiles": 8},
        {"name": "dear", "bucket": "price", "boundaries": [10, 20]},
        {"name": "user_kind", "cross": ["user", "kind"], "rows": 512},
        {"name": "age_seen", "cross": ["age_group", "seen"], "rows": 512, "ids": None, "pooling": "mean"},
    ]


def write_recipe(path: Path, n: int = 3000) -> Path:
    log(n).write_parquet(path / "log.parquet", row_group_size=100)
    write_items(path / "items.parquet")
    schema = {
        "sparse": [{"name": "user", "rows": 64}],
        "dense": [{"name": "age", "rule": "standard"}],
        "features": features(path / "items.parquet"),
    }
    values = {
        "name": "features",
        "data": {
            "path": str(path / "log.parquet"),
            "dim": 8,
            "source": {
                "class_path": "hotbed.data.ParquetSource",
                "init_args": {"schema": schema, "test_fraction": 0.2},
            },
        },
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 100, "device": "cpu", "precision": "fp32", "checkpoint": "last"},
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return path / "recipe.yaml"


def run(folder: Path, resume: Path | None = None, **changes: dict[str, Any]) -> dict[str, Any]:
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    for section, options in changes.items():
        values[section] = {**values.get(section, {}), **options}
    console = Console(file=io.StringIO(), width=200)
    return train(Recipe.from_dict(values), RunDirectory(folder / "runs", "features"), console, resume=resume)


def run_on_ranks(group: object, folder: Path) -> str:
    """Train on every rank; what checkpoints keep of features."""
    run(folder, train={"steps": 1}, parallel={"plan": "row"})
    return json.dumps(read_manifest(find_checkpoint(folder / "runs" / "features")).parts["features"])


def test_a_run_learns_from_derived_inputs_and_uses_them_alike(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    summary = run(tmp_path, train={"epochs": 2})
    assert summary["test"]["auc"] > 0.95
    manifest = read_manifest(find_checkpoint(summary["run"]))
    kept: Any = manifest.parts["features"]
    ages = log(3000)["age"].head(2400).drop_nulls().to_numpy()
    expected = np.quantile(ages, np.arange(1, 8) / 8)
    np.testing.assert_allclose(kept["age_group"]["measured"], expected)
    assert set(kept) == {"kind", "price", "seen_kinds", "age_group"}
    _, _, metrics = evaluate_checkpoint(summary["run"])
    assert metrics.auc == summary["test"]["auc"]
    new = log(50, seed=1)
    new.drop("label").write_parquet(tmp_path / "new.parquet")
    hb.predict(summary["run"], tmp_path / "new.parquet", tmp_path / "scores.parquet")
    scores = pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy()
    assert ((scores > 0.5) == (new["label"].to_numpy() == 1)).mean() > 0.9
    # The same rows, as plain values, become the same batch.
    source = open_source(Recipe.from_dict(manifest.recipe or {}).data)
    load_features(source, manifest)
    assert source.encoder is not None
    encoder = encoder_of(Recipe.from_dict(manifest.recipe or {}), source, manifest)
    assert encoder.to_dict() == source.encoder.inputs.to_dict()
    rows = new.drop("label").to_dict(as_series=False)
    typed, stored = (
        encoder.batch(encoder.table(rows)),
        encoder.batch(pl.read_parquet(tmp_path / "new.parquet").to_arrow()),
    )
    for name in stored.sparse.names:
        assert torch.equal(typed.sparse[name].values, stored.sparse[name].values)


def test_a_resumed_run_measures_nothing_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(tmp_path)
    whole = run(tmp_path, train={"steps": 16})
    half = run(tmp_path, train={"steps": 8})
    monkeypatch.setattr(hb.ParquetSource, "measure", lambda *_, **__: pytest.fail("measured again"))
    resumed = run(tmp_path, resume=Path(half["run"]), train={"steps": 16})
    assert resumed["test"] == whole["test"]
    write_items(tmp_path / "items.parquet", more=1)
    changed = r"items\.parquet has changed since training: got 41 keys .*expected 40"
    with pytest.raises(DataError, match=changed):
        run(tmp_path, resume=Path(half["run"]), train={"steps": 16})
    log(5).write_parquet(tmp_path / "new.parquet")
    with pytest.raises(DataError, match=changed):
        hb.predict(half["run"], tmp_path / "new.parquet", tmp_path / "scores.parquet")
    assert not (tmp_path / "scores.parquet").exists()
    with pytest.raises(DataError, match=changed):
        evaluate_checkpoint(half["run"])
    # A new run that begins with the model of another may have another table; what was measured it takes over.
    warm = run(tmp_path, init={"checkpoint": half["run"]}, train={"steps": 2})
    parts = [read_manifest(find_checkpoint(of["run"])).parts["features"] for of in (half, warm)]
    assert parts[0]["age_group"] == parts[1]["age_group"]
    assert parts[0]["kind"]["sha256"] != parts[1]["kind"]["sha256"]


def test_ranks_have_what_the_first_one_measured(tmp_path: Path, ranks: Ranks) -> None:
    write_recipe(tmp_path, 800)
    (alone := tmp_path / "alone").mkdir()
    write_recipe(alone, 800)
    run(alone, train={"steps": 1})
    expected = read_manifest(find_checkpoint(alone / "runs" / "features")).parts["features"]["age_group"]
    for found in ranks.run(3, run_on_ranks, tmp_path):
        assert json.loads(found)["age_group"] == expected


def test_commands_know_features(tmp_path: Path, capsys: Output) -> None:
    recipe = write_recipe(tmp_path, 800)
    assert main(["train", str(recipe), "--dry_run"]) == 0
    assert main(["inspect", str(recipe), "--skew"]) == 0
    summary = run(tmp_path, train={"steps": 4})
    found = inspected(find_checkpoint(summary["run"]).path, tmp_path)["features"]
    assert [entry["feature"] for entry in found] == [f["name"] for f in features(tmp_path)]
    made = {entry["feature"]: entry["made_of"] for entry in found}
    assert made["user_kind"] == "cross of user, kind"
    assert made["dear"] == "price by 10, 20"
    assert made["age_group"].startswith("age by 8 quantiles: ")
    assert made["kind"].startswith(f"kind of {tmp_path / 'items.parquet'} by item (id): 40 keys, SHA-256 ")
    (tmp_path / "items.parquet").unlink()
    told = refused(["predict", summary["run"], str(tmp_path / "log.parquet"), "--out", str(tmp_path / "s.csv")], capsys)
    assert "items.parquet does not exist" in told
