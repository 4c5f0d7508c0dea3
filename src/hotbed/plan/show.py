"""Show a plan as people read it: each table's tiles, and what each rank has."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table as RichTable

from hotbed.plan.cost import Cost
from hotbed.plan.tiling import Plan, Tile, extent

_BAR = 20


def plan_view(plan: Plan, costs: Sequence[Cost]) -> Group:
    """Two tables for a console: tables with their cuts, and ranks with bytes and work (see `hotbed.plan.cost`)."""
    tables = RichTable(title="Tables", title_justify="left")
    tables.add_column("table")
    tables.add_column("rows × columns", justify="right")
    tables.add_column("cut")
    tables.add_column("owners")
    for name, tiles in plan.by_table.items():
        rows, cols = extent(tiles)
        tables.add_row(name, f"{rows:,} × {cols:,}", _cut(tiles), _owners(tiles))
    ranks = RichTable(title="Ranks", title_justify="left")
    for column in ("rank", "tiles", "memory"):
        ranks.add_column(column, justify="right")
    ranks.add_column("work")
    most = max(cost.work for cost in costs) or 1.0
    for rank, cost in enumerate(costs):
        held = sum(rank in tile.ranks for tile in plan.tiles)
        bar = "█" * round(_BAR * cost.work / most)
        ranks.add_row(str(rank), str(held), f"{cost.nbytes / 2**20:,.1f} MiB", f"{bar} {cost.work / most:.0%}")
    return Group(tables, ranks)


def _cut(tiles: Sequence[Tile]) -> str:
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


def _owners(tiles: Sequence[Tile]) -> str:
    owners = sorted({t.owner for t in tiles})
    if len(owners) > 2 and owners == list(range(owners[0], owners[-1] + 1)):
        return f"{owners[0]} … {owners[-1]}"
    return ", ".join(map(str, owners))
