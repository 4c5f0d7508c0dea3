"""Compare the row cache on a real log with the exact curve: ``python -m benchmarks.cache_hit_rate LOG``.

A raw log in the Criteo layout is prepared and trained on for an epoch, with all rows in files behind a cache of a share
of the rows. What the cache counts is compared with what a fully associative LRU cache of as many rows would have served
(stack distances), and with the share that the most looked-up rows would have served from the start. All three are
shares of the distinct rows of each batch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import run
from hotbed.data import Loader, SplitBinarySource
from hotbed.data.stack_distance import StackDistances
from hotbed.files import write_json
from hotbed.train.report import environment

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "criteo_kaggle.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows, in the cache")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    table = Table(*found["results"][0])
    for result in found["results"]:
        table.add_row(*(f"{v:.1%}" if isinstance(v, float) else f"{v:,}" for v in result.values()))
    Console(width=120).print(table)
    if args.json:
        write_json(args.json, found)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run("prepare", args.log, folder / "data", "--threshold", 2, "--test_fraction", 0.1)
    source = SplitBinarySource(folder / "data")
    rows = sum(source.schema.rows.values())
    cached = int(args.share * rows)
    results: list[dict[str, float]] = []
    for batch in args.batch:
        keys, ends = lookups(source, batch)
        exact = StackDistances(rows)
        exact.follow(keys, ends)
        by_use = np.sort(np.bincount(keys, minlength=rows))[::-1]
        result: dict[str, float] = {"batch": batch, "rows": rows, "cache": cached, "lookups": len(keys)}
        for policy in ("lru", "lfu"):
            result[policy] = trained(args, folder, batch, cached, policy)
        result["exact lru"] = float(exact.hit_rates([cached])[0])
        result["most used"] = float(by_use[:cached].sum() / len(keys))
        results.append(result)
    return {"measured": environment(torch.device("cpu")), "dim": args.dim, "results": results}


def lookups(source: SplitBinarySource, batch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Distinct rows of each batch, numbered over all tables, and where each batch ends."""
    first = dict(zip(source.schema.rows, np.cumsum([0, *source.schema.rows.values()]), strict=False))
    tables = {column.name: column.table_name for column in source.schema.sparse}
    found = [
        np.unique(np.concatenate([b.sparse[f].values.numpy() + first[t] for f, t in tables.items()]))
        for b in Loader(source, "train", batch)
    ]
    return np.concatenate(found).astype(np.int64), np.cumsum([len(keys) for keys in found])


def trained(args: argparse.Namespace, folder: Path, batch: int, cached: int, policy: str) -> float:
    """What the cache counts in an epoch."""
    file = folder / "summary.json"
    run(
        *("train", RECIPE, "--data.path", folder / "data", "--out", folder / "runs", "--json", file),
        *("--data.dim", args.dim, "--model.init_args.bottom", f"[64, {args.dim}]", "--model.init_args.top", "[64, 1]"),
        *("--train.batch_size", batch, "--train.checkpoint", "none", "--data.test_split", "null"),
        *("--memory.tier", "disk", "--memory.cache_rows", cached, "--memory.cache_policy", policy),
    )
    return json.loads(file.read_text(encoding="utf-8"))["memory"]["hit_rate"]


if __name__ == "__main__":
    main()
