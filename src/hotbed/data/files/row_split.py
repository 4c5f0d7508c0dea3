"""Divide samples into train, valid and test by row: by time, by a hash, or by their order.

A split divides row groups into `SplitRows`. Each holds the samples of one split and reads like a row group.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hotbed.data import arrow_columns as arrow
from hotbed.data.files.parquet_files import RowGroup, RowsOfGroup
from hotbed.data.files.text_dates import UNSORTED, other_zones, parse_dates
from hotbed.data.hashing import hash_integers, hash_strings, mix
from hotbed.errors import DataError, SpecError, did_you_mean

SPLITS = ("train", "valid", "test")
_READERS = 4
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


class RowSplit(ABC):
    """A way to say of each row of a row group in which split it is: 0, 1 or 2, as in `SPLITS`."""

    column: str | None = None
    """The column that has to be read for it."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The splits that there are to be."""

    def check(self, schema: pa.Schema, where: str) -> None:  # noqa: B027 (most need nothing)
        """Raise unless a file with these columns can be divided so."""

    def whole(self, group: RowGroup) -> int | None:
        """The split that all rows of a row group are in, if that is known without reading it."""
        return None

    @abstractmethod
    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """The split of each row ``[n]`` of a row group; ``table`` has the column."""


class Position(NamedTuple):
    """How many rows of the dataset are before a row group, and how many there are."""

    before: int
    total: int


@dataclass(frozen=True)
class SplitRows(RowsOfGroup):
    """The rows of a row group that are in one split."""

    at: Position
    split: RowSplit
    code: int
    samples: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns of these rows; safe from several threads."""
        key = self.split.column
        more = [key] if key is not None and key not in columns else []
        table = self.group.read([*columns, *more])
        mine = self.split.codes(self.group, self.at, table) == self.code
        return table.select(list(columns)).filter(pa.array(mine)) if columns else table.filter(pa.array(mine))

    def place(self, at: int) -> str:
        """Where the row is that `read` gives at this position."""
        key = self.split.column
        table = None if key is None else self.group.read([key])
        mine = self.split.codes(self.group, self.at, table) == self.code
        return self.group.place(int(np.flatnonzero(mine)[at]))


def divide(split: RowSplit, groups: Sequence[RowGroup]) -> dict[str, list[RowGroup | SplitRows]]:
    """Row groups, or parts of them, by split; a split may have none."""
    ends = np.cumsum([0, *(group.samples for group in groups)]).tolist()
    places = [Position(before, ends[-1]) for before in ends[:-1]]

    def counts(group: RowGroup, at: Position) -> list[int]:
        code = split.whole(group)
        if code is not None:
            return [group.samples * (i == code) for i in range(len(SPLITS))]
        table = None if split.column is None else group.read([split.column])
        return np.bincount(split.codes(group, at, table), minlength=len(SPLITS)).tolist()

    found: dict[str, list[RowGroup | SplitRows]] = {name: [] for name in split.names}
    with ThreadPoolExecutor(_READERS) as pool:
        for group, at, of_split in zip(groups, places, pool.map(counts, groups, places), strict=True):
            for code, (name, samples) in enumerate(zip(SPLITS, of_split, strict=True)):
                if samples == group.samples:
                    found[name].append(group)
                elif samples:
                    found[name].append(SplitRows(group, at, split, code, samples))
    return found


def row_split(values: Mapping[str, object]) -> RowSplit:
    """Make a split of a recipe's plain values: ``{by: time, column: …, valid_from: …, test_from: …}``, or of others."""
    kinds: dict[str, type[RowSplit]] = {"time": TimeSplit, "hash": HashSplit, "order": OrderSplit}
    by = values.get("by") if isinstance(values, Mapping) else None
    kind = kinds.get(str(by), RowSplit)
    known = [f.name for f in fields(cast("Any", kind))] if by in kinds else []
    other = next((key for key in values if key not in ("by", *known)), None) if known else None
    if not known:
        raise SpecError(
            f"split is {values!r}, must be a mapping with `by`: {{by: time, column: ts, test_from: 2024-06-01}}, "
            "{by: hash, test: 0.1} or {by: order, test: 0.1}"
        )
    if other is not None:
        raise SpecError(f"split by {by} has no '{other}'; it may have {', '.join(known)}{did_you_mean(other, known)}")
    if "column" in known and "column" not in values:
        raise SpecError(f"split by {by} needs 'column', the name of the column of times")
    return kind(**cast("dict[str, Any]", {key: value for key, value in values.items() if key != "by"}))


