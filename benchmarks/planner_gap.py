"""Compare plans with their lower bound on random instances: ``python -m benchmarks.planner_gap [--json FILE]``.

``--json FILE`` is written after each instance. ``--resume`` continues an interrupted run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import runner
from hotbed.errors import PlanError
from hotbed.files import write_json
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Cut
from hotbed.plan.cost import table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.milp import is_available
from hotbed.plan.search import search
from hotbed.plan.workload import Workload
from hotbed.specs import Table


def solve(seed: int, hardware: Hardware, *, integer_program: bool) -> dict[str, Any]:
    """Search for the plan of an instance, and return its figures, or the error if no plan fits.

    An instance has up to 40 tables of up to 30 million rows, with up to 30 ids per sample, on up to 64 ranks. Every
    second one is plain. The others have cuts of their own for some tables, or devices that hold only a part of the
    rows, or both.
    """
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4, 8, 16, 32, 64])
    tables = [
        Table(f"t{i}", int(10 ** draw.uniform(0, 7.5)), draw.choice([16, 32, 64, 128]))
        for i in range(draw.randint(1, 40))
    ]
    ids = {table.name: 10 ** draw.uniform(-1, 1.5) for table in tables}
    moments = draw.choice([(), RowWiseAdagrad.rule.moments])
    work = Workload.of(tables, ids=ids, moments=moments, batch_size=draw.choice([256, 1024, 4096]) * ranks)
    limits: dict[str, Any] = {}
    kinds: list[str] = []
    if seed % 2 and seed % 8 != 1:
        cuts = [Cut(), Cut(rows=0), Cut(rows=0, tier="host"), Cut(rows=0, hot_rows=10)]
        limits["fixed"] = {table.name: draw.choice(cuts) for table in tables if draw.random() < 0.3}
        kinds += ["own cuts"] if limits["fixed"] else []
    if seed % 2 and seed % 8 != 3:
        nbytes = sum(table_bytes(table, moments) for table in tables)
        limits["capacity_bytes"] = int(nbytes / ranks * draw.uniform(0.2, 0.9)) + (1 << 20)
        limits["tiers"] = ("device", "host")
        kinds.append("slower memory")
    about = {"seed": seed, "kind": " and ".join(kinds) or "plain"}
    try:
        found = search(work, ranks, hardware, integer_program=integer_program, **limits)
    except PlanError as error:
        return {**about, "error": str(error)}
    if found.gap < -1e-9:
        raise SystemExit(f"instance {seed}: the plan is {-found.gap:.3%} better than the lower bound")
    return {
        **about,
        "tables": len(tables),
        "ranks": ranks,
        "gap": found.gap,
        "imbalance": found.costs.imbalance,
        "memory_imbalance": float(found.costs.nbytes.max() / found.costs.nbytes.mean()),
        "binds": found.bound.binds.split(" of ")[0],
        "method": found.method,
        "tiles": len(found.plan.tiles),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    gaps = sorted(row["gap"] for row in rows)
    return {
        "instances": len(gaps),
        "median": statistics.median(gaps),
        "p90": gaps[int(0.9 * (len(gaps) - 1))],
        "worst": gaps[-1],
        "within_1_percent": sum(gap <= 0.01 for gap in gaps),
    }


def report(about: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [one for one in found if "error" not in one]
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in sorted({row["kind"] for row in rows})}
    gap = {"all": summary(rows)} | {kind: summary(of) for kind, of in kinds.items()} if rows else {}
    return {**about, "instances": len(found), "gap": gap, "refused": [o for o in found if "error" in o], "rows": rows}


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--hardware", default="a100-40")
    parser.add_argument("--heuristics", action="store_true", help="Leave the mixed integer program out.")
    parser.add_argument("--resume", action="store_true", help="Keep the instances of the file.")
    args = parser.parse_args()
    hardware = Hardware.load(args.hardware)
    about = {"hardware": args.hardware, "milp": is_available() and not args.heuristics}
    before = runner.read_json(args.json) if args.resume else {}
    if before and (stored := {name: before[name] for name in about}) != about:
        raise SystemExit(f"{args.json} is of another run: got {stored}, expected {about}. Remove it.")
    done = sorted(before.get("rows", []) + before.get("refused", []), key=lambda one: one["seed"])
    for seed in sorted({*range(args.instances)} - {one["seed"] for one in done}):
        done.append(solve(seed, hardware, integer_program=not args.heuristics))
        if args.json is not None:
            write_json(args.json, report(about, done))
    result = report(about, done)
    runner.show("gap", [{"kind": kind, **of_kind} for kind, of_kind in result["gap"].items()])
    print(f"{len(result['refused'])} refused: no plan fits")


if __name__ == "__main__":
    main()
