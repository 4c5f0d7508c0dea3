"""Count lookups per row, in one pass over a split.

`measure_popularity` counts lookups by sample and by batch, and measures stack distances (`StackDistances`). From these
results, `RowPopularity` computes the hot order, skew curves, a Zipf exponent, and hit rates of LRU caches and of static
caches. The counts need 32 bytes per row, in addition to the memory of `StackDistances`.

`count_accesses` counts only lookups by sample, which is enough to choose hot rows. It needs 8 bytes per counted row,
and counts only the first `COUNTED_ROWS` rows of a table. If rows are numbered by descending popularity, as `hotbed
prepare` does, the rows that are not counted are unpopular. Popular rows may be missed in larger tables if the ids are
hashed, or if NVIDIA's scripts prepared the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.checks import Count, Range, Size, check
from hotbed.data.formats.zipf_source import RANKED, fit_exponent
from hotbed.data.loader import Loader
from hotbed.data.skew.stack_distance import StackDistances, count_batches
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

COUNTED_ROWS = 1 << 27
"""Largest number of rows per table that `count_accesses` counts (1 GiB of counts)."""
SHARES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of rows at which curves are reported."""
SAMPLED_ROWS = 1 << 20
"""Default for the largest number of rows of a table with an exact LRU curve. Larger tables are sampled."""
_PIECE = 65_536  # approximate number of samples that are read at once


