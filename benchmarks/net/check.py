"""Measure what links between namespaces carry, against their limits: TCP, and exchanges of Gloo between 2 and 4 hosts.

    python -m benchmarks.net.check [--limits 100 1000 10000 none] [--rounds 3] [--seconds 2] [--json FILE]

Needs root and iproute2. The exit status is 1 where more than the limit passed, or where what the hosts sent is not the
payload and its framing; that less passes than the limit allows is no error, for it takes cores to send.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.net.hosts import BURST_S, MIN_BURST_BYTES, QUEUE_S, Hosts, available, run_ranks
from benchmarks.net.worker import WARMUP

STEPS = 10
MOST_BYTES = 64 << 20
"""A rank sends at most so much to the others in one exchange."""

UNLIMITED = 10_000
"""Mbit/s that sizes are chosen for where there is no limit."""

FRAMING = (1.04, 1.12)
"""Sent ÷ payload: 1,514 ÷ 1,448 for full frames of 1,500 bytes; acknowledgements, Gloo's start and its messages."""

TIMEOUT_S = 120

COLUMNS = {
    "tcp": "TCP",
    "all_to_all_2": "all_to_all: 2 ranks",
    "all_to_all_4": "4 ranks",
    "receives_first_2": "receives first: 2 ranks",
    "receives_first_4": "4 ranks",
}

DEFINITIONS = {
    "limits": "by limit of every link and direction in Mbit/s, Ethernet's headers included: payload in Mbit/s, median, "
    "smallest (_min) and largest (_max) over rounds",
    "tcp": "one connection between two hosts, Python's sockets; its last byte acknowledged by the receiver",
    "all_to_all_*": "torch.distributed.all_to_all_single over Gloo, one rank per host, CPU tensors: bytes that each "
    "rank sends to other ranks ÷ seconds of the slowest rank",
    "receives_first_*": "the same exchange with irecv and isend, all receives posted before the first send",
    "sent_ratio_*": "bytes that hosts put on their links ÷ payload, of the exchanges and everything around them",
    "load": "the machine's load average of the last minute, before the first round and after the last",
}


def mbit(size: int, results: Sequence[Mapping[str, float]], kind: str) -> float:
    """Mbit/s of the slowest rank."""
    return size * 8e-6 / max(result[kind] for result in results)


def measure(limit: float | None, seconds: float) -> dict[str, float]:
    """One round: every figure of one limit."""
    worker = [sys.executable, "-m", "benchmarks.net.worker"]
    budget = round((limit or UNLIMITED) * 1e6 / 8 * seconds)
    with Hosts(2, limit) as hosts:
        found = {"tcp": mbit(budget, run_ranks(hosts, [*worker, "tcp", str(budget)], TIMEOUT_S), "tcp")}
        found["sent_ratio_tcp"] = hosts.sent_bytes()[1] / budget
    for ranks in (2, 4):
        size = min(budget // STEPS, MOST_BYTES) // (ranks - 1)
        of_step = size * (ranks - 1)
        with Hosts(ranks, limit) as hosts:
            results = run_ranks(hosts, [*worker, "gloo", str(size), str(STEPS)], TIMEOUT_S)
            sent = hosts.sent_bytes()
        for kind in ("all_to_all", "receives_first"):
            found[f"{kind}_{ranks}"] = mbit(of_step * STEPS, results, kind)
        found[f"sent_ratio_gloo_{ranks}"] = sum(sent) / (2 * (WARMUP + STEPS) * of_step * ranks)
    return found


def summary(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median, smallest and largest of every figure."""
    found: dict[str, float] = {}
    for name in rounds[0]:
        values = [of_round[name] for of_round in rounds]
        found |= {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return found


def wrong(limit: float | None, figures: Mapping[str, float]) -> list[str]:
    """What cannot be, in words."""
    found = [
        f"{name}: {figures[f'{name}_max']:.0f} Mbit/s passed a limit of {limit:g}"
        for name in COLUMNS
        if limit is not None and figures[f"{name}_max"] > limit
    ]
    return found + [
        f"{name}: sent {ratio:.3f} times the payload, not {FRAMING[0]} to {FRAMING[1]}"
        for name, ratio in figures.items()
        if name.startswith("sent_ratio") and name.endswith(("_min", "_max")) and not FRAMING[0] <= ratio <= FRAMING[1]
    ]


def table(limits: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per limit: Mbit/s, and their share of the limit."""
    made = Table(
        "limit",
        *COLUMNS.values(),
        "sent ÷ payload",
        title="Mbit/s of payload: TCP; exchanges over Gloo",
        title_justify="left",
    )
    for limit, figures in limits.items():
        shares = {name: "" if limit == "none" else f" ({figures[name] / float(limit):.0%})" for name in COLUMNS}
        ratios = [figures[name] for name in figures if name.startswith("sent_ratio")]
        cells = [f"{figures[name]:,.0f}{share}" for name, share in shares.items()]
        made.add_row(limit, *cells, f"{min(ratios):.3f}–{max(ratios):.3f}")
    return made


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="+", default=["100", "1000", "10000", "none"], help="Mbit/s, or none")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured")
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement, at the limit")
    parser.add_argument("--json", type=Path, help="write results here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; see the module's docstring for the exit status."""
    args = arguments(argv)
    if (reason := available()) is not None:
        print(f"cannot make hosts here: {reason}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    load = [os.getloadavg()[0]]
    limits: dict[str, float | None] = {name: None if name == "none" else float(name) for name in args.limits}
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in limits}
    turns = [name for _ in range(args.rounds) for name in limits]
    for name in track(turns, "measuring", console=console, transient=True):
        raw[name].append(measure(limits[name], args.seconds))
    found = {name: summary(rounds) for name, rounds in raw.items()}
    console.print(table(found))
    mistakes = [f"limit {name}: {mistake}" for name in limits for mistake in wrong(limits[name], found[name])]
    for mistake in mistakes:
        console.print(mistake, markup=False)
    if args.json:
        about = {**environment(), "rounds": args.rounds, "seconds": args.seconds, "load": [*load, os.getloadavg()[0]]}
        written = {"limits": found, "measured": about, "definitions": DEFINITIONS, "mistakes": mistakes, "raw": raw}
        args.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 1 if mistakes else 0


def environment() -> dict[str, Any]:
    """What was measured, on what."""
    import torch

    from hotbed.train import report

    return {
        **report.environment(torch.device("cpu")),
        "kernel": os.uname().release,
        "burst_s": BURST_S,
        "min_burst_bytes": MIN_BURST_BYTES,
        "queue_s": QUEUE_S,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
