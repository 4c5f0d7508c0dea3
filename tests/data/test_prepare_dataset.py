"""Protects that logs and tables become datasets of ids, also when a preparation is killed and resumed."""

import datetime
import errno
import importlib
import math
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import log_line, write_log
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import SMALL, c1_log, dataset, digests, ids_of, open_prepared, set_block_bytes

from hotbed.batch import Batch
from hotbed.data import (
    Schema,
    Source,
    SparseColumn,
    SplitBinarySource,
    SplitBinaryWriter,
    executors,
    write_synthetic_log,
)
from hotbed.data.encoding.vocabulary import read_vocabulary
from hotbed.data.executors import Tasks
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.testing.source_contract import SourceContract


def test_ids_by_falling_count_then_value(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "c b a b c d  ee".replace(" ", "") + " ")
    report = prepare(log, tmp_path / "out", threshold=2, test_fraction=0)
    # b, c and e twice (ties by value), a and d once, one missing
    assert ids_of(tmp_path / "out") == [2, 1, 0, 1, 2, 0, 3, 3, 0]
    assert report.rows["C1"] == 4
    assert report.rows["C2"] == 1
    assert report.samples == {"train": 9}
    assert read_vocabulary(tmp_path / "out/vocabulary/C1.parquet").values.to_pylist() == [0xB, 0xC, 0xE]


def test_a_missing_value_is_not_the_value_zero(tmp_path: Path) -> None:
    prepare(c1_log(tmp_path / "log.tsv", "00  a"), tmp_path / "out", threshold=1, test_fraction=0)
    assert ids_of(tmp_path / "out") == [1, 1, 0, 0, 2]


def test_numericals_and_labels(tmp_path: Path) -> None:
    lines = [log_line(1, [0, -2, ""]), log_line(0, [100, 5, 2**63 - 1])]
    prepare(write_log(tmp_path / "log.tsv", lines), tmp_path / "out", test_fraction=0)
    batch = SplitBinarySource(tmp_path / "out").read("train", 0)
    assert batch.labels is not None and batch.labels.tolist() == [[1.0], [0.0]]
    expected = torch.zeros(2, 13)
    expected[0, :2] = torch.tensor([math.log(3), 0.0])
    expected[1, :3] = torch.tensor([math.log(103), math.log(8), math.log(2.0**63)])
    assert torch.equal(batch.dense, expected.half().float())  # pyright: ignore[reportArgumentType]


def test_splits_are_in_time_order(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "abcdefabcdefabcdefab")
    report = prepare(log, tmp_path / "out", threshold=1, valid_fraction=0.1, test_fraction=0.25, count_on="all")
    assert report.samples == {"train": 13, "valid": 2, "test": 5}
    ids = [i for split in ("train", "valid", "test") for i in ids_of(tmp_path / "out", split)]
    assert ids == [1, 2, 3, 4, 5, 6] * 3 + [1, 2]


def test_counting_on_train_keeps_the_test_split_out_of_the_vocabulary(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "aaabbbcccc")
    prepare(log, tmp_path / "train", threshold=1, test_fraction=0.4)
    assert (ids_of(tmp_path / "train"), ids_of(tmp_path / "train", "test")) == ([1, 1, 1, 2, 2, 2], [0] * 4)
    prepare(log, tmp_path / "all", threshold=1, test_fraction=0.4, count_on="all")
    assert (ids_of(tmp_path / "all"), ids_of(tmp_path / "all", "test")) == ([2, 2, 2, 3, 3, 3], [1] * 4)


def test_tomorrow_keeps_yesterdays_ids(tmp_path: Path) -> None:
    prepare(c1_log(tmp_path / "1.tsv", "aab"), tmp_path / "one", threshold=1, test_fraction=0)
    old = tmp_path / "one/vocabulary"
    # c is now the most frequent, and b does not occur
    report = prepare(c1_log(tmp_path / "2.tsv", "ccca"), tmp_path / "two", threshold=1, test_fraction=0, vocabulary=old)
    assert ids_of(tmp_path / "two") == [3, 3, 3, 1]
    assert report.rows["C1"] == 4
    assert read_vocabulary(tmp_path / "two/vocabulary/C1.parquet").values.to_pylist() == [0xA, 0xB, 0xC]
    with pytest.raises(DataError, match=r"C1\.parquet does not exist"):
        prepare(tmp_path / "2.tsv", tmp_path / "three", vocabulary=tmp_path / "nowhere")


columns = st.lists(st.sampled_from(["", "0", "1", "2", "0000000a", "ffffffff"]), min_size=1, max_size=60)


