"""Estimate the memory of training a recipe, by rank, without allocating a table: ``hotbed train --dry_run``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hotbed.cli.pages.plan_page import plan_grids
from hotbed.cli.pages.report_page import Columns, ReportTable, print_lines, print_table
from hotbed.config import Recipe
from hotbed.embed import plan_tables
from hotbed.errors import RecipeError
from hotbed.machine import resident_bytes
from hotbed.optim import Moment, SparseOptimizer
from hotbed.plan.cost import Cost, CostModel, tile_bytes
from hotbed.plan.tiling import Plan, Tile
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

_TIERS = ("device", "host", "disk")


def memory_plan(recipe: Recipe) -> dict[str, Any]:
    """Return the estimated bytes by table and tier, the size of the dense part, and, with several ranks, the plan."""
    source = open_source(recipe.data)
    if source.encoder is not None:
        source.encoder.assume_measured()
    for key, optimizer in sparse_components(recipe).items():
        if not issubclass(optimizer.load(), SparseOptimizer):
            raise RecipeError(f"{key}: got {optimizer.class_path}, expected a class of hotbed.optim")
    device = resolve_device(recipe.train.device)
    with torch.device("meta"):
        model = new_model(recipe, source)
    tables = plan_tables(model)
    moments = moments_by_table(model, recipe)
    parameters = list(model.parameters())
    plan = plan_recipe(model, recipe, read_world().size, source)
    forecast = Forecast(recipe, source, plan, tables, moments)
    computes = "device" if device.type == "cuda" else "host"
    entries = [_table_plan(table, plan, computes, moments[table.name]) for table in tables]
    ranks: dict[str, Any] = {}
    if plan.world_size > 1:
        costs = CostModel(Workload.of(tables, moments=moments), plan.world_size).ranks(plan).costs
        ranks = {"plan": plan.to_dict(), "ranks": [{"bytes": cost.nbytes, "load": cost.load} for cost in costs]}
    return {
        "tables": entries,
        **ranks,
        "memory": [
            {"tiers": r.tiers, "parts": r.parts, "peak_bytes": {tier: r.peak(tier) for tier in ("device", "host")}}
            for r in map(forecast.of_rank, range(plan.world_size))
        ],
        "idle_settings": idle_settings(recipe, plan, tables, device),
        "free_bytes": _free_bytes(device, recipe.memory.directory),
        "fixes": {tier: _fixes(recipe, plan, tier) for tier in ("host", "disk", "device")},
        "table_bytes": sum(e["weight_bytes"] + e["moment_bytes"] for e in entries),
        "dense_parameters": sum(p.numel() for p in parameters),
        "dense_bytes": sum(p.nbytes for p in parameters),
    }


def _free_bytes(device: torch.device, folder: str | None) -> dict[str, int | None]:
    path = Path(folder or tempfile.gettempdir()).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    host = available_bytes(torch.device("cpu"))
    if host is not None:  # the forecast includes the memory that the processes already hold, so count it as free
        host += resident_bytes() * read_world().local_size
    found = {"host": host, "disk": shutil.disk_usage(existing).free}
    return found | {"device": available_bytes(device)} if device.type == "cuda" else found


def _fixes(recipe: Recipe, plan: Plan, tier: str) -> str:
    memory, train = recipe.memory, recipe.train
    if tier == "disk":
        return "set memory.directory to a larger disk, or train fewer steps"
    tiers = {tile.tier for tile in plan.tiles}
    fixes = ["set memory.tier to disk"] if "host" in tiers and tier == "host" else []
    if "device" in tiers:
        fixes = ["set memory.tier to host or disk (where untrained rows need no memory)"]
    if memory.cache_rows:
        fixes.append(f"lower memory.cache_rows (now {memory.cache_rows:,})")
    return ", ".join([*fixes, f"lower train.batch_size (now {train.batch_size:,})", "or use more hosts"])


def _table_plan(table: Table, plan: Plan, computes: str, moments: Sequence[Moment]) -> dict[str, Any]:
    used = {computes if tile.tier == "device" else tile.tier for tile in plan.by_table[table.name]}
    whole = Tile(table.name, range(table.rows), range(table.dim), 0)
    weights = tile_bytes(table, whole)
    return {
        "name": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "tier": " + ".join(name for name in _TIERS if name in used),
        "weight_bytes": weights,
        "moment_bytes": tile_bytes(table, whole, moments) - weights,
    }


def print_memory_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Print the estimate of `memory_plan`."""
    total = {"name": "total", "tier": "", "dim": ""}
    total |= {key: sum(e[key] for e in plan["tables"]) for key in ("rows", "weight_bytes", "moment_bytes")}
    columns: Columns = {
        "table": lambda e: e["name"],
        "tier": lambda e: e["tier"],
        "rows": lambda e: f"{e['rows']:,}",
        "dim": lambda e: str(e["dim"]),
        "weights": lambda e: size(e["weight_bytes"]),
        "moments": lambda e: size(e["moment_bytes"]),
    }
    print_table(console, ReportTable.of("Embedding tables", [*plan["tables"], total], columns, left=("tier",)))
    console.print(f"tables: {size(plan['table_bytes'])} in all")
    if "plan" in plan:
        costs = [Cost(rank["bytes"], rank["load"]) for rank in plan["ranks"]]
        for table in plan_grids(Plan.from_dict(plan["plan"]), costs):
            print_table(console, table)
    console.print(f"dense parameters: {plan['dense_parameters']:,} ({size(plan['dense_bytes'])})")
    ranks = plan["memory"]
    rows = [
        [str(rank), *(size(found["tiers"][tier]) for tier in _TIERS), size(sum(found["peak_bytes"].values()))]
        for rank, found in enumerate(ranks)
    ]
    title, head = "Rows and moments by tier, once trained", ("rank", *_TIERS, "peak of memory")
    print_table(console, ReportTable(title, head, rows))
    most = max(ranks, key=lambda found: sum(found["peak_bytes"].values()))
    console.print(
        "peak of the fullest rank: " + ", ".join(f"{part} {size(n)}" for part, n in most["parts"].items() if n)
    )
    lines: list[str] = []
    for tier, available in plan["free_bytes"].items():
        needed = sum(found["tiers" if tier == "disk" else "peak_bytes"][tier] for found in ranks)
        if available is not None and needed > available:
            where = "disk space" if tier == "disk" else f"{tier} memory"
            own = ", including this process" * (tier == "host")
            problem = f"all ranks need {size(needed)} of {where}, and {size(available)} are free{own}"
            lines.append(f"this recipe does not fit: {problem}. To make it fit, {plan['fixes'][tier]}")
    print_lines(console, (*lines, *(f"warning: {message}" for message in plan["idle_settings"])))
