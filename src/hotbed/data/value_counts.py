"""Count distinct values and find the hottest, in one pass and bounded memory: `ValueCounts`.

*Theory of operation.* Values are known by 64-bit hashes. Up to a bound on the number of distinct ones, each has its
exact count. Beyond it three summaries are kept:

- *A sample of the values*, those with the smallest hashes, with their exact counts: a value below the last threshold θ
  (as a share of all hashes) was below all earlier ones, so no occurrence of it was missed. k values below θ stand for
  k / θ distinct ones, with a relative standard error of 1 / √(k − 1) (Dasgupta, Lang, Rhodes and Thaler, "A framework
  for estimating stream expression cardinalities", ICDT 2016).
- *The hottest values*: when counts are too many, the largest count that does not fit is taken off all of them, and
  those with nothing left are dropped (Misra and Gries, "Finding repeated elements", 1982; merged as in Agarwal et al.,
  "Mergeable summaries", PODS 2012). What was taken off, in all, is added again: counts are then exact for values that
  were always among the hottest, and too high by that much at most.
- *Which values there are* (`SeenValues`), for data that are compared with these: an occurrence of a value that is not
  found is unseen for certain, and of all unseen ones a known share f is not found out, so that their number is
  divided by 1 − f.

What comes out depends on the values and the order of the rows alone, not on a random generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.data import arrow
from hotbed.data.hashing import Hashes, hash_integers
from hotbed.data.seen_values import SeenValues
from hotbed.data.zipf_source import RANKED, fitted_exponent

MOST_DISTINCT = 1 << 18
"""Distinct values of a column up to which all are counted; sampled ones beyond it."""
FEWEST_DISTINCT = 1 << 12
_OF_ALL_COLUMNS = 1 << 23
SHOWN = 10
"""Hottest values that are known by what they are, and not by their hash alone."""
_MOST_WAITING = 256
_ALL = 1 << 64  # hashes that there are

Integers = NDArray[np.int64]


class Estimate(NamedTuple):
    """A figure and its standard error, which is 0 where it is exact."""

    value: float
    error: float


class _Counts(NamedTuple):
    """Values by rising hash, and how often each occurs."""

    hashes: Hashes
    counts: Integers


def _none() -> _Counts:
    return _Counts(np.empty(0, np.uint64), np.empty(0, np.int64))


def most_distinct(columns: int) -> int:
    """Distinct values to count of each of so many columns, so that memory is bounded: some 400 MB for all of them."""
    return max(FEWEST_DISTINCT, min(MOST_DISTINCT, _OF_ALL_COLUMNS // max(1, columns)))


class ValueCounts:
    """Counts of the values of one column: exact for up to ``most_distinct`` different ones; beyond, as many are kept.

    ``earlier`` has the counts of all earlier data, in which values may be absent.
    """

    def __init__(self, most_distinct: int = MOST_DISTINCT, earlier: ValueCounts | None = None) -> None:
        self.total = 0
        self._earlier, self._unseen, self._unseen_squares = earlier, 0.0, 0.0
        self._seen: SeenValues | None = None  # once values are sampled
        self._bound = most_distinct
        self._sample, self._threshold = _none(), _ALL
        self._hot: _Counts | None = None  # once values are sampled
        self._taken_off = 0
        self._waiting: list[tuple[Hashes, Integers, pa.Array]] = []
        self._waiting_values = 0
        self._names: dict[int, str] = {}

    def add(self, values: pa.Array) -> None:
        """Add values ``[n]`` of a type that has hashes, none of them null."""
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
        kept = len(self._all.hashes)
        if self.is_exact:
            return Estimate(kept, 0.0)
        found = kept / self._rate
        return Estimate(found, found / math.sqrt(max(1, kept - 1)))

    @property
    def is_exact(self) -> bool:
        """Whether all values were counted."""
        self._merge()
        return self._hot is None

    @property
    def hottest(self) -> list[tuple[str, int]]:
        """The first `ranked` values as text, `SHOWN` at most, and their counts, see `hottest_error`."""
        hot, count = self._falling(), min(SHOWN, self.ranked)
        return [(self._names[int(h)], int(n)) for h, n in zip(hot.hashes[:count], hot.counts[:count], strict=True)]

    @property
    def hottest_error(self) -> int:
        """Occurrences by which the count of a hot value is too high, at most; 0 where all values were counted."""
        self._merge()
        return self._taken_off

    def top_shares(self, sizes: Sequence[int]) -> list[float]:
        """Share of all occurrences that so many of the `ranked` values have; NaN where there are none."""
        if not self.total:
            return [math.nan] * len(sizes)
        sums = np.append(0, np.cumsum(self.known_hot()))
        at = np.minimum(np.asarray(sizes, np.int64), len(sums) - 1)
        return np.minimum(sums[at] / self.total, 1.0).tolist()

    @property
    def ranked(self) -> int:
        """Number of values of which it is known that they are the most frequent: all, where all were counted."""
        return len(self.known_hot())

    def known_hot(self) -> Integers:
        """Counts ``[K]``, falling, of the `ranked` values; those that are too high by half at most."""
        counts = self._falling().counts
        return counts[counts > 2 * self._taken_off]

    def zipf_exponent(self) -> float | None:
        """Exponent of Zipf's law over the most frequent values, see `fitted_exponent`; None where they are too few."""
        counts = self.known_hot()
        return fitted_exponent(counts[counts >= RANKED])

    @property
    def unseen_share(self) -> Estimate:
        """Share of the occurrences whose value is not among the earlier ones."""
        self._merge()
        false = self._false_rate
        total = max(1, self.total) * (1 - false)
        return Estimate(self._unseen / total, math.sqrt(false * self._unseen_squares) / total)

    @property
    def unseen_values(self) -> Estimate:
        """Number of distinct values that are not among the earlier ones."""
        hashes = self._all.hashes
        new = 0 if self._earlier is None else int((~self._earlier.has(hashes)).sum())
        rate = self._rate * (1 - self._false_rate)
        return Estimate(new / rate, math.sqrt((1 - rate) * new) / rate)

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Whether values of these hashes ``[n]`` occur; see `SeenValues` where not all values were counted."""
        known = self._all.hashes
        if self._seen is not None:
            return self._seen.has(hashes)
        if not len(known):
            return np.zeros(len(hashes), np.bool_)
        return known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes

    @property
    def _false_rate(self) -> float:
        return 0.0 if self._earlier is None or self._earlier._seen is None else self._earlier._seen.false_rate

    def shares_beside(self, other: ValueCounts, values: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Counts of the most frequent values of both, here and there, and last of all other values."""
        mine, others = self._falling(), other._falling()
        hashes = np.union1d(mine.hashes[:values], others.hashes[:values])
        first, second = self._counts_of(hashes), other._counts_of(hashes)
        return (
            np.append(first, max(0, self.total - int(first.sum()))),
            np.append(second, max(0, other.total - int(second.sum()))),
        )

    def _counts_of(self, hashes: Hashes) -> Integers:
        known = self._all if self._hot is None else self._hot
        at = np.minimum(np.searchsorted(known.hashes, hashes), max(0, len(known.hashes) - 1))
        if not len(known.hashes):
            return np.zeros(len(hashes), np.int64)
        return np.where(known.hashes[at] == hashes, known.counts[at] + self._taken_off, 0)

    @property
    def _rate(self) -> float:
        return self._threshold / _ALL

    @property
    def _all(self) -> _Counts:
        self._merge()
        return self._sample

    def _falling(self) -> _Counts:
        """The most frequent values, the first of which are certain; counts as they are at most."""
        self._merge()
        hashes, counts = self._sample if self._hot is None else self._hot
        order = np.argsort(-counts, kind="stable")
        return _Counts(hashes[order], counts[order] + self._taken_off)

    def _merge(self) -> None:
        """Bring in what waits."""
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_values = self._waiting, [], 0
        new = _summed([_Counts(hashes, counts) for hashes, counts, _ in waiting])
        if self._earlier is not None:
            unseen = new.counts[~self._earlier.has(new.hashes)].astype(np.float64)
            self._unseen += float(unseen.sum())
            self._unseen_squares += float(np.square(unseen).sum())
        merged = _summed([self._sample, _below(new, self._threshold)])
        if self._hot is not None and self._seen is not None:
            self._hot = self._cut(_summed([self._hot, new]))
            self._seen.add(new.hashes)
        elif len(merged.hashes) > self._bound:
            self._hot, self._seen = self._cut(merged), SeenValues()
            self._seen.add(merged.hashes)
        if len(merged.hashes) > self._bound:
            self._threshold = int(merged.hashes[self._bound])
            merged = _Counts(merged.hashes[: self._bound], merged.counts[: self._bound])
        self._sample = merged
        self._name(waiting)

    def _cut(self, counts: _Counts) -> _Counts:
        """The most frequent values, as many as fit; what does not is taken off all."""
        most = self._bound // 4
        if len(counts.hashes) <= most:
            return counts
        off = int(np.partition(counts.counts, len(counts.counts) - most - 1)[len(counts.counts) - most - 1])
        self._taken_off += off
        left = counts.counts > off
        return _Counts(counts.hashes[left], counts.counts[left] - off)

    def _name(self, waiting: list[tuple[Hashes, Integers, pa.Array]]) -> None:
        """Remember what the hottest values are: whatever becomes one of them is among those that come in then."""
        hot = self._falling().hashes[:SHOWN]
        self._names = {int(h): self._names[int(h)] for h in hot if int(h) in self._names}
        for hashes, _, values in waiting:
            for at in np.flatnonzero(np.isin(hashes, hot)).tolist():
                if int(hashes[at]) not in self._names:
                    self._names[int(hashes[at])] = _shown(values[at])


