"""Prepare a dataset from raw Criteo logs: ``hotbed prepare``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table as RichTable

from hotbed.commands.arguments import add_json, console, write_json
from hotbed.locations import local

if TYPE_CHECKING:
    from hotbed.data.prepare import PrepareReport


def add_arguments(parser: ArgumentParser) -> None:
    """Add the logs, the dataset, and the options of `hotbed.prepare`."""
    from hotbed.data.prepare import prepare

    parser.usage = "hotbed prepare RAW … OUT [options]"
    parser.add_argument(
        "raw", type=str, nargs="+", help="Raw Criteo logs in time order, or a directory of them; paths or URIs."
    )
    parser.add_argument("out", type=str, help="Dataset directory to make.")
    parser.add_function_arguments(prepare, skip={"raw", "out", "progress", "vocabulary"})
    parser.add_argument("--vocabulary", type=str | None, help="vocabulary/ of an earlier dataset, whose ids are kept.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Prepare, and print what was made."""
    from hotbed.data.prepare import prepare
    from hotbed.train.report import StageProgress

    options = parsed.as_dict()
    raw, out, json = (options.pop(name) for name in ("raw", "out", "json"))
    out = local("OUT", out)
    if options["vocabulary"] is not None:
        options["vocabulary"] = local("--vocabulary", options["vocabulary"])
    with StageProgress(console(stderr=True)) as progress:
        report = prepare(raw, out, progress=progress, **options)
    print_prepared(console(), report)
    write_json(json, vars(report))


def print_prepared(console: Console, report: PrepareReport) -> None:
    """Print what `hotbed.prepare` made."""
    console.print(str(report.path), style="table.title", soft_wrap=True)
    table = RichTable()
    for name in ("split", "samples"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, samples in report.samples.items():
        table.add_row(split, f"{samples:,}")
    console.print(table)
    console.print(f"{sum(report.rows.values()):,} rows in {len(report.rows)} tables, {report.seconds:.1f} s")
    for reason, count in report.skipped.items():
        console.print(f"{count:,} lines were left out: bad {reason}")
