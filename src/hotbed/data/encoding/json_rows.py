"""Convert rows of plain values, as JSON has them, to Arrow columns: `typed_table`.

A value must be of the kind that its column had in training, because ``5`` and ``"5"`` are different ids. Booleans are
the integers 0 and 1, as in Parquet files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import cast

import pyarrow as pa

from hotbed.errors import DataError, did_you_mean

_EXACT = 1 << 53  # integers up to this are exact as floats
_LONGEST_SHOWN = 60
_WANTED = {"text": "text", "integers": "an integer", "numbers": "a number", "": "text or an integer"}
_TAKEN: Mapping[str, tuple[type, ...]] = {"text": (str,), "integers": (int,), "numbers": (int, float), "": (str, int)}
_TYPES = {"text": pa.large_string(), "integers": pa.int64(), "numbers": pa.float64()}


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
        name = column.name
        if name not in rows:
            raise DataError(
                f"there is no column '{name}', which the model needs; give it a value for each row, null where one is "
                f"missing{did_you_mean(name, rows)}"
            )
        values = rows[name]
        if not isinstance(values, list | tuple):
            raise DataError(f"column '{name}' is {_shown(values)}, must be a list with a value for each row")
        made[name] = _lists(column, values) if column.is_list else _array(column, values, range(len(values)))
        first = next(iter(made))
        if len(made[name]) != len(made[first]):
            raise DataError(
                f"column '{first}' has {len(made[first]):,} values and column '{name}' has {len(made[name]):,}; give "
                "each a value for each row"
            )
    return pa.table(made)


def _lists(column: InputColumn, values: Sequence[object]) -> pa.Array:
    if not set(map(type, values)) <= {list, tuple, type(None)}:
        row = next((row for row, value in enumerate(values) if not isinstance(value, list | tuple | None)), None)
        if row is not None:
            raise DataError(
                f"column '{column.name}', row {row:,}: {_shown(values[row])} is no list of ids, which this column has; "
                "write [ … ], also around one"
            )
    lists = [value or () for value in cast("Sequence[Sequence[object] | None]", values)]
    rows = chain.from_iterable([row] * len(value) for row, value in enumerate(lists))
    array = _array(column, [entry for value in lists for entry in value], rows)
    ends = pa.array(accumulate(map(len, lists), initial=0), pa.int64())
    return pa.LargeListArray.from_arrays(ends, array, mask=pa.array([value is None for value in values], pa.bool_()))


def _array(column: InputColumn, values: Sequence[object], rows: Iterable[int]) -> pa.Array:
    """Convert values ``[N]``, which stand in these rows."""
    kinds = set(map(type, values)) - {type(None)}
    kind = column.kind or ("text" if kinds == {str} else "integers")
    # Most columns are of one Python type, which Arrow converts at once; other values are checked one by one.
    if kinds <= ({float, int} if kind == "numbers" else {_TAKEN[kind][0]}):
        with suppress(pa.ArrowInvalid, OverflowError, UnicodeError):
            return pa.array(values, _TYPES[kind])
    checked = [_checked(column, row, value) for row, value in zip(rows, values, strict=True)]
    there = [value for value in checked if value is not None]
    whole = [int(value) for value in there if isinstance(value, int)]  # booleans are integers
    if there and not whole and kind != "numbers":
        return pa.array([None if value is None else str(value) for value in checked], pa.large_string())
    if kind != "numbers" and len(whole) < len(there):
        raise DataError(f"column '{column.name}' has text and integers, which are other ids; write one of them")
    low, high = min(whole, default=0), max(whole, default=0)
    fits = low >= -(1 << 63) and high < 1 << 63
    if kind == "numbers" and not (fits and len(whole) == len(there) and max(-low, high) > _EXACT):
        return pa.array([None if value is None else float(cast(float, value)) for value in checked], pa.float64())
    if not fits and low < 0:
        raise DataError(
            f"column '{column.name}' has ids from {low:,} to {high:,}, which no integers of 64 bits have both; write "
            "them as they were in training"
        )
    wide = pa.int64() if fits else pa.uint64()
    return pa.array([None if value is None else int(cast(int, value)) for value in checked], wide)


def _checked(column: InputColumn, row: int, value: object) -> object:
    """Return a value, whole floats of ids as integers; raise `DataError` unless it is of its column's kind."""
    kind, wanted = column.kind, _WANTED[column.kind]
    if isinstance(value, float) and value.is_integer() and kind in ("integers", "") and abs(value) <= _EXACT:
        value = int(value)  # pandas writes integers as floats where some are missing
    problem = ""
    if value is None:
        return None
    if isinstance(value, list | tuple | dict):
        problem = f"is no single value, which this column has; write {wanted} or null"
    elif not isinstance(value, _TAKEN[kind]):
        other = " ('5' and 5 are other ids)" if kind in ("text", "integers") else ""
        problem = f"is not {wanted}, as this column was in training{other}; write {wanted}"
    elif isinstance(value, str):
        with suppress(UnicodeEncodeError):
            value.encode()
            return value
        at = next(at for at, character in enumerate(value) if "\ud800" <= character <= "\udfff")
        problem = f"has half of a surrogate pair at {at}, which is no character; write UTF-8"
    elif kind == "numbers":
        with suppress(OverflowError):
            float(cast(float, value))
            return value
        problem = "is beyond the largest number, 1.8e308; write a smaller one, or null"
    elif not -(1 << 63) <= cast(int, value) < 1 << 64:
        problem = "has more than 64 bits, and ids have no more; write it as it was in training"
    if problem:
        raise DataError(f"column '{column.name}', row {row:,}: {_shown(value)} {problem}")
    return value


def _shown(value: object) -> str:
    """A value as JSON has it, cut where it is long."""
    is_constant = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_constant else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} …"
