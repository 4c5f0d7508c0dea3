"""Protects that vocabularies are read as they were written, and that raw values become what they say."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data import Encoder, Schema, SparseColumn
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.encoding.prepared_dataset import Preparation, PreparationEntry, VocabularyEntry
from hotbed.data.encoding.vocabulary import (
    Vocabulary,
    lookup_in_file,
    read_vocabulary,
    value_type,
    vocabulary_file,
    write_vocabulary,
)
from hotbed.errors import DataError, SpecError

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


# -- raw values become what a prepared dataset stores ----------------------------------------------------------------


VALUES = {"item": pa.array(["pen", "", "ink"]), "user": pa.array([5, -7, 2**40])}
SCHEMA = Schema(
    sparse=(
        SparseColumn(name="item", rows=4),
        SparseColumn(name="bought", rows=4, table="item"),
        SparseColumn(name="user", rows=4),
    ),
    dense=("price",),
    labels=(),
)
ENTRY = PreparationEntry(
    vocabularies={
        "item": VocabularyEntry.of(VALUES["item"], "text"),
        "user": VocabularyEntry.of(VALUES["user"], "integers"),
    },
    tables={"item": "item", "bought": "item", "user": "user"},
    numericals="as_is",
    dtype="float16",
)
ROWS: dict[str, list[Any]] = {
    "item": ["ink", "pen", None, "new", ""],
    "bought": ["", None, "pen", "Ink", "ink"],
    "user": [2**40, 5, None, 6, -7],
    "price": [0.1, None, 2.5, -3, 1000],
}


def stored(name: str) -> LookupTable:
    return LookupTable.sort(VALUES[name], pa.array([1, 2, 3]))


def mapped(folder: Path, name: str) -> LookupTable:
    with (folder / f"{name}.arrow").open("wb") as stream:
        stored(name).write_file(stream)
    return LookupTable.map_file(folder / f"{name}.arrow")


@pytest.mark.parametrize("is_mapped", [False, True])
def test_text_integers_and_numbers_that_stay_as_they_are(tmp_path: Path, is_mapped: bool) -> None:
    read = (lambda name: mapped(tmp_path, name)) if is_mapped else stored
    preparation = Preparation.rebuild(ENTRY.model_dump(), SCHEMA, read)
    encoder = Encoder(SCHEMA, ids="raw", preparation=preparation)
    assert {column.name: column.kind for column in encoder.columns()} == {
        "item": "text",
        "bought": "text",
        "user": "integers",
        "price": "numbers",
    }
    for table in (encoder.table(ROWS), pa.table({**ROWS, "item": pa.array(ROWS["item"]).dictionary_encode()})):
        batch = encoder.batch(table)
        assert batch.sparse["item"].values.tolist() == [3, 1, 0, 0, 2]
        assert batch.sparse["bought"].values.tolist() == [2, 0, 1, 0, 3]
        assert batch.sparse["user"].values.tolist() == [3, 1, 0, 0, 2]
        assert batch.dense is not None
        assert batch.dense[:, 0].tolist() == np.float32(np.float16([0.1, 0, 2.5, -3, 1000])).tolist()
    numbers = encoder.numericals(pa.table({"price": [0.1, None]}))
    assert numbers is not None
    assert numbers[:, 0].tolist() == np.float32(np.float16([0.1, 0])).tolist()
    ids = encoder.encoded.batch(pa.table({"item": [1], "bought": [2], "user": [3], "price": [0.5]}))
    assert ids.sparse["user"].values.tolist() == [3]
    again = Encoder.from_dict(encoder.to_dict(), vocabulary=read)
    assert again.batch(again.table(ROWS)).sparse["user"].values.tolist() == [3, 1, 0, 0, 2]
    assert again.state() == encoder.state()


def test_lists_and_numbers_that_the_schema_reads() -> None:
    schema = Schema(
        sparse=(SparseColumn(name="item", rows=4), SparseColumn(name="bought", rows=4, table="item", ids=None)),
        dense=("price",),
        labels=(),
    )
    entry = ENTRY.model_copy(update={"dtype": None})
    encoder = Encoder(schema, ids="raw", preparation=Preparation.rebuild(entry.model_dump(), schema, stored))
    bought = [["ink", None, "new"], None, [], ["pen", ""]]
    rows = {"item": ["pen", None, "ink", "x"], "bought": bought, "price": [70_000.1, None, 2, 3]}
    for table in (encoder.table(rows), pa.table({**rows, "bought": pa.array(bought, pa.list_(pa.string_view()))})):
        batch = encoder.batch(table)
        assert batch.sparse["item"].values.tolist() == [1, 0, 3, 0]
        assert batch.sparse["bought"].values.tolist() == [3, 0, 0, 1, 2]
        assert batch.sparse["bought"].lengths().tolist() == [3, 0, 0, 2]
        assert batch.dense is not None
        assert batch.dense[:, 0].tolist() == np.float32([70_000.1, 0, 2, 3]).tolist()
    missing = encoder.batch(pa.table({"item": [None], "bought": [None], "price": [1.0]}))
    assert missing.sparse["item"].values.tolist() == [0]
    assert missing.sparse["bought"].lengths().tolist() == [0]
    logs = ENTRY.model_copy(update={"dtype": None, "numericals": "log"})
    encoder = Encoder(schema, ids="raw", preparation=Preparation.rebuild(logs.model_dump(), schema, stored))
    batch = encoder.batch(encoder.table({**rows, "price": [0, None, 10**9, -2]}))
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == np.float32([np.log(3), 0, np.log(10**9 + 3), 0]).tolist()


def test_what_cannot_be_prepared_is_told(tmp_path: Path) -> None:
    encoder = Encoder(SCHEMA, ids="raw", preparation=Preparation.rebuild(ENTRY.model_dump(), SCHEMA, stored))
    for column, values, message in [
        ("user", ["5"] * 5, "the rows: column 'user': got string"),
        ("item", [5] * 5, "the rows: column 'item': got int64"),
    ]:
        with pytest.raises(SpecError, match=message):
            encoder.batch(pa.table({**ROWS, column: values}))
    with pytest.raises(DataError, match=r"the rows, column 'price': 70000\.0 at row 1"):
        encoder.batch(pa.table({**ROWS, "price": [1.0, 70_000.0, None, 1.0, 1.0]}))
    with pytest.raises(DataError, match=r"x: tables is missing. Prepare the data again"):
        PreparationEntry.parse(b'{"vocabularies": {}, "numericals": "log", "dtype": null}', "x")
    with pytest.raises(DataError, match=r"the rows, column 'user': id 0\.5 at row 0"):
        encoder.batch(pa.table({**ROWS, "user": [0.5] * 5}))
    other = Schema(sparse=(SparseColumn(name="place", rows=2),), labels=())
    with pytest.raises(DataError, match="column 'place'"):
        Preparation.rebuild(ENTRY.model_dump(), other, stored)
    with pytest.raises(DataError, match=r"'user': got 3 values \(text\), expected 3 \(integers\)"):
        Preparation.rebuild(ENTRY.model_dump(), SCHEMA, lambda name: stored("item"))
    (tmp_path / "x.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"x\.arrow is not a table"):
        LookupTable.map_file(tmp_path / "x.arrow")


HASHES = pa.array([1], pa.uint64())


@pytest.mark.parametrize(
    ("columns", "batches", "message"),
    [
        ({"key": pa.array([5]), "value": pa.array([1]), "hash": HASHES}, 2, "got 2 batches"),
        ({"key": pa.array([5]), "value": pa.array([1]), "hash": pa.array([1])}, 1, "got hashes of int64"),
        ({"key": pa.array([5]), "value": pa.array(["1"]), "hash": HASHES}, 1, "and values of string"),
        ({"key": pa.array([5]), "value": pa.array([1])}, 1, "hash"),
    ],
)
def test_files_that_map_other_columns_are_refused(
    tmp_path: Path, columns: dict[str, pa.Array], batches: int, message: str
) -> None:
    batch = pa.record_batch(columns)
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    with pytest.raises(DataError, match=rf"x\.arrow is not a table of keys and values.*{message}"):
        LookupTable.map_file(tmp_path / "x.arrow")
