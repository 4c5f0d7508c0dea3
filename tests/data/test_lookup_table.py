"""Protects what values of tables are, and what programs without hotbed are told of derived inputs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from derived_cases import ITEMS, crossed, encoder, ids, items, of_items, row_of

from hotbed.data import Encoder, Numerical
from hotbed.data.encoding.encoder import describe_features, encoding_of
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.hashing import mix
from hotbed.errors import DataError, SpecError
from hotbed.testing.source_contract import assert_same

# -- values of tables --------------------------------------------------------------------------------------------------


def test_values_of_a_table(tmp_path: Path) -> None:
    file = items(tmp_path / "items.parquet")
    price = {"name": "price", "lookup": "item", "file": file, "key": "id", "value": "price", "rule": "log"}
    level = {"name": "level", "bucket": "price", "boundaries": [2]}
    both = {"name": "both", "cross": ["user", "kind", "level"], "rows": 100}
    made = encoder(of_items(file), price | {"missing": "indicator"}, level, both)
    assert made.schema.dense == ("price",)
    assert made.schema.numericals == (Numerical(name="price", rule="log", missing="indicator"),)
    assert [(c.name, c.kind) for c in made.columns()] == [("user", ""), ("item", "")]
    batch = made.batch(ITEMS)
    assert ids(batch, "kind") == [row_of("x"), 0, 0, 0, row_of("z")]
    assert batch.dense is not None
    np.testing.assert_array_equal(batch.dense[:, 0].numpy(), [1.5, 2.0, np.nan, np.nan, np.nan])
    assert ids(batch, "level") == [1, 2, 0, 0, 0]
    assert ids(batch, "both") == [crossed((1, "x", 1), 100), 0, 0, 0, 0]
    dense = made.numericals(ITEMS.select(made.stored_for(made.schema.dense)))
    assert made.stored_for(made.schema.dense) == ["item"] and dense is not None
    assert torch.equal(dense.nan_to_num(), batch.dense.nan_to_num())


def test_lists_of_keys_and_lists_of_values(tmp_path: Path) -> None:
    file = items(tmp_path / "items.parquet", tags=[["p", "q"], [], None, ["r", None]])
    seen = pa.table({"user": [1, 2, 3], "item": [["a", "new", "ccccccccc"], None, []]})
    made = encoder(of_items(file, ids=None)).batch(seen)
    assert ids(made, "kind") == [row_of("x"), 0, row_of("z")]
    tags = encoder(of_items(file, value="tags", ids=None)).batch(ITEMS).sparse["kind"]
    assert tags.offsets is not None
    assert tags.offsets.tolist() == [0, 2, 2, 2, 2, 4]
    assert tags.values.tolist() == [row_of("p"), row_of("q"), row_of("r"), 0]
    with pytest.raises(SpecError, match="feature 'kind': got lists"):
        encoder(of_items(file, value="tags", ids=None)).batch(seen)


def test_integer_keys_of_any_width_and_tables_of_one_content(tmp_path: Path) -> None:
    keys = [5, -3, 7]
    first = of_items(items(tmp_path / "a.parquet", id=pa.array([*keys, None], pa.int8())))
    price = {"value": "price", "name": "p"}
    second = of_items(items(tmp_path / "b.parquet", id=pa.array([*keys, None], pa.int64())))
    table = pa.table({"user": [1, 2, 3], "item": pa.array([-3.0, 5.0, None])})
    made = encoder(first)
    assert ids(made.batch(table), "kind") == [0, row_of("x"), 0]
    (tmp_path / "c.csv").write_text("kind,id\n,-3\ny,7\nx,5\n")
    states = [encoder(first).state(), encoder(second).state(), encoder(of_items(str(tmp_path / "c.csv"))).state()]
    found = {state["kind"]["sha256"] for state in states}
    assert len(found) == 1  # whatever the format, the order of rows and the width of integers
    assert encoder(first | price | {"rows": 9}).state()["p"]["sha256"] not in found


def test_an_encoder_takes_its_tables_along(tmp_path: Path) -> None:
    file = items(tmp_path / "items.parquet")
    made = encoder(of_items(file), kinds={"user": "integers", "item": "text"})
    values, tables = json.loads(json.dumps(made.to_dict())), made.tables
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.export")
    (tmp_path / "items.parquet").unlink()
    again = Encoder.from_dict(values, {name: pq.read_table(tmp_path / f"{name}.export") for name in tables})
    assert_same(again.batch(ITEMS), made.batch(ITEMS))
    plain = again.table({"user": [1, 2], "item": ["a", None]})
    assert ids(again.batch(plain), "kind") == [row_of("x"), 0]
    wrong = {"kind": tables["kind"].slice(1)}
    with pytest.raises(
        DataError,
        match=r"feature 'kind': .*items\.parquet has changed since training: got 2 keys with SHA-256 16aae9074fc1…",
    ):
        Encoder.from_dict(values, wrong)
    with pytest.raises(DataError, match="table of feature 'kind': column 'value' is missing"):
        Encoder.from_dict(values, {"kind": tables["kind"].select(["key"])})
    with pytest.raises(DataError, match="does not exist, expected a Parquet"):
        Encoder.from_dict(values)


def test_a_table_that_has_changed_is_named(tmp_path: Path) -> None:
    file = items(tmp_path / "items.parquet")
    state = encoder(of_items(file)).state()
    encoder(of_items(file)).load_state(state)
    items(tmp_path / "items.parquet", kind=["x", None, "y", "changed"])
    with pytest.raises(
        DataError,
        match=r"feature 'kind': .*items\.parquet has changed since training: got 3 keys with SHA-256 00211a1a9865…",
    ):
        encoder(of_items(file)).load_state(state)
    encoder(of_items(file)).load_state(state, other_tables=True)


def same_hash() -> list[bytes]:
    """Two keys of 16 bytes that have one hash: the second words are chosen so."""
    start = mix(np.array([16], np.uint64))
    first = [np.array([word], np.uint64) for word in (1, 2)]
    second = [np.array([5], np.uint64), mix(start ^ first[0]) ^ np.uint64(5) ^ mix(start ^ first[1])]
    return [a.tobytes() + b.tobytes() for a, b in zip(first, second, strict=True)]


def test_keys_that_only_share_a_hash(tmp_path: Path) -> None:
    known, other = same_hash()
    made = encoder(of_items(items(tmp_path / "items.parquet", id=pa.array([known, b"b", b"c", b"d"]))))
    batch = made.batch(pa.table({"user": [1, 2], "item": pa.array([other, known])}))
    assert ids(batch, "kind") == [0, row_of("x")]
    with pytest.raises(
        DataError,
        match=r"items\.parquet, column 'id': keys .* have the same hash",
    ):
        encoder(of_items(items(tmp_path / "items.parquet", id=pa.array([known, other, b"c", b"d"]))))


@pytest.mark.parametrize(
    ("columns", "change", "message"),
    [
        ({"id": ["a", "b", "a", "c"]}, {}, "feature 'kind': FILE, column 'id': got key 'a' twice"),
        ({"id": [1, 2, 2, 3]}, {}, "feature 'kind': FILE, column 'id': got key 2 twice"),
        ({}, {"key": "ids"}, "feature 'kind': column of FILE: got 'ids'"),
        ({"id": [1, 2, 3, 4]}, {}, "feature 'kind': column 'item' of the rows: got text"),
        ({"id": [0.5, 1, 2, 3]}, {}, r"feature 'kind': FILE, column 'id': id 0\.5 at key 0"),
        ({"id": [[1], [2], [3], [4]]}, {}, "feature 'kind': FILE, column 'id': got list<element: int64>"),
        ({"kind": [{"x": 1}] * 4}, {}, "feature 'kind': FILE, column 'kind': got struct<x: int64>"),
        ({"kind": [[1.5]] * 4}, {}, "feature 'kind': FILE, column 'kind': got list<element: double>"),
        ({}, {"value": "price"}, r"the rows, column 'kind': id 1\.5 at row 0"),
        ({}, {"ids": 3}, "feature 'kind': got one value per sample"),
        ({}, {"rows": 1}, "feature 'kind': rows: got 1"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, columns: dict[str, Any], change: dict[str, Any], message: str) -> None:
    file = items(tmp_path / "items.parquet", **columns)
    with pytest.raises((DataError, SpecError), match=message.replace("FILE", r".*items\.parquet")):
        encoder(of_items(file, **change)).batch(ITEMS)


def test_a_table_without_rows_finds_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([], pa.string()), "kind": pa.array([], pa.string())}), tmp_path / "i.pq")
    assert ids(encoder(of_items(str(tmp_path / "i.pq"))).batch(ITEMS), "kind") == [0] * 5
    assert LookupTable.read(encoder(of_items(str(tmp_path / "i.pq"))).schema.derived[0]).type_of_keys == "text"  # type: ignore[arg-type]


# -- without hotbed ----------------------------------------------------------------------------------------------------

READER = Path(__file__).parents[2] / "docs" / "serving" / "score_program.py"


def test_the_program_of_the_docs_makes_the_same_ids(tmp_path: Path) -> None:
    file = items(tmp_path / "items.parquet", tags=[["p", "q"], [], None, ["r", None]], n=[1, 2, 3, 4])
    made = encoder(
        of_items(file),
        of_items(file, name="n", value="n"),
        of_items(file, name="tags", value="tags", ids=None),
        of_items(file, name="seen_kinds", lookup="seen", ids=None),
        {"name": "price", "lookup": "item", "file": file, "key": "id", "value": "price"},
        {"name": "q", "bucket": "age", "quantiles": 3},
        {"name": "b", "bucket": "price", "boundaries": [2]},
        {"name": "x", "cross": ["user", "kind", "q"], "rows": 77},
        {"name": "y", "cross": ["seen", "tags"], "rows": 77, "ids": None},
        kinds={"user": "integers", "item": "text", "seen": "lists of text"},
    )
    made.boundaries["q"] = [20.0, 30.5]
    ages, seen = [20, None, 25.5, 50.0, 1], [["a", "zz"], [], ["b", None], ["a"], []]
    table = ITEMS.append_column("age", pa.array(ages, pa.float64())).append_column("seen", pa.array(seen))
    batch = made.batch(table)
    about = json.loads(json.dumps(describe_features(made)))
    page: dict[str, Any] = runpy.run_path(str(READER))
    found: dict[str, list[int]] = {name: [] for name in batch.sparse.names}
    dense: list[float] = []
    for sample in table.to_pylist():
        for feature in about:
            sample[feature["name"]] = page["derived"](feature, sample)
        for column in made.schema.sparse:
            encoding = encoding_of(made, column.name)["encoding"]
            value = sample[column.name]
            values = [] if value is None and column.ids is None else page["listed"](value)
            found[column.name] += [page["row_of"](encoding, v, column.rows) for v in values]
        dense.append(sample["price"] or 0.0)
    assert found == {name: ids(batch, name) for name in found}
    assert batch.dense is not None
    assert batch.dense[:, 0].tolist() == dense
    assert encoding_of(made, "n") == {"encoding": "hash", "values": "integers"}
    assert encoding_of(made, "user") == {"encoding": "hash", "values": "integers"}


def test_tables_that_json_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder(of_items(items(tmp_path / "items.parquet", id=pa.array([b"\xff", b"b", b"c", b"d"]))))
    with pytest.raises(
        SpecError,
        match=r"items\.parquet: got bytes that are not UTF-8",
    ):
        describe_features(made)
    monkeypatch.setattr("hotbed.data.encoding.encoder.MOST_KEYS", 3)
    with pytest.raises(SpecError, match=r"feature 'kind': got 4 keys in .*items\.parquet"):
        describe_features(made)
