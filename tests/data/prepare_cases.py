"""A small dataset of several files for preparations, and what compares their results."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.data import Schema, SparseColumn

SMALL: dict[str, Any] = {
    "schema": Schema(
        sparse=(SparseColumn(name="user", rows=2), SparseColumn(name="tags", rows=2, ids=None)),
        dense=("price",),
        labels=("click",),
    ),
    "threshold": 2,
    "memory": 900 << 20,
}
"""Options of a preparation of `dataset`."""


def dataset(folder: Path, files: int = 6, rows: int = 400) -> Path:
    """Write Parquet files of text, lists and numbers with row groups of 100 rows."""
    rng = np.random.default_rng(0)
    for i in range(files):
        table = pa.table(
            {
                "user": [f"u{u}" for u in rng.zipf(1.3, rows) % 500],
                "tags": [rng.integers(0, 50, n).tolist() for n in rng.integers(0, 4, rows)],
                "price": rng.random(rows),
                "click": rng.integers(0, 2, rows),
            }
        )
        pq.write_table(table, folder / f"day_{i}.parquet", row_group_size=100)
    return folder


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of all files of a dataset."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
