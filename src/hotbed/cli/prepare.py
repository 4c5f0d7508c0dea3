"""Prepare a dataset from Criteo logs, or Parquet, CSV and TSV files: ``hotbed prepare``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table as RichTable

from hotbed.cli.arguments import Parser, add_json, add_parameters, console, write_json
from hotbed.errors import RecipeError
from hotbed.files import read_yaml
from hotbed.locations import local
from hotbed.plan.hardware import parse_quantity

if TYPE_CHECKING:
    from hotbed.data.preparation.prepare_dataset import PrepareReport


_OWN = ("vocabulary", "schema", "executor", "memory")
"""Options with an argument of their own."""


def add_arguments(parser: Parser) -> None:
    """Add the raw files, the dataset, and the options of `hotbed.prepare`."""
    from hotbed.data.preparation.prepare_options import PrepareOptions

    parser.usage = "hotbed prepare RAW … OUT [options]"
    parser.add_argument(
        "raw",
        nargs="+",
        help="Criteo logs in time order, or Parquet, CSV, TSV; or folders; URIs too.",
    )
    parser.add_argument("out", help="Dataset directory to make.")
    add_parameters(parser, PrepareOptions, skip=_OWN)
    parser.add_argument("--schema", help="YAML of a schema, or a recipe; by default one is drafted.")
    parser.add_argument(
        "--executor",
        default="threads",
        help="threads, processes, dask:ADDRESS or ray:ADDRESS (e.g. dask:local).",
    )
    parser.add_argument("--memory", default="2 GiB", help="Bytes to use; the rest waits on the disk.")
    parser.add_argument("--vocabulary", help="vocabulary/ of an earlier dataset, whose ids are kept.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Prepare, and print what was made."""
    from hotbed.data.preparation.prepare_dataset import prepare
    from hotbed.train.runs.report import StageProgress

    options = dict(vars(parsed))
    raw, out, json = (options.pop(name) for name in ("raw", "out", "json"))
    out = local("OUT", out)
    options["memory"] = _bytes(options["memory"])
    if options["schema"] is not None:
        options["schema"] = _schema(local("--schema", options["schema"]))
    if options["vocabulary"] is not None:
        options["vocabulary"] = local("--vocabulary", options["vocabulary"])
    with StageProgress(console(stderr=True)) as progress:
        report = prepare(raw, out, progress=progress, **options)
    print_prepared(console(), report)
    write_json(json, vars(report))


def _bytes(text: str) -> int:
    return int(parse_quantity("--memory", text, "bytes"))


def _schema(path: Path) -> Mapping[str, object]:
    """A schema that a file holds, or that of the recipe that it is, or of the ``source.yaml`` of a dataset."""
    found: Any = read_yaml(path)
    for key in ("data", "source", "init_args", "schema"):
        if isinstance(found, Mapping) and key in found:
            found = cast("Mapping[str, Any]", found)[key]
    if not isinstance(found, Mapping) or "sparse" not in found:
        raise RecipeError(
            f"{path} has no schema; give a recipe of `hotbed init`, or what its data.source says as schema"
        )
    return cast("Mapping[str, object]", found)


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
    for column, count in report.replaced.items():
        console.print(f"column {column}: {count:,} negative values were replaced (--negatives)")
    if report.left_out:
        console.print("Columns that were left out (to use one of them, name it in --schema):")
    for name, reason in report.left_out.items():
        console.print(f"- {name!r}: {reason}", markup=False, soft_wrap=True)
