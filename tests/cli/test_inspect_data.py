"""Protects what `hotbed inspect DATA` says of rows, labels, columns and drift, and that it finds every fault."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.checkpoint import checkpoints_in
from hotbed.cli.main import main
from hotbed.cli.pages.skew_report import SKEW_DEFAULTS
from hotbed.data import SplitBinarySource, read_hot_order
from hotbed.locations import resolve_uri
from tests.cli.cases import Output, inspected, refused, small_recipe, train, write_yaml

SCHEMA: dict[str, Any] = {
    "labels": ["click"],
    "dense": ["price"],
    "sparse": [{"name": "user", "rows": 64}, {"name": "words", "rows": 64, "ids": None}],
}


def rows(n: int = 1000, seed: int = 0, **columns: Any) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "click": (np.arange(n) % 4 == 0).astype(np.int8),
            "user": random.integers(0, 50, n),
            "words": pa.array([[f"w{j % 7}" for j in range(i % 4)] if i % 10 else None for i in range(n)]),
            "price": pa.array(random.lognormal(size=n), mask=np.arange(n) % 5 == 0),
            "when": pa.array(np.arange(n) * 3_600_000_000, pa.timestamp("us")),
            **columns,
        }
    )


def write(path: Path, table: pa.Table, row_group: int = 300) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group)
    return path


def write_recipe(path: Path, data: Path, schema: dict[str, Any] | None = None, **init_args: Any) -> Path:
    return write_yaml(path, small_recipe(data, schema or SCHEMA, source=init_args, data={"test_split": None}))


def found_with(tmp_path: Path, *argv: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "found.json"
    assert main(["inspect", *argv, "--json", str(file)]) == status
    return json.loads(file.read_text())


def column(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(of for of in found["columns"] if of["column"] == name)


def test_figures_of_parquet_are_those_of_its_rows(tmp_path: Path, capsys: Output) -> None:
    table = rows()
    found = inspected(write(tmp_path / "a.parquet", table), tmp_path)
    assert (found["kind"], found["rows"], found["row_groups"]) == ("Parquet", 1000, 4)
    (label,) = found["labels"]
    assert (label["label"], label["rate"], label["samples"]) == ("click", 0.25, 1000)
    assert label["interval"] == pytest.approx([0.224153, 0.277760], abs=1e-6)
    user, words, price, when = (column(found, name) for name in ("user", "words", "price", "when"))
    values, counts = np.unique(table["user"].to_numpy(), return_counts=True)
    assert (user["type"], user["missing"], user["distinct"], user["distinct_error"]) == ("int64", 0, len(values), 0)
    assert user["hottest"][0]["share"] == counts.max() / 1000 == user["top_shares"]["1"]
    assert len(user["hottest"]) == 10
    assert (words["missing"], words["distinct"]) == (0.1, 3)
    lengths = [len(w) for w in table["words"].to_pylist() if w is not None]
    assert words["values"] == sum(lengths)
    assert (words["lengths"]["low"], words["lengths"]["high"]) == (0, 3)
    assert words["lengths"]["mean"] == pytest.approx(np.mean(lengths))
    known = table["price"].drop_null().to_numpy()
    assert price["missing"] == 0.2
    assert (price["numbers"]["low"], price["numbers"]["high"]) == (known.min(), known.max())
    assert price["numbers"]["mean"] == pytest.approx(known.mean())
    assert price["numbers"]["quantiles"]["0.5"] == pytest.approx(np.median(known))
    assert (when["numbers"]["low"], when["numbers"]["high"]) == ("1970-01-01 00:00:00", "1970-02-11 15:00:00")
    output = capsys.readouterr()
    assert "label click: 25.000% positive (22.415% to 27.776%)" in output.out
    assert re.search(r"user +.*int64 .* 50 ", output.out)
    assert "reading all rows" in output.err


def arrays(folder: Path, *days: tuple[list[int], list[int]]) -> Path:
    """Days of NumPy arrays with one id and one number per sample."""
    folder.mkdir()
    for i, (labels, ids) in enumerate(days):
        np.save(folder / f"day_{i}_labels.npy", np.array(labels, np.int32)[:, None])
        np.save(folder / f"day_{i}_dense.npy", np.array(labels, np.float32)[:, None])
        np.save(folder / f"day_{i}_sparse.npy", np.array(ids, np.int32)[:, None])
    return folder


@pytest.mark.parametrize("schema", [{}, {"labels": ["click"], "dense": ["n"], "sparse": [{"name": "user", "rows": 9}]}])
def test_arrays_of_numpy(tmp_path: Path, capsys: Output, schema: dict[str, Any]) -> None:
    data = arrays(tmp_path / "days", ([0, 1], [3, 3]), ([1, 1], [3, 12]))
    found = inspected(data, tmp_path)
    assert (found["kind"], found["samples"], found["tables"]) == (
        "arrays of NumPy",
        {"day_0": 2, "day_1": 2},
        [],
    )
    assert [(of["label"], of["rate"], of["rate_by_split"]) for of in found["labels"]] == [
        ("label", 0.75, {"day_0": 0.5, "day_1": 1.0})
    ]
    assert (column(found, "cat_0")["distinct"], column(found, "int_0")["missing"]) == (2, 0)
    recipe = write_recipe(tmp_path / "recipe.yaml", data, SCHEMA)
    values = yaml.safe_load(recipe.read_text())
    args = {"schema": schema} if schema else {"rows": 9}
    for modulo, faults in ((False, ["user" if schema else "cat_0"]), (True, [])):
        values["data"]["source"] = {"class_path": "hotbed.data.NpySource", "init_args": {**args, "modulo": modulo}}
        recipe.write_text(yaml.safe_dump(values))
        found = found_with(tmp_path, str(data), "--recipe", str(recipe), status=2 if faults else 0)
        assert [of["column"] for of in found["faults"]] == faults
        assert ("12" in capsys.readouterr().err) == bool(faults)


def test_a_prepared_dataset_and_a_log(prepared: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    found = inspected(prepared, tmp_path)
    source = SplitBinarySource(prepared)
    assert (found["rows"], len(found["columns"])) == (3000, 40)
    batches = {split: source.read(split, 0) for split in source.splits}
    ids = np.concatenate([batch.sparse["C7"].values.numpy() for batch in batches.values()])
    assert column(found, "C7")["distinct"] == len(np.unique(ids))
    rates = {split: float(b.labels.mean()) for split, b in batches.items() if b.labels is not None}
    assert found["labels"][0]["rate_by_split"] == pytest.approx(rates)
    of_log = inspected(log, tmp_path)
    assert of_log["labels"][0]["rate"] == pytest.approx(found["labels"][0]["rate"])
    assert column(of_log, "C20")["missing"] == pytest.approx(0.44, abs=0.05)
    assert column(of_log, "I2")["numbers"]["low"] == -2


def test_files_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "days/train/0.parquet", rows(300))
    changed = rows(100, user=[f"u{i}" for i in range(100)]).drop_columns(["price"])
    write(tmp_path / "days/test/0.parquet", changed)
    found = inspected(tmp_path / "days", tmp_path)
    assert found["samples"] == {"train": 300, "test": 100}
    assert column(found, "user")["type"] == "int64, string"
    assert column(found, "price")["missing"] == (60 + 100) / 400
    assert set(found["labels"][0]["rate_by_split"]) == {"train", "test"}


def test_without_a_label_the_reason_is_told(tmp_path: Path, capsys: Output) -> None:
    file = write(tmp_path / "a.parquet", rows().rename_columns(["bought_it", "user", "words", "price", "when"]))
    found = inspected(file, tmp_path)
    assert found["labels"] == [] and "--label NAME" in found["no_label"]
    assert "no label: no column has a usual name" in capsys.readouterr().out
    found = found_with(tmp_path, str(file), "--label", "bought_it")
    assert found["labels"][0]["rate"] == 0.25
    assert "--label: " in refused(["inspect", str(file), "--label", "absent"], capsys)


def test_drift_between_two_days(tmp_path: Path, capsys: Output) -> None:
    monday = write(tmp_path / "monday.parquet", rows(4000, 1))
    random = np.random.default_rng(2)
    clicks, users = (np.arange(2000) % 2 == 0).astype(np.int8), random.integers(25, 75, 2000)
    tuesday = write(tmp_path / "tuesday.parquet", rows(2000, 2, click=clicks, user=users, new=users).drop(["words"]))
    found = found_with(tmp_path, str(tuesday), "--against", str(monday))["against"]
    assert (found["rows"], found["only_before"], found["only_after"]) == (4000, ["words"], ["new"])
    (label,) = found["labels"]
    assert (label["rates"], label["change"]) == ([0.25, 0.5], 0.25)
    assert 0.22 < label["interval"][0] < 0.25 < label["interval"][1] < 0.28
    drifts = {of["column"]: of for of in found["columns"]}
    assert next(iter(drifts)) == "user"
    assert drifts["user"]["unseen_share"] == (users >= 50).mean()
    assert (drifts["user"]["unseen_values"], drifts["user"]["unseen_share_error"]) == (25, 0)
    assert drifts["user"]["stability_index"] > 1 and 0.4 < drifts["user"]["jensen_shannon"] < 0.7
    assert drifts["price"]["stability_index"] < 0.1 and drifts["price"]["missing"] == [0.2, 0.2]
    assert "stability_index" not in drifts["when"] and "unseen_share" not in drifts["price"]
    assert "label click: 25.000% → 50.000%, +25.000%" in capsys.readouterr().out


def test_data_that_fit_a_recipe(tmp_path: Path, capsys: Output) -> None:
    data = write(tmp_path / "a.parquet", rows())
    recipe = write_recipe(tmp_path / "r.yaml", data)
    for argv in ([str(data), "--recipe", str(recipe)], [str(recipe)]):
        found = found_with(tmp_path, *argv)
        assert (found["rows"], found["faults"], found["recipe"]) == (1000, [], str(recipe))
        assert "all rows match" in capsys.readouterr().out


def fault(tmp_path: Path, data: pa.Table, schema: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    """The one fault of data."""
    file = write(tmp_path / "a.parquet", data)
    recipe = write_recipe(tmp_path / "r.yaml", file, schema, **args)
    (found,) = found_with(tmp_path, str(file), "--recipe", str(recipe), status=2)["faults"]
    return found


RAW, HASH = {"ids": "raw"}, {"ids": "hash"}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, int], str]] = {
    "id above the rows": (
        {"user": [*range(50), 64, 65, *range(48)]},
        RAW,
        ("user", "ids out of range", 2),
        r"column 'user': id 64 at row 50 \(row 50 of the file\); .*'user', from 0 to 63",
    ),
    "negative id": (
        {"user": [-1, *range(99)]},
        RAW,
        ("user", "ids out of range", 36),
        "id -1 at row 0 .* from 0 to 63",
    ),
    "missing id": ({"user": [None, *[1] * 99]}, RAW, ("user", "missing ids", 1), "id null at row 0 "),
    "no whole number": (
        {"user": [0.5, None, *np.arange(98.0)]},
        HASH,
        ("user", "no whole numbers", 1),
        r"id 0\.5 at row 0 .*9,007,199,254,740,992",
    ),
    "label above 1": (
        {"click": [0, 3] * 50},
        HASH,
        ("click", "labels out of range", 50),
        r"column 'click': label 3 at row 1 .*positive: '>= 4'",
    ),
    "missing label": ({"click": [0, None] * 50}, HASH, ("click", "missing labels", 50), "label null at row 1 "),
    "number not finite": (
        {"price": [1.0, np.inf, 1e39, np.nan] * 25},
        HASH,
        ("price", "numbers not finite", 75),
        r"inf at row 1 .*; .*float32",
    ),
    "number as text": (
        {"price": ["1"] * 100},
        HASH,
        ("price", "wrong type", 0),
        "column 'price': got string, expected",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_fault_is_found_in_all_rows(case: str, tmp_path: Path) -> None:
    columns, args, (name, problem, values), message = BAD[case]
    found = fault(tmp_path, rows(100, words=[[1, 2]] * 100, **columns), **args)
    assert (found["column"], found["problem"], found["values"]) == (name, problem, values)
    assert re.search(message, found["message"])


def test_faults_of_lists_weights_groups_and_rules(tmp_path: Path) -> None:
    schema = {
        **SCHEMA,
        "sparse": [{"name": "words", "rows": 64, "ids": 2}],
        "dense": [{"name": "price", "rule": "log", "missing": "error"}],
        "weight": "weight",
        "group": "user",
        "labels": [{"column": "click", "positive": "> 1"}],
    }
    words = [["a", "b"], ["a", "b", "c"], None, *[["a", "b"]] * 97]
    users = pa.array([None, *range(99)], pa.int64())
    table = rows(100, words=words, weight=[-1.0, *[1.0] * 99], click=[float("nan"), *[2.0] * 99], user=users)
    file = write(tmp_path / "a.parquet", table)
    recipe = write_recipe(tmp_path / "r.yaml", file, schema)
    found = found_with(tmp_path, str(file), "--recipe", str(recipe), status=2)["faults"]
    assert {(of["column"], of["problem"]): of["values"] for of in found} == {
        ("words", "number of ids"): 2,
        ("price", "missing numbers"): 20,
        ("click", "labels out of range"): 1,
        ("weight", "bad weights"): 1,
        ("user", "missing groups"): 1,
    }
    messages = "\n".join(of["message"] for of in found)
    assert re.search(r"column 'words': 3 ids at row 1 ", messages)
    assert re.search(r"weight -1\.0 at row 0 ", messages)
    assert re.search("null at row 0 ", messages)


def test_faults_of_columns_are_printed_with_all_else_and_end_the_command(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path / "days/0.parquet", rows(100))
    names = ["click", "usr", "words", "price", "when"]
    file = write(tmp_path / "days/1.parquet", rows(50, words=[[1]] * 50).rename_columns(names))
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "days")
    message = refused(
        ["inspect", str(tmp_path / "days"), "--recipe", str(recipe), "--json", str(tmp_path / "f")], capsys
    )
    assert f"days does not fit {recipe}: got 2 faults (user, words), " in message
    assert f"{file} has no column 'user'" in message
    assert "did you mean 'usr'?" in message
    found = json.loads((tmp_path / "f").read_text())
    assert found["rows"] == 150
    assert "got text in" in found["faults"][1]["message"] and "integers in" in found["faults"][1]["message"]


def test_a_recipe_of_prepared_data(prepared: Path, recipe: Path, tmp_path: Path, capsys: Output) -> None:
    found = found_with(tmp_path, str(prepared), "--recipe", str(recipe))
    assert (found["faults"], found["rows"]) == ([], 3000)
    assert found_with(tmp_path, str(recipe))["rows"] == 3000
    assert found["tables"][0] == {"table": "C1", "rows": SplitBinarySource(prepared).schema.rows["C1"]}
    file = write(tmp_path / "a.parquet", rows())
    message = refused(["inspect", str(file), "--recipe", str(recipe)], capsys)
    assert "40 faults" in message and "has no column 'C1'" in message


def test_the_page(tmp_path: Path) -> None:
    monday = write(tmp_path / "<monday>.parquet", rows(2000, 1))
    tuesday = write(tmp_path / "tuesday.parquet", rows(1000, 2, user=np.arange(1000), click=[0, 5] * 500))
    recipe = write_recipe(tmp_path / "r.yaml", tuesday)
    page = tmp_path / "page.html"
    found_with(tmp_path, str(tuesday), "--against", str(monday), "--recipe", str(recipe), "--html", str(page), status=2)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 1 + 4  # drift; click, user, words and price
    assert "&lt;monday&gt;" in text and "<monday>" not in text
    assert "Differences from" in text and "label 5 at row 1" in text
    assert not re.search(r"https?:|<script|url\([^#]|src=", re.sub(r' xmlns(:xlink)?="[^"]*"', "", text))
    assert "nan" not in text.lower().replace("dominant", "")
    for fact in ("≈" if "≈" in text else "1,000", "unseen before", "20.0% missing", "stability index"):
        assert fact in text


def test_an_object_store(s3: str, tmp_path: Path) -> None:
    filesystem, path = resolve_uri(s3.replace("PATH", "inspected/a.parquet"))
    pq.write_table(rows(), path, filesystem=filesystem, row_group_size=300)
    at, page = (s3.replace("PATH", f"inspected/{name}") for name in ("a.parquet", "page.html"))
    found = found_with(tmp_path, at, "--against", at, "--html", page)
    assert found["labels"][0]["rate"] == 0.25
    assert {of["stability_index"] for of in found["against"]["columns"] if "stability_index" in of} == {0.0}
    filesystem, path = resolve_uri(page)
    with filesystem.open_input_stream(path) as stream:
        assert stream.read().startswith(b"<!DOCTYPE html>")


def test_options_that_cannot_be(prepared: Path, recipe: Path, tmp_path: Path, capsys: Output) -> None:
    data = write(tmp_path / "a.parquet", rows())
    for argv, message in (
        ([str(data), "--skew", "--html", "x.html"], "--html does not work with --skew"),
        ([str(recipe), "--recipe", str(recipe)], f"--recipe: got {recipe}"),
        ([str(data), "--recipe", str(recipe), "--label", "click"], "--label: got a label"),
        ([str(data), "--html", str(tmp_path)], "which is a directory"),
        ([str(data), "--against", str(tmp_path / "absent")], "absent does not exist"),
        ([str(write(tmp_path / "e.parquet", rows(0)))], "e.parquet has no rows"),
    ):
        assert message in refused(["inspect", *argv], capsys)
    (tmp_path / "cut.parquet").write_bytes(data.read_bytes()[:-100])
    message = refused(["inspect", str(tmp_path / "cut.parquet"), "--html", str(tmp_path / "x.html")], capsys)
    assert "cut.parquet is " in message
    assert not (tmp_path / "x.html").exists()


# -- --skew ----------------------------------------------------------------------------------------------------------


def skew(path: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    assert main(["inspect", "--skew", str(path), "--json", str(file), *options]) == 0
    return json.loads(file.read_text())


def test_a_directory_of_everything(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "skew"
    found = skew(prepared, tmp_path, "--out", str(out), "--picture", "false")
    assert json.loads((out / "skew.json").read_text()) == found
    assert sorted(f.name for f in out.iterdir()) == ["hot_order", "skew.json"]
    source = SplitBinarySource(prepared)
    assert len(list((out / "hot_order").iterdir())) == 26
    for name, rows in source.schema.rows.items():
        counts = np.bincount(source.read("train", 0).sparse[name].values.numpy(), minlength=rows)
        assert read_hot_order(out / "hot_order", name, rows).tolist() == np.argsort(-counts, kind="stable").tolist()


def test_a_directory_is_replaced_only_if_asked(prepared: Path, tmp_path: Path, capsys: Output) -> None:
    argv = ["inspect", "--skew", str(prepared), "--out", str(tmp_path / "skew"), "--picture", "false"]
    assert main(argv) == 0
    assert "exists already" in refused(argv, capsys)
    assert main([*argv, "--overwrite", "true"]) == 0


def test_the_picture(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    skew(prepared, tmp_path, "--out", str(tmp_path / "skew"))
    assert (tmp_path / "skew" / "skew.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_how_to_get_it(
    prepared: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(["inspect", "--skew", str(prepared), "--out", str(tmp_path / "skew")], capsys)
    assert "pip install 'hotbed[plot]', or add --picture false" in message
    assert list(tmp_path.iterdir()) == []


def test_parquet_has_a_drafted_schema(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, 500), "item": rng.integers(0, 30, 500), "words": [["a", "b"], []] * 250}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    found = skew(tmp_path / "clicks.parquet", tmp_path)
    assert {t["table"]: t["accesses"] for t in found["tables"]} == {"item": 500, "words": 500}


def test_recipes_and_runs_name_their_source(recipe: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    tables = tmp_path / "tables.yaml"
    tables.write_text("rows: [100, 5, 2000]")
    values["data"]["path"] = str(tables)
    values["data"]["source"] = {"class_path": "hotbed.data.ZipfSource", "init_args": {"train_samples": 2000}}
    values["data"]["test_split"] = None
    recipe.write_text(yaml.safe_dump(values))
    found = skew(recipe, tmp_path, "--sampled_rows", "500")
    assert [t["rows"] for t in found["tables"]] == [100, 5, 2000]
    assert [t["sample_rate"] for t in found["tables"]] == [1, 1, 0.25]
    status, _, run = train(recipe, "--train.steps", "2")
    assert status == 0
    again = skew(run, tmp_path)
    assert [t["accesses_of_top_rows"] for t in again["tables"]] == [t["accesses_of_top_rows"] for t in found["tables"]]


def test_a_checkpoint_holds_no_samples(recipe: Path, capsys: Output) -> None:
    status, _, run = train(recipe, "--train.steps", "2")
    assert status == 0
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    assert "is a checkpoint, which holds no samples" in refused(["inspect", "--skew", str(checkpoint)], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent"], "absent does not exist"),
        (["."], ". is neither a prepared dataset (feature_spec.yaml, source.yaml), arrays (day_0_sparse.npy)"),
        (["bad.yaml"], "bad.yaml is not YAML"),
        (
            ["PREPARED", "--split", "tets"],
            "split: got 'tets'",
        ),
        (["PREPARED", "--batch_size", "0"], "batch_size: got 0"),
        (["PREPARED", "--sampled_rows", "0"], "sampled_rows: got 0"),
        (["PREPARED", "--smpled_rows", "3"], "unknown argument --smpled_rows; did you mean '--sampled_rows'?"),
    ],
)
def test_mistakes_get_one_clear_message(
    argv: list[str], message: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"\xff")
    assert message in refused(["inspect", "--skew", *(str(prepared) if a == "PREPARED" else a for a in argv)], capsys)


VALUES = {
    "split": "test",
    "batch_size": "5",
    "sampled_rows": "5",
    "out": "somewhere",
    "picture": "false",
    "overwrite": "true",
}


def test_options_of_skew_go_with_it(prepared: Path, capsys: Output) -> None:
    assert {*VALUES, "trust_recipe"} == SKEW_DEFAULTS.keys()
    for name, value in [*VALUES.items(), ("trust_recipe", None)]:
        given = [f"--{name}"] if value is None else [f"--{name}", value]
        message = refused(["inspect", str(prepared), *given], capsys)
        assert f"--{name} works only with --skew" in message
