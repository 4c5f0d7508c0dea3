"""Show the memory that a recipe needs, and each rank's share of it, before any table is allocated.

``hotbed train --dry_run``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table as RichTable

from hotbed.config import Recipe
from hotbed.embed import plan_tables
from hotbed.errors import RecipeError
from hotbed.machine import resident_bytes
from hotbed.optim import Moment, SparseOptimizer
from hotbed.plan.cost import Cost, CostModel, tile_bytes
from hotbed.plan.tiling import Plan, Tile, extent
from hotbed.plan.workload import Workload
from hotbed.specs import Table
from hotbed.store.memory import available_bytes
from hotbed.train.numerics import resolve_device
from hotbed.train.parameter_groups import moments_by_table, sparse_components
from hotbed.train.ranks.process_group import read_world
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.idle_settings import idle_settings
from hotbed.train.runs.memory_estimate import Forecast
from hotbed.train.runs.plan_search import plan_recipe
from hotbed.train.runs.report import size

_BAR = 20


def plan_view(plan: Plan, costs: Sequence[Cost]) -> Group:
    """Two tables for a console: tables with their cuts, and ranks with bytes and load (see `hotbed.plan.cost`)."""
    tables = RichTable(title="Tables", title_justify="left")
    tables.add_column("table")
    tables.add_column("rows × columns", justify="right")
    tables.add_column("cut")
    tables.add_column("owners")
    for name, tiles in plan.by_table.items():
        rows, cols = extent(tiles)
        tables.add_row(name, f"{rows:,} × {cols:,}", cut_of(tiles), owners_of(tiles))
    ranks = RichTable(title="Ranks", title_justify="left")
    for column in ("rank", "tiles", "memory"):
        ranks.add_column(column, justify="right")
    ranks.add_column("load")
    most = max(cost.load for cost in costs) or 1.0
    for rank, cost in enumerate(costs):
        held = sum(rank in tile.ranks for tile in plan.tiles)
        bar = "█" * round(_BAR * cost.load / most)
        ranks.add_row(str(rank), str(held), f"{cost.nbytes / 2**20:,.1f} MiB", f"{bar} {cost.load / most:.0%}")
    return Group(tables, ranks)


def cut_of(tiles: Sequence[Tile]) -> str:
    """Say into what parts a table is cut, and how many ranks have copies."""
    row_cuts, col_cuts = {t.rows for t in tiles}, {t.cols for t in tiles}
    parts: list[str] = []
    if len(row_cuts) > 1:
        parts.append(f"{len(row_cuts)} row parts")
    if len(col_cuts) > 1:
        parts.append(f"{len(col_cuts)} column parts")
    copied = [t for t in tiles if t.readers]
    if copied:
        rows = sum(len(t.rows) for t in copied if t.cols.start == 0)
        copies = max(len(t.ranks) for t in copied)
        parts.append(f"{'all' if len(copied) == len(tiles) else f'{rows:,}'} rows on {copies} ranks")
    return ", ".join(parts) or "whole"


def owners_of(tiles: Sequence[Tile]) -> str:
    """Name the ranks that own a table's tiles."""
    owners = sorted({t.owner for t in tiles})
    if len(owners) > 2 and owners == list(range(owners[0], owners[-1] + 1)):
        return f"{owners[0]} … {owners[-1]}"
    return ", ".join(map(str, owners))


def memory_plan(recipe: Recipe) -> dict[str, Any]:
    """Bytes by table and tier, and dense parameters, without allocating a table; of several ranks their plan, too.

    The plan is that of as many processes as torchrun started, or that of the recipe's file.

    Raises
    ------
    RecipeError
        If the sparse optimizer is not one.
    """
    source = open_source(recipe.data)
    if source.encoder is not None:
        source.encoder.assume_measured()
    for key, optimizer in sparse_components(recipe).items():
        if not issubclass(optimizer.load(), SparseOptimizer):
            raise RecipeError(f"{key} is {optimizer.class_path}, not one of hotbed.optim")
    device = resolve_device(recipe.train.device)
    with torch.device("meta"):
        model = new_model(recipe, source)
    tables = plan_tables(model)
    moments = moments_by_table(model, recipe)
    parameters = list(model.parameters())
    plan = plan_recipe(model, recipe, read_world().size, source)
    entries = [_table_plan(table, plan, device.type, moments[table.name]) for table in tables]
    return {
        "tables": entries,
        **_of_ranks(plan, tables, moments),
        "memory": _memory(Forecast(recipe, source, plan, tables, moments), plan),
        "idle_settings": idle_settings(recipe, plan, tables, device),
        "free_bytes": _free(device, recipe.memory.directory),
        "fixes": {place: _fixes(recipe, plan, place) for place in ("host", "disk", "device")},
        "table_bytes": sum(e["weight_bytes"] + e["moment_bytes"] for e in entries),
        "dense_parameters": sum(p.numel() for p in parameters),
        "dense_bytes": sum(p.nbytes for p in parameters),
    }


def _memory(forecast: Forecast, plan: Plan) -> list[dict[str, Any]]:
    """Bytes of each rank: of rows by tier, of parts of memory, and at the peak."""
    ranks = [forecast.of_rank(rank) for rank in range(plan.world_size)]
    return [
        {"tiers": r.tiers, "parts": r.parts, "peak_bytes": {place: r.peak(place) for place in ("device", "host")}}
        for r in ranks
    ]


