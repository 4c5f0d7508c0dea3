"""Profile the columns of a dataset in one pass and bounded memory: `ColumnProfile`.

``hotbed inspect`` profiles all rows. ``hotbed init`` profiles a sample of rows (`take_sample`). Because a
sample has only some of the distinct values, `count_distinct` estimates their number in all rows.

`ValueCounts` counts values by 64-bit hashes, exactly up to a bound. Beyond the bound it keeps three summaries:

- *Sampled values*: the values with the smallest hashes, with exact counts. k values below a threshold θ (a share of
  all hashes) represent k / θ values, with a relative standard error of 1 / √(k − 1) (Dasgupta et al., "A framework for
  estimating stream expression cardinalities", ICDT 2016).
- *Hot values*: if there are too many counts, the largest count that does not fit is subtracted from all counts, and
  values without a remainder are dropped (Misra and Gries, "Finding repeated elements", 1982; Agarwal et al.,
  "Mergeable summaries", PODS 2012). A reported count is too high by at most the sum of the subtracted counts.
- *A Bloom filter* (`SeenValues`), to find new values in later data.

Results depend on the values and their order only, not on a random generator.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data import arrow_columns as arrow
from hotbed.data.files.column_statistics import SAMPLE, ColumnStatistics
from hotbed.data.files.parquet_files import RowGroup
from hotbed.data.formats.zipf_source import RANKED, fit_exponent
from hotbed.data.hashing import Hashes, hash_integers
from hotbed.errors import DataError

MOST_DISTINCT = 1 << 18
"""Largest number of distinct values per column with exact counts."""
FEWEST_DISTINCT = 1 << 12
_OF_ALL_COLUMNS = 1 << 23  # limit of exactly counted values in all columns together, about 400 MB
SHOWN = 10
"""Number of hottest values that are reported by text."""
TOP = (1, 10, 100, 1_000, 10_000)
"""For each of these n, the share of the n most frequent values is reported."""
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
PER_DOUBLING = 4  # bins
SMALLEST, LARGEST = -30, 64
"""Exponents of 2 between which bins separate magnitudes: from ratios of a billionth to times in nanoseconds."""
REACH = (LARGEST - SMALLEST) * PER_DOUBLING  # number of bins of positive numbers, and of negative ones
BINS = 2 * REACH + 2
"""Number of bins of numbers by sign and magnitude. The last bin counts missing values. No bin depends on the data."""
SAMPLED_ROWS = 200_000
_SAMPLED_CELLS = 30_000_000
_FEWEST_ROWS = 5_000
_BATCH_ROWS = 32_768
_COUNTED_CELLS = 60_000_000  # counting them takes about ten seconds
_READERS = 2
_MOST_WAITING = 256
_MOST_LENGTH = 1 << 16
_ALL = 1 << 64  # number of hashes
_BITS, _HASHES = 27, 4  # of the Bloom filter

Integers = NDArray[np.int64]


# -- columns -------------------------------------------------------------------------------------------------------


class ColumnProfile:
    """Profile of one column in all rows that were added. Shares of missing values, extremes and lengths are exact."""

    def __init__(
        self,
        name: str,
        most_distinct: int = MOST_DISTINCT,
        *,
        quantile_sample: int = SAMPLE,  # quantiles of up to this many numbers are exact
        as_numbers: bool = False,  # whether integers are measurements instead of ids
        earlier: ColumnProfile | None = None,  # the same column of earlier data, for drift
    ) -> None:
        self.name = name
        self.rows = 0
        self.missing = 0  # rows with null or NaN, or of a file without the column
        self.types: list[str] = []  # distinct types of the files
        # each element of a list is a value; None for types that cannot be counted (see `is_counted`)
        self.values: ValueCounts | None = None
        self.numbers: ColumnStatistics | None = None  # of numbers and times (microseconds since 1970)
        self.bins: Integers = np.zeros(BINS, np.int64)  # see `bins_of`
        # numbers of lists with 0, 1, … elements; the last entry also counts longer lists
        self.lengths: Integers = np.empty(0, np.int64)
        self.is_time = False  # whether the values are dates or times
        self._most_distinct, self._quantile_sample, self._as_numbers = most_distinct, quantile_sample, as_numbers
        self._has_fractions = False
        self._elements = 0
        self._earlier = None if earlier is None else earlier.values

    def add_absent(self, rows: int) -> None:
        """Count the rows of a file without this column as missing."""
        self.rows += rows
        self.missing += rows

    def add(self, column: pa.ChunkedArray) -> None:
        """Add the values of consecutive rows ``[n]``."""
        if str(column.type) not in self.types:
            self.types.append(str(column.type))
        array = arrow.decode_dictionary(column.combine_chunks())
        missing, of_lists = array.null_count, arrow.is_list(array.type)
        if of_lists:
            lengths = arrow.list_lengths(array.drop_null())
            self._elements += int(lengths.sum())
            counts = np.bincount(np.minimum(lengths, _MOST_LENGTH), minlength=max(1, len(self.lengths)))
            counts[: len(self.lengths)] += self.lengths
            self.lengths = counts
        if is_counted(array.type):
            values = present_values(array)
            missing = missing if of_lists else len(array) - len(values)
            if not of_lists and not arrow.is_text(array.type):
                self.is_time = arrow.is_time(array.type)
                self._has_fractions |= pa.types.is_floating(array.type) or pa.types.is_decimal(array.type)
                numbers = floats_of(pa.chunked_array([array]))
                self.numbers = self.numbers or ColumnStatistics(limit=self._quantile_sample)
                self.numbers.add(numbers[~np.isnan(numbers)], self.numbers.count + self.numbers.missing)
                self.bins += np.bincount(bins_of(torch.from_numpy(numbers.copy())).numpy(), minlength=BINS)
            self.values = self.values or ValueCounts(self._most_distinct, self._earlier)
            self.values.add(values)
        self.rows += len(array)
        self.missing += missing

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found: dict[str, Any] = {"column": self.name, "type": ", ".join(self.types), "missing": self.missing_share}
        if (values := self.values) is not None:
            distinct = values.distinct
            sizes = [n for n in TOP if n <= values.ranked]
            found |= {
                "values": values.total,
                "distinct": round(distinct.value),
                "distinct_error": distinct.error / max(1.0, distinct.value),
                "hottest": [{"value": v, "share": n / values.total} for v, n in values.hottest],
                "hottest_error": values.hottest_error / max(1, values.total),
                "top_shares": dict(zip(map(str, sizes), values.top_shares(sizes), strict=True)),
                "zipf_exponent": None if self.is_measure else values.zipf_exponent(),
            }
        if (numbers := self.numbers) is not None and numbers.count:
            plain = _format_time if self.is_time else float
            found["numbers"] = {
                "low": plain(numbers.low),
                "high": plain(numbers.high),
                **({} if self.is_time else {"mean": numbers.mean, "deviation": numbers.deviation}),
                "infinite": numbers.missing,
                "quantiles": {f"{at:g}": plain(value) for at, value in zip(QUANTILES, self.quantiles, strict=True)},
            }
        if len(self.lengths):
            lengths = np.append(np.flatnonzero(self.lengths), 0)
            ends = np.cumsum(self.lengths) / max(1, int(self.lengths.sum()))
            found["lengths"] = {
                "mean": self.mean_length,
                "low": int(lengths[0]),
                "high": int(lengths.max()),
                "quantiles": {f"{at:g}": int(np.searchsorted(ends, at)) for at in QUANTILES},
            }
        return found

    @property
    def missing_share(self) -> float:
        """Share of the rows without a value."""
        return self.missing / max(1, self.rows)

    @property
    def is_measure(self) -> bool:
        """Whether values are measurements, not ids: floats, decimals, times, and dense columns of a schema."""
        return self.numbers is not None and (self._as_numbers or self.is_time or self._has_fractions)

    @property
    def low(self) -> float:
        """Smallest finite number or time, or NaN if there is none."""
        return self.numbers.low if self.numbers is not None and self.numbers.count else math.nan

    @property
    def high(self) -> float:
        """Largest finite number or time, or NaN if there is none."""
        return self.numbers.high if self.numbers is not None and self.numbers.count else math.nan

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The `QUANTILES` of finite numbers or times, or () if there are none."""
        if self.numbers is None or not self.numbers.count:
            return ()
        return tuple(self.numbers.quantiles(np.array(QUANTILES)).tolist())

    @property
    def mean_length(self) -> float:
        """Mean number of elements of lists; 0 for other columns."""
        return self._elements / max(1, int(self.lengths.sum()))


