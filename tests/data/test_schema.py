"""Protects that schemas are read and written as dictionaries, and that mistakes in them are named."""

import json
import math
from typing import Any

import pytest
from data_cases import MIXED_SCHEMA

import hotbed as hb
from hotbed.data import Scaling, Schema, SparseColumn
from hotbed.errors import SpecError
from hotbed.specs import Feature, Table


def test_tables_and_features() -> None:
    assert MIXED_SCHEMA.tables(8) == [Table("user", 1000, 8), Table("items", 50, 8)]
    assert MIXED_SCHEMA.tables({"items": 4, "user": 8}) == [Table("user", 1000, 8), Table("items", 50, 4)]
    assert MIXED_SCHEMA.features(on_bad_id="hash") == [
        Feature("user", "user", on_bad_id="hash"),
        Feature("pair", "items", on_bad_id="hash"),
        Feature("history", "items", pooling="mean", on_bad_id="hash"),
    ]
    assert MIXED_SCHEMA.rows == {"user": 1000, "items": 50}


def test_json_round_trip() -> None:
    assert Schema.from_dict(json.loads(json.dumps(MIXED_SCHEMA.to_dict()))) == MIXED_SCHEMA


def test_from_dict_fills_in_defaults() -> None:
    schema = Schema.from_dict({"sparse": [{"name": "a", "rows": 3}], "dense": ["x"]})
    assert schema == Schema(sparse=(SparseColumn(name="a", rows=3),), dense=("x",), labels=("label",))


A = {"name": "a", "rows": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sparse": [{"name": "a", "rows": -3}]}, r"sparse\[0\]: sparse column 'a': rows: got -3"),
        ({"sparse": [{"name": "a", "rows": "3"}]}, r"sparse\[0\]: sparse column 'a': rows: got '3'"),
        ({"sparse": [{"name": "a", "rows": True}]}, r"sparse\[0\]: sparse column 'a': rows: got True"),
        ({"sparse": [A | {"ids": 0}]}, r"sparse\[0\]: sparse column 'a': ids: got 0"),
        ({"sparse": [A | {"pooling": "max"}]}, r"sparse\[0\]: sparse column 'a': pooling: got 'max'"),
        ({"sparse": [A | {"row": 3}]}, r"sparse\[0\]: key: got 'row'"),
        ({"sparse": [{"name": "a"}]}, r"sparse\[0\]: key 'rows' is missing"),
        (
            {"sparse": [{"name": "", "rows": 1}]},
            r"sparse\[0\]: sparse column '': got an empty column or table name",
        ),
        ({"sparse": ["a"]}, r"sparse\[0\]: got 'a'"),
        ({"sparse": []}, "sparse: got no column"),
        ({"sparse": "a"}, "sparse: got 'a'"),
        ({}, "the schema: key 'sparse' is missing"),
        ({"sparse": [A], "lables": ["y"]}, "the schema: key: got 'lables'"),
        ({"sparse": [A], "labels": "y"}, "labels: got 'y'"),
        ({"sparse": [A], "dense": ["a"]}, "columns of the schema: got 'a' 2 times"),
        ({"sparse": [A, A]}, "columns of the schema: got 'a' 2 times"),
        ({"sparse": [A], "dense": [""]}, "empty name"),
        (
            {"sparse": [A | {"table": "t"}, {"name": "b", "rows": 4, "table": "t"}]},
            "columns 'a' and 'b' of table 't': got rows 3 and 4",
        ),
    ],
)
def test_bad_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schema.from_dict(values)


def test_a_string_is_not_a_list_of_columns() -> None:
    with pytest.raises(SpecError, match="dense: got 'age'"):
        Schema(sparse=(SparseColumn(name="a", rows=3),), dense="age")  # pyright: ignore[reportArgumentType]


def test_bad_dims() -> None:
    with pytest.raises(SpecError, match="dim: got 'item'"):
        MIXED_SCHEMA.tables({"item": 4, "user": 8})
    with pytest.raises(SpecError, match="dim: table 'user' is missing"):
        MIXED_SCHEMA.tables({"items": 4})
    with pytest.raises(SpecError, match="dim: got -1, expected at least 1"):
        MIXED_SCHEMA.tables(-1)


