"""Train a model every day: evaluate on the day, then train on it: ``hotbed daily``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from hotbed.cli.arguments import Parser, add_json, add_recipe, console, recipe_of, write_json
from hotbed.errors import RecipeError
from hotbed.locations import local

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: Parser) -> None:
    """Add the recipe's options, and those of the days."""
    parser.usage = "hotbed daily RECIPE.yaml --data 'logs/day={date}' --from 2026-01-31 [--key value …]"
    add_recipe(parser)
    parser.add_argument("--from", help="First day of all; later commands may leave it out.")
    parser.add_argument("--until", help="Last day; default: the last that has data.")
    parser.add_argument("--skip", help="Days that have no data and never will, with commas between.")
    parser.add_argument("--marker", help="File that the folder of a complete day has, as _SUCCESS.")
    parser.add_argument("--keep", type=int | None, help="Newest days whose checkpoints are kept; default: all.")
    parser.add_argument("--changes", action="store_true", help="Write the rows that each day has changed, as Parquet.")
    parser.add_argument("--restart_from", help="Day to train anew, with all after it; what was is set aside.")
    parser.add_argument("--out", help="Directory of this model's days; default: runs/NAME-daily.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Train the days that are left, and print all."""
    from hotbed.train.ranks.process_group import process_group
    from hotbed.train.workflows.daily_training import Days, train_days

    first, last, restart = (_day(f"--{name}", vars(parsed)[name]) for name in ("from", "until", "restart_from"))
    texts = (parsed.skip or "").split(",")
    skipped = frozenset(day for text in texts if text and (day := _day("--skip", text.strip())))
    recipe = recipe_of(parsed)
    days = Days(
        data=recipe.data.path,
        first=first,
        last=last,
        skip=skipped,
        marker=parsed.marker,
        keep=parsed.keep,
        changes=parsed.changes,
    )
    place = local("--out", parsed.out or f"runs/{recipe.name}-daily")
    with process_group(recipe.parallel, recipe.train.device) as here:
        records = train_days(recipe, days, place, console(stderr=True), restart)
    if here.rank == 0:
        print_days(console(), records)
        write_json(parsed.json, {"days": records})


def print_days(to: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per day; metrics are those before it was trained on."""
    from rich.table import Table

    from hotbed.train.runs.report import size

    table = Table(title="metrics are of the model before it was trained on the day")
    columns = ("samples", "AUC", "logloss", "calibration", "never seen", "new rows", "drift", "checkpoint", "seconds")
    for column in ("day", *columns):
        table.add_column(column, justify="right", overflow="fold")
    for record in records:
        if record.get("skipped"):
            table.add_row(record["day"], "skipped")
            continue
        metrics: Mapping[str, Any] = record["metrics"] or {}
        drift: Mapping[str, float] = record["drift"].get("first_day", {})
        worst = max(drift, key=lambda name: drift[name], default=None)
        table.add_row(
            record["day"],
            f"{record['samples']:,}",
            *("–" if metrics.get(key) is None else f"{metrics[key]:.5f}" for key in ("auc", "logloss", "calibration")),
            f"{record['unseen_share']:.2%}",
            f"{sum(record['new_rows'].values()):,}",
            "–" if worst is None else f"{drift[worst]:.3f} ({worst})",
            size(record["bytes"]) + (" changed" if record["base"] else ""),
            f"{record['seconds']:,.1f}",
        )
    to.print(table)


def _day(option: str, text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise RecipeError(f"{option} is {text!r}, must be a day like 2026-01-31") from None
