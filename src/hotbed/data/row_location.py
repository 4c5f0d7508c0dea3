"""Report bad values with their file, column and row, e.g. ``log.parquet, column 'age': got −1 at row 7; …``.

`RowLocation` holds the name of the file, and maps positions in an array to names of rows. This module also checks
labels and types of ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import DataError

ROWS = "the rows"
"""Name of rows that have no file, in messages."""


@dataclass(frozen=True)
class RowLocation:
    """The file or request that an array of values was read from. `refuse` reports bad values."""

    name: str = ROWS  # name of the file, row group or request
    row_of: Callable[[int], str] = "row {:,}".format  # returns the name of the row of the value at a position

    # Called with the column, the problem, the message and the number of bad values. None: `refuse` raises an error.
    report: Callable[[str, str, str, int], None] | None = None

    def refuse(
        self,
        column: str,  # "" if `name` includes the column
        problem: str,  # a few words that identify this fault (`hotbed inspect` counts values by fault)
        bad: NDArray[np.bool_],  # [N]
        values: Any,  # [N], an array of NumPy or Arrow
        shown: str,  # format string for the value
        fix: str | Callable[[object], str],  # the limit and the fix, or a function that returns both for a value
    ) -> None:
        """Raise `DataError` about the first bad value, if there is a bad value."""
        if not bad.any():
            return
        at = int(bad.argmax())
        value: Any = values[at]
        if hasattr(value, "as_py"):
            try:
                value = value.as_py()
            except UnicodeDecodeError as error:  # Parquet readers do not check that text is UTF-8
                value = error.object
        elif isinstance(value, np.generic):
            value = value.item()
        text = shown.format("null" if value is None else value)
        where = f"{self.name}, column '{column}'" if column else self.name
        message = f"{where}: {text} at {self.row_of(at)}; {fix if isinstance(fix, str) else fix(value)}"
        if self.report is None:
            raise DataError(message)
        self.report(column, problem, message, int(bad.sum()))

    def of_lists(self, lengths: NDArray[np.int64]) -> Self:
        """Return the location of the concatenated elements of lists. ``lengths [n]`` has the length of each list."""
        ends = np.cumsum(lengths)

        def row_of(at: int) -> str:
            return self.row_of(int(np.searchsorted(ends, at, side="right")))

        return replace(self, row_of=row_of)


def check_label_range(
    labels: NDArray[Any],  # [n]
    column: str,
    location: RowLocation,
    *,
    values: Any = None,  # [n], the stored labels, if they differ from ``labels``
    can_map: bool = False,  # whether the source maps labels by the schema's conditions
) -> None:
    """Raise `DataError` unless all labels are from 0 to 1."""

    def fix(value: Any) -> str:
        if value is None or value != value:  # NaN
            fix = "drop the samples without a label"
        elif not can_map:
            fix = "write the data again with labels 0 and 1, or use Parquet and map labels in the schema"
        else:
            condition = "'> 0'" if value == -1 else "'>= 4'"
            fix = f"map them by a condition, e.g. labels: [{{column: {column!r}, positive: {condition}}}] in the schema"
        return f"expected labels from 0 to 1: {fix}, or select a different column in `labels` of the schema"

    bad = ~((labels >= 0) & (labels <= 1))
    location.refuse(column, "labels out of range", bad, labels if values is None else values, "label {}", fix)


def find_label_ranges(parts: Iterable[tuple[RowLocation, str, NDArray[Any]]]) -> dict[str, tuple[float, float]]:
    """Check labels, and return the smallest and the largest label by column.

    Each part has a location, the name of a column, and labels ``[n]`` of this column.
    """
    found: dict[str, tuple[float, float]] = {}
    for location, column, labels in parts:
        check_label_range(labels, column, location)
        low, high = found.get(column, (math.inf, -math.inf))
        found[column] = min(low, float(labels.min())), max(high, float(labels.max()))
    return found


def check_id_type(what: str, column: str, found: str, trained: str) -> None:
    """Raise `DataError` if ids have a different type than in training, because their hashes would differ.

    Types are as in `Source.id_kinds`, or "" if the type is unknown.
    """
    if found and trained and found != trained:
        raise DataError(
            f"{what}, column '{column}': got {found}, expected {trained} as in training, because 5 and '5' are hashed "
            f"to different rows. Write the column as {trained}"
        )
