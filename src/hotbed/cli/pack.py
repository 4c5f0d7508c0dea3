"""Choose the rows that are worth the fast memory, and pack data into hot and cold samples: ``hotbed pack``."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from hotbed.checkpoint.single_files import exists
from hotbed.cli.arguments import Parser, add_json, add_parameters, console, load, write_json
from hotbed.config import Recipe, import_from
from hotbed.data import SplitBinarySource
from hotbed.data.skew.hot_cold import pack
from hotbed.data.skew.row_popularity import count_accesses
from hotbed.embed import plan_tables, tables_on_meta
from hotbed.embed.plan_names import names_in_plans
from hotbed.errors import RecipeError
from hotbed.locations import local, location
from hotbed.optim import Moment
from hotbed.plan.cost import tile_bytes
from hotbed.plan.hit_rates import Counted
from hotbed.plan.tier_choice import hot_rows
from hotbed.plan.tiling import Tile
from hotbed.specs import Table
from hotbed.train.parameter_groups import moments_by_table, moments_of
from hotbed.train.runs.build import new_model, new_source, tables_of
from hotbed.train.runs.report import StageProgress, size


def add_arguments(parser: Parser) -> None:
    """Add the recipe, the dataset, and the options of `pack_by_popularity`."""
    parser.usage = "hotbed pack RECIPE.yaml OUT --budget BYTES [options]"
    parser.add_argument("recipe", help="Recipe: names the data, and says what a row of each table takes.")
    parser.add_argument("out", help="Dataset directory to make.")
    parser.add_argument("--data", help="Another dataset than the recipe's.")
    add_parameters(parser, pack_by_popularity, skip=("recipe", "out", "console"))
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Pack, and print which rows are hot."""
    options = dict(vars(parsed))
    file, data, out, json = (options.pop(name) for name in ("recipe", "data", "out", "json"))
    recipe = recipe_in(location(file), data)
    found = pack_by_popularity(recipe, local("OUT", out), console(stderr=True), **options)
    print_packed(console(), found)
    write_json(json, found)


def pack_by_popularity(
    recipe: Recipe,
    out: Path,
    console: Console,
    *,
    budget: int,
    sample: float = 0.05,
    whole_bytes: int = 1 << 20,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Count accesses, choose hot rows within a budget, and pack the train split into hot and cold samples.

    Parameters
    ----------
    budget
        Bytes of the device's memory that hot rows and their moments may take.
    sample
        Share of the samples that accesses are counted in; 1 counts them all.
    whole_bytes
        Tables that take no more bytes come first, whole; see `hotbed.plan.tier_choice.hot_rows`.
    overwrite
        Replace ``out`` if it is a dataset already.
    """
    started = time.perf_counter()
    source = new_source(recipe.data)
    if not isinstance(source, SplitBinarySource):
        raise RecipeError(
            f"data.source is {recipe.data.source.class_path}, but hotbed pack packs prepared datasets only "
            f"(hotbed.data.SplitBinarySource); prepare the log with hotbed prepare"
        )
    split, tables = recipe.data.train_split, tables_of(source, recipe.data)
    moments = moments_of(recipe.sparse_optimizer)
    beside = _beside(recipe, source, tables, moments)
    with StageProgress(console) as progress:
        counts = count_accesses(
            source,
            split,
            sample=sample,
            progress=lambda done, total: progress("accesses", done, total),
        )
        known = {name: Counted(torch.from_numpy(c), counts.samples) for name, c in counts.counted.items()}
        rows = hot_rows(tables, budget, popularity=known, moments=moments, beside=beside, whole_bytes=whole_bytes)
        hot = [Tile(t.name, range(rows[t.name]), range(t.dim), 0) for t in tables if rows[t.name]]
        by_name = {t.name: t for t in tables}
        about = {
            "budget": budget,
            "hot_bytes": sum(tile_bytes(by_name[t.table], t, moments) + len(t.rows) * beside[t.table] for t in hot),
            "sample": sample,
            "counted_samples": counts.samples,
            "hot_accesses": sum(known[t].accesses(n) for t, n in rows.items())
            / max(sum(counts.accesses.values()) / counts.samples, 1e-9),
        }
        pack(
            recipe.data.path,
            out,
            rows,
            split=split,
            about=about,
            overwrite=overwrite,
            progress=lambda done, total: progress("pack", done, total),
        )
    found = json.loads((out / "hot_rows.json").read_text(encoding="utf-8"))
    return {"kind": "packed", "path": str(out), "seconds": time.perf_counter() - started, **found}


def _beside(
    recipe: Recipe, source: SplitBinarySource, tables: Sequence[Table], moments: Sequence[Moment]
) -> dict[str, int]:
    """Bytes per row that a model with several tables of the same ids, such as `WideDeep`, has beside a table's own.

    Where such a table has rows of two dtypes, of its first ones.
    """
    with tables_on_meta():
        model = new_model(recipe, source)
    kept = moments_by_table(model, recipe)

    def row(table: Table, of: Sequence[Moment]) -> int:
        return tile_bytes(table, Tile(table.name, range(1), range(table.dim), 0), of)

    total = Counter[str]()
    for table, (_, own) in zip(plan_tables(model), names_in_plans(model), strict=True):
        total[own] += row(table, kept[table.name])
    return {t.name: max(total[t.name] - row(t, moments), 0) for t in tables}


def recipe_in(file: str | Path, data: str | None = None) -> Recipe:
    """The recipe in a file, perhaps with another path of the data."""
    if not exists(file):
        raise RecipeError(f"{file} does not exist; give a recipe, which says what a row of each table takes")
    if isinstance(place := location(str(file)), Path):
        import_from(place.parent)
    recipe = Recipe.from_dict(load(str(file)))
    return recipe if data is None else replace(recipe, data=replace(recipe.data, path=data))


def print_packed(console: Console, found: Mapping[str, Any]) -> None:
    """Print what `pack_by_popularity` made."""
    console.print(found["path"], style="table.title", soft_wrap=True)
    table = RichTable()
    table.add_column("table", overflow="fold")
    for name in ("rows", "hot rows"):
        table.add_column(name, justify="right")
    for entry in found["tables"]:
        table.add_row(entry["table"], f"{entry['rows']:,}", f"{entry['hot_rows']:,}")
    console.print(table)
    console.print(
        f"hot rows have {found['hot_accesses']:.1%} of the accesses; "
        f"{found['hot_samples'] / found['samples']:.1%} of {found['samples']:,} samples are hot, with "
        f"{size(found['hot_bytes'])} of {size(found['budget'])}; accesses were counted in "
        f"{found['counted_samples']:,} samples; {found['seconds']:.1f} s",
        soft_wrap=True,
    )
