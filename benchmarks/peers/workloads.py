"""Say what is computed, and draw ids and dense inputs, once for all sides.

Imports no contender (but where ids are drawn), so that every worker holds only its own.
"""

from __future__ import annotations

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
    """Sizes of one comparison; all tables are alike, and every feature has its own.

    Attributes
    ----------
    rows, dim, tables
        Of the tables.
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
    """

    rows: int
    dim: int
    tables: int = 26
    batch: int = 4096
    pooling: int = 1
    warmup: int = 3
    steps: int = 10
    limit: int = 12
    ranks: int = 1
    uniform: bool = False

    @property
    def names(self) -> list[str]:
        """Names of tables, and of their features."""
        return [f"t{i}" for i in range(self.tables)]

    @property
    def bound(self) -> float:
        """Initial values are uniform between −bound and bound."""
        return self.rows**-0.5

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows, on all ranks together."""
        return self.tables * self.rows * self.dim * 4

    @property
    def of_one_rank(self) -> Workload:
        """What one of the ranks has of every batch."""
        return replace(self, batch=self.batch // self.ranks)

    def __str__(self) -> str:
        size = f"{self.tables} tables × {self.rows:,} × {self.dim}, batch {self.batch:,}"
        ids = f"{self.pooling} {'uniform ' * self.uniform}id{'s' * (self.pooling > 1)} per bag"
        return f"{size}, {ids}" + f", {self.ranks} ranks" * (self.ranks > 1)


SHARDED = Workload(rows=200_000, dim=128, limit=0, ranks=2)
WORKLOADS = {
    "embedding": Workload(rows=1_000_000, dim=128),
    "multi_hot": Workload(rows=100_000, dim=128, batch=1024, pooling=20),
    "narrow": Workload(rows=1_000_000, dim=16),
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
    return replace(workload, rows=500, tables=4, batch=64, warmup=1, steps=2, limit=min(4, workload.limit))


def write_ids(workload: Workload, batches: int, path: Path) -> None:
    """Draw ids ``[batches, tables, batch · pooling]`` int64 and save them as a ``.npy`` file.

    Popular ids are scattered over the rows, as in hashed vocabularies.
    """
    from hotbed.data.zipf_source import Zipf

    law = Zipf(workload.rows, 0.0 if workload.uniform else ZIPF)
    shape = (batches, workload.tables, workload.batch * workload.pooling)
    ranks = law.draw((1,), np.arange(np.prod(shape), dtype=np.uint64))
    np.save(path, np.random.default_rng(0).permutation(workload.rows)[ranks].reshape(shape))


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
