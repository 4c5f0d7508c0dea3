"""Measure the seconds of training until the test logloss is as low as a target.

    benchmarks/peers/.venv/bin/python -m benchmarks.time_to_quality [--real_log LOG] --json FILE
    python -m benchmarks.time_to_quality --json FILE --render

Sides take turns, seed by seed, each in processes of its own: hotbed, plain PyTorch, TorchRec (left out where it is not
installed; ``make bench-peers`` makes an environment that has it), and an asynchronous parameter server with one trainer
and with two. A side's rate for the tables is the one of `RATES` by which its logloss is lowest after a quarter of the
log, by a seed that is not measured; so it is chosen for quality, not for speed. Tests are not timed.

*Targets* are the lowest logloss that every run reaches, and the lowest that every run without a parameter server
reaches. The file is written after each run, and what is in it is not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.command import json_of
from benchmarks.pages import measured_on
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.time_to_quality.logs import Log, planted, real, save
from benchmarks.time_to_quality.run import SERVED, SIDES
from benchmarks.time_to_quality.sides import Point
from hotbed.errors import HotbedError
from hotbed.files import write_json

RATES = {"planted": (0.004, (0.01, 0.02, 0.05)), "real": (0.002, (0.04, 0.08, 0.16))}
"""Of the layers, and those of the tables to choose from."""
PILOT = 1_000
"""The seed by which rates are chosen."""

Curve = Sequence[Point]
Curves = Mapping[str, Sequence[Curve]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, and print the tables."""
    args = _arguments(argv)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    data: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if not args.render:
        for _ in _measure(args, data, console):
            if args.json:
                write_json(args.json, data)
    for name, found in data.get("logs", {}).items():
        console.print(_table(name, data.setdefault("summary", {}).setdefault(name, summary(_curves(found)))))
    if args.json:
        write_json(args.json, data)


def _measure(args: argparse.Namespace, data: dict[str, Any], console: Console) -> Iterator[None]:
    """Fill ``data["logs"][log][side]`` with the rate and a curve per seed; yields after each run."""
    settings = {"samples": args.samples, "seeds": args.seeds}
    if data.setdefault("settings", settings) != settings:
        raise HotbedError(f"{args.json} has runs of {data['settings']}, asked for {settings}; choose another file")
    data["measured on"] = measured_on()
    data.pop("summary", None)
    sides = [side for side in SIDES if side != "TorchRec" or importlib.util.find_spec("torchrec")]
    logs = ["planted", *(["real"] if args.real_log else [])]
    if not args.real_log:
        console.print("real log skipped: its licence forbids shipping it; give yours as --real_log FILE")
    with Progress(console=console, disable=not console.is_terminal) as progress, tempfile.TemporaryDirectory() as place:
        task = progress.add_task("runs", total=sum(len(sides) * (args.seeds + len(RATES[name][1])) for name in logs))
        for name in logs:
            found = data.setdefault("logs", {}).setdefault(name, {})
            layers, rates = RATES[name]
            of_all_seeds = real(args.real_log) if name == "real" else None
            for seed in (PILOT, *range(args.seeds)):
                log = of_all_seeds or planted(args.samples, args.samples // 8, seed)
                path = Path(place) / "log.pt"
                save(_quarter(log) if seed == PILOT else log, path)
                for side in sides:
                    of_side = found.setdefault(side, {"pilot": {}, "curves": {}})
                    if seed == PILOT:
                        missing = {f"{rate:g}": rate for rate in rates if f"{rate:g}" not in of_side["pilot"]}
                        for key, rate in missing.items():
                            of_side["pilot"][key] = _run(side, path, seed, layers, rate)[-1].logloss
                            progress.advance(task)
                            yield
                    elif str(seed) not in of_side["curves"]:
                        rate = float(min(of_side["pilot"], key=of_side["pilot"].get))
                        curve = _run(side, path, seed, layers, rate)
                        of_side["curves"][str(seed)] = curve
                        console.print(f"{name}, seed {seed}, {side}, rate {rate:g}: {curve[-1]}")
                        progress.advance(task)
                        yield


def _quarter(log: Log) -> Log:
    return replace(log, train=log.train[: len(log.train) // 4])


def _run(side: str, log: Path, seed: int, layers: float, tables: float) -> list[Point]:
    argv = (side, log, seed, layers, tables)
    return [Point(*point) for point in json_of(side, "benchmarks.time_to_quality.run", *argv)]


def _curves(found: Mapping[str, Any]) -> dict[str, list[list[Point]]]:
    """Of the sides that have been measured."""
    return {
        side: [[Point(*point) for point in curve] for curve in of_side["curves"].values()]
        for side, of_side in found.items()
        if of_side["curves"]
    }


def seconds_to(curve: Curve, target: float) -> float | None:
    """Seconds until a curve is first at or below a target, on straight lines between its points; None: never."""
    before = None
    for point in curve:
        if point.logloss <= target:
            if before is None:
                return point.seconds
            share = (before.logloss - target) / (before.logloss - point.logloss)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def reached_by_all(curves: Curves) -> float:
    """The lowest logloss that each of these runs reaches."""
    return max(min(point.logloss for point in curve) for of_side in curves.values() for curve in of_side)


def summary(curves: Curves) -> dict[str, Any]:
    """Targets; by side medians over seeds, and for each target the seconds to it, None where not all runs reach it."""
    of_most = {side: of_side for side, of_side in curves.items() if side not in SERVED}
    targets = list(dict.fromkeys(reached_by_all(of) for of in (curves, of_most)))
    sides: dict[str, Any] = {}
    for side, of_side in curves.items():
        times = [[seconds_to(curve, target) for curve in of_side] for target in targets]
        own = [[seconds_to(curve, target) for curve in curves["hotbed"]] for target in targets]
        sides[side] = {
            "samples_per_s": statistics.median(curve[-1].samples / curve[-1].seconds for curve in of_side),
            "lowest": statistics.median(min(point.logloss for point in curve) for curve in of_side),
            "seconds": [_spread(seconds) for seconds in times],
            "ratio": [
                _spread([t and o and t / o for t, o in zip(seconds, of_own, strict=True)])
                for seconds, of_own in zip(times, own, strict=True)
            ],
        }
    return {"targets": targets, "sides": sides}


def _spread(values: Sequence[float | None]) -> list[float] | None:
    """Median, smallest and largest; None where a value is."""
    given = [value for value in values if value is not None]
    return [statistics.median(given), min(given), max(given)] if len(given) == len(values) else None


def _table(log: str, found: Mapping[str, Any]) -> Table:
    view = Table(
        "side",
        "samples/s",
        "lowest logloss",
        *(column for target in found["targets"] for column in (f"s to {target:.5f}", "÷ hotbed")),
        title=f"{log} log, median of seeds (fewest to most)",
    )
    for side, of_side in found["sides"].items():
        pairs = zip(of_side["seconds"], of_side["ratio"], strict=True)
        cells = [_written(spread) for pair in pairs for spread in pair]
        view.add_row(side, f"{of_side['samples_per_s']:,.0f}", f"{of_side['lowest']:.5f}", *cells)
    return view


def _written(spread: Sequence[float] | None) -> str:
    return "not all reach it" if spread is None else "{:.2f} ({:.2f}–{:.2f})".format(*spread)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.time_to_quality", description="Measure seconds of training until a test logloss."
    )
    parser.add_argument("--samples", type=int, default=4_000_000, help="of the planted log, for training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real_log", type=Path, help="a raw Criteo log, as of the Kaggle challenge")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--render", action="store_true", help="print the tables of the file, measure nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
