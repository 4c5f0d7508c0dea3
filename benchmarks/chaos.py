"""Kill commands at random points of every phase, resume them, and compare their output to the bit.

    python -m benchmarks.chaos [--json FILE] [--points 50] [--seed 0] [--minutes M] [--only WORKLOAD …] [--again]

Points are uniform over the counted operations of a phase. Workloads with the same phase share its points. A run that
finishes before its point does not count. A point is *lost* if a promise of ``tests/crashes`` is broken, and its folders
are kept. ``--json`` is written after each point, and an existing file is continued with its seed, so a campaign can be
stopped at any time. ``--again`` repeats lost points, and keeps their former results under ``retried``.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import runner
from hotbed.files import write_text
from tests.crashes.campaign import Campaign, Commands, Outcome
from tests.crashes.wants import KINDS, Want
from tests.crashes.workloads import WORKLOADS, Workload, make_data

BY_NAME = {workload.slug: workload for workload in WORKLOADS}
FULL_DISK = "full-disk"
FULL_DISK_NUMBERS = (1, 2, 5)  # of the first write that fails


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--points", type=int, default=50, help="Points of each phase.")
    parser.add_argument("--seed", type=int, help="Seed of a new campaign (default: 0).")
    parser.add_argument("--minutes", type=float, help="Time limit.")
    parser.add_argument("--only", nargs="+", choices=[*BY_NAME, FULL_DISK], default=[*BY_NAME, FULL_DISK])
    parser.add_argument("--again", action="store_true", help="Repeat lost points.")
    given = parser.parse_args()
    before = runner.read_json(given.json)
    seed = before.get("seed", given.seed or 0)
    if given.seed not in (None, seed):
        parser.error(f"{given.json} has another seed: got {given.seed}, expected {seed}. Leave out --seed.")
    outcome = Outcome(before.get("points", []))
    retried: list[dict[str, Any]] = before.get("retried", [])
    if given.again:
        retried = [*retried, *outcome.lost]
        outcome.points = [point for point in outcome.points if point["lost"] is None]
    session, console = runner.about(), Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="hotbed-chaos-"))
    started, first = time.perf_counter(), len(outcome.points)
    end = started + 60 * given.minutes if given.minutes else float("inf")
    with Commands(make_data(folder / "data")) as commands:
        campaign = Campaign(commands, folder / "runs", seed, outcome)
        for what in tried(campaign, given.only, given.points):
            session |= {"points": len(outcome.points) - first, "seconds": round(time.perf_counter() - started)}
            if given.json is not None:
                write_text(given.json, text_of(seed, [*before.get("sessions", []), session], outcome, retried))
            last = outcome.points[-1]
            console.print(f"{len(outcome.points)}: {what}: {last['operation']}: {last['lost'] or 'ok'}", soft_wrap=True)
            if time.perf_counter() > end:
                break
    show(outcome)
    if outcome.lost:
        console.print(f"lost points are in {folder}")
        raise SystemExit(1)


def tried(campaign: Campaign, only: list[str], points: int) -> Iterator[str]:
    """Try a point of each phase of each workload in turn until there are enough, and yield its name."""
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


def text_of(seed: int, sessions: list[dict[str, Any]], outcome: Outcome, retried: list[dict[str, Any]]) -> str:
    died = outcome.died
    found = {"seed": seed, "died": dict(died), "all": sum(died.values()), "finished_first": outcome.finished_first}
    text = json.dumps({**found, "lost": len(outcome.lost), "sessions": sessions}, indent=1)[:-2]
    for name, points in (("retried", retried), ("points", outcome.points)):
        lines = ",\n".join("  " + json.dumps(point) for point in points)
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def show(outcome: Outcome) -> None:
    rows: list[dict[str, object]] = []
    for phase, count in outcome.died.items():
        of = [point for point in outcome.points if point["phase"] == phase and point["operation"] is not None]
        kinds = {(point["workload"], point["operation"]) for point in of}
        ends = [float(point["others_s"]) for point in of if "others_s" in point]
        other = max(ends, default=None)
        rows.append({"phase": phase, "points": count, "kinds of operations": len(kinds), "others ended after s": other})
    runner.show(
        f"points: {sum(outcome.died.values())}, finished first: {outcome.finished_first}, lost: {len(outcome.lost)}",
        rows,
    )
    for lost in outcome.lost:
        print(f"{lost['workload']}: {lost['phase']} {lost['index']}: {lost['lost']}")


if __name__ == "__main__":
    main()
