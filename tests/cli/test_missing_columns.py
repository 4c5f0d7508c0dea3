"""Protects that new rows may have columns without any value, whatever their type."""

import datetime
import decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused, train
from tests.train.numbers import POSITIVE, frame
from tests.train.numbers import recipe_of_numbers as recipe_of

ROWS = 40
COLUMNS = ["user", "items", "seconds", "row"]
TYPES = {
    "text": pa.string(),
    "bytes": pa.binary(),
    "category": pa.dictionary(pa.int32(), pa.string()),
    "category of integers": pa.dictionary(pa.int32(), pa.int64()),
    "integers": pa.int64(),
    "truth": pa.bool_(),
    "floats": pa.float64(),
    "decimal": pa.decimal128(9, 2),
    "whole decimal": pa.decimal128(20, 0),
    "date": pa.date32(),
    "time": pa.timestamp("us"),
    "time of day": pa.time64("us"),
    "lists of integers": pa.list_(pa.int64()),
    "lists of text": pa.list_(pa.string()),
    "lists of structs": pa.list_(pa.struct([("a", pa.int64())])),
    "struct": pa.struct([("a", pa.int64())]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    status, _, run = train(recipe_of(tmp_path_factory.mktemp("missing"), [POSITIVE]))
    assert status == 0
    return run


def new_rows(**changed: Any) -> pa.Table:
    table = frame(ROWS, seed=3).drop("rating", "buy").to_arrow()
    for name, column in changed.items():
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def scores(run: Path, table: pa.Table, folder: Path, *, statistics: bool = True) -> list[float]:
    folder.mkdir()
    pq.write_table(table, folder / "new.parquet", row_group_size=15, write_statistics=statistics)
    assert main(["predict", str(run), str(folder / "new.parquet"), "--out", str(folder / "out.parquet")]) == 0
    return pl.read_parquet(folder / "out.parquet")["score"].to_list()


@pytest.fixture(scope="module")
def of_null(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Scores of rows whose columns are all of type null."""
    table = new_rows(**{name: pa.nulls(ROWS) for name in COLUMNS})
    return scores(run, table, tmp_path_factory.mktemp("null") / "all")


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_columns_without_values_are_missing_whatever_their_type(
    run: Path, of_null: list[float], tmp_path: Path, kind: str, statistics: bool
) -> None:
    empty = new_rows(**{name: pa.nulls(ROWS, TYPES[kind]) for name in COLUMNS})
    assert scores(run, empty, tmp_path / "typed", statistics=statistics) == of_null


def test_nan_is_a_missing_id(run: Path, tmp_path: Path) -> None:
    nan = new_rows(user=pa.array([float("nan")] * ROWS))
    assert scores(run, nan, tmp_path / "nan") == scores(run, new_rows(user=pa.nulls(ROWS)), tmp_path / "null")


def test_files_may_be_without_values_of_a_column(run: Path, tmp_path: Path) -> None:
    whole, empty = new_rows(), new_rows(user=pa.nulls(ROWS, pa.int64()), seconds=pa.nulls(ROWS, pa.date32()))
    expected = scores(run, whole, tmp_path / "whole") + scores(run, empty, tmp_path / "empty")
    (tmp_path / "both").mkdir()
    pq.write_table(whole, tmp_path / "both" / "1.parquet")
    pq.write_table(empty, tmp_path / "both" / "2.parquet")
    assert main(["predict", str(run), str(tmp_path / "both"), "--out", str(tmp_path / "out.parquet")]) == 0
    assert pl.read_parquet(tmp_path / "out.parquet")["score"].to_list() == expected


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("user", 5, "column 'user': got integers, expected text"),
        ("user", datetime.date(2024, 1, 1), "sparse column 'user': got date32[day]"),
        ("items", "pen", "sparse column 'items'"),
        ("seconds", "5", "column 'seconds': got string, expected numbers"),
        ("user", decimal.Decimal("1.5"), "sparse column 'user': got decimal128(2, 1)"),
    ],
)
def test_one_value_of_another_type_is_refused(
    run: Path, tmp_path: Path, capsys: Output, column: str, value: object, message: str
) -> None:
    changed = new_rows(**{column: pa.array([None] * (ROWS - 1) + [value])})
    pq.write_table(changed, tmp_path / "new.parquet", row_group_size=15)
    argv = ["predict", str(run), str(tmp_path / "new.parquet"), "--out", str(tmp_path / "out.parquet")]
    assert message in refused(argv, capsys)


@pytest.mark.parametrize("absent", [["user"], ["items"], ["seconds"], COLUMNS])
def test_rows_without_a_column_are_scored_where_asked(
    run: Path, tmp_path: Path, capsys: Output, absent: list[str]
) -> None:
    of_null = scores(run, new_rows(**{name: pa.nulls(ROWS) for name in absent}), tmp_path / "null")
    fewer, out = tmp_path / "fewer.parquet", tmp_path / "out.parquet"
    table = new_rows().append_column("other", pa.array(range(ROWS)))
    pq.write_table(table.drop_columns(absent), fewer, row_group_size=15)
    argv = ["predict", str(run), str(fewer), "--out", str(out)]
    message = refused(argv, capsys)
    assert f"column '{absent[0]}' is missing" in message
    hint = message.rpartition("--missing ")[2].split()
    assert set(hint) == set(absent)
    assert main([*argv, "--missing", *hint]) == 0
    assert pl.read_parquet(out)["score"].to_list() == of_null


def test_columns_that_are_there_are_used_and_others_are_refused(run: Path, tmp_path: Path, capsys: Output) -> None:
    expected = scores(run, new_rows(), tmp_path / "whole")
    argv = ["predict", str(run), str(tmp_path / "whole" / "new.parquet"), "--missing", "user", "--out"]
    assert main([*argv, str(tmp_path / "out.parquet")]) == 0
    assert pl.read_parquet(tmp_path / "out.parquet")["score"].to_list() == expected
    argv[4] = "usr"
    assert "got 'usr', expected one of" in refused([*argv, str(tmp_path / "other.parquet")], capsys)
