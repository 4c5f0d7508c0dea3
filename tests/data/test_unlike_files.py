"""Protects that files of a dataset with other types are read alike or refused by name, and are in one split each."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import read_whole
from derived_cases import row_of

from hotbed.data import ParquetSource, Schema, SparseColumn
from hotbed.data.drafting.draft import Draft, draft
from hotbed.data.hashing import hash_integers, hashes_to_rows
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.preparation.raw_inputs import find_input
from hotbed.data.preparation.stored_rows import open_rows
from hotbed.errors import DataError

N = 120
RNG = np.random.default_rng(0)
USER = RNG.integers(0, 20, N)
CLICK = RNG.integers(0, 2, N).astype(np.int8)
IDS = Schema(sparse=(SparseColumn(name="c", rows=64),), labels=("click",))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))


def write(file: Path, **columns: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user": USER, "click": CLICK, **columns}), file)


def write_csv(file: Path, values: list[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["c,click", *(f"{v},{i % 2}" for i, v in enumerate(values))]) + "\n")
    return file


def left_out(found: Draft) -> dict[str, str]:
    return {column.name: column.reason for column in found.left_out}


def rows_of_text(*texts: str) -> list[int]:
    return [row_of(text, 64) for text in texts]


def ids_of(source: ParquetSource, split: str = "train") -> list[int]:
    return read_whole(source, split).sparse.values.tolist()


# -- types ----------------------------------------------------------------------------------------------------------

EMPTY = pa.array([[]] * N, pa.list_(pa.null()))
TIMES = np.arange(N).astype("datetime64[s]")
UNLIKE = {
    "a list and a number": (pa.array([[1, 2]] * N), np.arange(N)),
    "a time and text": (TIMES, ["2024-03-01"] * N),
    "lists of integers and of text": (pa.array([[1]] * N), pa.array([["a"]] * N)),
    "text and a number": (["a"] * N, np.arange(N)),
    "a struct and integers": (pa.array([{"x": 1}] * N), USER),
    "structs of other fields": (pa.array([{"x": 1}] * N), pa.array([{"y": "a"}] * N)),
}
ALIKE = {
    "true or false, and integers": (USER % 2 == 0, USER),
    "integers and decimals": (USER, pa.array([Decimal(int(u)) for u in USER], pa.decimal128(9, 2))),
    "floats and decimals": (USER / 4, pa.array([Decimal(int(u)) for u in USER], pa.decimal128(9, 2))),
    "integers and whole decimals": (USER, pa.array([Decimal(int(u)) for u in USER], pa.decimal128(20, 0))),
    "decimals of two scales": (
        pa.array([Decimal(int(u)) / 4 for u in USER], pa.decimal128(9, 2)),
        pa.array([Decimal(int(u)) for u in USER], pa.decimal128(20, 0)),
    ),
    "integers of two sizes": (USER.astype(np.int8), USER.astype(np.uint64)),
    "categories and text": (pa.array([f"u{i}" for i in USER]).dictionary_encode(), [f"u{i}" for i in USER]),
    "views of text and bytes": (pa.array([f"u{i}" for i in USER], pa.string_view()), [b"u1", b"u2"] * (N // 2)),
    "lists that are all empty": (pa.array([[]] * N, pa.list_(pa.null())), pa.array([[int(u)] for u in USER])),
    "views of lists": (
        pa.array([[int(u)] for u in USER], pa.list_view(pa.int64())),
        pa.array([[int(u)] for u in USER]),
    ),
    "nothing but nulls": (pa.nulls(N), [f"u{i}" for i in USER]),
    "bytes of one length": (pa.array([bytes([u]) * 16 for u in USER], pa.binary(16)), [b"u1", b"u2"] * (N // 2)),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_columns_of_other_types_in_other_files_are_left_out_of_drafts_and_not_prepared(
    tmp_path: Path, case: str
) -> None:
    for name, values in zip(("a", "b"), UNLIKE[case], strict=True):
        write(tmp_path / "data" / f"{name}.parquet", c=values)
    found = draft(tmp_path / "data")
    assert re.fullmatch(r".* in b\.parquet, but .* in another file", left_out(found)["c"])
    assert [c.name for c in found.schema.sparse] == ["user"]
    with pytest.raises(DataError, match=r"b\.parquet, column 'c': got .*, expected .* in .*a\.parquet"):
        prepare(tmp_path / "data", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("case", ALIKE)
def test_columns_of_similar_types_are_one_column(tmp_path: Path, case: str) -> None:
    for name, values in zip(("a", "b"), ALIKE[case], strict=True):
        write(tmp_path / "data" / f"{name}.parquet", c=values)
    found = draft(tmp_path / "data")
    assert "c" not in left_out(found)
    source = ParquetSource(tmp_path / "data", found.schema)
    for chunk in range(2):
        batch = source.read("train", chunk)
        assert "c" in batch.sparse.names or batch.dense is not None


def test_times_with_and_without_a_zone_are_one_column(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", when=pa.array(np.arange(N), pa.timestamp("ns", "Europe/Berlin")))
    write(tmp_path / "data" / "b.parquet", when=pa.array(np.arange(N) * 1000, pa.timestamp("us")))
    assert left_out(draft(tmp_path / "data"))["when"].startswith("a time")


def test_a_column_that_the_test_files_lack_or_have_as_text_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.parquet", c=USER, d=USER)
    write(tmp_path / "data" / "test.parquet", c=[f"{u}" for u in USER])
    found = draft(tmp_path / "data")
    assert left_out(found)["c"] == "its type is string in test.parquet, but int64 in another file"
    assert left_out(found)["d"] == "test.parquet has no such column"


def test_ids_that_are_integers_in_one_file_and_text_in_another_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.parquet", c=USER)
    write(tmp_path / "data" / "test.parquet", c=[f"{u}" for u in USER])
    message = r"column 'c': got integers in .*train\.parquet and text in .*test\.parquet"
    with pytest.raises(DataError, match=message):
        ParquetSource(tmp_path / "data", IDS)
    grouped = Schema(sparse=(SparseColumn(name="user", rows=64),), labels=("click",), group="c")
    with pytest.raises(DataError, match=message):
        ParquetSource(tmp_path / "data", grouped)


def test_a_column_of_nulls_is_missing_values_of_any_kind(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", c=pa.nulls(N), x=pa.nulls(N), h=pa.nulls(N), e=EMPTY)
    schema = Schema(
        sparse=(
            SparseColumn(name="c", rows=64),
            SparseColumn(name="h", rows=64, ids=None),
            SparseColumn(name="e", rows=64, ids=None),
        ),
        dense=("x",),
        labels=("click",),
    )
    source = ParquetSource(tmp_path / "a.parquet", schema)
    batch = source.read("train", 0)
    assert batch.sparse.values.tolist() == [0] * N and batch.dense is not None
    assert torch.equal(batch.dense, torch.zeros(N, 1))
    assert source.id_kinds() == {}


# -- files of text --------------------------------------------------------------------------------------------------


def test_codes_are_text_in_all_files_if_they_are_in_one(tmp_path: Path) -> None:
    write_csv(tmp_path / "data" / "1.csv", ["12", "7", "12"])
    write_csv(tmp_path / "data" / "2.csv", ["A1", "NA", "007"])
    source = ParquetSource(tmp_path / "data", IDS)
    assert ids_of(source) == rows_of_text("12", "7", "12", "A1", "NA", "007")
    assert source.id_kinds() == {"c": "text"}
    (tmp_path / "data" / "2.csv").unlink()
    assert (
        ids_of(ParquetSource(tmp_path / "data", IDS))
        == hashes_to_rows(hash_integers(np.array([12, 7, 12])), 64).tolist()
    )
    assert ids_of(ParquetSource(tmp_path / "data", IDS, text=["c"])) == rows_of_text("12", "7", "12")


def test_codes_of_a_split_that_is_elsewhere_are_text_as_those_to_train_on(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "1.csv", ["12", "A1"])
    other = write_csv(tmp_path / "2.csv", ["12", "1.50"])
    numbers = write_csv(tmp_path / "3.csv", ["12", "13"])
    source = ParquetSource(first, IDS, split_paths={"test": str(numbers)})
    assert ids_of(source, "test") == rows_of_text("12", "13")
    assert ids_of(ParquetSource(first, IDS, split_paths={"test": str(other)}), "test") == rows_of_text("12", "1.50")
    with pytest.raises(DataError, match=r"column 'c': got integers in .*3\.csv and text in .*1\.csv"):
        ParquetSource(numbers, IDS, split_paths={"test": str(first)})
    source = ParquetSource(numbers, IDS, split_paths={"test": str(first)}, text=["c"])
    assert ids_of(source, "train") == rows_of_text("12", "13")


# -- files in two splits --------------------------------------------------------------------------------------------


def test_a_file_to_train_on_is_no_test_file(tmp_path: Path) -> None:
    for name in ("1", "2"):
        write(tmp_path / "data" / f"{name}.parquet", c=USER)
    second = tmp_path / "data" / "2.parquet"
    for path in (tmp_path / "data", second):
        message = rf"{second}: got splits 'test' and 'train'"
        with pytest.raises(DataError, match=message):
            draft(path, test=second)
        with pytest.raises(DataError, match=message):
            ParquetSource(path, IDS, split_paths={"test": str(second)})
    assert draft(tmp_path / "data" / "1.parquet", test=second).splits.has_test


# -- files without rows ----------------------------------------------------------------------------------------------

NO_ROWS = {
    "another type": pa.table({"click": pa.array([], pa.string()), "user": pa.array([], pa.string())}),
    "no type": pa.table({"click": pa.nulls(0), "user": pa.nulls(0), "price": pa.nulls(0)}),
    "fewer columns": pa.table({"click": pa.array([], pa.int8())}),
    "no columns": pa.table({}),
    "one name twice": pa.table([pa.nulls(0), pa.nulls(0)], ["user", "user"]),
}


@pytest.mark.parametrize("split", ["", "train-", "test-"])
@pytest.mark.parametrize("case", NO_ROWS)
def test_files_without_rows_take_part_in_no_check(tmp_path: Path, case: str, split: str) -> None:
    price = np.arange(N) / 7
    write(tmp_path / "data" / f"{split and 'train-'}a.parquet", price=price)
    if split == "test-":
        write(tmp_path / "data" / "test-a.parquet", price=price)
    pq.write_table(NO_ROWS[case], tmp_path / "data" / f"{split}0.parquet")
    found = draft(tmp_path / "data")
    assert left_out(found) == {}
    assert ([c.name for c in found.schema.sparse], found.schema.dense) == (["user"], ("price",))
    source = ParquetSource(tmp_path / "data", found.schema)
    assert source.samples("train") == N
    assert sum(open_rows(tmp_path / "data").samples.values()) == N * (1 + (split == "test-"))
    assert find_input([tmp_path / "data"], found.schema).kinds == {"user": pa.int64()}


def test_data_without_any_row_have_the_types_of_their_files(tmp_path: Path) -> None:
    for name, case in (("a", "another type"), ("b", "fewer columns")):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(NO_ROWS[case], tmp_path / "data" / f"{name}.parquet")
    with pytest.raises(DataError, match="data has no rows"):
        draft(tmp_path / "data")
    with pytest.raises(DataError, match=r"a\.parquet: column 'c' is missing"):
        ParquetSource(tmp_path / "data", IDS)
