# pyright: reportUnknownParameterType=false
"""Read a large row group slice by slice, in order, so that memory does not grow with it: `in_slices`.

Some writers make one row group of a whole file. A slice is read from where that before it ended, if the same columns
are wanted; one that was read already, from the start of the row group. Slices that come up before those that are
asked for, as several threads do, wait in memory.
"""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pyarrow as pa

from hotbed.data.row_groups import RowGroup

_WAITING = 8
"""Most slices that are kept for those who come later."""


@dataclass(frozen=True)
class RowSlice:
    """Consecutive rows of a row group; what is read of them is what `RowGroup` reads."""

    reader: _Reader
    index: int
    samples: int

    @property
    def file(self) -> Any:
        """The file of the row group."""
        return self.reader.group.file

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns of these rows; safe from several threads."""
        return self.reader.read(tuple(columns), self.index)

    def place(self, at: int) -> str:
        """Where the row is that `read` gives at this position."""
        return self.reader.group.place(self.index * self.reader.rows + at)

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Bounds of a column of integers without nulls, if the row group's footer has them; they may be too wide."""
        found = self.reader.group.integer_range(column)
        return found if found is not None and found[0] == found[1] else None

    def __str__(self) -> str:
        return str(self.reader.group)


def in_slices(group: RowGroup, rows: int) -> list[RowGroup | RowSlice]:
    """A row group as slices of so many rows, or as it is if it has no more."""
    if group.samples <= rows:
        return [group]
    reader = _Reader(group, rows)
    return [RowSlice(reader, i, min(rows, group.samples - at)) for i, at in enumerate(range(0, group.samples, rows))]


class _Reader:
    """Reads the slices of a row group; for each selection of columns it goes on where it was."""

    def __init__(self, group: RowGroup, rows: int) -> None:
        self.group, self.rows = group, rows
        self._lock = Lock()
        self._at: dict[tuple[str, ...], _Position] = {}

    def read(self, columns: tuple[str, ...], index: int) -> pa.Table:
        """Read a slice."""
        with self._lock:
            at = self._at.get(columns)
            if at is None or (index < at.next and index not in at.waiting):
                at = self._at[columns] = _Position(self._slices(columns), 0, {})
            while at.next <= index:
                at.waiting[at.next] = next(at.slices)
                at.next += 1
                if len(at.waiting) > _WAITING:
                    del at.waiting[min(at.waiting)]
            return at.waiting.pop(index)

    def _slices(self, columns: tuple[str, ...]) -> Iterator[pa.Table]:
        parts: list[pa.Table] = []
        for part in self.group.batches(columns, self.rows):
            while (short := self.rows - sum(map(len, parts))) <= len(part):
                yield pa.concat_tables([*parts, part.slice(0, short)])
                parts, part = [], part.slice(short)
            parts.append(part)
        if sum(map(len, parts)):
            yield pa.concat_tables(parts)


@dataclass
class _Position:
    slices: Iterator[pa.Table]
    next: int
    waiting: dict[int, pa.Table]
