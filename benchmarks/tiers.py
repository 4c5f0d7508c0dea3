"""Time lookups and updates by where rows are, in turns: ``python -m benchmarks.tiers [--rows 1000000] [--json FILE]``.

26 tables, one id per sample by Zipf's law (exponent 1.05), row-wise AdaGrad. Every side trains on the same batches,
time and again, so after the first time caches that have room for all rows hold all that is asked. Sides in memory take
turns first, then those with files, each of which ends its turn when its file is written.

============= =========================================================================================================
whole         an `EmbeddingCollection` as it is made
distributed   the same by a plan over one process, as all that follow: rows in the device's memory
host          rows as records in the host's memory
host_cached   the same, behind a cache for all rows that are asked
disk_cached   a file, behind such a cache
disk_half     a file, behind a cache for half of them
disk          a file, which the system's page cache may hold
============= =========================================================================================================

On a CPU the memory of the device and the host's are the same, so what *host* costs is that of records and of their map.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hotbed as hb
from benchmarks.kernels.options import OpsOptions
from benchmarks.kernels.workload import Workload
from hotbed.embed import tables_on_meta
from hotbed.files import write_json
from hotbed.plan.tiling import Tier
from hotbed.store import LazyStore
from hotbed.store.file_records import FileRecords
from hotbed.train.runs.report import environment

WARM_UP = 2
"""Times that all batches are trained on before they are timed: rows are made, caches fill, kernels are compiled."""


class Side(NamedTuple):
    """A tier, and how many times the rows that are asked its cache has room for: sets do not get equal shares."""

    tier: Tier
    cached: float


SIDES = {
    "whole": Side("device", 0),
    "distributed": Side("device", 0),
    "host": Side("host", 0),
    "host_cached": Side("host", 2),
    "disk_cached": Side("disk", 2),
    "disk_half": Side("disk", 0.5),
    "disk": Side("disk", 0),
}


def files_of(collection: hb.EmbeddingCollection) -> list[FileRecords]:
    """List the files that a collection has rows in."""
    stores = [store for store in collection.stores() if isinstance(store, LazyStore)]
    return [layer for store in stores for layer in store.records.layers() if isinstance(layer, FileRecords)]


class Trained:
    """A collection and its optimizer, with rows where a side has them."""

    def __init__(self, options: OpsOptions, name: str, asked: int) -> None:
        tables, features = options.specs()
        if name == "whole":
            self.module: Any = hb.EmbeddingCollection(tables, features)
            self.collection = self.module
        else:
            self.module = self._distributed(tables, features, SIDES[name], asked)
            self.collection = self.module.module
        self.optimizer = hb.optim.RowWiseAdagrad(self.module, lr=0.01)
        self.before: Any = self.collection.traffic

    @staticmethod
    def _distributed(tables: Sequence[hb.Table], features: Sequence[hb.Feature], side: Side, asked: int) -> Any:
        with torch.device("cpu"), tables_on_meta():
            module = hb.EmbeddingCollection(tables, features)
        cut = hb.Cut(tier=side.tier, cache_rows=int(asked * side.cached) // len(tables))  # of each table
        return hb.distribute(module, hb.make_plan(tables, 1, cut), device="cpu")

    def drain(self) -> None:
        """Wait until files are written, which would take another side's time."""
        for file in files_of(self.collection):
            file.drain()

    def step(self, ids: hb.Jagged, grad: torch.Tensor) -> tuple[float, float]:
        """Seconds of the lookup, and of backward and update."""
        start = time.perf_counter()
        found = self.module(ids).stack()
        looked_up = time.perf_counter()
        found.backward(grad)
        self.optimizer.step()
        return looked_up - start, time.perf_counter() - looked_up


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=12, help="that are trained on over and over")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    options = OpsOptions(rows=args.rows, dim=args.dim, batch_size=args.batch_size, device="cpu")
    batches = Workload(options).draw(options.zipf, args.batches)
    asked = sum(len(torch.cat([ids[name].values for ids in batches]).unique()) for name in batches[0].names)
    grad = torch.randn(args.batch_size, options.tables, args.dim, generator=torch.Generator().manual_seed(0))
    results: dict[str, dict[str, Any]] = {}
    console = Console(width=120)
    for on_disk in (False, True):
        names = [name for name in args.only if (SIDES[name].tier == "disk") == on_disk]
        sides = {name: Trained(options, name, asked) for name in names}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for round_ in track(range(WARM_UP + args.rounds), ", ".join(names), console=console):
            for name, side in sides.items():
                if round_ == WARM_UP:
                    side.before = side.collection.traffic
                found = [side.step(ids, grad) for ids in batches]
                side.drain()
                times[name] += found if round_ >= WARM_UP else []
        results |= {name: _result(side, times[name]) for name, side in sides.items()}
    for found in results.values():
        found["ratio"] = found["total_ms"] / results["whole"]["total_ms"] if "whole" in results else None
    here = environment(torch.device("cpu"))
    table = Table("", "ms", "÷ whole", "lookup", "update", "hit rate", title=here["hardware"])
    for name, r in results.items():
        ratio = "–" if r["ratio"] is None else f"{r['ratio']:.2f}"
        hits = "–" if r["hit_rate"] is None else f"{r['hit_rate']:.1%}"
        table.add_row(name, f"{r['total_ms']:.1f}", ratio, f"{r['lookup_ms']:.1f}", f"{r['update_ms']:.1f}", hits)
    console.print(table, f"{asked:,} different rows in {args.batches} batches of {args.batch_size:,}")
    if args.json:
        arguments = {"rows": args.rows, "dim": args.dim, "batch_size": args.batch_size, "batches": args.batches}
        measured = {**here, "threads": torch.get_num_threads(), "rounds": args.rounds, **arguments, "asked": asked}
        write_json(args.json, {"measured": measured, "results": results})


def _result(side: Trained, times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians over steps, and what moved in one."""
    lookups, updates = zip(*times, strict=True)
    moved = side.collection.traffic - side.before
    return {
        "total_ms": 1000 * statistics.median(map(sum, times)),
        "lookup_ms": 1000 * statistics.median(lookups),
        "update_ms": 1000 * statistics.median(updates),
        "hit_rate": moved.hit_rate if moved.hits + moved.misses else None,
        "read_bytes": moved.read_bytes / len(times),
        "written_bytes": moved.written_bytes / len(times),
    }


if __name__ == "__main__":
    main()
