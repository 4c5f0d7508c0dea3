"""Protects that inspect, --skew and daily take folders which say themselves what they have, as init does."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hotbed.cli.drafts.init_stored import open_stored
from hotbed.cli.main import main
from tests.cli.cases import Output, inspected, refused, small_recipe
from tests.cli.stored_cases import FOLDERS, prepared
from tests.data.format_cases import SCHEMA, Day, days, write_npy, write_parquet

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
