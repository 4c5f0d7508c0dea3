import json
import math

import pytest

from hotbed.data import Scaling, Schema, SparseColumn
from hotbed.errors import SpecError
from hotbed.specs import Feature, Table

from data_cases import MIXED_SCHEMA  # isort: skip


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
        ({"sparse": [{"name": "a", "rows": -3}]}, "sparse column 'a': rows is -3, must be an integer of at least 1"),
        ({"sparse": [{"name": "a", "rows": "3"}]}, "rows is '3', must be an integer"),
        ({"sparse": [{"name": "a", "rows": True}]}, "rows is True, must be an integer"),
        ({"sparse": [A | {"ids": 0}]}, "ids is 0, must be at least 1, or None for ragged"),
        ({"sparse": [A | {"pooling": "max"}]}, "pooling is 'max', must be one of sum, mean"),
        ({"sparse": [A | {"row": 3}]}, r"sparse\[0\] has no key 'row'.*did you mean 'rows'"),
        ({"sparse": [{"name": "a"}]}, r"sparse\[0\] has no 'rows', which is required"),
        ({"sparse": [{"name": "", "rows": 1}]}, "need non-empty names"),
        ({"sparse": ["a"]}, r"sparse\[0\] is 'a', must be a mapping"),
        ({"sparse": []}, "needs at least one sparse column"),
        ({"sparse": "a"}, "sparse is 'a', must be a list"),
        ({}, "the schema has no 'sparse'"),
        ({"sparse": [A], "lables": ["y"]}, "the schema has no key 'lables'.*did you mean 'labels'"),
        ({"sparse": [A], "labels": "y"}, "labels is 'y', must be a list"),
        ({"sparse": [A], "dense": ["a"]}, "column 'a' is used 2 times"),
        ({"sparse": [A, A]}, "column 'a' is used 2 times"),
        ({"sparse": [A], "dense": [""]}, "empty name"),
        (
            {"sparse": [A | {"table": "t"}, {"name": "b", "rows": 4, "table": "t"}]},
            "columns 'a' and 'b' share table 't' but say it has 3 and 4 rows",
        ),
    ],
)
def test_bad_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schema.from_dict(values)


def test_a_string_is_not_a_list_of_columns() -> None:
    with pytest.raises(SpecError, match=r"dense is 'age', must be a list of columns; write \['age'\]"):
        Schema(sparse=(SparseColumn(name="a", rows=3),), dense="age")  # pyright: ignore[reportArgumentType]


def test_bad_dims() -> None:
    with pytest.raises(SpecError, match="dim names table 'item', which does not exist; did you mean 'items'"):
        MIXED_SCHEMA.tables({"item": 4, "user": 8})
    with pytest.raises(SpecError, match="dim leaves out table 'user'"):
        MIXED_SCHEMA.tables({"items": 4})
    with pytest.raises(SpecError, match="dim: got -1"):
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
        ({"dense": [{"name": "x", "scale": 0}]}, "numerical column 'x': scale is 0, must be above 0"),
        ({"dense": [{"name": "x", "scale": "1e3"}]}, "numerical column 'x': scale is '1e3', must be a finite number"),
        (
            {"dense": [{"name": "x", "center": math.inf}]},
            "numerical column 'x': center is inf, must be a finite number",
        ),
        ({"dense": [{"name": "x", "center": True}]}, "center is True, must be a finite number"),
        ({"dense": [{"name": "x", "centre": 1}]}, r"dense\[0\] has no key 'centre'.*did you mean 'center'"),
        ({"dense": [{"scale": 1}]}, r"dense\[0\] has no 'name', which is required"),
        ({"scaling": []}, "the schema has no key 'scaling'"),
        ({"dense": [10]}, r"dense\[0\] is 10, must be the name of a column; put it in quotes, as '10' or 'null'"),
        ({"dense": [{"name": None}]}, r"dense\[0\].name is None, must be the name"),
        ({"labels": [None]}, r"labels\[0\] is None, must be the name"),
        ({"weight": 5}, "weight is 5, must be the name"),
        ({"group": False}, "group is False, must be the name"),
        ({"sparse": [{"name": 10, "rows": 3}]}, r"sparse\[0\].name is 10, must be the name"),
        ({"sparse": [{"name": "a", "rows": 3, "table": 1}]}, r"sparse\[0\].table is 1, must be the name"),
    ],
)
def test_bad_scaling_and_names(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schema.from_dict({"sparse": [A]} | values)


def test_scaling_of_no_dense_column_and_twice() -> None:
    columns = (SparseColumn(name="a", rows=3),)
    with pytest.raises(SpecError, match="scaling names 'pricee', which is no dense column; did you mean 'price'"):
        Schema(sparse=columns, dense=("price",), scaling=(Scaling(name="pricee"),))
    with pytest.raises(SpecError, match="dense column 'price' has 2 scalings; give it one"):
        Schema(sparse=columns, dense=("price",), scaling=(Scaling(name="price"), Scaling(name="price", scale=2)))
