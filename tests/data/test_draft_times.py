"""Protects that the common layouts of times are found, and that splits by time are in the order of time."""

import datetime
import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_draft import CLICK, USER, N, drafted, role, write

from hotbed.data import ParquetSource, Schema, SparseColumn, draft_schema
from hotbed.data.drafting.draft import draft
from hotbed.errors import DataError, SpecError

RNG = np.random.default_rng(0)
START = datetime.datetime(2017, 11, 11, 4, 0)
MINUTES = RNG.permutation(N)
TIMES = [START + datetime.timedelta(minutes=int(m)) for m in MINUTES]
SECONDS = 1_510_372_800 + MINUTES * 60
SCHEMA = Schema(sparse=(SparseColumn(name="row", rows=1 << 20),), labels=())


def digits(layout: str) -> Any:
    return np.array([int(t.strftime(layout)) for t in TIMES])


def texts(layout: str) -> list[str]:
    return [t.strftime(layout) for t in TIMES]


def some_missing(values: Any) -> Any:
    return np.where(np.arange(N) % 500 == 7, np.nan, values)


LAYOUTS: dict[str, tuple[str, Any]] = {
    "YYMMDDHH": ("hour", digits("%y%m%d%H")),
    "YYMMDDHH as floats": ("hour", some_missing(digits("%y%m%d%H"))),
    "YYMMDDHH as text": ("hour", texts("%y%m%d%H")),
    "YYYYMMDDHH": ("hour", digits("%Y%m%d%H")),
    "YYYYMMDDHHMM": ("minute", digits("%Y%m%d%H%M")),
    "YYYYMMDDHHMMSS": ("ts", digits("%Y%m%d%H%M%S")),
    "seconds": ("ts", SECONDS),
    "milliseconds": ("event_time", SECONDS * 1_000),
    "microseconds": ("event_time", SECONDS * 1_000_000),
    "nanoseconds": ("event_time", SECONDS * 1_000_000_000),
    "nanoseconds as floats": ("event_time", some_missing(SECONDS * 1e9)),
    "hours not padded": ("ts", texts("%Y-%m-%d %-H:%M")),
    "nothing padded": ("ts", texts("%Y-%-m-%-d %-H:%M:%S")),
    "days first": ("ts", texts("%d/%m/%Y %H:%M")),
    "months first": ("ts", texts("%m/%d/%Y %I:%M %p")),
    "months by name": ("ts", pa.array(texts("%d %b %Y %H:%M")).dictionary_encode()),
    "padded": ("ts", texts("%Y-%m-%d %H:%M")),
    "slashes": ("ts", texts("%Y/%m/%d %H:%M")),
}


def check_order(tmp_path: Path, name: str, values: Any, order: Any) -> None:
    """Check that a draft splits by this column, and that each split begins after the one before."""
    path = write(tmp_path / "log.parquet", click=CLICK, user=USER, row=np.arange(N), **{name: values})
    found = draft(path)
    assert role(found, name).startswith("a time (")
    split = found.splits.init_args["split"]
    assert isinstance(split, dict) and (split["by"], split["column"]) == ("time", name)
    source = ParquetSource(path, SCHEMA, ids="raw", split=split)
    spans: list[tuple[int, int]] = []
    for part in ("train", "valid", "test"):
        chunks = range(len(source.chunks(part)))
        rows = np.concatenate([source.read(part, i).sparse.values.numpy() for i in chunks])
        if isinstance(values, np.ndarray):
            rows = rows[~np.isnan(values[rows])]
        spans.append((order[rows].min(), order[rows].max()))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_splits_by_time_are_in_the_order_of_time(tmp_path: Path, kind: str) -> None:
    check_order(tmp_path, *LAYOUTS[kind], SECONDS)


def test_months_and_sorted_hours_without_a_name_are_times(tmp_path: Path) -> None:
    months = 201_700 + RNG.integers(1, 13, N)
    check_order(tmp_path, "month", months, months)
    check_order(tmp_path, "x", np.sort(digits("%Y%m%d%H")), np.sort(SECONDS))