@settings(deadline=None, max_examples=20)
@given(values=columns, threshold=st.integers(1, 4), block_bytes=st.integers(100, 3000))
def test_against_a_plain_count(
    values: list[str], threshold: int, block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One column against dictionaries, with blocks so small that lines, counts and splits cross them."""
    tmp_path = tmp_path_factory.mktemp("prepare")
    log = write_log(tmp_path / "log.tsv", [log_line(0, [], [v]) for v in values])
    with pytest.MonkeyPatch.context() as patch:
        set_block_bytes(patch, block_bytes)
        prepare(log, tmp_path / "out", threshold=threshold, test_fraction=0)
    counts = Counter(int(v, 16) for v in values if v)
    kept = sorted((v for v, n in counts.items() if n >= threshold), key=lambda v: (-counts[v], v))
    assert ids_of(tmp_path / "out") == [kept.index(int(v, 16)) + 1 if v and int(v, 16) in kept else 0 for v in values]


def no_room(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "method"), [(pq.ParquetWriter, "write_table"), (SplitBinaryWriter, "_append"), (Path, "write_text")]
)
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, owner: object, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full while spooling, while writing columns, while writing the description."""
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the unfinished files were removed"):
        patch.setattr(owner, method, no_room)
        prepare(log, tmp_path / "deep/out")
    (tmp_path / "deep").rmdir()  # it is empty
    prepare(log, tmp_path / "out", threshold=1)
    before = digests(tmp_path / "out")
    monkeypatch.setattr(owner, method, no_room)
    with pytest.raises(OSError, match=r"No space left on device: writing .*out failed with .* bytes free") as caught:
        prepare(log, tmp_path / "out", threshold=1, overwrite=True)
    assert caught.value.errno == errno.ENOSPC
    assert "the unfinished files were removed" in str(caught.value)
    assert digests(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.tsv", "out"]


def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    """What the operating system does when a file cannot grow."""
    log = tmp_path / "log.tsv"
    write_synthetic_log(log, 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="the unfinished files were removed") as caught:
            prepare(log, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.planted.json", "log.tsv"]


def test_existing_output(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    (tmp_path / "empty").mkdir()
    prepare(log, tmp_path / "empty")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").touch()
    with pytest.raises(DataError, match=r"home exists already. Use another directory, or pass overwrite=True"):
        prepare(log, tmp_path / "home")
    with pytest.raises(DataError, match=r"home has no feature_spec.yaml, so it is not a dataset and will not be"):
        prepare(log, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home/thesis.txt").exists()
    with pytest.raises(DataError, match="empty exists already"):
        prepare(log, tmp_path / "empty")
    prepare(log, tmp_path / "empty", overwrite=True, test_fraction=0)
    assert SplitBinarySource(tmp_path / "empty").splits == ("train",)


def test_too_few_lines_for_the_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="test split: got 0 of 3 samples"):
        prepare(c1_log(tmp_path / "log.tsv", "abc"), tmp_path / "out")


def test_progress_goes_up_to_the_total(tmp_path: Path) -> None:
    calls: dict[str, list[tuple[int, int]]] = {}
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    prepare([log, log], tmp_path / "out", progress=lambda stage, *done: calls.setdefault(stage, []).append(done))
    assert list(calls) == ["read", "count", "write"]
    for of_stage in calls.values():
        assert of_stage == sorted(of_stage)
        assert of_stage[-1][0] == of_stage[-1][1]


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    write_synthetic_log(tmp_path / "log.tsv.gz", 600)
    for out in ("one", "two"):
        prepare(tmp_path / "log.tsv.gz", tmp_path / out, threshold=3)
    found = digests(tmp_path / "one")
    assert len(found) == 1 + 2 * 28 + 26
    assert found == digests(tmp_path / "two")


class TestContract(SourceContract):
    @pytest.fixture(autouse=True)
    def find_dataset(self, prepared: Path) -> None:
        self.folder = prepared

    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        whole = SplitBinarySource(self.folder)
        return SplitBinarySource(self.folder, chunk_samples=500), {s: whole.read(s, 0) for s in whole.splits}


def test_polars_is_imported_only_to_prepare() -> None:
    code = "import sys; sys.modules['polars'] = None; import hotbed.data; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n"


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


def test_tables_against_a_plain_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    source = open_prepared(tmp_path / "out")
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
    assert len(open_prepared(tmp_path / "out").read("test", 0)) == 60


@pytest.mark.parametrize(
    ("options", "samples", "test"),
    [
        (
            {"split": {"by": "time", "column": "day", "valid_from": "2024-01-08", "test_from": "2024-01-10"}},
            {"train": 140, "valid": 40, "test": 20},
            slice(180, 200),
        ),
        ({"valid_rows": 40, "test_rows": 20}, {"train": 140, "valid": 40, "test": 20}, slice(180, 200)),
        ({"valid_fraction": 0.2, "test_fraction": 0.1}, {"train": 140, "valid": 40, "test": 20}, slice(180, 200)),
        ({"test_files": ["day_1.parquet"]}, {"train": 150, "test": 50}, slice(50, 100)),
    ],
    ids=["time", "rows", "fractions", "files"],
)
def test_splits(tmp_path: Path, options: dict[str, Any], samples: dict[str, int], test: slice) -> None:
    raw = clicks(200)
    for i in range(4):
        write(tmp_path / f"days/day_{i}.parquet", raw[i * 50 : i * 50 + 50], 20)
    report = prepare(tmp_path / "days", tmp_path / "out", schema=SCHEMA, threshold=1, **options)
    assert report.samples == samples
    assert pq.read_table(tmp_path / "out/test")["weight"].to_pylist() == raw["weight"][test].to_pylist()


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


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (None, DataError, r"b\.parquet: column 'price' is missing"),
        ([f"i{i}" for i in range(60)], DataError, r"b.parquet, column 'item': got string, expected int64"),
        ([{"id": i} for i in range(60)], SpecError, r"b\.parquet: sparse column 'item': got struct<id: int64>"),
        (
            [i + 0.5 * (i == 50) for i in range(60)],
            DataError,
            r"b\.parquet, row group 1, column 'item': id 50\.5 at row 10",
        ),
    ],
)
def test_files_that_do_not_fit_together(tmp_path: Path, changed: Any, error: type[Exception], message: str) -> None:
    write(tmp_path / "raw/a.parquet", clicks(60))
    other = clicks(60).drop_columns("price") if changed is None else clicks(60, item=changed)
    write(tmp_path / "raw/b.parquet", other)
    with pytest.raises(error, match=message):
        prepare(tmp_path / "raw", tmp_path / "out", schema=replace(SCHEMA, group=None))
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_ids_above_64_bits_with_a_sign(tmp_path: Path) -> None:
    """They go with smaller ids, but neither with negative ones nor as a group."""
    write(tmp_path / "raw/a.parquet", clicks(60))
    write(tmp_path / "raw/b.parquet", clicks(60, item=pa.array([i + (1 << 63) for i in range(60)], pa.uint64())))
    with pytest.raises(DataError, match=r"b.parquet, row group 0, column 'item': .*, expected int64"):
        prepare(tmp_path / "raw", tmp_path / "out", schema=SCHEMA, threshold=1)
    ungrouped = replace(SCHEMA, group=None)
    assert prepare(tmp_path / "raw", tmp_path / "out", schema=ungrouped, threshold=1).rows["item"] > 40
    write(tmp_path / "raw/c.parquet", clicks(60, item=pa.array(np.arange(60) - 30)))
    with pytest.raises(DataError, match=r"column 'item': .*-30.*, expected uint64"):
        prepare(tmp_path / "raw", tmp_path / "other", schema=ungrouped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "threshold: got 0"),
        ({"test_fraction": 1.0}, "test_fraction: got 1.0"),
        ({"valid_fraction": -0.1}, "valid_fraction: got -0.1"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "valid_fraction . test_fraction: got 0.5 . 0.5"),
        ({"count_on": "test"}, "count_on: got 'test'"),
        ({"on_bad_line": "ignore"}, "on_bad_line: got 'ignore'"),
        ({"negatives": "drop"}, "negatives: got 'drop'"),
        ({"negatives": "zero"}, "negatives: got 'zero'"),
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
        ({"test_files": ["c.parquet"]}, "test_files, c.parquet: .* one file"),
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
    with pytest.raises(SpecError, match=r"split: .*Criteo logs"):
        prepare(write_log(tmp_path / "log.tsv", [log_line()]), tmp_path / "out", split={"by": "hash", "test": 0.1})


def test_a_vocabulary_of_another_kind(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", clicks(60))
    prepare(raw, tmp_path / "one", schema=SCHEMA, threshold=1)
    write(raw, clicks(60, user=list(range(60))))
    with pytest.raises(DataError, match=r"user.parquet: got values of type large_string, expected .* table 'user'"):
        prepare(raw, tmp_path / "two", schema=SCHEMA, vocabulary=tmp_path / "one/vocabulary")


def prepared(log: Path, out: Path, **options: Any) -> None:
    """Prepare in parts of 32 KiB, and groups of 300 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.data.preparation.raw_inputs.PART_BYTES", 1 << 15)
        patch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", 300)
        prepare(log, out, threshold=2, workers=1, **options)


@pytest.fixture(scope="module")
def small_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    write_synthetic_log(path, 600)
    return path


def lose_workers(tasks: Tasks, task: Any, arguments: Any, error: type[BaseException] = WorkerError) -> Any:
    if task.__name__ == "encode_group":
        raise error("workers died")
    return map(task, arguments)


@pytest.mark.parametrize("error", [WorkerError, KeyboardInterrupt])
def test_what_is_done_is_kept_when_workers_are_lost_or_the_user_interrupts(
    small_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Tasks, "map", partialmethod(lose_workers, error=error))
        prepared(small_log, tmp_path / "out")
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == [".out.unfinished"]
    for name in ("raw_inputs._parse", "counting._ValueCounts", "counting.write_vocabulary"):
        monkeypatch.setattr(f"hotbed.data.preparation.{name}", None)  # all that is done
    prepared(small_log, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_text_files_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CSV file was converted to is touched whenever it is used, which changes nothing."""
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    pc_csv.write_csv(pq.read_table(dataset(tmp_path, files=1)).drop_columns("tags"), tmp_path / "raw.csv")
    options = {**SMALL, "schema": replace(SMALL["schema"], sparse=SMALL["schema"].sparse[:1])}
    with monkeypatch.context() as patch, pytest.raises(WorkerError):
        patch.setattr(Tasks, "map", lose_workers)
        prepare(tmp_path / "raw.csv", tmp_path / "out", **options)
    (kept,) = (tmp_path / "tables").glob("*.parquet")
    os.utime(kept, (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr("hotbed.data.preparation.counting._ValueCounts", None)  # all is counted
        prepare(tmp_path / "raw.csv", tmp_path / "out", **options)
    assert not list(tmp_path.glob(".out*"))


def test_tasks_that_run_twice_at_once(small_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster that takes a worker for lost; a third run was killed, and has left what it wrote."""
    prepared(small_log, tmp_path / "once")
    original, nested = executors.task_directory, set[Path]()
    again: list[Any] = []

    @contextmanager
    def within(out: Path) -> Generator[Path]:
        with original(out) as directory:
            yield directory
            if out not in nested:
                nested.add(out)
                shutil.copytree(directory, out.with_name(f".{out.name}.unfinished-killed"))
                again[-1]()
                assert out.is_dir()

    def run(tasks: Tasks, task: Any, arguments: Any) -> Any:
        for argument in arguments:
            again.append(lambda task=task, argument=argument: task(argument))
            yield task(argument)

    for module in ("counting", "encoded_rows"):
        monkeypatch.setattr(f"hotbed.data.preparation.{module}.task_directory", within)
    monkeypatch.setattr(Tasks, "map", run)
    prepared(small_log, tmp_path / "twice")
    assert nested and digests(tmp_path / "twice") == digests(tmp_path / "once")


def test_other_options_begin_anew(small_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(WorkerError):
        patch.setattr(Tasks, "map", lose_workers)
        prepared(small_log, tmp_path / "out")
    prepared(small_log, tmp_path / "out", test_rows=7)
    prepared(small_log, tmp_path / "whole", test_rows=7)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_two_at_once_are_refused(small_log: Path, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "write":
            with pytest.raises(DataError, match=r"another process is creating .*out. Wait for it"):
                prepared(small_log, tmp_path / "out")

    prepared(small_log, tmp_path / "out", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- the memory of counts is limited ---------------------------------------------------------------------------------


def test_the_same_bytes_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that do not fit are spilled as runs, which are merged in several rounds."""
    raw = dataset(tmp_path / "raw")
    prepare(raw, tmp_path / "much/out", **SMALL, workers=1)
    counting = importlib.import_module("hotbed.data.preparation.counting")
    runs: list[int] = []
    original = counting._merge_all

    def merged(of_table: Any, job: Any) -> Any:
        runs.append(len(of_table))
        return original(of_table, job)

    monkeypatch.setattr(counting, "_merge_all", merged)
    monkeypatch.setattr(counting, "_MOST_RUNS", 2)
    monkeypatch.setattr(counting, "_FEWEST_BATCH_ROWS", 3)
    monkeypatch.setattr(counting, "_ROW_BYTES", 1 << 30)  # few rows at once
    monkeypatch.setattr(
        "hotbed.data.preparation.raw_inputs._GROUP_BYTES", 1
    )  # a task for each of 24 row groups, 20 rows at once
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._FEWEST_ROWS", 20)
    monkeypatch.setattr("hotbed.data.preparation.prepare_dataset.CountJob", lambda *a: counting.CountJob(*a[:-1], 500))
    prepare(raw, tmp_path / "little/out", **SMALL, workers=1)
    assert min(runs) > 48  # more than two of a task
    little, much = (tmp_path / name / "out/vocabulary" for name in ("little", "much"))
    assert digests(little) == digests(much)


def test_vocabularies_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = dataset(tmp_path)
    counting = importlib.import_module("hotbed.data.preparation.counting")
    monkeypatch.setattr("hotbed.data.preparation.prepare_dataset.MergeJob", lambda *a: counting.MergeJob(*a[:-1], 1000))
    message = "table 'user', .* at least 2 times: got .* expected at most 1,000"
    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "out", **SMALL)
    assert prepare(raw, tmp_path / "out", **SMALL, top_k=5).rows["user"] == 6