# -- by time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeSplit(RowSplit):
    """Rows before a time are for training, those from it on for validation, those from a later one on for the test."""

    column: str | None  # numbers, dates, times or text; rows without a time (null, NaN) are for training
    # first time of the split, None for no such split: a number, or text such as ``2024-01-31 12:00:00``; for a column
    # of times with a zone in UTC, unless the text names one
    valid_from: Any = None
    test_from: Any = None
    # for ``strptime``, e.g. ``"%d/%m/%Y %H:%M"``; without it, text must sort by time, e.g. ``2024-01-31``
    format: str | None = None

    def __post_init__(self) -> None:
        format_ = cast("object", self.format)
        if not isinstance(self.column, str) or not self.column:
            raise SpecError(f"split by time: column is {self.column!r}, must be the name of a column, in quotes")
        if format_ is not None and (not isinstance(format_, str) or "%" not in format_):
            raise SpecError(f"split by time: format is {format_!r}, must be text such as '%Y-%m-%d %H:%M', or null")
        if self.valid_from is None and self.test_from is None:
            raise SpecError("split by time needs valid_from or test_from, the first time of that split")
        for key in ("valid_from", "test_from"):
            value = getattr(self, key)
            if isinstance(value, datetime.date):  # from Python
                object.__setattr__(self, key, value.isoformat())
            elif value is not None and not _is_time(value):
                raise SpecError(f"split by time: {key} is {value!r}, must be a finite number or text")

    @property
    def names(self) -> tuple[str, ...]:
        """Train, and the splits that begin at some time."""
        return tuple(
            s for s, start in zip(SPLITS, (0, self.valid_from, self.test_from), strict=True) if start is not None
        )

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise unless the column is there, and times of its type can be compared with these."""
        column = str(self.column)
        if column not in schema.names:
            raise DataError(
                f"{where} has no column '{column}' to split by; it has {', '.join(schema.names)}"
                f"{did_you_mean(column, schema.names)}"
            )
        kind, problem = schema.field(column).type, ""
        if self.format is not None and not arrow.is_text(kind):
            problem = f"format is {self.format!r}, but column '{column}' is {kind}, not text"
        elif len(starts := self._starts(kind)) > 1 and not starts[0][0] < starts[1][0]:
            problem = f"valid_from {self.valid_from} must be before test_from {self.test_from}"
        if problem:
            raise SpecError(f"split by time: {problem}")

    def whole(self, group: RowGroup) -> int | None:
        """By the footer's smallest and largest value, of integers, dates and times."""
        found = group.statistics(str(self.column))
        kind = group.file.schema.field(str(self.column)).type
        bounds = None if found is None else _bounds(found, kind)
        if bounds is None:
            return None
        first, last = (self._code_of(value, kind) for value in bounds)
        return first if first == last else None

    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Count for each row the splits that begin before it."""
        assert table is not None
        column: pa.ChunkedArray = table[str(self.column)]
        values = self._text_times(column, group) if arrow.is_text(column.type) else _comparable(column)
        found = np.zeros(len(column), dtype=np.int64)
        for start, code in self._starts(column.type):
            reached = pc.fill_null(pc.greater_equal(values, pa.scalar(start, values.type)), fill_value=False)
            found[reached.to_numpy() if isinstance(reached, pa.ChunkedArray) else np.asarray(reached)] = code
        return found

    def _text_times(self, column: pa.ChunkedArray, group: RowGroup) -> pa.ChunkedArray:
        """Return text as it is, or as microseconds by the format; raise `DataError` if it does not sort by time."""
        texts = _comparable(column)
        if self.format is None:
            bad, values = pc.or_(pc.match_substring_regex(texts, UNSORTED), other_zones(texts)), texts
            problem = (
                "expected padded text that begins with the year and has one zone, because other text does not sort by "
                "time. Add format: to the split, such as"
            )
        else:
            values = parse_dates(texts, self.format)
            bad = pc.and_(pc.is_valid(texts), pc.is_null(values))
            problem = f"expected times as {self.format!r}. Change format: of the split, such as"
        if pc.any(bad).as_py():
            at = pc.index(bad, pa.scalar(True)).as_py()
            where = f"{group}, column '{self.column}'"
            raise DataError(f"{where}: got {texts[at].as_py()!r} at {group.place(at)}, {problem} '%Y-%m-%d %H:%M'")
        return values

    def _code_of(self, value: int, kind: pa.DataType) -> int:
        return max((code for start, code in self._starts(kind) if value >= start), default=0)

    def _starts(self, kind: pa.DataType) -> list[tuple[Any, int]]:
        """First comparable value and number of each split but train."""
        given = ((self.valid_from, 1), (self.test_from, 2))
        kind = kind if self.format is None else pa.timestamp("us")
        return [(_threshold(start, kind, str(self.column)), code) for start, code in given if start is not None]


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number or (isinstance(value, str) and bool(value.strip()))


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as microseconds since 1970, other numbers as they are, and text as text."""
    kind = column.type
    if arrow.is_time(kind):
        return arrow.to_microseconds(column)
    if pa.types.is_dictionary(kind):
        column = pc.cast(column, kind.value_type)
    if arrow.is_text(column.type):
        return pc.cast(column, pa.large_string())
    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return pc.cast(column, pa.float64(), safe=False)
    return pc.cast(column, pa.int64(), safe=False)


