"""Measure the demo's rate on idle cores and beside other processes, by how OpenMP's threads wait.

    python -m benchmarks.busy [--threads 1 2 4] [--seconds 8] [--samples 100000 | --log criteo.tsv.gz] [--json FILE]

Every rate is of a process of its own, whose environment says how threads wait at barriers: as the runtime does by
itself (`SPINS`), as `import hotbed` sets it, or as it is where a program imports torch first. On busy cores as many
processes as there are cores do nothing but count. Takes 3 to 4 minutes; the machine must have nothing else to do. Says
for every number of threads whether, as hotbed sets them, it reached the rate of one thread; it should, up to the number
of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SPINS = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""What runtimes do where nothing is set: libgomp (about 3 ms) and libomp."""
WARM_UP = 5
"""Steps that are not counted."""


class Case(NamedTuple):
    """Who sets how threads wait, how many compute, and whether the cores are busy."""

    waits: str
    threads: int
    busy: bool


def cases(threads: Sequence[int]) -> list[Case]:
    """One thread, and each number of several: one thread waits for nobody at barriers."""
    waits = ("runtime", "hotbed", "torch_first")
    several = [Case(how, n, busy) for n in sorted({*threads} - {1}) for how in waits for busy in (False, True)]
    return [Case("hotbed", 1, busy) for busy in (False, True)] + several


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(case: Case, recipe: Path, seconds: float, cores: int) -> float:
    """Samples per second of a process that trains under these conditions."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    env |= {"OMP_NUM_THREADS": str(case.threads)} | (SPINS if case.waits == "runtime" else {})
    first = "torch" if case.waits == "torch_first" else "hotbed"
    code = f"import {first}; from benchmarks.busy import train; train({str(recipe)!r}, {seconds})"
    with load(cores if case.busy else 0):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout)


def train(file: str, seconds: float) -> None:
    """Train for so long, and print samples per second."""
    import hotbed as hb
    from hotbed.files import read_yaml
    from hotbed.train.runs.build import build, open_source

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


def make_recipe(folder: Path, samples: int, log: Path | None = None) -> Path:
    """The demo's recipe, on a log that is made here or given; it never ends by itself."""
    import yaml

    from hotbed.cli.demo import demo_recipe
    from hotbed.data import write_synthetic_log
    from hotbed.data.preparation.prepare_dataset import prepare

    if log is None:
        write_synthetic_log(log := folder / "log.tsv", samples, seed=0)
    made = prepare(log, folder / "data")
    values = demo_recipe(folder / "data", made.samples["train"]).to_dict()
    values["train"] |= {"epochs": 1_000_000, "device": "cpu"}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(values))), encoding="utf-8")
    return file


def report(found: Mapping[Case, float]) -> Any:
    """A row per way to wait: samples per second on idle and on busy cores."""
    from rich.table import Table

    table = Table(title="samples/s of the demo", title_justify="left")
    for name in ("spinning is set by", "threads", "idle cores", "busy cores", "busy ÷ one thread"):
        table.add_column(name, justify="right" if "cores" in name else "left")
    for case, rate in found.items():
        if not case.busy:
            busy = found[case._replace(busy=True)]
            gain = busy / found[Case("hotbed", 1, True)]
            table.add_row(case.waits, str(case.threads), f"{rate:,.0f}", f"{busy:,.0f}", f"{gain:.2f}")
    return table


def below_one_thread(found: Mapping[Case, float], cores: int) -> list[Case]:
    """Cases with the short spin and no more threads than cores that were slower than one thread was."""
    own = [case for case in found if case.waits == "hotbed" and 1 < case.threads <= cores]
    return [case for case in own if found[case] < found[case._replace(threads=1)]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--threads", type=int, nargs="+", help="how many compute; default: 1, and one per core")
    parser.add_argument("--samples", type=int, default=100_000, help="lines of the log")
    parser.add_argument("--log", type=Path, help="a raw Criteo log in its place")
    parser.add_argument("--json", type=Path, help="write results here")
    args = parser.parse_args(argv)
    import torch
    from rich.console import Console
    from rich.progress import track

    from hotbed.machine import usable_cores
    from hotbed.train.runs.report import environment

    cores, before = usable_cores(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder), args.samples, args.log)
        turns = track(cases(args.threads or [cores]), "measuring", console=Console(stderr=True), transient=True)
        found = {case: measure(case, recipe, args.seconds, cores) for case in turns}
    Console().print(report(found))
    for case in below_one_thread(found, cores):
        print(f"slower than one thread: {case.threads} threads on {'busy' if case.busy else 'idle'} cores")
    if args.json:
        about = {**environment(torch.device("cpu")), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        about |= {"cores": cores, "load_before": before, "seconds": args.seconds}
        results = [{**case._asdict(), "samples_per_s": rate} for case, rate in found.items()]
        args.json.write_text(json.dumps({"results": results, "measured": about}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
