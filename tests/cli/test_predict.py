"""Protects that `hotbed predict` scores raw rows as evaluation does, in order, and writes a whole file or none."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import hotbed as hb
from hotbed.auc import auc
from hotbed.cli.main import main
from hotbed.config import Component
from hotbed.data import Schema, SparseColumn
from hotbed.errors import DataError
from hotbed.testing import model_contract as model_testing
from hotbed.testing.model_contract import ModelContract
from tests.cli.cases import Output, refused, train
from tests.train.numbers import POSITIVE, frame
from tests.train.numbers import recipe_of_numbers as recipe_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    status, summary, run = train(recipe_of(tmp_path_factory.mktemp("predict"), [POSITIVE]))
    assert status == 0
    assert summary["test"]["auc"] > 0.7
    return run


@pytest.fixture(name="new")
def _new(run: Path, tmp_path: Path) -> Path:
    """The last 500 rows of the data, the test split, without their labels."""
    whole = pl.read_parquet(run.parents[2] / "log.parquet")
    whole[-500:].drop("rating", "buy").write_parquet(tmp_path / "new.parquet", row_group_size=70)
    return tmp_path / "new.parquet"


def predicted(run: Path, new: Path, *options: str, name: str = "scores.parquet") -> pl.DataFrame:
    out = new.parent / name
    assert main(["predict", str(run), str(new), "--out", str(out), *options]) == 0
    return pl.read_parquet(out) if out.suffix == ".parquet" else pl.read_csv(out)


def test_scores_are_those_that_eval_computes(run: Path, new: Path, tmp_path: Path, capsys: Output) -> None:
    file, done = tmp_path / "eval.json", tmp_path / "predict.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    metrics = json.loads(file.read_text())["test"]
    scores = predicted(run, new, "--keep", "row", "user", "--json", str(done))
    assert scores.columns == ["row", "user", "score"]
    rows = pl.read_parquet(run.parents[2] / "log.parquet")[-metrics["samples"] :]
    assert scores["row"].to_list() == rows["row"].to_list()
    labels = torch.from_numpy((rows["rating"] >= 4).to_numpy().astype(np.float32))
    probabilities = torch.from_numpy(scores["score"].to_numpy().copy())
    assert auc(probabilities, labels) == pytest.approx(metrics["auc"], abs=1e-6)
    loss = torch.nn.functional.binary_cross_entropy(probabilities, labels.double())
    assert float(loss) == pytest.approx(metrics["logloss"], rel=1e-6)
    said = json.loads(done.read_text())
    assert (said["rows"], said["columns"]) == (metrics["samples"], ["row", "user", "score"])
    assert f"{metrics['samples']:,} rows with row, user, score" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_a_score_does_not_depend_on_the_rows_beside_it(run: Path, new: Path) -> None:
    expected = predicted(run, new)["score"].to_numpy()
    for size in (1, 7, 10_000):
        found = predicted(run, new, "--batch_size", str(size), name=f"by_{size}.parquet")["score"].to_numpy()
        np.testing.assert_array_equal(found, expected)
    frame = pl.read_parquet(new)
    (new.parent / "folder").mkdir()
    frame[:100].write_parquet(new.parent / "folder" / "1.parquet")
    frame[100:].write_parquet(new.parent / "folder" / "2.parquet")
    of_folder = hb.predict(run, new.parent / "folder", new.parent / "of_folder.parquet")
    np.testing.assert_array_equal(pl.read_parquet(of_folder.out)["score"].to_numpy(), expected)


def test_a_csv_keeps_categories_and_bytes_that_are_text(run: Path, new: Path, capsys: Output) -> None:
    kept = pl.read_parquet(new)["row"].cast(pl.String)
    table = pq.read_table(new)
    table = table.append_column("word", pa.array(kept.to_list()).dictionary_encode())
    table = table.append_column("data", pa.array([text.encode() for text in kept]))
    pq.write_table(table, new, row_group_size=70)
    found = predicted(run, new, "--keep", "row", "word", "data", name="scores.csv")
    assert found["score"].to_list() == predicted(run, new, name="plain.parquet")["score"].to_list()
    assert found["row"].to_list() == found["word"].to_list() == found["data"].to_list() == kept.cast(pl.Int64).to_list()
    bad = pa.array([b"\xff\xfe" if i == 99 else None for i in range(len(kept))])
    for column in (bad, bad.dictionary_encode()):
        pq.write_table(table.append_column("bad", column), new, row_group_size=70)
        argv = ["predict", str(run), str(new), "--keep", "bad", "--out"]
        message = refused([*argv, str(new.parent / "bad.csv")], capsys)
        assert "column 'bad', row 99: got the bytes b'\\xff\\xfe', expected UTF-8 text" in message
        assert not list(new.parent.glob("*bad.csv*"))
    assert main([*argv, str(new.parent / "bad.parquet")]) == 0
    assert pq.read_table(new.parent / "bad.parquet")["bad"].to_pylist()[99] == b"\xff\xfe"


@pytest.mark.parametrize("name", ["seconds", "extra"])
def test_every_command_refuses_two_columns_of_one_name(run: Path, tmp_path: Path, capsys: Output, name: str) -> None:
    recipe, bad, out = run.parents[2] / "recipe.yaml", tmp_path / "bad.parquet", str(tmp_path / "out.parquet")
    table = pq.read_table(run.parents[2] / "log.parquet").append_column("extra", pa.nulls(2000, pa.int64()))
    pq.write_table(table.append_column(name, table[name]), bad)
    for argv in (
        ["init", str(bad), "--out", str(tmp_path / "drafted.yaml")],
        ["inspect", str(bad)],
        ["prepare", str(bad), str(tmp_path / "prepared"), "--schema", str(recipe)],
        ["train", str(recipe), "--data", str(bad), "--out", str(tmp_path / "runs")],
        ["eval", "--checkpoint", str(run), "--data", str(bad)],
        ["predict", str(run), str(bad), "--out", out],
        ["predict", str(run), str(bad), "--out", out, "--keep", name],
    ):
        assert f"bad.parquet: got column '{name}' 2 times" in refused(argv, capsys), argv


def test_several_labels_and_integers_of_another_width(tmp_path: Path) -> None:
    status, _, run = train(recipe_of(tmp_path, [POSITIVE, "buy"]))
    assert status == 0
    new = tmp_path / "new.parquet"
    rows = frame(50, seed=3).drop("rating", "buy")
    rows.with_columns(pl.col("seconds").cast(pl.UInt32)).write_parquet(new)
    narrow = predicted(run, new)
    assert narrow.columns == ["score_rating", "score_buy"]
    rows.write_parquet(new)
    assert predicted(run, new, name="wide.parquet").equals(narrow)
    assert narrow.to_numpy().min() > 0
    assert narrow.to_numpy().max() < 1


def test_no_rows_are_an_error(run: Path, new: Path, capsys: Output) -> None:
    pl.read_parquet(new)[:0].write_parquet(new)
    message = refused(["predict", str(run), str(new), "--out", str(new.parent / "scores.parquet")], capsys)
    assert "new.parquet: got no rows" in message


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"drop": "user"}, [], "new.parquet: column 'user' is missing, expected one of row, items"),
        ({"drop": "seconds"}, [], "new.parquet: column 'seconds' is missing"),
        ({"user": pl.Int64}, [], "column 'user': got integers, expected text"),
        ({"seconds": pl.String}, [], "column 'seconds': got .*, expected numbers"),
        ({"user": pl.Float64}, [], "column 'user': got integers, expected text"),
        ({}, ["--keep", "rwo"], "--keep of .*new.parquet: got 'rwo', expected one of row, .*did you mean 'row'"),
        ({}, ["--keep", "row", "row"], "--keep names 'row' 2 times"),
        ({"rename": {"row": "row", "extra": "score"}}, ["--keep", "score"], "'score'"),
        ({}, ["--keep", "items", "--out", "{}/x.csv"], "'items' of type .*list"),
        ({}, ["--batch_size", "0"], "--batch_size: got 0, expected at least 1"),
        ({}, ["--device", "tpu"], "--device: got 'tpu', expected one of auto, cpu, cuda"),
        ({}, ["--split", "tset"], "--split of .*new.parquet: got 'tset', expected one of train"),
        ({}, ["--out", "{}/x.txt"], "ends in .parquet or .csv"),
        ({}, ["--out", "{}/none/x.csv"], "none does not exist"),
        ({}, ["--out", "{}/new.parquet"], "new.parquet, which exists"),
    ],
)
def test_what_cannot_be_scored(
    run: Path, new: Path, change: dict[str, Any], options: list[str], message: str, capsys: Output
) -> None:
    rows = pl.read_parquet(new).with_columns(extra=pl.lit(1))
    rows = rows.rename(change.pop("rename", {})).drop(change.pop("drop", []))
    if "user" in change:
        rows = rows.with_columns(pl.col("user").str.strip_prefix("user "))
    rows = rows.with_columns(*(pl.col(name).cast(kind) for name, kind in change.items()))
    rows.write_parquet(new)
    before = sorted(new.parent.iterdir())
    out = [] if "--out" in options else ["--out", str(new.parent / "scores.parquet")]
    given = [option.format(new.parent) for option in options]
    said = refused(["predict", str(run), str(new), *given, *out], capsys)
    assert re.search(message, said), said
    assert sorted(new.parent.iterdir()) == before


def test_a_failure_leaves_nothing(run: Path, new: Path, capsys: Output) -> None:
    out = ["--out", str(new.parent / "scores.parquet")]
    message = refused(["predict", str(new.parent), str(new), *out], capsys)
    assert "is not a checkpoint" in message
    (new.parent / "several").mkdir()
    for name in ("train", "test"):
        shutil.copy(new, new.parent / "several" / f"{name}.parquet")
    message = refused(["predict", str(run), str(new.parent / "several"), *out], capsys)
    assert "has the splits train, test" in message
    half = new.read_bytes()
    whole = pq.ParquetFile(new).metadata.row_group(1).column(0).data_page_offset
    new.write_bytes(half[:whole] + bytes(200) + half[whole + 200 :])
    with pytest.raises(DataError, match=r"new\.parquet, row group 1, column 'user': the file is damaged or truncated"):
        hb.predict(run, new, new.parent / "scores.parquet")
    assert not [p for p in new.parent.iterdir() if "scores" in p.name]


def test_a_missing_value_is_an_error_where_the_schema_says_so(tmp_path: Path) -> None:
    file = recipe_of(tmp_path, [POSITIVE])
    values = yaml.safe_load(file.read_text())
    values["data"]["source"]["init_args"]["schema"]["dense"] = [
        {"name": "seconds", "rule": "standard", "missing": "error"},
        "row",
    ]
    file.write_text(yaml.safe_dump(values))
    status, _, run = train(file)
    assert status == 0
    rows = frame(20).with_columns(pl.when(pl.col("row") == 7).then(None).otherwise(pl.col("seconds")).alias("seconds"))
    rows.write_parquet(tmp_path / "new.parquet")
    with pytest.raises(DataError, match=r"row group 0, column 'seconds': null at row 7 \(row 7 of the file\)"):
        hb.predict(run, tmp_path / "new.parquet", tmp_path / "scores.parquet")
    rows = frame(20).with_columns(pl.when(pl.col("row") == 7).then(math.inf).otherwise(1.0).alias("row"))
    rows.write_parquet(tmp_path / "new.parquet")
    with pytest.raises(hb.HotbedError, match="the score of row 7 is not a number, because a numerical"):
        hb.predict(run, tmp_path / "new.parquet", tmp_path / "scores.parquet")
    assert not list(tmp_path.glob("*scores*"))


def test_eval_refuses_ids_of_another_kind(run: Path, tmp_path: Path, capsys: Output) -> None:
    rows = frame(1000).with_columns(pl.col("user").str.strip_prefix("user ").cast(pl.Int64))
    rows.write_parquet(tmp_path / "other.parquet", row_group_size=100)
    message = refused(["eval", "--checkpoint", str(run), "--data", str(tmp_path / "other.parquet")], capsys)
    assert "column 'user': got integers, expected text" in message


def test_eval_takes_all_rows_of_other_data(run: Path, new: Path, tmp_path: Path, capsys: Output) -> None:
    log, file = run.parents[2] / "log.parquet", tmp_path / "eval.json"
    pl.read_parquet(log)[-200:].write_parquet(tmp_path / "other.parquet")
    assert main(["eval", "--checkpoint", str(run), "--data", str(tmp_path / "other.parquet"), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["all"]["samples"] == 200
    assert f"all of {tmp_path}/other.parquet, 200 samples" in capsys.readouterr().out
    assert main(["eval", "--checkpoint", str(run), "--data", str(log), "--split", "test", "--json", str(file)]) == 0
    metrics = json.loads(file.read_text())["test"]
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert metrics == json.loads(file.read_text())["test"]


def test_rows_of_csv_are_what_they_were_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of text does not say what its values are, and few rows say something else than many."""
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    rng = np.random.default_rng(0)
    code, price = rng.integers(0, 30, 400), rng.lognormal(size=400).round(2)
    rows = [f"{c if c % 3 else f'A{c}'},{p},{i % 5},{c % 2}" for i, (c, p) in enumerate(zip(code, price, strict=True))]
    (tmp_path / "log.csv").write_text("\n".join(["code,price,item,click", *rows]) + "\n")
    recipe = tmp_path / "recipe.yaml"
    assert main(["init", str(tmp_path / "log.csv"), "--out", str(recipe)]) == 0
    status, _, run = train(recipe, "--train.device", "cpu", "--train.epochs", "2")
    assert status == 0
    header = "code,price,item\n"
    new = {"whole": "1,1.5,2\nA3,2,\n1,,3\n", "few": "1,1.5,2\n", "empty": "1,,3\n"}
    for name, text in new.items():
        (tmp_path / f"{name}.csv").write_text(header + text)
    scores = {name: predicted(run, tmp_path / f"{name}.csv", name=f"{name}.parquet")["score"] for name in new}
    assert [scores["few"][0], scores["empty"][0]] == pytest.approx([scores["whole"][0], scores["whole"][2]], abs=1e-6)
    pl.DataFrame({"code": ["1"], "price": [None], "item": [3]}).write_parquet(tmp_path / "nulls.parquet")
    assert predicted(run, tmp_path / "nulls.parquet", name="of_nulls.parquet")["score"][0] == scores["empty"][0]


