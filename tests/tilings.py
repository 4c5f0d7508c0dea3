"""Random tilings: a table cut again and again, and the parts given to ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hotbed.plan import Plan, Tile
from hotbed.plan.tiling import column_unit
from hotbed.specs import Table


@st.composite
def rectangles(draw: st.DrawFn, rows: range, cols: range, unit: int, depth: int) -> list[tuple[range, range]]:
    """Rectangles that cover rows × columns: cut at a row, by strides or at a column, and the parts again."""
    cuts = ["rows", "strides"] * (len(rows) > 1) + ["columns"] * (len(cols) > unit)
    cut = draw(st.sampled_from(["none", *cuts])) if depth else "none"
    if cut == "rows":
        at = draw(st.integers(1, len(rows) - 1))
        parts = [(rows[:at], cols), (rows[at:], cols)]
    elif cut == "strides":
        step = draw(st.integers(2, min(4, len(rows))))
        parts = [(rows[first::step], cols) for first in range(step)]
    elif cut == "columns":
        at = unit * draw(st.integers(1, (len(cols) - 1) // unit))
        parts = [(rows, cols[:at]), (rows, cols[at:])]
    else:
        return [(rows, cols)]
    return [found for part in parts for found in draw(rectangles(*part, unit, depth - 1))]


@st.composite
def tilings(draw: st.DrawFn, tables: Sequence[Table], world_size: int, depth: int = 3) -> Plan:
    """Plans for these tables, each cut up to so many times: tiles in any order, with any owners and readers."""
    ranks = st.integers(0, world_size - 1)
    tiles: list[Tile] = []
    for table in tables:
        for rows, cols in draw(rectangles(range(table.rows), range(table.dim), column_unit(table), depth)):
            owner = draw(ranks)
            readers = draw(st.sets(ranks)) - {owner} if draw(st.booleans()) else ()
            tiles.append(Tile(table.name, rows, cols, owner, tuple(sorted(readers))))
    return Plan(world_size, tuple(draw(st.permutations(tiles))))
