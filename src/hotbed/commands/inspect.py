"""Show what data, a run or a checkpoint hold: ``hotbed inspect``; data: `inspect_data.py`, ``--skew``: `skew.py`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from hotbed.checkpoint import MANIFEST, Directory, Manifest, checkpoints_in, directory, runs_in, verify_checkpoint
from hotbed.checkpoint.single_files import write_text
from hotbed.checks import is_int
from hotbed.commands.arguments import Parser, add_json, add_parameters, add_trust, check_json, console, write_json
from hotbed.commands.inspect_data import DataOptions, add_data_arguments, inspect_data, print_data
from hotbed.commands.run_page import page
from hotbed.commands.run_records import read_json, read_runs
from hotbed.commands.skew import SKEW_DEFAULTS, inspect_skew, print_skew
from hotbed.config import Recipe
from hotbed.data import Schema
from hotbed.data.derived import Bucket, Cross, Derived, Lookup
from hotbed.errors import DataError, RecipeError
from hotbed.locations import is_storage, location
from hotbed.train.report import RECIPE, SUMMARY, size
from hotbed.train.stored import FEATURES


def add_arguments(parser: Parser) -> None:
    """Add the path, and the options of data and of `inspect_skew`."""
    parser.usage = "hotbed inspect PATH [options]"
    parser.add_argument(
        "path",
        help="Data (prepared, Parquet, CSV, TSV, logs, NumPy's arrays), a recipe, run, runs of a name, or checkpoint.",
    )
    parser.add_argument("--skew", action="store_true", help="Count how often each row is looked up.")
    add_data_arguments(parser)
    add_parameters(parser, inspect_skew, skip=("path", "console", "trust_recipe"))
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Show what a path holds, or how skewed the lookups of its samples are."""
    options = dict(vars(parsed))
    path, skew, json = location(options.pop("path")), options.pop("skew"), options.pop("json")
    of_data = DataOptions(**{field.name: options.pop(field.name) for field in fields(DataOptions)})
    if skew:
        if of_data.given:
            raise RecipeError(f"--{of_data.given[0]} does not go with --skew; leave one of them out")
        found = inspect_skew(path, console(stderr=True), **options)
        print_skew(console(), found)
        write_json(json, found)
        return
    for name, default in SKEW_DEFAULTS.items():
        if options[name] != default:
            raise RecipeError(f"--{name} goes with --skew; add --skew, or leave --{name} out")
    if (described := describe(path)) is not None:
        kind = described["kind"]
        for name in of_data.given:
            if name != "html":
                raise RecipeError(f"--{name} is for data, and {path} is a {kind}; leave it out")
            if kind == "checkpoint":
                raise RecipeError(f"--html draws data and runs, and {path} is a checkpoint; give its run's directory")
        if of_data.html is not None:
            check_json(of_data.html, "--html")
            write_text(of_data.html, page(read_runs(path)))
        print_description(console(), described)
        write_json(json, described)
        return
    inspected = inspect_data(path, of_data, console(stderr=True))
    print_data(console(), inspected.found)
    write_json(json, inspected.found)
    if inspected.error is not None:
        raise inspected.error


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
    files = [{"file": name, "bytes": entry["bytes"]} for name, entry in manifest.files.items()]
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
        "ranks": (manifest.plan or {}).get("world_size", 1),
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
        "summary": read_json(place, SUMMARY) if finished else None,
        "checkpoints": [str(checkpoint) for checkpoint in checkpoints_in(place / "checkpoints")],
    }


def print_description(console: Console, description: Mapping[str, Any]) -> None:
    """Print what `describe` found: single values first, then lists of entries as tables."""
    values = Table(show_header=False, box=None)
    values.add_column()
    values.add_column(overflow="fold")
    for name, value in _flat(description):
        values.add_row(name, size(value) if name.endswith("bytes") else _text(value))
    console.print(values)
    for name, value in description.items():
        if _is_table(value):
            entries = cast("Sequence[Mapping[str, Any]]", value)
            table = Table(title=name, title_justify="left")
            for key, cell in entries[0].items():
                table.add_column(key, justify="right" if isinstance(cell, int) else "left", overflow="fold")
            for entry in entries:
                table.add_row(*(_text(cell) for cell in entry.values()))
            console.print(table)


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