def test_split_binary_data_can_be_scored(recipe: Path, prepared: Path, tmp_path: Path) -> None:
    status, summary, run = train(recipe, "--train.checkpoint", "last")
    assert status == 0
    made = hb.predict(run, prepared, tmp_path / "scores.parquet", split="test")
    assert made.rows == summary["test"]["samples"]
    with pytest.raises(hb.HotbedError, match="SplitBinarySource"):
        hb.predict(run, prepared, tmp_path / "others.parquet", split="test", keep=["C1"])


READER = Path(__file__).parents[2] / "docs" / "serving" / "score_program.py"


def test_the_program_of_the_docs_scores_a_row_without_hotbed(run: Path, new: Path, tmp_path: Path) -> None:
    code = READER.read_text(encoding="utf-8")
    (tmp_path / "score.py").write_text("import sys\nsys.modules['hotbed'] = None\n" + code)
    rows = pl.read_parquet(new)
    at = int(rows["items"].list.len().arg_max() or 0)
    expected = predicted(run, new)["score"][at]
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "program"), "--to", "torch"]) == 0
    about = json.loads((tmp_path / "program" / "inputs.json").read_text())
    assert about["ids"]["user"] == {"rows": 256, "ids": 1, "pooling": "sum", "encoding": "hash", "values": "text"}
    assert (about["dense_dtype"], about["labels"], about["positives"]) == ("float64", ["rating"], {"rating": ">= 4"})
    assert "0xBF58476D1CE4E5B9" in about["hash"]
    sample = {k: None if v != v else v for k, v in rows.row(at, named=True).items()}  # JSON has no NaN
    argv = [sys.executable, "score.py", str(tmp_path / "program"), json.dumps(sample)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"rating": pytest.approx(expected, abs=1e-6)}


