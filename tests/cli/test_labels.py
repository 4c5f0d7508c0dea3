"""Protects that labels which cannot be trained on or evaluated are refused, with the place where they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.errors import DataError
from hotbed.train.runs.build import build
from tests.cli.cases import Output, refused, small_recipe, train, write_yaml
from tests.ranks import Ranks


def made(path: Path, labels: Any, positive: str | None = None) -> Path:
    """A recipe for 400 samples in row groups of 100, the last of which is the test split."""
    path.mkdir(exist_ok=True)
    table = pa.table({"click": labels, "user": np.random.default_rng(0).integers(0, 9, 400)})
    pq.write_table(table, path / "log.parquet", row_group_size=100)
    label = "click" if positive is None else {"column": "click", "positive": positive}
    schema = {"labels": [label], "sparse": [{"name": "user", "rows": 16}]}
    return write_yaml(
        path / "recipe.yaml",
        small_recipe(path / "log.parquet", schema, source={"test_fraction": 0.25}, train={"batch_size": 100}),
    )


@pytest.mark.parametrize("row", [5, 395])  # of the train and of the test split
def test_a_bad_label_is_refused_before_anything_is_trained(tmp_path: Path, row: int, capsys: Output) -> None:
    labels = np.arange(400) % 2
    labels[row] = -1
    recipe = made(tmp_path, labels)
    message = refused(["train", str(recipe), "--out", str(tmp_path / "runs")], capsys)
    assert f"log.parquet, row group {row // 100}, column 'click': label -1 at row {row % 100} (row {row} of" in message
    assert not (tmp_path / "runs").exists()


def test_one_class_is_evaluated_with_a_reason(tmp_path: Path, capsys: Output) -> None:
    labels = np.arange(400) % 2
    labels[300:] = 0
    recipe = made(tmp_path, labels)
    status, summary, run = train(recipe)
    assert (status, summary["test"]["auc"]) == (0, None)
    assert "AUC: – (all 100 labels are 0)" in capsys.readouterr().out
    file = tmp_path / "eval.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert "normalized entropy: – (all 100 labels are 0)" in capsys.readouterr().out
    assert json.loads(file.read_text())["test"] == summary["test"]
    monitored = ["--data.valid_split", "test", "--train.monitor", "auc", "--out", str(tmp_path / "others")]
    for option in (["--train.patience", "1"], ["--train.checkpoint", "best"]):
        message = refused(["train", str(recipe), *monitored, *option], capsys)
        assert "train.monitor is 'auc', which is undefined on the valid split: all labels 'click' are 0" in message
    assert not (tmp_path / "others").exists()


def test_a_bad_label_of_other_data_is_refused_by_eval(tmp_path: Path, capsys: Output) -> None:
    _, _, run = train(made(tmp_path, np.arange(400) % 2))
    made(tmp_path / "other", np.arange(400) % 2 * 5)
    message = refused(["eval", "--checkpoint", str(run), "--data", str(tmp_path / "other/log.parquet")], capsys)
    assert "label 5 at row 1 (row 1 of the file)" in message


def refused_by(_: object, recipe: Path) -> str:
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    with pytest.raises(DataError) as caught:
        build(made)
    return str(caught.value)


def test_all_ranks_refuse_a_bad_label_alike(ranks: Ranks, tmp_path: Path) -> None:
    labels = np.where(np.arange(400) == 123, 0.5, np.nan)
    first, second = ranks.run(2, refused_by, made(tmp_path, labels))
    assert first == second
    assert "row group 0, column 'click': label nan at row 0 (row 0 of the file)" in first


@pytest.fixture(scope="module")
def of_0_and_1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a model reaches whose labels are 0 and 1."""
    return train(made(tmp_path_factory.mktemp("plain"), np.arange(400) % 2))[1]["test"]


@pytest.mark.parametrize(
    ("labels", "positive"),
    [
        (np.arange(400) % 2 * 2 - 1, "> 0"),
        (np.arange(400) % 2 * 3 + 2.0, ">= 4"),
        (np.where(np.arange(400) % 2, "yes", "no"), "== yes"),
        (np.arange(400) % 2 == 1, None),
    ],
    ids=["-1 and 1", "ratings", "text", "booleans"],
)
def test_labels_of_any_kind_train_the_model_that_0_and_1_train(
    tmp_path: Path, of_0_and_1: dict[str, Any], labels: Any, positive: str | None
) -> None:
    status, summary, run = train(made(tmp_path, labels, positive))
    assert (status, summary["test"]) == (0, of_0_and_1)
    file = tmp_path / "eval.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["test"] == summary["test"]


def test_nothing_to_learn_is_refused(tmp_path: Path, capsys: Output) -> None:
    recipe = made(tmp_path, np.arange(400) % 5, ">= 40")
    message = refused(["train", str(recipe), "--out", str(tmp_path / "runs")], capsys)
    assert "all labels 'click' (positive: '>= 40') of training are 0" in message
    assert not (tmp_path / "runs").exists()
