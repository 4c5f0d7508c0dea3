"""Ids, drawn once for all sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.workloads import Workload

ZIPF = 1.05


def zipf_ids(rng: np.random.Generator, rows: int, count: int) -> npt.NDArray[np.int64]:
    """Ids ``[count]`` of one table; ranks are scattered over its rows, as hashed vocabularies are."""
    weights = np.arange(1, rows + 1) ** -ZIPF
    cumulative = np.cumsum(weights) / weights.sum()
    ranks = np.searchsorted(cumulative, rng.random(count)).clip(max=rows - 1)
    return np.random.default_rng(0).permutation(rows)[ranks]


def uniform_ids(rng: np.random.Generator, rows: int, count: int) -> npt.NDArray[np.int64]:
    """Ids ``[count]`` of one table, of which hardly any repeats."""
    return rng.integers(rows, size=count)


def write_ids(workload: Workload, batches: int, path: Path) -> None:
    """Draw ids ``[batches, tables, batch · pooling]`` int64 and save them as a ``.npy`` file."""
    rng = np.random.default_rng(1)
    draw = uniform_ids if workload.uniform else zipf_ids
    shape = (workload.tables, workload.batch * workload.pooling)
    drawn = [draw(rng, workload.rows, workload.tables * shape[1]).reshape(shape) for _ in range(batches)]
    np.save(path, np.stack(drawn))
