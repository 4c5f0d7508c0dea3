"""Draw random numbers that are pure functions of a counter, and ranks by Zipf's law made of them.

Number i of a stream is output i of SplitMix64 started at the stream's key, so any part of a stream is made without the
rest.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from hotbed.data.hashing import Hashes, mix
from hotbed.errors import SpecError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_EXPONENT = 16
"""Largest exponent of Zipf's law."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64's state


@cache
def stream(*names: int) -> np.uint64:
    """Key of the stream with these names, integers of at least 0, of which the last is not 0."""
    return np.random.SeedSequence(names).generate_state(1, np.uint64)[0]


def bits(key: np.uint64, counters: Hashes) -> Hashes:
    """Random words of a stream at these counters ``[n]``."""
    state = counters * _STEP
    state += key
    return mix(state)


def uniform(key: np.uint64, counters: Hashes) -> Floats:
    """Random numbers in [0, 1) of a stream at these counters ``[n]``, multiples of 2⁻⁵³."""
    return (bits(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Zipf:
    """Zipf's law over ranks 0 … R − 1: rank r has a probability in proportion to (r + 1)^−s.

    Sampled by rejection-inversion (Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone
    discrete distributions", ACM TOMACS 6(3), 1996): a point under the continuous x^−s by inversion, rounded to the
    nearest rank, and drawn again where it is in the sliver above the discrete law. No table, any R, more than 85 % are
    accepted at once. With ``expm1`` and ``log1p`` the integral is accurate at exponents near 1, too.

    Parameters
    ----------
    rows
        Number of ranks R.
    exponent
        s; 0 is the uniform distribution.

    Raises
    ------
    SpecError
        If a parameter is out of range.
    """

    def __init__(self, rows: int, exponent: float) -> None:
        if not 1 <= rows <= 1 << 52:
            raise SpecError(f"rows is {rows:,}, must be between 1 and 2⁵² ({1 << 52:,})")
        if not 0 <= exponent <= MAX_EXPONENT:
            raise SpecError(f"exponent is {exponent}, must be between 0 (all rows alike) and {MAX_EXPONENT}")
        self.rows = rows
        self.exponent = exponent
        # The first rank's own sliver is left out: its interval begins where the area is 1 = 1^−s.
        self._first = float(self._area(np.array([1.5]))[0]) - 1.0
        self._last = float(self._area(np.array([rows + 0.5]))[0])
        # Within this distance below a rank all points are accepted (at rank 2, for which it is smallest).
        below_2 = self._area(np.array([2.5])) - 2.0**-exponent
        self._sure = float(2.0 - self._inverse(below_2)[0])

    def draw(self, names: tuple[int, ...], counters: Hashes) -> Integers:
        """Ranks ``[n]`` at these counters of the stream with these names (see `stream`), each by itself."""
        ranks = np.empty(len(counters), dtype=np.int64)
        left, attempt = np.arange(len(counters)), 1
        while len(left):
            drawn, accepted = self._propose(
                uniform(stream(*names, attempt), counters[left] if attempt > 1 else counters)
            )
            if attempt == 1:
                ranks[:] = drawn
            else:
                ranks[left[accepted]] = drawn[accepted]
            left = left[~accepted]
            attempt += 1
        return ranks

    def _propose(self, u: Floats) -> tuple[Integers, NDArray[np.bool_]]:
        u *= self._first - self._last
        u += self._last
        x = self._inverse(u)
        rank = np.clip(np.floor(x + 0.5), 1, self.rows)
        accepted = rank - x <= self._sure
        unsure = np.flatnonzero(~accepted)
        r = rank[unsure]
        accepted[unsure] = u[unsure] >= self._area(r + 0.5) - r**-self.exponent
        return rank.astype(np.int64) - 1, accepted

    def _area(self, x: Floats) -> Floats:
        """∫ t^−s dt from 1 to x."""
        log = np.log(x)
        return log if self.exponent == 1 else np.expm1((1 - self.exponent) * log) / (1 - self.exponent)

    def _inverse(self, area: Floats) -> Floats:
        log = area if self.exponent == 1 else np.log1p((1 - self.exponent) * area) / (1 - self.exponent)
        return np.exp(log)
