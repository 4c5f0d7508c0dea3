"""Say what is computed, and draw ids and dense inputs, once for all sides.

Imports no contender (but where ids are drawn), so that every worker holds only its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DENSE_FEATURES = 13
BOTTOM = (512, 256, 128)
TOP = (1024, 1024, 512, 256, 1)
LR = 0.01
EPS = 1e-8
ZIPF = 1.05


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one comparison; every feature has a table of its own.

    Attributes
    ----------
    rows
        Of every table; or of each, and then their number goes for ``tables``.
    dim, tables
        Columns and number of the tables.
    batch, pooling
        Samples, of all ranks together, and ids per sample and feature.
    warmup, steps
        Batches that are not timed, and that are; per precision where whole steps are timed.
    limit
        Batches for the row limit, before the timed steps and again after them; 0: it is not measured.
    ranks
        Processes that share the tables and the batch.
    uniform
        Whether every row is as popular as any other; else popularity follows Zipf's law.
    weighted
        Whether every id has a weight, of which no gradient is asked.
    precisions
        In which whole steps are timed: ``"fp32"``, and under autocast ``"bf16"``.
    """

    rows: int | Sequence[int]
    dim: int
    tables: int = 26
    batch: int = 4096
    pooling: int = 1
    warmup: int = 3
    steps: int = 10
    limit: int = 12
    ranks: int = 1
    uniform: bool = False
    weighted: bool = False
    precisions: Sequence[str] = ("fp32", "bf16")

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int):
            object.__setattr__(self, "rows", tuple(self.rows))
            object.__setattr__(self, "tables", len(self.rows))

    @property
    def rows_of_each(self) -> tuple[int, ...]:
        """Rows of each table."""
        return (self.rows,) * self.tables if isinstance(self.rows, int) else tuple(self.rows)

    @property
    def names(self) -> list[str]:
        """Names of tables, and of their features."""
        return [f"t{i}" for i in range(self.tables)]

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows, on all ranks together."""
        return sum(self.rows_of_each) * self.dim * 4

    @property
    def weights(self) -> Tensor | None:
        """Weights of a batch's ids ``[tables · batch · pooling]``, if they have any."""
        if not self.weighted:
            return None
        drawn = torch.Generator().manual_seed(1)
        return torch.rand(self.tables * self.batch * self.pooling, generator=drawn)

    @property
    def of_one_rank(self) -> Workload:
        """What one of the ranks has of every batch."""
        return replace(self, batch=self.batch // self.ranks)

    def __str__(self) -> str:
        least, most = min(self.rows_of_each), max(self.rows_of_each)
        rows = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        size = f"{self.tables} tables × {rows} × {self.dim}, batch {self.batch:,}"
        kind = "uniform " * self.uniform + "weighted " * self.weighted
        ids = f"{self.pooling} {kind}id{'s' * (self.pooling > 1)} per bag"
        return f"{size}, {ids}" + f", {self.ranks} ranks" * (self.ranks > 1)


MIXED_ROWS = (3, 30, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 1_000_000, 1_000_000)
"""Most tables of click logs are small, and a few have most rows."""

SHARDED = Workload(rows=200_000, dim=128, limit=0, ranks=2)
WORKLOADS = {
    "embedding": Workload(rows=1_000_000, dim=128),
    "multi_hot": Workload(rows=100_000, dim=128, batch=1024, pooling=20),
    "narrow": Workload(rows=1_000_000, dim=16),
    "mixed": Workload(rows=MIXED_ROWS, dim=64, batch=2048, pooling=5),
    "weighted": Workload(rows=200_000, dim=64, batch=2048, pooling=10, weighted=True),
    "step": Workload(rows=200_000, dim=128),
    "world2": SHARDED,
    "world2_uniform": replace(SHARDED, uniform=True),
    "world2_step": SHARDED,
}
"""By section of the result."""

STEPS = ("step", "world2_step")
"""Sections that time whole training steps; the others time embeddings."""


def tiny(workload: Workload) -> Workload:
    """Small enough to see in seconds whether everything runs; timings mean nothing."""
    rows = 500 if isinstance(workload.rows, int) else workload.rows[:4]
    return replace(workload, rows=rows, tables=4, batch=64, warmup=1, steps=2, limit=min(4, workload.limit))


def write_ids(workload: Workload, batches: int, path: Path) -> None:
    """Draw ids ``[batches, tables, batch · pooling]`` int64 and save them as a ``.npy`` file.

    Popular ids are scattered over the rows, as in hashed vocabularies.
    """
    from hotbed.data.formats.zipf_source import ZipfLaw

    shape = (batches, workload.tables, workload.batch * workload.pooling)
    ids, numbers = np.empty(shape, np.int64), np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    scattered = np.random.default_rng(0)
    for rows in sorted(set(workload.rows_of_each)):
        tables = np.array(workload.rows_of_each) == rows
        law = ZipfLaw(rows, 0.0 if workload.uniform else ZIPF)
        drawn = law.draw((1,), numbers[:, tables].reshape(-1))
        ids[:, tables] = scattered.permutation(rows)[drawn].reshape(ids[:, tables].shape)
    np.save(path, ids)


def read_ids(path: Path, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """A rank's ids of each batch ``[tables · batch / ranks · pooling]``, copied from the file."""
    batches = np.load(path, mmap_mode="r")
    own = slice(rank * batches.shape[2] // ranks, (rank + 1) * batches.shape[2] // ranks)
    return [torch.from_numpy(batch[:, own].flatten()) for batch in batches]


def dense_inputs(workload: Workload) -> tuple[Tensor, Tensor]:
    """Dense inputs ``[B, 13]`` and labels ``[B, 1]``."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(workload.batch, DENSE_FEATURES, generator=generator)
    return dense, torch.randint(0, 2, (workload.batch, 1), generator=generator).float()
