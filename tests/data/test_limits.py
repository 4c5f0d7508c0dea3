"""Protects that a schema's limits of bags reach the model, and are kept where a schema is."""

from __future__ import annotations

from typing import Any

import pytest

import hotbed as hb
from hotbed.data import SparseColumn
from hotbed.errors import SpecError


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
