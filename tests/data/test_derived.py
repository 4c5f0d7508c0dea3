"""Protects what derived inputs are: crosses and buckets, the same from files and plain values."""

import json
import runpy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from derived_cases import ITEMS, USERS, crossed, encoder, ids, items, of_items, row_of, schema
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data import Encoder, Numerical, ParquetSource, Schema
from hotbed.data.encoding.encoder import describe_features, encoding_of
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.hashing import mix
from hotbed.errors import DataError, SpecError
from hotbed.testing.source_contract import assert_same

# -- crosses ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.none() | st.integers(-5, 5), st.none() | st.text(max_size=3)), min_size=1, max_size=20))
def test_a_cross_hashes_all_values(pairs: list[tuple[int | None, str | None]]) -> None:
    table = pa.table({"user": pa.array([a for a, _ in pairs], pa.int64()), "item": [b for _, b in pairs]})
    table = table.set_column(1, "item", table["item"].cast(pa.string()))
    batch = encoder({"name": "both", "cross": ["user", "item"], "rows": 10_007}).batch(table)
    assert ids(batch, "both") == [crossed(pair, 10_007) for pair in pairs]
    assert batch.sparse["both"].values.dtype == torch.int32


def test_each_value_of_a_list_meets_each_of_the_others() -> None:
    rows: list[tuple[Any, Any, Any]] = [
        (1, ["a", "b"], [7, 8, 9]),
        (None, ["a"], [7]),
        (2, None, [7]),
        (3, [], [7]),
        (4, ["c", None], [5]),
    ]
    table = pa.table(
        {
            "user": [u for u, _, _ in rows],
            "tags": pa.array([t for _, t, _ in rows], pa.list_(pa.string())),
            "seen": pa.array([s for _, _, s in rows], pa.list_(pa.int8())),
        }
    )
    made = encoder({"name": "x", "cross": ["user", "tags", "seen"], "rows": 999, "ids": None}).batch(table)
    bags = made.sparse["x"]
    assert bags.offsets is not None
    expected = [[crossed(of, 999) for of in product([u], t or [], s)] for u, t, s in rows]
    assert bags.offsets.diff().tolist() == [6, 1, 0, 0, 2]
    assert ids(made, "x") == [row for bag in expected for row in bag]
    two = encoder({"name": "x", "cross": ["user", "tags"], "rows": 999, "ids": 2})
    assert ids(two.batch(table.slice(0, 1)), "x") == [crossed((1, tag), 999) for tag in "ab"]
    with pytest.raises(DataError, match="the rows, column 'x': 1 ids at row 1"):
        two.batch(table)


def test_too_many_pairs_are_refused() -> None:
    table = pa.table({"user": [1], "a": [list(range(100))], "b": [list(range(50))]})
    made = encoder({"name": "x", "cross": ["a", "b"], "rows": 10, "ids": None})
    with pytest.raises(DataError, match="the rows, column 'x': 5,000 pairs of a cross at row 0"):
        made.batch(table)


# -- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_is_the_interval_of_a_number() -> None:
    made = encoder({"name": "group", "bucket": "age", "boundaries": [18, 25, 40]})
    assert made.schema.rows == {"user": 1000, "group": 5}
    ages = [17.9, 18, 24, 25, 39.9, 40, 1e300, -float("inf"), float("inf"), None, float("nan")]
    table = pa.table({"user": [1] * 11, "age": pa.array(ages, pa.float64())})
    assert ids(made.batch(table), "group") == [1, 2, 2, 3, 3, 4, 4, 1, 4, 0, 0]
    whole = pa.table({"user": [1] * 3, "age": pa.array([18, None, 2**62], pa.int64())})
    assert ids(made.batch(whole), "group") == [2, 0, 4]


