"""Define the workloads and the sides that are compared, and draw ids and dense inputs once for all sides.

This module imports no library that is compared, so that each worker loads only its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

DENSE_FEATURES = 13
BOTTOM = (512, 256, 128)
TOP = (1024, 1024, 512, 256, 1)
LR = 0.01
EPS = 1e-8
ZIPF = 1.05


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one comparison. Every feature has a table of its own.

    Attributes
    ----------
    rows
        Rows of every table, or a list with those of each.
    batch, pooling
        Samples of all ranks together, and ids per sample and feature.
    warmup, steps
        Batches that are not timed, and timed batches (per precision of whole steps).
    limit
        Batches for the row limit, before the timed steps and again after them. 0 turns the row limit off.
    ranks
        Processes that share the tables and the batch.
    uniform
        Whether ids are uniform instead of by Zipf's law.
    weighted
        Whether ids have weights, which get no gradient.
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
        return (self.rows,) * self.tables if isinstance(self.rows, int) else tuple(self.rows)

    @property
    def names(self) -> list[str]:
        """Names of tables and of their features."""
        return [f"t{i}" for i in range(self.tables)]

    @property
    def table_bytes(self) -> int:
        return sum(self.rows_of_each) * self.dim * 4

    @property
    def weights(self) -> Tensor | None:
        """Weights of a batch's ids ``[tables · batch · pooling]``."""
        drawn = torch.Generator().manual_seed(1)
        return torch.rand(self.tables * self.batch * self.pooling, generator=drawn) if self.weighted else None

    @property
    def of_one_rank(self) -> Workload:
        return replace(self, batch=self.batch // self.ranks)

    def __str__(self) -> str:
        least, most = min(self.rows_of_each), max(self.rows_of_each)
        rows = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        kind = "uniform " * self.uniform + "weighted " * self.weighted
        ids = f"{self.pooling} {kind}id{'s' * (self.pooling > 1)} per bag"
        return f"{self.tables} tables × {rows} × {self.dim}, batch {self.batch:,}, {ids}, {self.ranks} rank(s)"


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
STEPS = ("step", "world2_step")
"""Sections that time whole training steps. The others time embeddings."""


@dataclass(frozen=True)
class Side:
    """The module of a library with its classes ``Embedding`` and ``Step``, its environment, and their arguments."""

    module: str
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # with 1, torch requests transparent huge pages
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
EMBEDDING_SIDES = {
    "hotbed": Side("hotbed_side"),
    "hotbed_one_thread": Side("hotbed_side", ONE_THREAD),
    "fbgemm_default": Side("fbgemm_side"),
    "fbgemm_hugepages": Side("fbgemm_side", {HUGE_PAGES: "1"}),
    "plain": Side("plain_side"),
}
STEP_SIDES = {"hotbed": Side("hotbed_side"), "torchrec": Side("torchrec_side"), "plain": Side("plain_side")}
SHARDED_EMBEDDING_SIDES: dict[str, Side] = {}
"""Sides with one scheme follow each other, because a ratio is of neighbors in time."""
for _scheme in ("table", "row", "column"):
    _options = {"scheme": _scheme}
    SHARDED_EMBEDDING_SIDES[f"hotbed_{_scheme}"] = Side("hotbed_side", ONE_THREAD, _options)
    SHARDED_EMBEDDING_SIDES[f"torchrec_{_scheme}"] = Side("torchrec_side", ONE_THREAD, _options)
    _huge = {**ONE_THREAD, HUGE_PAGES: "1"}
    SHARDED_EMBEDDING_SIDES[f"torchrec_{_scheme}_hugepages"] = Side("torchrec_side", _huge, _options)
_apart = {"scheme": "column", "per_shard_statistics": True}
SHARDED_EMBEDDING_SIDES["hotbed_column_apart"] = Side("hotbed_side", ONE_THREAD, _apart)
SHARDED_STEP_SIDES = {
    **{name: side for name, side in SHARDED_EMBEDDING_SIDES.items() if HUGE_PAGES not in side.environment},
    "hotbed_alone": Side("hotbed_side", ONE_THREAD),
}


def sides_of(section: str) -> dict[str, Side]:
    """Return the sides of a section by name."""
    if WORKLOADS[section].ranks > 1:
        return SHARDED_STEP_SIDES if section in STEPS else SHARDED_EMBEDDING_SIDES
    return STEP_SIDES if section in STEPS else EMBEDDING_SIDES


def tiny(workload: Workload) -> Workload:
    """Return a workload of seconds that shows whether everything runs."""
    rows = 500 if isinstance(workload.rows, int) else workload.rows[:4]
    return replace(workload, rows=rows, tables=4, batch=64, warmup=1, steps=2, limit=min(4, workload.limit))


def write_ids(workload: Workload, batches: int, path: Path) -> None:
    """Draw ids ``[batches, tables, batch · pooling]`` int64, and save them as a ``.npy`` file.

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


def read_ids(path: Path, rank: int, ranks: int) -> list[Tensor]:
    """Return a rank's ids of each batch ``[tables · batch / ranks · pooling]``."""
    batches = np.load(path, mmap_mode="r")
    own = slice(rank * batches.shape[2] // ranks, (rank + 1) * batches.shape[2] // ranks)
    return [torch.from_numpy(batch[:, own].flatten()) for batch in batches]


def dense_inputs(workload: Workload) -> tuple[Tensor, Tensor]:
    """Return dense inputs ``[B, 13]`` and labels ``[B, 1]``."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(workload.batch, DENSE_FEATURES, generator=generator)
    return dense, torch.randint(0, 2, (workload.batch, 1), generator=generator).float()


def join() -> tuple[int, int]:
    """Join the other ranks over Gloo, and return this rank and the number of ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def wait_for_others() -> None:
    """Return on all ranks at once."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def reduce(values: Sequence[Sequence[float]], how: dist.ReduceOp.RedOpType) -> list[list[float]]:
    """Reduce each value over the ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, how)
    return found.tolist()
