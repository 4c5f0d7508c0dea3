"""Prepare a raw log, and train and test a small model, all in one directory: ``hotbed demo``."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hotbed.checks import Size
from hotbed.cli.arguments import Parser, add_json, console, save_json
from hotbed.config import Recipe
from hotbed.errors import CommError, DataError, RecipeError
from hotbed.locations import local

if TYPE_CHECKING:
    from hotbed.data.formats.synthetic import Attainable
    from hotbed.train.runs.report import RunDirectory


def add_arguments(parser: Parser) -> None:
    """Add the log, the options of the demo, and the options of ``--promise`` (see `hotbed.cli.promise`)."""
    parser.usage = "hotbed demo [DATA] [options]"
    parser.add_argument("data", nargs="?", help="Raw Criteo log, .tsv or .tsv.gz (default: a synthetic log).")
    parser.add_argument("--samples", type=int, default=200_000, help="Number of lines of a synthetic log.")
    parser.add_argument("--seed", type=Size, default=0, help="Seed of the synthetic log and of training.")
    parser.add_argument("--promise", action="store_true", help="Train one model under every plan, and compare bits.")
    parser.add_argument("--ranks", type=int, default=3, help="Number of processes of --promise.")
    parser.add_argument("--steps", type=int, default=100, help="Number of steps of --promise.")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 3, 4, 8], help="Other numbers of processes of --promise."
    )
    parser.add_argument("--out", default="runs", help="Parent directory. The results are in OUT/demo/TIME.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Train the demo's model once, or with ``--promise`` under every kind of plan, and print the results."""
    from hotbed.train.runs.report import print_summary
    from hotbed.train.runs.run import train

    data, root, to = None if parsed.data is None else local("DATA", parsed.data), local("--out", parsed.out), console()
    if not parsed.promise:
        recipe, folder, facts = _prepare(data, root, "demo", parsed.samples, parsed.seed, test_fraction=0.1)
        summary = train(recipe, folder, console(stderr=True), extra=facts)
        print_summary(to, summary)
        save_json(parsed.json, summary)
        return
    from hotbed.cli.promise import print_promise, run_promise

    ranks, steps, processes = parsed.ranks, parsed.steps, parsed.processes
    if ranks < 1 or steps < 4 or min(processes) < 1:
        raise RecipeError(
            f"--ranks, --processes and --steps: got {ranks}, {min(processes)} and {steps}, expected at least 1, 1 and 4"
        )
    recipe, folder, _ = _prepare(data, root, "promise", 256 * steps + 4096, parsed.seed, test_fraction=0.01)
    result = run_promise(recipe, folder, console(stderr=True), ranks=ranks, steps=steps, processes=processes)
    print_promise(to, result)
    save_json(parsed.json, result)
    if not result["equal"]:
        raise CommError("the plans trained different models. Please report this bug with the run's directory")


def demo_recipe(path: str | Path, samples: int, seed: int = 0) -> Recipe:
    """Return the recipe in ``demo.yaml`` for a prepared dataset. The learning rate falls to 0 over the epoch."""
    text = files("hotbed.cli").joinpath("demo.yaml").read_text(encoding="utf-8")
    recipe = Recipe.from_dict(yaml.safe_load(text))
    warmup, steps = recipe.schedule.warmup_steps, -(-samples // recipe.train.batch_size)
    schedule = replace(recipe.schedule, decay_start=warmup, decay_end=max(steps, warmup) + 1)
    data, train = replace(recipe.data, path=str(path)), replace(recipe.train, seed=seed)
    return replace(recipe, data=data, schedule=schedule, train=train)


def _prepare(
    data: Path | None, root: Path, name: str, samples: int, seed: int, *, test_fraction: float
) -> tuple[Recipe, RunDirectory, dict[str, Any]]:
    """Create a run directory with a prepared log. Return a recipe, the directory, and facts for the summary."""
    from hotbed.data import write_synthetic_log
    from hotbed.data.formats.synthetic import FEWEST_SAMPLES
    from hotbed.data.preparation.prepare_dataset import prepare
    from hotbed.train.runs.report import RunDirectory, StageProgress, size

    to = console(stderr=True)
    if data is not None and not (data.is_file() or data.is_dir()):
        problem = "is neither a file nor a directory" if data.exists() else "does not exist"
        raise DataError(
            f"{data} {problem}. Pass a raw Criteo log (.tsv or .tsv.gz), or leave DATA out for a synthetic log"
        )
    if data is None and samples < FEWEST_SAMPLES:
        raise RecipeError(f"--samples: got {samples:,}, expected at least {FEWEST_SAMPLES:,}")
    folder = RunDirectory(root, name)
    log = data or folder.path / "log.tsv"
    facts: dict[str, Any] = {"data": str(log)}
    if data is None:
        planted = write_synthetic_log(log, samples, seed=seed, test_fraction=test_fraction)
        facts["best_attainable"] = best_attainable(planted.test)
        to.print(f"wrote {samples:,} lines of a synthetic click log: {log} ({size(log.stat().st_size)})")
    with StageProgress(to) as progress:
        made = prepare(log, folder.path / "data", threshold=2, test_fraction=test_fraction, progress=progress)
    rows = f"{sum(made.rows.values()):,} rows in {len(made.rows)} tables"
    to.print(f"prepared {sum(made.samples.values()):,} samples in {made.seconds:.1f} s: {rows}")
    return demo_recipe(folder.path / "data", made.samples["train"], seed), folder, facts


def best_attainable(test: Attainable) -> dict[str, float]:
    """Return the metrics that a model with the true click probabilities would reach; keys are fields of `Metrics`."""
    rate = test.positive_rate
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else math.nan
    return {"auc": test.auc, "logloss": test.logloss, "normalized_entropy": test.logloss / entropy}
