"""Measure first contact: options, the order of the runs, and the table.

    python -m benchmarks.first_contact --trials 30 --seeds 3 --json benchmarks/results/first_contact.json

Each dataset is written, hotbed trains with each seed, then the baselines do; the file is written after each of these
steps, and what is in it is not repeated, so the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and Numba are imported, here and in the processes

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.first_contact.dlrm import searched_dlrm
from benchmarks.first_contact.encoding import Frames, read
from benchmarks.first_contact.logistic import logistic_regression
from benchmarks.first_contact.logs import LOGS, planted
from benchmarks.first_contact.planted import Dataset
from benchmarks.first_contact.real import REAL, real_dataset
from benchmarks.first_contact.runs import first_run
from hotbed.files import write_json

NAMES = (*LOGS, *REAL)
Results = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> Results:
    """Run what is missing, and print the table."""
    args = _arguments(argv)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    console = Console()
    if not console.is_terminal:
        console.width = 160
    settings = {"scale": args.scale, "trials": args.trials}
    results = _earlier(args.json, settings)
    with tempfile.TemporaryDirectory(prefix="hotbed-first-contact-") as temporary:
        for name in args.datasets:
            if name in REAL and args.real_log is None:
                console.print(f"{name} skipped: its licence forbids shipping it; give yours as --real_log FILE")
                continue
            work = Path(args.work or temporary) / name.replace(" ", "_")
            _measure(name, args, work, results.setdefault(name, {}), console, lambda: _save(args, settings, results))
    _print(console, results)
    return results


def _measure(
    name: str,
    args: argparse.Namespace,
    work: Path,
    result: dict[str, Any],
    console: Console,
    save: Callable[[], None],
) -> None:
    """Run what a dataset lacks; each result is kept at once."""
    work.mkdir(parents=True, exist_ok=True)
    dataset = _dataset(name, args, work)
    if dataset.attainable is not None:
        result["attainable"] = asdict(dataset.attainable)
    frames: list[Frames] = []

    def splits() -> Frames:
        if not frames:
            frames.append(read(dataset))
        return frames[0]

    runs: dict[str, Callable[[int], dict[str, Any]]] = {
        "hotbed": lambda seed: first_run(name, dataset, work / "hotbed", seed),
        "logistic": lambda seed: asdict(logistic_regression(splits(), seed=seed)),
        "dlrm": lambda seed: asdict(searched_dlrm(splits(), trials=args.trials, seed=seed)),
    }
    for model, run in runs.items():
        if model not in args.models:
            continue
        of_seeds: dict[str, Any] = result.setdefault(model, {})
        for seed in range(args.seeds if model == "hotbed" else 1):
            if "auc" in of_seeds.get(str(seed), {}):
                continue
            start = time.perf_counter()
            of_seeds[str(seed)] = {**run(seed), "seconds": round(time.perf_counter() - start, 1)}
            console.print(f"{name}, {model}, seed {seed}: {_said(of_seeds[str(seed)])}")
            save()


def _dataset(name: str, args: argparse.Namespace, work: Path) -> Dataset:
    if name in REAL:
        return real_dataset(name, args.real_log, work)
    return planted(name, scale=args.scale, seed=args.data_seed).write(work)


def _said(found: dict[str, Any]) -> str:
    shown = found.get("error") or f"AUC {found['auc']:.4f}, logloss {found['logloss']:.4f}"
    return f"{shown}{', ' + found['note'] if 'note' in found else ''} ({found['seconds']:.0f} s)"


def _print(console: Console, results: Results) -> None:
    table = Table(title="AUC on the test split")
    for column in ("dataset", "attainable", "hotbed", "± of seeds", "logloss", "logistic", "DLRM, searched", "verdict"):
        table.add_column(column, justify="left" if column in ("dataset", "verdict") else "right")
    for name, result in results.items():
        table.add_row(name, *_row(result))
    console.print(table)


def _row(result: dict[str, Any]) -> list[str]:
    def values(model: str, metric: str = "auc") -> list[float]:
        return [found[metric] for found in result.get(model, {}).values() if metric in found]

    def shown(numbers: Sequence[float]) -> str:
        return f"{statistics.fmean(numbers):.4f}" if numbers else "–"

    own, linear, deep = values("hotbed"), values("logistic"), values("dlrm")
    spread = f"{statistics.stdev(own):.4f}" if len(own) > 1 else "–"
    attainable = result.get("attainable", {}).get("auc")
    cells = ["–" if attainable is None else f"{attainable:.4f}", shown(own), spread, shown(values("hotbed", "logloss"))]
    return [*cells, shown(linear), shown(deep), verdict(own, linear, deep)]


def verdict(own: Sequence[float], linear: Sequence[float], deep: Sequence[float]) -> str:
    """Whether hotbed's mean is never below logistic regression's, and within 0.002 of the searched DLRM's."""
    if not own or not (linear or deep):
        return "–"
    mean = statistics.fmean(own)
    missed = (
        [f"{mean - statistics.fmean(linear):+.4f} to logistic"] if linear and mean < statistics.fmean(linear) else []
    )
    if deep and mean < statistics.fmean(deep) - 0.002:
        missed.append(f"{mean - statistics.fmean(deep):+.4f} to DLRM")
    return ", ".join(missed) or "reached"


def _earlier(file: Path | None, settings: dict[str, Any]) -> Results:
    if file is None or not file.exists():
        return {}
    kept = json.loads(file.read_text(encoding="utf-8"))
    if kept["settings"] != settings:
        raise SystemExit(f"{file} was measured with {kept['settings']}, not {settings}; choose another --json")
    return kept["results"]


def _save(args: argparse.Namespace, settings: dict[str, Any], results: Results) -> None:
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, {"settings": settings, "results": results})


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--datasets", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES)
    )
    parser.add_argument(
        "--models", nargs="+", choices=("hotbed", "logistic", "dlrm"), default=("hotbed", "logistic", "dlrm")
    )
    parser.add_argument("--trials", type=int, default=30, help="of the DLRM's search")
    parser.add_argument("--seeds", type=int, default=3, help="of hotbed's training")
    parser.add_argument("--scale", type=float, default=1.0, help="of the planted logs' rows, for quick runs")
    parser.add_argument("--data_seed", type=int, default=0, help="of the planted logs")
    parser.add_argument("--real_log", type=Path, help="a log in Criteo's layout, .tsv or .tsv.gz")
    parser.add_argument("--work", type=Path, help="where data and runs are kept; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="results, written as they come; what is in it is not repeated")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
