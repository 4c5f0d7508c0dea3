"""Protects that commands take folders which say themselves what they have, in every format."""

import json
import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.drafts.init_stored import open_stored
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.data import SplitBinarySource
from hotbed.errors import DataError
from hotbed.train.runs.build import open_source
from tests.cli.cases import Output, inspected, refused, small_recipe, train
from tests.data.format_cases import SCHEMA, Day, days, write_multi_hot, write_npy, write_parquet, write_split_binary


def prepared(path: Path) -> Path:
    """A dataset of Parquet that `hotbed prepare` made."""
    raw = write_parquet(path.parent / "raw", days(3, 400))
    assert main(["prepare", str(raw), str(path), "--threshold", "2", "--valid_rows", "50", "--test_rows", "50"]) == 0
    return path


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "NumPy": lambda path: write_npy(path, days(3, 400)),
    "NumPy, several ids": lambda path: write_multi_hot(path, days(3, 400)),
    "split-binary": lambda path: write_split_binary(path, days(3, 400)),
    "prepared Parquet": prepared,
}


FIRST = date(2026, 1, 1)
ON = [str(FIRST + timedelta(days=i)) for i in range(2)]


@pytest.mark.parametrize("form", FOLDERS)
def test_lookups_are_counted(tmp_path: Path, form: str) -> None:
    folder, file = FOLDERS[form](tmp_path / "set"), tmp_path / "skew.json"
    stored = open_stored(folder)
    assert stored is not None
    assert main(["inspect", "--skew", str(folder), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    source = stored.source
    assert found["samples"] == source.samples("train")
    chunks = [source.read("train", i).sparse for i in range(len(source.chunks("train")))]
    assert [t["table"] for t in found["tables"]] == list(source.schema.rows)
    for table in found["tables"]:
        ids = np.concatenate([chunk[table["table"]].values.numpy() for chunk in chunks])
        assert (table["accesses"], table["touched"]) == (len(ids), len(np.unique(ids)))
        assert table["rows"] == source.schema.rows[table["table"]] > ids.max()


def test_a_prepared_dataset_of_parquet_is_inspected(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "set")
    found = inspected(folder, tmp_path)
    assert (found["kind"], found["samples"]) == ("prepared dataset", {"train": 1103, "valid": 50, "test": 50})
    said = yaml.safe_load((folder / "source.yaml").read_text())["init_args"]["schema"]["sparse"]
    assert found["tables"] == [{"table": c["name"], "rows": c["rows"]} for c in said]
    (label,) = found["labels"]
    assert label["label"] == "label" and label["rate_by_split"].keys() == {"train", "valid", "test"}
    of_file = inspected(folder / "source.yaml", tmp_path)
    assert {**of_file, "path": str(folder)} == found


def test_ids_of_a_prepared_dataset_are_not_hashed_once_more(tmp_path: Path, capsys: Output) -> None:
    """Neither where a part of the folder is given, nor where a recipe says so."""
    folder = prepared(tmp_path / "set")
    message = "got `hash`, expected `raw`, because hotbed prepare has already hashed"
    assert message in refused(["inspect", "--skew", str(folder / "train")], capsys)
    (tmp_path / "recipe.yaml").write_text(recipe(folder, schema=SCHEMA))
    assert message in refused(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "runs")], capsys)


def recipe(path: object, kind: str = "ParquetSource", **init_args: Any) -> str:
    values = small_recipe(path, name="daily", dim=4, data={"test_split": None}, train={"batch_size": 50, "epochs": 1})
    values["data"]["source"] = {"class_path": f"hotbed.data.{kind}", "init_args": init_args}
    return yaml.safe_dump(values)


def trained(tmp_path: Path, text: str) -> list[dict[str, Any]]:
    """The records of two days."""
    (tmp_path / "daily.yaml").write_text(text)
    argv = ["daily", str(tmp_path / "daily.yaml"), "--data", f"{tmp_path}/{{date}}", "--from", ON[0]]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    return [json.loads(line) for line in (tmp_path / "out" / "days.jsonl").read_text().splitlines()]


def distinct(*of: Day) -> list[set[int]]:
    return [{int(i) for i in np.concatenate([day.ids for day in of])[:, f]} for f in range(of[0].ids.shape[1])]


def test_days_of_arrays_are_trained_whole(tmp_path: Path) -> None:
    """`splits: none`, as else a tenth of each day would be held out."""
    given = days(2, 300)
    for day, name in zip(given, ON, strict=True):
        write_npy(tmp_path / name, [day])
    records = trained(tmp_path, recipe("{date}", "NpySource", rows=[40, 40, 40], splits="none"))
    assert [record["samples"] for record in records] == [300, 301]
    assert records[1]["metrics"] is not None and records[0]["metrics"] is None
    before, both = distinct(given[0]), distinct(*given)
    assert list(records[1]["new_rows"].values()) == [len(b) - len(a) for a, b in zip(before, both, strict=True)]


