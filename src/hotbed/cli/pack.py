"""Choose hot rows for the fast memory, and split a dataset into hot and cold samples: ``hotbed pack``."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hotbed.checkpoint.storage import exists
from hotbed.cli.arguments import Parser, add_json, add_parameters, console, read_recipe, save_json
from hotbed.cli.pages.report_page import ReportTable, print_table
from hotbed.config import Recipe
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
    parser.add_argument(
        "recipe", help="Recipe file. It names the data, and determines the bytes per row of each table."
    )
    parser.add_argument("out", help="Dataset directory to create.")
    parser.add_argument("--data", help="Dataset to pack (default: the recipe's data).")
    add_parameters(parser, pack_by_popularity, skip=("recipe", "out", "console"))
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Pack, and print the number of hot rows."""
    options = dict(vars(parsed))
    file, data, out, json = (options.pop(name) for name in ("recipe", "data", "out", "json"))
    recipe = recipe_in(location(file), data)
    found = pack_by_popularity(recipe, local("OUT", out), console(stderr=True), **options)
    print_packed(console(), found)
    save_json(json, found)


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
        Bytes of device memory for hot rows and their moments.
    sample
        Share of the samples in which accesses are counted. 1 counts accesses in all samples.
    whole_bytes
        Tables of up to this many bytes are hot as a whole, before any other row is chosen.
    overwrite
        Replace ``out`` if it is a dataset.
    """
    started = time.perf_counter()
    source = new_source(recipe.data)
    if not isinstance(source, SplitBinarySource):
        got = f"{recipe.data.source.class_path}, expected hotbed.data.SplitBinarySource"
        raise RecipeError(f"data.source: got {got}. Prepare the data with hotbed prepare --format split_binary")
    split, tables = recipe.data.train_split, tables_of(source, recipe.data)
    moments = moments_of(recipe.sparse_optimizer)
    extra = _extra_row_bytes(recipe, source, tables, moments)
    with StageProgress(console) as progress:
        counts = count_accesses(source, split, sample=sample, progress=partial(progress, "accesses"))
        known = {name: Counted(torch.from_numpy(c), counts.samples) for name, c in counts.counted.items()}
        rows = hot_rows(tables, budget, popularity=known, moments=moments, extra_bytes=extra, whole_bytes=whole_bytes)
        hot = [Tile(t.name, range(rows[t.name]), range(t.dim), 0) for t in tables if rows[t.name]]
        by_name = {t.name: t for t in tables}
        accesses = max(sum(counts.accesses.values()) / counts.samples, 1e-9)
        about = {
            "budget": budget,
            "hot_bytes": sum(tile_bytes(by_name[t.table], t, moments) + len(t.rows) * extra[t.table] for t in hot),
            "sample": sample,
            "counted_samples": counts.samples,
            "hot_accesses": sum(known[t].accesses(n) for t, n in rows.items()) / accesses,
        }
        options: dict[str, Any] = {"split": split, "about": about, "overwrite": overwrite}
        pack(recipe.data.path, out, rows, **options, progress=partial(progress, "pack"))
    found = json.loads((out / "hot_rows.json").read_text(encoding="utf-8"))
    return {"kind": "packed", "path": str(out), "seconds": time.perf_counter() - started, **found}


def _extra_row_bytes(
    recipe: Recipe, source: SplitBinarySource, tables: Sequence[Table], moments: Sequence[Moment]
) -> dict[str, int]:
    """For each table of the source, return the bytes per row that a model needs in addition to the row itself.

    For example, `WideDeep` has a second table with the same ids for each table.
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
    """Read a recipe, and replace the path of its data if ``data`` is set."""
    if not exists(file):
        raise RecipeError(f"{file} does not exist. Pass a recipe, which determines the bytes per row of each table")
    recipe = read_recipe(file)
    return recipe if data is None else replace(recipe, data=replace(recipe.data, path=data))


def print_packed(console: Console, found: Mapping[str, Any]) -> None:
    """Print the results of `pack_by_popularity`."""
    rows = [[entry["table"], f"{entry['rows']:,}", f"{entry['hot_rows']:,}"] for entry in found["tables"]]
    print_table(console, ReportTable(found["path"], ("table", "rows", "hot rows"), rows))
    lines = [f"hot rows have {found['hot_accesses']:.1%} of the accesses"]
    hot = f"{found['hot_samples'] / found['samples']:.1%} of {found['samples']:,} samples are hot"
    lines += [f"{hot}, with {size(found['hot_bytes'])} of {size(found['budget'])}"]
    lines += [f"accesses were counted in {found['counted_samples']:,} samples", f"{found['seconds']:.1f} s"]
    console.print("; ".join(lines), soft_wrap=True)
