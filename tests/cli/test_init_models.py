"""Protects that `hotbed init --model` drafts a recipe that trains, or says which columns are missing."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed import nn
from hotbed.cli.drafts.init_recipe import MODELS
from hotbed.cli.init import draft_recipe
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.data import draft_schema
from hotbed.errors import DataError, SpecError
from hotbed.files import read_yaml
from hotbed.train.runs.build import open_source
from tests.cli.cases import Output, refused, train


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    """Clicks on items, with what each user saw before."""
    rng = np.random.default_rng(0)
    seen = [rng.integers(1000, 1080, i % 5).tolist() for i in range(240)]
    columns = {
        "click": rng.integers(0, 2, 240),
        "buy": rng.integers(0, 2, 240),
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
    one = [] if model == "MMoE" else ["--drop", "buy"]
    assert main(["init", str(log), "--model", model, "--out", str(out), *one]) == 0
    assert Recipe.from_dict(read_yaml(out)).model.class_path == f"hotbed.nn.{model}"
    options = ["--train.device", "cpu", "--train.epochs", "1", "--train.steps", "2", "--train.batch_size", "16"]
    status, summary, _ = train(out, *options)
    assert status == 0 and summary["steps"] == 2


def test_histories_are_lists_that_share_the_table_of_their_candidate(log: Path) -> None:
    recipe = draft_recipe(log, model="DIN")
    assert "histories: {item_history: item_id}  # " in recipe
    assert "price" in recipe and "user_id" in recipe


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("items", [2, 8, 50])
def test_few_items_share_the_table_of_their_history_too(tmp_path: Path, items: int, as_text: bool) -> None:
    rng = np.random.default_rng(0)
    item = rng.integers(1, items + 1, 400)
    seen = [rng.integers(1, items + 1, 4).tolist() for _ in range(400)]
    written = [f"m{i}" for i in item] if as_text else item
    history = [[f"m{i}" for i in of] for of in seen] if as_text else seen
    table = {"click": rng.integers(0, 2, 400), "movie": written, "movies_seen": pa.array(history), "other": item % 2}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    assert "histories: {movies_seen: movie}" in draft_recipe(tmp_path / "log.parquet", model="DIN")


def test_few_texts_share_no_table_with_lists_of_another_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    answers = rng.choice(["yes", "no"], 400)
    lists = pa.array([rng.choice(["yes", "no"], 3).tolist() for _ in range(400)])
    pq.write_table(
        pa.table({"click": rng.integers(0, 2, 400), "mobile": answers, "asked": lists}), tmp_path / "l.parquet"
    )
    assert draft_schema(tmp_path / "l.parquet").rows.keys() == {"mobile", "asked"}


def test_what_a_model_does_not_take_is_left_out_with_the_reason(log: Path) -> None:
    recipe = draft_recipe(log, model="SASRec", drop=["buy"])
    for name in ("user_id", "price"):
        assert f"- '{name}' (an input): SASRec scores a candidate by a history only" in recipe
    assert "    history: item_history" in recipe and "    item: item_id" in recipe


@pytest.mark.parametrize("model", ["DIN", "SASRec", "HSTU"])
def test_columns_that_are_missing_are_named(model: str, log: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "recipe.yaml"
    said = refused(["init", str(log), "--model", model, "--drop", "item_id", "buy", "--out", str(out)], capsys)
    assert f"lacks a history for {model}" in said
    assert "got list columns item_history and single-valued columns user_id" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "meant"), [("DNI", "DIN"), ("din", "DIN"), ("mmoe", "MMoE"), ("widedeep", "WideDeep")]
)
def test_a_model_that_there_is_not(log: Path, given: str, meant: str) -> None:
    with pytest.raises(SpecError, match=rf"--model: got '{given}', expected one of DLRM, .*; did you mean '{meant}'"):
        draft_recipe(log, model=given)
    assert all(hasattr(nn, model) for model in MODELS)


@pytest.mark.parametrize("model", ["HSTU", "TwoTower"])
def test_two_labels_are_too_many_for_some_models(log: Path, model: str) -> None:
    with pytest.raises(DataError, match=f"got the labels click, buy, expected one label for {model}"):
        draft_recipe(log, model=model)


def test_one_label_is_too_few_for_mmoe(log: Path) -> None:
    with pytest.raises(DataError, match=r"lacks labels of several tasks for MMoE: got click,"):
        draft_recipe(log, model="MMoE", drop=["buy"])


def test_towers_are_told_apart_by_names_or_as_is_asked(log: Path) -> None:
    assert "    item: [item_id]               # columns of the item's tower" in draft_recipe(
        log, model="TwoTower", drop=["buy"]
    )
    asked = draft_recipe(log, model="TwoTower", drop=["buy"], item=["user_id"])
    assert "    item: [user_id]" in asked
    with pytest.raises(DataError, match=r"--item: got 'itm_id', .*; did you mean 'item_id'"):
        draft_recipe(log, model="TwoTower", drop=["buy"], item=["itm_id"])
    with pytest.raises(DataError, match=r"lacks categorical columns of the item for TwoTower: got user_id"):
        draft_recipe(log, model="TwoTower", drop=["buy", "item_id"])
    with pytest.raises(DataError, match="columns of the user for TwoTower: got item_id, all of the item"):
        draft_recipe(log, model="TwoTower", drop=["buy", "user_id", "item_history"])
    with pytest.raises(SpecError, match="--item works only with --model TwoTower: got --model DLRM"):
        draft_recipe(log, model="DLRM", item=["item_id"])


def test_two_towers_find_items_where_that_is_asked_or_nothing_else_can_be_learnt(log: Path, tmp_path: Path) -> None:
    assert "retrieval:" not in draft_recipe(log, model="TwoTower", drop=["buy"])
    asked = draft_recipe(log, model="TwoTower", drop=["buy"], retrieval=True)
    assert "retrieval:\n  sampled: 256 " in asked
    (tmp_path / "asked.yaml").write_text(asked, encoding="utf-8")
    assert Recipe.from_dict(read_yaml(tmp_path / "asked.yaml")).retrieval is not None
    table = pq.read_table(log)
    ones = table.drop_columns(["buy"]).set_column(
        table.column_names.index("click"), "click", pa.array(np.ones(len(table), np.int64))
    )
    for name, positives in (("ones", ones), ("none", table.drop_columns(["click", "buy"]))):
        pq.write_table(positives, tmp_path / f"{name}.parquet")
        text = draft_recipe(tmp_path / f"{name}.parquet", model="TwoTower")
        assert "retrieval:" in text
        assert ("without a label" in text) == (name == "none")
    with pytest.raises(DataError, match="has no label column"):
        draft_recipe(tmp_path / "none.parquet", model="DLRM")
    with pytest.raises(SpecError, match=r"--retrieval .*: got --model DLRM"):
        draft_recipe(log, model="DLRM", retrieval=True)
    for alone in ({"retrieval": True}, {"item": ["item_id"]}):
        with pytest.raises(SpecError, match=r"got no --model. Add --model TwoTower"):
            draft_recipe(log, **alone)


# -- histories whose names do not tell -----------------------------------------------------------------------------


@pytest.fixture(name="films")
def _films(tmp_path: Path) -> Path:
    """Numbers from 1 on, as ids of films are, in columns whose names have no word in common."""
    rng = np.random.default_rng(0)
    columns = {
        "click": rng.integers(0, 2, 240),
        "movie": rng.integers(1, 81, 240),
        "price": rng.integers(1, 81, 240),
        "watched": pa.array([rng.integers(1, 81, i % 5).tolist() for i in range(240)], pa.list_(pa.int64())),
        "liked": pa.array([rng.integers(1, 81, i % 3).tolist() for i in range(240)], pa.list_(pa.int64())),
        "words": pa.array([["a"], ["b", "c"]] * 120),
    }
    path = tmp_path / "films.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=60)
    return path


@pytest.mark.parametrize("model", ["DIN", "SASRec", "HSTU"])
def test_a_history_that_is_named_is_taken(model: str, films: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--history HISTORY=CANDIDATE"):
        draft_recipe(films, model=model)
    out = tmp_path / "recipe.yaml"
    assert main(["init", str(films), "--model", model, "--history", "watched=movie", "--out", str(out)]) == 0
    found = Recipe.from_dict(read_yaml(out)).model.init_args
    assert found.get("histories", {found.get("history"): found.get("item")}) == {"watched": "movie"}


def test_several_histories_and_a_candidate_that_looks_like_a_number(films: Path) -> None:
    assert "histories: {watched: movie, liked: movie}" in draft_recipe(
        films, model="DIN", history=["watched=movie", "liked=movie"]
    )
    assert "    history: liked" in draft_recipe(films, model="HSTU", history=["liked=movie", "watched=movie"])
    priced = draft_recipe(films, model="DIN", history=["watched=price"])
    assert "histories: {watched: price}" in priced
    assert "earlier values of price, by --history" in priced


def test_weights_of_ids_that_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, 240)
    columns = {
        "click": rng.integers(0, 2, 240),
        "tags": pa.array([[f"tag {i}" for i in rng.integers(0, 20, n)] for n in lengths]),
        "scores": pa.array([rng.random(n).tolist() for n in lengths], pa.list_(pa.float64())),
        "user": rng.integers(0, 40, 240),
        "share": rng.random(240),
    }
    path, out = tmp_path / "tags.parquet", tmp_path / "recipe.yaml"
    pq.write_table(pa.table(columns), path, row_group_size=60)
    assert main(["init", str(path), "--weights", "tags=scores", "user=share", "--out", str(out)]) == 0
    schema = open_source(Recipe.from_dict(read_yaml(out)).data).schema
    assert {column.name: column.weights for column in schema.sparse} == {"tags": "scores", "user": "share"}
    assert not schema.dense
    for given, kind, said in [
        ("tags", SpecError, "--weights: got 'tags', expected two columns, IDS=WEIGHTS"),
        ("tags=score", DataError, "--weights, .* got 'score', .*; did you mean 'scores'"),
        ("tag=scores", DataError, "--weights, .* got 'tag', .*; did you mean 'tags'"),
        ("share=user", SpecError, "--weights, input of ids: got 'share', expected one of tags"),
        ("user=scores", SpecError, r"tags\.parquet: column 'scores': got list<element: double>"),
    ]:
        with pytest.raises(kind, match=said):
            draft_recipe(path, weights=[given])


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ("watched", SpecError, "--history: got 'watched', expected two columns, HISTORY=CANDIDATE"),
        ("watched=film", DataError, "--history, .* got 'film'"),
        ("Watched=movie", DataError, "--history, .* got 'Watched', .*; did you mean 'watched'"),
        ("watched=click", SpecError, "--history, input: got 'click'"),
        ("movie=price", DataError, "column 'movie' .* got int64"),
        ("watched=liked", DataError, "column 'liked' .* 'watched'"),
        ("words=movie", DataError, "column 'movie' .* got int64, .* string .* 'words'"),
    ],
)
def test_pairs_that_cannot_be(films: Path, given: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        draft_recipe(films, model="DIN", history=[given])
    with pytest.raises(SpecError, match="--history: got movie and price for 'watched'"):
        draft_recipe(films, model="DIN", history=["watched=movie", "watched=price"])
