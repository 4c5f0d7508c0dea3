"""Protects that rows of a table have the scores that they have when `hotbed prepare` made ids of their values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.main import main
from hotbed.serve.served_model import ServedModel
from tests.cli.cases import Output, refused, train
from tests.cli.test_raw_rows import predicted, recipe_of

ROWS, TEST_ROWS = 400, 60
SCHEMA: dict[str, Any] = {
    "sparse": [
        {"name": "code", "rows": 2},
        {"name": "item", "rows": 2},
        {"name": "history", "rows": 2, "table": "item", "ids": None, "pooling": "mean"},
    ],
    "dense": ["age", {"name": "price", "rule": "asinh", "missing": "indicator"}],
    "labels": ["click"],
    "weight": "weight",
}


class Run(NamedTuple):
    """A run on a prepared table, the dataset, raw rows of its test split, and their scores when read prepared."""

    path: Path
    data: Path
    rows: Path
    scores: list[float]


def table() -> pa.Table:
    """Codes that are text though most look like numbers, integers, lists of them, missing and rare values."""
    rng = np.random.default_rng(0)
    lists = [None if i % 7 == 0 else rng.integers(0, 40, i % 4).tolist() for i in range(ROWS)]
    codes = rng.zipf(1.3, ROWS) % 60
    return pa.table(
        {
            "code": [None if i % 11 == 0 else str(c) if c else "ü" for i, c in enumerate(codes)],
            "item": pa.array(rng.integers(-20, 20, ROWS), pa.int16()),
            "history": pa.array(lists, pa.list_(pa.int32())),
            "age": [None if i % 9 == 0 else i % 70 for i in range(ROWS)],
            "price": [None if i % 5 == 0 else float(x) for i, x in enumerate(rng.lognormal(3, 2, ROWS))],
            "click": rng.integers(0, 2, ROWS),
            "weight": rng.random(ROWS),
        }
    )


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_on(tmp_path_factory.mktemp("tables"))


def run_on(folder: Path, *options: str) -> Run:
    """Prepare with some options, and train."""
    raw = table()
    pq.write_table(raw, folder / "raw.parquet")
    (folder / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    argv = ["prepare", str(folder / "raw.parquet"), str(folder / "data"), "--schema", str(folder / "schema.yaml")]
    assert main([*argv, "--threshold", "3", "--test_rows", str(TEST_ROWS), *options]) == 0
    recipe = recipe_of(folder / "data")
    recipe["data"]["source"] = yaml.safe_load((folder / "data/source.yaml").read_text())
    (folder / "small.yaml").write_text(yaml.safe_dump(recipe))
    status, _, run = train(folder / "small.yaml")
    assert status == 0
    scores = predicted(run, folder / "data", folder / "prepared.parquet", "--split", "test")
    pq.write_table(raw[-TEST_ROWS:].drop_columns(["click", "weight"]), folder / "rows.parquet")
    return Run(run, folder / "data", folder / "rows.parquet", scores)


def test_raw_rows_have_the_scores_of_prepared_ones(tmp_path: Path, trained: Run) -> None:
    assert len(set(trained.scores)) > TEST_ROWS // 2
    assert predicted(trained.path, trained.rows, tmp_path / "raw_scores.parquet") == trained.scores
    rows = pq.read_table(trained.rows)
    coded = rows.set_column(0, "code", rows["code"].dictionary_encode())
    pq.write_table(coded, tmp_path / "coded.parquet")
    assert predicted(trained.path, tmp_path / "coded.parquet", tmp_path / "of_coded.parquet") == trained.scores


def test_raw_rows_of_retrieval_need_no_negatives(tmp_path: Path, trained: Run) -> None:
    recipe = yaml.safe_load((trained.data.parent / "small.yaml").read_text())
    recipe["model"] = {"class_path": "hotbed.nn.TwoTower", "init_args": {"item": ["item"], "widths": [4]}}
    columns = recipe["data"]["source"]["init_args"]["schema"]["sparse"]
    rows = next(column["rows"] for column in columns if column["name"] == "item")
    pq.write_table(pa.table({"item": np.arange(rows)}), tmp_path / "items.parquet")
    recipe["retrieval"] = {"negatives": "history", "items": str(tmp_path / "items.parquet")}
    recipe["train"]["steps"] = 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status, _, run = train(tmp_path / "recipe.yaml")
    assert status == 0
    prepared = predicted(run, trained.data, tmp_path / "prepared.parquet", "--split", "test")
    pq.write_table(pq.read_table(trained.rows).drop_columns(["history"]), tmp_path / "rows.parquet")
    assert predicted(run, tmp_path / "rows.parquet", tmp_path / "raw.parquet") == prepared


def test_parts_of_prepared_data_are_not_taken_for_raw_ones(tmp_path: Path, trained: Run) -> None:
    assert predicted(trained.path, trained.data / "test", tmp_path / "of_folder.parquet") == trained.scores
    (file,) = (trained.data / "test").iterdir()
    shutil.copy(file, tmp_path / "elsewhere.parquet")
    assert predicted(trained.path, tmp_path / "elsewhere.parquet", tmp_path / "of_file.parquet") == trained.scores


def test_servers_take_raw_values_of_exported_models(tmp_path: Path, trained: Run) -> None:
    assert main(["export", str(trained.path), str(tmp_path / "model")]) == 0
    rows = pq.read_table(trained.rows)
    model = ServedModel.open(tmp_path / "model")
    encoder = model.encoder
    kinds = {column.name: column.kind for column in encoder.columns()}
    numbers = {"age": "numbers", "price": "numbers"}
    assert kinds == {"code": "text", "item": "integers", "history": "integers", **numbers}
    answered, _ = model.score(encoder.table(json.loads(json.dumps(rows.to_pydict()))))
    assert answered[:, 0].tolist() == trained.scores
    model.close()
    model = ServedModel.open(tmp_path / "model", encoded=True)
    ids = pq.read_table(trained.data / "test", columns=rows.column_names)
    answered, _ = model.score(model.encoder.table(ids.to_pydict()))
    assert answered[:, 0].tolist() == trained.scores
    model.close()


def test_hashed_values_are_taken_by_predictions_and_servers(tmp_path: Path) -> None:
    run = run_on(tmp_path, "--hash_rows", "{code: 40, item: 64}", "--hash_seed", "5")
    assert not list((run.data / "vocabulary").iterdir())
    assert predicted(run.path, run.rows, tmp_path / "raw_scores.parquet") == run.scores
    assert main(["export", str(run.path), str(tmp_path / "model")]) == 0
    model = ServedModel.open(tmp_path / "model")
    answered, _ = model.score(model.encoder.table(json.loads(json.dumps(pq.read_table(run.rows).to_pydict()))))
    assert answered[:, 0].tolist() == run.scores
    model.close()


def test_codes_of_a_text_file_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    raw = table().drop_columns(["history", "weight"])
    pq.write_table(raw, tmp_path / "raw.parquet")
    schema = {"sparse": SCHEMA["sparse"][:2], "dense": ["age", "price"], "labels": ["click"]}
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(schema))
    argv = ["prepare", str(tmp_path / "raw.parquet"), str(tmp_path / "data"), "--schema", str(tmp_path / "schema.yaml")]
    assert main([*argv, "--threshold", "3", "--format", "split_binary"]) == 0
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe_of(tmp_path / "data", steps=3)))
    status, _, run = train(tmp_path / "small.yaml")
    assert status == 0
    prepared = predicted(run, tmp_path / "data", tmp_path / "prepared.parquet", "--split", "test")
    rows = pl.read_parquet(tmp_path / "raw.parquet")[-len(prepared) :]
    digits = pl.col("code").is_null() | (pl.col("code") != "ü")  # nothing in the file tells that they are text then
    rows.filter(digits).write_csv(tmp_path / "rows.tsv", separator="\t")
    scores = predicted(run, tmp_path / "rows.tsv", tmp_path / "scores.parquet")
    expected = [score for score, is_digits in zip(prepared, rows.select(digits)["code"], strict=True) if is_digits]
    assert scores == expected
    assert len(set(scores)) > 10


def test_what_cannot_be_asked_is_told(tmp_path: Path, trained: Run, capsys: Output) -> None:
    rows = pq.read_table(trained.rows)
    out = tmp_path / "scores.parquet"
    argv = ["predict", str(trained.path), str(tmp_path / "rows.parquet"), "--out", str(out)]
    for column, values, message in [
        ("code", pa.array(range(TEST_ROWS)), "column 'code': got int64, expected raw values (text)"),
        ("item", pa.array(["5"] * TEST_ROWS), "column 'item': got string, expected raw values (integers)"),
        (
            "history",
            pa.array(range(TEST_ROWS)),
            "sparse column 'history'",
        ),
        ("history", pa.array([["5"]] * TEST_ROWS), "expected raw values (integers)"),
    ]:
        other = rows.set_column(rows.column_names.index(column), column, values)
        pq.write_table(other, tmp_path / "rows.parquet")
        assert message in refused(argv, capsys)
    shutil.copytree(trained.data, tmp_path / "data")
    (tmp_path / "data/vocabulary/item.parquet").unlink()
    recipe = recipe_of(tmp_path / "data", steps=2)
    recipe["data"]["source"] = yaml.safe_load((trained.data / "source.yaml").read_text())
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    status, _, run = train(tmp_path / "small.yaml")  # needs no vocabulary
    assert status == 0
    argv = ["predict", str(run), str(trained.rows), "--out", str(out)]
    assert "vocabulary/item.parquet does not exist" in refused(argv, capsys)
    assert not out.exists()
