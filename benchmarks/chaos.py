"""Kill commands at drawn points of every phase, let them go on, and compare what they end with to the bit.

    python -m benchmarks.chaos [--json FILE] [--points 50] [--seed 0] [--minutes M] [--only WORKLOAD …] [--again]

Points are uniform over the counted operations of a phase; a phase that several workloads have is shared between them. A
run that finished before its point does not count, and another is drawn. *Lost* is everything that was not as promised
(``tests/crashes``); its folders are kept. With ``--json``, a file that is there is gone on with, by the seed that it
names, and is written after every point, so a campaign may be stopped at any time. ``--again`` tries lost points again,
and keeps what was found of them before under ``retried``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from hotbed.files import write_text
from hotbed.train.runs.report import environment
from tests.crashes.campaign import Campaign, Commands, Outcome
from tests.crashes.wants import KINDS, Want
from tests.crashes.workloads import WORKLOADS, Workload, make_data

ROOT = Path(__file__).resolve().parents[1]
BY_NAME = {workload.slug: workload for workload in WORKLOADS}
FULL_DISK = "full-disk"
FULL_DISK_NUMBERS = (1, 2, 5)
"""Of the first write that fails."""


def main() -> None:
    """Try points until each phase has as many as wanted, or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--points", type=int, default=50, help="for each phase, shared by the workloads that have it")
    parser.add_argument("--seed", type=int, help="of a new campaign; default: 0")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--only", nargs="+", choices=[*BY_NAME, FULL_DISK], default=[*BY_NAME, FULL_DISK])
    parser.add_argument("--again", action="store_true", help="try points again that were lost")
    given = parser.parse_args()
    file: Path | None = given.json
    before: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    seed = before.get("seed", given.seed or 0)
    if given.seed not in (None, seed):
        parser.error(f"{file} is a campaign of seed {seed}; go on without --seed, or name another file")
    outcome = Outcome(before.get("points", []))
    retried: list[dict[str, Any]] = before.get("retried", [])
    if given.again:
        retried = [*retried, *outcome.lost]
        outcome.points = [point for point in outcome.points if point["lost"] is None]
    session = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), **environment(torch.device("cpu"))}
    console = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="hotbed-chaos-"))
    started, first = time.perf_counter(), len(outcome.points)
    end = started + 60 * given.minutes if given.minutes else float("inf")
    with Commands(make_data(folder / "data")) as commands:
        campaign = Campaign(commands, folder / "runs", seed, outcome)
        for what in tried(campaign, given.only, given.points):
            session |= {"points": len(outcome.points) - first, "seconds": round(time.perf_counter() - started)}
            if file is not None:
                write_text(file, text_of(seed, [*before.get("sessions", []), session], outcome, retried))
            last = outcome.points[-1]
            console.print(f"{len(outcome.points)}: {what}: {last['operation']}: {last['lost'] or 'ok'}", soft_wrap=True)
            if time.perf_counter() > end:
                break
    show(Console(), outcome)
    if outcome.lost:
        console.print(f"what was lost is in {folder}")
        raise SystemExit(1)


def tried(campaign: Campaign, only: list[str], points: int) -> Iterator[str]:
    """Try a point of each phase of each workload in turn, until there are enough; say what was tried."""
    shared = Counter(phase for workload in WORKLOADS for phase in workload.phases)

    def lacking(workload: Workload, phase: str) -> bool:
        died = sum(point["operation"] is not None for point in campaign.outcome.of(workload.name, phase))
        return died < -(-points // shared[phase])

    of = [(BY_NAME[name], phase) for name in only if name != FULL_DISK for phase in BY_NAME[name].phases]
    while of := [(workload, phase) for workload, phase in of if lacking(workload, phase)]:
        for workload, phase in of:
            campaign.try_point(workload, phase)
            yield f"{workload.name}: {phase}"
    for kind in KINDS if FULL_DISK in only else ():
        workload = BY_NAME["tiers" if kind == "rows" else "chain"]
        done = {point["index"] for point in campaign.outcome.of(workload.name, f"disk full: {kind}")}
        for number in FULL_DISK_NUMBERS:
            if number not in done:
                campaign.try_want(workload, Want(kind, number))
                yield f"{workload.name}: disk full: {kind}"


def commit() -> str:
    """Name the commit that is tried; ``-dirty`` where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def text_of(seed: int, sessions: list[dict[str, Any]], outcome: Outcome, retried: list[dict[str, Any]]) -> str:
    """JSON with a line for each point, and for each lost one that was tried again."""
    died = outcome.died
    found = {
        "seed": seed,
        "died": dict(died),
        "all": sum(died.values()),
        "finished_first": outcome.finished_first,
        "lost": len(outcome.lost),
        "sessions": sessions,
    }
    text = json.dumps(found, indent=1)[:-2]
    for name, points in (("retried", retried), ("points", outcome.points)):
        lines = ",\n".join("  " + json.dumps(point) for point in points)
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def show(console: Console, outcome: Outcome) -> None:
    """A row for each phase."""
    table = RichTable("phase", "points", "kinds of operations", "others ended within")
    for phase, count in outcome.died.items():
        of = [point for point in outcome.points if point["phase"] == phase and point["operation"] is not None]
        kinds = {(point["workload"], point["operation"]) for point in of}
        ends = [point["others_s"] for point in of if "others_s" in point]
        table.add_row(phase, f"{count:,}", f"{len(kinds):,}", f"{max(ends):.1f} s" if ends else "")
    console.print(table)
    console.print(
        f"points: {sum(outcome.died.values())}; finished before theirs: {outcome.finished_first}; "
        f"lost: {len(outcome.lost)}"
    )
    for lost in outcome.lost:
        console.print(f"{lost['workload']}: {lost['phase']} {lost['index']}: {lost['lost']}", soft_wrap=True)


if __name__ == "__main__":
    main()
