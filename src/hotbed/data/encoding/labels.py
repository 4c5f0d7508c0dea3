"""Read columns of labels, sample weights and groups.

Labels are numbers from 0 to 1, or a condition of the schema maps their values to 0 and 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import Condition, Label
from hotbed.data.row_location import RowLocation, check_label_range
from hotbed.data.schema import Schema
from hotbed.errors import SpecError

_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def check_label(name: str, t: pa.DataType, label: Label | None, what: str) -> None:
    """Raise `SpecError` unless labels can be made from values of type ``t``, by the condition of ``label`` if given.

    ``what`` names the file.
    """
    where = f"{what}: label column '{name}': got {t}"
    if not (arrow.is_text(t) or arrow.is_number(t)):
        raise SpecError(f"{where}, expected numbers, booleans or text")
    if label is None:
        if arrow.is_text(t):
            raise SpecError(
                f"{where} without a condition, expected numbers from 0 to 1. Map text to labels in the schema, e.g. "
                f"labels: [{{column: {name!r}, positive: '== yes'}}]"
            )
        return
    condition = label.condition()
    if not arrow.is_text(t):
        _parse_numbers(name, t, condition)
    elif condition.comparison not in ("==", "!=", "in"):
        raise SpecError(
            f"{where} with positive: {label.positive!r}, expected ==, != or in for text. Change `positive` in the "
            "schema, or write the column as numbers"
        )


def read_labels(
    column: pa.ChunkedArray,
    name: str,
    label: Label | None,
    location: RowLocation,
    *,
    check: bool = False,  # whether to refuse values outside 0 to 1 if there is no condition
) -> arrow.Array:
    """Return labels ``[n]`` float32. If there is a condition, labels are 1 where it is true and 0 elsewhere."""
    refuse_null(column, name, location, "labels")
    if label is not None:
        return _map_labels(column, name, label, location)
    labels = arrow.to_float32(column)
    if check:
        there = np.where(arrow.null_mask(column), 0, labels) if column.null_count else labels
        check_label_range(there, name, location, values=column, can_map=True)
    return labels


def read_weights(column: pa.ChunkedArray, name: str, location: RowLocation) -> arrow.Array:
    """Return sample weights ``[n]`` float32. They must be finite and at least 0."""
    weights = arrow.to_float32(column)
    fix = "expected a finite weight of at least 0. Correct the data, or remove `weight` from the schema"
    location.refuse(name, "bad weights", ~((weights >= 0) & (weights < np.inf)), column, "weight {}", fix)
    return weights


def weights_by_label(table: pa.Table, schema: Schema, location: RowLocation) -> arrow.Array | None:
    """Return sample weights ``[n]``. Return ``[n, T]`` if labels have own weight columns, and None without weights."""
    found = {name: read_weights(table[name], name, location) for name in schema.weight_columns}
    if not schema.label_weights:
        return found[schema.weight] if schema.weight else None
    ones = np.ones(len(table), np.float32)
    return np.stack([ones if name is None else found[name] for name in schema.weights], axis=1)


def refuse_null(column: pa.ChunkedArray, name: str, location: RowLocation, what: str) -> None:
    """Raise `DataError` if a column of labels or groups has a null."""
    if column.null_count:
        fix = f"{what} must not be missing. Drop these rows, or select a different column in the schema"
        location.refuse(name, f"missing {what}", arrow.null_mask(column), column, f"{what[:-1]} {{}}", fix)


def check_group(name: str, t: pa.DataType, what: str) -> None:
    """Raise `SpecError` unless values of this type can be group keys. ``what`` names the file."""
    if not (arrow.is_whole(t) or arrow.is_text(t)):
        raise SpecError(f"{what}: group column '{name}': got {t}, expected integers or strings")


def read_group(column: pa.ChunkedArray, name: str, location: RowLocation) -> arrow.Array:
    """Return group keys ``[n]`` int64. Strings are hashed."""
    refuse_null(column, name, location, "groups")
    values = arrow.decode_dictionary(column.combine_chunks())
    if arrow.is_text(values.type):
        return arrow.hash_values(values).view(np.int64)
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _map_labels(column: pa.ChunkedArray, name: str, label: Label, location: RowLocation) -> arrow.Array:
    condition, values = label.condition(), arrow.decode_dictionary(column.combine_chunks())
    if arrow.is_text(values.type):
        wanted = pa.array(condition.values, pa.large_string())
        found = pc.is_in(pc.cast(values, pa.large_string()), value_set=wanted).to_numpy(zero_copy_only=False)
        return (found != (condition.comparison == "!=")).astype(np.float32)
    wanted = _parse_numbers(name, values.type, condition)
    if pa.types.is_decimal(values.type):
        values = pc.cast(values, pa.float64(), safe=False)
    elif pa.types.is_boolean(values.type):
        values = values.fill_null(False)  # nulls get here only in `hotbed inspect`, which counts them and continues
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f" and (missing := np.isnan(numbers)).any():
        only_nan = np.where(missing & ~arrow.null_mask(column), np.nan, 0)
        check_label_range(only_nan, name, location, values=column, can_map=True)
    if condition.comparison == "in":
        found = np.logical_or.reduce([numbers == value for value in wanted])
    else:
        found = _COMPARED[condition.comparison](numbers, wanted[0])
    return np.asarray(found).astype(np.float32)


def _parse_numbers(name: str, t: pa.DataType, condition: Condition) -> list[int | float | bool]:
    """Parse the values of a condition: as booleans if the label column's type ``t`` is boolean, else as numbers."""
    is_truth = pa.types.is_boolean(t.value_type if pa.types.is_dictionary(t) else t)
    found: list[int | float | bool] = []
    for text in condition.values:
        value = _TRUTH.get(text.lower()) if is_truth else _parse_number(text)
        if value is None:
            wanted = "true or false" if is_truth else "a number"
            raise SpecError(f"label column '{name}' of {t}: positive: got {text!r}, expected {wanted}")
        found.append(value)
    return found


def _parse_number(text: str) -> int | float | None:
    for parse in (int, float):
        with suppress(ValueError):
            return None if (value := parse(text)) != value else value
    return None
