"""Split samples into train, valid and test by row: by time, by a hash, or by order.

A rule divides row groups into `SplitRows`, which have the samples of one split and are read like row groups.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typing_extensions import override

from hotbed.checks import Probability, Section, check_known
from hotbed.data import arrow_columns as arrow
from hotbed.data.files.parquet_files import RowGroup, RowsOfGroup
from hotbed.data.files.text_dates import UNSORTED, other_zones, parse_dates
from hotbed.data.hashing import hash_integers, hash_strings, mix
from hotbed.errors import DataError, SpecError

SPLITS = ("train", "valid", "test")
_READERS = 4
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


class RowSplit(Section, ABC, error=SpecError):
    """A rule that assigns a code to each row: the position of the row's split in `SPLITS` (0, 1 or 2)."""

    column: str | None = None
    """The column that the rule reads, or None if it reads no column."""
    by: ClassVar[str]
    """Name of the rule in recipes."""

    @override
    def where(self) -> str:
        return f"split by {self.by}: "

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the splits that the rule assigns."""

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise an error unless the rule applies to a file with these columns."""

    def whole(self, group: RowGroup) -> int | None:
        """Return the code of all rows of a row group, or None if rows differ, or must be read to know the code."""
        return None

    @abstractmethod
    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Return the code of each row ``[n]`` of a row group. ``table`` has the rule's `column` (None: no column)."""


class Position(NamedTuple):
    """The position of a row group in its dataset."""

    before: int  # rows before the row group
    total: int  # rows of the dataset


@dataclass(frozen=True)
class SplitRows(RowsOfGroup):
    """The rows of a row group that are in one split."""

    at: Position
    split: RowSplit
    code: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read columns of these rows. Several threads may call this at once."""
        key = self.split.column
        more = [key] if key is not None and key not in columns else []
        table = self.group.read([*columns, *more])
        mine = self.split.codes(self.group, self.at, table) == self.code
        return table.select(list(columns)).filter(pa.array(mine)) if columns else table.filter(pa.array(mine))

    def name_row(self, at: int) -> str:
        """Return the name of row ``at`` of the table that `read` returns."""
        key = self.split.column
        table = None if key is None else self.group.read([key])
        mine = self.split.codes(self.group, self.at, table) == self.code
        return self.group.name_row(int(np.flatnonzero(mine)[at]))


def divide(split: RowSplit, groups: Sequence[RowGroup]) -> dict[str, list[RowGroup | SplitRows]]:
    """Divide row groups. Return whole row groups, and parts of row groups, by split. A split may be empty."""
    ends = np.cumsum([0, *(group.samples for group in groups)]).tolist()
    positions = [Position(before, ends[-1]) for before in ends[:-1]]

    def counts(group: RowGroup, at: Position) -> list[int]:
        code = split.whole(group)
        if code is not None:
            return [group.samples * (i == code) for i in range(len(SPLITS))]
        table = None if split.column is None else group.read([split.column])
        return np.bincount(split.codes(group, at, table), minlength=len(SPLITS)).tolist()

    found: dict[str, list[RowGroup | SplitRows]] = {name: [] for name in split.names}
    with ThreadPoolExecutor(_READERS) as pool:
        for group, at, of_split in zip(groups, positions, pool.map(counts, groups, positions), strict=True):
            for code, (name, samples) in enumerate(zip(SPLITS, of_split, strict=True)):
                if samples == group.samples:
                    found[name].append(group)
                elif samples:
                    found[name].append(SplitRows(group, samples, at, split, code))
    return found


def parse_row_split(values: Mapping[str, object]) -> RowSplit:
    """Create a rule from a recipe's plain values, e.g. ``{by: time, column: ts, test_from: 2024-06-01}``."""
    rules: dict[str, Any] = {rule.by: rule for rule in (TimeSplit, HashSplit, OrderSplit)}
    by = str(values.get("by")) if isinstance(values, Mapping) else ""
    if by not in rules:
        raise SpecError(
            f"split: got {values!r}, expected a mapping with `by`, e.g. {{by: time, column: ts, test_from: "
            "2024-06-01}, {by: hash, test: 0.1} or {by: order, test: 0.1}"
        )
    given = {key: value for key, value in values.items() if key != "by"}
    known = [f.name for f in fields(rules[by])]
    for key in given:
        check_known(f"split by {by}: key", key, known, SpecError)
    if "column" in known and "column" not in given:
        raise SpecError(f"split by {by}: key 'column' is missing. Set it to the column of times")
    return rules[by](**given)


