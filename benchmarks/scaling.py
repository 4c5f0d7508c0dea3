"""Simulate how training scales from 8 to 4,096 GPUs, in one group and in replicas: ``python -m benchmarks.scaling``.

The model has 1.7 TB of tables, as one of arXiv 2508.03854 has, of which more is not published: 120 tables of 64 to 256
columns, with rows and ids per sample drawn from a fixed seed, row-wise AdaGrad, float32. Every rank has as many samples
at any number of ranks. The plan of a group is that which is best for it alone. Nothing is fitted to the paper.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotbed.config.places import Layout
from hotbed.errors import PlanError
from hotbed.files import json_text
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.cost import CostModel, table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.simulate import simulate
from hotbed.plan.workload import DensePart, Workload
from hotbed.specs import Table

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUPS = (64, 128, 256, 512)
"""Ranks of a group, where there are replicas."""
EVERY = (1, 10, 100)
LAYOUTS: tuple[Layout, ...] = ("groups", "replicas")


def tables(count: int, nbytes: float, seed: int = 0) -> tuple[list[Table], dict[str, float]]:
    """Tables of so many bytes in all, and their ids per sample."""
    draw = random.Random(seed)
    raw = [(10 ** draw.uniform(3, 8.5), draw.choice([64, 128, 256])) for _ in range(count)]
    scale = nbytes / sum(4 * rows * dim for rows, dim in raw)
    made = [Table(f"t{i}", max(int(rows * scale), 3), dim) for i, (rows, dim) in enumerate(raw)]
    return made, {table.name: 10 ** draw.uniform(-0.5, 1.2) for table in made}


def workload(
    args: argparse.Namespace, ranks: int, replicas: int = 1, every: int = 1, layout: Layout = "groups"
) -> Workload:
    """What a step does."""
    made, ids = tables(args.tables, args.bytes)
    dense = DensePart(
        parameters=20_000_000,
        flops=4e8,
        dtype="bf16",
        activation_bytes=2 * 2 * (sum(t.dim for t in made) + 20_000),
        input_bytes=8 * sum(ids.values()) + 4_000,
    )
    return Workload.of(
        made,
        ids=ids,
        moments=RowWiseAdagrad.rule.moments,
        batch_size=args.samples * ranks,
        replicas=replicas,
        sync_every=every,
        layout=layout,
        dense=dense,
    )


class Groups:
    """Plans of groups, each searched for once, and simulated in any number of replicas."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._here = args, Hardware.load(args.hardware)
        self._found: dict[int, Found | PlanError] = {}

    def find(self, size: int) -> Found | PlanError:
        """The plan of a group of so many ranks, or why none fits."""
        if size not in self._found:
            try:
                self._found[size] = search(workload(self._args, size), size, self._here, integer_program=False)
            except PlanError as error:
                self._found[size] = error
        return self._found[size]

    def run(self, ranks: int, replicas: int = 1, every: int = 1, layout: Layout = "groups") -> dict[str, Any]:
        """Simulate a configuration; ``problem`` where no plan fits."""
        about = {"ranks": ranks, "replicas": replicas, "sync_every": every, "layout": layout}
        size = ranks // replicas
        found = self.find(size)
        if isinstance(found, PlanError):
            return about | {"problem": str(found)}
        model = CostModel(workload(self._args, ranks, replicas, every, layout), size, self._here)
        costs = found.costs if replicas == 1 else model.ranks(found.plan)
        simulated = simulate(found.plan, costs, model)
        return about | {
            "step_s": simulated.step_s,
            "samples_per_s": simulated.samples_per_s,
            "binds": simulated.binds,
            "waiting": simulated.waiting,
            "imbalance": costs.imbalance,
            "critical_s": dict(simulated.critical),
            "rows_bytes": int(costs.memory["device"].max()),
            "room_bytes": found.limits.device,
        }


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
        rows.append(groups.run(ranks))
        for replicas in replicas_of(ranks, args.groups):
            for layout in LAYOUTS:
                rows += [groups.run(ranks, replicas, every, layout) for every in EVERY]
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
    print("| ranks | one group | samples/s | best replicas | samples/s | of the first, per rank | first to overtake |")
    print("|---|---|---|---|---|---|---|")
    base: float | None = None
    for ranks in sorted({row["ranks"] for row in found["rows"]}):
        of_ranks = [row for row in found["rows"] if row["ranks"] == ranks]
        one = next(row for row in of_ranks if row["replicas"] == 1)
        many = [row for row in of_ranks if row["replicas"] > 1]
        fastest, top = best(of_ranks), best(many)
        rate = one.get("samples_per_s")
        cells = [f"{ranks:,}", one.get("binds", "out of memory"), f"{rate:,.0f}" if rate else "–"]
        cells += [_named(top), f"{top['samples_per_s']:,.0f}"] if top else ["–", "–"]
        if fastest is None:
            cells.append("–")
        else:
            per_rank = fastest["samples_per_s"] / ranks
            base = base or per_rank
            cells.append(f"{per_rank / base:.1%}")
        overtaking = [row for row in many if rate and row.get("samples_per_s", 0) > rate]
        cells.append(_named(min(overtaking, key=lambda row: (row["sync_every"], row["replicas"]), default=None)))
        print(f"| {' | '.join(cells)} |")


def _named(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"M = {row['replicas']}, every {row['sync_every']}, {row['layout']}"


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
