# pyright: reportUnknownParameterType=false
"""Read numerical columns of Arrow tables, as a schema says: scaled, raw for a model that normalizes, or as they are."""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from hotbed.data import arrow
from hotbed.data.columns import Numerical
from hotbed.data.derived_columns import Columns
from hotbed.data.schema import Schema
from hotbed.errors import DataError


def read_numericals(table: Columns, schema: Schema, place: str, row_of: Callable[[int], str]) -> arrow.Array:
    """Dense columns ``[n, I]``: float32, or float64 if the model is to normalize some of them.

    Float64, because float32 cannot tell one second since 1970 from the next, and because layers of float32 refuse it:
    raw numbers that nobody normalizes do not pass for inputs. Columns of `Schema.scaling` come out scaled, those of
    `Schema.numericals` as they are stored with NaN for null, and others as they are with 0 for null.
    """
    scaling = {scaling.name: scaling for scaling in schema.scaling}
    numericals = {numerical.name: numerical for numerical in schema.numericals}
    columns: list[arrow.Array] = []
    for name in schema.dense:
        column = table[name]
        if name in numericals:
            columns.append(_raw(column, numericals[name], place, row_of))
        elif name in scaling:
            columns.append(arrow.scaled(column, scaling[name]))
        else:
            columns.append(np.where(column.is_null().to_numpy(), np.float32(0), arrow.numbers(column)))
    return np.stack(columns, axis=1, dtype=np.float64 if numericals else np.float32)


def _raw(column: pa.ChunkedArray, numerical: Numerical, place: str, row_of: Callable[[int], str]) -> arrow.Array:
    values = arrow.wide_numbers(column)
    if numerical.missing == "error" and (bad := ~np.isfinite(values)).any():
        at = int(bad.argmax())
        raise DataError(
            f"{place}, column '{numerical.name}': {_shown(column[at].as_py())} at {row_of(at)}, "
            "and the schema says missing: error; mend the data, or say what becomes of such values with "
            "missing: center or missing: indicator"
        )
    return values


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