# -- by time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeSplit(RowSplit, error=SpecError):
    """A split by the start times of the validation and test data."""

    by: ClassVar[str] = "time"
    # A column of numbers, dates, times or text. Rows without a time (null, NaN) are in the train split.
    column: str | None
    # The first time of the split: a number, or text such as ``2024-01-31 12:00:00``. None: the split does not exist.
    # Text without a zone is in UTC if the column has times with a zone.
    valid_from: Any = None
    test_from: Any = None
    # The ``strptime`` format of text, e.g. ``"%d/%m/%Y %H:%M"``. Text without a format must sort by time, e.g.
    # ``2024-01-31``.
    format: str | None = None

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.column:
            yield f"{self.where()}column: got {self.column!r}, expected the name of a column"
        if self.format is not None and "%" not in self.format:
            yield f"{self.where()}format: got {self.format!r}, expected null or text, e.g. '%Y-%m-%d %H:%M'"
        if self.valid_from is None and self.test_from is None:
            yield f"{self.where()}valid_from and test_from are missing. Set at least one of these keys"
        for key in ("valid_from", "test_from"):
            value = getattr(self, key)
            if isinstance(value, datetime.date):  # from Python
                object.__setattr__(self, key, value.isoformat())
            elif value is not None and not _is_time(value):
                yield f"{self.where()}{key}: got {value!r}, expected a finite number or text"

    @property
    def names(self) -> tuple[str, ...]:
        """Train, and the splits with a start time."""
        return tuple(
            s for s, start in zip(SPLITS, (0, self.valid_from, self.test_from), strict=True) if start is not None
        )

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise an error unless the column exists and its type is comparable with the start times."""
        column = self.column
        check_known(f"{where}: column of the split", column, schema.names, DataError)
        t = schema.field(column).type
        if self.format is not None and not arrow.is_text(t):
            raise SpecError(
                f"split by time: format: got {self.format!r}, but column '{column}' is {t} and not text. Remove format"
            )
        if len(starts := self._starts(t)) > 1 and not starts[0][0] < starts[1][0]:
            raise SpecError(
                f"split by time: valid_from: got {self.valid_from}, expected before test_from ({self.test_from})"
            )

    def whole(self, group: RowGroup) -> int | None:
        """Return the code if the smallest and the largest time in the footer have the same code, else None."""
        found = group.statistics(str(self.column))
        kind = group.file.schema.field(str(self.column)).type
        bounds = None if found is None else _bounds(found, kind)
        codes = {max((c for start, c in self._starts(kind) if value >= start), default=0) for value in bounds or ()}
        return codes.pop() if len(codes) == 1 else None

    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Return the code of the last split that starts at or before the time of each row."""
        assert table is not None
        column: pa.ChunkedArray = table[str(self.column)]
        values = self._text_times(column, group) if arrow.is_text(column.type) else _comparable(column)
        found = np.zeros(len(column), dtype=np.int64)
        for start, code in self._starts(column.type):
            reached = pc.fill_null(pc.greater_equal(values, pa.scalar(start, values.type)), fill_value=False)
            found[reached.to_numpy() if isinstance(reached, pa.ChunkedArray) else np.asarray(reached)] = code
        return found

    def _text_times(self, column: pa.ChunkedArray, group: RowGroup) -> pa.ChunkedArray:
        """Return times as text that sorts by time, or as microseconds if there is a format. Else raise `DataError`."""
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
            raise DataError(f"{where}: got {texts[at].as_py()!r} at {group.name_row(at)}, {problem} '%Y-%m-%d %H:%M'")
        return values

    def _starts(self, kind: pa.DataType) -> list[tuple[Any, int]]:
        """Return, for each split except train, the start time (comparable to `_comparable` values) and the code."""
        given = ((self.valid_from, 1), (self.test_from, 2))
        kind = kind if self.format is None else pa.timestamp("us")
        return [(_threshold(start, kind, str(self.column)), code) for start, code in given if start is not None]


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number or (isinstance(value, str) and bool(value.strip()))


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert times to microseconds since 1970, and other values to int64, float64 or text."""
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
    """Convert a start time to a value that can be compared with values of `_comparable`."""
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
        raise SpecError(f"split by time: column '{column}': got {kind}, expected numbers, dates, times or text")
    elif isinstance(start, int | float):
        exact = pa.types.is_floating(value) or pa.types.is_decimal(value)
        return float(start) if exact else math.ceil(start)
    raise SpecError(f"split by time: start time of column '{column}' ({kind}): got {start!r}, expected {needed}")


def _bounds(found: pq.Statistics, kind: pa.DataType) -> tuple[int, int] | None:
    """Return the smallest and the largest value of a row group as in `_comparable`, or None if they are uncertain."""
    try:
        ends = [found.min, found.max]
    except ValueError:  # nanoseconds, which Python's times do not support
        return found.min_raw // 1000, found.max_raw // 1000
    if pa.types.is_integer(kind) and type(ends[0]) is int:
        return ends[0], ends[1]
    if arrow.is_time(kind) and isinstance(ends[0], datetime.date):  # also a time
        first, last = arrow.to_microseconds(pa.chunked_array([pa.array(ends, kind)])).to_pylist()
        return first, last
    return None


# -- by hash and by order ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ShareSplit(RowSplit, error=SpecError):
    """A split into shares of the rows."""

    valid: Probability = 0.0
    test: Probability = 0.0

    @override
    def contradictions(self) -> Iterator[str]:
        if not 0 < self.valid + self.test < 1:
            yield f"{self.where()}valid + test: got {self.valid + self.test}, expected above 0 and below 1"

    @property
    def names(self) -> tuple[str, ...]:
        """Train, and the splits with a share."""
        return tuple(s for s, share in zip(SPLITS, (1, self.valid, self.test), strict=True) if share)


@dataclass(frozen=True)
class HashSplit(_ShareSplit, error=SpecError):
    """A split by a hash of the file's name within the dataset and the row number.

    A row keeps its split when files are added or the whole dataset is moved. The hash is
    ``mix(hash_strings(name) ^ hash_integers(row))``, see `hotbed.data.hashing`. Rows with the largest hashes are the
    test split, and rows with the next smaller hashes are the valid split. Shares are approximate.
    """

    by: ClassVar[str] = "hash"

    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Return the code of each row by its hash."""
        name = np.frombuffer(group.file.name.encode(), dtype=np.uint8)
        of_file = hash_strings(np.array([0, len(name)]), name)
        rows = np.arange(group.first_row, group.first_row + group.samples)
        hashes = mix(of_file ^ hash_integers(rows)) >> np.uint64(11)  # 53 bits, as in a float64
        ends = [math.ceil((1 - self.valid - self.test) * 2.0**53), math.ceil((1 - self.test) * 2.0**53)]
        return np.searchsorted(np.array(ends, dtype=np.uint64), hashes, side="right")


@dataclass(frozen=True)
class OrderSplit(_ShareSplit, error=SpecError):
    """A split of data in time order: the last rows are the test split, and the rows before them are the valid split.

    Shares are exact to the row.
    """

    by: ClassVar[str] = "order"

    def codes(self, group: RowGroup, at: Position, table: pa.Table | None) -> arrow.Array:
        """Return the code of each row by its position in the dataset."""
        ends = [round((1 - self.valid - self.test) * at.total), round((1 - self.test) * at.total)]
        return np.searchsorted(np.array(ends), np.arange(at.before, at.before + group.samples), side="right")
