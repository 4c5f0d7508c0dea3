"""A small dataset of several files for preparations, and what compares their results."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import log_line, read_whole, write_log

from hotbed.data import ParquetSource, Schema, SparseColumn, SplitBinarySource
from hotbed.data.files.criteo import read_blocks
from hotbed.files import read_yaml

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


FILES, GROUP_ROWS = 6, 300
"""Files of `dataset`, and the rows that a task of `small_groups` prepares."""


def dataset(folder: Path, files: int = FILES, rows: int = 400) -> Path:
    """Write Parquet files of text, lists and numbers with row groups of 100 rows."""
    folder.mkdir(parents=True, exist_ok=True)
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


VALUES = ["0000000a", "0000000b", "0000000c"]


def c1_log(path: Path, values: str) -> Path:
    """A log of which only C1 is filled; a space is a missing value."""
    return write_log(path, [log_line(i % 2, [i], [f"{v:>08}" if v != " " else ""]) for i, v in enumerate(values)])


def ids_of(out: Path, split: str = "train", column: str = "C1") -> list[int]:
    return read_whole(SplitBinarySource(out), split).sparse[column].values.tolist()


def open_prepared(out: Path) -> ParquetSource:
    """The source that a prepared dataset of Parquet files describes."""
    return ParquetSource(out, **read_yaml(out / "source.yaml")["init_args"])


def set_block_bytes(patch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Make blocks, parts of files and groups of samples so small that lines, counts and splits cross them."""
    patch.setattr("hotbed.data.preparation.raw_inputs.read_blocks", partial(read_blocks, block_bytes=block_bytes))
    patch.setattr("hotbed.data.preparation.raw_inputs.PART_BYTES", 3 * block_bytes)
    patch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", 10)