def write_ages(path: Path, ages: list[float | None]) -> Path:
    n = len(ages)
    table = pa.table({"user": list(range(n)), "age": pa.array(ages, pa.float64()), "label": [0, 1] * (n // 2)})
    pq.write_table(table, path, row_group_size=64)
    return path


def test_quantiles_are_measured_once_over_what_is_trained_on(tmp_path: Path) -> None:
    ages: list[float | None] = [float(i) for i in range(256)]
    file = write_ages(tmp_path / "log.parquet", ages + [1e6] * 64)
    features = {"labels": ["label"], "sparse": [USERS], "features": [{"name": "q", "bucket": "age", "quantiles": 4}]}
    source = ParquetSource(file, features, valid_fraction=0.2)
    fewer = source.only(["q"])
    with pytest.raises(SpecError, match="the quantiles of feature 'q' are not measured"):
        source.read("train", 0)
    with pytest.raises(SpecError, match="quantiles of feature 'q' are not measured"):
        source.encoder.to_dict()
    seen: list[tuple[int, int]] = []
    source.measure(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (256, 256)
    assert source.encoder.boundaries == {"q": [63.75, 127.5, 191.25]}
    rows = torch.cat([source.read("train", i).sparse["q"].values for i in range(4)])
    assert rows.tolist() == [1 + i // 64 for i in range(256)]
    assert torch.equal(fewer.read("train", 3).sparse["q"].values, rows[192:])
    source.measure(progress=lambda *_: pytest.fail("measured again"))
    again = Encoder.from_dict(json.loads(json.dumps(source.encoder.inputs.to_dict())))
    assert ids(again.batch(pa.table({"user": [1, 2], "age": [100.0, None]})), "q") == [2, 0]


@pytest.mark.parametrize(("ages", "boundaries"), [([None] * 4, []), ([7.0] * 4, []), ([1.0, 1.0, 1.0, 9.0], [3.0])])
def test_quantiles_of_few_values(tmp_path: Path, ages: list[float | None], boundaries: list[float]) -> None:
    file = write_ages(tmp_path / "log.parquet", ages)
    made = schema({"name": "q", "bucket": "age", "quantiles": 4})
    source = ParquetSource(file, made)
    source.measure()
    assert source.encoder.boundaries["q"] == boundaries
    assert 0 <= int(source.read("train", 0).sparse["q"].values.max()) < made.rows["q"]


# -- what a schema says ------------------------------------------------------------------------------------------------


def test_a_schema_says_how_columns_are_made_and_back(tmp_path: Path) -> None:
    file = items(tmp_path / "items.parquet")
    made = schema(
        of_items(file, table="kinds"),
        {"name": "price", "lookup": "item", "file": file, "key": "id", "value": "price"},
        {"name": "old", "lookup": "item", "file": file, "key": "id", "value": "price", "center": 2.0, "scale": 3.0},
        {"name": "q", "bucket": "price", "quantiles": 16, "pooling": "mean"},
        {"name": "b", "bucket": "age", "boundaries": [1, 2.5], "table": "b"},
        {"name": "x", "cross": ["user", "q"], "rows": 50, "table": "kinds2"},
        dense=["age", {"name": "n", "rule": "log"}],
    )
    assert [c.name for c in made.sparse] == ["user", "kind", "q", "b", "x"]
    assert made.dense == ("age", "n", "price", "old")
    assert made.rows == {"user": 1000, "kinds": 100, "q": 17, "b": 4, "kinds2": 50}
    again = Schema.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert "features" not in schema().to_dict()
    only = made.only(["x"])
    assert [d.name for d in only.derived] == ["price", "old", "q", "x"]


CROSS = {"name": "x", "cross": ["user", "item"], "rows": 10}
BUCKET: dict[str, Any] = {"name": "b", "bucket": "age"}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([{"name": "x", "rows": 5}], r"features\[0\]: got \{'name': 'x', 'rows': 5\}"),
        ([CROSS | {"bucket": "age"}], "one of `cross`, `bucket` and `lookup`"),
        (["x"], r"features\[0\]: got 'x'"),
        ([CROSS | {"name": 5}], r"features\[0\]: name: got 5"),
        ([CROSS | {"row": 5}], r"features\[0\] \('x', a cross\): key: got 'row'"),
        ([{"name": "x", "cross": ["user", "item"]}], r"features\[0\] \('x', a cross\): key 'rows' is missing"),
        ([CROSS | {"cross": ["user"]}], "feature 'x': c"),
        ([CROSS | {"cross": ["user", "user"]}], "feature 'x': c"),
        ([CROSS | {"cross": "user"}], "feature 'x': c"),
        ([CROSS, CROSS], "columns of the schema: got 'x' 2 times"),
        ([CROSS | {"name": "user"}], "columns of the schema: got 'user' 2 times"),
        ([CROSS | {"cross": ["user", "click"]}], "feature 'x' is computed from the label or weight 'click'"),
        ([CROSS | {"cross": ["user", "later"]}, CROSS | {"name": "later"}], "feature 'x' is computed from 'later'"),
        ([CROSS, CROSS | {"name": "y", "cross": ["x", "user"]}], "feature 'y' is computed from the cross 'x'"),
        ([BUCKET], "feature 'b': got boundaries None and quantiles None"),
        ([BUCKET | {"quantiles": 2, "boundaries": [1]}], r"feature 'b': got boundaries \[1\] and quantiles 2"),
        *(([BUCKET | {"boundaries": of}], "feature 'b': boundaries: got") for of in ([2, 1], [], ["1"])),
        ([BUCKET | {"quantiles": 1}], "feature 'b': quantiles: got 1"),
        ([BUCKET | {"bucket": 3, "quantiles": 4}], r"features\[0\]: bucket: got 3"),
        (
            [BUCKET | {"quantiles": 4}, BUCKET | {"name": "c", "bucket": "b", "quantiles": 2}],
            "'c' is computed from the bucket",
        ),
        ([of_items("f") | {"rule": "log"}], r"features\[0\] \('kind'\): got rows, rule"),
        ([{k: v for k, v in of_items("f").items() if k != "rows"} | {"ids": 2}], r"features\[0\] \('kind'\): got ids"),
        ([of_items("f") | {"lookup": 3}], r"features\[0\]: lookup: got 3"),
        ([of_items("f") | {"key": 3}], "feature 'kind': key: got 3"),
    ],
)
def test_features_that_cannot_be(features: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        schema(*features, labels=["click"])


@pytest.mark.parametrize(
    ("feature", "table", "message"),
    [
        (CROSS, {"user": [1], "item": [1.5]}, r"the rows, column 'item': id 1\.5 at row 0"),
        (CROSS, {"user": [1], "item": [{"x": 1}]}, "feature 'x': column 'item': got struct<x: int64>"),
        (CROSS | {"ids": None}, {"user": [1], "item": [1]}, "got one value per sample, expected a list of any"),
        (CROSS, {"user": [1]}, "the rows: column 'item' is missing"),
        (CROSS, {"user": [1], "item": [1], "x": [2]}, "the rows: column 'x' has the name of a feature of the schema"),
        (BUCKET | {"boundaries": [1]}, {"user": [1], "age": ["a"]}, "feature 'b': column 'age': got"),
        (BUCKET | {"boundaries": [1]}, {"user": [1], "age": [[1]]}, "feature 'b': column 'age': got"),
    ],
)
def test_columns_that_cannot_be_used(feature: dict[str, Any], table: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        encoder(feature).batch(pa.table(table))


def test_kinds_of_ids_are_those_of_training(tmp_path: Path) -> None:
    stored = pa.table({"user": [1, 2], "item": ["a", "b"], "seen": [["a"], ["b", "c"]], "label": [0, 1]})
    pq.write_table(stored, tmp_path / "log.parquet")
    made = Schema.from_dict(
        {
            "sparse": [USERS],
            "features": [CROSS, {"name": "y", "cross": ["seen", "user"], "rows": 10, "ids": None}],
        }
    )
    source = ParquetSource(tmp_path / "log.parquet", made)
    assert source.id_kinds() == {"user": "integers", "item": "text", "seen": "lists of text"}
    inputs = source.encoder.inputs
    table = inputs.table({"user": [1, 2], "item": ["a", "b"], "seen": [["a"], ["b", "c"]]})
    assert_same(inputs.batch(table), inputs.batch(stored))
    empty = inputs.table({"user": [1], "item": [None], "seen": [None]})
    assert ids(inputs.batch(empty), "y") == []
    unknown = pa.table({"user": [1], "item": [None], "seen": pa.nulls(1)})
    assert_same(inputs.batch(unknown), inputs.batch(empty))
    with pytest.raises(DataError, match="the rows, column 'seen': got text"):
        inputs.batch(stored.set_column(2, "seen", pa.array(["a", "b"])))
    with pytest.raises(DataError, match="column 'item', row 0: got 5"):
        inputs.table({"user": [1], "item": [5], "seen": [None]})


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
    ("columns", "change", "error", "message"),
    [
        ({"id": ["a", "b", "a", "c"]}, {}, DataError, "feature 'kind': FILE, column 'id': got key 'a' twice"),
        ({"id": [1, 2, 2, 3]}, {}, DataError, "feature 'kind': FILE, column 'id': got key 2 twice"),
        ({}, {"key": "ids"}, DataError, "feature 'kind': column of FILE: got 'ids'"),
        ({"id": [1, 2, 3, 4]}, {}, DataError, "feature 'kind': column 'item' of the rows: got text"),
        ({"id": [0.5, 1, 2, 3]}, {}, DataError, r"feature 'kind': FILE, column 'id': id 0\.5 at key 0"),
        ({"id": [[1], [2], [3], [4]]}, {}, SpecError, "feature 'kind': FILE, column 'id': got list<element: int64>"),
        ({"kind": [{"x": 1}] * 4}, {}, SpecError, "feature 'kind': FILE, column 'kind': got struct<x: int64>"),
        ({"kind": [[1.5]] * 4}, {}, SpecError, "feature 'kind': FILE, column 'kind': got list<element: double>"),
        ({}, {"value": "price"}, DataError, r"the rows, column 'kind': id 1\.5 at row 0"),
        ({}, {"ids": 3}, SpecError, "feature 'kind': got one value per sample"),
        ({}, {"rows": 1}, SpecError, "feature 'kind': rows: got 1"),
    ],
)
def test_tables_that_do_not_fit(
    tmp_path: Path, columns: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    file = items(tmp_path / "items.parquet", **columns)
    with pytest.raises(error, match=message.replace("FILE", r".*items\.parquet")):
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
