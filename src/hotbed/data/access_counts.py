"""Count lookups per row in one pass over a split or a sample of it: `count_accesses`, by which hot rows are chosen.

The pass is that of `hotbed.data.popularity`, too. `count_accesses` is cheaper: nothing is followed through time, and of
tables with very many rows only some rows are counted. Memory is 8 bytes per row of the tables that are counted whole,
and a few chunks of the source.

*Tables too large to count.* How many of their rows are popular is estimated from few of the rows.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.data.loader import Loader
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged

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


COUNTED_ROWS = 1 << 27
"""Tables with more rows are estimated, by default: a gibibyte of counts."""

_PIECE = 65_536  # samples read at once, about


@dataclass(frozen=True, kw_only=True)
class AccessCounts:
    """Accesses of rows, by table.

    Attributes
    ----------
    samples
        How many samples were counted.
    counted
        Accesses of each row ``[R]`` int64, of tables that were counted whole.
    estimated
        The other tables.
    """

    samples: int
    counted: dict[str, NDArray[np.int64]]
    estimated: dict[str, ChunkEstimate]


def read_pieces(
    source: Source,
    split: str,
    *,
    batch_size: int = 1,
    sample: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Batch]:
    """Read a split once, in order, in pieces of whole batches, and check every id.

    Parameters
    ----------
    source
        Where the samples are.
    split
        Which split of it.
    batch_size
        A piece is a multiple of it, but for the last.
    sample
        Share of the samples to give, drawn at random from all of the split; 1 gives them all.
    seed
        Which samples are drawn.
    progress
        Called after each piece with the samples read and those there are.

    Raises
    ------
    SpecError
        If there is no such split, or it has no sample.
    DataError
        If an id is not a row of its table.
    """
    loader = Loader(source, split, batch_size * max(1, _PIECE // batch_size), prefetch=2, pin_memory=False)
    random = np.random.default_rng(seed)
    done = 0
    for piece in loader:
        size, numbers = len(piece), np.arange(done, done + len(piece))
        if sample < 1:
            drawn = np.flatnonzero(random.random(size) < sample)
            piece, numbers = piece.take(torch.from_numpy(drawn)), numbers[drawn]
        _check_ids(source, split, piece.sparse, numbers)
        yield piece
        done += size
        if progress is not None:
            progress(done, loader.samples)


def positions(sparse: Jagged, feature: str, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in ``sparse.values`` the ids of a feature begin at these samples."""
    i = sparse.index(feature)
    fixed = sparse.fixed[i]
    if fixed is not None or sparse.offsets is None:
        return sparse.starts[i] + samples * (fixed or 0)
    return sparse.starts[i] + sparse.offsets[sparse.ragged_rows[i]].numpy()[samples]


def _check_ids(source: Source, split: str, sparse: Jagged, numbers: NDArray[np.int64]) -> None:
    """Refuse an id that is not a row of its table; ``numbers [B]`` are those of the samples in the split."""
    for column in source.schema.sparse:
        ids = sparse[column.name].values.numpy()
        if not len(ids) or (ids.min() >= 0 and ids.max() < column.rows):
            continue
        bad = int(np.flatnonzero((ids < 0) | (ids >= column.rows))[0])
        every = positions(sparse, column.name, np.arange(sparse.batch_size + 1))
        at = int(np.searchsorted(every - every[0], bad, side="right")) - 1
        raise DataError(
            f"split '{split}', feature '{column.name}': id {ids[bad]:,} at sample {numbers[at]:,} is not within the "
            f"{column.rows:,} rows of table '{column.table_name}'; raise its rows in the description of the "
            f"data, or prepare the data again"
        )


def count_accesses(
    source: Source,
    split: str,
    *,
    sample: float = 1.0,
    counted_rows: int = COUNTED_ROWS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> AccessCounts:
    """Count how often each row of each table is looked up, in one pass.

    Parameters
    ----------
    source
        Where the samples are.
    split
        Which split of it.
    sample
        Share of the samples to count, drawn at random from all of the split; 1 counts them all.
    counted_rows
        Tables with more rows, and more than 35,840, are estimated: see `hotbed.data.access_counts`.
    seed
        Which samples are drawn, and which rows.
    progress
        Called with the samples read and those there are.

    Raises
    ------
    SpecError
        If an argument is out of range, there is no such split, or no sample was drawn.
    DataError
        If an id is not a row of its table.
    """
    if not 0 < sample <= 1:
        raise SpecError(f"sample is {sample}, must be above 0 and at most 1, a share of the samples; 0.05 is 5 %")
    for name, value, least in (("counted_rows", counted_rows, 1), ("seed", seed, 0)):
        if value < least:
            raise SpecError(f"{name} is {value:,}, must be at least {least}")
    rows = source.schema.rows
    estimated = {
        name: ChunkEstimate(count, seed=seed)
        for name, count in rows.items()
        if count > max(counted_rows, CHUNKS * CHUNK_ROWS)
    }
    counted = {name: np.zeros(count, dtype=np.int64) for name, count in rows.items() if name not in estimated}
    samples = 0
    for piece in read_pieces(source, split, sample=sample, seed=seed, progress=progress):
        samples += len(piece)
        for table in estimated.values():
            table.count(np.empty(0, dtype=np.int64), len(piece))
        for column in source.schema.sparse:
            ids = piece.sparse[column.name].values.numpy()
            if column.table_name in estimated:
                estimated[column.table_name].count(ids, 0)
            else:
                np.add.at(counted[column.table_name], ids, 1)
    if not samples:
        total = sum(source.chunks(split))
        raise SpecError(f"of the {total:,} samples of split '{split}' none was drawn with sample {sample}; raise it")
    return AccessCounts(samples=samples, counted=counted, estimated=estimated)
