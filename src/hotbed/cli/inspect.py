"""Show what data, a run or a checkpoint hold: ``hotbed inspect``; ``--skew``: `skew.py`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table as RichTable

from hotbed.checkpoint import MANIFEST, Directory, Manifest, checkpoints_in, directory, runs_in, verify_checkpoint
from hotbed.checkpoint.single_files import write_text_uri
from hotbed.checks import is_int
from hotbed.cli.arguments import Parser, add_json, add_parameters, add_trust, console, load, write_json
from hotbed.cli.pages import data_page, run_page
from hotbed.cli.pages.report_page import Table, check_html, print_table
from hotbed.cli.pages.run_page import read_mapping, read_runs
from hotbed.cli.pages.skew_report import SKEW_DEFAULTS, inspect_skew, print_skew
from hotbed.config import Recipe, import_from
from hotbed.data import NpySource, Schema
from hotbed.data.arrow_columns import Ids
from hotbed.data.derived_features import Bucket, Cross, Derived, Lookup
from hotbed.data.inspection import DataSummary, SchemaChecks, compare, faults_error, summarize
from hotbed.data.preparation.encoded_rows import MARKERS
from hotbed.data.preparation.stored_rows import SourceRows, StoredRows, open_rows
from hotbed.errors import DataError, RecipeError
from hotbed.locations import is_storage, location
from hotbed.train.runs.build import new_source
from hotbed.train.runs.report import RECIPE, SUMMARY, StageProgress, size
from hotbed.train.runs.stored_model import FEATURES

OF_DATA = {
    "against": "Earlier data, another day's: how do these differ from it?",
    "recipe": "Recipe that the data must fit: names, types, ids in range.",
    "label": "Label column, where its name is not a usual one.",
    "html": "File for a page with figures of data, or of a run (needs matplotlib).",
}
"""Options of data, with their help."""


def add_arguments(parser: Parser) -> None:
    """Add the path, and the options of data and of `inspect_skew`."""
    parser.usage = "hotbed inspect PATH [options]"
    parser.add_argument(
        "path",
        help="Data (prepared, Parquet, CSV, TSV, logs, NumPy's arrays), a recipe, run, runs of a name, or checkpoint.",
    )
    parser.add_argument("--skew", action="store_true", help="Count how often each row is looked up.")
    for name, words in OF_DATA.items():
        parser.add_argument(f"--{name}", help=words)
    add_parameters(parser, inspect_skew, skip=("path", "console", "trust_recipe"))
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Show what a path holds, or how skewed the lookups of its samples are."""
    options = dict(vars(parsed))
    path, skew, json = location(options.pop("path")), options.pop("skew"), options.pop("json")
    of_data = {name: value for name in OF_DATA if (value := options.pop(name)) is not None}
    if skew:
        if of_data:
            raise RecipeError(f"--{next(iter(of_data))} does not go with --skew; leave one of them out")
        found = inspect_skew(path, console(stderr=True), **options)
        print_skew(console(), found)
        write_json(json, found)
        return
    for name, default in SKEW_DEFAULTS.items():
        if options[name] != default:
            raise RecipeError(f"--{name} goes with --skew; add --skew, or leave --{name} out")
    if (described := describe(path)) is None:
        found, error = inspect_data(path, console(stderr=True), **of_data)
        data_page.print_data(console(), found)
        write_json(json, found)
        if error is not None:
            raise error
        return
    kind, html = described["kind"], of_data.pop("html", None)
    if of_data:
        name = next(iter(of_data))
        raise RecipeError(f"--{name} is for data, and {path} is a {kind}; leave it out")
    if html is not None:
        if kind == "checkpoint":
            raise RecipeError(f"--html draws data and runs, and {path} is a checkpoint; give its run's directory")
        check_html(html)
        write_text_uri(html, run_page.page(read_runs(path)))
    print_description(console(), described)
    write_json(json, described)


