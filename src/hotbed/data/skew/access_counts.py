"""Count lookups per row in one pass over a split or a sample of it: `count_accesses`, by which hot rows are chosen.

Memory is 8 bytes per counted row, and a few chunks of the source. Only the first `COUNTED_ROWS` rows of a table are
counted, and rows beyond count as never looked up. This loses no popular row if rows are numbered by falling popularity,
as by `hotbed prepare`. In larger tables of hashed ids, or of data that NVIDIA's scripts prepared, it may lose some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.data.loader import Loader
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged

COUNTED_ROWS = 1 << 27
"""Rows of a table that are counted, by default: a gibibyte of counts."""

_PIECE = 65_536  # samples read at once, about


@dataclass(frozen=True, kw_only=True)
class AccessCounts:
    """Accesses of rows, by table."""

    samples: int
    counted: dict[str, NDArray[np.int64]]  # of each of the first rows ``[≤ R]`` int64
    accesses: dict[str, int]  # of all rows


def read_pieces(
    source: Source,
    split: str,
    *,
    batch_size: int = 1,  # every piece but the last has a multiple of it
    sample: float = 1.0,  # share of the samples to draw at random from the whole split
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,  # called with the samples read and their total
) -> Iterator[Batch]:
    """Read a split once, in order, in pieces of whole batches, and check every id."""
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
    seed
        Which samples are drawn.
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
    if seed < 0:
        raise SpecError(f"seed is {seed:,}, must be at least 0")
    rows = source.schema.rows
    counted = {name: np.zeros(min(count, COUNTED_ROWS), dtype=np.int64) for name, count in rows.items()}
    accesses = dict.fromkeys(rows, 0)
    samples = 0
    for piece in read_pieces(source, split, sample=sample, seed=seed, progress=progress):
        samples += len(piece)
        for column in source.schema.sparse:
            ids, counts = piece.sparse[column.name].values.numpy(), counted[column.table_name]
            np.add.at(counts, ids[ids < len(counts)], 1)
            accesses[column.table_name] += len(ids)
    if not samples:
        total = sum(source.chunks(split))
        raise SpecError(f"of the {total:,} samples of split '{split}' none was drawn with sample {sample}; raise it")
    return AccessCounts(samples=samples, counted=counted, accesses=accesses)
