"""Protects that every row is in one split, the one that the recipe says, whatever row groups and files it is in."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import MIXED_SCHEMA, mixed_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parquet import table_of, unweighted

from hotbed.batch import Batch
from hotbed.data import ParquetSource, Schema, Source, SparseColumn
from hotbed.data.files.parquet_files import RowGroup, find_parquet
from hotbed.errors import DataError, SpecError
from hotbed.testing.source_contract import SourceContract

SCHEMA = Schema(sparse=(SparseColumn(name="row", rows=1 << 20),), labels=())
HASH = {"by": "hash", "valid": 0.2, "test": 0.1}


def from_time(column: str = "when", **starts: Any) -> dict[str, Any]:
    """A split by time."""
    return {"by": "time", "column": column, **starts}


def divided(path: Path, split: dict[str, Any], **options: Any) -> dict[str, list[int]]:
    """Ids of the column ``row`` by split."""
    source = ParquetSource(path, SCHEMA, ids="raw", split=split, **options)
    found: dict[str, list[int]] = {}
    for name in source.splits:
        sizes = source.chunks(name)
        chunks = [source.read(name, i).sparse.values for i in range(len(sizes))]
        assert [len(c) for c in chunks] == sizes
        found[name] = torch.cat(chunks).tolist() if chunks else []
    return found


def write(path: Path, n: int = 100, row_group_size: int = 30, **columns: Any) -> Path:
    pq.write_table(pa.table({"row": np.arange(n), **columns}), path, row_group_size=row_group_size)
    return path


class TestByTime(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        batch = unweighted(mixed_batch(60))
        when = np.concatenate([np.arange(20), np.random.default_rng(0).permutation(np.arange(20, 60))])
        table = table_of(batch).append_column("when", pa.array(when * 1_000_000, pa.timestamp("us")))
        pq.write_table(table, path / "all.parquet", row_group_size=10)
        split = from_time(valid_from="1970-01-01 00:00:30", test_from="1970-01-01T00:00:45")
        which = {"train": when < 30, "valid": (when >= 30) & (when < 45), "test": when >= 45}
        expected = {name: batch.take(torch.from_numpy(np.flatnonzero(rows))) for name, rows in which.items()}
        return ParquetSource(path / "all.parquet", MIXED_SCHEMA, ids="raw", split=split), expected


class TestByHash(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        batch = unweighted(mixed_batch(90))
        pq.write_table(table_of(batch), path / "all.parquet", row_group_size=30)
        source = ParquetSource(path / "all.parquet", MIXED_SCHEMA, ids="raw", split=HASH)
        write(path / "rows.parquet", 90, 7)
        (path / "other").mkdir()
        (path / "rows.parquet").rename(path / "other/all.parquet")  # rows stay where they are in other row groups
        rows = divided(path / "other/all.parquet", HASH)
        return source, {name: batch.take(torch.tensor(of_split)) for name, of_split in rows.items()}


def days(numbers: Any) -> pa.Array:
    return pa.array(numbers.astype(np.int32), pa.date32())


KINDS = {
    "seconds": (lambda x: x, 700, 900),
    "floats": (lambda x: x.astype(float), 699.5, 900),
    "decimals": (lambda x: pa.array(x).cast(pa.decimal128(21, 2)), 700, 900),
    "small": (lambda x: (x // 10).astype(np.int16), 70, 90),
    "days": (days, "1971-12-02", "1972-06-19"),
    "yaml days": (days, datetime.date(1971, 12, 2), datetime.date(1972, 6, 19)),
    "date64": (lambda x: days(x).cast(pa.date64()), "1971-12-02", "1972-06-19"),
    "seconds as times": (lambda x: pa.array(x, pa.timestamp("s")), "1970-01-01 00:11:40", "1970-01-01 00:15:00"),
    "nanoseconds": (
        lambda x: pa.array(x * 10**9 + 1, pa.timestamp("ns")),
        "1970-01-01 00:11:40",
        "1970-01-01 00:15:00",
    ),
    "a zone": (
        lambda x: pa.array(x * 1000, pa.timestamp("ms", "Europe/Berlin")),
        "1970-01-01 01:11:40+01:00",
        "1970-01-01 00:15:00",
    ),
    "text": (lambda x: [f"2024-{t // 100:02}-{t % 100:02}" for t in x], "2024-07", "2024-09-00"),
    "categories": (lambda x: pa.array([f"d{t // 100}" for t in x]).dictionary_encode(), "d7", "d9"),
}


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("kind", KINDS)
def test_times_of_every_type(tmp_path: Path, kind: str, order: str) -> None:
    make, valid, test = KINDS[kind]
    times = np.arange(1000)
    if order == "shuffled":
        times = np.random.default_rng(0).permutation(times)
    write(tmp_path / "log.parquet", 1000, 90, when=make(times))
    found = divided(tmp_path / "log.parquet", from_time(valid_from=valid, test_from=test))
    bounds = {"train": (0, 700), "valid": (700, 900), "test": (900, 1000)}
    for split, (low, high) in bounds.items():
        assert found[split] == np.flatnonzero((times >= low) & (times < high)).tolist()


def test_rows_without_a_time_are_trained_on(tmp_path: Path) -> None:
    when = pa.array([5.0, None, float("nan"), 9.0, 1.0])
    write(tmp_path / "log.parquet", 5, 5, when=when, whole=pa.array([5, None, None, 9, 1]))
    for column in ("when", "whole"):
        split = {"by": "time", "column": column, "test_from": 5}
        assert divided(tmp_path / "log.parquet", split) == {"train": [1, 2, 4], "test": [0, 3]}


def test_sorted_times_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "log.parquet", 100, 10, when=pa.array(np.arange(100), pa.timestamp("s")))
    read: list[int] = []
    original = RowGroup.read

    def spy(self: RowGroup, columns: Any) -> pa.Table:
        read.append(self.index)
        return original(self, columns)

    monkeypatch.setattr(RowGroup, "read", spy)
    split = from_time(valid_from="1970-01-01 00:00:50", test_from="1970-01-01 00:01:15")
    source = ParquetSource(tmp_path / "log.parquet", SCHEMA, split=split)
    assert read == [7]  # the only one that times of two splits are in
    assert {name: source.samples(name) for name in source.splits} == {"train": 50, "valid": 25, "test": 25}


@settings(max_examples=20)
@given(
    n=st.integers(1, 3000),
    row_group=st.integers(1, 500),
    shares=st.sampled_from([(0.1, 0.1), (0.0, 0.3), (0.5, 0.0), (0.01, 0.9)]),
    by=st.sampled_from(["hash", "order"]),
)
def test_every_row_is_in_one_split_of_about_its_share(
    tmp_path_factory: pytest.TempPathFactory, n: int, row_group: int, shares: tuple[float, float], by: str
) -> None:
    path = write(tmp_path_factory.mktemp("data") / "log.parquet", n, row_group)
    found = divided(path, {"by": by, "valid": shares[0], "test": shares[1]})
    assert sorted(row for rows in found.values() for row in rows) == list(range(n))
    for split, share in zip(("train", "valid", "test"), (1 - sum(shares), *shares), strict=True):
        assert (split in found) == (share > 0)
        spread = 5 * np.sqrt(n * share * (1 - share)) if by == "hash" else 1
        assert abs(len(found.get(split, [])) - share * n) <= spread
    if by == "order":
        assert [row for rows in found.values() for row in rows] == list(range(n))


def test_rows_stay_in_their_split_when_files_are_added_or_all_is_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a/1.parquet")
    before = divided(tmp_path / "a", HASH)
    (tmp_path / "a").rename(tmp_path / "b")
    assert divided(tmp_path / "b", HASH) == before
    pq.write_table(pa.table({"row": np.arange(100, 200)}), tmp_path / "b/0.parquet")
    after = divided(tmp_path / "b", HASH)
    assert {name: [row for row in rows if row < 100] for name, rows in after.items()} == before
    assert [row - 100 for row in after["test"] if row >= 100] != before["test"]  # by the name of the file, too


def test_the_train_split_is_divided_where_there_are_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet")
    pq.write_table(pa.table({"row": np.arange(1000, 1010)}), tmp_path / "test.parquet")
    found = divided(tmp_path, {"by": "hash", "valid": 0.2})
    assert set(found) == {"train", "valid", "test"}
    assert found["test"] == list(range(1000, 1010))
    with pytest.raises(SpecError, match=r"split: got 'test'"):
        divided(tmp_path, HASH)
    assert len(divided(tmp_path, HASH, split_paths={"test": None})["test"]) < 30


def test_splits_that_are_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write(tmp_path / "a/log.parquet", 20)
    write(tmp_path / "b/train.parquet", 3)
    write(tmp_path / "b/test.parquet", 4)
    source = ParquetSource(tmp_path / "a", SCHEMA, split_paths={"test": str(tmp_path / "b")})
    assert {split: source.samples(split) for split in source.splits} == {"train": 20, "test": 4}
    source = ParquetSource(tmp_path / "a", SCHEMA, split_paths={"test": str(tmp_path / "b/test.parquet")})
    assert source.samples("test") == 4
    for path, given_, message in (
        ("a", {"tset": "x"}, "split_paths: split: got 'tset'"),
        ("a", {"test": None}, r"split_paths\.test: got null"),
        ("b", {"test": str(tmp_path / "a")}, r"split_paths\.test: got "),
        ("a", {"valid": str(tmp_path / "b")}, "split of .*b: got 'valid'"),
        ("a", {"train": str(tmp_path / "b")}, "split_paths.train: got "),
        ("b", {"train": None, "test": None}, "got null for all splits"),
    ):
        with pytest.raises(SpecError, match=message):
            ParquetSource(tmp_path / path, SCHEMA, split_paths=given_)


def test_a_split_that_no_row_is_in_has_no_samples(tmp_path: Path) -> None:
    write(tmp_path / "log.parquet", when=np.arange(100))
    split = from_time(valid_from=200, test_from=300)
    found = divided(tmp_path / "log.parquet", split)
    assert {name: len(rows) for name, rows in found.items()} == {"train": 100, "valid": 0, "test": 0}


def test_bad_values_are_shown_with_their_place_in_the_file(tmp_path: Path) -> None:
    labels = np.arange(100) % 2
    labels[77] = 5
    write(tmp_path / "log.parquet", label=labels)
    schema = Schema(sparse=SCHEMA.sparse)
    source = ParquetSource(tmp_path / "log.parquet", schema, split={"by": "order", "test": 0.35})
    source.check_labels("train")
    with pytest.raises(DataError, match=r"row group 2, column 'label': label 5 at row 17 \(row 77 of the file\)"):
        source.check_labels("test")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({}, r"split: got \{\}"),
        ({"by": "rows"}, r"split: got \{'by': 'rows'\}"),
        ("hash", "split: got 'hash'"),
        ({"by": "hash", "tets": 0.1}, "split by hash: key: got 'tets'"),
        ({"by": "hash"}, r"split by hash: valid \+ test: got 0\.0"),
        ({"by": "order", "valid": 0.5, "test": 0.5}, r"split by order: valid \+ test: got 1\.0"),
        ({"by": "hash", "test": 10}, "split by hash: test: got 10"),
        ({"by": "hash", "test": float("nan")}, "split by hash: test: got nan"),
        ({"by": "time"}, "split by time: key 'column' is missing"),
        (from_time(), "split by time: valid_from and test_from are missing"),
        ({"by": "time", "column": 7, "test_from": 1}, "split by time: column: got 7"),
        (from_time("wehn", test_from=1), r"log\.parquet: column of the split: got 'wehn'"),
        (from_time(valid_from=5, test_from=5), "split by time: valid_from: got 5"),
        (from_time(test_from=float("inf")), "split by time: test_from: got inf"),
        (from_time(test_from=[1]), r"split by time: test_from: got \[1\]"),
        (from_time(test_from="May"), r"split by time: start time of column 'when' \(int64\): got 'May'"),
        (from_time("day", test_from=7), r"split by time: start time of column 'day' \(date32\[day\]\): got 7"),
        (from_time("text", test_from=7), r"split by time: start time of column 'text' \(string\): got 7"),
        (from_time("list", test_from=7), "split by time: column 'list': got list<element: int64>"),
    ],
)
def test_splits_that_cannot_be(tmp_path: Path, split: Any, message: str) -> None:
    days = pa.array(np.arange(100, dtype=np.int32), pa.date32())
    write(tmp_path / "log.parquet", when=np.arange(100), day=days, text=["x"] * 100, list=[[1]] * 100)
    with pytest.raises((SpecError, DataError), match=message):
        ParquetSource(tmp_path / "log.parquet", SCHEMA, split=split)


def test_split_and_fractions_exclude_each_other(tmp_path: Path) -> None:
    write(tmp_path / "log.parquet")
    with pytest.raises(SpecError, match="got both split and valid_fraction or test_fraction"):
        ParquetSource(tmp_path / "log.parquet", SCHEMA, split=HASH, test_fraction=0.1)


# -- folders that are columns ----------------------------------------------------------------------------------------


def test_folders_of_hive_are_columns(tmp_path: Path) -> None:
    for i, (day, country) in enumerate([("2024-01-01", "de"), ("2024-01-02", "a%2Fb"), ("2024-01-03", "de")]):
        folder = tmp_path / f"day={day}/country={country}/hour={i}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"row": np.arange(i * 10, i * 10 + 10)}), folder / "part.parquet", row_group_size=4)
    split = from_time("day", test_from="2024-01-03")
    assert divided(tmp_path, split) == {"train": list(range(20)), "test": list(range(20, 30))}
    columns = (SparseColumn(name="hour", rows=24), SparseColumn(name="row", rows=99))
    schema = Schema(sparse=columns, labels=())
    source = ParquetSource(tmp_path, schema, ids="raw")
    assert source.column_types() == {"row": "int64", "day": "string", "country": "string", "hour": "int64"}
    assert source.read("train", 3).sparse["hour"].values.tolist() == [1] * 4
    text = Schema(sparse=(SparseColumn(name="country", rows=1000),), labels=())
    hashed = [ParquetSource(tmp_path, text).read("train", i).sparse.values.unique().tolist() for i in range(9)]
    assert len({tuple(x) for x in hashed}) == 2 and all(len(x) == 1 for x in hashed)


@pytest.mark.parametrize(("folder", "column", "value"), [("my%20day=1", "my%20day", 1), ("a=x%FFy", "a", "x\ufffdy")])
def test_only_values_of_folders_are_decoded(tmp_path: Path, folder: str, column: str, value: object) -> None:
    (tmp_path / folder).mkdir()
    pq.write_table(pa.table({"row": [1, 2]}), tmp_path / folder / "x.parquet")
    (file,) = find_parquet(tmp_path)[""]
    assert [(name, of.as_py()) for name, of in file.partitions] == [(column, value)]


def test_a_folder_of_no_value_is_null(tmp_path: Path) -> None:
    for value in ("__HIVE_DEFAULT_PARTITION__", "7"):
        (tmp_path / f"k={value}").mkdir()
        pq.write_table(pa.table({"row": [1, 2]}), tmp_path / f"k={value}/x.parquet")
    source = ParquetSource(tmp_path, Schema(sparse=(SparseColumn(name="k", rows=9),), labels=()))
    values = [source.read("train", i).sparse.values.tolist() for i in range(2)]
    assert [0, 0] in values and source.column_types()["k"] == "int64"
