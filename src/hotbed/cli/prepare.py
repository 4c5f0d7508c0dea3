"""Prepare a dataset from Criteo logs, or Parquet, CSV and TSV files: ``hotbed prepare``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotbed.cli.arguments import Parser, add_json, add_parameters, console, save_json
from hotbed.errors import RecipeError
from hotbed.files import read_yaml
from hotbed.locations import local
from hotbed.plan.hardware import parse_quantity

if TYPE_CHECKING:
    from rich.console import Console

    from hotbed.data.preparation.prepare_dataset import PrepareReport


def add_arguments(parser: Parser) -> None:
    """Add the raw files, the dataset, and the options of `hotbed.prepare`."""
    from hotbed.data.preparation.prepare_options import PrepareOptions

    parser.usage = "hotbed prepare RAW … OUT [options]"
    text = "Criteo logs in time order, or Parquet, CSV or TSV files, folders or URIs."
    parser.add_argument("raw", nargs="+", help=text)
    parser.add_argument("out", help="Dataset directory to create.")
    add_parameters(parser, PrepareOptions, skip=("vocabulary", "schema", "executor", "memory"))
    parser.add_argument("--schema", help="YAML file with a schema, or a recipe (default: drafted from the columns).")
    text = "threads, processes, dask:ADDRESS or ray:ADDRESS, e.g. dask:local."
    parser.add_argument("--executor", default="threads", help=text)
    parser.add_argument("--memory", default="2 GiB", help="Memory limit. Counts that exceed it are written to disk.")
    parser.add_argument("--vocabulary", help="Folder vocabulary/ of an earlier dataset, to keep the ids of values.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Prepare, and print a summary of the dataset."""
    from hotbed.data.preparation.prepare_dataset import prepare
    from hotbed.train.runs.report import StageProgress

    options = dict(vars(parsed))
    raw, out, json = (options.pop(name) for name in ("raw", "out", "json"))
    options["memory"] = int(parse_quantity("--memory", options["memory"], "bytes"))
    if options["schema"] is not None:
        options["schema"] = _read_schema(local("--schema", options["schema"]))
    if options["vocabulary"] is not None:
        options["vocabulary"] = local("--vocabulary", options["vocabulary"])
    with StageProgress(console(stderr=True)) as progress:
        report = prepare(raw, local("OUT", out), progress=progress, **options)
    print_prepared(console(), report)
    save_json(json, vars(report))


def _read_schema(path: Path) -> Mapping[str, object]:
    """Read a schema from its own file, a recipe, or a dataset's ``source.yaml``."""
    found: Any = read_yaml(path)
    for key in ("data", "source", "init_args", "schema"):
        if isinstance(found, Mapping) and key in found:
            found = cast("Mapping[str, Any]", found)[key]
    if not isinstance(found, Mapping) or "sparse" not in found:
        raise RecipeError(f"{path} has no schema. Pass a recipe of `hotbed init`, or a file with the schema alone")
    return cast("Mapping[str, object]", found)


def print_prepared(to: Console, report: PrepareReport) -> None:
    """Print the splits and rows of a prepared dataset, and the skipped lines and columns."""
    from hotbed.cli.pages.report_page import ReportTable, print_table

    rows = [[split, f"{samples:,}"] for split, samples in report.samples.items()]
    print_table(to, ReportTable(str(report.path), ("split", "samples"), rows))
    to.print(f"{sum(report.rows.values()):,} rows in {len(report.rows)} tables, {report.seconds:.1f} s")
    for reason, count in report.skipped.items():
        to.print(f"{count:,} lines were skipped: bad {reason}")
    for column, count in report.replaced.items():
        to.print(f"column {column}: {count:,} negative values were replaced (--negatives)")
    if report.left_out:
        to.print("Unused columns (to use one of them, add it to a --schema):")
    for name, reason in report.left_out.items():
        to.print(f"- {name!r}: {reason}", markup=False, soft_wrap=True)