# -- scaling -------------------------------------------------------------------------------------------------------


def test_scaled_columns_stand_beside_the_others() -> None:
    values = {"sparse": [A], "dense": ["x", {"name": "price", "center": 3, "scale": 0.5}, {"name": "y"}]}
    schema = Schema.from_dict(values)
    assert schema.dense == ("x", "price", "y")
    assert schema.scaling == (Scaling(name="price", center=3, scale=0.5), Scaling(name="y", center=0.0, scale=1.0))
    assert schema.to_dict()["dense"] == ["x", values["dense"][1], {"name": "y", "center": 0.0, "scale": 1.0}]
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dense": [{"name": "x", "scale": 0}]}, r"dense\[0\]: numerical column 'x': scale: got 0"),
        ({"dense": [{"name": "x", "scale": "1e3"}]}, r"dense\[0\]: numerical column 'x': scale: got '1e3'"),
        (
            {"dense": [{"name": "x", "center": math.inf}]},
            r"dense\[0\]: numerical column 'x': center: got inf",
        ),
        ({"dense": [{"name": "x", "center": True}]}, r"dense\[0\]: numerical column 'x': center: got True"),
        ({"dense": [{"name": "x", "centre": 1}]}, r"dense\[0\]: key: got 'centre'"),
        ({"dense": [{"scale": 1}]}, r"dense\[0\]: key 'name' is missing"),
        ({"scaling": []}, "the schema: key: got 'scaling'"),
        ({"dense": [10]}, r"dense\[0\]: got 10"),
        ({"dense": [{"name": None}]}, r"dense\[0\]: numerical column 'None': name: got None"),
        ({"labels": [None]}, r"labels\[0\]: got None"),
        ({"weight": 5}, "weight: got 5"),
        ({"group": False}, "group: got False"),
        ({"sparse": [{"name": 10, "rows": 3}]}, r"sparse\[0\]: sparse column '10': name: got 10"),
        ({"sparse": [{"name": "a", "rows": 3, "table": 1}]}, r"sparse\[0\]: sparse column 'a': table: got 1"),
    ],
)
def test_bad_scaling_and_names(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schema.from_dict({"sparse": [A]} | values)


def test_scaling_of_no_dense_column_and_twice() -> None:
    columns = (SparseColumn(name="a", rows=3),)
    with pytest.raises(SpecError, match="scaling: got 'pricee'"):
        Schema(sparse=columns, dense=("price",), scaling=(Scaling(name="pricee"),))
    with pytest.raises(SpecError, match="scaling: got 'price' 2 times"):
        Schema(sparse=columns, dense=("price",), scaling=(Scaling(name="price"), Scaling(name="price", scale=2)))


# -- limits of bags --------------------------------------------------------------------------------------------------


def schema_of(**limits: Any) -> hb.Schema:
    column = {"name": "history", "rows": 9, "ids": None, "pooling": "none", **limits}
    return hb.Schema.from_dict({"labels": ["click"], "sparse": [{"name": "item", "rows": 9}, column]})


def test_limits_of_columns_are_those_of_features() -> None:
    schema = schema_of(max_len=3, on_too_long="truncate")
    assert schema.features()[1] == hb.Feature("history", "history", "none", 3, on_too_long="truncate")
    assert schema.features("drop")[0] == hb.Feature("item", "item", on_bad_id="drop")
    assert hb.Schema.from_dict(schema.to_dict()) == schema
    ids = hb.Jagged.from_dict({"item": [[1], [2]], "history": [[1, 2, 3, 4], [5]]})
    model = hb.EmbeddingCollection(schema.tables(4), schema.features())
    vectors, mask = model(ids).padded("history")
    assert vectors.shape == (2, 3, 4)
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert model.truncated_ids == {"history": 1}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_len": 0}, "max_len: got 0"),
        ({"max_len": "3"}, "max_len: got '3'"),
        ({"max_len": 3, "on_too_long": "cut"}, "on_too_long: got 'cut'"),
        ({"on_too_long": "truncate"}, "on_too_long: got 'truncate' without max_len"),
    ],
)
def test_limits_that_cannot_be(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"sparse column 'history': {message}"):
        SparseColumn(name="history", rows=9, ids=None, **limits)
