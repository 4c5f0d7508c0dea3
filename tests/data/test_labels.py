"""Labels are checked before any is trained on: values, places, and what of a file has to be read for it."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from data_cases import NUMBERED_SCHEMA, numbered_batch, read_whole
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data import Label, ParquetSource, Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter, ZipfSource
from hotbed.data.encoding.labels import read_labels
from hotbed.data.formats.parquet import RowGroup
from hotbed.data.inspection import SchemaChecks
from hotbed.data.preparation.stored_rows import open_rows
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError


def parquet(path: Path, labels: Any, **options: Any) -> ParquetSource:
    """Row groups of 10 samples, the last 20 % as test split."""
    table = pa.table({"a": np.arange(len(labels)), "click": labels})
    pq.write_table(table, path / "log.parquet", row_group_size=10, **options)
    schema = Schema(sparse=(SparseColumn(name="a", rows=99),), labels=("click",))
    return ParquetSource(path / "log.parquet", schema, test_fraction=0.2)


def alternating(dtype: str = "int8", n: int = 50) -> np.ndarray[Any, Any]:
    return (np.arange(n) % 2).astype(dtype)


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        (pa.int8(), -1, "-1"),
        (pa.uint64(), 2**63, "9223372036854775808"),
        (pa.int32(), None, "null"),
        (pa.float32(), 1.5, "1.5"),
        (pa.float64(), float("nan"), "nan"),
        (pa.float64(), None, "null"),
        (pa.decimal128(5, 2), 7, "7.00"),
        (pa.bool_(), None, "null"),
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_a_bad_label_is_named_with_its_file_and_row(
    tmp_path: Path, kind: pa.DataType, value: Any, shown: str, statistics: bool
) -> None:
    labels = alternating().tolist()
    if pa.types.is_boolean(kind):
        labels = [bool(label) for label in labels]
    labels[37] = value
    source = parquet(tmp_path, pa.array(labels, kind), write_statistics=statistics)
    place = r"log.parquet, row group 3, column 'click': "
    with pytest.raises(DataError, match=rf"{place}label {shown} at row 7 \(row 37 of the file\)"):
        source.check_labels("train")
    source.check_labels("test")  # which has other row groups


@pytest.mark.parametrize(
    ("labels", "span"),
    [
        (alternating(), (0, 1)),
        (alternating().astype(bool), (0, 1)),
        (alternating("float32") / 4, (0, 0.25)),
        (np.zeros(50, np.int64), (0, 0)),
        (np.ones(50), (1, 1)),
        (np.full(50, 1 + 1e-12), (1, 1)),  # as float32, which is what is trained on
    ],
)
def test_good_labels_give_their_span(tmp_path: Path, labels: Any, span: tuple[float, float]) -> None:
    assert parquet(tmp_path, labels).check_labels("train") == {"click": span}


def test_integers_are_checked_by_the_footers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    original = RowGroup.read

    def spy(self: RowGroup, columns: Any) -> pa.Table:
        read.append(list(columns))
        return original(self, columns)

    monkeypatch.setattr(RowGroup, "read", spy)
    parquet(tmp_path, alternating()).check_labels("train")
    assert read == []
    parquet(tmp_path, alternating(), write_statistics=False).check_labels("train")
    assert read == [["click"]] * 4


def test_a_nested_column_of_the_same_path_is_not_taken_for_the_label(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "x": pa.array([{"y": 0}, {"y": 1}]), "x.y": [0, 7]})
    pq.write_table(table, tmp_path / "log.parquet")
    schema = Schema(sparse=(SparseColumn(name="a", rows=9),), labels=("x.y",))
    with pytest.raises(DataError, match=r"column 'x.y': label 7 at row 1"):
        ParquetSource(tmp_path / "log.parquet", schema).check_labels("train")


@pytest.mark.parametrize(
    ("dtype", "value", "shown"),
    [("bool", 255, "255"), ("int8", -1, "-1"), ("uint8", 2, "2"), ("float32", np.nan, "nan"), ("float16", 1.5, "1.5")],
)
def test_labels_of_split_binary_files(
    tmp_path: Path, dtype: str, value: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.data.formats.split_binary._LABELS_AT_ONCE", 8)
    with SplitBinaryWriter(tmp_path, NUMBERED_SCHEMA, ["train", "test"]) as writer:
        writer.append("train", numbered_batch(20))
        writer.append("test", numbered_batch(5))
    description = yaml.safe_load((tmp_path / "feature_spec.yaml").read_text())
    description["feature_spec"]["label"]["dtype"] = dtype
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(description))
    stored = "uint8" if dtype == "bool" else dtype
    for split, n in (("train", 20), ("test", 5)):
        alternating(stored, n).tofile(tmp_path / split / "label.bin")
    assert SplitBinarySource(tmp_path).check_labels("train") == {"label": (0, 1)}
    labels = alternating(stored, 20)
    labels[17] = value
    labels.tofile(tmp_path / "train/label.bin")
    source = SplitBinarySource(tmp_path)
    with pytest.raises(DataError, match=rf"train/label.bin, column 'label': label {shown} at sample 17"):
        source.check_labels("train")
    source.check_labels("test")


def test_a_source_that_cannot_read_labels_alone_leaves_it_to_the_trainer() -> None:
    source = ZipfSource("criteo_1tb_t15", train_samples=10)
    assert source.check_labels("train") == {}
    with pytest.raises(SpecError, match="split: got 'tests'"):
        source.check_labels("tests")


# -- conditions: labels of any type become 0 and 1 -------------------------------------------------------------------


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
    [(float("nan"), r"label nan at row 1 \(row 5 of the file\)"), (None, r"label null at row 1 \(row 5 of the file\)")],
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