# -- data --------------------------------------------------------------------------------------------------------


def inspect_data(
    path: str | Path,
    console: Console,
    *,
    against: str | None = None,
    recipe: str | None = None,
    label: str | None = None,
    html: str | None = None,
) -> tuple[dict[str, Any], DataError | None]:
    """Read all rows of a dataset once, and those of ``against`` before it.

    Returns
    -------
    tuple
        Plain values, and the error that the data do not fit their recipe, or None.
    """
    check_html(html)
    own = _is_recipe(path)
    if own and recipe is not None:
        raise RecipeError(f"{path} is a recipe itself; leave out --recipe, or give the data in its place")
    recipe = str(path) if own else recipe
    if label is not None and recipe is not None:
        raise RecipeError("--label and a recipe both say what the label is; leave --label out")
    expected = None if recipe is None else _expected(recipe, with_source=own)
    schema = None if expected is None else expected.schema
    data = expected.rows if expected is not None and expected.rows is not None else _open(path, schema)
    checks = None if expected is None else SchemaChecks(data, expected.schema, expected.ids)
    before: DataSummary | None = None
    with StageProgress(console) as progress:
        if against is not None:
            earlier = _open(location(against), schema)
            before = summarize(earlier, schema=schema, label=label, progress=lambda d, n: progress("against", d, n))
        after = summarize(
            data,
            schema=schema,
            checks=checks,
            label=label,
            earlier=before,
            progress=lambda d, n: progress("inspect", d, n),
        )
    found = after.to_dict()
    if isinstance(data, SourceRows):
        found["tables"] = [{"table": name, "rows": rows} for name, rows in data.tables.items()]
    if before is not None:
        found["against"] = compare(before, after)
    if recipe is not None:
        found |= {"recipe": recipe, "faults": [asdict(fault) for fault in after.faults]}
    if html is not None:
        write_text_uri(html, data_page.page(found, after, before))
    wrong = recipe is not None and after.faults
    return found, faults_error(str(path), str(recipe), after.faults) if wrong else None


def _is_recipe(path: str | Path) -> bool:
    """Return whether a path is that of a recipe's file, by its name."""
    if isinstance(path, Path) and not path.is_file():
        return False
    name = str(path if isinstance(path, Path) else path.partition("?")[0]).rsplit("/", 1)[-1]
    return name.endswith((".yaml", ".yml")) and name not in MARKERS.values()


def _open(path: str | Path, schema: Schema | None) -> StoredRows:
    try:
        return open_rows(path, schema)
    except DataError as error:
        raise DataError(
            f"{path} is no prepared dataset ({', '.join(MARKERS.values())}), run (recipe.yaml), checkpoint "
            f"({MANIFEST}), Parquet or arrays (day_0_sparse.npy): {error}"
        ) from None


class _Expected(NamedTuple):
    schema: Schema
    ids: Ids
    rows: SourceRows | None = None


def _expected(name: str, *, with_source: bool) -> _Expected:
    """Return what a recipe expects of data, and if required the rows of its own source."""
    path = location(name)
    recipe = Recipe.from_dict(load(str(path)))
    if isinstance(path, Path):
        import_from(path.parent)
    args = recipe.data.source.init_args
    of_arrays: Ids | None = None
    if recipe.data.source.class_path.rpartition(".")[2] == NpySource.__name__:
        of_arrays = "hash" if args.get("modulo") else "raw"
    if not with_source and isinstance(given := args.get("schema"), Mapping):
        schema = Schema.from_dict(cast("Mapping[str, object]", given))
        return _Expected(schema, of_arrays or args.get("ids", "hash"))
    source = new_source(recipe.data)
    ids: Ids = getattr(source, "ids", "raw")
    if not with_source:
        return _Expected(source.schema, of_arrays or ids)
    return _Expected(source.schema, ids, SourceRows(recipe.data.path, source, "source of a recipe"))


# -- runs and checkpoints ----------------------------------------------------------------------------------------


