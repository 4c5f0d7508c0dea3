"""Kill commands at drawn points of every phase, let them go on, and compare what they end with to the bit.

    python -m benchmarks.chaos [--json FILE] [--points 60] [--seed 0] [--only WORKLOAD …]

Points are uniform over the counted operations of a phase. A run that finished before its point does not count, and
another is drawn. *Lost* is everything that was not as promised (docs/fault-tests.md); its folders are kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from hotbed.train.report import environment
from tests.crashes.campaign import WORKLOADS, Campaign, Commands, Outcome, make_data
from tests.crashes.wants import KINDS, Want

BY_NAME = {workload.name.replace(" ", "-"): workload for workload in WORKLOADS}
FULL_DISK = "full-disk"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--points", type=int, default=60, help="for each phase of each workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*BY_NAME, FULL_DISK], default=[*BY_NAME, FULL_DISK])
    given = parser.parse_args()
    console = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="hotbed-chaos-"))
    started = time.perf_counter()
    with Commands(make_data(folder / "data")) as commands, Progress(console=console) as progress:
        campaign = Campaign(commands, folder / "runs", given.seed)
        for name in given.only:
            if name == FULL_DISK:
                _fill_disks(campaign, progress)
                continue
            workload = BY_NAME[name]
            for phase in workload.phases:
                task = progress.add_task(f"{workload.name}: {phase}", total=given.points)
                died = 0
                while died < given.points:
                    died += campaign.try_point(workload, phase)
                    progress.update(task, completed=died)
    found = {"seed": given.seed, "seconds": time.perf_counter() - started, **campaign.outcome.to_dict()}
    show(Console(), campaign.outcome)
    if campaign.outcome.lost:
        console.print(f"what was lost is in {folder}")
    if given.json is not None:
        about = {"date": datetime.now(UTC).date().isoformat(), **environment(torch.device("cpu"))}
        given.json.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
    if campaign.outcome.lost:
        raise SystemExit(1)


def _fill_disks(campaign: Campaign, progress: Progress) -> None:
    task = progress.add_task("full disk", total=len(KINDS) * 3)
    for kind in KINDS:
        for number in (1, 2, 5):
            campaign.try_want(BY_NAME["tiers" if kind == "rows" else "chain"], Want(kind, number))
            progress.advance(task)


def show(console: Console, outcome: Outcome) -> None:
    """A row for each phase."""
    table = RichTable("phase", "tried", "died", "operations")
    for phase in outcome.tried:
        kinds = [name for name in outcome.operations if f": {phase}: " in name]
        table.add_row(phase, f"{outcome.tried[phase]:,}", f"{outcome.died[phase]:,}", f"{len(kinds)}")
    console.print(table)
    console.print(f"lost: {len(outcome.lost)}; finished before their points: {outcome.finished_first}")
    for lost in outcome.lost:
        console.print(f"{lost['workload']}: {lost['point']}: {lost['what']}", soft_wrap=True)


if __name__ == "__main__":
    main()
