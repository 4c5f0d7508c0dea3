"""Protects that recall@k and nDCG@k are those of a search by hand among all items, also over ranks and in blocks."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.cli.main import main
from hotbed.config import Component, Recipe
from hotbed.config.validation import monitored
from hotbed.errors import BatchError, DataError, NonFiniteError, RecipeError
from hotbed.train import retrieval
from hotbed.train.retrieval import RetrievalMetrics, evaluate_retrieval, hit_positions, source_of_items
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.callbacks import BestSoFar
from hotbed.train.runs.loaders import evaluation_loader
from tests.ranks import Ranks

from .retrieval_cases import log, recipe_for


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_USERS", 3)
    monkeypatch.setattr(retrieval, "_ITEMS", 7)


@given(st.integers(0, 9), st.integers(1, 30), st.integers(1, 35), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_places_are_those_of_a_sort(users: int, items: int, most: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    u, v = torch.randn(users, 4, generator=draw), torch.randn(items, 4, generator=draw)
    own = torch.randint(0, items, (users,), generator=draw)
    before = retrieval._USERS, retrieval._ITEMS
    retrieval._USERS, retrieval._ITEMS = 3, 7
    try:
        found = hit_positions(u, v, own, most)
    finally:
        retrieval._USERS, retrieval._ITEMS = before
    order = np.argsort(-(u.double().numpy() @ v.double().numpy().T), axis=1)
    expected = [list(row).index(mine) for row, mine in zip(order, own.tolist(), strict=True)]
    assert found.tolist() == [place if place < most else most for place in expected]


def by_hand(recipe: Recipe, trainer: Any, *, weights: np.ndarray[Any, Any] | None = None) -> dict[str, float]:
    """All of it in numpy: vectors of all samples, each distinct item as its last sample is."""
    table = {name: np.array(column) for name, column in log().to_pydict().items() if name in ("item", "click")}
    model = trainer.model.eval()
    batches = [open_source(recipe.data).read("train", i) for i in range(3)]
    with torch.no_grad():
        pairs = [model(batch, vectors=True) for batch in batches]
    users, items = (np.concatenate([pair[i].double().numpy() for pair in pairs]) for i in (0, 1))
    last = {item: row for row, item in enumerate(table["item"])}
    names = list(last)
    scores = users @ items[[last[name] for name in names]].T
    wanted = table["click"] == 1
    weights = (np.ones(len(wanted)) if weights is None else weights)[wanted]
    found: dict[str, float] = {}
    for k in (3, 10):
        places = [
            list(np.argsort(-scores[row])).index(names.index(table["item"][row])) for row in np.flatnonzero(wanted)
        ]
        hits = np.array([place < k for place in places])
        gains = hits / np.log2(np.array(places) + 2)
        found[f"recall@{k}"] = float((weights * hits).sum() / weights.sum())
        found[f"ndcg@{k}"] = float((weights * gains).sum() / weights.sum())
    return found


def measured(_: dist.ProcessGroup | None, values: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a model that is not trained, over all samples."""
    recipe = Recipe.from_dict(values)
    trainer = build(recipe, source := open_source(recipe.data))
    batches = evaluation_loader(recipe, source, "train", trainer.ranks)
    assert batches is not None
    return trainer.evaluate(batches).to_dict()


def recipe_of(folder: Path, **retrieval: Any) -> dict[str, Any]:
    values = recipe_for(folder, k=[3, 10], **retrieval)
    values["train"] |= {"eval_batch_size": 16}
    return values


@pytest.mark.usefixtures("small_blocks")
def test_metrics_are_those_of_a_search_by_hand(tmp_path: Path) -> None:
    values = recipe_of(tmp_path)
    recipe = Recipe.from_dict(values)
    found = measured(None, values)
    expected = by_hand(recipe, build(recipe))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["samples"] == int((log()["click"].to_numpy() == 1).sum())
    assert found["items"] == len(set(log()["item"].to_pylist()))
    assert set(found) == {"samples", "items", *expected}


def test_weights_of_samples_count(tmp_path: Path) -> None:
    values = recipe_of(tmp_path)
    weights = np.random.default_rng(3).random(60).astype(np.float32)
    pq.write_table(log().append_column("weight", pa.array(weights)), values["data"]["path"], row_group_size=20)
    values["data"]["source"]["init_args"]["schema"]["weight"] = "weight"
    recipe = Recipe.from_dict(values)
    expected = by_hand(recipe, build(recipe), weights=weights.astype(np.float64))
    assert {name: measured(None, values)[name] for name in expected} == pytest.approx(expected)


def test_three_ranks_measure_what_one_does(ranks: Ranks, tmp_path: Path) -> None:
    values = recipe_of(tmp_path)
    alone = measured(None, values)
    assert ranks.run(3, measured, values) == [pytest.approx(alone)] * 3


def test_items_of_a_file_of_their_own_are_searched(tmp_path: Path) -> None:
    table = log()
    items = sorted(set(table["item"].to_pylist()))
    more = pa.table({"item": [*items, 44, 45], "genre": [[i % 8] for i in [*items, 44, 45]]})
    pq.write_table(more, tmp_path / "items.parquet")
    assert measured(None, recipe_of(tmp_path, items=str(tmp_path / "items.parquet")))["items"] == len(items) + 2
    pq.write_table(more.slice(1), tmp_path / "fewer.parquet")
    with pytest.raises(DataError, match=r"samples have an item that is not among the .* of retrieval\.items"):
        measured(None, recipe_of(tmp_path, items=str(tmp_path / "fewer.parquet")))


