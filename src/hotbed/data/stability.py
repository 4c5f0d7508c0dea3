"""Say how far two distributions are apart: population stability index, Jensen-Shannon divergence, rates and intervals.

A number falls into one of `BINS` bins by its sign and size, four per doubling, so that no bin depends on the data and
counts of several parts, days or ranks add up.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PER_DOUBLING = 4
SMALLEST, LARGEST = -30, 64
"""Powers of 2 between which sizes are told apart: ratios of a billionth, times in nanoseconds."""
REACH = (LARGEST - SMALLEST) * PER_DOUBLING
BINS = 2 * REACH + 2
"""Bins of numbers: negative ones, 0, positive ones, and the last for missing."""
_LEAST = 0.5
"""Samples that a bin has at least, in an index."""
_Z = 1.959963984540054  # of a two-sided interval of 95 %

Counts = NDArray[Any]


class Interval(NamedTuple):
    """A figure and its confidence interval of 95 %."""

    value: float
    low: float
    high: float


def bins_of(values: Tensor) -> Tensor:
    """Bin of each number, int64 of the same shape."""
    wide = values.double()
    steps = ((wide.abs().log2() - SMALLEST) * PER_DOUBLING).ceil().clamp(1, REACH)
    signed = torch.where(wide < 0, -steps, steps).where(wide != 0, 0)
    return torch.where(wide.isnan(), BINS - 1, signed.nan_to_num().long() + REACH)


def upper_edge(number: int) -> float:
    """The largest number in a bin; the bin of the largest numbers has no end, and that of missing ones no edge."""
    step = number - REACH
    return math.copysign(2.0 ** (SMALLEST + (step if step > 0 else -step - 1) / PER_DOUBLING), step) if step else 0.0


def stability_index(first: Counts, second: Counts) -> float:
    """Population stability index of counts ``[bins]``: Σ (p − q) ln(p / q), where p and q are shares of all.

    Below 0.1 two distributions are taken to be alike, above 0.25 they are not, as a rule of thumb (Siddiqi, "Credit
    Risk Scorecards", 2006). A bin counts as half a sample at least, so that empty ones do not make it infinite.
    """
    p, q = np.maximum(first, _LEAST), np.maximum(second, _LEAST)
    p, q = p / p.sum(), q / q.sum()
    return float(((p - q) * np.log(p / q)).sum())


def jensen_shannon(first: Counts, second: Counts) -> float:
    """Jensen-Shannon divergence of counts ``[bins]`` in bits, from 0 (alike) to 1 (no bin in common).

    ½ Σ p log₂(p / m) + ½ Σ q log₂(q / m) with m = (p + q) / 2 (Lin, "Divergence measures based on the Shannon entropy",
    IEEE Transactions on Information Theory 37(1), 1991). NaN where one of both has no counts.
    """
    if not first.sum() or not second.sum():
        return math.nan
    shares = [counts / counts.sum() for counts in (first, second)]
    middle = (shares[0] + shares[1]) / 2
    parts = [float((s[s > 0] * np.log2(s[s > 0] / middle[s > 0])).sum()) for s in shares]
    return max(0.0, sum(parts) / 2)


def rate(positives: float, samples: int) -> Interval:
    """Share of positives with its interval by Wilson's score.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) (Wilson, Journal of the American Statistical Association 22,
    1927). Of labels between 0 and 1, whose variance is smaller than p(1−p), the interval is wider than it need be.
    """
    if not samples:
        return Interval(math.nan, math.nan, math.nan)
    p, z = positives / samples, _Z
    middle, divisor = p + z * z / (2 * samples), 1 + z * z / samples
    reach = z * math.sqrt(max(0.0, p * (1 - p)) / samples + z * z / (4 * samples * samples))
    return Interval(p, max(0.0, (middle - reach) / divisor), min(1.0, (middle + reach) / divisor))


def rate_change(before: Interval, after: Interval) -> Interval:
    """Difference of two independent rates, after − before, with its interval.

    By their own intervals: Δ − √((p₂ − l₂)² + (u₁ − p₁)²) to Δ + √((u₂ − p₂)² + (p₁ − l₁)²) (Newcombe, "Interval
    estimation for the difference between independent proportions", Statistics in Medicine 17, 1998, method 10).
    """
    change = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Interval(change, change - down, change + up)
