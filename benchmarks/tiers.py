"""Time lookups and updates by where rows are, in turns: ``python -m benchmarks.tiers [--rows 1000000] [--json FILE]``.

26 tables, one id per sample by Zipf's law (exponent 1.05), row-wise AdaGrad. All sides train on the same batches over
and over, so after the first time a large enough cache has all rows. Sides in memory take turns first, then those with
files. A turn with a file ends when the file is written.

============= =========================================================================================================
whole         an `EmbeddingCollection` as it is made
distributed   the same by a plan for one process, like all that follow: rows in the device's memory
host          rows as records in the host's memory
host_cached   the same behind a cache for all rows of the batches
disk_cached   a file behind such a cache
disk_half     a file behind a cache for half of these rows
disk          a file that only the system's page cache may hold
============= =========================================================================================================

On a CPU, the memories of the device and of the host are the same, so *host* shows the cost of records and their map.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import hotbed as hb
from benchmarks import runner
from benchmarks.kernels.options import OpsOptions
from benchmarks.kernels.workload import Workload
from hotbed.embed import tables_on_meta
from hotbed.files import write_json
from hotbed.plan.tiling import Tier
from hotbed.store import LazyStore
from hotbed.store.file_records import FileRecords

WARM_UP = 2  # rounds in which rows are made, caches are filled and kernels are compiled


class Side(NamedTuple):
    """A tier, and the size of its cache as a multiple of the rows of the batches (sets do not get equal shares)."""

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


class Trained:
    """A collection with its rows in the memory of a side, and its optimizer."""

    def __init__(self, options: OpsOptions, name: str, asked: int) -> None:
        tables, features = options.specs()
        self.times: list[tuple[float, float]] = []
        if name == "whole":
            self.module: Any = hb.EmbeddingCollection(tables, features)
        else:
            with torch.device("cpu"), tables_on_meta():
                module = hb.EmbeddingCollection(tables, features)
            cut = hb.Cut(tier=SIDES[name].tier, cache_rows=int(asked * SIDES[name].cached) // len(tables))
            self.module = hb.distribute(module, hb.make_plan(tables, 1, cut), device="cpu")
        self.collection: hb.EmbeddingCollection = self.module if name == "whole" else self.module.module
        self.optimizer = hb.optim.RowWiseAdagrad(self.module, lr=0.01)
        self.before: Any = self.collection.traffic

    def turn(self, batches: Sequence[hb.Jagged], grad: torch.Tensor) -> None:
        """Train on all batches, then wait until files are written."""
        self.times += [self._step(ids, grad) for ids in batches]
        stores = [store for store in self.collection.stores() if isinstance(store, LazyStore)]
        for layer in (layer for store in stores for layer in store.records.layers()):
            if isinstance(layer, FileRecords):
                layer.drain()

    def _step(self, ids: hb.Jagged, grad: torch.Tensor) -> tuple[float, float]:
        """Return the seconds of the lookup, and of backward and update."""
        start = time.perf_counter()
        found = self.module(ids).stack()
        looked_up = time.perf_counter()
        found.backward(grad)
        self.optimizer.step()
        return looked_up - start, time.perf_counter() - looked_up

    def result(self) -> dict[str, Any]:
        lookups, updates = zip(*self.times, strict=True)
        moved = self.collection.traffic - self.before
        return {
            "total_ms": 1000 * statistics.median(map(sum, self.times)),
            "lookup_ms": 1000 * statistics.median(lookups),
            "update_ms": 1000 * statistics.median(updates),
            "hit_rate": moved.hit_rate if moved.hits + moved.misses else None,
            "read_bytes": moved.read_bytes / len(self.times),
            "written_bytes": moved.written_bytes / len(self.times),
        }


def measure(sides: dict[str, Trained], batches: Sequence[hb.Jagged], grad: torch.Tensor, rounds: int) -> dict[str, Any]:
    turns = {name: lambda side=side: side.turn(batches, grad) for name, side in sides.items()}
    runner.in_turns(turns, WARM_UP, title="warm up")
    for side in sides.values():
        side.before, side.times = side.collection.traffic, []
    runner.in_turns(turns, rounds, title=", ".join(sides))
    return {name: side.result() for name, side in sides.items()}


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Rows of each table.")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=12, help="Batches that are trained on over and over.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    options = OpsOptions(rows=args.rows, dim=args.dim, batch_size=args.batch_size, device="cpu")
    batches = Workload(options).draw(options.zipf, args.batches)
    asked = sum(len(torch.cat([ids[name].values for ids in batches]).unique()) for name in batches[0].names)
    grad = torch.randn(args.batch_size, options.tables, args.dim, generator=torch.Generator().manual_seed(0))
    results: dict[str, dict[str, Any]] = {}
    for on_disk in (False, True):
        names = [name for name in args.only if (SIDES[name].tier == "disk") == on_disk]
        if names:
            results |= measure({n: Trained(options, n, asked) for n in names}, batches, grad, args.rounds)
    for found in results.values():
        found["ratio"] = found["total_ms"] / results["whole"]["total_ms"] if "whole" in results else None
    keys = ("total_ms", "ratio", "lookup_ms", "update_ms", "hit_rate")
    rows = [{"side": name} | {key: found[key] for key in keys} for name, found in results.items()]
    runner.show(f"{asked:,} different rows in {args.batches} batches of {args.batch_size:,}", rows)
    if args.json:
        sizes = {name: value for name, value in vars(args).items() if name not in ("only", "json")}
        write_json(args.json, {"measured": runner.about(**sizes, asked=asked), "results": results})


if __name__ == "__main__":
    main()
