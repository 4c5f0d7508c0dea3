"""Search settings of a recipe on its valid split: ``hotbed tune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from hotbed.commands.arguments import add_json, add_recipe, console, recipe_of, write_json
from hotbed.config import HIGHER_IS_BETTER
from hotbed.errors import RecipeError
from hotbed.locations import local

if TYPE_CHECKING:
    from rich.console import Console

    from hotbed.train.tune import Tuned


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe's options, and those of the search."""
    parser.usage = "hotbed tune RECIPE.yaml [--trials N] [--key value …]"
    add_recipe(parser)
    parser.add_argument("--trials", type=int, default=20, help="Trials in the end, with those of an earlier call.")
    parser.add_argument("--search_seed", type=int, default=0, help="Seed of the draws; trials train with train.seed.")
    parser.add_argument(
        "--out",
        type=str,
        default="runs",
        help="The search is in OUT/NAME/tune, with best.yaml; the same command goes on with it.",
    )
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Search, print the trials, and say where the best recipe is."""
    from hotbed.train.process_group import process_group, started
    from hotbed.train.tune import tune

    values: dict[str, Any] = parsed.as_dict()
    out, trials, seed, json = (values.pop(name) for name in ("out", "trials", "search_seed", "json"))
    recipe = recipe_of(values)
    if (size := started().size) > 1:
        raise RecipeError(f"hotbed tune trains in one process, but torchrun has started {size}; start one")
    if not 0 <= seed < 2**32:
        raise RecipeError(f"--search_seed is {seed:,}, must be at least 0 and below 2**32")
    directory = local("--out", out) / recipe.name / "tune"
    with process_group(recipe.parallel, recipe.train.device):
        tuned = tune(recipe, directory, console(stderr=True), trials=trials, seed=seed)
    _print(console(), tuned)
    write_json(json, tuned.to_dict())


def _print(to: Console, tuned: Tuned) -> None:
    from rich.table import Table

    from hotbed.train.tune import BEST

    keys = list(tuned.trials[0]["values"])
    table = Table()
    for column in ("trial", tuned.monitor, *keys):
        table.add_column(column, justify="right", overflow="fold")
    complete = [trial for trial in tuned.trials if trial["value"] is not None]
    for trial in sorted(complete, key=lambda trial: trial["value"], reverse=tuned.monitor in HIGHER_IS_BETTER):
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (trial["values"][key] for key in keys)]
        table.add_row(str(trial["number"]), f"{trial['value']:.5f}", *shown)
    to.print(table)
    pruned = len(tuned.trials) - len(complete)
    to.print(f"{len(tuned.trials):,} trials, of which {pruned:,} were ended early; trial 0 is the recipe as it is")
    to.print(f"best recipe: {tuned.directory / BEST}", soft_wrap=True)
