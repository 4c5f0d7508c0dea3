# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Read label columns of Arrow tables: values from 0 to 1 as they are, others mapped by a condition of the schema."""

# pyarrow ships no types.

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data import arrow
from hotbed.data.columns import Label, Positive
from hotbed.data.schema import Schema
from hotbed.data.source import label_error
from hotbed.errors import DataError, SpecError

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
    condition = label.parsed()
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
    place: str,
    row_of: Callable[[int], str],
    *,
    check: bool = False,  # whether to refuse values outside 0 to 1 if there is no condition
) -> arrow.Array:
    """Labels ``[n]`` float32: mapped by the condition, or as they are; ``row_of`` names a position in errors."""
    refuse_null(column, name, place, row_of)
    if label is not None:
        return _mapped(column, name, label, place, row_of)
    labels = arrow.numbers(column)
    if check:
        bad = ~((labels >= 0) & (labels <= 1))
        if bad.any():
            raise _bad(column, name, int(bad.argmax()), place, row_of)
    return labels


def read_weights(column: pa.ChunkedArray, name: str, place: str, row_of: Callable[[int], str]) -> arrow.Array:
    """Sample weights ``[n]`` float32; a `DataError` names the first that is null, negative or not finite."""
    refuse_null(column, name, place, row_of)
    weights = arrow.numbers(column)
    bad = ~((weights >= 0) & (weights < np.inf))
    if bad.any():
        at = int(bad.argmax())
        raise DataError(
            f"{place}, column '{name}': weight {column[at].as_py()} at {row_of(at)}; weights must be finite and "
            "at least 0: mend the data, or leave `weight` out of the schema"
        )
    return weights


def weights_by_label(table: pa.Table, schema: Schema, place: str, row_of: Callable[[int], str]) -> arrow.Array | None:
    """Sample weights ``[n]``, or ``[n, T]`` where labels have their own; None where there are none."""
    found = {name: read_weights(table[name], name, place, row_of) for name in schema.weight_columns}
    if not schema.label_weights:
        return found[schema.weight] if schema.weight else None
    ones = np.ones(len(table), np.float32)
    return np.stack([ones if name is None else found[name] for name in schema.weights], axis=1)


def refuse_null(column: pa.ChunkedArray, name: str, place: str, row_of: Callable[[int], str]) -> None:
    """Raise `DataError` for a column with a null that must be complete."""
    if column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(
            f"{place}, column '{name}': null at {row_of(at)}; labels, weights and groups must be complete: drop such "
            "rows, or name another column"
        )


def _mapped(column: pa.ChunkedArray, name: str, label: Label, place: str, row_of: Callable[[int], str]) -> arrow.Array:
    """1 where the condition is true, else 0."""
    condition, values = label.parsed(), arrow.decode(column.combine_chunks())
    if arrow.is_text(values.type):
        wanted = pa.array(condition.values, pa.large_string())
        found = pc.is_in(pc.cast(values, pa.large_string()), value_set=wanted).to_numpy(zero_copy_only=False)
        return (found != (condition.comparison == "!=")).astype(np.float32)
    wanted = _numbers(name, values.type, condition)
    if pa.types.is_decimal(values.type):
        values = pc.cast(values, pa.float64(), safe=False)
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f" and (bad := np.isnan(numbers)).any():
        raise _bad(column, name, int(bad.argmax()), place, row_of)
    if condition.comparison == "in":
        found = np.logical_or.reduce([numbers == value for value in wanted])
    else:
        found = _COMPARED[condition.comparison](numbers, wanted[0])
    return np.asarray(found).astype(np.float32)


def _numbers(name: str, kind: pa.DataType, condition: Positive) -> list[int | float | bool]:
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


def read_group(column: pa.ChunkedArray, name: str, place: str, row_of: Callable[[int], str]) -> arrow.Array:
    """Group keys ``[n]`` int64: integers as they are, strings hashed."""
    refuse_null(column, name, place, row_of)
    values = arrow.decode(column.combine_chunks())
    if arrow.is_text(values.type):
        return arrow.hashes(values).view(np.int64)
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


def _bad(column: pa.ChunkedArray, name: str, at: int, place: str, row_of: Callable[[int], str]) -> DataError:
    try:
        value: object = column[at].as_py()
    except UnicodeDecodeError as error:  # Parquet's readers do not look whether text is UTF-8
        value = error.object
    return label_error(place, name, value, row_of(at), can_map=True)