def test_vocabularies_grow_from_day_to_day(tmp_path: Path, capsys: Output) -> None:
    """Each day is prepared with the vocabularies of the day before; tables have room for more values."""
    first, second = days(2, 300)
    second = Day(second.ids + 20, second.dense, second.labels)
    argv = ["--threshold", "1", "--test_fraction", "0"]
    for i, day in enumerate((first, second)):
        write_parquet(tmp_path / f"raw_{i}", [day])
        earlier = ["--vocabulary", str(tmp_path / ON[i - 1] / "vocabulary")] if i else []
        assert main(["prepare", str(tmp_path / f"raw_{i}"), str(tmp_path / ON[i]), *argv, *earlier]) == 0
    said = yaml.safe_load((tmp_path / ON[0] / "source.yaml").read_text())["init_args"]
    for column in said["schema"]["sparse"]:
        column["rows"] = 100
    records = trained(tmp_path, recipe("{date}", **said))
    assert [record["samples"] for record in records] == [300, 301]
    before, both = distinct(first), distinct(first, second)
    assert list(records[1]["new_rows"].values()) == [len(b) - len(a) for a, b in zip(before, both, strict=True)]


# -- init: recipes that train, without hashing ids anew --------------------------------------------------------------


STEP = ("--train.device", "cpu", "--train.steps", "1", "--train.epochs", "1", "--train.checkpoint", "none")


def drafted(folder: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    out = tmp_path / "drafted.yaml"
    assert main(["init", str(folder), "--out", str(out)]) == 0
    return out, yaml.safe_load(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("form", FOLDERS)
def test_a_step_is_trained(tmp_path: Path, form: str) -> None:
    out, recipe = drafted(FOLDERS[form](tmp_path / "set"), tmp_path)
    status, summary, _ = train(out, *STEP)
    assert status == 0
    assert (summary["test"] is not None) == (form != "split-binary")
    assert recipe["data"]["source"]["class_path"].startswith("hotbed.data.")
    assert recipe["data"]["test_split"] == ("test" if summary["test"] else None)


def test_ids_of_prepared_data_are_taken_as_they_are(tmp_path: Path) -> None:
    _, recipe = drafted(prepared(tmp_path / "set"), tmp_path)
    said = yaml.safe_load((tmp_path / "set/source.yaml").read_text())
    assert recipe["data"]["source"] == said
    assert said["init_args"]["ids"] == "raw"


def test_rows_of_arrays_are_the_largest_ids(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(3, 400))
    _, recipe = drafted(folder, tmp_path)
    largest = np.concatenate([day.ids for day in days(3, 400)]).max(0)
    source = recipe["data"]["source"]
    assert source == {"class_path": "hotbed.data.NpySource", "init_args": {"rows": (largest + 1).tolist()}}
    assert recipe["data"]["valid_split"] == "valid"
    text = (tmp_path / "drafted.yaml").read_text()
    assert "# `rows` is 1 + the largest id in 1,203 of 1,203 samples." in text


def test_arrays_of_hashes_are_taken_modulo_rows(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(2, 400))
    for i, day in enumerate(days(2, 400)):
        ids = day.ids.astype(np.int64)
        ids[:, 0] = ids[:, 0] * 99_999_989 % (1 << 32)  # as numbers of eight hexadecimal digits
        np.save(folder / f"day_{i}_sparse.npy", ids)
    out, recipe = drafted(folder, tmp_path)
    arguments = recipe["data"]["source"]["init_args"]
    assert arguments["modulo"] and arguments["rows"][0] == 1024 and arguments["rows"][1] <= 40
    assert "# `modulo` replaces larger ids" in out.read_text()
    source = open_source(Recipe.from_dict(yaml.safe_load(out.read_text())).data)
    assert int(source.read("train", 0).sparse["cat_0"].values.max()) < 1024
    assert train(out, *STEP)[0] == 0


def test_another_folder_of_the_same_kind(tmp_path: Path) -> None:
    out, _ = drafted(write_npy(tmp_path / "set", days(3, 400)), tmp_path)
    other = write_npy(tmp_path / "other", days(2, 300))
    status, summary, _ = train(out, *STEP, "--data", str(other))
    assert status == 0 and summary["test"]["samples"] == 150


def test_new_samples_are_predicted_whole(tmp_path: Path) -> None:
    out, _ = drafted(write_npy(tmp_path / "set", days(3, 400)), tmp_path)
    status, _, run = train(out, *STEP[:-1], "last")
    assert status == 0
    new = write_npy(tmp_path / "new", days(1, 30))
    scores = tmp_path / "scores.parquet"
    assert main(["predict", str(run), str(new), "--out", str(scores), "--device", "cpu"]) == 0
    assert pq.read_metadata(scores).num_rows == 30


def test_what_is_refused(tmp_path: Path, capsys: Output) -> None:
    folder = prepared(tmp_path / "set")
    message = refused(["init", str(folder), "--label", "label"], capsys)
    assert "is a dataset with its own schema, so --label has no effect" in message
    message = refused(["init", str(folder / "train")], capsys)
    assert "0.parquet: got `hash`, expected `raw`" in message
    source = (folder / "source.yaml").read_text()
    for text, expected in (
        ("a: [", "source.yaml: "),
        ("class_path: os.system", "source.yaml: expected class_path: hotbed.data.ParquetSource"),
        (source + "  rows: 3\n", "source.yaml, init_args: got an unexpected keyword argument 'rows'"),
    ):
        (folder / "source.yaml").write_text(text)
        assert expected in refused(["init", str(folder)], capsys)
    (folder / "source.yaml").write_text(source)
    arrays = write_npy(tmp_path / "arrays", days())
    np.save(arrays / "day_0_sparse.npy", days()[0].ids - 1)
    assert "column 'cat_0': got id -1," in refused(["init", str(arrays)], capsys)
    shutil.rmtree(arrays)
    arrays.mkdir()
    with pytest.raises(DataError, match="`hotbed init`"):
        SplitBinarySource(arrays)