def test_text_dates_of_csv_are_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    lines = [f"{c},{u},{t}" for c, u, t in zip(CLICK, USER, texts("%Y-%m-%d %-H:%M"), strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(["click,user,ts", *lines]))
    split = draft(tmp_path / "log.csv").splits.init_args["split"]
    assert split == {
        "by": "time",
        "column": "ts",
        "valid_from": str(START + datetime.timedelta(minutes=N * 7 // 10)),
        "test_from": str(START + datetime.timedelta(minutes=N * 9 // 10)),
    }


def test_text_that_does_not_sort_is_refused_without_a_format(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(N), ts=texts("%Y-%m-%d %-H:%M"))
    split = {"by": "time", "column": "ts", "test_from": "2017-11-12 04:00"}
    with pytest.raises(DataError, match=r"column 'ts': got '2017-11-1. \d:\d\d' at row .*Add format"):
        ParquetSource(path, SCHEMA, ids="raw", split=split)
    source = ParquetSource(path, SCHEMA, ids="raw", split={**split, "format": "%Y-%m-%d %H:%M"})
    assert source.samples("test") == sum(t >= datetime.datetime(2017, 11, 12, 4) for t in TIMES)


OFFSETS = ("-0800", "+0000", "+0900")


def zoned(time: datetime.datetime, offset: str) -> str:
    return (time + datetime.timedelta(hours=int(offset[:3]))).strftime("%Y-%m-%dT%H:%M:%S") + offset


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([zoned(t, OFFSETS[i % 3]) for i, t in enumerate(TIMES)], "%Y-%m-%dT%H:%M:%S%.f%z"),
        (
            [f"{t:%Y-%m-%dT%H:%M:%S}" + (".5Z" if i % 2 else "Z") for i, t in enumerate(TIMES)],
            "%Y-%m-%dT%H:%M:%S%.f%#z",
        ),
        ([zoned(t, "+0900") for t in TIMES], None),
        ([f"{t:%Y-%m-%dT%H:%M:%S}.000Z" for t in TIMES], None),
    ],
)
def test_text_times_with_zones_are_split_in_the_order_of_time(tmp_path: Path, values: Any, expected: Any) -> None:
    check_order(tmp_path, "ts", values, SECONDS)
    split: Any = draft(tmp_path / "log.parquet").splits.init_args["split"]
    assert split.get("format") == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([zoned(t, OFFSETS[i % 3]) for i, t in enumerate(TIMES)], r"2017-.*\+0000"),
        (["2024-05-01T10:00:00Z", "2024-05-01T10:00:00.5Z"] * (N // 2), r"2024-05-01T10:00:00\.5Z"),
        (["2024-05-01T10:00:00Z", "2024-05-01T10:00:00"] * (N // 2), "2024-05-01T10:00:00"),
        (texts("%d/%m/%Y"), r"1./11/2017"),
        (texts("%-d.%-m.%Y %H:%M"), r"1.\.11\.2017 ..:.."),
        (texts("%d %b %Y"), "1. Nov 2017"),
    ],
)
def test_splits_by_text_that_does_not_sort_are_refused(tmp_path: Path, values: Any, named: str) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(N), ts=values)
    split = {"by": "time", "column": "ts", "test_from": "20/3/2024"}
    with pytest.raises(DataError, match=rf"column 'ts': got '{named}' at row .*Add format"):
        ParquetSource(path, SCHEMA, ids="raw", split=split)


@pytest.mark.parametrize(
    ("column", "change", "error", "message"),
    [
        ("ts", {"format": "%d.%m.%Y"}, DataError, r"got '2017-.* expected times as '%d\.%m\.%Y'"),
        ("row", {"format": "%Y"}, SpecError, "'%Y', but column 'row' is int64"),
        ("ts", {"format": "%Y-%m-%d %H"}, SpecError, "format of times: got '%Y-%m-%d %H'"),
        ("ts", {"format": 7}, SpecError, "split by time: format: got 7"),
        (
            "ts",
            {"format": "%Y-%m-%d %H:%M", "test_from": "May"},
            SpecError,
            r"split by time: start time of column 'ts' \(timestamp\[us\]\): got 'May'",
        ),
    ],
)
def test_formats_that_do_not_fit(tmp_path: Path, column: str, change: Any, error: Any, message: str) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(N), ts=texts("%Y-%m-%d %-H:%M"))
    split = {"by": "time", "column": column, "test_from": "2017-11-12 04:00", **change}
    with pytest.raises(error, match=message):
        ParquetSource(path, SCHEMA, ids="raw", split=split)


def test_rows_without_a_time_as_text_are_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(3), ts=["1/2/2024", None, "3/1/2024"])
    split = {"by": "time", "column": "ts", "test_from": "2024-02-01", "format": "%d/%m/%Y"}
    source = ParquetSource(path, SCHEMA, ids="raw", split=split)
    assert {name: source.samples(name) for name in source.splits} == {"train": 2, "test": 1}


NO_TIMES = {
    "ids of 8 digits": ("x", 14_102_100 + RNG.integers(0, 90, N)),
    "named ids of 8 digits": ("user_id", digits("%y%m%d%H")),
    "hours of the day": ("hour", RNG.integers(0, 24, N)),
    "months of the year": ("month", RNG.integers(1, 13, N)),
    "ids of 6 digits": ("x", 201_400 + RNG.integers(1, 13, N)),
}


@pytest.mark.parametrize("kind", NO_TIMES)
def test_what_is_no_time(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    name, values = NO_TIMES[kind]
    assert role(drafted(tmp_path, values, name), name) == "ids"
    assert "the name of a time" not in caplog.text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timestamp", RNG.integers(0, 90_000, N)),
        ("event_time", RNG.random(N)),
        ("date", [f"{d}/{d % 7 + 1}/2024" for d in RNG.integers(1, 13, N)]),
        ("day", RNG.integers(0, 7, N)),
        ("created_at", [f"week {w}" for w in RNG.integers(0, 50, N)]),
        ("week", 202_301 + RNG.integers(0, 52, N)),
        ("month", [f"2023-{m:02}" for m in RNG.integers(1, 13, N)]),
    ],
)
def test_columns_that_are_named_like_times_and_are_none_are_told(
    tmp_path: Path, name: str, values: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = drafted(tmp_path, values, name)
    assert f"Column '{name}' has the name of a time, but its values have no known layout" in caplog.text
    assert any(f"Column '{name}'" in note for note in found.splits.notes)


def test_a_time_by_which_rows_cannot_be_split_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafted(tmp_path, pa.array(TIMES, mask=np.arange(N) % 9 == 0), "day")
    assert "The splits are by a hash of the rows' positions (11.1% of 'day' are missing)" in caplog.text


def test_columns_that_differ_between_files_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "1.parquet", label=CLICK, user=USER, b=USER)
    write(tmp_path / "2.parquet", label=CLICK, user=USER, b=[f"u{i}" for i in USER])
    draft_schema(tmp_path)
    assert "Column 'b' is left out: in 2.parquet it is string, in another file int64" in caplog.text
