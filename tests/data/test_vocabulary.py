from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.encoding.vocabulary import (
    Vocabulary,
    lookup_in_file,
    read_vocabulary,
    value_type,
    vocabulary_file,
    write_vocabulary,
)
from hotbed.errors import DataError

KINDS = {
    "int64": pa.array([7, -3, 2**40], pa.int64()),
    "uint64": pa.array([7, 2**63 + 5, 1], pa.uint64()),
    "text": pa.array(["b", "", "äöü"], pa.large_string()),
    "bytes": pa.array([b"\xff\x00", b"", b"b"], pa.large_binary()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.encoding.vocabulary.BATCH_ROWS", 2)
    values = KINDS[kind]
    path = vocabulary_file(tmp_path, "C1")
    assert path == tmp_path / "C1.parquet"
    write_vocabulary(path, Vocabulary(values))
    found = read_vocabulary(path)
    assert found.values.equals(values) and found.rows == 4
    asked = pa.concat_arrays([values[2:], values[:1], pa.nulls(1, values.type), values[1:2], values[2:]])
    assert found.lookup(asked).tolist() == lookup_in_file(path, asked).tolist() == [3, 1, 0, 2, 3]
    assert lookup_in_file(path, asked[:0]).tolist() == []


def test_unknown_values_are_0(tmp_path: Path) -> None:
    vocabulary = Vocabulary(pa.array(["a", "b"], pa.large_string()))
    assert vocabulary.lookup(pa.array(["c", "b", None])).tolist() == [0, 2, 0]
    write_vocabulary(tmp_path / "none.parquet", Vocabulary.empty(pa.int64()))
    assert lookup_in_file(tmp_path / "none.parquet", pa.array([1, 2])).tolist() == [0, 0]


def test_other_tools_read_it(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "C1.parquet", Vocabulary(KINDS["text"]))
    assert pq.read_table(tmp_path / "C1.parquet").to_pydict() == {"value": ["b", "", "äöü"], "id": [1, 2, 3]}


def test_a_table_of_any_name_has_a_file(tmp_path: Path) -> None:
    assert vocabulary_file(tmp_path, "../a b").parent == tmp_path


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (pa.int8(), pa.int64()),
        (pa.bool_(), pa.int64()),
        (pa.float64(), pa.int64()),
        (pa.uint64(), pa.uint64()),
        (pa.list_(pa.string()), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_string()),
        (pa.binary(), pa.large_binary()),
    ],
)
def test_value_types(stored: pa.DataType, kind: pa.DataType) -> None:
    assert value_type(stored) == kind


IDS = pa.array(np.arange(1, 3))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"value": ["a", "a"], "id": IDS}), "damaged: got a duplicate value"),
        (pa.table({"value": ["a", None], "id": IDS}), "damaged: got 1 missing"),
        (pa.table({"value": ["a", "b"], "id": [2, 1]}), "damaged: ids are not 1, 2"),
        (pa.table({"value": ["a", "b"], "id": pa.array([1, 2], pa.int32())}), "ids are not 1, 2"),
        (pa.table({"value": [0.5, 1.5], "id": IDS}), "values of type double"),
        (pa.table({"value": [["a"], ["b"]], "id": IDS}), "values of type list"),
        (pa.table({"word": ["a", "b"], "id": IDS}), "got columns word, id"),
    ],
)
def test_damaged_file(tmp_path: Path, table: pa.Table, message: str) -> None:
    pq.write_table(table, tmp_path / "C1.parquet")
    with pytest.raises(DataError, match=f"C1.parquet.*{message}"):
        read_vocabulary(tmp_path / "C1.parquet")


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"C1\.parquet does not exist"):
        read_vocabulary(tmp_path / "C1.parquet")
    (tmp_path / "C1.parquet").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"C1.parquet is damaged"):
        read_vocabulary(tmp_path / "C1.parquet")
