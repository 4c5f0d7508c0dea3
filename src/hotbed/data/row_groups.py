"""Read stored samples as Arrow columns, part by part, whatever they are stored as: `TableFile`, `RowGroup`.

Some writers make one row group of a whole file. So `in_slices` reads it slice by slice, and memory does not grow with
it. A slice is read from where that before it ended, if the same columns are wanted; one that was read already, from the
start of the row group. Slices that come up before those that are asked for, as several threads do, wait in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.errors import DataError


class TableFile(Protocol):
    """A file of samples that are read as Arrow columns, part by part: of Parquet, or what a `Source` reads."""

    @property
    def name(self) -> str:
        """Its path below the dataset's."""
        ...

    @property
    def shown(self) -> str:
        """What messages call it."""
        ...

    @property
    def unit(self) -> str:
        """What messages call its parts."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Names and types of its columns."""
        ...

    @property
    def state(self) -> tuple[object, ...]:
        """What changes when the file does."""
        ...

    @property
    def may_be_away(self) -> bool:
        """Whether it is elsewhere, so that it cannot be read while that does not answer."""
        ...

    def row_groups(self) -> list[RowGroup]:
        """List the parts that hold samples."""
        ...

    def read(self, row_group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read some columns of a part, which has so many rows; safe from several threads."""
        ...

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read some columns of a part in order, at most so many rows at once."""
        ...

    def nbytes(self, row_group: int) -> int:
        """Bytes of a part's columns when they are not compressed."""
        ...

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """Name those of the columns whose texts are stored once however often they repeat, with their bytes at most."""
        ...

    def statistics(self, row_group: int, column: str) -> Any:
        """What is known of a column of a part, see `pyarrow.parquet.Statistics`; None where nothing is."""
        ...


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file, or part of it."""

    file: TableFile
    index: int
    samples: int
    first_row: int
    """Number of its first row in the file."""

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns; safe from several threads."""
        try:
            return self.file.read(self.index, columns, self.samples)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error, columns) from error

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read some columns in order, at most so many rows at once."""
        try:
            yield from self.file.batches(self.index, columns, rows)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error, columns) from error

    def _unreadable(self, error: Exception, columns: Sequence[str]) -> DataError:
        said = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            return DataError(f"{self}: {self.file.shown} does not exist, or no longer ({said})")
        damaged = "the file is damaged or cut short"
        if self.file.may_be_away:
            damaged += ", or where it is does not answer"
        column = next((name for name in columns if not self._is_readable(name)), None)
        where = str(self) if column is None else f"{self}, column '{column}'"
        return DataError(f"{where}: cannot be read, {damaged} ({said}); write it again")

    def _is_readable(self, column: str) -> bool:
        try:
            self.file.read(self.index, [column], self.samples)
        except (pa.ArrowException, OSError):
            return False
        return True

    def place(self, at: int) -> str:
        """Where the row is that `read` gives at this position."""
        return f"row {at:,} (row {self.first_row + at:,} of the file)"

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Smallest and largest value of a column of integers or booleans without nulls, if the footer has them.

        Footers tell nothing of NaN, so a column of floats has to be read.
        """
        found = self.statistics(column)
        return (int(found.min), int(found.max)) if found is not None and isinstance(found.min, int) else None

    def statistics(self, column: str) -> pq.Statistics | None:
        """What the footer says of a column without nulls; None if it does not say the range."""
        found = self.file.statistics(self.index, column)
        complete = found is not None and found.has_min_max and found.has_null_count and found.null_count == 0
        return found if complete else None

    def __str__(self) -> str:
        return f"{self.file.shown}, {self.file.unit} {self.index}"


_WAITING = 8
"""Most slices that are kept for those who come later."""


@dataclass(frozen=True)
class RowsOfGroup:
    """Some rows of a row group; what is read of them is what `RowGroup` reads."""

    group: RowGroup

    @property
    def file(self) -> Any:
        """The file of the row group."""
        return self.group.file

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Bounds of a column of integers without nulls, if the row group's footer has them; they may be too wide."""
        found = self.group.integer_range(column)
        return found if found is not None and found[0] == found[1] else None

    def __str__(self) -> str:
        return str(self.group)


@dataclass(frozen=True)
class RowSlice(RowsOfGroup):
    """Consecutive rows of a row group."""

    reader: _Reader
    index: int
    samples: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns of these rows; safe from several threads."""
        return self.reader.read(tuple(columns), self.index)

    def place(self, at: int) -> str:
        """Where the row is that `read` gives at this position."""
        return self.group.place(self.index * self.reader.rows + at)


def in_slices(group: RowGroup, rows: int) -> list[RowGroup | RowSlice]:
    """A row group as slices of so many rows, or as it is if it has no more."""
    if group.samples <= rows:
        return [group]
    reader = _Reader(group, rows)
    starts = range(0, group.samples, rows)
    return [RowSlice(group, reader, i, min(rows, group.samples - at)) for i, at in enumerate(starts)]


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
