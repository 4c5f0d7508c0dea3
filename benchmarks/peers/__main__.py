"""Run the comparison: workers take turns, then ratios, a table, a chart and JSON. See the package's docstring.

python -m benchmarks.peers [--only PART] [--rounds 5] [--rows N] [--json FILE] [--quick]
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

from benchmarks.peers import ranks, report
from benchmarks.peers.ranks import ROOT
from benchmarks.peers.results import Results
from benchmarks.peers.sides import HUGE_PAGES, ONE_THREAD, Side, sides_of
from benchmarks.peers.worker import batches_needed
from benchmarks.peers.workloads import STEPS, WORKLOADS, Workload, tiny, write_ids
from hotbed.train.numerics import bf16_instructions

SECTIONS = {
    "embedding": ("embedding", "multi_hot", "narrow"),
    "shapes": ("mixed", "weighted"),
    "step": ("step",),
    "world2": ("world2", "world2_uniform", "world2_step"),
    "numerics": (),
}
"""Sections of the result that a part measures."""

LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Variables that hold back sets of instructions."""

DISTURBED = 0.1
"""A worker is run again where `disturbance` is more than this …"""

ATTEMPTS = 3
"""… until it has run this often; then the least disturbed attempt counts."""


def free_bytes() -> int:
    """Memory that a new process can have."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def run_worker(kind: str, side: Side, workload: Workload, ids: Path) -> dict[str, float]:
    """Measure one side once, in a process of its own, or one per rank; raises with what that wrote if it fails."""
    tables = 2 if kind == "step" and workload.ranks == 1 else 1  # plain PyTorch copies hotbed's
    needed = tables * workload.table_bytes + (4 << 30 if workload.table_bytes > 1 << 30 else 0)
    if free_bytes() < needed:
        raise SystemExit(f"{workload} needs {needed >> 30} GiB, but {free_bytes() >> 30} GiB are free; free memory")
    environment = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    what = (kind, side.module, json.dumps(asdict(workload)), json.dumps(side.options), str(ids))
    command = ("benchmarks.peers.worker", *what)
    return json.loads(ranks.launch(command, workload.ranks, environment | side.environment))


def disturbance(workload: Workload, run: Mapping[str, float]) -> float:
    """How much of the time others were in the way: threads waited for a core; or where own threads, too, are more than
    there are cores, other processes had one."""
    return run["others_share" if workload.ranks > 1 else "cpu_wait_share"]


def undisturbed(kind: str, side: Side, workload: Workload, ids: Path, attempts: int) -> dict[str, float]:
    """Measure one side until no other process was in the way; the rule is the same for all sides."""
    tried: list[dict[str, float]] = []
    while len(tried) < attempts and all(disturbance(workload, run) > DISTURBED for run in tried):
        tried.append(run_worker(kind, side, workload, ids))
    return {**min(tried, key=lambda run: disturbance(workload, run)), "attempts": len(tried)}


def alternate(section: str, workload: Workload, rounds: int, attempts: int, progress: Progress) -> list[report.Round]:
    """All sides in turn, ``rounds`` times, on the same ids; each round begins with another side."""
    kind = "step" if section in STEPS else "embedding"
    sides = list(sides_of(section).items())
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
        "limited_to": {name: os.environ[name] for name in LIMITS if name in os.environ},
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
    parser.add_argument("--only", choices=SECTIONS, help="one part; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="alternations of the sides")
    parser.add_argument("--rows", type=int, help="of each table of `embedding`, where its 13 GB do not fit into memory")
    parser.add_argument("--json", type=Path, help="write results here, and the chart next to it as .png")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    return parser.parse_args()


def main() -> int:
    """Run what is asked for; the exit status is 1 where hotbed and FBGEMM, or hotbed and TorchRec, disagree."""
    args = arguments()
    parts = (args.only,) if args.only else tuple(SECTIONS)
    about = {**environment(), "rounds": args.rounds, "quick": args.quick, "attempts": 1 if args.quick else ATTEMPTS}
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = Results(args.json)
    passed = True

    # Numerics first: how fast something else is computed would say nothing.
    if "numerics" in parts:
        from benchmarks.peers import numerics  # imports FBGEMM

        agreement = numerics.run()
        passed = agreement["passed"]
        found.add("numerics", agreement, about)
        console.print(report.numerics_table(agreement, "optimizer", "the same numbers as FBGEMM?"))
    if "numerics" in parts or "world2" in parts:
        agreement = json.loads(ranks.launch(("benchmarks.peers.numerics_world2",), 2, {**os.environ, **ONE_THREAD}))
        passed = passed and agreement["passed"]
        found.add("numerics_world2", agreement, about)
        console.print(report.numerics_table(agreement, "scheme", "the same numbers as TorchRec on 2 ranks?"))

    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for section in (section for part in parts for section in SECTIONS[part]):
            workload = tiny(WORKLOADS[section]) if args.quick else WORKLOADS[section]
            if section == "embedding" and args.rows:
                workload = replace(workload, rows=args.rows)
            if not bf16_instructions(torch.device("cpu")):
                workload = replace(workload, precisions=("fp32",))
            rounds = alternate(section, workload, args.rounds, about["attempts"], progress)
            threads = 1 if workload.ranks > 1 else about["threads"]
            found.add_rounds(section, workload, rounds, {**about, "threads": threads})
            console.print(report.table(section, found.data[section], str(workload)))
            most = max(disturbance(workload, side) for of_round in rounds for side in of_round.values())
            what = "other processes had a core" if workload.ranks > 1 else "threads waited for a core"
            console.print(f"{what} up to {most:.0%} of the time; over a few percent means noise")
    if args.json:
        found.draw(args.json.with_suffix(".png"))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