def is_counted(kind: pa.DataType) -> bool:
    """Return whether values of a type can be counted: numbers, texts, times, and lists of these."""
    kind = arrow.value_type_of(kind)
    return arrow.is_number(kind) or arrow.is_text(kind) or arrow.is_time(kind)


def present_values(array: pa.Array) -> pa.Array:
    """Return all values except null and NaN, without dictionary encoding, and with lists flattened."""
    values = arrow.decode_dictionary(array.flatten() if arrow.is_list(array.type) else array).drop_null()
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    return values.filter(pc.invert(pc.is_nan(values))) if pa.types.is_floating(values.type) else values


def floats_of(column: pa.ChunkedArray) -> arrow.Array:
    """Convert numbers ``[n]`` to float64 with NaN for null. Times become microseconds since 1970."""
    return arrow.to_float64(arrow.to_microseconds(column) if arrow.is_time(column.type) else column)


def _format_time(microseconds: float) -> str:
    return str(datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=round(microseconds)))


def bins_of(values: Tensor) -> Tensor:
    """Return the bin of each number, int64 of the same shape."""
    wide = values.double()
    steps = ((wide.abs().log2() - SMALLEST) * PER_DOUBLING).ceil().clamp(1, REACH)
    signed = torch.where(wide < 0, -steps, steps).where(wide != 0, 0)
    return torch.where(wide.isnan(), BINS - 1, signed.nan_to_num().long() + REACH)


