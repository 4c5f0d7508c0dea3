"""Draw the pages' pictures from hotbed's own plans: ``python docs/pictures.py`` rewrites them beside this file."""

from __future__ import annotations

from pathlib import Path

from hotbed import Table, make_plan
from hotbed.commands.svg import WIDTH, box, legend, svg, text
from hotbed.plan import Plan

DOCS = Path(__file__).resolve().parent
RANKS = 4
COLORS = {
    "rank 0": "#4878a8",
    "rank 1": "#d98e32",
    "rank 2": "#59a14f",
    "rank 3": "#b07aa1",
    "copies on all ranks": "#bbbbbb",
}
TABLES = (Table("users", rows=12, dim=64), Table("items", rows=9, dim=64), Table("days", rows=3, dim=64))
SCHEMES = {
    "table": "whole tables",
    "row": "cut by rows",
    "column": "cut by columns",
    "grid": "cut by both",
    "dp": "copied",
}
_BAND, _COLUMN = 13, 2.6


def plans() -> str:
    """Draw what each scheme makes of three tables on four ranks: a band per row, a color per owner."""
    wide = WIDTH / len(SCHEMES)
    parts = legend(COLORS, 10, 18)
    for i, (scheme, words) in enumerate(SCHEMES.items()):
        left = i * wide + 10
        parts += [text(left, 52, f"{scheme}: {words}", size=14)]
        parts += _plan(make_plan(TABLES, RANKS, scheme), left)
    drawn = svg(parts, 66 + sum(table.rows * _BAND + 26 for table in TABLES), "three tables on four ranks, by scheme")
    # A file has no page around it that gives font and background.
    return drawn.replace("<svg ", '<svg font-family="sans-serif" style="background:white" ', 1)


def _plan(plan: Plan, left: float) -> list[str]:
    parts: list[str] = []
    top = 66.0
    for table in TABLES:
        for tile in plan.by_table[table.name]:
            owner = "copies on all ranks" if tile.readers else f"rank {tile.owner}"
            about = f"{table.name}, columns {tile.cols.start} to {tile.cols.stop}: {owner}"
            x, across = left + tile.cols.start * _COLUMN, len(tile.cols) * _COLUMN
            parts += [box(x, top + row * _BAND, across, _BAND, COLORS[owner], about) for row in tile.rows]
        top += table.rows * _BAND
        parts.append(text(left, top + 14, f"{table.name}, {table.rows} rows × {table.dim}", size=11))
        top += 26
    return parts


PICTURES = {"plans.svg": plans}
"""Who draws each picture."""


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw() + "\n", encoding="utf-8")
