"""Read label columns of Arrow tables: values from 0 to 1 as they are, others mapped by a condition of the schema."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
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


def check_label(name: str, kind: pa.DataType, label: Label | None, what: str) -> None:
    """Raise `SpecError` unless a column of this type, of the file ``what``, can be a label, by its condition if any."""
    where = f"{what}: label column '{name}'"
    if label is None:
        if arrow.is_text(kind):
            raise SpecError(
                f"{where} is {kind}, and labels are numbers from 0 to 1; say which values are positive: "
                f"labels: [{{column: {name!r}, positive: '== yes'}}] in the schema"
            )
        if not arrow.is_number(kind):
            raise SpecError(f"{where} is {kind}, must be numbers, booleans or text")
        return
    condition = label.condition()
    if arrow.is_text(kind):
        if condition.comparison not in ("==", "!=", "in"):
            raise SpecError(
                f"{where} is {kind}, and text is compared by ==, != and in; positive is "
                f"{label.positive!r}: give one of these, or write the column as numbers"
            )
    elif arrow.is_number(kind):
        _numbers(name, kind, condition)
    else:
        raise SpecError(f"{where} is {kind}, must be numbers, booleans or text")


def read_labels(
    column: pa.ChunkedArray,
    name: str,
    label: Label | None,
    place: RowLocation,
    *,
    check: bool = False,  # whether to refuse values outside 0 to 1 if there is no condition
) -> arrow.Array:
    """Return labels ``[n]`` float32: mapped by the condition, or as they are."""
    refuse_null(column, name, place, "labels")
    if label is not None:
        return _mapped(column, name, label, place)
    labels = arrow.to_float32(column)
    if check:
        there = np.where(arrow.null_mask(column), 0, labels) if column.null_count else labels
        check_label_range(there, name, place, values=column, can_map=True)
    return labels


def read_weights(column: pa.ChunkedArray, name: str, place: RowLocation) -> arrow.Array:
    """Return sample weights ``[n]`` float32, which must be finite and at least 0."""
    weights = arrow.to_float32(column)
    fix = "weights must be finite and at least 0: mend the data, or leave `weight` out of the schema"
    place.refuse(name, "bad weights", ~((weights >= 0) & (weights < np.inf)), column, "weight {}", fix)
    return weights


def weights_by_label(table: pa.Table, schema: Schema, place: RowLocation) -> arrow.Array | None:
    """Return sample weights ``[n]``, or ``[n, T]`` where labels have their own; None where there are none."""
    found = {name: read_weights(table[name], name, place) for name in schema.weight_columns}
    if not schema.label_weights:
        return found[schema.weight] if schema.weight else None
    ones = np.ones(len(table), np.float32)
    return np.stack([ones if name is None else found[name] for name in schema.weights], axis=1)


def refuse_null(column: pa.ChunkedArray, name: str, place: RowLocation, what: str) -> None:
    """Raise `DataError` for a null in a column of labels or groups, which must be complete."""
    if column.null_count:
        fix = f"{what} must be there: drop these rows, or name another column"
        place.refuse(name, f"missing {what}", arrow.null_mask(column), column, f"{what[:-1]} {{}}", fix)


def _mapped(column: pa.ChunkedArray, name: str, label: Label, place: RowLocation) -> arrow.Array:
    """1 where the condition is true, else 0."""
    condition, values = label.condition(), arrow.decode_dictionary(column.combine_chunks())
    if arrow.is_text(values.type):
        wanted = pa.array(condition.values, pa.large_string())
        found = pc.is_in(pc.cast(values, pa.large_string()), value_set=wanted).to_numpy(zero_copy_only=False)
        return (found != (condition.comparison == "!=")).astype(np.float32)
    wanted = _numbers(name, values.type, condition)
    if pa.types.is_decimal(values.type):
        values = pc.cast(values, pa.float64(), safe=False)
    elif pa.types.is_boolean(values.type):
        values = values.fill_null(False)  # `hotbed inspect` counts nulls, and goes on
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f" and (missing := np.isnan(numbers)).any():
        check_label_range(
            np.where(missing & ~arrow.null_mask(column), np.nan, 0), name, place, values=column, can_map=True
        )
    if condition.comparison == "in":
        found = np.logical_or.reduce([numbers == value for value in wanted])
    else:
        found = _COMPARED[condition.comparison](numbers, wanted[0])
    return np.asarray(found).astype(np.float32)


def _numbers(name: str, kind: pa.DataType, condition: Condition) -> list[int | float | bool]:
    """What numbers are compared with; a `SpecError` names what is none."""
    is_truth = pa.types.is_boolean(kind.value_type if pa.types.is_dictionary(kind) else kind)
    found: list[int | float | bool] = []
    for text in condition.values:
        value = _TRUTH.get(text.lower()) if is_truth else _number(text)
        if value is None:
            wanted = "true and false" if is_truth else "numbers"
            raise SpecError(f"label column '{name}' is {kind}, which is compared with {wanted}; positive has {text!r}")
        found.append(value)
    return found


def check_group(name: str, kind: pa.DataType, what: str) -> None:
    """Raise `SpecError` unless a column of this type, of the file ``what``, can group samples."""
    if not (arrow.is_whole(kind) or arrow.is_text(kind)):
        raise SpecError(f"{what}: group column '{name}' is {kind}, must be integers or strings")


def read_group(column: pa.ChunkedArray, name: str, place: RowLocation) -> arrow.Array:
    """Return group keys ``[n]`` int64: integers as they are, strings hashed."""
    refuse_null(column, name, place, "groups")
    values = arrow.decode_dictionary(column.combine_chunks())
    if arrow.is_text(values.type):
        return arrow.hash_values(values).view(np.int64)
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return None if value != value else value
