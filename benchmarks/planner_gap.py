"""How near the search for plans comes to its lower bound, on random instances: ``python -m benchmarks.planner_gap``."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from hotbed.files import json_text
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.hardware import Hardware
from hotbed.plan.milp import is_available
from hotbed.plan.search import search
from hotbed.plan.workload import Workload
from hotbed.specs import Table


def instance(seed: int) -> tuple[Workload, int]:
    """Up to 40 tables of up to 30 million rows, with up to 30 ids per sample, on up to 64 ranks."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4, 8, 16, 32, 64])
    tables = [
        Table(f"t{i}", int(10 ** draw.uniform(0, 7.5)), draw.choice([16, 32, 64, 128]))
        for i in range(draw.randint(1, 40))
    ]
    ids = {table.name: 10 ** draw.uniform(-1, 1.5) for table in tables}
    moments = draw.choice([(), RowWiseAdagrad.rule.moments])
    return Workload.of(tables, ids=ids, moments=moments, batch_size=draw.choice([256, 1024, 4096]) * ranks), ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--hardware", default="a100-40")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hardware = Hardware.load(args.hardware)
    rows = []
    for seed in range(args.instances):
        work, ranks = instance(seed)
        start = time.perf_counter()
        found = search(work, ranks, hardware)
        rows.append(
            {
                "seed": seed,
                "tables": len(work.uses),
                "ranks": ranks,
                "gap": found.gap,
                "imbalance": found.costs.imbalance,
                "memory_imbalance": float(found.costs.nbytes.max() / found.costs.nbytes.mean()),
                "binds": found.bound.binds.split(" of ")[0],
                "method": found.method,
                "tiles": len(found.plan.tiles),
                "seconds": time.perf_counter() - start,
            }
        )
    gaps = sorted(row["gap"] for row in rows)
    found = {
        "hardware": args.hardware,
        "milp": is_available(),
        "instances": len(rows),
        "gap": {
            "median": statistics.median(gaps),
            "p90": gaps[int(0.9 * (len(gaps) - 1))],
            "worst": gaps[-1],
            "within_1_percent": sum(gap <= 0.01 for gap in gaps),
        },
        "rows": rows,
    }
    print({key: value for key, value in found.items() if key != "rows"})
    if args.json is not None:
        args.json.write_text(json_text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
