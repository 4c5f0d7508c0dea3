"""Draw the pages' pictures from hotbed's own plans: ``python docs/pictures.py`` rewrites them beside this file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hotbed import Table, make_plan
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
WIDTH = 1180
_BAND, _COLUMN = 13, 2.6


def plans() -> str:
    """Draw what each scheme makes of three tables on four ranks: a band per row, a color per owner."""
    wide = WIDTH / len(SCHEMES)
    parts: list[str] = []
    x = 10
    for name, color in COLORS.items():
        parts += [box(x, 8, 12, 12, color, name), text(x + 17, 18, name)]
        x += 34 + 7 * len(name)
    for i, (scheme, words) in enumerate(SCHEMES.items()):
        left = i * wide + 10
        parts += [text(left, 52, f"{scheme}: {words}", size=14)]
        parts += _plan(make_plan(TABLES, RANKS, scheme), left)
    height = 66 + sum(table.rows * _BAND + 26 for table in TABLES)
    return (
        f'<svg font-family="sans-serif" style="background:white" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="three tables on four ranks, by scheme">{"".join(parts)}</svg>'
    )


def box(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    """Return a filled rectangle with a hover text."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}" '
        f'stroke="white" stroke-width="0.4"><title>{escape(title)}</title></rect>'
    )


def text(x: float, y: float, words: str, size: int = 12) -> str:
    """Return a text that begins at ``x``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="start" font-size="{size}" fill="#222222">{escape(words)}</text>'


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
