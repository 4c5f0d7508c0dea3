"""Measure how much less a run writes whose checkpoints hold what changed since a full one, on a log.

    python -m benchmarks.differences LOG [--json FILE]

A raw log in the Criteo layout is prepared with a row for every id; then one epoch is trained in the order of time for
each interval between checkpoints, of a model with hardly any layers: bytes are those of rows, which are nearly all of a
large model's. Of every 8 checkpoints the first is full and the others are differences to it, as long as they hold at
most half of the bytes of all rows. *Less written* is what full checkpoints would have taken over what all took;
*difference* how much smaller the first one after a full one was. Intervals are shares of the log: what a longer log
would save at a share cannot be told from this one, for its ids and tables are more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import run
from hotbed.data import SplitBinarySource
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.train.report import environment

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "criteo_kaggle.yaml"
BATCH, FULL_EVERY = 100, 8
PERCENT = (0.25, 0.5, 1, 2, 5, 10)
"""Of the log between two checkpoints."""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.differences", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--percent", type=float, nargs="+", default=PERCENT, help="of the log, between checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 120)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        run("prepare", args.log, data, "--threshold", 1, "--valid_fraction", 0.1)
        steps = SplitBinarySource(data).samples("train") // BATCH
        intervals = {percent: round(percent / 100 * steps) for percent in args.percent}
        if min(intervals.values()) < 1:
            raise HotbedError(f"{min(intervals):g} % of {steps * BATCH:,} samples is no batch of {BATCH}; give more")
        results = {
            f"{percent:g}": measured(data, Path(folder) / f"{percent:g}", every)
            for percent, every in track(intervals.items(), "intervals", console=console)
        }
    table = Table("% of the log", "samples", "checkpoints", "of them full", "less written", "difference, smaller by")
    for percent, found in results.items():
        counts = (f"{found[name]:,}" for name in ("samples", "checkpoints", "full"))
        table.add_row(percent, *counts, f"{found['less_written']:.1f} ×", f"{found['first_difference']:.1f} ×")
    console.print(table)
    if args.json:
        found = {"samples": steps * BATCH, "full_every": FULL_EVERY, "results": results}
        write_json(args.json, found | {"measured": environment(torch.device("cpu"))})


def measured(data: Path, folder: Path, every: int) -> dict[str, Any]:
    """Train an epoch with a checkpoint every some steps, and count their bytes."""
    run(
        *("train", RECIPE, "--out", folder, "--data.path", data),
        *("--model.init_args.bottom", "[16]", "--model.init_args.top", "[1]"),
        *("--train.batch_size", BATCH, "--train.precision", "fp32", "--schedule.warmup_steps", 50),
        *("--train.checkpoint_every", every, "--train.checkpoint_full_every", FULL_EVERY),
        *("--train.checkpoint_in_background", "false"),
    )
    (log,) = folder.rglob("metrics.jsonl")
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    saved = [event for event in events if event["event"] == "checkpoint"]
    full = [event["bytes"] for event in saved if event["base"] is None]
    after_full = [b["bytes"] for a, b in pairwise(saved) if a["base"] is None and b["base"]]
    if not after_full:
        raise HotbedError(f"no checkpoint of {len(saved)} is a difference: half of the rows change in {every} steps")
    return {
        "samples": every * BATCH,
        "checkpoints": len(saved),
        "full": len(full),
        "bytes": sum(event["bytes"] for event in saved),
        "less_written": max(full) * len(saved) / sum(event["bytes"] for event in saved),
        "first_difference": max(full) / (sum(after_full) / len(after_full)),
    }


if __name__ == "__main__":
    main()
