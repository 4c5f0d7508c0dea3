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
    """Sizes of one comparison: rows of every table, samples of all ranks together, ids per sample and feature.

    ``warmup`` and ``steps`` are batches that are not timed, and timed ones (per precision of whole steps). Ids follow
    Zipf's law or are uniform.
    """

    rows: int
    dim: int
    tables: int = 26
    batch: int = 4096
    pooling: int = 1
    warmup: int = 3
    steps: int = 10
    ranks: int = 1
    uniform: bool = False
    precisions: Sequence[str] = ("fp32", "bf16")

    @property
    def names(self) -> list[str]:
        return [f"t{i}" for i in range(self.tables)]

    @property
    def table_bytes(self) -> int:
        return self.tables * self.rows * self.dim * 4

    @property
    def of_one_rank(self) -> Workload:
        return replace(self, batch=self.batch // self.ranks)

    def __str__(self) -> str:
        size = f"{self.tables} tables × {self.rows:,} × {self.dim}, batch {self.batch:,}"
        return f"{size}, {self.pooling} {'uniform ' * self.uniform}id(s) per bag, {self.ranks} rank(s)"


SHARDED = Workload(rows=200_000, dim=128, ranks=2)
WORKLOADS = {
    "embedding": Workload(rows=1_000_000, dim=128),
    "multi_hot": Workload(rows=100_000, dim=128, batch=1024, pooling=20),
    "narrow": Workload(rows=1_000_000, dim=16),
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
    if WORKLOADS[section].ranks > 1:
        return SHARDED_STEP_SIDES if section in STEPS else SHARDED_EMBEDDING_SIDES
    return STEP_SIDES if section in STEPS else EMBEDDING_SIDES


def tiny(workload: Workload) -> Workload:
    """Return a workload of seconds that shows whether everything runs."""
    return replace(workload, rows=500, tables=4, batch=64, warmup=1, steps=2)


def write_ids(workload: Workload, batches: int, path: Path) -> None:
    """Draw ids ``[batches, tables, batch · pooling]`` int64, and save them as a ``.npy`` file.

    Popular ids are scattered over the rows, as in hashed vocabularies.
    """
    from hotbed.data.formats.zipf_source import ZipfLaw

    shape = (batches, workload.tables, workload.batch * workload.pooling)
    law = ZipfLaw(workload.rows, 0.0 if workload.uniform else ZIPF)
    drawn = law.draw((1,), np.arange(np.prod(shape), dtype=np.uint64))
    ids = np.random.default_rng(0).permutation(workload.rows)[drawn].reshape(shape)
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
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def reduce(values: Sequence[Sequence[float]], how: dist.ReduceOp.RedOpType) -> list[list[float]]:
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, how)
    return found.tolist()
