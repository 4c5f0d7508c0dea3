"""Who best reads the batches of several ranks: each its own, the first for all, or owners of tables.

Every rate is that of ``torchrun … -m hotbed train`` over whole tables (``parallel.plan table``), on a Parquet file that
is made here: 26 columns of one id, or 8 columns of 20 ids. `benchmarks.loader` measures them (``--only ranks``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from hotbed.config.places import Reader
from hotbed.data.zipf_source import Zipf

ROOT = Path(__file__).resolve().parents[1]
ROWS, DIM, BATCH = 50_000, 32, 1024
COLUMNS = {"26 columns of one id": (26, 1), "8 columns of 20 ids": (8, 20)}
"""By name, how many columns there are, and their ids per sample."""
OVERLAP = (True, False)


def write_log(file: Path, samples: int, columns: int, ids: int) -> None:
    """Write samples whose ids follow Zipf's law with exponent 1.05."""
    law, lists = Zipf(ROWS, 1.05), pa.list_(pa.int64(), ids)
    counters = np.arange(samples * ids, dtype=np.uint64)
    table: dict[str, Any] = {"label": np.random.default_rng(0).integers(0, 2, samples)}
    for column in range(columns):
        values = pa.array(law.draw((0, column), counters).astype(np.int64))
        table[f"c{column}"] = values if ids == 1 else pa.FixedSizeListArray.from_arrays(values, type=lists)
    pq.write_table(pa.table(table), file, row_group_size=-(-samples // 8))


def write_all(folder: Path, samples: int) -> dict[str, Path]:
    """Write logs and their recipes, by the name of their columns."""
    files: dict[str, Path] = {}
    for name, (columns, ids) in COLUMNS.items():
        files[name] = folder / f"{columns}.yaml"
        (place := files[name].with_suffix("")).mkdir(parents=True)
        write_log(place / "train.parquet", samples, columns, ids)
        write_log(place / "test.parquet", BATCH, columns, ids)
        files[name].write_text(yaml.safe_dump(recipe(place, columns, ids)), encoding="utf-8")
    return files


def cases() -> list[tuple[str, bool, str]]:
    """What is measured: columns, overlap, reader."""
    return [(name, overlap, reader) for name in COLUMNS for overlap in OVERLAP for reader in get_args(Reader)]


def recipe(file: Path, columns: int, ids: int) -> dict[str, Any]:
    """Describe one epoch of a DLRM on that file."""
    sparse = [{"name": f"c{column}", "rows": ROWS, "ids": ids} for column in range(columns)]
    source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": {"sparse": sparse}}}
    return {
        "name": "readers",
        "data": {"path": str(file), "dim": DIM, "source": source, "test_split": None, "train_split": "train"},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [DIM], "top": [64, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.01}},
        "train": {"batch_size": BATCH, "device": "cpu", "checkpoint": "none"},
        "parallel": {"plan": "table"},
    }


def measure(file: Path, ranks: int, reader: str, overlap: bool, place: Path) -> float:
    """Samples per second of a run."""
    out = place / "summary.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "hotbed", "train"]
    options = ["--parallel.reader", reader, "--parallel.overlap", str(overlap).lower(), "--json", str(out)]
    command = [sys.executable, *launcher, str(file), *options, "--out", str(place / "runs")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(json.loads(out.read_text(encoding="utf-8"))["samples_per_s"])
