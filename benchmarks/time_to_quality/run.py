"""Train a side on a log in a file, and print the curve as a line of JSON.

python -m benchmarks.time_to_quality.run SIDE LOG SEED RATE_OF_LAYERS RATE_OF_TABLES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hotbed  # noqa: F401  (before torch, so that OpenMP's threads of all sides spin only shortly)
from benchmarks.time_to_quality.logs import load
from benchmarks.time_to_quality.parameter_server import running
from benchmarks.time_to_quality.sides import Hotbed, HotbedBf16, Plain, Rates, TorchRec, curve

ONE_PROCESS = {"hotbed": Hotbed, "hotbed, bf16": HotbedBf16, "plain PyTorch": Plain, "TorchRec": TorchRec}


def main(name: str, path: Path, seed: int, rates: Rates) -> None:
    log = load(path)
    if name in ONE_PROCESS:
        ONE_PROCESS[name](log, rates, seed).train(0, 2)  # compiles or loads kernels
        points = curve(ONE_PROCESS[name](log, rates, seed), log)
    else:
        with running(path, rates, seed, trainers=2 if name.endswith("trainers") else 1) as side:
            points = curve(side, log)
    print(json.dumps(points))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Rates(*map(float, sys.argv[4:])))
