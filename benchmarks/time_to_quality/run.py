"""Train a side on a log that is in a file, and print the curve as a JSON line.

python -m benchmarks.time_to_quality.run SIDE LOG SEED RATE_OF_LAYERS RATE_OF_TABLES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hotbed  # noqa: F401  (before torch, so that OpenMP's threads spin shortly, for all sides)
from benchmarks.time_to_quality.logs import load
from benchmarks.time_to_quality.parameter_server import running
from benchmarks.time_to_quality.sides import Hotbed, HotbedBf16, Plain, Rates, TorchRec, curve

ONE_PROCESS = {"hotbed": Hotbed, "hotbed, bf16": HotbedBf16, "plain PyTorch": Plain, "TorchRec": TorchRec}
SERVED = {"parameter server, 1 trainer": 1, "parameter server, 2 trainers": 2}
SIDES = (*ONE_PROCESS, *SERVED)


def main(argv: list[str]) -> None:
    """Run it."""
    name, path, seed, rates = argv[0], Path(argv[1]), int(argv[2]), Rates(*map(float, argv[3:]))
    log = load(path)
    if name in SERVED:
        with running(path, rates, seed, SERVED[name]) as side:
            points = curve(side, log)
    else:
        # The first step compiles kernels, or loads them: a model of its own takes it.
        ONE_PROCESS[name](log, rates, seed).train(0, 2)
        points = curve(ONE_PROCESS[name](log, rates, seed), log)
    print(json.dumps(points))


if __name__ == "__main__":
    main(sys.argv[1:])