def _hashes(values: pa.Array) -> Hashes:
    """Hashes by which equal numbers are equal: 5 and 5.0, whatever their type."""
    if arrow.is_time(values.type):
        values = pc.cast(values, pa.timestamp("us", getattr(values.type, "tz", None)), safe=False).cast(pa.int64())
    if not (pa.types.is_floating(values.type) or pa.types.is_decimal(values.type)):
        return arrow.hashes(values)
    numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    whole = (numbers == np.floor(numbers)) & (np.abs(numbers) <= 2.0**53)
    return hash_integers(np.where(whole, np.where(whole, numbers, 0).astype(np.int64), numbers.view(np.int64)))


def _shown(value: pa.Scalar) -> str:
    found = value.as_py()
    return found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else str(found)


def _summed(parts: list[_Counts]) -> _Counts:
    """One count per hash."""
    hashes, counts = np.concatenate([p.hashes for p in parts]), np.concatenate([p.counts for p in parts])
    if not len(hashes):
        return _none()
    order = np.argsort(hashes, kind="stable")
    hashes, counts = hashes[order], counts[order]
    first = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    return _Counts(hashes[first], np.add.reduceat(counts, first))


def _below(counts: _Counts, threshold: int) -> _Counts:
    if threshold == _ALL:
        return counts
    end = int(np.searchsorted(counts.hashes, np.uint64(threshold)))
    return _Counts(counts.hashes[:end], counts.counts[:end])
