"""Name where values are stored, for messages: `Place`. Check labels and kinds of ids, and name the first bad value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import DataError

ROWS = "the rows"
"""Name of rows that come from no file, in messages."""


def place_of_row(at: int) -> str:
    """Return the name of a row that comes from no file."""
    return f"row {at:,}"


@dataclass(frozen=True)
class Place:
    """Where values are stored, for messages. `refuse` raises `DataError` at the first bad value."""

    name: str = ROWS  # file, row group or request
    row_of: Callable[[int], str] = place_of_row

    def refuse(
        self,
        column: str,  # empty if the name of the place includes it
        problem: str,  # one or two words, equal for all values with this fault
        bad: NDArray[np.bool_],  # [N]
        values: Any,  # [N], an array of NumPy or Arrow
        shown: str,  # format of a value
        fix: str | Callable[[object], str],  # the limit and the fix, or a function that returns them for a value
    ) -> None:
        """Raise `DataError` if any value is bad; the message names the first."""
        if bad.any():
            raise DataError(self.message(column, int(bad.argmax()), values, shown, fix))

    def message(self, column: str, at: int, values: Any, shown: str, fix: str | Callable[[object], str]) -> str:
        """Describe the value at a position."""
        value: Any = values[at]
        if hasattr(value, "as_py"):
            try:
                value = value.as_py()
            except UnicodeDecodeError as error:  # Parquet's readers do not check that text is UTF-8
                value = error.object
        elif isinstance(value, np.generic):
            value = value.item()
        text = shown.format("null" if value is None else value)
        where = f"{self.name}, column '{column}'" if column else self.name
        return f"{where}: {text} at {self.row_of(at)}; {fix if isinstance(fix, str) else fix(value)}"

    def of_lists(self, lengths: NDArray[np.int64]) -> Self:
        """The place of the values of lists with these lengths ``[n]``."""
        ends = np.cumsum(lengths)

        def row_of(at: int) -> str:
            return self.row_of(int(np.searchsorted(ends, at, side="right")))

        return replace(self, row_of=row_of)


def refuse_labels(
    labels: NDArray[Any],  # [n]
    column: str,
    place: Place,
    *,
    values: Any = None,  # [n], the labels as they are stored, if that differs
    can_map: bool = False,  # whether the source maps labels as its schema says
) -> None:
    """Raise `DataError` unless all labels are from 0 to 1."""

    def fix(value: Any) -> str:
        if value is None or value != value:  # NaN
            fix = "it is missing, so drop these samples"
        elif not can_map:
            fix = "this format stores them as 0 and 1; write it anew, or use Parquet, whose labels can be mapped"
        else:
            condition = "'> 0'" if value == -1 else "'>= 4'"
            when = "where they are -1 and 1" if value == -1 else "say from which value on a sample is positive"
            fix = f"{when}, with labels: [{{column: {column!r}, positive: {condition}}}] in the schema"
        return (
            f"labels must be from 0 to 1: {fix}; or name another column (hotbed init --label NAME, `labels` of the "
            "schema)"
        )

    bad = ~((labels >= 0) & (labels <= 1))
    place.refuse(column, "labels out of range", bad, labels if values is None else values, "label {}", fix)


def label_ranges(parts: Iterable[tuple[Place, str, NDArray[Any]]]) -> dict[str, tuple[float, float]]:
    """Check the labels ``[n]`` of parts of columns, and return the smallest and the largest by column."""
    found: dict[str, tuple[float, float]] = {}
    for place, column, labels in parts:
        least, most = float(labels.min()), float(labels.max())  # NaN if one label is
        if not (least >= 0 and most <= 1):
            refuse_labels(labels, column, place)
        low, high = found.get(column, (math.inf, -math.inf))
        found[column] = min(low, least), max(high, most)
    return found


def refuse_other_kind(what: str, column: str, kind: str, trained: str) -> None:
    """Raise `DataError` if ids have another kind than in training, because they would be hashed to other rows.

    Kinds are as in `Source.id_kinds`, or "" if unknown.
    """
    if kind and trained and kind != trained:
        raise DataError(
            f"{what}, column '{column}': its values are {kind}, and the model was trained with {trained}, which are "
            f"other ids (5 and '5' are hashed to different rows); write the column as {trained}"
        )
