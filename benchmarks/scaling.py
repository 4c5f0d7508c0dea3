"""Simulate how training scales from 8 to 4,096 GPUs, in one group and in replicas: ``python -m benchmarks.scaling``.

The model has 1.7 TB of tables, as one of arXiv 2508.03854 has, of which more is not published: 120 tables of 64 to 256
columns, with rows and ids per sample drawn from a fixed seed, row-wise AdaGrad, float32, twelve dense layers. Every
rank has as many samples at any number of ranks. The plan of a group is that which is best for it alone. Exchanges go in
one hop and in two. Nothing is fitted to the paper.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.published.setups import ACTIVATION_PASSES, LAUNCHES_PER_LAYER
from hotbed.config.parallel_memory import Layout
from hotbed.errors import PlanError
from hotbed.files import json_text
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.cost import CostModel, table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.simulation.simulate import simulate
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUPS = (32, 64, 128, 256, 512)
"""Ranks of a group, where there are replicas."""
EVERY = (1, 10, 100)
LAYERS = 12
LAYOUTS: tuple[Layout, ...] = ("groups", "replicas")


def tables(count: int, nbytes: float, seed: int = 0) -> tuple[list[Table], dict[str, float]]:
    """Tables of so many bytes in all, and their ids per sample."""
    draw = random.Random(seed)
    raw = [(10 ** draw.uniform(3, 8.5), draw.choice([64, 128, 256])) for _ in range(count)]
    scale = nbytes / sum(4 * rows * dim for rows, dim in raw)
    made = [Table(f"t{i}", max(int(rows * scale), 3), dim) for i, (rows, dim) in enumerate(raw)]
    return made, {table.name: 10 ** draw.uniform(-0.5, 1.2) for table in made}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How so many ranks train: in how many replicas, and how they exchange."""

    ranks: int
    replicas: int = 1
    sync_every: int = 1
    layout: Layout = "groups"
    ranks_per_node: int | None = None

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return self.ranks // self.replicas


def workload(args: argparse.Namespace, way: Way) -> Workload:
    """What a step does."""
    made, ids = tables(args.tables, args.bytes)
    activation_bytes = 2 * 2 * (sum(t.dim for t in made) + 20_000)
    dense = DenseWork(
        parameters=20_000_000,
        flops=4e8,
        dtype="bf16",
        layers=LAYERS,
        activation_bytes=activation_bytes,
        moved_bytes=ACTIVATION_PASSES * activation_bytes,
        launches=LAUNCHES_PER_LAYER * LAYERS,
        input_bytes=8 * sum(ids.values()) + 4_000,
    )
    return Workload.of(
        made,
        ids=ids,
        moments=RowWiseAdagrad.rule.moments,
        batch_size=args.samples * way.ranks,
        replicas=way.replicas,
        sync_every=way.sync_every,
        layout=way.layout,
        ranks_per_node=way.ranks_per_node,
        dense=dense,
    )


