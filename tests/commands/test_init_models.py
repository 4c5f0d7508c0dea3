"""Protects that `hotbed init --model` drafts a recipe that trains, or says which columns are missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed import nn
from hotbed.commands.init import draft_recipe
from hotbed.commands.init_models import MODELS
from hotbed.commands.main import main
from hotbed.config import Recipe
from hotbed.errors import DataError, SpecError
from hotbed.files import read_yaml
from tests.commands.cases import Output, refused, train


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    """Clicks on items, with what each user saw before."""
    rng = np.random.default_rng(0)
    seen = [rng.integers(1000, 1080, i % 5).tolist() for i in range(240)]
    columns = {
        "click": rng.integers(0, 2, 240),
        "user_id": rng.integers(500, 580, 240),
        "item_id": rng.integers(1000, 1080, 240),
        "item_history": pa.array(seen, pa.list_(pa.int64())),
        "price": rng.lognormal(size=240),
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=60)
    return path


@pytest.mark.parametrize("model", MODELS)
def test_a_drafted_recipe_trains(model: str, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    assert main(["init", str(log), "--model", model, "--out", str(out)]) == 0
    assert Recipe.from_dict(read_yaml(out)).model.class_path == f"hotbed.nn.{model}"
    options = ["--train.device", "cpu", "--train.epochs", "1", "--train.steps", "2", "--train.batch_size", "16"]
    status, summary, _ = train(out, *options)
    assert status == 0 and summary["steps"] == 2


def test_histories_are_lists_that_share_the_table_of_their_candidate(log: Path) -> None:
    recipe = draft_recipe(log, model="DIN")
    assert "histories: {item_history: item_id}  # each with the column of its candidate" in recipe
    assert "price" in recipe and "user_id" in recipe


def test_what_a_model_does_not_take_is_left_out_with_the_reason(log: Path) -> None:
    recipe = draft_recipe(log, model="SASRec")
    for name in ("user_id", "price"):
        assert f"- '{name}' (an input): SASRec scores a candidate by a history alone" in recipe
    assert "    history: item_history" in recipe and "    item: item_id" in recipe


@pytest.mark.parametrize("model", ["DIN", "SASRec", "HSTU"])
def test_columns_that_are_missing_are_named(model: str, log: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "recipe.yaml"
    said = refused(["init", str(log), "--model", model, "--drop", "item_id", "--out", str(out)], capsys)
    assert f"lacks what {model} needs: a column of lists, the history, whose values are those of another" in said
    assert "there are columns of lists: item_history, and of single values: user_id" in said
    assert not out.exists()


def test_a_model_that_there_is_not(log: Path) -> None:
    with pytest.raises(SpecError, match=r"--model is 'DNI', must be one of DLRM, .*; did you mean 'DIN'"):
        draft_recipe(log, model="DNI")
    assert all(hasattr(nn, model) for model in MODELS)


def test_two_labels_are_too_many_for_a_model_of_next_items(log: Path, tmp_path: Path) -> None:
    table = pq.read_table(log)
    both = tmp_path / "both.parquet"
    pq.write_table(table.append_column("buy", table["click"]), both)
    with pytest.raises(DataError, match="has the labels click, buy, and HSTU predicts one; name it with --label"):
        draft_recipe(both, model="HSTU")
