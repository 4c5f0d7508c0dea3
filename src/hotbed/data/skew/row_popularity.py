"""Measure how unevenly the rows of each table are looked up, in one pass over a split.

Per table: how often every row occurs, in how many batches, and the stack distances of an LRU cache
(`hotbed.data.skew.stack_distance`). What follows from them is in `Popularity`: the hot order, skew curves, a ZipfLaw
exponent,
and hit rates of caches and of placing the hottest rows.

Memory is 24 bytes per row of the tables while counting (without pages of rows that are never touched) and 8 more for
the hot order, what `StackDistances` takes for the sampled rows, and a few chunks of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.formats.zipf_source import RANKED, fit_exponent
from hotbed.data.skew.access_counts import positions, read_pieces
from hotbed.data.skew.stack_distance import StackDistances, count
from hotbed.data.source import Source
from hotbed.errors import SpecError
from hotbed.jagged import Jagged

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SHARES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of rows at which curves are given."""

SAMPLED_ROWS = 1 << 20
"""Tables with more rows are sampled for the LRU curve, by default."""


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """How often the rows of one table were looked up.

    Attributes
    ----------
    table
        Its name.
    accesses
        ``[R]`` int64: ids of each row.
    batches
        ``[R]`` int64: batches in which each row occurs. A batch looks a row up once, however often it occurs there.
    distances
        Stack distances of these lookups.
    """

    table: str
    accesses: Integers
    batches: Integers
    distances: StackDistances

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.accesses)

    @cached_property
    def touched(self) -> int:
        """Rows with at least one access."""
        return int(np.count_nonzero(self.accesses))

    @cached_property
    def hot_order(self) -> Integers:
        """All rows ``[R]`` by falling number of accesses, ties by row number."""
        return np.argsort(-self.accesses, kind="stable")

    def top_share(self, rows: Sequence[int]) -> Floats:
        """Share of the accesses that goes to so many rows of the hot order; NaN where there was no access."""
        return _share_of_first(self.accesses[self.hot_order], rows)

    def static_hit_rates(self, rows: Sequence[int]) -> Floats:
        """Share of the lookups that so many rows of the hot order serve, if they are placed and stay."""
        return _share_of_first(self.batches[self.hot_order], rows)

    @cached_property
    def zipf_exponent(self) -> float | None:
        """Exponent s of Zipf's law, by which the row of rank r has a share of the accesses in proportion to r^−s.

        See `hotbed.data.formats.zipf_source.fit_exponent`; None where fewer than two rows have at least 10 accesses.
        """
        return fit_exponent(self.accesses[self.hot_order[: np.count_nonzero(self.accesses >= RANKED)]])

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold, with curves at `SHARES` of the rows."""
        sizes = [max(1, round(share * self.rows)) for share in SHARES]
        return {
            "table": self.table,
            "rows": self.rows,
            "accesses": int(self.accesses.sum()),
            "touched": self.touched,
            "lookups": self.distances.lookups,
            "zipf_exponent": self.zipf_exponent,
            "sample_rate": self.distances.rate,
            "cache_rows": sizes,
            "accesses_of_top_rows": self.top_share(sizes).tolist(),
            "accesses_of_top_touched": self.top_share(
                [max(1, round(share * self.touched)) for share in SHARES]
            ).tolist(),
            "lru": self.distances.hit_rates(sizes).tolist(),
            "static": self.static_hit_rates(sizes).tolist(),
        }


def measure_popularity(
    source: Source,
    split: str,
    *,
    batch_size: int = 1,
    sampled_rows: int = SAMPLED_ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Popularity]:
    """Read a split once, in order, and count how often each row of each table is looked up.

    A batch looks up the distinct rows of a table that its features name, in any of its samples: it is these lookups
    that hit or miss a cache.

    Parameters
    ----------
    source
        Where the samples are.
    split
        Which split of it.
    batch_size
        Samples per batch.
    sampled_rows
        Rows of a table whose stack distances are followed, about; a table with no more rows is followed exactly.
    progress
        Called with the samples read and those there are.

    Returns
    -------
    list[Popularity]
        One per table, in the order of the schema.

    Raises
    ------
    SpecError
        If an argument is out of range, there is no such split, or it has no sample.
    DataError
        If an id is not a row of its table.
    """
    for name, value in (("batch_size", batch_size), ("sampled_rows", sampled_rows)):
        if value < 1:
            raise SpecError(f"{name} is {value:,}, must be at least 1")
    tables = [
        _Counter(source, name, rows, min(1.0, sampled_rows / rows), seed)
        for seed, (name, rows) in enumerate(source.schema.rows.items())
    ]
    for piece in read_pieces(source, split, batch_size=batch_size, progress=progress):
        edges = np.minimum(np.arange(0, len(piece) + batch_size, batch_size), len(piece))
        for table in tables:
            table.count(piece.sparse, edges)
    return [table.popularity() for table in tables]


class _Counter:
    """Counts the accesses of one table, piece by piece."""

    def __init__(self, source: Source, table: str, rows: int, rate: float, seed: int) -> None:
        self._table = table
        self._features = [c.name for c in source.schema.sparse if c.table_name == table]
        self._accesses, self._batches, self._last = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        self._distances = StackDistances(rows, rate=rate, seed=seed)
        self._done = 0  # batches

    def count(self, sparse: Jagged, edges: Integers) -> None:
        """Count the batches between ``edges``, which are samples of a piece."""
        bounds = np.stack([positions(sparse, name, edges) for name in self._features])
        distinct = np.empty(int((bounds[:, -1] - bounds[:, 0]).sum()), dtype=np.int64)
        ends = np.empty(len(edges) - 1, dtype=np.int64)
        count(sparse.values.numpy(), bounds, self._done, self._accesses, self._batches, self._last, distinct, ends)
        self._done += len(ends)
        self._distances.follow(distinct[: ends[-1]], ends)

    def popularity(self) -> Popularity:
        return Popularity(table=self._table, accesses=self._accesses, batches=self._batches, distances=self._distances)


def _share_of_first(counts: Integers, sizes: Sequence[int]) -> Floats:
    total = np.concatenate([[0], np.cumsum(counts)])
    if not total[-1]:
        return np.full(len(sizes), np.nan)
    return total[np.minimum(np.asarray(sizes), len(counts))] / total[-1]