def _threshold(start: object, kind: pa.DataType, column: str) -> Any:
    """A time as `_comparable` gives those of the column."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    needed = "text" if arrow.is_text(value) else "a number"
    if arrow.is_time(value):
        try:
            time = datetime.datetime.fromisoformat(str(start))
            return ((time if time.tzinfo else time.replace(tzinfo=datetime.UTC)) - _EPOCH) // _MICROSECOND
        except ValueError:
            needed = "text such as '2024-01-31' or '2024-01-31 12:00:00'"
    elif arrow.is_text(value):
        if isinstance(start, str):
            return start
    elif not arrow.is_number(value):
        raise SpecError(f"split by time: column '{column}' is {kind}, must be of numbers, dates, times or text")
    elif isinstance(start, int | float):
        exact = pa.types.is_floating(value) or pa.types.is_decimal(value)
        return float(start) if exact else math.ceil(start)
    raise SpecError(
        f"split by time: column '{column}' is {kind}, so times to compare it with must be {needed}, not {start!r}"
    )


def _bounds(found: pq.Statistics, kind: pa.DataType) -> tuple[int, int] | None:
    """Smallest and largest value of a row group as `_comparable` gives them, where they are sure."""
    try:
        low, high = found.min, found.max
    except ValueError:  # nanoseconds, which Python's times do not hold
        return found.min_raw // 1000, found.max_raw // 1000
    if isinstance(low, datetime.datetime) and isinstance(high, datetime.datetime) and pa.types.is_timestamp(kind):
        low, high = (t if t.tzinfo else t.replace(tzinfo=datetime.UTC) for t in (low, high))
        return (low - _EPOCH) // _MICROSECOND, (high - _EPOCH) // _MICROSECOND
    if type(low) is datetime.date and type(high) is datetime.date and pa.types.is_date(kind):
        first, last = ((day - _EPOCH.date()).days * 86_400_000_000 for day in (low, high))
        return first, last
    if type(low) is int and type(high) is int and pa.types.is_integer(kind):
        return low, high
    return None


# -- by hash and by order ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ShareSplit(RowSplit):
    """A split whose parts are shares of the rows."""

    valid: float = 0.0
    test: float = 0.0
    by: ClassVar[str]

    def __post_init__(self) -> None:
        where = f"split by {self.by}"
        for key, share in (("valid", cast("object", self.valid)), ("test", cast("object", self.test))):
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
                raise SpecError(f"{where}: {key} is {share!r}, must be a share from 0 to below 1, such as 0.1")
        if not 0 < self.valid + self.test < 1:
            raise SpecError(f"{where}: valid {self.valid} and test {self.test} must be above 0 and below 1 together")

    @property
    def names(self) -> tuple[str, ...]:
        """Train, and the splits that have a share."""
        return tuple(s for s, share in zip(SPLITS, (1, self.valid, self.test), strict=True) if share)


@dataclass(frozen=True)
class HashSplit(_ShareSplit):
    """Rows are drawn by a hash of the file's name within the dataset and the number of the row in it.

    A row stays in its split when files are added or the dataset is moved as a whole. The hash is
    ``mix(hash_strings(name) ^ hash_integers(row))``, see `hotbed.data.hashing`; the largest values are the test split.
    Shares are approximate.
    """

    by: ClassVar[str] = "hash"

    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Compare the rows' hashes with the ends of the shares."""
        name = np.frombuffer(group.file.name.encode(), dtype=np.uint8)
        of_file = hash_strings(np.array([0, len(name)]), name)
        rows = np.arange(group.first_row, group.first_row + group.samples)
        place = mix(of_file ^ hash_integers(rows)) >> np.uint64(11)  # 53 bits, as a float64 has
        ends = [math.ceil((1 - self.valid - self.test) * 2.0**53), math.ceil((1 - self.test) * 2.0**53)]
        return np.searchsorted(np.array(ends, dtype=np.uint64), place, side="right")


@dataclass(frozen=True)
class OrderSplit(_ShareSplit):
    """The last rows are for the test, those before them for validation: of data that is in the order of time.

    Shares are exact to the row.
    """

    by: ClassVar[str] = "order"

    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Compare positions among all rows with the ends of the shares."""
        ends = [round((1 - self.valid - self.test) * at.total), round((1 - self.test) * at.total)]
        return np.searchsorted(np.array(ends), np.arange(at.before, at.before + group.samples), side="right")
