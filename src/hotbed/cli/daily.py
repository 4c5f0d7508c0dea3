"""Train a model day by day, and evaluate it on each day before it is trained on that day: ``hotbed daily``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from hotbed.cli.arguments import Parser, add_json, add_recipe, console, parse_recipe, save_json
from hotbed.errors import RecipeError
from hotbed.locations import local

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: Parser) -> None:
    """Add the recipe's options, and the options of days."""
    parser.usage = "hotbed daily RECIPE.yaml --data 'logs/day={date}' --from 2026-01-31 [--key value …]"
    add_recipe(parser)
    parser.add_argument("--from", help="First day, e.g. 2026-01-31. Only needed until the first day is trained.")
    parser.add_argument("--until", help="Last day (default: the last day that has data).")
    parser.add_argument("--skip", help="Days that will never have data, separated by commas.")
    parser.add_argument("--marker", help="Name of a file that marks a day's folder as complete, e.g. _SUCCESS.")
    parser.add_argument(
        "--keep", type=int | None, help="Number of newest days to keep the checkpoints of (default: all)."
    )
    parser.add_argument(
        "--changes", action="store_true", help="Write the rows that each day changed, as Parquet files."
    )
    parser.add_argument("--restart_from", help="First day to train again. Old results are moved aside.")
    parser.add_argument("--out", help="Directory of all days' results (default: runs/NAME-daily).")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Train the remaining days, and print all days."""
    from hotbed.train.ranks.process_group import process_group
    from hotbed.train.workflows.daily_training import Days, train_days

    first, last, restart = (_parse_day(f"--{name}", vars(parsed)[name]) for name in ("from", "until", "restart_from"))
    texts = (parsed.skip or "").split(",")
    skipped = frozenset(day for text in texts if text and (day := _parse_day("--skip", text.strip())))
    recipe = parse_recipe(parsed)
    options: dict[str, Any] = {name: vars(parsed)[name] for name in ("marker", "keep", "changes")}
    days = Days(data=recipe.data.path, first=first, last=last, skip=skipped, **options)
    out = local("--out", parsed.out or f"runs/{recipe.name}-daily")
    with process_group(recipe.parallel, recipe.train.device) as ranks:
        records = train_days(recipe, days, out, console(stderr=True), restart)
    if ranks.rank == 0:
        print_days(console(), records)
        save_json(parsed.json, {"days": records})


def print_days(to: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per day, with the metrics of the model before it was trained on the day."""
    from hotbed.cli.pages.report_page import ReportTable, format_cell, print_table
    from hotbed.train.runs.report import size

    rows: list[list[str]] = []
    for record in records:
        if record.get("skipped"):
            rows.append([record["day"], "skipped"])
            continue
        metrics: Mapping[str, Any] = record["metrics"] or {}
        drift: Mapping[str, float] = record["drift"].get("first_day", {})
        worst = max(drift, key=lambda name: drift[name], default=None)
        cells = [record["day"], f"{record['samples']:,}"]
        cells += [format_cell(metrics.get(key), ".5f") for key in ("auc", "logloss", "calibration")]
        cells += [f"{record['unseen_share']:.2%}", f"{sum(record['new_rows'].values()):,}"]
        cells += ["–" if worst is None else f"{drift[worst]:.3f} ({worst})"]
        cells += [size(record["bytes"]) + " changed" * bool(record["base"]), f"{record['seconds']:,.1f}"]
        rows.append(cells)
    columns = ("samples", "AUC", "logloss", "calibration", "never seen", "new rows", "drift", "checkpoint", "seconds")
    print_table(to, ReportTable("metrics of the model before it was trained on the day", ("day", *columns), rows))


def _parse_day(option: str, text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise RecipeError(f"{option}: got {text!r}, expected a day such as 2026-01-31") from None