class OfHistories:
    """A model of histories whose ids have weights."""

    model = Component(
        class_path="hotbed.nn.DIN", init_args={"histories": {"seen": "item"}, "max_len": 3, "top": [8, 1]}
    )
    schema = Schema(
        sparse=(
            SparseColumn(name="item", rows=40),
            SparseColumn(name="seen", rows=40, table="item", ids=None, weights="times"),
            SparseColumn(name="user", rows=90, weights="share"),
        ),
        dense=("age",),
        labels=("click",),
    )
    dim = 16
    retrieval = None


def test_the_program_of_the_docs_scores_histories_and_weights_of_ids(tmp_path: Path) -> None:
    recipe = model_testing.contract_recipe(cast("type[ModelContract]", OfHistories), tmp_path)
    recipe["train"] |= {"checkpoint": "last"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    status, _, run = train(tmp_path / "recipe.yaml")
    assert status == 0
    data = tmp_path / "samples.parquet"
    expected, rows = predicted(run, data)["score"], pl.read_parquet(data)
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "program"), "--to", "torch"]) == 0
    about = json.loads((tmp_path / "program" / "inputs.json").read_text())
    assert {name: of.get("weights") for name, of in about["ids"].items()} == {
        "item": None,
        "seen": "times",
        "user": "share",
    }
    code = READER.read_text(encoding="utf-8")
    (tmp_path / "score.py").write_text("import sys\nsys.modules['hotbed'] = None\n" + code)
    lengths = rows["seen"].list.len()
    for at in (lengths.arg_max() or 0, lengths.arg_min() or 0):
        argv = [sys.executable, "score.py", str(tmp_path / "program"), json.dumps(rows.row(at, named=True))]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {"click": pytest.approx(expected[at], abs=1e-6)}


MEMORY = """
import resource, sys, hotbed as hb
hb.predict(sys.argv[1], sys.argv[2], sys.argv[3], keep=["row"], batch_size=4096)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_data(run: Path, tmp_path: Path) -> None:
    peaks: list[int] = []
    part = frame(10_000)
    for parts, rows in ((2, 10_000), (40, 10_000), (40, 400_000)):
        data = tmp_path / "new.parquet"
        pl.concat([part] * parts).drop("rating", "buy").write_parquet(data, row_group_size=rows)
        argv = [sys.executable, "-c", MEMORY, str(run), str(data), str(tmp_path / f"{parts}_by_{rows}.parquet")]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) >> 10)  # MiB
    assert max(peaks) - peaks[0] < 40, peaks  # the larger ones have 50 MiB of numbers alone
    whole, one = (pl.read_parquet(tmp_path / f"40_by_{rows}.parquet") for rows in (10_000, 400_000))
    assert whole.equals(one)
