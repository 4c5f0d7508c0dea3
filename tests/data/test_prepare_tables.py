"""Tables of any columns become datasets of ids, whose values can be found again through their vocabularies."""

import datetime
import gzip
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from data_cases import log_line, write_log

from hotbed.data import ParquetSource, Schema, SparseColumn, SplitBinarySource
from hotbed.data.encoding.vocabulary import read_vocabulary
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError, SpecError

SCHEMA = Schema(
    sparse=(
        SparseColumn(name="user", rows=2),
        SparseColumn(name="item", rows=2),
        SparseColumn(name="history", rows=2, table="item", ids=None, pooling="mean"),
    ),
    dense=("price",),
    labels=("click",),
    weight="weight",
    group="item",
)


def clicks(n: int, seed: int = 0, **columns: object) -> pa.Table:
    """Text, integers, lists of them, nulls, a weight and a time."""
    rng = np.random.default_rng(seed)
    lists = [None if i % 7 == 0 else rng.integers(0, 9, i % 4).tolist() for i in range(n)]
    made = {
        "user": [None if i % 11 == 0 else f"ü{u}" for i, u in enumerate(rng.integers(0, 30, n))],
        "item": pa.array(rng.integers(0, 12, n), pa.int16()),
        "history": pa.array(lists, pa.list_(pa.int32())),
        "price": [None if i % 5 == 0 else float(i) for i in range(n)],
        "click": rng.integers(0, 2, n),
        "weight": rng.random(n),
        "day": [datetime.date(2024, 1, 1) + datetime.timedelta(days=i * 10 // n) for i in range(n)],
    }
    return pa.table({**made, **columns})


def write(path: Path, table: pa.Table, rows: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def decoded(out: Path, split: str, column: str, table: str) -> list[Any]:
    """Values that ids of a dataset stand for; None for id 0."""
    values = [None, *read_vocabulary(out / f"vocabulary/{table}.parquet").values.to_pylist()]
    ids = pq.read_table(out / split, columns=[column])[column].to_pylist()
    return [i if i is None else [values[x] for x in i] if isinstance(i, list) else values[i] for i in ids]


def source_of(out: Path) -> ParquetSource:
    return ParquetSource(out, **yaml.safe_load((out / "source.yaml").read_text(encoding="utf-8"))["init_args"])


def test_against_a_plain_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", 70)
    raw = clicks(200)
    report = prepare(write(tmp_path / "raw.parquet", raw), tmp_path / "out", schema=SCHEMA, threshold=3)
    assert report.samples == {"train": 180, "test": 20}
    rows = raw[:180].to_pydict()
    counts = {
        "user": Counter(u for u in rows["user"] if u is not None),
        "item": Counter([*rows["item"], *(i for history in rows["history"] for i in history or ())]),
    }
    for table, counted in counts.items():
        kept = sorted((v for v, n in counted.items() if n >= 3), key=lambda v: (-counted[v], cast("Any", v)))
        vocabulary = read_vocabulary(tmp_path / f"out/vocabulary/{table}.parquet").values.to_pylist()
        assert vocabulary == kept
        assert report.rows[table] == len(kept) + 1
        for split, part in (("train", raw[:180]), ("test", raw[180:])):
            expected = [v if v in kept else None for v in part[table].to_pylist()]
            assert decoded(tmp_path / "out", split, table, table) == expected
    histories = [None if h is None else [i if i in vocabulary else None for i in h] for h in rows["history"]]
    assert decoded(tmp_path / "out", "train", "history", "item") == histories
    stored = pq.read_table(tmp_path / "out/train")
    for column in ("price", "click", "weight"):
        assert stored[column].to_pylist() == rows[column]
    assert stored["item_value"].to_pylist() == rows["item"]  # groups are those of the values, not of ids


def test_the_dataset_says_how_it_is_read(tmp_path: Path) -> None:
    prepare(write(tmp_path / "raw.parquet", clicks(200)), tmp_path / "out", schema=SCHEMA.to_dict(), threshold=1)
    source = source_of(tmp_path / "out")
    assert source.splits == ("train", "test")
    batch = pickle.loads(pickle.dumps(source)).read("train", 0)
    assert len(batch) == 180
    assert source.schema.rows == {"user": 31, "item": 13}
    assert list(batch.extra) == ["item_value"]
    users = batch.sparse["user"].values
    assert int(users.min()) == 0 and int(users.max()) == 30


def test_without_a_schema_one_is_drafted(tmp_path: Path) -> None:
    raw = clicks(600, item=[f"i{i % 40}" for i in range(600)])
    report = prepare(write(tmp_path / "raw.parquet", raw), tmp_path / "out", threshold=2)
    assert {"user", "item"} <= set(report.rows)
    assert len(source_of(tmp_path / "out").read("test", 0)) == 60


def test_text_files_with_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    lines = ["user\tclick\n", *(f"u{i % 3}\t{i % 2}\n" for i in range(30))]
    (tmp_path / "log.tsv.gz").write_bytes(gzip.compress("".join(lines).encode()))
    schema = Schema(sparse=(SparseColumn(name="user", rows=2),), labels=("click",))
    prepare(tmp_path / "log.tsv.gz", tmp_path / "out", schema=schema, threshold=1, test_fraction=0)
    assert decoded(tmp_path / "out", "train", "user", "user") == ["u0", "u1", "u2"] * 10


def test_splits_by_time_rows_and_files(tmp_path: Path) -> None:
    raw = clicks(200)
    for i in range(4):
        write(tmp_path / f"days/day_{i}.parquet", raw[i * 50 : i * 50 + 50], 20)
    ways: dict[str, dict[str, Any]] = {
        "time": {"split": {"by": "time", "column": "day", "valid_from": "2024-01-08", "test_from": "2024-01-10"}},
        "rows": {"valid_rows": 40, "test_rows": 20},
        "fractions": {"valid_fraction": 0.2, "test_fraction": 0.1},
    }
    for name, way in ways.items():
        report = prepare(tmp_path / "days", tmp_path / name, schema=SCHEMA, threshold=1, **way)
        assert report.samples == {"train": 140, "valid": 40, "test": 20}, name
        assert pq.read_table(tmp_path / name / "test")["weight"].to_pylist() == raw["weight"][180:].to_pylist()
    report = prepare(tmp_path / "days", tmp_path / "files", schema=SCHEMA, threshold=1, test_files=["day_1.parquet"])
    assert report.samples == {"train": 150, "test": 50}
    assert pq.read_table(tmp_path / "files/test")["weight"].to_pylist() == raw["weight"][50:100].to_pylist()


def test_folders_that_are_splits(tmp_path: Path) -> None:
    write(tmp_path / "raw/train/a.parquet", clicks(60))
    write(tmp_path / "raw/test/b.parquet", clicks(30, 1))
    report = prepare(tmp_path / "raw", tmp_path / "out", schema=SCHEMA, threshold=1)
    assert report.samples == {"train": 60, "test": 30}
    with pytest.raises(SpecError, match="got train, test from the files"):
        prepare(tmp_path / "raw", tmp_path / "more", schema=SCHEMA, test_rows=5)


def test_files_of_a_log_as_splits(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for day in (1, 2):
        write_log(tmp_path / f"log/day_{day}", [log_line(0, [day])] * (day + 1))
    report = prepare(tmp_path / "log", tmp_path / "out", threshold=1, test_files=["day_2"])
    assert report.samples == {"train": 2, "test": 3}
    assert SplitBinarySource(tmp_path / "out").samples("test") == 3


def test_the_most_frequent(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(200))
    prepare(raw, tmp_path / "all", schema=SCHEMA, threshold=2)
    report = prepare(raw, tmp_path / "few", schema=SCHEMA, threshold=2, top_k=5)
    assert report.rows == {"user": 6, "item": 6}
    kept = [read_vocabulary(tmp_path / f"{name}/vocabulary/user.parquet").values.to_pylist() for name in ("all", "few")]
    assert kept[1] == kept[0][:5]
    # of tables that are full already, nothing is added
    other = write(tmp_path / "raw.parquet", clicks(200, 3))
    old = tmp_path / "few/vocabulary"
    prepare(other, tmp_path / "next", schema=SCHEMA, threshold=1, top_k=6, vocabulary=old)
    assert read_vocabulary(tmp_path / "next/vocabulary/user.parquet").values.to_pylist()[:5] == kept[1]
    assert len(read_vocabulary(tmp_path / "next/vocabulary/user.parquet").values) == 6


def test_split_binary_of_a_table(tmp_path: Path) -> None:
    schema = Schema(sparse=(SparseColumn(name="user", rows=2),), dense=("price",), labels=("click",))
    raw = clicks(100)
    prepare(write(tmp_path / "raw.parquet", raw), tmp_path / "out", schema=schema, threshold=1, format="split_binary")
    batch = SplitBinarySource(tmp_path / "out").read("test", 0)
    assert batch.dense is not None
    assert batch.dense.flatten().tolist() == [v or 0.0 for v in raw["price"][90:].to_pylist()]
    passes: list[str] = []
    options: dict[str, Any] = {"format": "split_binary", "progress": lambda stage, *_: passes.append(stage)}
    with pytest.raises(SpecError, match="split-binary format: got a weight or group column"):
        prepare(tmp_path / "raw.parquet", tmp_path / "other", schema=SCHEMA, **options)
    lists = replace(SCHEMA, weight=None, group=None)
    with pytest.raises(
        SpecError, match="split-binary format: sparse column 'history': got a varying number of ids per sample"
    ):
        prepare(tmp_path / "raw.parquet", tmp_path / "other", schema=lists, **options)
    assert not passes  # before anything is counted


def test_groups_beside_a_column_of_their_stored_name(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(60, item_value=[i // 3 for i in range(60)]))
    other = replace(SCHEMA, group="item_value")
    prepare(raw, tmp_path / "out", schema=other, threshold=1, test_fraction=0)
    stored = pq.read_table(tmp_path / "out/train")["item_value"].to_pylist()
    assert stored == [i // 3 for i in range(60)]
    clash = replace(SCHEMA, dense=("price", "item_value"))
    with pytest.raises(SpecError, match=r"'item' .* as 'item_value'"):
        prepare(raw, tmp_path / "clash", schema=clash)


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    ungrouped = replace(SCHEMA, group=None)
    raw = clicks(60)
    write(tmp_path / "raw/a.parquet", raw)
    b = write(tmp_path / "raw/b.parquet", raw.drop_columns("price"))
    with pytest.raises(DataError, match=r"b\.parquet: column 'price' is missing"):
        prepare(tmp_path / "raw", tmp_path / "out", schema=ungrouped)
    write(b, clicks(60, item=[f"i{i}" for i in range(60)]))
    with pytest.raises(DataError, match=r"b.parquet, column 'item': got string, expected int64"):
        prepare(tmp_path / "raw", tmp_path / "out", schema=ungrouped)
    write(b, clicks(60, item=[{"id": i} for i in range(60)]))
    with pytest.raises(SpecError, match=r"b\.parquet: sparse column 'item': got struct<id: int64>"):
        prepare(tmp_path / "raw", tmp_path / "out", schema=ungrouped)
    write(b, clicks(60, item=[i + 0.5 * (i == 50) for i in range(60)]))
    with pytest.raises(DataError, match=r"b\.parquet, row group 1, column 'item': id 50\.5 at row 10"):
        prepare(tmp_path / "raw", tmp_path / "out", schema=ungrouped)
    write(b, clicks(60, item=pa.array([i + (1 << 63) for i in range(60)], pa.uint64())))
    with pytest.raises(DataError, match=r"b.parquet, row group 0, column 'item': .*, expected int64"):
        prepare(tmp_path / "raw", tmp_path / "out", schema=SCHEMA, threshold=1)
    assert prepare(tmp_path / "raw", tmp_path / "out", schema=ungrouped, threshold=1).rows["item"] > 40
    write(tmp_path / "raw/c.parquet", clicks(60, item=pa.array(np.arange(60) - 30)))
    with pytest.raises(DataError, match=r"column 'item': .*-30.*, expected uint64"):
        prepare(tmp_path / "raw", tmp_path / "other", schema=ungrouped)
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".other*"))


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(60))
    raw.write_bytes(raw.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"raw\.parquet is not a Parquet file, or is truncated"):
        prepare(raw, tmp_path / "out", schema=SCHEMA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k: got 0"),
        ({"workers": 0}, "workers: got 0"),
        ({"memory": 1 << 20}, "memory: got 1,048,576, expected at least 939,524,096"),
        ({"test_rows": -1}, "test_rows: got -1"),
        ({"test_rows": 5, "valid_fraction": 0.1}, "splits: got fractions and rows"),
        ({"test_rows": 60}, None),
        ({"format": "csv"}, "format: got 'csv'"),
        ({"executor": "spark"}, "executor: got 'spark'"),
        ({"executor": "dask"}, "executor: got 'dask'"),
        ({"executor": "dask:tcp://x:1", "workers": 2}, "workers: got 2, .*dask:tcp://x:1"),
        ({"test_files": ["c.parquet"]}, "test_files, c.parquet: expected one file"),
        ({"split": {"by": "time", "column": "when", "test_from": 1}}, "when"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], message: str | None) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(60))
    error = SpecError if message and "when" not in message else DataError
    message = message or "train split: got 0 of 60 samples"
    with pytest.raises(error, match=message):
        prepare(raw, tmp_path / "out", schema=SCHEMA, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["raw.parquet"]


def test_schemas_that_cannot_be_prepared(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(60))
    with pytest.raises(SpecError, match="schema: got none for 2 paths"):
        prepare([raw, raw], tmp_path / "out")
    crossed = {"sparse": [{"name": "user", "rows": 9}], "labels": ["click"]}
    crossed["features"] = [{"name": "pair", "cross": ["user", "item"], "rows": 9}]
    with pytest.raises(SpecError, match=r"schema.features: got 'pair'"):
        prepare(raw, tmp_path / "out", schema=crossed)
    with pytest.raises(SpecError, match="split: got Criteo logs"):
        prepare(write_log(tmp_path / "log.tsv", [log_line()]), tmp_path / "out", split={"by": "hash", "test": 0.1})


def test_a_vocabulary_of_another_kind(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(60))
    prepare(raw, tmp_path / "one", schema=SCHEMA, threshold=1)
    write(raw, clicks(60, user=list(range(60))))
    with pytest.raises(DataError, match=r"user.parquet: got values of type large_string, expected .* table 'user'"):
        prepare(raw, tmp_path / "two", schema=SCHEMA, vocabulary=tmp_path / "one/vocabulary")
