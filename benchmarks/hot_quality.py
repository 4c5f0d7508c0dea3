"""Compare models trained on split batches, and on hot and cold batches in turns, with one of whole batches.

    python -m benchmarks.hot_quality LOG [--seeds 1 2 3] [--json FILE]

A raw log in the Criteo layout is prepared and packed; then every way trains one epoch of the same samples, with the
same seeds, and is tested on the same split. Each way also with a learning rate that falls to 0 over the second half:
an epoch of turns ends with a run of one kind, and a rate that is still high then would leave the model at what that
kind taught it last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import run
from hotbed.files import write_json
from hotbed.train.report import environment

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "criteo_kaggle.yaml"
METRICS = ("auc", "logloss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--budget", type=int, default=1_000_000, help="bytes of hot rows")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    print_found(found)
    if args.json:
        write_json(args.json, found)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    data, packed = folder / "data", folder / "packed"
    run("prepare", args.log, data, "--threshold", 2, "--valid_fraction", 0.1)
    run("pack", RECIPE, packed, "--data", data, "--budget", args.budget, "--sample", 1)
    hot = json.loads((packed / "hot_rows.json").read_text(encoding="utf-8"))
    steps = -(-hot["samples"] // args.batch)
    decay = ["--schedule.decay_start", steps // 2, "--schedule.decay_end", steps + 2, "--schedule.decay_power", 1]
    runs: dict[tuple[str, bool], list[dict[str, float]]] = {}
    ways = [(way, decayed) for decayed in (False, True) for way in ("mixed", "split", "alternating")]
    for seed in track(args.seeds, "seeds", console=Console(stderr=True)):
        for way, decayed in ways:
            file = folder / "summary.json"
            run(
                *("train", RECIPE, "--out", folder / "runs", "--json", file, "--train.seed", seed),
                *("--data.path", packed, "--data.valid_split", "valid", "--data.shuffle", "true"),
                *(
                    "--train.batch_size",
                    args.batch,
                    "--schedule.warmup_steps",
                    min(50, steps // 4),
                    "--train.checkpoint",
                    "none",
                ),
                *("--hot.rows", packed / "hot_rows.json", "--hot.batches", way),
                *(decay if decayed else ()),
            )
            test = json.loads(file.read_text(encoding="utf-8"))["test"]
            runs.setdefault((way, decayed), []).append({metric: test[metric] for metric in METRICS})
    return {
        "settings": {key: str(value) for key, value in vars(args).items() if key not in ("json", "log")},
        "measured": environment(torch.device("cpu")),
        "samples": hot["samples"],
        "hot_share": hot["hot_samples"] / hot["samples"],
        "results": [
            {
                "batches": way,
                "learning rate": "falls" if decayed else "constant",
                **{metric: [r[metric] for r in found] for metric in METRICS},
                **{
                    f"{metric} against mixed": statistics.mean(
                        r[metric] - m[metric] for r, m in zip(found, runs["mixed", decayed], strict=True)
                    )
                    for metric in METRICS
                },
            }
            for (way, decayed), found in runs.items()
        ],
    }


def print_found(found: dict[str, Any]) -> None:
    table = Table(*found["results"][0], title="test split, by seed; differences are means over seeds")
    for result in found["results"]:
        shown = [" ".join(f"{v:.4f}" for v in x) if isinstance(x, list) else x for x in result.values()]
        table.add_row(*(f"{x:+.4f}" if isinstance(x, float) else str(x) for x in shown))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
