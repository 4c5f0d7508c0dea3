"""How near the search for plans comes to its lower bound, on random instances: ``python -m benchmarks.planner_gap``.

``--json FILE`` is written after each instance; ``--resume`` goes on where an interrupted run ended.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed.errors import PlanError
from hotbed.files import json_text, write_text
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Cut
from hotbed.plan.cost import table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.milp import is_available
from hotbed.plan.search import search
from hotbed.plan.workload import Workload
from hotbed.specs import Table, Tier


@dataclass(frozen=True)
class Instance:
    seed: int
    work: Workload
    ranks: int
    fixed: Mapping[str, Cut]
    capacity: int | None
    tiers: tuple[Tier, ...]

    @property
    def kind(self) -> str:
        """What it has beside tables and ranks."""
        own = "own cuts" if self.fixed else ""
        return " and ".join(filter(None, [own, "slower memory" if self.capacity is not None else ""])) or "plain"


def instance(seed: int) -> Instance:
    """Up to 40 tables of up to 30 million rows, with up to 30 ids per sample, on up to 64 ranks.

    Every second one is plain; of the others all have cuts of their own for some tables, or devices that hold a part of
    the rows only, or both.
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
    if seed % 2 == 0:
        return Instance(seed, work, ranks, {}, None, ("device",))
    fixed: dict[str, Cut] = {}
    capacity, tiers = None, ("device",)
    if seed % 8 != 1:
        cuts = [Cut(), Cut(rows=0), Cut(rows=0, tier="host"), Cut(rows=0, hot_rows=10)]
        fixed = {table.name: draw.choice(cuts) for table in tables if draw.random() < 0.3}
    if seed % 8 != 3:
        nbytes = sum(table_bytes(table, moments) for table in tables)
        capacity, tiers = int(nbytes / ranks * draw.uniform(0.2, 0.9)) + (1 << 20), ("device", "host")
    return Instance(seed, work, ranks, fixed, capacity, tiers)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Gaps of some instances."""
    gaps = sorted(row["gap"] for row in rows)
    return {
        "instances": len(gaps),
        "median": statistics.median(gaps),
        "p90": gaps[int(0.9 * (len(gaps) - 1))],
        "worst": gaps[-1],
        "within_1_percent": sum(gap <= 0.01 for gap in gaps),
    }


def figures(one: Instance, hardware: Hardware, *, integer_program: bool) -> dict[str, Any]:
    """What the search finds for an instance; or the error that says why no plan fits."""
    try:
        found = search(
            one.work,
            one.ranks,
            hardware,
            fixed=one.fixed,
            capacity_bytes=one.capacity,
            tiers=one.tiers,
            integer_program=integer_program,
        )
    except PlanError as error:
        return {"error": str(error)}
    if found.gap < -1e-9:
        raise SystemExit(f"instance {one.seed}: the plan is {-found.gap:.3%} better than the lower bound")
    return {
        "tables": len(one.work.uses),
        "ranks": one.ranks,
        "gap": found.gap,
        "imbalance": found.costs.imbalance,
        "memory_imbalance": float(found.costs.nbytes.max() / found.costs.nbytes.mean()),
        "binds": found.bound.binds.split(" of ")[0],
        "method": found.method,
        "tiles": len(found.plan.tiles),
    }


def report(about: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gaps of all instances and of each kind, and what was found for each."""
    rows = [one for one in found if "error" not in one]
    kinds = sorted({row["kind"] for row in rows})
    of_kinds = {kind: summary([row for row in rows if row["kind"] == kind]) for kind in kinds}
    gap = {"all": summary(rows)} | of_kinds if rows else {}
    return {**about, "instances": len(found), "gap": gap, "refused": [o for o in found if "error" in o], "rows": rows}


def done_before(file: Path | None, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run wrote that was interrupted."""
    if file is None or not file.exists():
        return []
    before = json.loads(file.read_text(encoding="utf-8"))
    for name, value in about.items():
        if before[name] != value:
            raise SystemExit(
                f"{file} has {name} {before[name]!r}, this run {value!r}; remove the file, or name another"
            )
    return sorted(before["rows"] + before["refused"], key=lambda one: one["seed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--hardware", default="a100-40")
    parser.add_argument("--heuristics", action="store_true", help="Leave the mixed integer program out.")
    parser.add_argument("--json", type=Path, help="File for results, written after each instance.")
    parser.add_argument("--resume", action="store_true", help="Keep the instances that the file has.")
    args = parser.parse_args()
    hardware = Hardware.load(args.hardware)
    about = {"hardware": args.hardware, "milp": is_available() and not args.heuristics}
    done = done_before(args.json, about) if args.resume else []
    known = {one["seed"] for one in done}
    for seed in range(args.instances):
        if seed in known:
            continue
        one = instance(seed)
        found = figures(one, hardware, integer_program=not args.heuristics)
        done.append({"seed": seed, "kind": one.kind, **found})
        if args.json is not None:
            write_text(args.json, json_text(report(about, done)))
    result = report(about, done)
    print("| instances | number | median | 90 % | worst | within 1 % |\n|---|---|---|---|---|---|")
    for kind, of_kind in result["gap"].items():
        shares = " | ".join(f"{of_kind[what]:.2%}" for what in ("median", "p90", "worst"))
        print(f"| {kind} | {of_kind['instances']} | {shares} | {of_kind['within_1_percent']} |")
    print(f"{len(result['refused'])} refused: no plan fits")


if __name__ == "__main__":
    main()
