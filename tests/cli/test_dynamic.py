"""Protects that a recipe can have dynamic tables, from training to predictions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused, small_recipe, train, write_yaml

DYNAMIC = {"user": {"capacity_bytes": 128 * 8 * 4, "init_bound": 0.01}}
ROWS = 400


def made(path: Path, dynamic: Any = DYNAMIC) -> Path:
    """A recipe for users of any number, whose values are hashed to 2⁴⁰ ids, and items of a table that has all rows."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 60, ROWS) * 10**12, rng.integers(0, 9, ROWS)
    labels = (users // 10**12 + items) % 2
    pl.DataFrame({"click": labels, "user": users, "item": items}).write_parquet(
        path / "log.parquet", row_group_size=100
    )
    sparse = [{"name": "user", "rows": 2**40}, {"name": "item", "rows": 16}]
    schema = {"labels": ["click"], "sparse": sparse}
    values = small_recipe(
        path / "log.parquet",
        schema,
        source={"test_fraction": 0.25},
        data={"dynamic": dynamic},
        train={"batch_size": 50, "epochs": 8, "precision": "fp32"},
    )
    return write_yaml(path / "recipe.yaml", values)


def test_a_dynamic_table_is_trained_resumed_evaluated_and_predicted_with(tmp_path: Path) -> None:
    recipe = made(tmp_path)
    status, summary, run = train(recipe)
    assert status == 0
    assert summary["test"]["auc"] > 0.6
    _, _, half = train(recipe, "--train.steps", "20", "--name", "half")
    _, resumed, _ = train(recipe, "--resume", str(half), "--name", "resumed")
    assert resumed["test"] == summary["test"]
    file, out = tmp_path / "eval.json", tmp_path / "scores.parquet"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["test"] == summary["test"]
    pl.read_parquet(tmp_path / "log.parquet").drop("click").write_parquet(tmp_path / "new.parquet")
    assert main(["predict", str(run), str(tmp_path / "new.parquet"), "--out", str(out)]) == 0
    assert pl.read_parquet(out)["score"].std() > 0.1


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (
            {"usr": DYNAMIC["user"]},
            "table in data.dynamic: got 'usr', expected one of user, item; did you mean 'user'",
        ),
        ({"user": {"capacity_bytes": 9}}, "the recipe lacks 'data.dynamic.user.init_bound', which is required"),
        (
            {"user": {**DYNAMIC["user"], "init_bound": -1}},
            "data.dynamic.user.init_bound: got -1, expected a finite number",
        ),
        (
            {"user": {**DYNAMIC["user"], "evict": "fifo"}},
            "data.dynamic.user.evict: got 'fifo', expected one of lru, lfu",
        ),
        ({"user": {**DYNAMIC["user"], "capacity_bytes": 9}}, "capacity_bytes: got 9, expected at least 4,096"),
    ],
)
def test_dynamic_tables_that_cannot_be(dynamic: Any, message: str, tmp_path: Path, capsys: Output) -> None:
    assert message in refused(["train", str(made(tmp_path, dynamic)), "--out", str(tmp_path / "runs")], capsys)
    assert not (tmp_path / "runs").exists()
