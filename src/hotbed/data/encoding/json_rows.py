"""Convert rows of plain JSON values to Arrow columns: `typed_table`.

Values must have the type of their column in training, because ``5`` and ``"5"`` are different ids. Booleans are the
integers 0 and 1, as in Parquet files.
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

_EXACT = 1 << 53  # larger integers are not exact as floats
_LONGEST_SHOWN = 60
_WANTED = {"text": "text", "integers": "an integer", "numbers": "a number", "": "text or an integer"}
_TAKEN: Mapping[str, tuple[type, ...]] = {"text": (str,), "integers": (int,), "numbers": (int, float), "": (str, int)}
_TYPES = {"text": pa.large_string(), "integers": pa.int64(), "numbers": pa.float64()}


@dataclass(frozen=True)
class InputColumn:
    """A stored column that model inputs are computed from."""

    name: str
    kind: str  # "text", "integers" or "numbers", or "" (text or integers) if all values in training were missing
    # 1: each row has a single value; a larger number: lists of this length; None: lists of any length
    ids: int | None = 1

    @property
    def is_list(self) -> bool:
        """Whether each row has a list of values."""
        return self.ids != 1


def typed_table(rows: Mapping[str, Sequence[object]], columns: Sequence[InputColumn]) -> pa.Table:
    """Convert values by column to an Arrow table. See `Encoder.table` for the errors."""
    made: dict[str, pa.Array] = {}
    for column in columns:
        name = column.name
        if name not in rows:
            raise DataError(
                f"column '{name}' of the model is missing. Add a list with one value per row (null if it is missing)"
                f"{did_you_mean(name, rows)}"
            )
        values = rows[name]
        if not isinstance(values, list | tuple):
            raise DataError(f"column '{name}': got {_format_json(values)}, expected a list with one value per row")
        made[name] = _list_array(column, values) if column.is_list else _array(column, values, range(len(values)))
        first = next(iter(made))
        if len(made[name]) != len(made[first]):
            raise DataError(
                f"column '{name}': got {len(made[name]):,} values, expected {len(made[first]):,} as in column '{first}'"
            )
    return pa.table(made)


def _list_array(column: InputColumn, values: Sequence[object]) -> pa.Array:
    for row, value in enumerate(values):
        if not isinstance(value, list | tuple | None):
            raise DataError(
                f"column '{column.name}', row {row:,}: got {_format_json(value)}, expected a list of ids. Write a list "
                "[ … ] even if the row has a single id"
            )
    lists = [value or () for value in cast("Sequence[Sequence[object] | None]", values)]
    rows = chain.from_iterable([row] * len(value) for row, value in enumerate(lists))
    array = _array(column, [entry for value in lists for entry in value], rows)
    ends = pa.array(accumulate(map(len, lists), initial=0), pa.int64())
    return pa.LargeListArray.from_arrays(ends, array, mask=pa.array([value is None for value in values], pa.bool_()))


def _array(column: InputColumn, values: Sequence[object], rows: Iterable[int]) -> pa.Array:
    """Convert values ``[N]`` to Arrow. ``rows`` has the row number of each value, for messages."""
    types = set(map(type, values)) - {type(None)}
    kind = column.kind or ("text" if types == {str} else "integers")
    # Arrow converts columns with one Python type at once. Values of several types are checked one by one.
    if types <= ({float, int} if kind == "numbers" else {_TAKEN[kind][0]}):
        with suppress(pa.ArrowInvalid, OverflowError, UnicodeError):
            return pa.array(values, _TYPES[kind])
    checked = [_check_value(column, row, value) for row, value in zip(rows, values, strict=True)]
    there = [value for value in checked if value is not None]
    whole = [int(value) for value in there if isinstance(value, int)]  # booleans are integers
    if there and not whole and kind != "numbers":
        return pa.array([None if value is None else str(value) for value in checked], pa.large_string())
    if kind != "numbers" and len(whole) < len(there):
        raise DataError(
            f"column '{column.name}': got text and integers, expected one type, because '5' and 5 are different ids"
        )
    low, high = min(whole, default=0), max(whole, default=0)
    fits = low >= -(1 << 63) and high < 1 << 63
    if kind == "numbers" and not (fits and len(whole) == len(there) and max(-low, high) > _EXACT):
        return pa.array([None if value is None else float(cast(float, value)) for value in checked], pa.float64())
    if not fits and low < 0:
        raise DataError(
            f"column '{column.name}': got ids from {low:,} to {high:,}, expected integers that are all int64 or all "
            "uint64. Write the ids as in training"
        )
    wide = pa.int64() if fits else pa.uint64()
    return pa.array([None if value is None else int(cast(int, value)) for value in checked], wide)


def _check_value(column: InputColumn, row: int, value: object) -> object:
    """Check that a value has the type of its column, and return the value. For ids, whole floats become integers."""
    kind, wanted = column.kind, _WANTED[column.kind]
    if isinstance(value, float) and value.is_integer() and kind in ("integers", "") and abs(value) <= _EXACT:
        value = int(value)  # pandas writes integers as floats if some are missing
    if value is None:
        return None
    if isinstance(value, list | tuple | dict):
        wanted += " or null"
    elif not isinstance(value, _TAKEN[kind]):
        wanted += " as in training" + " ('5' and 5 are different ids)" * (kind in ("text", "integers"))
    elif isinstance(value, str):
        with suppress(UnicodeEncodeError):
            value.encode()
            return value
        at = next(at for at, character in enumerate(value) if "\ud800" <= character <= "\udfff")
        wanted = f"UTF-8, without an unpaired surrogate at {at}"
    elif kind == "numbers":
        with suppress(OverflowError):
            float(cast(float, value))
            return value
        wanted = "a number of at most 1.8e308"
    elif not -(1 << 63) <= cast(int, value) < 1 << 64:
        wanted = "an id of at most 64 bits, as in training"
    else:
        return value
    raise DataError(f"column '{column.name}', row {row:,}: got {_format_json(value)}, expected {wanted}")


def _format_json(value: object) -> str:
    is_constant = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_constant else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} …"
