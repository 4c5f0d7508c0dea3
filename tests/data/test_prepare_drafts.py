"""Protects that `prepare` without a schema loses no column silently: it is used, reported with a reason, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from hotbed.cli.main import main
from hotbed.cli.prepare import print_prepared
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError

N = 600
RNG = np.random.default_rng(0)
CLICK = RNG.integers(0, 2, N)
IDS = RNG.integers(0, 40, N)
TEXT = [f"i{i}" for i in IDS]


def write(file: Path, **columns: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"click": CLICK, "item": TEXT, **columns}), file)
    return file


UNLIKE = {
    "integers and text": (IDS, [f"u{i}" for i in IDS], "int64", "string"),
    "a struct and integers": (pa.array([{"x": 1}] * N), IDS, "struct<x: int64>", "int64"),
    "structs of other fields": (pa.array([{"x": 1}] * N), pa.array([{"y": "a"}] * N), "struct<x: int64>", "struct<y: "),
    "lists of integers and of text": (pa.array([[1]] * N), pa.array([["a"]] * N), "list<.*int64>", "list<.*string>"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_a_column_that_changes_its_type_between_files_is_refused(tmp_path: Path, case: str) -> None:
    first, second, one, other = UNLIKE[case]
    write(tmp_path / "data" / "a.parquet", **{"user id": first})
    write(tmp_path / "data" / "b.parquet", **{"user id": second})
    message = rf"b\.parquet, column 'user id': got {other}.*, expected .* {one}.* in .*a\.parquet"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "data", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_empty_lists_hide_no_change(tmp_path: Path) -> None:
    """Lists that are all empty stand beside lists of any values; these are compared all the same."""
    for i, values in enumerate(([[]] * N, [[1]] * N, [["a"]] * N)):
        kind = pa.list_(pa.null()) if i == 0 else None
        write(tmp_path / "data" / f"{i}.parquet", user=pa.array(values, kind))
    with pytest.raises(
        DataError, match=r"2\.parquet, column 'user': got list<.*string>, expected .* list<.*int64>.* in .*1\.parquet"
    ):
        prepare(tmp_path / "data", tmp_path / "out")


def test_a_label_that_changes_its_type_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", user=IDS)
    write(tmp_path / "data" / "b.parquet", user=IDS, click=[f"{c}" for c in CLICK])
    with pytest.raises(DataError, match=r"b\.parquet, column 'click': got string, expected .* int64 in .*a\.parquet"):
        prepare(tmp_path / "data", tmp_path / "out")


def test_columns_that_are_left_out_are_reported_with_their_reasons(tmp_path: Path) -> None:
    columns = {
        "user id": IDS,
        "shape": pa.array([{"x": 1}] * N),
        "version": [7] * N,
        "when": np.arange(N).astype("datetime64[ms]"),
        "price": RNG.random(N),
    }
    write(tmp_path / "data" / "a.parquet", **columns)
    write(tmp_path / "data" / "b.parquet", **columns, later=IDS)
    report = prepare(tmp_path / "data", tmp_path / "out", threshold=1)
    assert report.left_out == {
        "shape": "struct<x: int64>; columns of type struct<x: int64> are no inputs yet. "
        "Write its fields x as separate columns",
        "version": "int64; all rows have the same value ('7')",
        "when": "timestamp[ms]; a time (timestamp[ms]): later rows have values that training has not seen",
        "later": "int64; a.parquet has no such column",
    }
    kept = {name for file in (tmp_path / "out" / "train").glob("*.parquet") for name in pq.read_schema(file).names}
    assert kept == {"click", "item", "user id", "price"}
    assert kept | {*report.left_out} == {"click", "item", "later", *columns}


def test_with_a_schema_nothing_is_reported(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.parquet", version=[7] * N)
    schema = {"labels": ["click"], "sparse": [{"name": "item", "rows": 2}]}
    assert prepare(raw, tmp_path / "out", schema=schema, threshold=1).left_out == {}


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write(tmp_path / "a.parquet", shape=pa.array([{"[x]": 1}] * N))
    main(["prepare", str(raw), str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "Unused columns (to use one of them, name it in --schema)" in printed
    assert "- 'shape': struct<[x]: int64>; columns of type struct<[x]: int64> are no inputs yet" in printed
    report = prepare(raw, tmp_path / "again", schema={"labels": ["click"], "sparse": [{"name": "item", "rows": 2}]})
    with (console := Console()).capture() as captured:
        print_prepared(console, report)
    assert "left out" not in captured.get()
