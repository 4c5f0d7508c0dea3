"""Protects that what does not go with retrieval is refused by a message that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.config import Component, Recipe
from hotbed.errors import DataError, HotbedError, RecipeError
from hotbed.train.runs.build import build
from tests.train.retrieval_cases import learned, log, recipe_for


def _labels(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        schema = values["data"]["source"]["init_args"]["schema"]
        schema |= {"labels": list(names), "dense": [name for name in schema["dense"] if name not in names]}

    return change


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        *folders, last = path.split(".")
        for folder in folders:
            values = values.setdefault(folder, {})
        values[last] = value

    return change


REFUSED: list[tuple[Callable[[dict[str, Any]], None], type[HotbedError], str]] = [
    (_labels("click", "age"), RecipeError, "retrieval is set, but there are the labels click, age"),
    (_set("tasks", {"click": {"weight": 2}}), RecipeError, "tasks is set, but retrieval"),
    (
        _set("metrics", {"f1": {"class_path": "torchmetrics.F1"}}),
        RecipeError,
        "metrics is set, but retrieval",
    ),
    (
        _set("hot", {"batches": "split", "rows": "hot_rows.json"}),
        RecipeError,
        "hot.batches is 'split', but retrieval",
    ),
    (_set("parallel.reader", "owners"), RecipeError, "parallel.reader is 'owners', but retrieval"),
    (
        _set("retrieval.negatives", "refusd"),
        RecipeError,
        r"retrieval.negatives: got 'refusd', .*did you mean",
    ),
    (_set("retrieval.negatives", "genre"), RecipeError, "with table 'genre', expected table"),
    (_set("retrieval.sampled", -1), RecipeError, "retrieval.sampled: got -1, expected at least 0"),
    (
        _set("retrieval.sampled_by", "rank"),
        RecipeError,
        "retrieval.sampled_by: got 'rank', expected one of uniform, pop",
    ),
    (_set("retrieval.k", []), RecipeError, r"retrieval.k: got \[\], expected a list of numbers of items"),
    (_set("retrieval.k", [0]), RecipeError, "retrieval.k: got 0, expected at least 1"),
    (_set("retrieval.k", [5, 5]), RecipeError, r"retrieval.k is \[5, 5\], which names a number twice"),
    (
        _set("retrieval", {"items": "items.parquet", "sampled": 4, "sampled_by": "popularity"}),
        RecipeError,
        "retrieval.items items.parquet does not say how often items are met",
    ),
    (_set("retrieval.loss.class_path", "torch.nn.Nothing"), RecipeError, "retrieval.loss: module 'torch.nn' has no"),
    (_set("retrieval.loss.class_path", "hotbed.data.Schema"), RecipeError, "retrieval.loss: hotbed.data.Schema"),
    (
        _set(
            "retrieval.correction",
            {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}},
        ),
        RecipeError,
        "retrieval.correction: torch.nn.Linear has parameters, which no optimizer trains",
    ),
    (
        _set("model", {"class_path": "hotbed.nn.DeepFM", "init_args": {"top": [1]}}),
        RecipeError,
        "retrieval is set, but DeepFM",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_does_not_go_with_retrieval(
    change: Callable[[dict[str, Any]], None], kind: type[HotbedError], message: str, tmp_path: Path
) -> None:
    values = recipe_for(tmp_path)
    change(values)
    with pytest.raises(kind, match=message):
        recipe = Recipe.from_dict(values)
        build(recipe)


def test_labels_that_are_all_0(tmp_path: Path) -> None:
    values = recipe_for(tmp_path)
    table = log()
    zeros = pa.array(np.zeros(len(table), np.float32))
    pq.write_table(table.set_column(table.column_names.index("click"), "click", zeros), values["data"]["path"])
    recipe = Recipe.from_dict(values)
    with pytest.raises(DataError, match="no label 'click' of the train split is 1"):
        build(recipe)


def test_labels_that_are_all_1_and_none_are_trained_on(tmp_path: Path) -> None:
    values = recipe_for(tmp_path)
    table = log()
    ones = pa.array(np.ones(len(table), np.float32))
    table = table.set_column(table.column_names.index("click"), "click", ones)
    pq.write_table(table, values["data"]["path"], row_group_size=20)
    of_ones = learned(None, values)
    _labels()(values)
    without = learned(None, values)
    assert of_ones[0] == without[0]


def test_components_of_strangers_are_not_trusted(tmp_path: Path) -> None:
    from hotbed.config import check_trust

    values = recipe_for(tmp_path, loss=Component(class_path="theirs.Loss").__dict__)
    with pytest.raises(RecipeError, match=r"retrieval\.loss of the recipe in here is theirs\.Loss"):
        check_trust(Recipe.from_dict(values), "here", trusted=False)
