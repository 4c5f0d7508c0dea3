"""Measure what narrow rows and bf16 compute cost in AUC, with intervals, on planted logs and on real ones.

    python -m benchmarks.quality --real_log LOG --json benchmarks/results/quality_cpu.json  # from the repository's root

For each seed, all configurations (row dtype × compute dtype) are trained on the same batches from the same initial
values and scored on the same test samples, so that what they share cancels in the differences; `quality_results` says
how the intervals are made. The file is written after each seed, and runs that are in it are not repeated: the same
command goes on where it was interrupted, and more ``--seeds`` or other ``--configs`` add to it.

    python -m benchmarks.quality --json benchmarks/results/quality_cpu.json --render     # the tables in docs/quality.md
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

# Read when torch and Numba are imported: one thread per model, see `quality_training`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

from rich.console import Console
from rich.progress import Progress

from benchmarks.quality_results import (
    BASELINE,
    CONFIGS,
    LOGS,
    Config,
    Log,
    Results,
    draw,
    measured_on,
    print_results,
    render,
)
from benchmarks.quality_training import (
    ROWS,
    PlantedLog,
    PlantedSettings,
    RealSettings,
    Trained,
    train_planted,
    train_real,
)
from hotbed.commands.demo import TEST_FRACTION, THRESHOLD
from hotbed.data import SplitBinarySource
from hotbed.data.prepare import prepare

ROOT = Path(__file__).parent.parent
NOT_PLANTED = ("fp16/bf16", "fp8/bf16", "fp8+hot/bf16", "int8/bf16", "int8+hot/bf16")
"""Configurations that the planted log leaves out unless they are named, because a run takes minutes as it is."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing; then print, draw and render everything that there is."""
    args = _arguments(argv)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # of a log file; the tables are wide
    results = Results(args.json)
    if not args.render and args.only != "real":
        run_planted(console, results, args)
    if not args.render and args.only != "planted":
        run_real(console, results, args)
    print_results(console, results)
    if args.json is not None:
        chart = args.json.with_suffix(".png")
        console.print(f"chart: {chart}" if draw(results, chart) else "no chart: matplotlib is not installed")
    if args.render:
        render(results, args.page)
        console.print(f"tables: {args.page}")


def run_planted(console: Console, results: Results, args: argparse.Namespace) -> None:
    """Train what is missing on the planted log."""
    settings = PlantedSettings(samples=args.samples, test_samples=args.test_samples, rows=tuple(args.rows))
    log = PlantedLog(settings.rows)
    best = log.attainable(settings.test_samples)
    facts = {"attainable AUC": best.auc, "attainable logloss": best.logloss}
    results.begin("planted", asdict(settings), facts)
    configs = args.configs or [config for name, config in CONFIGS.items() if name not in NOT_PLANTED]

    def train(missing: Sequence[Config], seed: int, advance: Callable[[int], None]) -> list[Trained]:
        return train_planted(missing, log, settings, seed, workers=args.workers, advance=advance)

    _run(console, results, "planted", configs, range(args.seeds or 3), settings.samples, train)


def run_real(console: Console, results: Results, args: argparse.Namespace) -> None:
    """Train what is missing on the real log; its prepared form is deleted afterwards."""
    if args.real_log is None:
        console.print("real log skipped: its licence forbids shipping it; give yours as --real_log FILE")
        return
    if not args.real_log.exists():
        raise SystemExit(f"--real_log {args.real_log} does not exist")
    settings = RealSettings()
    with tempfile.TemporaryDirectory(prefix="hotbed-quality-") as directory:
        data = Path(directory) / "prepared"
        prepare(args.real_log, data, threshold=THRESHOLD, test_fraction=TEST_FRACTION)
        source = SplitBinarySource(data)
        samples = source.samples("train")
        facts = {"samples": samples, "test samples": source.samples("test")}
        results.begin("real", asdict(settings), facts)

        def train(missing: Sequence[Config], seed: int, advance: Callable[[int], None]) -> list[Trained]:
            return train_real(missing, data, settings, seed, workers=args.workers, advance=advance)

        _run(console, results, "real", args.configs or list(CONFIGS.values()), range(args.seeds or 5), samples, train)


def _run(
    console: Console,
    results: Results,
    log: Log,
    configs: Sequence[Config],
    seeds: range,
    samples: int,
    train: Callable[[Sequence[Config], int, Callable[[int], None]], list[Trained]],
) -> None:
    """Train what each seed lacks, and add it to the results."""
    for seed in seeds:
        missing = results.missing(log, seed, configs)
        if not missing:
            continue
        total = samples * len(missing)
        start = time.perf_counter()
        with _progress(console, f"{log} log, seed {seed}", total) as advance:
            trained = train(missing, seed, advance)
        seconds = time.perf_counter() - start
        for config, (scores, row_bytes) in zip(missing, trained, strict=True):
            results.add(log, seed, config, scores, row_bytes=row_bytes, measured_on=measured_on())
        console.print(
            f"{log} log, seed {seed}: {len(missing)} models of {samples:,} samples in {seconds:.0f} s, "
            f"{total / seconds:,.0f} samples/s in all"
        )


@contextmanager
def _progress(console: Console, what: str, total: int) -> Generator[Callable[[int], None]]:
    """A bar on a terminal, elsewhere a line for each tenth; gives what to call with the samples that are done."""
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            yield partial(bar.advance, bar.add_task(what, total=total))
        return
    done = 0

    def advance(samples: int) -> None:
        nonlocal done
        tenths, done = 10 * done // total, done + samples
        if 10 * done // total > tenths:
            console.print(f"{what}: {100 * done // total} %")

    yield advance


def _config(name: str) -> Config:
    if name not in CONFIGS:
        raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(CONFIGS)}")
    return CONFIGS[name]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = PlantedSettings()
    parser.add_argument("--samples", type=int, default=defaults.samples, help="to train on, planted log")
    parser.add_argument("--test_samples", type=int, default=defaults.test_samples, help="to test on, planted log")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of each table of the planted log")
    parser.add_argument("--seeds", type=int, help="seeds 0 to N − 1; default: 3 planted, 5 real")
    parser.add_argument("--only", choices=LOGS, help="leave out the other log")
    parser.add_argument(
        "--configs",
        type=_config,
        nargs="+",
        metavar="ROWS/COMPUTE",
        help=f"besides {BASELINE.name}: {', '.join(CONFIGS)}",
    )
    parser.add_argument("--real_log", type=Path, help="raw Criteo log; left out without it")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="models trained at once")
    parser.add_argument("--json", type=Path, help="file to add results to")
    parser.add_argument("--render", action="store_true", help="train nothing; put the file's tables into the page")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "quality.md")
    args = parser.parse_args(argv)
    if args.render and args.json is None:
        parser.error("--render needs --json, the results to render")
    if args.configs and BASELINE not in args.configs:
        args.configs.insert(0, BASELINE)
    return args


if __name__ == "__main__":
    main()
