"""Measure step time against bandwidth, for plans and codecs, on hosts joined by links with limits.

    python -m benchmarks.net [--limits 100 1000] [--ranks 2 4] [--plans table row column dp] [--json FILE] [--quick]
    python -m benchmarks.net --ranks 8 --plans row --codecs fp32 --groups 1 2 2:all 2/8   # one group against 2D

Every rank is a host of its own. Needs root and iproute2. The exit status is 1 where ranks sent other bytes than the
plan says (more than 5 % apart), or the links carried more than these and their framing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.net.hosts import Hosts, available, run_ranks
from benchmarks.net.step_worker import BATCH, DIM, ROWS, TABLES
from hotbed.train.runs.report import environment

CODECS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "int8 / bf16": ("int8", "bf16")}
"""Forward and backward."""
TOLERANCE = 0.05
FRAMING = 1.1
"""Largest bytes on the links ÷ payload: headers of Ethernet, IP and TCP are 1.046, acknowledgements come on top …"""
STARTING_BYTES = 1 << 20
"""… and what a rank sends before the first step."""
TIMEOUT_S = 300

DEFINITIONS = {
    "step_ms": "a training step of the slowest rank, mean from one average to the next, median over these and rounds",
    "payload_kb": "bytes that a rank gave to exchanges in a step, mean over ranks",
    "predicted_kb": "the same as benchmarks.net.traffic.step_traffic says, for the expected numbers of distinct ids",
    "sync_kb": "of the payload, what replicas exchange to be averaged, after every step or with M/K every K: rows that "
    "any of them touched, or with :all all rows; the step waits for it",
    "payload_ratio": "payload ÷ predicted: what is left out are counts, and the chance of the ids",
    "wire_ratio": "bytes on the links ÷ payload, all steps and the start of the processes included",
    "wire_ratio_limit": "what it may be, see FRAMING and STARTING_BYTES in benchmarks/net",
}


def measure(
    ranks: int, limit: float | None, scheme: str, codec: str, groups: str, zipf: float, steps: int
) -> dict[str, float]:
    """One run."""
    forward, backward = CODECS[codec]
    replicas, _, dense = groups.partition(":")
    count, _, every = replicas.partition("/")
    of_replicas = {"replicas": int(count), "sync_every": max(int(every or 1), 1), "dense_sync": dense == "all"}
    job = {"scheme": scheme, "forward": forward, "backward": backward, "zipf": zipf, "steps": steps, **of_replicas}
    with Hosts(ranks, limit) as hosts:
        found = run_ranks(hosts, [sys.executable, "-m", "benchmarks.net.step_worker", json.dumps(job)], TIMEOUT_S)
        on_links = sum(hosts.sent_bytes())
    steps_done = found[0]["steps"]
    payload = statistics.mean(rank["sent_bytes"] for rank in found)
    predicted = statistics.mean(rank["predicted_bytes"] for rank in found)
    return {
        "step_ms": 1e3 * max(rank["step_s"] for rank in found),
        "payload_kb": payload / 1e3,
        "predicted_kb": predicted / 1e3,
        "sync_kb": statistics.mean(rank["sync_bytes"] for rank in found) / 1e3,
        "payload_ratio": payload / predicted,
        "wire_ratio": on_links / (payload * ranks * steps_done),
        "wire_ratio_limit": FRAMING + STARTING_BYTES / (payload * steps_done),
    }


def as_predicted(result: dict[str, Any]) -> bool:
    """Whether ranks and links carried the bytes that the plan says."""
    payload_is = abs(result["payload_ratio"] - 1) <= TOLERANCE
    return payload_is and 1 <= result["wire_ratio"] <= result["wire_ratio_limit"]


def _commit() -> str:
    git = ["git", "rev-parse", "HEAD"]
    return subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()


def draw(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> bool:
    """A panel per limit and codec, a line per plan; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    limits, codecs, ranks = (
        list(dict.fromkeys(result[key] for result in results)) for key in ("limit_mbit", "codec", "ranks")
    )
    plans = list(dict.fromkeys(key(result)[2] for result in results))
    figure = Figure(figsize=(3.2 * len(codecs) + 1, 2.6 * len(limits) + 0.8), layout="constrained")
    panels = figure.subplots(len(limits), len(codecs), sharex=True, sharey="row", squeeze=False)
    for row, limit in zip(panels, limits, strict=True):
        for axes, codec in zip(row, codecs, strict=True):
            for plan in plans:
                line = {r["ranks"]: r["step_ms"] for r in results if key(r) == (limit, codec, plan)}
                axes.plot(list(line), list(line.values()), marker="o", markersize=3, label=plan)
            axes.set_title(f"{limit} Mbit/s, {codec}", loc="left", fontsize="medium")
            axes.set_xticks(ranks)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize="small")
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("ranks, each a host of its own", fontsize=10)
    figure.supylabel("step, ms", fontsize=10)
    figure.savefig(path, dpi=120)
    return True


def key(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """Panel and line of a result."""
    groups = result["groups"]
    return result["limit_mbit"], result["codec"], result["plan"] + (f", {groups} groups" if groups != "1" else "")


def main() -> int:
    """Measure, print, write; 1 where bytes are not what the plan says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="+", default=["100", "1000"], help="Mbit/s, or none")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--plans", nargs="+", default=["table", "row", "column", "dp"])
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument(
        "--groups", nargs="+", default=["1"], help="replicas of the tables; M/K averages every K steps, M:all all rows"
    )
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the ids' popularity; 0: uniform")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one of each, to see that everything runs")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if reason := available():
        console.print(f"cannot measure here: {reason}")
        return 1
    if args.quick:
        args.limits, args.ranks, args.plans, args.codecs, args.rounds, args.steps = (
            ["1000"],
            [2],
            ["row"],
            ["bf16"],
            1,
            2,
        )
    cases = list(product(args.ranks, args.limits, args.plans, args.codecs, args.groups))
    runs: dict[tuple[Any, ...], list[dict[str, float]]] = {case: [] for case in cases}
    for _, (ranks, limit, plan, codec, groups) in track(
        list(product(range(args.rounds), cases)), "net", console=console
    ):
        limit_mbit = None if limit == "none" else float(limit)
        found = measure(ranks, limit_mbit, plan, codec, groups, args.zipf, args.steps)
        runs[ranks, limit, plan, codec, groups].append(found)
    results = [
        {"ranks": r, "limit_mbit": limit, "plan": plan, "codec": codec, "groups": groups}
        | {name: statistics.median(run[name] for run in found) for name in found[0]}
        for (r, limit, plan, codec, groups), found in runs.items()
    ]
    ids = f"Zipf {args.zipf:g} ids" if args.zipf else "uniform ids"
    title = f"{TABLES} tables × {ROWS:,} × {DIM}, {BATCH} samples per rank, {ids}"
    table = Table(*list(results[0]), title=title, title_justify="left")
    for result in results:
        table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in result.values()))
    console.print(table)
    if args.json:
        about = {
            **environment(torch.device("cpu")),
            "load": os.getloadavg(),
            "commit": _commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds": args.rounds,
            "ids": ids,
        }
        text = json.dumps({"results": results, "measured": about, "definitions": DEFINITIONS}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
        picture = args.json.with_suffix(".png")
        console.print(f"chart: {picture}" if draw(results, title, picture) else "no chart: matplotlib is not installed")
    return int(not all(map(as_predicted, results)))


if __name__ == "__main__":
    raise SystemExit(main())
