"""How many rows of a table are popular, estimated from few of its rows: for tables too large to count.

*Formula* (Adnan et al., "Accelerating recommendation system training by leveraging popular choices", PVLDB 15(1), 2021,
arXiv 2103.00686). Of the table's R rows, n = 35 chunks of m = 1024 rows are drawn and only these are counted. Let x_i
be the rows of chunk i with at least t accesses per sample. The rows of the table with so many are at most

    N(t) = R / m · (x̄ + t* · s / √n),    s² = Σ (x_i − x̄)² / (n − 1),    t* = 3.34,

the upper bound of Student's confidence interval, 99.9 % one-sided.

*What differs here.* The paper's chunks are neighbouring rows, which were numbered at random. Here rows are numbered by
falling popularity: a chunk of neighbours would be popular as a whole or not at all, and 35 of them would most often
miss the popular ones altogether. So a chunk is 1,024 rows drawn at random. And as N(t) may fall by a hair where t
falls, the largest value at any higher threshold is taken: more room never means fewer rows.

*Where it holds.* Chunks that hold a handful of popular rows are not normally distributed. With 100 popular rows among
the 35,840 that are drawn, the bound held in more than 99 % of drawings (``tests/data/test_chunk_estimate.py``); where
none is drawn, it is 0. What is chosen by it never takes more bytes than are there, as a prefix of known size is taken:
what errs is the share of the budget that a table gets.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import SpecError

CHUNKS, CHUNK_ROWS, T_STAR = 35, 1024, 3.34


class ChunkEstimate:
    """Accesses of rows that were drawn at random, and what follows for all; a popularity that a plan can go by.

    Parameters
    ----------
    rows
        Rows of the table.
    seed
        Which rows are drawn.

    Raises
    ------
    SpecError
        If the table has no more rows than are drawn.
    """

    def __init__(self, rows: int, *, seed: int = 0) -> None:
        drawn_rows = CHUNKS * CHUNK_ROWS
        if rows <= drawn_rows:
            raise SpecError(
                f"a table of {rows:,} rows has no more than the {drawn_rows:,} that are drawn; count them all"
            )
        drawn = np.random.default_rng(seed).choice(rows, drawn_rows, replace=False)
        order = np.argsort(drawn)
        self._table_rows, self._rows, self._chunk = rows, drawn[order], order // CHUNK_ROWS
        self._counts = np.zeros(drawn_rows, dtype=np.int64)
        self._samples = 0

    def count(self, ids: NDArray[Any], samples: int) -> None:
        """Count the ids ``[n]`` of so many more samples."""
        at = np.minimum(np.searchsorted(self._rows, ids), len(self._rows) - 1)
        np.add.at(self._counts, at[self._rows[at] == ids], 1)
        self._samples += samples
        self.__dict__.pop("_bounds", None)

    def rows_above(self, accesses: float) -> int:
        """Upper bound of the number of rows with at least so many accesses per sample."""
        falling, bounds = self._bounds
        above = int(np.searchsorted(-falling, -accesses * self._samples, side="right"))
        return min(self._table_rows, math.ceil(bounds[above]))

    def accesses(self, rows: int) -> float:
        """Accesses per sample of the first rows, estimated without bias."""
        found = int(self._counts[self._rows < rows].sum())
        return found * self._table_rows / (len(self._rows) * max(self._samples, 1))

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Falling counts of the drawn rows, and the bound N where the first 0, 1, … of them are above the threshold."""
        order = np.argsort(-self._counts, kind="stable")
        falling = self._counts[order]
        in_chunk = np.zeros((len(order) + 1, CHUNKS))
        in_chunk[np.arange(1, len(order) + 1), self._chunk[order]] = 1
        in_chunk = in_chunk.cumsum(axis=0)
        bounds = in_chunk.mean(axis=1) + T_STAR * in_chunk.std(axis=1, ddof=1) / math.sqrt(CHUNKS)
        # A threshold takes all rows of one count or none, so only there are bounds to be compared.
        ends = np.append(True, np.append(falling[1:] != falling[:-1], True))
        bounds = np.maximum.accumulate(np.where(ends, bounds, 0))
        return falling, bounds * self._table_rows / CHUNK_ROWS
