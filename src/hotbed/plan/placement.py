"""Decide which rank owns which rows: `make_plan` cuts tables by the schemes of the literature and places the tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from hotbed.errors import PlanError, did_you_mean
from hotbed.optim import Moment
from hotbed.plan.balance import place
from hotbed.plan.cost import Cost, gib, rank_costs, tile_bytes, tile_load
from hotbed.plan.tiling import Plan, Tier, Tile, WireFormat, column_unit
from hotbed.specs import Table, is_int


@dataclass(frozen=True)
class Cut:
    """How a table is cut.

    Parameters
    ----------
    rows
        Number of row parts, every ``rows``-th row each; they go to ranks that follow each other, so with as many parts
        as a node has ranks the rows of a column part stay inside a node. 0, and at most: as many as there are ranks.
    cols
        Number of column parts, as equal as multiples of 16 columns (128 of int8 rows) allow, and at most as many as
        there are such multiples. 0: as many as there are ranks.
    replicated
        Whether all ranks read a copy of all rows.
    hot_rows
        The first rows, the most popular ones, of which all ranks read a copy while the others are cut; a table of
        no more rows is copied whole.
    tier
        Memory of the rows, but for hot ones: the compute device's, or ``"host"`` or ``"disk"``, where rows come to be
        when they are trained.
    cache_rows
        Rows of a cache in memory before each tile that is not in the device's memory.
    """

    rows: int = 1
    cols: int = 1
    replicated: bool = False
    hot_rows: int = 0
    tier: Tier = "device"
    cache_rows: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 0), ("cols", 0), ("hot_rows", 0), ("cache_rows", 0)):
            value = getattr(self, name)
            if not is_int(value) or value < least:
                raise PlanError(f"a cut has {name} {value!r}, must be an integer of at least {least}")
        if self.tier not in get_args(Tier):
            raise PlanError(f"a cut has tier {self.tier!r}, must be one of {', '.join(get_args(Tier))}")


SCHEMES: Mapping[str, Cut] = {
    "table": Cut(),
    "row": Cut(rows=0),
    "column": Cut(cols=0),
    "grid": Cut(rows=2, cols=2),
    "dp": Cut(replicated=True),
}
"""The schemes by name; "dp" is data-parallel. To add one, list it here: nothing else knows their names."""


@dataclass(frozen=True)
class _Part:
    """Row parts of one column part: they go to ranks that follow each other."""

    table: Table
    rows: tuple[range, ...]
    cols: range
    replicated: bool
    tier: Tier = "device"
    cache_rows: int = 0

    def tiles(self, first: int, world_size: int) -> list[Tile]:
        """Its tiles, with the first on this rank."""
        found: list[Tile] = []
        for i, rows in enumerate(self.rows):
            owner = (first + i) % world_size
            readers = tuple(r for r in range(world_size) if r != owner) if self.replicated else ()
            cache_rows = 0 if self.tier == "device" else self.cache_rows
            found.append(Tile(self.table.name, rows, self.cols, owner, readers, self.tier, cache_rows))
        return found


def make_plan(
    tables: Sequence[Table],
    world_size: int,
    schemes: str | Cut | Mapping[str, str | Cut] = "table",
    *,
    ids: Mapping[str, float] | None = None,
    moments: Sequence[Moment] = (),
    capacity_bytes: int | None = None,
    wire: WireFormat | Mapping[str, WireFormat] = "rows",
) -> Plan:
    """Cut tables and place the tiles so that the busiest rank has as little load as can be found.

    Parameters
    ----------
    tables
        All tables of a model.
    world_size
        Number of ranks.
    schemes
        ``"table"``, ``"row"``, ``"column"``, ``"grid"``, ``"dp"`` or a `Cut` for all tables, or one by table; tables
        that are not named are not cut.
    ids
        By table, mean ids per sample, which is what decides the load of a tile (see `hotbed.plan.cost`); 1 by default.
    moments
        Moments that the optimizer keeps beside the rows: ``optimizer.rule.moments``.
    capacity_bytes
        What a rank can hold.
    wire
        What crosses the wire, for all tables or by table; see `Plan`.

    Raises
    ------
    PlanError
        If a scheme or table is unknown, or no placement is found that fits.
    """
    ids = ids or {}
    if not is_int(world_size) or world_size < 1:
        raise PlanError(f"world_size is {world_size!r}, must be an integer of at least 1")
    known = {t.name: t for t in tables}
    for what, named in (("schemes", schemes if isinstance(schemes, Mapping) else {}), ("ids", ids)):
        for name in named:
            if name not in known:
                raise PlanError(f"{what} name a table '{name}', which the model has not{did_you_mean(name, known)}")
    for name, mean in ids.items():
        if not (math.isfinite(mean) and mean >= 0):
            raise PlanError(f"ids of table '{name}' are {mean} per sample, must be finite and at least 0")
    parts: list[_Part] = []
    for table in tables:
        scheme = schemes.get(table.name, "table") if isinstance(schemes, Mapping) else schemes
        parts += _parts(table, _cut_of(scheme), world_size)
    tiles: list[Tile] = []
    loads = [Cost(0, 0.0)] * world_size
    several = [p for p in parts if len(p.rows) > 1 or p.replicated]
    for part in sorted(several, key=lambda p: -_work(p, ids)):
        own = part.tiles(_best_start(part, loads, ids, moments, capacity_bytes), world_size)
        added = rank_costs(own, [part.table], world_size, ids=ids, moments=moments)
        loads = [load.plus(more) for load, more in zip(loads, added, strict=True)]
        tiles += own
    single = [p for p in parts if p not in several]
    costs = [Cost(tile_bytes(p.table, p.tiles(0, world_size)[0], moments), _work(p, ids)) for p in single]
    names = [f"table '{p.table.name}', columns {p.cols.start} … {p.cols.stop - 1}," for p in single]
    for part, rank in zip(single, place(costs, loads, capacity_bytes, names), strict=True):
        tiles += part.tiles(rank, world_size)
    for rank, load in enumerate(rank_costs(tiles, tables, world_size, ids=ids, moments=moments)):
        if capacity_bytes is not None and load.nbytes > capacity_bytes:
            raise PlanError(
                f"rank {rank} would hold {gib(load.nbytes)}, {gib(load.nbytes - capacity_bytes)} more than its "
                f"{gib(capacity_bytes)}; copy fewer rows, cut into more parts, use narrower rows, or more ranks"
            )
    order = {t.name: i for i, t in enumerate(tables)}
    tiles.sort(key=lambda t: (order[t.table], t.cols.start, t.rows.start))
    by_table: Mapping[str, WireFormat] = {}
    if isinstance(wire, Mapping):
        by_table = wire
    elif wire != "rows":
        by_table = dict.fromkeys(known, wire)
    return Plan(world_size, tuple(tiles), by_table)


def _cut_of(scheme: str | Cut) -> Cut:
    if isinstance(scheme, Cut):
        return scheme
    if scheme not in SCHEMES:
        raise PlanError(f"no scheme {scheme!r}; use {', '.join(SCHEMES)} or a Cut{did_you_mean(str(scheme), SCHEMES)}")
    return SCHEMES[scheme]


def _parts(table: Table, cut: Cut, world_size: int) -> list[_Part]:
    """Parts of a table, hot rows first."""
    unit = column_unit(table)
    units = -(-table.dim // unit)
    count = min(cut.cols or world_size, units)
    bounds = [min(units * i // count * unit, table.dim) for i in range(count + 1)]
    hot = min(cut.hot_rows, table.rows)
    found: list[_Part] = []
    if hot:
        found.append(_Part(table, (range(hot),), range(table.dim), replicated=True))
    step = min(cut.rows or world_size, world_size)
    rows = tuple(range(first, table.rows, step) for first in range(hot, min(hot + step, table.rows)))
    if rows:
        columns = [range(a, b) for a, b in pairwise(bounds)]
        found += [_Part(table, rows, cols, cut.replicated, cut.tier, cut.cache_rows) for cols in columns]
    return found


def _best_start(
    part: _Part, loads: Sequence[Cost], ids: Mapping[str, float], moments: Sequence[Moment], capacity: int | None
) -> int:
    """The rank from which on a part of several tiles fits, and leaves the busiest of its owners with the least load."""
    world_size, step = len(loads), len(part.rows)
    starts = range(0, world_size, step) if world_size % step == 0 else range(world_size)
    share = _work(part, ids) / step
    nbytes = tile_bytes(part.table, part.tiles(0, world_size)[0], moments)

    def burden(first: int) -> tuple[bool, float, int]:
        owners = [loads[(first + i) % world_size] for i in range(step)]
        most = max(load.nbytes for load in owners) + nbytes
        return capacity is not None and most > capacity, max(load.load for load in owners) + share, most

    return min(starts, key=burden)


def _work(part: _Part, ids: Mapping[str, float]) -> float:
    return sum(tile_load(part.table, t, ids.get(part.table.name, 1.0)) for t in part.tiles(0, len(part.rows)))
