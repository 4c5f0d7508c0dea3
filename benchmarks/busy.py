"""Measure the demo's rate on idle and on busy cores, by how OpenMP's threads wait.

    python -m benchmarks.busy [--threads 1 2 4] [--seconds 8] [--samples 100000 | --log criteo.tsv.gz] [--json FILE]

Each rate is of a new process. Its environment sets how threads wait at barriers: like the runtime's default (`SPINS`),
like `import hotbed`, or like a program that imports torch first. On busy cores, each core also has a process that only
counts. The benchmark takes 3 to 4 minutes on an otherwise idle machine. It prints the cases that hotbed sets
up and that are slower than one thread. Up to the number of cores, there should be none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import hotbed as hb
from benchmarks import runner
from hotbed.cli.demo import demo_recipe
from hotbed.data import write_synthetic_log
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.files import read_yaml, write_json
from hotbed.machine import usable_cores
from hotbed.train.runs.build import build, open_source

SPINS = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}  # defaults of libgomp (about 3 ms) and libomp
WARM_UP = 5


class Case(NamedTuple):
    """What sets how threads wait, the number of threads, and whether the cores are busy."""

    waits: str
    threads: int
    busy: bool


def cases(threads: Sequence[int]) -> list[Case]:
    """Return the cases of one thread, which waits at no barrier, and of each number of several."""
    waits = ("runtime", "hotbed", "torch_first")
    several = [Case(how, n, busy) for n in sorted({*threads} - {1}) for how in waits for busy in (False, True)]
    return [Case("hotbed", 1, busy) for busy in (False, True)] + several


@contextmanager
def load(processes: int) -> Generator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(case: Case, recipe: Path, seconds: float) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    env |= {"OMP_NUM_THREADS": str(case.threads)} | (SPINS if case.waits == "runtime" else {})
    first = "torch" if case.waits == "torch_first" else "hotbed"
    code = f"import {first}; from benchmarks.busy import train; train({str(recipe)!r}, {seconds})"
    with load(usable_cores() if case.busy else 0):
        return float(runner.python("-c", code, env=env))


def train(file: str, seconds: float) -> None:
    class Clock(hb.Callback):
        def on_step(self, trainer: hb.Trainer, loss: float) -> None:
            now = time.perf_counter()
            if trainer.step == WARM_UP:
                self.start, self.samples = now, trainer.samples
            elif trainer.step > WARM_UP and now - self.start > seconds:
                self.rate = (trainer.samples - self.samples) / (now - self.start)
                trainer.stop = True

    recipe, clock = hb.Recipe.from_dict(read_yaml(Path(file))), Clock()
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    trainer.callbacks.append(clock)
    trainer.fit(hb.Loader(source, "train", recipe.train.batch_size))
    print(clock.rate)


def make_recipe(folder: Path, samples: int, log: Path | None) -> Path:
    """Write the demo's recipe for a synthetic or a given log. Its training does not end by itself."""
    if log is None:
        write_synthetic_log(log := folder / "log.tsv", samples, seed=0)
    made = prepare(log, folder / "data")
    values = demo_recipe(folder / "data", made.samples["train"]).to_dict()
    values["train"] |= {"epochs": 1_000_000, "device": "cpu"}
    return runner.write_recipe(folder / "recipe.yaml", values)


def report(found: Mapping[Case, float]) -> None:
    one = found[Case("hotbed", 1, True)]
    rows = [
        {
            "spinning is set by": case.waits,
            "threads": case.threads,
            "idle cores": rate,
            "busy cores": found[case._replace(busy=True)],
            "busy ÷ one thread": found[case._replace(busy=True)] / one,
        }
        for case, rate in found.items()
        if not case.busy
    ]
    runner.show("samples/s of the demo", rows)
    for case in found:
        own = case.waits == "hotbed" and 1 < case.threads <= usable_cores()
        if own and found[case] < found[case._replace(threads=1)]:
            print(f"slower than one thread: {case.threads} threads on {'busy' if case.busy else 'idle'} cores")


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="Seconds of each measurement.")
    parser.add_argument("--threads", type=int, nargs="+", help="Numbers of threads (default: 1 and one per core).")
    parser.add_argument("--samples", type=int, default=100_000, help="Lines of the synthetic log.")
    parser.add_argument("--log", type=Path, help="A raw Criteo log to use instead.")
    args = parser.parse_args()
    about = runner.about(cores=usable_cores(), seconds=args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder), args.samples, args.log)
        turns = runner.progress(cases(args.threads or [usable_cores()]), "busy")
        found = {case: measure(case, recipe, args.seconds) for case in turns}
    report(found)
    if args.json:
        results = [{**case._asdict(), "samples_per_s": rate} for case, rate in found.items()]
        write_json(args.json, {"results": results, "measured": about})


if __name__ == "__main__":
    main()
