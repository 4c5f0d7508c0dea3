"""Protects that labels of any type become 0 and 1 as the schema says; what cannot is refused with its place."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import read_whole
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data import Label, ParquetSource, Schema, SparseColumn
from hotbed.data.encoding.labels import read_labels
from hotbed.data.inspection import SchemaChecks
from hotbed.data.preparation.stored_rows import open_rows
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError


def source(path: Path, labels: Any, positive: str | None) -> ParquetSource:
    table = pa.table({"user": np.arange(len(labels)), "y": labels})
    pq.write_table(table, path / "log.parquet", row_group_size=4)
    entry = "y" if positive is None else {"column": "y", "positive": positive}
    return ParquetSource(path / "log.parquet", {"labels": [entry], "sparse": [{"name": "user", "rows": 9}]})


RATINGS = [1, 5, 4, 3, 2, 5]


@pytest.mark.parametrize(
    ("labels", "positive", "expected"),
    [
        (pa.array(RATINGS, pa.int8()), ">= 4", [0, 1, 1, 0, 0, 1]),
        (pa.array(RATINGS, pa.uint64()), ">3.5", [0, 1, 1, 0, 0, 1]),
        (pa.array(RATINGS, pa.float16()), "< 2", [1, 0, 0, 0, 0, 0]),
        (pa.array(RATINGS, pa.float64()), "<= 2", [1, 0, 0, 0, 1, 0]),
        (pa.array([Decimal("0.1"), Decimal("0.20")], pa.decimal128(5, 2)), "== 0.1", [1, 0]),
        (pa.array([0.1, 0.2], pa.float32()), "== 0.1", [1, 0]),
        (pa.array([-1, 1, -1]), "> 0", [0, 1, 0]),
        (pa.array([-1, 1, -1]), "> 1000", [0, 0, 0]),
        (pa.array([2**63 + 1, 2**63], pa.uint64()), f"== {2**63 + 1}", [1, 0]),
        (pa.array([0, 1, 2]), "!= 0", [0, 1, 1]),
        (pa.array([0, 1, 2, 7]), "in [1, 7]", [0, 1, 0, 1]),
        (pa.array(["yes", "no", "Yes"]), "== yes", [1, 0, 0]),
        (pa.array(["yes", "no", ""]), "!= no", [1, 0, 1]),
        (pa.array(["a, b", "no", "c"]), "in ['a, b', c]", [1, 0, 1]),
        (pa.array(["yes", "no"]).dictionary_encode(), "== 'yes'", [1, 0]),
        (pa.array(["yes", "no"], pa.string_view()), "== yes", [1, 0]),
        (pa.array([True, False]), "== false", [0, 1]),
        (pa.array([True, False]), "== yes", [1, 0]),
        (pa.array([True, False]), None, [1, 0]),
        (pa.array([Decimal("0.25"), Decimal(1)], pa.decimal128(5, 2)), None, [0.25, 1]),
    ],
)
def test_labels_become_0_and_1(tmp_path: Path, labels: pa.Array, positive: str | None, expected: list[float]) -> None:
    made = source(tmp_path, labels, positive)
    found = read_whole(made).labels
    assert found is not None and found[:, 0].tolist() == expected
    assert made.check_labels("train") == {"y": (min(expected), max(expected))}


@pytest.mark.parametrize(
    ("labels", "positive", "message"),
    [
        (["yes", "no"], None, r"log\.parquet: label column 'y': got string without a condition"),
        (["4", "5"], ">= 4", r"log\.parquet: label column 'y': got string with positive: '>= 4'"),
        ([4, 5], "== yes", "label column 'y' of int64: positive: got 'yes'"),
        ([4, 5], "< nan", "label column 'y' of int64: positive: got 'nan'"),
        ([True, False], "== maybe", "label column 'y' of bool: positive: got 'maybe'"),
        (np.array(["2024-01-01"], "datetime64[D]"), None, r"log\.parquet: label column 'y': got date32\[day\]"),
        (np.array(["2024-01-01"], "datetime64[D]"), "> 4", r"log\.parquet: label column 'y': got date32\[day\]"),
    ],
)
def test_columns_that_cannot_be_labels(tmp_path: Path, labels: Any, positive: str | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        source(tmp_path, labels, positive)


@pytest.mark.parametrize("check", ["check_labels", "read"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), r"label nan at row 1 \(row 5 of the file\)"),
        (None, r"label null at row 1 \(row 5 of the file\); labels"),
    ],
)
def test_a_missing_label_is_not_taken_for_a_negative(tmp_path: Path, check: str, value: Any, shown: str) -> None:
    made = source(tmp_path, pa.array([1.0, 2, 3, 4, 5, value]), ">= 4")
    with pytest.raises(DataError, match=rf"log.parquet, row group 1, column 'y': {shown}"):
        made.check_labels("train") if check == "check_labels" else made.read("train", 1)


@pytest.mark.parametrize("positive", [">= true", "== true", "in [true]"])
@pytest.mark.parametrize("kind", [pa.bool_(), pa.dictionary(pa.int8(), pa.bool_())])
def test_missing_labels_of_truth_are_counted(tmp_path: Path, positive: str, kind: pa.DataType) -> None:
    labels = pa.array([True, None, False, None])
    made = source(tmp_path, labels.cast(kind) if pa.types.is_boolean(kind) else labels.dictionary_encode(), positive)
    with pytest.raises(DataError, match="column 'y': label null at row 1"):
        made.read("train", 0)
    rows = open_rows(tmp_path / "log.parquet")
    checks = SchemaChecks(rows, made.schema, "hash")
    for found in rows.read():
        checks.check(found)
    assert [(fault.column, fault.values) for fault in checks.faults] == [("y", 2)]


@pytest.mark.parametrize("positive", ["4", ">=", "=> 4", "in", "in 4", "in []", "in [[1]]", "in {a", True, 4, "is yes"])
def test_conditions_that_are_none(positive: Any) -> None:
    with pytest.raises(SpecError, match="label 'y': positive: got"):
        Schema.from_dict({"labels": [{"column": "y", "positive": positive}], "sparse": [{"name": "a", "rows": 9}]})


def test_the_schema_keeps_the_condition() -> None:
    values = {"labels": ["click", {"column": "stars", "positive": ">= 4"}], "sparse": [{"name": "a", "rows": 9}]}
    schema = Schema.from_dict(values)
    assert schema.labels == ("click", "stars")
    assert schema.positives == (Label("stars", ">= 4"),)
    assert schema.to_dict()["labels"] == values["labels"]
    assert Schema.from_dict(schema.to_dict()) == schema
    assert Schema.from_dict({**values, "labels": [{"column": "click", "positive": None}]}).positives == ()
    columns = (SparseColumn(name="a", rows=9),)
    with pytest.raises(SpecError, match="positives: got 'star'"):
        Schema(sparse=columns, labels=("stars",), positives=(Label("star", "> 1"),))
    with pytest.raises(SpecError, match="positives: got 'stars' 2 times"):
        Schema(sparse=columns, labels=("stars",), positives=(Label("stars", "> 1"), Label("stars", "> 2")))
    with pytest.raises(SpecError, match=r"labels\[0\]: key 'column' is missing"):
        Schema.from_dict({**values, "labels": [{"positive": "> 1"}]})


@pytest.mark.parametrize(("value", "shown"), [(-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_weights_that_are_none(tmp_path: Path, value: float, shown: str) -> None:
    table = pa.table({"user": [1, 2, 3], "y": [0, 1, 0], "w": [0.0, 1.0, value]})
    pq.write_table(table, tmp_path / "log.parquet")
    schema = Schema(sparse=(SparseColumn(name="user", rows=9),), labels=("y",), weight="w")
    with pytest.raises(DataError, match=rf"column 'w': weight {shown} at row 2 .*; expected a finite"):
        ParquetSource(tmp_path / "log.parquet", schema).read("train", 0)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.sampled_from([">=", "<=", "==", "!=", ">", "<"]),
    st.integers(-(2**64), 2**64),
)
def test_integers_are_compared_exactly(values: list[int], comparison: str, limit: int) -> None:
    compare = {">=": int.__ge__, "<=": int.__le__, "==": int.__eq__, "!=": int.__ne__, ">": int.__gt__, "<": int.__lt__}
    label = Label("y", f"{comparison} {limit}")
    found = read_labels(pa.chunked_array([pa.array(values, pa.int64())]), "y", label, RowLocation("here"))
    assert found.tolist() == [float(compare[comparison](value, limit)) for value in values]