def read_pieces(
    source: Source,
    split: str,
    *,
    batch_size: int = 1,  # the size of every piece, except the last one, is a multiple of the batch size
    sample: float = 1.0,  # share of the samples to draw at random from the whole split
    seed: int = 0,
    progress: Progress = lambda done, total: None,  # called with the numbers of read and of all samples
) -> Iterator[Batch]:
    """Check every id of a split, and yield its samples in order, in pieces of whole batches.

    If ``sample`` is below 1, this random share of the samples is checked and yielded.
    """
    loader = Loader(source, split, batch_size * max(1, _PIECE // batch_size), prefetch=2, pin_memory=False)
    random = np.random.default_rng(seed)
    done = 0
    for piece in loader:
        size, numbers = len(piece), np.arange(done, done + len(piece))
        if sample < 1:
            drawn = np.flatnonzero(random.random(size) < sample)
            piece, numbers = piece.take(torch.from_numpy(drawn)), numbers[drawn]
        for column in source.schema.sparse:
            ids = piece.sparse[column.name].values.numpy()
            bad = np.flatnonzero((ids < 0) | (ids >= column.rows))
            if len(bad):
                first = first_ids(piece.sparse, column.name, np.arange(len(piece) + 1))
                at = int(np.searchsorted(first - first[0], bad[0], side="right")) - 1
                raise DataError(
                    f"split '{split}', feature '{column.name}', sample {numbers[at]:,}: got id {ids[bad[0]]:,}, "
                    f"expected 0 to {column.rows - 1:,} (rows of table '{column.table_name}'). Increase the table's "
                    "rows in the description of the data, or prepare the data again"
                )
        yield piece
        done += size
        progress(done, loader.samples)


def first_ids(sparse: Jagged, feature: str, samples: Integers) -> Integers:
    """Return the position in ``sparse.values`` of the first id of a feature, for each of these samples."""
    i = sparse.index(feature)
    fixed = sparse.fixed[i]
    if fixed is not None or sparse.offsets is None:
        return sparse.starts[i] + samples * (fixed or 0)
    return sparse.starts[i] + sparse.offsets[sparse.ragged_rows[i]].numpy()[samples]


# -- counts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AccessCounts:
    """Numbers of accesses of rows, by table."""

    samples: int
    counted: dict[str, Integers]  # accesses of each row, for the first `COUNTED_ROWS` rows
    accesses: dict[str, int]  # accesses of all rows together


def count_accesses(
    source: Source,
    split: str,
    *,
    sample: float = 1.0,  # share of the samples to count, drawn at random from the whole split
    seed: int = 0,
    progress: Progress = lambda done, total: None,  # called with the numbers of read and of all samples
) -> AccessCounts:
    """Count the lookups of each row of each table. Raise `DataError` for an id that is not a row of its table."""
    check("sample", sample, Annotated[float, Range(above=0, most=1)], SpecError)
    check("seed", seed, Size, SpecError)
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
        total = source.samples(split)
        raise SpecError(f"sample: got {sample}, which draws none of {total:,} samples of split '{split}'. Draw more")
    return AccessCounts(samples=samples, counted=counted, accesses=accesses)


# -- popularity ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowPopularity:
    """Numbers of lookups by row, for one table."""

    table: str
    accesses: Integers  # number of accesses of each row ``[R]``
    batches: Integers  # number of batches with each row ``[R]``
    distances: StackDistances  # of lookups by batch

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return len(self.accesses)

    @cached_property
    def touched(self) -> int:
        """Number of rows with at least one access."""
        return int(np.count_nonzero(self.accesses))

    @cached_property
    def hot_order(self) -> Integers:
        """All rows ``[R]`` by descending number of accesses, then by row number."""
        return np.argsort(-self.accesses, kind="stable")

    def top_share(self, rows: Sequence[int]) -> Floats:
        """Return the share of accesses to the first n rows of the hot order, for each n of ``rows``."""
        return _share_of_first(self.accesses[self.hot_order], rows)

    def static_hit_rates(self, rows: Sequence[int]) -> Floats:
        """Return the hit rate of a static cache with the first n rows of the hot order, for each n of ``rows``."""
        return _share_of_first(self.batches[self.hot_order], rows)

    @cached_property
    def zipf_exponent(self) -> float | None:
        """Exponent s of Zipf's law: the r-th row of the hot order has accesses in proportion to r^−s.

        None if fewer than two rows have 10 accesses. See `hotbed.data.formats.zipf_source.fit_exponent`.
        """
        return fit_exponent(self.accesses[self.hot_order[: np.count_nonzero(self.accesses >= RANKED)]])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Curves have a value for each of `SHARES`."""
        sizes, touched = ([max(1, round(share * n)) for share in SHARES] for n in (self.rows, self.touched))
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
            "accesses_of_top_touched": self.top_share(touched).tolist(),
            "lru": self.distances.hit_rates(sizes).tolist(),
            "static": self.static_hit_rates(sizes).tolist(),
        }


def measure_popularity(
    source: Source,
    split: str,
    *,
    batch_size: int = 1,
    sampled_rows: int = SAMPLED_ROWS,
    progress: Progress = lambda done, total: None,
) -> list[RowPopularity]:
    """Read a split once, in order, and count the lookups of each row of each table.

    A batch looks up each row of a table once, even if several of its samples or features have the row. These lookups
    hit or miss a cache.

    Parameters
    ----------
    source, split
        Source of the samples, and the split to read.
    batch_size
        Samples per batch.
    sampled_rows
        Approximate number of rows per table that are sampled for stack distances. Smaller tables are measured exactly.
    progress
        Function that is called with the number of read samples and the number of all samples.

    Returns
    -------
    list[RowPopularity]
        One per table, in the order of the schema.

    Raises
    ------
    SpecError
        If an argument is out of range, the source has no such split, or the split has no sample.
    DataError
        If an id is not a row of its table.
    """
    check("batch_size", batch_size, Count, SpecError)
    check("sampled_rows", sampled_rows, Count, SpecError)
    tables = [
        RowPopularity(
            table=name,
            accesses=np.zeros(rows, np.int64),
            batches=np.zeros(rows, np.int64),
            distances=StackDistances(rows, rate=min(1.0, sampled_rows / rows), seed=seed),
        )
        for seed, (name, rows) in enumerate(source.schema.rows.items())
    ]
    last = [np.zeros(table.rows, np.int64) for table in tables]  # number of the last batch with each row
    done = 0
    for piece in read_pieces(source, split, batch_size=batch_size, progress=progress):
        edges = np.minimum(np.arange(0, len(piece) + batch_size, batch_size), len(piece))
        batches = len(edges) - 1
        for table, last_of_table in zip(tables, last, strict=True):
            names = [column.name for column in source.schema.sparse if column.table_name == table.table]
            bounds = np.stack([first_ids(piece.sparse, name, edges) for name in names])
            distinct = np.empty(int((bounds[:, -1] - bounds[:, 0]).sum()), np.int64)
            ends, values = np.empty(batches, np.int64), piece.sparse.values.numpy()
            count_batches(values, bounds, done, table.accesses, table.batches, last_of_table, distinct, ends)
            table.distances.follow(distinct[: ends[-1]], ends)
        done += batches
    return tables


def _share_of_first(counts: Integers, sizes: Sequence[int]) -> Floats:
    total = np.concatenate([[0], np.cumsum(counts)])
    if not total[-1]:
        return np.full(len(sizes), np.nan)
    return total[np.minimum(np.asarray(sizes), len(counts))] / total[-1]
