"""Go from a raw log to a tested model, in one directory: ``hotbed demo``."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hotbed.checks import Size
from hotbed.commands.arguments import Parser, add_json, console, write_json
from hotbed.config import Recipe
from hotbed.errors import CommError, DataError, RecipeError
from hotbed.locations import local

if TYPE_CHECKING:
    from rich.console import Console

    from hotbed.data.synthetic import Attainable

TEST_FRACTION = 0.1
THRESHOLD = 2


def add_arguments(parser: Parser) -> None:
    """Add the log, and the options of the demo and of the promise."""
    parser.usage = "hotbed demo [DATA] [options]"
    parser.add_argument("data", nargs="?", help="Raw Criteo log (.tsv, .tsv.gz); none makes one.")
    parser.add_argument("--samples", type=int, default=200_000, help="Lines of the log that is made.")
    parser.add_argument("--seed", type=Size, default=0, help="Seed of that log and of the training.")
    parser.add_argument("--promise", action="store_true", help="One model under every plan, and what came out.")
    parser.add_argument("--ranks", type=int, default=3, help="Processes of the promise.")
    parser.add_argument("--steps", type=int, default=100, help="Steps of the promise.")
    parser.add_argument(
        "--out",
        default="runs",
        help="Everything goes into a new directory OUT/demo/TIME, or OUT/promise/TIME.",
    )
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Run the demo, or the promise, and print what came out."""
    data, root = None if parsed.data is None else local("DATA", parsed.data), local("--out", parsed.out)
    if parsed.promise:
        from hotbed.commands.promise import print_promise, run_promise

        options = {"ranks": parsed.ranks, "steps": parsed.steps, "seed": parsed.seed}
        result = run_promise(data, root, console(stderr=True), **options)
        print_promise(console(), result)
        write_json(parsed.json, result)
        if not result["equal"]:
            raise CommError("a plan changed the model; please report this with the run's directory")
        return
    from hotbed.train.report import print_summary

    summary = run_demo(data, root, console(stderr=True), samples=parsed.samples, seed=parsed.seed)
    print_summary(console(), summary)
    write_json(parsed.json, summary)


def demo_recipe(path: str | Path, samples: int, seed: int = 0) -> Recipe:
    """Make the demo's recipe (``demo.yaml`` beside this file) for a prepared dataset of so many training samples.

    The learning rate falls to 0 over the epoch, whatever its length.
    """
    text = files("hotbed.commands").joinpath("demo.yaml").read_text(encoding="utf-8")
    recipe = Recipe.from_dict(yaml.safe_load(text))
    warmup, steps = recipe.schedule.warmup_steps, -(-samples // recipe.train.batch_size)
    schedule = replace(recipe.schedule, decay_start=warmup, decay_end=max(steps, warmup) + 1)
    return replace(
        recipe,
        data=replace(recipe.data, path=str(path)),
        schedule=schedule,
        train=replace(recipe.train, seed=seed),
    )


def run_demo(data: Path | None, root: Path, console: Console, *, samples: int, seed: int) -> dict[str, Any]:
    """Prepare a raw log, train on it and test on its last 10 %."""
    from hotbed.data import write_synthetic_log
    from hotbed.data.prepare import prepare
    from hotbed.data.synthetic import FEWEST_SAMPLES
    from hotbed.train.report import RunDirectory, StageProgress, size
    from hotbed.train.run import train

    if data is not None and not (data.is_file() or data.is_dir()):
        what = "is neither a file nor a directory" if data.exists() else "does not exist"
        raise DataError(f"{data} {what}; give a raw Criteo log (.tsv or .tsv.gz), or none to have one made")
    if data is None and samples < FEWEST_SAMPLES:
        raise RecipeError(f"--samples: got {samples:,}, expected at least {FEWEST_SAMPLES:,}")
    run = RunDirectory(root, "demo")
    log = data or run.path / "log.tsv"
    best: dict[str, float] | None = None
    if data is None:
        planted = write_synthetic_log(log, samples, seed=seed, test_fraction=TEST_FRACTION)
        best = best_attainable(planted.test)
        console.print(f"wrote {samples:,} lines from a planted click model: {log} ({size(log.stat().st_size)})")
    with StageProgress(console) as progress:
        made = prepare(log, run.path / "data", threshold=THRESHOLD, test_fraction=TEST_FRACTION, progress=progress)
    console.print(
        f"prepared {sum(made.samples.values()):,} samples in {made.seconds:.1f} s: {sum(made.rows.values()):,} rows in "
        f"{len(made.rows)} tables"
    )
    recipe = demo_recipe(run.path / "data", made.samples["train"], seed)
    extra = {} if best is None else {"best_attainable": best}
    return train(recipe, run, console, extra={"data": str(log), **extra})


def best_attainable(test: Attainable) -> dict[str, float]:
    """Metrics of the true click probabilities, named as in `Metrics`."""
    rate = test.positive_rate
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else math.nan
    return {"auc": test.auc, "logloss": test.logloss, "normalized_entropy": test.logloss / entropy}
