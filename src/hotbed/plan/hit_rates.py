"""Model the popularity of rows by a law or by counts, and estimate distinct rows of a batch.

Lookups are modelled as a Poisson process: among ``n`` lookups of a table, a row with the share ``p`` occurs with
probability ``1 − exp(−n p)``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_CUTS_PER_OCTAVE = 4


class Popularity(Protocol):
    """Accesses of the rows of a table, which are numbered by falling popularity."""

    def rows_above(self, accesses: float) -> int:
        """Return the number of rows with at least this number of accesses per sample."""
        ...

    def accesses(self, rows: int) -> float:
        """Return the accesses per sample of the first ``rows`` rows together."""
        ...


@dataclass(frozen=True)
class Zipf:
    """Zipf's law: row ``r`` (from 1) is accessed ``ids · r^−exponent / Σ r^−exponent`` times per sample."""

    rows: int
    exponent: float = 1.05
    ids: float = 1.0

    def rows_above(self, accesses: float) -> int:  # noqa: D102
        first = self.ids / _harmonic(self.rows, self.exponent)
        if accesses <= first * self.rows**-self.exponent:
            return self.rows
        return int((first / accesses) ** (1 / self.exponent)) if self.exponent else 0

    def accesses(self, rows: int) -> float:  # noqa: D102
        return self.ids * _harmonic(rows, self.exponent) / _harmonic(self.rows, self.exponent)


class Curve:
    """Known accesses per sample of the first rows, for rising numbers of rows. Rows in between are equal."""

    def __init__(self, rows: Sequence[int], accesses: Sequence[float]) -> None:
        self._rows, self._accesses = [0, *rows], [0.0, *accesses]

    def rows_above(self, accesses: float) -> int:  # noqa: D102
        found = 0
        for (a, b), (before, after) in zip(pairwise(self._rows), pairwise(self._accesses), strict=True):
            if b > a and (after - before) / (b - a) >= accesses:
                found = b
        return found

    def accesses(self, rows: int) -> float:  # noqa: D102
        i = max(bisect_left(self._rows, rows), 1)
        share = (rows - self._rows[i - 1]) / max(self._rows[i] - self._rows[i - 1], 1)
        return self._accesses[i - 1] + share * (self._accesses[i] - self._accesses[i - 1])


@dataclass(frozen=True)
class Scaled:
    """A popularity with all accesses multiplied by a factor."""

    popularity: Popularity
    factor: float

    def rows_above(self, accesses: float) -> int:  # noqa: D102
        if accesses <= 0:
            return self.popularity.rows_above(0.0)
        return self.popularity.rows_above(accesses / self.factor) if self.factor > 0 else 0

    def accesses(self, rows: int) -> float:  # noqa: D102
        return self.factor * self.popularity.accesses(rows)


class Counted:
    """Popularity from counts.

    Parameters
    ----------
    counts
        Accesses of the first rows ``[≤ R]``. Later rows have none. Where counts rise, a row gets the larger count of a
        later row, so that popularity falls.
    """

    def __init__(self, counts: Tensor, samples: int) -> None:
        falling = counts.double().flip(0).cummax(0).values.flip(0) / samples
        self._rising = -falling
        self._sums = counts.double().cumsum(0) / samples

    def rows_above(self, accesses: float) -> int:  # noqa: D102
        return int(torch.searchsorted(self._rising, -accesses, right=True))

    def accesses(self, rows: int) -> float:  # noqa: D102
        return float(self._sums[min(rows, len(self._sums)) - 1]) if rows else 0.0


@lru_cache(maxsize=1 << 16)
def _first_terms(n: int, exponent: float) -> float:
    return sum(r**-exponent for r in range(1, n + 1))


def _harmonic(n: int, exponent: float) -> float:
    """Return Σ r^−exponent for r = 1 … n, by the Euler-Maclaurin formula beyond the first terms."""
    few = min(n, 1000)
    total = _first_terms(few, exponent)
    if n > few:
        power = 1 - exponent
        total += math.log(n / few) if abs(power) < 1e-12 else (n**power - few**power) / power
        total += (n**-exponent - few**-exponent) / 2
        total += exponent * (few ** (-exponent - 1) - n ** (-exponent - 1)) / 12
    return total


class ExpectedRows:
    """Expected numbers of distinct rows in batches."""

    def __init__(self, rows: int, popularity: Popularity) -> None:
        cuts = {int(2 ** (i / _CUTS_PER_OCTAVE)) for i in range(_CUTS_PER_OCTAVE * rows.bit_length())}
        self.edges: np.ndarray[Any, Any] = np.array(sorted({0, rows, *(cut for cut in cuts if cut < rows)}))
        """Rows where the popularity is evaluated. Rows in between are equal."""
        accesses = np.array([popularity.accesses(int(edge)) for edge in self.edges])
        self.rates: np.ndarray[Any, Any] = np.diff(accesses) / np.diff(self.edges) / max(accesses[-1], 1e-300)
        """Share of the table's lookups of each row between two edges."""

    def distinct(self, rows: range, lookups: float, count: int | None = None) -> float:
        """Return the expected distinct rows among ``rows``, in a batch with ``lookups`` of the whole table.

        With ``count``: among this number of rows with the average popularity of ``rows``.
        """
        within = self._within(rows, count)
        return min(float((within * -np.expm1(-self.rates * lookups)).sum()), len(rows) if count is None else count)

    def share(self, rows: range, count: int | None = None) -> float:
        """Return these rows' share of the table's lookups; ``count`` as for `distinct`."""
        return min(float((self._within(rows, count) * self.rates).sum()), 1.0)

    def _within(self, rows: range, count: int | None) -> np.ndarray[Any, Any]:
        """Return the number of these rows between two edges, if they are evenly spread."""
        among = max(rows.stop - rows.start, 1)
        return np.diff(self.edges.clip(rows.start, rows.stop)) * ((len(rows) if count is None else count) / among)