def upper_edge(number: int) -> float:
    """Return the upper bound of a bin. The last two bins (largest numbers, missing values) have no upper bound."""
    step = number - REACH
    return math.copysign(2.0 ** (SMALLEST + (step if step > 0 else -step - 1) / PER_DOUBLING), step) if step else 0.0


# -- counts of values ----------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A number and its standard error, which is 0 for exact numbers."""

    value: float
    error: float


class _Counts(NamedTuple):
    """Counts of values, sorted by ascending hash."""

    hashes: Hashes
    counts: Integers

    @staticmethod
    def sum(parts: Sequence[_Counts]) -> _Counts:
        """Add up the counts of equal hashes."""
        hashes, at = np.unique(np.concatenate([part.hashes for part in parts]), return_inverse=True)
        counts = np.bincount(at, np.concatenate([part.counts for part in parts]), len(hashes))
        return _Counts(hashes, counts.astype(np.int64))

    def find(self, hashes: Hashes) -> Integers:
        """Return the count of each hash ``[n]``, or 0 for a hash without a count."""
        if not len(self.hashes):
            return np.zeros(len(hashes), np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.counts[at], 0)


def most_distinct(columns: int) -> int:
    """Return the limit of exactly counted values per column, so that all columns together need about 400 MB."""
    return max(FEWEST_DISTINCT, min(MOST_DISTINCT, _OF_ALL_COLUMNS // max(1, columns)))


class ValueCounts:
    """Counts of the values of one column; exact for at most ``most_distinct`` distinct values.

    ``earlier`` holds the counts of earlier data, in which values are looked up to find new values.
    """

    def __init__(self, most_distinct: int = MOST_DISTINCT, earlier: ValueCounts | None = None) -> None:
        self.total = 0
        self._earlier, self._unseen, self._unseen_squares = earlier, 0.0, 0.0
        self._bound = most_distinct
        self._sample = _Counts(np.empty(0, np.uint64), np.empty(0, np.int64))
        self._threshold = _ALL  # the sample has all values with a hash below this threshold
        self._hot: _Counts | None = None  # None while all values are counted
        self._seen: SeenValues | None = None  # likewise
        self._subtracted = 0
        self._waiting: list[tuple[Hashes, Integers, pa.Array]] = []
        self._waiting_values = 0
        self._names: dict[int, str] = {}

    def add(self, values: pa.Array) -> None:
        """Add values ``[n]`` without nulls: numbers, texts or times."""
        if not len(values):
            return
        counted = values.value_counts()
        distinct, counts = counted.field("values"), counted.field("counts")
        self._waiting.append((_hashes(distinct), counts.to_numpy(), distinct))
        self.total += len(values)
        self._waiting_values += len(distinct)
        if self._waiting_values > self._bound // 2 or len(self._waiting) == _MOST_WAITING:
            self._merge()

    @property
    def distinct(self) -> Estimate:
        """Number of distinct values."""
        self._merge()
        kept = len(self._sample.hashes)
        if self._hot is None:
            return Estimate(kept, 0.0)
        found = kept / (self._threshold / _ALL)
        return Estimate(found, found / math.sqrt(max(1, kept - 1)))

    @property
    def hottest(self) -> list[tuple[str, int]]:
        """The most frequent values as text with their counts: at most `SHOWN` values, and at most `ranked` values."""
        hot, count = self._falling(), min(SHOWN, self.ranked)
        return [(self._names[int(h)], int(n)) for h, n in zip(hot.hashes[:count], hot.counts[:count], strict=True)]

    @property
    def hottest_error(self) -> int:
        """Maximum error of the counts of hot values, which are never too low. It is 0 if counts are exact."""
        self._merge()
        return self._subtracted

    def top_shares(self, sizes: Sequence[int]) -> list[float]:
        """Return the share of all occurrences that the n most frequent values have, for each n of ``sizes``."""
        if not self.total:
            return [math.nan] * len(sizes)
        sums = np.append(0, np.cumsum(self._known_hot()))
        at = np.minimum(np.asarray(sizes, np.int64), len(sums) - 1)
        return np.minimum(sums[at] / self.total, 1.0).tolist()

    @property
    def ranked(self) -> int:
        """Number of hot values with an error of at most half of their count; all values if counts are exact."""
        return len(self._known_hot())

    def _known_hot(self) -> Integers:
        counts = self._falling().counts
        return counts[counts > 2 * self._subtracted]  # at most half of each of these counts is an error

    def zipf_exponent(self) -> float | None:
        """Fit the exponent of Zipf's law to the most frequent values; None for too few values."""
        counts = self._known_hot()
        return fit_exponent(counts[counts >= RANKED])

    @property
    def unseen_share(self) -> Estimate:
        """Share of the occurrences of values that the earlier data lack."""
        self._merge()
        total = max(1, self.total) * (1 - self._false_rate)
        return Estimate(self._unseen / total, math.sqrt(self._false_rate * self._unseen_squares) / total)

    @property
    def unseen_values(self) -> Estimate:
        """Number of distinct values that the earlier data lack."""
        self._merge()
        new = 0 if self._earlier is None else int((~self._earlier.has(self._sample.hashes)).sum())
        rate = self._threshold / _ALL * (1 - self._false_rate)
        return Estimate(new / rate, math.sqrt((1 - rate) * new) / rate)

    @property
    def _false_rate(self) -> float:
        return 0.0 if self._earlier is None or self._earlier._seen is None else self._earlier._seen.false_rate

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Return whether each hash ``[n]`` was added. If counts are not exact, false positives are possible."""
        self._merge()
        return self._sample.find(hashes) > 0 if self._seen is None else self._seen.has(hashes)

    def shares_beside(self, other: ValueCounts, values: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return two arrays with the counts of the same values: in this column, and in ``other``.

        The arrays have the ``values`` most frequent values of each column. The last entry counts all remaining values.
        """
        hashes = np.union1d(self._falling().hashes[:values], other._falling().hashes[:values])
        counts = [(of._sample if of._hot is None else of._hot).find(hashes) for of in (self, other)]
        counts = [n + (n > 0) * of._subtracted for n, of in zip(counts, (self, other), strict=True)]
        first, second = (np.append(n, max(0, of.total - n.sum())) for n, of in zip(counts, (self, other), strict=True))
        return first, second

    def _falling(self) -> _Counts:
        """Return all values (only hot values if counts are not exact) by descending count. No count is too low."""
        self._merge()
        hashes, counts = self._sample if self._hot is None else self._hot
        order = np.argsort(-counts, kind="stable")
        return _Counts(hashes[order], counts[order] + self._subtracted)

    def _merge(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_values = self._waiting, [], 0
        new = _Counts.sum([_Counts(hashes, counts) for hashes, counts, _ in waiting])
        if self._earlier is not None:
            unseen = new.counts[~self._earlier.has(new.hashes)].astype(np.float64)
            self._unseen += float(unseen.sum())
            self._unseen_squares += float(np.square(unseen).sum())
        end = len(new.hashes) if self._threshold == _ALL else np.searchsorted(new.hashes, np.uint64(self._threshold))
        merged = _Counts.sum([self._sample, _Counts(new.hashes[:end], new.counts[:end])])
        if self._hot is not None and self._seen is not None:
            self._hot = self._cut(_Counts.sum([self._hot, new]))
            self._seen.add(new.hashes)
        elif len(merged.hashes) > self._bound:
            self._hot, self._seen = self._cut(merged), SeenValues()
            self._seen.add(merged.hashes)
        if len(merged.hashes) > self._bound:
            self._threshold = int(merged.hashes[self._bound])
            merged = _Counts(merged.hashes[: self._bound], merged.counts[: self._bound])
        self._sample = merged
        # The text of a value that is new among the hottest is known, because the value is among the waiting values.
        hot = self._falling().hashes[:SHOWN]
        names = {int(h): self._names[int(h)] for h in hot if int(h) in self._names}
        for hashes, _, values in waiting:
            for at in np.flatnonzero(np.isin(hashes, hot)).tolist():
                value = values[at].as_py()
                text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
                names.setdefault(int(hashes[at]), text)
        self._names = names

    def _cut(self, counts: _Counts) -> _Counts:
        """If there are too many counts, subtract the largest count that does not fit, and keep counts above 0."""
        most = self._bound // 4
        if len(counts.hashes) <= most:
            return counts
        off = int(np.partition(counts.counts, -most - 1)[-most - 1])
        self._subtracted += off
        left = counts.counts > off
        return _Counts(counts.hashes[left], counts.counts[left] - off)


def _hashes(values: pa.Array) -> Hashes:
    """Hash values so that equal numbers of different types have one hash, e.g. 5 and 5.0."""
    if arrow.is_time(values.type):
        values = pc.cast(values, pa.timestamp("us", getattr(values.type, "tz", None)), safe=False).cast(pa.int64())
    if not (pa.types.is_floating(values.type) or pa.types.is_decimal(values.type)):
        return arrow.hash_values(values)
    numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    whole = (numbers == np.floor(numbers)) & (np.abs(numbers) <= 2.0**53)
    return hash_integers(np.where(whole, np.where(whole, numbers, 0).astype(np.int64), numbers.view(np.int64)))


class SeenValues:
    """Bloom filter over 64-bit hashes in 16 MiB.

    An added value is always found. A value that was not added is found with probability (share of set bits)⁴, which is
    0.4 % after 10 million values. The four bits of a value are at the positions h₁ + i h₂, where h₁ and h₂ are halves
    of the hash (Kirsch and Mitzenmacher, "Less hashing, same performance", ESA 2006).
    """

    def __init__(self) -> None:
        self._bytes = np.zeros(1 << (_BITS - 3), dtype=np.uint8)

    def add(self, hashes: Hashes) -> None:
        """Add values ``[n]`` by their hashes."""
        for byte, bit in self._bits_of(hashes):
            np.bitwise_or.at(self._bytes, byte, bit)

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Return whether each of these values ``[n]`` is found."""
        found = np.ones(len(hashes), dtype=np.bool_)
        for byte, bit in self._bits_of(hashes):
            found &= (self._bytes[byte] & bit) != 0
        return found

    @property
    def false_rate(self) -> float:
        """Probability that a value that was never added is found."""
        return (int.from_bytes(self._bytes.tobytes(), "big").bit_count() / (8 * len(self._bytes))) ** _HASHES

    @staticmethod
    def _bits_of(hashes: Hashes) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        first, step = hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32) | np.uint64(1)
        for i in range(_HASHES):
            at = (first + np.uint64(i) * step) & np.uint64((1 << _BITS) - 1)
            yield (at >> np.uint64(3)).astype(np.int64), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)


# -- samples of rows, and counts over all rows --------------------------------------------------------------------


def take_sample(groups: Sequence[RowGroup], names: Sequence[str]) -> pa.Table:
    """Read rows that are spread evenly over the row groups. Rows keep their order, and memory is bounded."""
    total = sum(group.samples for group in groups)
    wanted = min(SAMPLED_ROWS, max(_FEWEST_ROWS, _SAMPLED_CELLS // max(1, len(names))))
    per_group = max(1, total // len(groups))
    chosen = spread_groups(groups, 4 * wanted // per_group)
    share = min(1.0, wanted / sum(group.samples for group in chosen))
    parts: list[pa.Table] = []
    for group in chosen:
        count = max(1, round(share * group.samples))
        rows = np.unique(np.linspace(0, group.samples - 1, count).round().astype(np.int64))
        start = 0
        for batch in _batches(group, names):
            mine = rows[(rows >= start) & (rows < start + len(batch))] - start
            parts.append(part := batch.take(pa.array(mine)))
            start += len(batch)
            for name in names:
                try:
                    part[name].validate(full=True)
                except pa.ArrowInvalid as error:  # e.g. text that is not UTF-8
                    raise DataError(
                        f"{group}, column '{name}': {error}, expected values of its type. Rewrite the column."
                    ) from None
    kinds = pa.schema([(name, arrow.common_type([part.schema.field(name).type for part in parts])) for name in names])
    return pa.concat_tables([part.select(names).cast(kinds, safe=False) for part in parts])


def spread_groups(groups: Sequence[RowGroup], count: int) -> list[RowGroup]:
    """Return about ``count`` row groups that are spread evenly over the data."""
    at = np.linspace(0, len(groups) - 1, max(1, min(len(groups), count))).round()
    return [groups[int(i)] for i in np.unique(at)]


def _batches(group: RowGroup, names: Sequence[str]) -> Iterator[pa.Table]:
    if group.samples <= 4 * _BATCH_ROWS:
        yield group.read(names)
    else:
        yield from group.batches(names, _BATCH_ROWS)


def count_distinct(groups: Sequence[RowGroup], kinds: Mapping[str, pa.DataType]) -> dict[str, int]:
    """Estimate the number of distinct values of columns in all rows.

    If there are too many cells (rows × columns), only some row groups are counted. If the counted row groups have d
    distinct values, and half of these row groups have h, the estimate for all rows is
    d · (all rows ÷ counted rows)^log₂(d ÷ h). ``kinds`` maps each column to a type that can hold the values of all
    files, see `arrow.common_type`.
    """
    names = list(kinds)
    total = sum(group.samples for group in groups)
    budget = max(_BATCH_ROWS, _COUNTED_CELLS // max(1, len(names)))
    chosen = spread_groups(groups, len(groups) if total <= budget else max(2, len(groups) * budget // total))
    counts = {name: ValueCounts(most_distinct(len(names))) for name in names}
    at_half: dict[str, float] = {}
    rows = 0

    def add(name: str, batch: pa.Table) -> None:
        counts[name].add(present_values(batch[name].cast(kinds[name], safe=False).combine_chunks()))

    with ThreadPoolExecutor(_READERS) as pool:
        for half in (chosen[::2], chosen[1::2]):
            for group in half:
                rows += group.samples
                for batch in _batches(group, names):
                    list(pool.map(add, names, repeat(batch)))
            at_half = at_half or {name: counted.distinct.value for name, counted in counts.items()}
    found: dict[str, int] = {}
    for name in names:
        counted = counts[name].distinct.value
        growth = math.log2(max(1.0, counted) / max(1.0, at_half[name])) if rows < total else 0.0
        found[name] = round(counted * (total / max(1, rows)) ** min(1.0, max(0.0, growth)))
    return found
