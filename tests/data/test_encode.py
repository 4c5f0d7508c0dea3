"""Protects that there is one way from raw rows to a batch: of files, of Arrow tables however cut, of plain values."""

import decimal
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.batch import Batch
from hotbed.data import Encoder, Label, Numerical, ParquetSource, Scaling, Schema, SparseColumn
from hotbed.errors import DataError, SpecError

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): INT64,
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.bool_(): st.booleans(),
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.string_view(): TEXT,
    pa.binary(): st.binary(max_size=20),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["a", "b", ""]),
    pa.float64(): st.integers(-(2**53), 2**53).map(float) | st.just(float("nan")),
    pa.null(): st.none(),
}
NUMBERS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int64(): INT64,
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(10, 2): st.integers(-(10**9), 10**9).map(lambda n: decimal.Decimal(n).scaleb(-2)),
    pa.null(): st.none(),
}
LISTS = (pa.list_, pa.large_list, pa.list_view)
SCHEMA = Schema(
    sparse=(
        SparseColumn(name="one", rows=97),
        SparseColumn(name="many", rows=2**33, ids=None, pooling="mean"),
        SparseColumn(name="two", rows=50, ids=2, table="shared"),
        SparseColumn(name="other", rows=50, table="shared"),
    ),
    dense=("plain", "scaled", "raw"),
    labels=("click", "plan"),
    weight="weight",
    group="session",
    scaling=(Scaling(name="scaled", center=3.0, scale=2.0),),
    numericals=(Numerical(name="raw", rule="log", missing="indicator"),),
    positives=(Label("plan", "== gold"),),
)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Columns of `SCHEMA`, of any types that they may have, with nulls, in chunks."""
    n = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any], kind: pa.DataType, *, nulls: bool = True) -> pa.ChunkedArray:
        of = st.none() | values if nulls else values
        found = draw(st.lists(of, min_size=n, max_size=n))
        cut = draw(st.integers(0, n))
        return pa.chunked_array([pa.array(found[:cut], kind), pa.array(found[cut:], kind)])

    def scalar() -> tuple[pa.DataType, st.SearchStrategy[Any]]:
        return draw(st.sampled_from(list(SCALARS.items())))

    def lists(**size: int) -> pa.ChunkedArray:
        kinds = [kind for kind in SCALARS if not pa.types.is_floating(kind) and not pa.types.is_null(kind)]
        kind = draw(st.sampled_from(kinds))
        values = st.lists(st.none() | SCALARS[kind], **size)
        if pa.types.is_dictionary(kind) or pa.types.is_string_view(kind):
            kind = pa.string()
        fixed = size.get("min_size") == 2
        of = pa.list_(kind, 2) if fixed and draw(st.booleans()) else draw(st.sampled_from(LISTS))(kind)
        return column(values, of, nulls=not fixed)

    def number() -> pa.ChunkedArray:
        kind, values = draw(st.sampled_from(list(NUMBERS.items())))
        return column(values, kind)

    one, other = scalar(), scalar()
    return pa.table(
        {
            "unused": column(st.integers(0, 1).map(lambda x: {"x": x}), pa.struct({"x": pa.int8()})),
            "one": column(one[1], one[0]),
            "many": lists(max_size=4),
            "two": lists(min_size=2, max_size=2),
            "other": column(other[1], other[0]),
            "plain": number(),
            "scaled": number(),
            "raw": number(),
            "click": column(st.integers(0, 1), pa.int8(), nulls=False),
            "plan": column(st.sampled_from(["gold", "tin"]), pa.string(), nulls=False),
            "weight": column(st.floats(0, 8), pa.float64(), nulls=False),
            "session": column(*draw(st.sampled_from([(INT64, pa.int64()), (TEXT, pa.string())])), nulls=False),
        }
    )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables())
def test_a_table_becomes_what_its_file_does_whole_or_row_by_row(tmp_path: Path, table: pa.Table) -> None:
    file = tmp_path / "table.parquet"
    pq.write_table(table, file)
    source = ParquetSource(file, SCHEMA)
    stored = source.read("train", 0)
    encoder = Encoder(SCHEMA, id_kinds=source.id_kinds())
    assert_same(encoder.batch(table), stored)
    assert_same(encoder.batch(table.combine_chunks()), stored)
    dense = encoder.numericals(table)
    assert dense is not None and stored.dense is not None
    assert_same(replace(stored, dense=dense), stored)
    rows = [encoder.batch(table.slice(at, 1)) for at in range(len(table))]
    assert_same(Batch.concatenate(rows), stored)
    batches = [encoder.batch(part) for part in table.to_batches(max_chunksize=3)]
    assert_same(Batch.concatenate(batches), stored)
    again = Encoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert_same(again.batch(table), stored)


PLAIN = Schema(
    sparse=(
        SparseColumn(name="user", rows=1000),
        SparseColumn(name="code", rows=1000),
        SparseColumn(name="history", rows=1000, ids=None),
    ),
    dense=("price",),
)
KINDS = {"user": "integers", "code": "text", "history": "integers"}
ROWS: dict[str, list[Any]] = {
    "user": [5, None, True],
    "code": ["a", None, "ü"],
    "history": [[1, None], None, []],
    "price": [1.5, None, 3],
}


def plain() -> Encoder:
    return Encoder(PLAIN, id_kinds=KINDS).inputs


def test_plain_values_are_what_a_file_has(tmp_path: Path) -> None:
    stored = pa.table(
        {
            "user": pa.array([5, None, 1], pa.int32()),
            "code": ROWS["code"],
            "history": pa.array(ROWS["history"], pa.list_(pa.int16())),
            "price": pa.array(ROWS["price"], pa.float32()),
            "label": [0, 1, 0],
        }
    )
    pq.write_table(stored, tmp_path / "log.parquet")
    source = ParquetSource(tmp_path / "log.parquet", PLAIN)
    assert source.id_kinds() == KINDS
    found = plain().batch(plain().table({**ROWS, "unused": []}))
    assert_same(found, replace(source.read("train", 0), labels=None))
    assert [(c.name, c.kind, c.ids) for c in plain().columns()] == [
        ("user", "integers", 1),
        ("code", "text", 1),
        ("history", "integers", None),
        ("price", "numbers", 1),
    ]


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(0, 6))
def test_plain_rows_are_typed_alike_alone_and_together(data: st.DataObject, n: int) -> None:
    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(st.none() | values, min_size=n, max_size=n))

    numbers = st.floats() | st.integers(-(2**53), 2**53) | st.booleans()
    given_rows = {
        "user": column(st.integers(0, 2**64 - 1)),
        "code": column(TEXT),
        "history": column(st.lists(st.none() | INT64 | st.booleans(), max_size=3)),
        "price": column(numbers),
    }
    encoder = plain()
    whole = encoder.batch(encoder.table(given_rows))
    assert len(whole) == n
    alone = [encoder.batch(encoder.table({k: v[at : at + 1] for k, v in given_rows.items()})) for at in range(n)]
    if alone:
        assert_same(Batch.concatenate(alone), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": ["5", 1, 2]}, "column 'user', row 0: got '5'"),
        ({"user": [1, 2.5, 2]}, r"column 'user', row 1: got 2\.5"),
        ({"user": [1, 2.0**60, 2]}, r"column 'user', row 1: got 1\.152921504606847e\+18"),
        ({"user": [1, [2], 2]}, r"column 'user', row 1: got \[2\]"),
        ({"user": [1, 2, 1 << 64]}, "column 'user', row 2: got 18446744073709551616"),
        ({"user": [-1, 2, 1 << 63]}, "column 'user': got ids from -1 to 9,223,372,036,854,775,808"),
        ({"code": ["a", 7, "c"]}, "column 'code', row 1: got 7"),
        ({"code": ["a", True, "c"]}, "column 'code', row 1: got true"),
        ({"code": ["a", "\ud800", "c"]}, r"column 'code', row 1: got '\\ud800'"),
        ({"history": [[1], 2, None]}, "column 'history', row 1: got 2"),
        ({"history": [[1], ["2"], None]}, "column 'history', row 1: got '2'"),
        ({"price": [1, "2", 3]}, "column 'price', row 1: got '2'"),
        (
            {"price": [1, 10**400, 3]},
            "column 'price', row 1: got 100000000000000000000000000000000000000000000000000000000000 …",
        ),
        ({"price": [1, 2]}, "column 'price': got 2 values"),
        ({"price": "abc"}, "column 'price': got 'abc'"),
        ({"price": None}, "column 'price': got null"),
    ],
)
def test_values_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plain().table({**ROWS, **change})


def test_a_column_that_is_missing_is_named() -> None:
    rows = {"usr": ROWS["user"], **{name: values for name, values in ROWS.items() if name != "user"}}
    with pytest.raises(DataError, match="column 'user' of the model is missing"):
        plain().table(rows)


def test_ids_of_a_kind_that_is_not_known_are_either_and_never_both() -> None:
    schema = Schema(sparse=(SparseColumn(name="user", rows=10),), labels=())
    encoder = Encoder(schema)
    assert encoder.table({"user": [1, None]})["user"].type == pa.int64()
    assert encoder.table({"user": [None, "1"]})["user"].type == pa.large_string()
    with pytest.raises(DataError, match="column 'user': got text and integers"):
        encoder.table({"user": [1, "1"]})
    with pytest.raises(DataError, match=r"column 'user', row 0: got 1\.5"):
        encoder.table({"user": [1.5]})


def test_arrow_columns_of_another_kind_are_refused() -> None:
    encoder = plain()
    table = encoder.table(ROWS)
    with pytest.raises(DataError, match="the rows, column 'user': got text"):
        encoder.batch(table.set_column(0, "user", pa.array(["5", "6", "7"])))
    with pytest.raises(DataError, match="the rows: column 'price' is missing"):
        encoder.batch(table.drop_columns(["price"]))
    with pytest.raises(SpecError, match="the rows: column 'price': got string"):
        encoder.batch(table.set_column(3, "price", pa.array(["5", "6", "7"])))


def test_rows_without_hashing() -> None:
    encoder = Encoder(replace(PLAIN, labels=(), sparse=PLAIN.sparse[::2]), ids="raw")
    batch = encoder.batch(encoder.table({**ROWS, "user": [5, 6, 7], "history": [[1], None, [2, 3]]}))
    assert batch.sparse["user"].values.tolist() == [5, 6, 7]
    assert batch.sparse["history"].values.tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="the rows, column 'user': id null at row 1"):
        encoder.batch(encoder.table(ROWS))
    with pytest.raises(DataError, match="column 'user', row 0: got 'a'"):
        encoder.table({**ROWS, "user": ["a", None, None]})
