"""Describe data, a run or a checkpoint, or measure the popularity of rows: ``hotbed inspect PATH [--skew]``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

from hotbed.checkpoint import MANIFEST, Directory, Manifest, checkpoints_in, directory, runs_in, verify_checkpoint
from hotbed.checkpoint.storage import write_text_uri
from hotbed.checks import is_int
from hotbed.cli.arguments import Parser, add_json, add_parameters, add_trust, console, read_recipe, save_json
from hotbed.cli.pages.data_page import print_data, render_data
from hotbed.cli.pages.report_page import ReportTable, check_html, print_table
from hotbed.cli.pages.run_page import read_mapping, read_runs, render_runs
from hotbed.cli.pages.skew_report import SKEW_DEFAULTS, inspect_skew, print_skew
from hotbed.config import Recipe
from hotbed.data import NpySource, Schema
from hotbed.data.arrow_columns import Ids
from hotbed.data.derived_features import Bucket, Cross, Derived, Lookup
from hotbed.data.inspection import DataSummary, SchemaChecks, compare, faults_error, summarize
from hotbed.data.preparation.stored_rows import MARKERS, SourceRows, StoredRows, open_rows
from hotbed.errors import DataError, RecipeError
from hotbed.locations import is_storage, location
from hotbed.train.runs.build import new_source
from hotbed.train.runs.report import RECIPE, SUMMARY, StageProgress, size
from hotbed.train.runs.stored_model import FEATURES

DATA_OPTIONS = {
    "against": "Earlier data to compare with, e.g. the day before.",
    "recipe": "Recipe that the data must match in names, types and ranges of ids.",
    "label": "Label column (default: guessed, e.g. `label`, `click`).",
    "html": "HTML file for figures of the data or the run. Needs matplotlib.",
}


def add_arguments(parser: Parser) -> None:
    """Add the argument PATH, the options of data, and the options of `inspect_skew`."""
    parser.usage = "hotbed inspect PATH [options]"
    data = "Data (prepared, Parquet, CSV, TSV, Criteo logs, NumPy arrays)"
    parser.add_argument("path", help=f"{data}, recipe, run, runs of a name, or checkpoint.")
    parser.add_argument("--skew", action="store_true", help="Count how often each row is looked up.")
    for name, text in DATA_OPTIONS.items():
        parser.add_argument(f"--{name}", help=text)
    add_parameters(parser, inspect_skew, skip=("path", "console", "trust_recipe"))
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Describe the contents of a path, or measure the skew of its lookups."""
    options = dict(vars(parsed))
    path, skew, json = location(options.pop("path")), options.pop("skew"), options.pop("json")
    of_data = {name: value for name in DATA_OPTIONS if (value := options.pop(name)) is not None}
    if skew:
        if of_data:
            raise RecipeError(f"--{next(iter(of_data))} does not work with --skew. Remove one of these options")
        found = inspect_skew(path, console(stderr=True), **options)
        print_skew(console(), found)
        save_json(json, found)
        return
    for name, default in SKEW_DEFAULTS.items():
        if options[name] != default:
            raise RecipeError(f"--{name} works only with --skew. Add --skew, or remove --{name}")
    if (description := describe_path(path)) is None:
        found, error = inspect_data(path, console(stderr=True), **of_data)
        print_data(console(), found)
        save_json(json, found)
        if error is not None:
            raise error
        return
    kind, html = description["kind"], of_data.pop("html", None)
    if of_data:
        option = f"--{next(iter(of_data))}"
        raise RecipeError(f"{option} works only for data, but {path} is a {kind}. Remove {option}")
    if html is not None:
        if kind == "checkpoint":
            raise RecipeError(f"--html draws data and runs, but {path} is a checkpoint. Pass the directory of its run")
        check_html(html)
        write_text_uri(html, render_runs(read_runs(path)))
    print_description(console(), description)
    save_json(json, description)


def inspect_data(
    path: str | Path,
    console: Console,
    *,
    against: str | None = None,
    recipe: str | None = None,
    label: str | None = None,
    html: str | None = None,
) -> tuple[dict[str, Any], DataError | None]:
    """Describe, compare and check a dataset. Return plain values, and an error if a recipe does not fit the data."""
    check_html(html)
    file = str(path if isinstance(path, Path) else path.partition("?")[0]).rsplit("/", 1)[-1]
    is_recipe = file.endswith((".yaml", ".yml")) and file not in MARKERS.values()
    is_recipe = is_recipe and not (isinstance(path, Path) and not path.is_file())
    if is_recipe and recipe is not None:
        raise RecipeError(f"--recipe: got {recipe}, but {path} is a recipe, too. Remove --recipe, or pass data as PATH")
    recipe = str(path) if is_recipe else recipe
    if label is not None and recipe is not None:
        raise RecipeError("--label: got a label, but the recipe names the label. Remove --label")
    schema, ids, rows = (None, None, None) if recipe is None else _read_expected(recipe, with_rows=is_recipe)
    data = rows or _open(path, schema)
    checks = None if schema is None or ids is None else SchemaChecks(data, schema, ids)
    before: DataSummary | None = None
    with StageProgress(console) as progress:
        options: dict[str, Any] = {"schema": schema, "label": label}
        if against is not None:
            earlier = _open(location(against), schema)
            before = summarize(earlier, **options, progress=partial(progress, "against"))
        after = summarize(data, **options, checks=checks, earlier=before, progress=partial(progress, "inspect"))
    found = after.to_dict()
    if isinstance(data, SourceRows):
        found["tables"] = [{"table": name, "rows": rows} for name, rows in data.tables.items()]
    if before is not None:
        found["against"] = compare(before, after)
    if recipe is not None:
        found |= {"recipe": recipe, "faults": [asdict(fault) for fault in after.faults]}
    if html is not None:
        write_text_uri(html, render_data(found, after, before))
    return found, faults_error(str(path), recipe, after.faults) if recipe is not None and after.faults else None


