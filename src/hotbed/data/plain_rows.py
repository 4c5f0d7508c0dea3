# pyright: reportUnknownParameterType=false
"""Type rows of plain values, as JSON has them, so that they are encoded as stored columns are: `typed_table`.

A value must be of the kind that its column had in training: ``5`` and ``"5"`` are other ids. Booleans are the integers
0 and 1, as in Parquet files.
"""

# pyarrow ships no types.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import pyarrow as pa

from hotbed.errors import DataError, did_you_mean

_SIGNED, _UNSIGNED = range(-(1 << 63), 1 << 63), range(1 << 64)
_EXACT = 1 << 53  # integers up to this are exact as floats
_LONGEST_SHOWN = 60
_WANTED = {
    "text": "text",
    "integers": "an integer",
    "numbers": "a number",
    "": "text or an integer",
}


@dataclass(frozen=True)
class InputColumn:
    """A column that inputs are made of."""

    name: str
    kind: str  # text, integers or numbers; empty (text or integers) if all training values were missing
    # values per row: 1 is a single value, other numbers are lists of that length, None is lists of any length
    ids: int | None = 1

    @property
    def is_list(self) -> bool:
        """Whether each row has a list of values."""
        return self.ids != 1


def typed_table(rows: Mapping[str, Sequence[object]], columns: Sequence[InputColumn]) -> pa.Table:
    """Convert values by column to an Arrow table; see `Encoder.table` for the errors."""
    made: dict[str, pa.Array] = {}
    for column in columns:
        if column.name not in rows:
            hint = did_you_mean(column.name, rows)
            raise DataError(
                f"there is no column '{column.name}', which the model needs; give it a value for each row, null where "
                f"one is missing{hint}"
            )
        values: object = rows[column.name]
        if not isinstance(values, list | tuple):
            raise DataError(f"column '{column.name}' is {_shown(values)}, must be a list with a value for each row")
        made[column.name] = _array(column, cast("Sequence[object]", values))
    lengths = {name: len(array) for name, array in made.items()}
    first = next(iter(lengths), "")
    for name, length in lengths.items():
        if length != lengths[first]:
            raise DataError(
                f"column '{first}' has {lengths[first]:,} values and column '{name}' has {length:,}; give each a value "
                "for each row"
            )
    return pa.table(made)


def _array(column: InputColumn, values: Sequence[object]) -> pa.Array:
    flat: list[object] = []
    for row, value in enumerate(values):
        if not column.is_list:
            flat.append(_checked(column, row, value))
        elif value is not None:
            if not isinstance(value, list | tuple):
                raise DataError(
                    f"column '{column.name}', row {row:,}: {_shown(value)} is no list of ids, which this column has; "
                    "write [ … ], also around one"
                )
            flat.extend(_checked(column, row, entry) for entry in cast("Sequence[object]", value))
    kind = _type(column, flat)
    of_kind: type[Any] = str if pa.types.is_large_string(kind) else float if pa.types.is_float64(kind) else int
    array = pa.array([None if value is None else of_kind(value) for value in flat], kind)  # booleans are integers
    if not column.is_list:
        return array
    lists = cast("Sequence[Sequence[object] | None]", values)
    ends = accumulate((0 if entry is None else len(entry) for entry in lists), initial=0)
    missing = pa.array([entry is None for entry in lists], pa.bool_())
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), array, mask=missing)


def _checked(column: InputColumn, row: int, value: object) -> object:
    """Return a value, whole floats of ids as integers; raise `DataError` unless it is of its column's kind."""
    if value is None:
        return None
    kind = column.kind
    if isinstance(value, float) and value.is_integer() and kind in ("integers", "") and abs(value) <= _EXACT:
        value = int(value)  # what pandas writes of a column of integers in which some are missing
    is_text, is_whole = isinstance(value, str), isinstance(value, int)
    good = {
        "text": is_text,
        "integers": is_whole,
        "numbers": is_whole or isinstance(value, float),
        "": is_text or is_whole,
    }
    where = f"column '{column.name}', row {row:,}: {_shown(value)}"
    if not good[kind]:
        if isinstance(value, list | tuple | dict):
            raise DataError(f"{where} is no single value, which this column has; write {_WANTED[kind]} or null")
        other = " ('5' and 5 are other ids)" if kind in ("text", "integers") else ""
        raise DataError(f"{where} is not {_WANTED[kind]}, as this column was in training{other}; write {_WANTED[kind]}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has half of a surrogate pair at {error.start}, which is no character; write UTF-8"
            ) from None
    elif kind == "numbers":
        try:
            float(cast(float, value))
        except OverflowError:
            raise DataError(f"{where} is beyond the largest number, 1.8e308; write a smaller one, or null") from None
    elif cast(int, value) not in _SIGNED and cast(int, value) not in _UNSIGNED:
        raise DataError(f"{where} has more than 64 bits, and ids have no more; write it as it was in training")
    return value


def _type(column: InputColumn, flat: Sequence[object]) -> pa.DataType:
    """The Arrow type of values that were checked."""
    is_text = {isinstance(value, str) for value in flat if value is not None}
    if len(is_text) > 1:
        raise DataError(f"column '{column.name}' has text and integers, which are other ids; write one of them")
    if is_text == {True} or (not is_text and column.kind == "text"):
        return pa.large_string()
    whole = [value for value in flat if isinstance(value, int)]
    fits = not whole or (min(whole) in _SIGNED and max(whole) in _SIGNED)
    if column.kind == "numbers" and not (fits and whole and len(whole) == sum(value is not None for value in flat)):
        return pa.float64()
    if fits:
        return pa.int64()
    if min(whole) < 0:
        raise DataError(
            f"column '{column.name}' has ids from {min(whole):,} to {max(whole):,}, which no integers of 64 bits have "
            "both; write them as they were in training"
        )
    return pa.uint64()


def _shown(value: object) -> str:
    """A value as JSON has it, cut where it is long."""
    is_constant = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_constant else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} …"
