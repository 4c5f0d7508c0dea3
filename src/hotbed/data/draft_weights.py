# pyright: reportUnknownParameterType=false
"""Draft weights of ids, columns that ``hotbed init --weights`` names: `weighted`."""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from hotbed.data.id_weights import check_id_weights
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean


def weighted(path: str, schema: Schema, weights: Mapping[str, str], sample: pa.Table) -> Schema:
    """Return a schema whose columns of ids have these weights; the sample has all columns that can be inputs."""
    names: list[str] = sample.column_names
    inputs = [column.name for column in schema.sparse]
    for ids, name in weights.items():
        for column in (ids, name):
            if column not in names:
                hint = did_you_mean(column, names)
                raise DataError(f"--weights names column '{column}', which {path} does not have in all files{hint}")
        if ids not in inputs:
            raise SpecError(
                f"--weights gives weights to '{ids}', which is no input of ids; there are {', '.join(inputs)}"
                f"{did_you_mean(ids, inputs)}"
            )
    columns = tuple(replace(column, weights=weights.get(column.name)) for column in schema.sparse)
    for column in columns:
        check_id_weights(column, sample.schema, path)
    return replace(schema, sparse=columns)
