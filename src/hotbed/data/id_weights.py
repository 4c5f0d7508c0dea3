# pyright: reportUnknownParameterType=false
"""Read the weights of ids, a column of numbers beside a column of ids: `weights_of_ids`.

Each id has one weight. It may be negative or 0, as ``torch.nn.EmbeddingBag`` takes them, but must be there and finite:
no value would say of a missing one how much its id counts.
"""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from hotbed.data import arrow
from hotbed.data.columns import SparseColumn
from hotbed.errors import DataError, SpecError


def check_id_weights(column: SparseColumn, fields: pa.Schema, what: str) -> None:
    """Raise `SpecError` unless the weights of a column are numbers, in lists where its ids are, in a file ``what``."""
    if column.weights is None:
        return
    ids, kind = (arrow.plain_type(fields.field(name).type) for name in (column.name, column.weights))
    inner = kind.value_type if arrow.is_list(kind) else kind
    where = f"{what}: column '{column.weights}' is {kind}"
    if not (arrow.is_number(inner) or pa.types.is_null(inner)):
        raise SpecError(f"{where}, must be numbers to be the weights of '{column.name}'{arrow.hint_for_struct(kind)}")
    if not (pa.types.is_null(ids) or pa.types.is_null(kind)) and arrow.is_list(ids) != arrow.is_list(kind):
        raise SpecError(f"{where}, and '{column.name}' is {ids}: give each id one weight, in a list where ids are one")


def per_row(array: pa.Array) -> arrow.Array:
    """Values of each row ``[n]`` int64: of a list its length, else 1."""
    return arrow.lengths(array) if arrow.is_list(array.type) else np.ones(len(array), np.int64)


def as_weights(array: pa.Array) -> arrow.Array:
    """Weights ``[N]`` float32, by way of float64, as JSON has numbers; NaN where one is null."""
    with np.errstate(over="ignore"):
        return arrow.wide_numbers(pa.chunked_array([array])).astype(np.float32)


def weights_of_ids(
    table: pa.Table,
    columns: Sequence[SparseColumn],
    bags: Sequence[tuple[arrow.Array, arrow.Array | None]],
    place: str,
    row_of: Callable[[int], str],
) -> arrow.Array:
    """Weights ``[N]`` float32 of the ids of all columns, 1 in those that have none.

    ``bags`` are the rows ``[N]`` of each column, and the number of ids per sample ``[n]`` where that varies.
    """
    found: list[arrow.Array] = []
    for column, (rows, lengths) in zip(columns, bags, strict=True):
        if column.weights is None:
            found.append(np.ones(len(rows), np.float32))
            continue
        each = np.full(len(table), column.ids or 0) if lengths is None else lengths
        found.append(read_id_weights(column, table[column.weights].combine_chunks(), each, place, row_of))
    return np.concatenate(found)


def read_id_weights(
    column: SparseColumn,
    array: pa.Array,  # stored weights ``[n]``, of a `hotbed.data.arrow.plain` type
    lengths: arrow.Array,  # ids per row ``[n]``
    place: str,
    row_of: Callable[[int], str],
) -> arrow.Array:
    """Weights ``[N]`` float32 of the ids of a column."""
    where, there = f"{place}, column '{column.weights}'", per_row(array)
    if arrow.is_list(array.type):
        array = array.flatten()
    elif pa.types.is_null(array.type) and column.ids != 1:
        there, array = np.zeros_like(there), array.slice(0, 0)  # lists, all of which are missing
    if (wrong := there != lengths).any():
        at = int(wrong.argmax())
        raise DataError(
            f"{where}: {there[at]:,} weights at {row_of(at)}, and column '{column.name}' has {lengths[at]:,} ids "
            "there; give each id one weight"
        )
    weights = as_weights(array)
    if (bad := ~np.isfinite(weights)).any():
        at = int(bad.argmax())
        row = row_of(int(np.searchsorted(np.cumsum(there), at, side="right")))
        value = array[at].as_py()
        raise DataError(
            f"{where}: {'null' if value is None else value} at {row}; the weight of an id must be a finite number as "
            f"float32 (negative ones and 0 are taken): mend the data, or leave out `weights` of '{column.name}'"
        )
    return weights
