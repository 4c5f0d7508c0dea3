"""How often rows are looked up, by a sample of the inputs: what hot rows are chosen by.

Cheaper than `hotbed.data.popularity`: nothing is followed through time, inputs may be sampled, and of tables with very
many rows only some rows are counted. Memory is 8 bytes per row of the tables that are counted
whole, and a chunk of the source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.data.chunk_estimate import CHUNK_ROWS, CHUNKS, ChunkEstimate
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError

COUNTED_ROWS = 1 << 27
"""Tables with more rows are estimated, by default: a gibibyte of counts."""


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
        Tables with more rows, and more than 35,840, are estimated: see `hotbed.data.chunk_estimate`.
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
    random = np.random.default_rng(seed)
    done = samples = 0
    sizes = source.chunks(split)
    for i, size in enumerate(sizes):
        batch = source.read(split, i)
        if sample < 1:
            batch = batch.take(torch.from_numpy(np.flatnonzero(random.random(size) < sample)))
        for table in estimated.values():
            table.count(np.empty(0, dtype=np.int64), len(batch))
        for column in source.schema.sparse:
            ids = batch.sparse[column.name].values.numpy()
            if len(ids) and not (ids.min() >= 0 and ids.max() < column.rows):
                bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
                raise DataError(
                    f"split '{split}', chunk {i:,}, feature '{column.name}': id {bad:,} is not within the "
                    f"{column.rows:,} rows of table '{column.table_name}'; raise its rows in the description of the "
                    f"data, or prepare the data again"
                )
            if column.table_name in estimated:
                estimated[column.table_name].count(ids, 0)
            else:
                np.add.at(counted[column.table_name], ids, 1)
        done, samples = done + size, samples + len(batch)
        if progress is not None:
            progress(done, sum(sizes))
    if not samples:
        raise SpecError(f"of the {done:,} samples of split '{split}' none was drawn with sample {sample}; raise it")
    return AccessCounts(samples=samples, counted=counted, estimated=estimated)