class Groups:
    """Plans of groups, each searched for once, and simulated in any number of replicas."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._here = args, Hardware.load(args.hardware)
        self._found: dict[tuple[int, int | None], Found | PlanError] = {}

    def find(self, size: int, hop: int | None = None) -> Found | PlanError:
        """The plan of a group of so many ranks, or why none fits."""
        key = (size, hop)
        if key not in self._found:
            work = workload(self._args, Way(ranks=size, ranks_per_node=hop))
            try:
                self._found[key] = search(work, size, self._here, integer_program=False)
            except PlanError as error:
                self._found[key] = error
        return self._found[key]

    def run(self, way: Way) -> dict[str, Any]:
        """Simulate a configuration; ``problem`` where no plan fits."""
        about = asdict(way)
        found = self.find(way.size, way.ranks_per_node)
        if isinstance(found, PlanError):
            return about | {"problem": str(found)}
        model = CostModel(workload(self._args, way), way.size, self._here)
        costs = found.costs if way.replicas == 1 else model.ranks(found.plan)
        simulated = simulate(found.plan, costs, model)
        return about | {
            "step_s": simulated.step_s,
            "samples_per_s": simulated.samples_per_s,
            "binds": simulated.binds,
            "waiting": simulated.waiting,
            "imbalance": costs.imbalance,
            "critical_s": dict(simulated.critical),
            "all_reduce_s": simulated.closed_form.all_reduce,
            "rows_bytes": int(costs.memory["device"].max()),
            "room_bytes": found.limits.device,
        }

    def hops(self, size: int) -> list[int | None]:
        """In which first hops ranks of a group may exchange: none, and those of a node."""
        node = self._here.ranks_per_node
        return [None, node] if size > node and size % node == 0 else [None]


def replicas_of(ranks: int, groups: Sequence[int]) -> list[int]:
    """Numbers of replicas whose groups are allowed."""
    return [ranks // group for group in groups if ranks % group == 0 and ranks > group]


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest."""
    fitting = [row for row in rows if "samples_per_s" in row]
    return max(fitting, key=lambda row: row["samples_per_s"], default=None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all configurations."""
    groups = Groups(args)
    made, ids = tables(args.tables, args.bytes)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        start = time.perf_counter()
        rows += [groups.run(Way(ranks=ranks, ranks_per_node=hop)) for hop in groups.hops(ranks)]
        for replicas, layout, every in product(replicas_of(ranks, args.groups), LAYOUTS, EVERY):
            way = Way(ranks=ranks, replicas=replicas, sync_every=every, layout=layout)
            rows += [groups.run(replace(way, ranks_per_node=hop)) for hop in groups.hops(way.size)]
        print(f"{ranks} ranks: {time.perf_counter() - start:.0f} s", flush=True)
    return {
        "hardware": args.hardware,
        "tables": len(made),
        "table_bytes": sum(table_bytes(table) for table in made),
        "ids_per_sample": sum(ids.values()),
        "samples_per_rank": args.samples,
        "rows": rows,
    }


def print_table(found: dict[str, Any]) -> None:
    """Print a row for each number of ranks: one group, the best replicas, and the first that overtake one group."""
    heads = ["ranks", "one group", "samples/s", "best replicas", "samples/s", "of the first, per rank"]
    heads += ["first to overtake"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    base = 0.0
    for ranks in sorted({row["ranks"] for row in found["rows"]}):
        of_ranks = [row for row in found["rows"] if row["ranks"] == ranks]
        one = best([row for row in of_ranks if row["replicas"] == 1])
        many = [row for row in of_ranks if row["replicas"] > 1]
        top = best(many)
        cells = [f"{ranks:,}"]
        cells += [f"{one['binds']}{_hops(one)}", f"{one['samples_per_s']:,.0f}"] if one else ["out of memory", "–"]
        cells += [_named(top), f"{top['samples_per_s']:,.0f}"] if top else ["–", "–"]
        fastest = best(of_ranks)
        per_rank = fastest["samples_per_s"] / ranks if fastest else 0.0
        base = base or per_rank
        cells.append(f"{per_rank / base:.1%}" if fastest else "–")
        overtaking = [row for row in many if one and row.get("samples_per_s", 0) > one["samples_per_s"]]
        cells.append(_named(min(overtaking, key=lambda row: (row["sync_every"], row["replicas"]), default=None)))
        print(f"| {' | '.join(cells)} |")


def _named(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"M = {row['replicas']}, every {row['sync_every']}, {row['layout']}{_hops(row)}"


def _hops(row: dict[str, Any]) -> str:
    return "" if row["ranks_per_node"] is None else ", two hops"


def main() -> None:
    """Run, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--tables", type=int, default=120)
    parser.add_argument("--bytes", type=float, default=1.7e12)
    parser.add_argument("--samples", type=int, default=256, help="of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    print_table(found)
    if args.json is not None:
        args.json.write_text(json_text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