def _of_ranks(plan: Plan, tables: Sequence[Table], moments: Mapping[str, Sequence[Moment]]) -> dict[str, Any]:
    """The plan of several ranks, and the bytes and load of each."""
    if plan.world_size == 1:
        return {}
    costs = CostModel(Workload.of(tables, moments=moments), plan.world_size).ranks(plan).costs
    return {"plan": plan.to_dict(), "ranks": [{"bytes": cost.nbytes, "load": cost.load} for cost in costs]}


def _free(device: torch.device, directory: str | None) -> dict[str, int | None]:
    """Bytes that this run can have: of the host's memory, of the disk for rows, and of a GPU's memory.

    Memory that the run's processes hold already is counted as theirs, because the forecast includes whole processes.
    """
    folder = Path(directory or tempfile.gettempdir()).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    host = available_bytes(torch.device("cpu"))
    if host is not None:
        host += resident_bytes() * read_world().local_size
    found = {"host": host, "disk": shutil.disk_usage(there).free}
    return found | {"device": available_bytes(device)} if device.type == "cuda" else found


def _fixes(recipe: Recipe, plan: Plan, place: str) -> str:
    """Name the settings of this recipe with which a run takes less of a memory, as the end of a sentence."""
    memory, train = recipe.memory, recipe.train
    if place == "disk":
        return "give another memory.directory, or train fewer steps"
    tiers = {tile.tier for tile in plan.tiles}
    fixes: list[str] = []
    if "device" in tiers:
        fixes.append("set memory.tier to host or disk (rows that are not trained take no room there)")
    elif "host" in tiers and place == "host":
        fixes.append("set memory.tier to disk")
    if memory.cache_rows:
        fixes.append(f"lower memory.cache_rows (now {memory.cache_rows:,})")
    return ", ".join([*fixes, f"lower train.batch_size (now {train.batch_size:,})", "or use more hosts"])


def _table_plan(table: Table, plan: Plan, device: str, moments: Sequence[Moment]) -> dict[str, Any]:
    computes = "device" if device == "cuda" else "host"
    used = {computes if tile.tier == "device" else tile.tier for tile in plan.by_table[table.name]}
    tier = " + ".join(name for name in ("device", "host", "disk") if name in used)
    whole = Tile(table.name, range(table.rows), range(table.dim), 0)
    weights = tile_bytes(table, whole)
    return {
        "name": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "tier": tier,
        "weight_bytes": weights,
        "moment_bytes": tile_bytes(table, whole, moments) - weights,
    }


def print_memory_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Print `memory_plan`."""
    table = RichTable(title="Embedding tables", title_justify="left", show_footer=True)
    entries = plan["tables"]
    totals = [sum(e[key] for e in entries) for key in ("rows", "weight_bytes", "moment_bytes")]
    table.add_column("table", footer="total")
    table.add_column("tier", footer="")
    table.add_column("rows", justify="right", footer=f"{totals[0]:,}")
    table.add_column("dim", justify="right")
    table.add_column("weights", justify="right", footer=size(totals[1]))
    table.add_column("moments", justify="right", footer=size(totals[2]))
    for e in entries:
        weights, moments = size(e["weight_bytes"]), size(e["moment_bytes"])
        table.add_row(e["name"], e["tier"], f"{e['rows']:,}", str(e["dim"]), weights, moments)
    console.print(table)
    console.print(f"tables: {size(plan['table_bytes'])} in all")
    if "plan" in plan:
        costs = [Cost(rank["bytes"], rank["load"]) for rank in plan["ranks"]]
        console.print(plan_view(Plan.from_dict(plan["plan"]), costs))
    console.print(f"dense parameters: {plan['dense_parameters']:,} ({size(plan['dense_bytes'])})")
    print_forecast(console, plan["memory"], plan["free_bytes"], plan["fixes"])
    for message in plan["idle_settings"]:
        console.print(f"warning: {message}", soft_wrap=True)


def print_forecast(
    console: Console, ranks: Sequence[Mapping[str, Any]], free: Mapping[str, int | None], fixes: Mapping[str, str]
) -> None:
    """Print where rows will be, the parts of the largest rank's memory, and a warning if there is too little memory."""
    tiers = ("device", "host", "disk")
    rows = RichTable(title="Rows and moments by tier, as trained", title_justify="left")
    for column in ("rank", *tiers, "peak of memory"):
        rows.add_column(column, justify="right")
    for rank, found in enumerate(ranks):
        rows.add_row(
            str(rank), *(size(found["tiers"][tier]) for tier in tiers), size(sum(found["peak_bytes"].values()))
        )
    console.print(rows)
    most = max(ranks, key=lambda found: sum(found["peak_bytes"].values()))
    console.print("at its peak: " + ", ".join(f"{part} {size(n)}" for part, n in most["parts"].items() if n))
    for place, there in free.items():
        needed = sum(found["tiers" if place == "disk" else "peak_bytes"][place] for found in ranks)
        if there is not None and needed > there:
            where = "on disk" if place == "disk" else f"of {place} memory"
            own = " for them, including what this process already takes" * (place == "host")
            console.print(
                f"this does not fit: {size(needed)} {where} are needed by all ranks of this plan, and {size(there)} "
                f"are free here{own}; {fixes[place]}",
                soft_wrap=True,
            )
