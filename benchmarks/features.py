"""Measure what a step costs by the number of tables, at as many ids: it should not grow.

    python -m benchmarks.features [--only fixed one whole] [--json benchmarks/results/features.json]

26, 260, 1,000 and 2,600 tables, one feature each, share as many rows, ids and vectors; so there are as many bytes to
move in every case, and what grows is work for each table. Tables of one dim, or of three in turns; features of one id
per sample, or ragged with two on average. One rank has all tables; two have them by a plan. Each round takes all
numbers of tables in turns; medians over rounds, of the first rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table as View

import hotbed as hb
from hotbed.files import write_json
from hotbed.train.process_group import end_groups
from hotbed.train.report import environment

Bags = Literal["fixed", "ragged"]
Dims = Literal["one", "mixed"]
PLANS = ("whole", "table", "row", "column")
"""The first is one rank's, the others are those of two."""
PARTS = ("batch", "forward", "backward", "step")
DIMS: dict[str, tuple[int, ...]] = {"one": (32,), "mixed": (16, 32, 48)}
IDS_PER_BAG = 2
"""Of ragged features, on average."""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    tables: tuple[int, ...] = (26, 260, 1000, 2600)
    ids: int = 104_000
    rows: int = 1_040_000
    rounds: int = 15


class Case(NamedTuple):
    """What is measured at every number of tables."""

    bags: Bags
    dims: Dims
    plan: str

    @property
    def ranks(self) -> int:
        return 1 if self.plan == "whole" else 2


class Model:
    """Tables of a case, their optimizer, and batches."""

    def __init__(self, case: Case, tables: int, sizes: Sizes, rank: int) -> None:
        dims = DIMS[case.dims]
        self.rows, self.tables = sizes.rows // tables, tables
        # A column cut needs dims of two blocks of 16 columns.
        scale = 2 if case.plan == "column" else 1
        specs = [hb.Table(f"t{i}", rows=self.rows, dim=scale * dims[i % len(dims)]) for i in range(tables)]
        features = [hb.Feature(f"f{i}", table=f"t{i}") for i in range(tables)]
        collection = hb.EmbeddingCollection(specs, features)
        self.model = collection if case.plan == "whole" else hb.distribute(collection, case.plan)
        self.optimizer = hb.optim.RowWiseAdagrad(self.model, lr=0.01)
        self.names = [f.name for f in features]
        self.samples = max(sizes.ids // tables // (IDS_PER_BAG if case.bags == "ragged" else 1), 1)
        self.ragged = case.bags == "ragged"
        self.draw = torch.Generator().manual_seed(rank)

    def batch(self) -> dict[str, Any]:
        """Ids as a loader has them."""
        bags = self.tables * self.samples
        ids = torch.randint(0, self.rows, (bags * (IDS_PER_BAG if self.ragged else 1),), generator=self.draw)
        if not self.ragged:
            return {"values": ids, "batch_size": self.samples}
        lengths = torch.randint(0, bags, ids.shape, generator=self.draw).bincount(minlength=bags)
        offsets = torch.nn.functional.pad(lengths.view(self.tables, self.samples).cumsum(1), (1, 0))
        return {"values": ids, "batch_size": self.samples, "fixed": [None] * self.tables, "offsets": offsets}

    def step(self) -> dict[str, float]:
        """Milliseconds of each part of a training step."""
        batch, at = self.batch(), [time.perf_counter()]
        ids = hb.Jagged(self.names, **batch)
        at.append(time.perf_counter())
        loss = self.model(ids).concatenate().sum()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        self.optimizer.step()
        at.append(time.perf_counter())
        return {part: 1000 * (b - a) for part, a, b in zip(PARTS, at, at[1:], strict=False)}


def measure(case: Case, sizes: Sizes, rank: int = 0) -> dict[int, dict[str, float]]:
    """Medians by number of tables: milliseconds of each part, and of all."""
    models = {tables: Model(case, tables, sizes, rank) for tables in sizes.tables}
    found: dict[int, list[dict[str, float]]] = {tables: [] for tables in models}
    for turn in range(sizes.rounds + 2):
        for tables, model in models.items():
            parts = model.step()
            if turn > 1:  # kernels are compiled, memory is there
                found[tables].append({**parts, "all": sum(parts.values())})
    return {t: {part: statistics.median(f[part] for f in steps) for part in steps[0]} for t, steps in found.items()}


def _rank(rank: int, case: Case, sizes: Sizes, folder: str) -> None:
    """One of two ranks; the first writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(minutes=10)
    )
    found = measure(case, sizes, rank)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    end_groups()
    dist.destroy_process_group()


def measured(case: Case, sizes: Sizes) -> dict[int, dict[str, float]]:
    """As `measure`, by as many ranks as the case has."""
    if case.ranks == 1:
        return measure(case, sizes)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (case, sizes, folder), nprocs=2)
        return {int(t): found for t, found in json.loads(Path(folder, "found.json").read_text()).items()}


def cases() -> list[Case]:
    """All."""
    return [Case(*case) for case in product(get_args(Bags), get_args(Dims), PLANS)]


def view(results: dict[str, dict[int, dict[str, float]]]) -> View:
    """One line per case and number of tables."""
    table = View("case", "tables", *(f"{part}, ms" for part in (*PARTS, "all")), "against the fewest")
    for case, found in results.items():
        least = next(iter(found.values()))["all"]
        for tables, parts in found.items():
            figures = [f"{parts[part]:.2f}" for part in (*PARTS, "all")]
            table.add_row(case, f"{tables:,}", *figures, f"{parts['all'] / least:.2f} ×")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with all of: fixed one row …")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = Sizes((2, 6), 240, 600, 2) if args.quick else Sizes(rounds=args.rounds)
    results: dict[str, dict[int, dict[str, float]]] = {}
    for case in cases():
        if set(args.only) <= set(case):
            results[" ".join(case)] = measured(case, sizes)
    Console(width=150).print(view(results))
    if args.json:
        write_json(args.json, {"measured": environment(torch.device("cpu")), "sizes": vars(sizes), "results": results})


if __name__ == "__main__":
    main()