def describe(path: str | Path) -> dict[str, Any] | None:
    """Plain values about a run, the newest of a name, or a checkpoint; None of anything else."""
    if isinstance(path, Path) and not path.exists():
        raise DataError(f"{path} does not exist")
    if not is_storage(path):
        return None
    place = directory(path)
    if place.has(MANIFEST):
        return _checkpoint(place)
    if place.has(RECIPE):
        return _run(place)
    if runs := [run for run in runs_in(place) if run.has(RECIPE)]:
        return _run(runs[-1])
    return None


def _checkpoint(place: Directory) -> dict[str, Any]:
    manifest = verify_checkpoint(place)
    files = [{"file": name, "bytes": entry.bytes} for name, entry in manifest.files.items()]
    return {**describe_manifest(place, manifest), "files": files, "verified": True}


def describe_manifest(path: str | Path | Directory, manifest: Manifest) -> dict[str, Any]:
    """Plain values of what a checkpoint's manifest says."""
    tables = {
        name: {
            "rows": table.spec.rows,
            "dim": table.spec.dim,
            "dtype": table.spec.dtype,
            "moments": list(table.moments),
            "tiles": len(table.tiles),
            "compact": any(tile.keyed for tile in table.tiles),
        }
        for name, table in manifest.tables.items()
    }
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
        "tables": [{"table": name, **values} for name, values in tables.items()],
        **({"features": made} if (made := _features(manifest)) else {}),
    }


def _features(manifest: Manifest) -> list[dict[str, str]]:
    """How the derived inputs of a checkpoint's model are made."""
    if FEATURES not in manifest.parts:
        return []
    known = cast("Mapping[str, Mapping[str, Any]]", manifest.parts[FEATURES])
    schema = Recipe.from_dict(manifest.recipe or {}).data.source.init_args.get("schema")
    derived = Schema.from_dict(schema).derived if isinstance(schema, Mapping) else ()
    return [{"feature": d.name, "made_of": _made_of(d, known.get(d.name, {}))} for d in derived]


def _made_of(derived: Derived, known: Mapping[str, Any]) -> str:
    match derived:
        case Cross():
            return f"cross of {', '.join(derived.columns)}"
        case Bucket(quantiles=None):
            return f"{derived.column} by {_numbers(derived.boundaries or ())}"
        case Bucket():
            return f"{derived.column} by {derived.quantiles} quantiles: {_numbers(known['measured'])}"
        case Lookup():
            table = f"{derived.file} by {derived.column} ({derived.key})"
            return f"{derived.value} of {table}: {known['keys']:,} keys, SHA-256 {known['sha256'][:12]}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _run(place: Directory) -> dict[str, Any]:
    finished = place.has(SUMMARY)
    return {
        "kind": "run",
        "path": str(place),
        "finished": finished,
        "summary": dict(read_mapping(place, SUMMARY)) if finished else None,
        "checkpoints": [str(checkpoint) for checkpoint in checkpoints_in(place / "checkpoints")],
    }


def print_description(console: Console, description: Mapping[str, Any]) -> None:
    """Print what `describe` found: single values first, then lists of entries as tables."""
    values = RichTable(show_header=False, box=None)
    values.add_column()
    values.add_column(overflow="fold")
    for name, value in _flat(description):
        values.add_row(name, size(value) if name.endswith("bytes") else _text(value))
    console.print(values)
    for name, value in description.items():
        if _is_table(value):
            entries = cast("Sequence[Mapping[str, Any]]", value)
            left = [key for key, cell in entries[0].items() if not isinstance(cell, int)]
            rows = [[_text(cell) for cell in entry.values()] for entry in entries]
            print_table(console, Table(name, list(entries[0]), rows, left))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        elif not _is_table(value) and value is not None:
            rows.append((f"{prefix}{name}", value))
    return rows


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[object]", value)))
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if is_int(value) else str(value)
