"""Measure numerical columns in one pass, in bounded memory: mean, deviation, extremes and quantiles.

Mean and deviation are exact up to rounding (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979). Quantiles are estimated from a sample of `SAMPLE` finite values. A position in the
data is hashed, and the values at the positions with the smallest hashes are the sample. Quantiles of up to `SAMPLE`
values are exact. For more values, the rank of a quantile is off by 0.2 % of the number of values on average. The sample
depends only on the data, and not on a random generator or the order of merging, so repeated runs measure the same bits.
Sketches such as KLL are smaller, but random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.derived_features import Bucket
from hotbed.data.hashing import mix

SAMPLE = 1 << 16
"""Default number of values that are sampled from a column for quantiles."""
_LARGEST = 1e307
"""Limit to which numbers are clipped, so that their differences are finite."""

Array = NDArray[Any]


@dataclass
class ColumnStatistics:
    """Statistics of the finite values of one column."""

    count: int = 0  # finite values
    missing: int = 0  # NaN or infinite values
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean
    low: float = math.inf
    high: float = -math.inf
    limit: int = SAMPLE  # number of values that are sampled for quantiles
    _hashes: Array = field(default_factory=lambda: np.empty(0, np.uint64), repr=False)
    _sample: Array = field(default_factory=lambda: np.empty(0, np.float64), repr=False)

    def add(self, values: Array, first: int) -> None:
        """Add values ``[n]`` float64. ``first`` is the position of the first value in the data.

        Each position must be added only once.
        """
        finite = np.isfinite(values)
        kept = values[finite]
        part = ColumnStatistics(count=len(kept), missing=len(values) - len(kept))
        if len(kept):
            part.low, part.high = float(kept.min()), float(kept.max())
            with np.errstate(over="ignore", invalid="ignore"):
                part.mean = float(kept.mean())
                part.squares = float(np.square(kept - part.mean).sum())
            part._hashes = mix(np.flatnonzero(finite).astype(np.uint64) + np.uint64(first))
            part._sample = kept
        self.merge(part)

    def merge(self, other: ColumnStatistics) -> None:
        """Add the values of ``other`` to these statistics."""
        self.missing += other.missing
        if not other.count:
            return
        count = self.count + other.count
        with np.errstate(over="ignore", invalid="ignore"):
            delta = other.mean - self.mean
            self.squares += other.squares + float(np.float64(delta) * delta * (self.count * other.count / count))
            self.mean += delta * (other.count / count)
        self.count, self.low, self.high = count, min(self.low, other.low), max(self.high, other.high)
        hashes, sample = other._hashes, other._sample
        if len(self._hashes) == self.limit:  # drops most values of ``other`` before the copies
            small = hashes < self._hashes.max()
            hashes, sample = hashes[small], sample[small]
        hashes, sample = np.concatenate([self._hashes, hashes]), np.concatenate([self._sample, sample])
        if len(hashes) > self.limit:
            small = np.argpartition(hashes, self.limit - 1)[: self.limit]
            hashes, sample = hashes[small], sample[small]
        self._hashes, self._sample = hashes, sample

    @property
    def deviation(self) -> float:
        """Standard deviation of the values: 0 if all are equal, infinite if their squares overflow."""
        if self.low >= self.high:
            return 0.0
        return math.sqrt(self.squares / self.count) if math.isfinite(self.squares) else math.inf

    def quantiles(self, at: Array) -> Array:
        """Return the quantiles ``[k]`` at these shares from 0 to 1. Quantiles 0 and 1 are the exact extremes."""
        found = np.quantile(self._sample.clip(-_LARGEST, _LARGEST), at)
        return np.where(at <= 0, self.low, np.where(at >= 1, self.high, found))

    def usual_distance(self) -> tuple[float, float]:
        """Return the median and a typical distance of values from it. Both are robust to a few extreme values.

        The distance is an estimate of the standard deviation. In a normal distribution, the quartiles are 1.35 standard
        deviations apart, and the percentiles 1 and 99 are 4.65 apart. The distance follows from the quartiles, or from
        a tenth of the distance between the percentiles if that is larger. If the quartiles are equal, the distance
        follows from the percentiles or, if those are also equal, from the extremes. It is 0 if all values are equal.
        """
        first, lower, median, upper, last = self.quantiles(np.array([0.01, 0.25, 0.5, 0.75, 0.99])).tolist()
        if upper > lower:
            return median, max((upper - lower) / 1.35, (last - first) / 46.5)
        whole = max(-_LARGEST, min(self.high, _LARGEST)) - max(-_LARGEST, min(self.low, _LARGEST))
        return median, ((last - first) or whole) / 4.65


def quantile_boundaries(bucket: Bucket, statistics: ColumnStatistics) -> list[float]:
    """Return the ascending boundaries of intervals with equal counts. Repeated values yield fewer boundaries."""
    if not statistics.count or bucket.quantiles is None:
        return []
    shares = np.arange(1, bucket.quantiles) / bucket.quantiles
    found = np.unique(statistics.quantiles(shares))
    return found[found > statistics.low].tolist()
