"""Measure what each option that gives up the promise about bits saves in time, and what it costs in AUC.

    python -m benchmarks.price --json benchmarks/results/price.json                                     # as root
    python -m benchmarks.price --mbit_per_s 1000 --seeds 1 --json benchmarks/results/price_1000.json    # on such links

For each seed, the cases of a number of ranks are trained on the same samples of the planted log, from the same initial
values (`price_training`), and compared with the exact case of their plan: rows by ids and gradients in float32, moments
across column cuts, one copy of everything. Differences of AUC are paired and have intervals as in docs/quality.md.
Every rank is a host of its own, a network namespace (Linux, root, iproute2), with or without a limit of its link. The
file is written after each seed, and seeds of which it has all cases are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.net.hosts import Hosts, available, run_ranks
from benchmarks.price_training import BATCH, Case, Job
from benchmarks.quality_results import measured_on, paired_difference, verdict
from benchmarks.quality_training import ROWS
from hotbed.errors import HotbedError
from hotbed.files import write_json

TIMEOUT_S = 3_600
MOST_STEPS = 16
"""Between two averages of copies."""
SMALL = 1_000
"""Rows of a small table, at most."""


def _wire(forward: str, backward: str) -> Case:
    return Case(options={"forward_codec": forward, "backward_codec": backward}, exact="row")


def _copies(copies: int, every: int = 1, **rule: float) -> Case:
    return Case(options={"replicas": copies, "sync_every": every}, rule=rule, exact="row")


_SMALL = [f"t{i}" for i, rows in enumerate(ROWS) if rows <= SMALL]

CASES: dict[int, dict[str, Case]] = {
    2: {
        "row": Case(),
        "rows as bf16": _wire("bf16", "fp32"),
        "rows and gradients as bf16": _wire("bf16", "bf16"),
        "rows and gradients as fp16": _wire("fp16", "fp16"),
        "rows as fp16, gradients as bf16": _wire("fp16", "bf16"),
        "rows as int8, gradients as bf16": _wire("int8", "bf16"),
        "rows and gradients as int8": _wire("int8", "int8"),
        "rows as fp8, gradients as bf16": _wire("fp8", "bf16"),
        "pooled vectors in place of rows": Case(wire="pooled", exact="row"),
        "dense part by FSDP": Case(options={"dense": "fsdp"}, exact="row"),
        "column": Case("column"),
        "column, moments per part": Case("column", {"per_shard_statistics": True}, exact="column"),
        "small tables on both ranks": Case({**dict.fromkeys(_SMALL, "dp"), "*": "row"}, exact="row"),
        "small tables in the dense part": Case(dense_rows=SMALL, exact="row"),
        "2 copies": _copies(2),
        "2 copies, c = 1": _copies(2, moment_scale=1.0),
        "2 copies, averaged every 16 steps": _copies(2, MOST_STEPS),
    },
    4: {"row": Case(), "4 copies": _copies(4), "4 copies, c = 1": _copies(4, moment_scale=1.0)},
    8: {"row": Case(), "8 copies": _copies(8), "8 copies, c = 1": _copies(8, moment_scale=1.0)},
}
"""By number of ranks. Small tables in the dense part have its rule, and gradients that are averaged whole. Copies are
of all tables, one per rank; c is ``moment_scale``, by default their number."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    args = _arguments(argv)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    settings = {"samples": args.samples, "test_samples": args.test_samples, "mbit_per_s": args.mbit_per_s}
    data: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if data.setdefault("settings", settings) != settings:
        raise HotbedError(f"{args.json} has runs of {data['settings']}, asked for {settings}; choose another file")
    where: dict[str, str] = data.setdefault("measured on", {})
    runs: dict[str, dict[str, Any]] = data.setdefault("ranks", {})
    wanted = [(n, seed) for n in args.ranks for seed in range(args.seeds)]
    missing = [(n, seed) for n, seed in wanted if not CASES[n].keys() <= runs.get(str(n), {}).get(str(seed), {}).keys()]
    for ranks, seed in track(missing, "seeds", console=console, disable=not console.is_terminal):
        job = Job(CASES[ranks], args.samples, args.test_samples, seed)
        argv_of_rank = [sys.executable, "-m", "benchmarks.price_training", json.dumps(asdict(job))]
        where[str(ranks)] = measured_on()
        with Hosts(ranks, args.mbit_per_s) as hosts:
            runs.setdefault(str(ranks), {})[str(seed)] = run_ranks(hosts, argv_of_rank, TIMEOUT_S)[0]
        if args.json:
            write_json(args.json, data)
    whole = {
        ranks: [of_seed for of_seed in seeds.values() if CASES[int(ranks)].keys() <= of_seed.keys()]
        for ranks, seeds in runs.items()
    }
    data["summary"] = {ranks: summary(int(ranks), seeds) for ranks, seeds in whole.items() if seeds}
    for ranks, of_cases in data["summary"].items():
        console.print(_table(f"{ranks} ranks, {len(whole[ranks])} seeds", of_cases))
    if args.json:
        write_json(args.json, data)


def summary(ranks: int, seeds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By case: milliseconds of a step, AUC, and where there is an exact case, what is saved and lost against it."""
    found: dict[str, dict[str, Any]] = {}
    for name, case in CASES[ranks].items():
        ms = statistics.median(of_seed[name]["step_ms"] for of_seed in seeds)
        found[name] = {"step_ms": ms, "auc": statistics.mean(of_seed[name]["auc"] for of_seed in seeds)}
        if case.exact is not None:
            pairs = [(of_seed[name], of_seed[case.exact]) for of_seed in seeds]
            difference = paired_difference(
                [(a["auc"], b["auc"]) for a, b in pairs], [(a["block_auc"], b["block_auc"]) for a, b in pairs]
            )
            found[name] |= {
                "of_exact": statistics.median(a["step_ms"] / b["step_ms"] for a, b in pairs),
                "auc_difference": difference.mean,
                "half_width": difference.half_width if len(pairs) > 1 else None,
                "verdict": verdict(difference),
            }
    return found


def _table(title: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    view = Table(
        *("option", "ms per step", "of the exact one's", "AUC", "ΔAUC · 10⁴", "loss of AUC"), title=title, box=MARKDOWN
    )
    for name, of_case in found.items():
        cells = ["–", "–", "–"]
        if "of_exact" in of_case:
            width = "?" if of_case["half_width"] is None else f"{1e4 * of_case['half_width']:.2f}"
            cells = [f"{of_case['of_exact']:.2f}", f"{1e4 * of_case['auc_difference']:+.2f} ± {width}"]
            cells += [of_case["verdict"]]
        view.add_row(name, f"{of_case['step_ms']:.2f}", cells[0], f"{of_case['auc']:.5f}", *cells[1:])
    return view


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.price", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_000_000, help="to train on")
    parser.add_argument("--test_samples", type=int, default=524_288)
    parser.add_argument("--mbit_per_s", type=float, help="limit of every rank's link; default: none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.samples < (least := BATCH * MOST_STEPS):
        parser.error(
            f"--samples is {args.samples:,}, must be at least {least:,}: copies are averaged every {MOST_STEPS} steps"
        )
    if why_not := available():
        parser.error(why_not)
    return args


if __name__ == "__main__":
    main()