def _open(path: str | Path, schema: Schema | None) -> StoredRows:
    try:
        return open_rows(path, schema)
    except DataError as error:
        known = f"a prepared dataset ({', '.join(MARKERS.values())}), a run (recipe.yaml), a checkpoint ({MANIFEST})"
        raise DataError(f"{path} is neither {known}, Parquet nor arrays (day_0_sparse.npy): {error}") from None


def _read_expected(name: str, *, with_rows: bool) -> tuple[Schema, Ids, SourceRows | None]:
    recipe = read_recipe(name)
    named, args = recipe.data.source.class_path.rpartition(".")[2], recipe.data.source.init_args
    of_arrays: Ids | None = None if named != NpySource.__name__ else "hash" if args.get("modulo") else "raw"
    if not with_rows and isinstance(given := args.get("schema"), Mapping):
        return Schema.from_dict(cast("Mapping[str, object]", given)), of_arrays or args.get("ids", "hash"), None
    source = new_source(recipe.data)
    ids: Ids = getattr(source, "ids", "raw")
    if not with_rows:
        return source.schema, of_arrays or ids, None
    return source.schema, ids, SourceRows(recipe.data.path, source, "source of a recipe")


def describe_path(path: str | Path) -> dict[str, Any] | None:
    """Return plain values about a run, the newest run of a name, or a checkpoint. Return None for any other path."""
    if isinstance(path, Path) and not path.exists():
        raise DataError(f"{path} does not exist")
    if not is_storage(path):
        return None
    folder = directory(path)
    if folder.has(MANIFEST):
        manifest = verify_checkpoint(folder)
        files = [{"file": name, "bytes": entry.bytes} for name, entry in manifest.files.items()]
        return {**describe_manifest(folder, manifest), "files": files, "verified": True}
    runs = [folder] if folder.has(RECIPE) else [run for run in runs_in(folder) if run.has(RECIPE)]
    if not runs:
        return None
    finished = (run := runs[-1]).has(SUMMARY)
    return {
        "kind": "run",
        "path": str(run),
        "finished": finished,
        "summary": dict(read_mapping(run, SUMMARY)) if finished else None,
        "checkpoints": [str(checkpoint) for checkpoint in checkpoints_in(run / "checkpoints")],
    }


def describe_manifest(path: str | Path | Directory, manifest: Manifest) -> dict[str, Any]:
    """Return plain values about a checkpoint from its manifest."""
    tables = [
        {
            "table": name,
            "rows": table.spec.rows,
            "dim": table.spec.dim,
            "dtype": table.spec.dtype,
            "moments": list(table.moments),
            "tiles": len(table.tiles),
            "compact": any(tile.keyed for tile in table.tiles),
        }
        for name, table in manifest.tables.items()
    ]
    return {
        "kind": "checkpoint",
        "path": str(path),
        "step": manifest.step,
        **({} if manifest.base is None else {"base": manifest.base.name}),
        "recipe": (manifest.recipe or {}).get("name"),
        "ranks": manifest.plan.world_size if manifest.plan else 1,
        "files": len(manifest.files),
        "bytes": manifest.nbytes,
        "parts": list(manifest.parts),
        "tables": tables,
        **({"features": made} if (made := _describe_features(manifest)) else {}),
    }


def _describe_features(manifest: Manifest) -> list[dict[str, str]]:
    if FEATURES not in manifest.parts:
        return []
    known = cast("Mapping[str, Mapping[str, Any]]", manifest.parts[FEATURES])
    schema = Recipe.from_dict(manifest.recipe or {}).data.source.init_args.get("schema")
    derived = Schema.from_dict(schema).derived if isinstance(schema, Mapping) else ()
    return [{"feature": d.name, "made_of": _describe_feature(d, known.get(d.name, {}))} for d in derived]


def _describe_feature(derived: Derived, known: Mapping[str, Any]) -> str:
    match derived:
        case Cross():
            return f"cross of {', '.join(derived.columns)}"
        case Bucket():
            by = "" if derived.quantiles is None else f"{derived.quantiles} quantiles: "
            limits = (derived.boundaries or ()) if derived.quantiles is None else known["measured"]
            return f"{derived.column} by {by}{', '.join(f'{value:g}' for value in limits)}"
        case Lookup():
            table = f"{derived.file} by {derived.column} ({derived.key})"
            return f"{derived.value} of {table}: {known['keys']:,} keys, SHA-256 {known['sha256'][:12]}"


def print_description(console: Console, description: Mapping[str, Any]) -> None:
    """Print the result of `describe_path`: first single values, then a table for each list of entries."""
    values = RichTable("", Column("", overflow="fold"), show_header=False, box=None)
    for name, value in _flatten(description):
        values.add_row(name, size(value) if name.endswith("bytes") else _format_value(value))
    console.print(values)
    for name, value in description.items():
        if _is_table(value):
            entries = cast("Sequence[Mapping[str, Any]]", value)
            left = [key for key, cell in entries[0].items() if not isinstance(cell, int)]
            rows = [[_format_value(cell) for cell in entry.values()] for entry in entries]
            print_table(console, ReportTable(name, list(entries[0]), rows, left))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        elif not _is_table(value) and value is not None:
            yield f"{prefix}{name}", value


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[object]", value)))
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if is_int(value) else str(value)
