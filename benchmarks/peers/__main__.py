"""Run the comparison: workers take turns, then ratios, a table, a chart and JSON. See the package's docstring.

python -m benchmarks.peers [--only embedding|step|numerics] [--rounds 5] [--rows N] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers import report
from benchmarks.peers.ids import write_ids
from benchmarks.peers.results import Results
from benchmarks.peers.sides import EMBEDDING_SIDES, HUGE_PAGES, STEP_SIDES, Side
from benchmarks.peers.worker import batches_needed
from benchmarks.peers.workloads import WORKLOADS, Workload, tiny

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("embedding", "step", "numerics")
SECTIONS = {"embedding": ("embedding", "multi_hot", "narrow"), "step": ("step",), "numerics": ()}
"""Sections of the result that a part measures."""

DISTURBED = 0.1
"""A worker is run again where its threads waited for a core for more than this share of the time …"""

ATTEMPTS = 3
"""… until it has run this often; then the least disturbed attempt counts."""


def free_bytes() -> int:
    """Memory that a new process can have."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def run_worker(kind: str, side: Side, workload: Workload, ids: Path) -> dict[str, float]:
    """Measure one side once, in a process of its own; raises with what the process wrote if it fails."""
    tables = 2 if kind == "step" else 1  # plain PyTorch copies hotbed's
    needed = tables * workload.table_bytes + (4 << 30 if workload.table_bytes > 1 << 30 else 0)
    if free_bytes() < needed:
        raise SystemExit(f"{workload} needs {needed >> 30} GiB, but {free_bytes() >> 30} GiB are free; free memory")
    environment = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.worker", kind, side.module, json.dumps(asdict(workload)), str(ids)],
        cwd=ROOT,
        env=environment | side.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{side.module} failed ({done.returncode}) on {workload}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def undisturbed(kind: str, side: Side, workload: Workload, ids: Path, attempts: int) -> dict[str, float]:
    """Measure one side until no other process was in the way; the rule is the same for all sides."""
    tried: list[dict[str, float]] = []
    while len(tried) < attempts and all(run["cpu_wait_share"] > DISTURBED for run in tried):
        tried.append(run_worker(kind, side, workload, ids))
    return {**min(tried, key=lambda run: run["cpu_wait_share"]), "attempts": len(tried)}


def alternate(section: str, workload: Workload, rounds: int, attempts: int, progress: Progress) -> list[report.Round]:
    """All sides in turn, ``rounds`` times, on the same ids; each round begins with another side."""
    kind = "step" if section == "step" else "embedding"
    sides = list((STEP_SIDES if kind == "step" else EMBEDDING_SIDES).items())
    task = progress.add_task(f"{section}: ids", total=rounds * len(sides))
    measured: list[report.Round] = []
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.npy"
        write_ids(workload, batches_needed(kind, workload), ids)
        for i in range(rounds):
            first = i % len(sides)
            of_round: dict[str, Mapping[str, float]] = {}
            for name, side in sides[first:] + sides[:first]:
                progress.update(task, description=f"{section}: {name}")
                of_round[name] = undisturbed(kind, side, workload, ids, attempts)
                progress.advance(task)
            measured.append(of_round)
    progress.update(task, description=section)
    return measured


def environment() -> dict[str, Any]:
    """What was measured, on what."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "threads": torch.get_num_threads(),
        "transparent_hugepage": pages.read_text(encoding="utf-8").strip() if pages.exists() else "none",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "fbgemm-gpu-cpu", "torchrec", "numba")},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results") != "",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="alternations of the sides")
    parser.add_argument("--rows", type=int, help="of each table of `embedding`, where its 13 GB do not fit into memory")
    parser.add_argument("--json", type=Path, help="write results here, and the chart next to it as .png")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    return parser.parse_args()


def main() -> int:
    """Run what is asked for; the exit status is 1 where hotbed and FBGEMM disagree."""
    args = arguments()
    parts = (args.only,) if args.only else PARTS
    about = {**environment(), "rounds": args.rounds, "quick": args.quick, "attempts": 1 if args.quick else ATTEMPTS}
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = Results(args.json)
    passed = True

    if "numerics" in parts:  # first: how fast something else is computed would say nothing
        from benchmarks.peers import numerics  # imports FBGEMM

        agreement = numerics.run()
        passed = agreement["passed"]
        found.add("numerics", agreement, about)
        console.print(report.numerics_table(agreement))

    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for section in (section for part in parts for section in SECTIONS[part]):
            workload = tiny(WORKLOADS[section]) if args.quick else WORKLOADS[section]
            if section == "embedding" and args.rows:
                workload = replace(workload, rows=args.rows)
            rounds = alternate(section, workload, args.rounds, about["attempts"], progress)
            found.add_rounds(section, workload, rounds, about)
            console.print(report.table(section, found.data[section], str(workload)))
            wait = max(side["cpu_wait_share"] for of_round in rounds for side in of_round.values())
            console.print(f"threads waited for a core up to {wait:.0%} of the time; over a few percent means noise")
    if args.json:
        found.draw(args.json.with_suffix(".png"))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
