"""Ids, drawn once for all sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.peers.workloads import Workload
from benchmarks.plain_pytorch import zipf_ids

ZIPF = 1.05


def write_ids(workload: Workload, batches: int, path: Path) -> None:
    """Draw ids ``[batches, tables, batch · pooling]`` int64 and save them as a ``.npy`` file."""
    rng = np.random.default_rng(1)
    shape = (workload.tables, workload.batch * workload.pooling)
    drawn = [
        zipf_ids(rng, workload.tables, workload.rows, workload.batch * workload.pooling, ZIPF).numpy().reshape(shape)
        for _ in range(batches)
    ]
    np.save(path, np.stack(drawn))
