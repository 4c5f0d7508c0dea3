"""Measure the seconds of training until the test logloss reaches a target.

    benchmarks/peers/.venv/bin/python -m benchmarks.time_to_quality [--real_log LOG] --json FILE
    python -m benchmarks.time_to_quality --json FILE --render

Sides take turns, seed by seed, each in processes of its own: hotbed, plain PyTorch, TorchRec (if it is installed;
``make bench-peers`` makes an environment with it), and an asynchronous parameter server with one trainer and with two.
Each side has the rate of the tables from `RATES` with the lowest logloss after a quarter of the log, for a seed that is
not measured. So rates are chosen for quality, not for speed. Tests are not timed.

*Targets* are the lowest logloss that every run reaches, and the lowest that every run without a parameter server
reaches. The file is written after each run, and its runs are not repeated.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.time_to_quality.logs import Log, planted, real, save
from benchmarks.time_to_quality.sides import Point
from hotbed.errors import HotbedError
from hotbed.files import write_json

RATES = {"planted": (0.004, (0.01, 0.02, 0.05)), "real": (0.002, (0.04, 0.08, 0.16))}
"""The rate of the layers, and the rates of the tables to choose from."""
PILOT = 1_000  # the seed that chooses rates
SERVED = {"parameter server, 1 trainer": 1, "parameter server, 2 trainers": 2}
SIDES = ("hotbed", "hotbed, bf16", "plain PyTorch", "TorchRec", *SERVED)
Curve = Sequence[Point]
Curves = Mapping[str, Sequence[Curve]]


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--samples", type=int, default=4_000_000, help="Training samples of the planted log.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real_log", type=Path, help="A raw Criteo log, e.g. that of the Kaggle challenge.")
    parser.add_argument("--render", action="store_true", help="Print the tables of the file, and measure nothing.")
    args = parser.parse_args()
    data = runner.read_json(args.json)
    if not args.render:
        for line in measure(args, data):
            print(line, flush=True)
            if args.json:
                write_json(args.json, data)
    for name, found in data.get("logs", {}).items():
        data.setdefault("summary", {}).setdefault(name, summary(_curves(found)))
        show(name, data["summary"][name])
    if args.json:
        write_json(args.json, data)


def measure(args: Any, data: dict[str, Any]) -> Iterator[str]:
    """Fill ``data["logs"][log][side]`` with the rate and a curve per seed, and yield a line after each run."""
    settings = {"samples": args.samples, "seeds": args.seeds}
    if data.setdefault("settings", settings) != settings:
        raise HotbedError(f"{args.json} has other settings: got {data['settings']}, expected {settings}. Remove it.")
    data["measured on"] = runner.measured_on()
    data.pop("summary", None)
    sides = [side for side in SIDES if side != "TorchRec" or importlib.util.find_spec("torchrec")]
    for name in ("planted", *(["real"] if args.real_log else [])):
        found = data.setdefault("logs", {}).setdefault(name, {})
        layers, rates = RATES[name]
        of_all_seeds = real(args.real_log) if name == "real" else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.pt"
            for seed in (PILOT, *range(args.seeds)):
                log: Log = of_all_seeds or planted(args.samples, args.samples // 8, seed)
                save(replace(log, train=log.train[: len(log.train) // 4]) if seed == PILOT else log, path)
                for side in sides:
                    of_side = found.setdefault(side, {"pilot": {}, "curves": {}})
                    if seed == PILOT:
                        for rate in rates:
                            if f"{rate:g}" not in of_side["pilot"]:
                                curve = _run(side, path, seed, layers, rate)
                                of_side["pilot"][f"{rate:g}"] = curve[-1].logloss
                                yield f"{name}, pilot, {side}, rate {rate:g}: {curve[-1]}"
                    elif str(seed) not in of_side["curves"]:
                        rate = float(min(of_side["pilot"], key=of_side["pilot"].get))
                        curve = of_side["curves"][str(seed)] = _run(side, path, seed, layers, rate)
                        yield f"{name}, seed {seed}, {side}, rate {rate:g}: {curve[-1]}"


def _run(side: str, log: Path, seed: int, layers: float, tables: float) -> list[Point]:
    found = runner.last_json("-m", "benchmarks.time_to_quality.run", side, log, seed, layers, tables)
    return [Point(*point) for point in found]


def _curves(found: Mapping[str, Any]) -> dict[str, list[list[Point]]]:
    curves = {side: of_side["curves"].values() for side, of_side in found.items()}
    return {side: [[Point(*point) for point in curve] for curve in of] for side, of in curves.items() if of}


def seconds_to(curve: Curve, target: float) -> float | None:
    """Return the seconds until a curve reaches a target, on straight lines between its points, or None."""
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
    """Return the lowest logloss that each run reaches."""
    return max(min(point.logloss for point in curve) for of_side in curves.values() for curve in of_side)


def summary(curves: Curves) -> dict[str, Any]:
    """Return targets, and by side medians over seeds and the seconds to each target, or None if a run misses it."""
    of_most = {side: of_side for side, of_side in curves.items() if side not in SERVED}
    targets = list(dict.fromkeys(reached_by_all(of) for of in (curves, of_most)))
    own = [[seconds_to(curve, target) for curve in curves["hotbed"]] for target in targets]
    sides: dict[str, Any] = {}
    for side, of_side in curves.items():
        times = [[seconds_to(curve, target) for curve in of_side] for target in targets]
        ratios = [[t and o and t / o for t, o in zip(*both, strict=True)] for both in zip(times, own, strict=True)]
        sides[side] = {
            "samples_per_s": statistics.median(curve[-1].samples / curve[-1].seconds for curve in of_side),
            "lowest": statistics.median(min(point.logloss for point in curve) for curve in of_side),
            "seconds": [_spread(seconds) for seconds in times],
            "ratio": [_spread(ratio) for ratio in ratios],
        }
    return {"targets": targets, "sides": sides}


def _spread(values: Sequence[float | None]) -> list[float] | None:
    given = [value for value in values if value is not None]
    return [statistics.median(given), min(given), max(given)] if len(given) == len(values) else None


def show(log: str, found: Mapping[str, Any]) -> None:
    rows: list[dict[str, object]] = []
    for side, of_side in found["sides"].items():
        row: dict[str, object] = {"side": side, "samples/s": of_side["samples_per_s"]}
        row["lowest logloss"] = f"{of_side['lowest']:.5f}"
        for target, *both in zip(found["targets"], of_side["seconds"], of_side["ratio"], strict=True):
            for title, spread in zip((f"s to {target:.5f}", f"÷ hotbed ({target:.5f})"), both, strict=True):
                row[title] = "not all reach it" if spread is None else runner.spread(spread)
        rows.append(row)
    runner.show(f"{log} log, median of seeds (fewest to most)", rows)


if __name__ == "__main__":
    main()
