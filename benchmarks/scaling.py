"""Simulate training on 8 to 4,096 GPUs, in one group and in replicas: ``python -m benchmarks.scaling``.

The model has 1.7 TB of tables, like one of arXiv 2508.03854. Nothing else about it is published: 120 tables of 64 to
256 columns, with rows and ids per sample drawn from a fixed seed, row-wise AdaGrad, float32, and twelve dense layers.
Each rank has the same number of samples at any number of ranks. A group has the plan that is best for it alone.
Exchanges take one hop or two. Nothing is fitted to the paper.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from benchmarks import runner
from benchmarks.published.setups import ACTIVATION_PASSES, LAUNCHES_PER_LAYER
from hotbed.config.parallel_memory import Layout
from hotbed.errors import PlanError
from hotbed.files import write_json
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.cost import CostModel, table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.simulation.simulate import simulate
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUPS = (32, 64, 128, 256, 512)  # ranks of a group, if there are replicas
EVERY = (1, 10, 100)
LAYERS = 12
LAYOUTS: tuple[Layout, ...] = ("groups", "replicas")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How ranks train: in how many replicas, and how they exchange."""

    ranks: int
    replicas: int = 1
    sync_every: int = 1
    layout: Layout = "groups"
    ranks_per_node: int | None = None


class Groups:
    """Plans of groups. Each is searched for once, and simulated in any number of replicas."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._here = args, Hardware.load(args.hardware)
        self._found: dict[tuple[int, int | None], Found | PlanError] = {}
        draw = random.Random(0)
        raw = [(10 ** draw.uniform(3, 8.5), draw.choice([64, 128, 256])) for _ in range(args.tables)]
        scale = args.bytes / sum(4 * rows * dim for rows, dim in raw)
        self.tables = [Table(f"t{i}", max(int(rows * scale), 3), dim) for i, (rows, dim) in enumerate(raw)]
        self.ids = {table.name: 10 ** draw.uniform(-0.5, 1.2) for table in self.tables}

    def workload(self, way: Way) -> Workload:
        activation_bytes = 2 * 2 * (sum(t.dim for t in self.tables) + 20_000)
        dense = DenseWork(
            parameters=20_000_000,
            flops=4e8,
            dtype="bf16",
            layers=LAYERS,
            activation_bytes=activation_bytes,
            moved_bytes=ACTIVATION_PASSES * activation_bytes,
            launches=LAUNCHES_PER_LAYER * LAYERS,
            input_bytes=8 * sum(self.ids.values()) + 4_000,
        )
        moments, exchange = RowWiseAdagrad.rule.moments, {k: v for k, v in asdict(way).items() if k != "ranks"}
        batch = self._args.samples * way.ranks
        return Workload.of(self.tables, ids=self.ids, moments=moments, batch_size=batch, dense=dense, **exchange)

    def find(self, size: int, hop: int | None) -> Found | PlanError:
        """Return the plan of a group of this size, or the error if none fits."""
        if (size, hop) not in self._found:
            work = self.workload(Way(ranks=size, ranks_per_node=hop))
            try:
                self._found[size, hop] = search(work, size, self._here, integer_program=False)
            except PlanError as error:
                self._found[size, hop] = error
        return self._found[size, hop]

    def run(self, ranks: int, replicas: int = 1, layout: Layout = "groups", every: int = 1) -> list[dict[str, Any]]:
        """Simulate a configuration with one hop and, if nodes divide groups, with two."""
        node, size = self._here.ranks_per_node, ranks // replicas
        hops = [None, node] if size > node and size % node == 0 else [None]
        ways = [
            Way(ranks=ranks, replicas=replicas, sync_every=every, layout=layout, ranks_per_node=hop) for hop in hops
        ]
        return [asdict(way) | self._simulated(way, size) for way in ways]

    def _simulated(self, way: Way, size: int) -> dict[str, Any]:
        found = self.find(size, way.ranks_per_node)
        if isinstance(found, PlanError):
            return {"problem": str(found)}
        model = CostModel(self.workload(way), size, self._here)
        costs = found.costs if way.replicas == 1 else model.ranks(found.plan)
        simulated = simulate(found.plan, costs, model)
        return {
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    groups = Groups(args)
    rows: list[dict[str, Any]] = []
    for ranks in runner.progress(args.ranks, "scaling"):
        rows += groups.run(ranks)
        replicas = [ranks // group for group in args.groups if ranks % group == 0 and ranks > group]
        for count, layout, every in product(replicas, LAYOUTS, args.every):
            rows += groups.run(ranks, count, layout, every)
    return {
        "hardware": args.hardware,
        "tables": len(groups.tables),
        "table_bytes": sum(map(table_bytes, groups.tables)),
        "ids_per_sample": sum(groups.ids.values()),
        "samples_per_rank": args.samples,
        "rows": rows,
    }


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return max((row for row in rows if "samples_per_s" in row), key=lambda row: row["samples_per_s"], default=None)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print for each number of ranks one group, the best replicas, and the first replicas that overtake one group."""
    shown: list[dict[str, object]] = []
    base = 0.0
    for ranks in sorted({row["ranks"] for row in rows}):
        of_ranks = [row for row in rows if row["ranks"] == ranks]
        one, fastest = best([row for row in of_ranks if row["replicas"] == 1]), best(of_ranks)
        many = [row for row in of_ranks if row["replicas"] > 1]
        top = best(many)
        per_rank = fastest["samples_per_s"] / ranks if fastest else None
        base = base or per_rank or 0.0
        overtaking = [row for row in many if one and row.get("samples_per_s", 0) > one["samples_per_s"]]
        first = min(overtaking, key=lambda row: (row["sync_every"], row["replicas"]), default=None)
        shown.append(
            {
                "ranks": ranks,
                "one group": f"{one['binds']}{_hops(one)}" if one else "out of memory",
                "samples/s": one and one["samples_per_s"],
                "best replicas": _named(top),
                "their samples/s": top and top["samples_per_s"],
                "of the first, per rank": per_rank and per_rank / base,
                "first to overtake": _named(first),
            }
        )
    runner.show("scaling", shown)


def _named(row: dict[str, Any] | None) -> str:
    return f"M = {row['replicas']}, every {row['sync_every']}, {row['layout']}{_hops(row)}" if row else "–"


def _hops(row: dict[str, Any]) -> str:
    return "" if row["ranks_per_node"] is None else ", two hops"


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--tables", type=int, default=120)
    parser.add_argument("--bytes", type=float, default=1.7e12)
    parser.add_argument("--samples", type=int, default=256, help="Samples of a rank.")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS))
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY), help="Steps between averages of replicas.")
    args = parser.parse_args()
    found = measure(args)
    show(found["rows"])
    if args.json is not None:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
