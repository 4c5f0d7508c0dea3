"""Protects that raw values become what a prepared dataset stores, whatever kind they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotbed.data import Encoder, Schema, SparseColumn
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.encoding.prepared_dataset import Preparation, PreparationEntry, VocabularyEntry
from hotbed.errors import DataError, SpecError

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