def test_items_of_a_file_need_parquet(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    source = open_source(recipe.data)
    other = replace(recipe, data=replace(recipe.data, source=Component(class_path="hotbed.data.SplitBinarySource")))
    with pytest.raises(RecipeError, match=r"retrieval\.items is i\.parquet, but data\.source is"):
        source_of_items(other, source, "i.parquet", ["item"])


def test_more_are_found_than_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hotbed"):
        found = measured(None, recipe_for(tmp_path, k=[2, 500]))
    assert "retrieval.k is 500, but there are" in caplog.text
    assert found["recall@500"] == 1


def test_without_a_positive_there_is_nothing_to_measure(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    batch = source.read("train", 0)
    assert batch.labels is not None
    batch.labels.zero_()
    with pytest.raises(BatchError, match="no sample is positive"):
        trainer.evaluate([batch])


@pytest.mark.parametrize("what", ["user", "item"])
def test_a_vector_that_is_not_finite(what: str, tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    with torch.no_grad():
        next(iter(getattr(trainer.model, what).parameters())).fill_(math.nan)
    with pytest.raises(NonFiniteError, match=f"evaluation: a vector of {what}s is not finite"):
        trainer.evaluate([source.read("train", 0)])


def test_recall_tells_the_best_evaluation(tmp_path: Path) -> None:
    values = recipe_of(tmp_path)
    assert monitored(Recipe.from_dict(values)) == "recall"
    values["train"]["monitor"] = "ndcg"
    assert monitored(Recipe.from_dict(values)) == "ndcg"
    with pytest.raises(RecipeError, match=r"train\.monitor is 'ndcg', a metric of retrieval, but retrieval"):
        Recipe.from_dict({**values, "retrieval": None})
    best = BestSoFar("recall")
    nothing: Any = {"auc": math.nan, "logloss": math.nan, "normalized_entropy": math.nan, "calibration": math.nan}

    def found(small: float, large: float) -> RetrievalMetrics:
        others = {"recall@1": small, "recall@5": large, "ndcg@5": 0.9}
        return RetrievalMetrics(samples=9, items=9, **nothing, others=others)

    assert [best.improved(found(*pair)) for pair in ((0.1, 0.3), (0.9, 0.2), (0.0, 0.4))] == [True, False, True]
    assert found(0.1, 0.3).curves("valid") == {"valid/recall@1": 0.1, "valid/recall@5": 0.3, "valid/ndcg@5": 0.9}


def test_the_commands_train_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a label: all samples are positives."""
    values = recipe_of(tmp_path)
    values["data"] |= {"valid_split": "valid", "test_split": "test"}
    given = values["data"]["source"]["init_args"]
    given |= {"valid_fraction": 0.3, "test_fraction": 0.3}
    given["schema"]["labels"] = []
    values["train"] |= {"steps": None, "epochs": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    assert (
        main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "runs"), "--retrieval.k", "[2, 10]"]) == 0
    )
    shown = capsys.readouterr()
    assert "valid recall@2" in shown.err
    assert "recall@10" in shown.out
    run = next((tmp_path / "runs" / "retrieval").iterdir())
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert main(["eval", "--checkpoint", str(run), "--json", str(tmp_path / "eval.json")]) == 0
    assert "recall@10" in capsys.readouterr().out
    found = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert found["test"] == pytest.approx(summary["test"])


def test_other_data_are_searched_among_all_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of few rows alone would make recall look better than it is."""
    values = recipe_of(tmp_path)
    values["train"]["checkpoint"] = "last"
    (tmp_path / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "runs")]) == 0
    run = next((tmp_path / "runs" / "retrieval").iterdir())
    few = log().slice(0, 20)
    new = pa.array([49, *few["item"].to_pylist()[1:]])
    few = few.set_column(few.column_names.index("item"), "item", new)
    few = few.set_column(few.column_names.index("click"), "click", pa.array(np.ones(20, np.float32)))
    pq.write_table(few, tmp_path / "few.parquet")
    asked = ["eval", "--checkpoint", str(run), "--data", str(tmp_path / "few.parquet")]
    assert main([*asked, "--json", str(tmp_path / "eval.json")]) == 0
    found = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))["all"]
    assert (found["samples"], found["items"]) == (20, len({49, *log()["item"].to_pylist()}))
    (tmp_path / "log.parquet").rename(tmp_path / "elsewhere.parquet")
    capsys.readouterr()
    assert main(asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "items of the training data, which cannot be read (in the folder" in said


def test_new_rows_need_no_negatives(tmp_path: Path) -> None:
    values = recipe_of(tmp_path, negatives="refused")
    values["train"]["checkpoint"] = "last"
    (tmp_path / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "runs")]) == 0
    run = next((tmp_path / "runs" / "retrieval").iterdir())
    scores: list[Any] = []
    for left_out in (["click"], ["click", "refused"]):
        pq.write_table(log().drop_columns(left_out), tmp_path / "new.parquet")
        out = tmp_path / f"{len(left_out)}.parquet"
        assert main(["predict", str(run), str(tmp_path / "new.parquet"), "--out", str(out)]) == 0
        scores.append(pq.read_table(out)["score"].to_pylist())
    assert scores[0] == scores[1]


def test_evaluate_retrieval_calls_back_after_each_batch(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    made: Any = trainer.other_parts["retrieval"]
    calls: list[Tensor | None] = []
    evaluate_retrieval(
        trainer.model, [source.read("train", 0)] * 2, made.items, made.options, finished=lambda: calls.append(None)
    )
    assert len(calls) == 3
