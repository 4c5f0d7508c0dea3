"""Labels are checked before any is trained on: values, places, and what of a file has to be read for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from data_cases import NUMBERED_SCHEMA, numbered_batch

from hotbed.data import ParquetSource, Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter, ZipfSource
from hotbed.data.formats.parquet import RowGroup
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
        (pa.int32(), None, None),
        (pa.float32(), 1.5, "1.5"),
        (pa.float64(), float("nan"), "nan"),
        (pa.float64(), None, None),
        (pa.decimal128(5, 2), 7, "7.00"),
        (pa.bool_(), None, None),
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_a_bad_label_is_named_with_its_file_and_row(
    tmp_path: Path, kind: pa.DataType, value: Any, shown: str | None, statistics: bool
) -> None:
    labels = alternating().tolist()
    if pa.types.is_boolean(kind):
        labels = [bool(label) for label in labels]
    labels[37] = value
    source = parquet(tmp_path, pa.array(labels, kind), write_statistics=statistics)
    place = r"log.parquet, row group 3, column 'click': "
    found = (
        r"label null at row 7 \(row 37 of the file\); labels"
        if shown is None
        else rf"label {shown} at row 7 \(row 37 of the file\)"
    )
    with pytest.raises(DataError, match=place + found):
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
