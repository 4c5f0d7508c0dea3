"""Decide which rank owns which rows: `make_plan` cuts tables by the schemes of the literature and places the tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import numpy as np

from hotbed.errors import PlanError, did_you_mean
from hotbed.optim import Moment
from hotbed.plan.balance import Placed, best_placement
from hotbed.plan.cost import CostModel, gib, tile_bytes
from hotbed.plan.tiling import Plan, Tier, Tile, WireFormat, column_unit
from hotbed.plan.workload import Workload
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

AUTO = "auto"
"""In the place of a scheme: whatever the search finds (`hotbed.plan.search`)."""

Scheme = str | Cut
Schemes = Scheme | Mapping[str, Scheme]
"""For all tables; or by table, by name or pattern."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """Row parts of one column part of a table: they go to ranks that follow each other.

    Attributes
    ----------
    lanes
        Into how many parts the columns of its rows are cut.
    """

    table: Table
    rows: tuple[range, ...]
    cols: range
    lanes: int = 1
    replicated: bool = False
    tier: Tier = "device"
    cache_rows: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"table '{self.table.name}', columns {self.cols.start} … {self.cols.stop - 1},"

    @property
    def shape(self) -> tuple[object, ...]:
        """What its cost depends on: parts of one shape cost the same."""
        rows = self.rows[0]
        residue = rows.start if rows.step == 1 or self.table.fp32_rows else 0
        return (
            *(self.table.name, len(self.rows), len(rows), rows.stop, rows.step, residue),
            *(len(self.cols), self.lanes, self.replicated, self.tier, self.cache_rows),
        )

    def tiles(self, first: int, world_size: int) -> list[Tile]:
        """Its tiles, with the first on this rank."""
        found: list[Tile] = []
        for i, rows in enumerate(self.rows):
            owner = (first + i) % world_size
            readers = (*range(owner), *range(owner + 1, world_size)) if self.replicated else ()
            cache_rows = 0 if self.tier == "device" else self.cache_rows
            found.append(Tile(self.table.name, rows, self.cols, owner, readers, self.tier, cache_rows))
        return found

    def split(self) -> list[Part]:
        """Its row parts, each by itself."""
        return [
            Part(self.table, (r,), self.cols, self.lanes, self.replicated, self.tier, self.cache_rows)
            for r in self.rows
        ]


def make_plan(
    tables: Sequence[Table],
    world_size: int,
    schemes: Schemes = "table",
    *,
    ids: Mapping[str, float] | None = None,
    moments: Sequence[Moment] | Mapping[str, Sequence[Moment]] = (),
    capacity_bytes: int | None = None,
    wire: WireFormat | Mapping[str, WireFormat] = "rows",
    **search: Any,
) -> Plan:
    """Cut tables and place the tiles so that the busiest rank has as little load as can be found.

    Parameters
    ----------
    tables
        All tables of a model.
    world_size
        Number of ranks.
    schemes
        ``"table"``, ``"row"``, ``"column"``, ``"grid"``, ``"dp"``, ``"auto"`` or a `Cut` for all tables; or one by
        table, whose keys may be patterns (``{"users": "row", "*": "auto"}``); tables that are not named are not cut.
        ``"auto"`` searches for the cut that makes a step fastest, see `hotbed.plan.search`.
    ids
        By table, mean ids per sample, which is what decides the load of a tile (see `hotbed.plan.cost`); 1 by default.
    moments
        Moments that the optimizer keeps beside the rows, for all tables or by table: ``optimizer.rule.moments``.
    capacity_bytes
        What a rank can hold in its device's memory; with ``"auto"`` by default what the hardware has.
    wire
        What crosses the wire, for all tables or by table; see `Plan`.
    **search
        With ``"auto"``: what `hotbed.plan.search.plan_of` takes, such as ``batch_size`` and ``hardware``.

    Raises
    ------
    PlanError
        If a scheme or table is unknown, no table can be cut as a scheme says, or no placement is found that fits.
    """
    if not is_int(world_size) or world_size < 1:
        raise PlanError(f"world_size is {world_size!r}, must be an integer of at least 1")
    cuts = cuts_of(tables, schemes)
    by_table: Mapping[str, WireFormat] = wire if isinstance(wire, Mapping) else {}
    if not isinstance(wire, Mapping) and wire != "rows":
        by_table = dict.fromkeys((t.name for t in tables), wire)
    if any(cut == AUTO for cut in cuts.values()):
        from hotbed.plan.search import plan_of  # which searches by what is here

        return plan_of(
            tables, world_size, cuts, ids=ids, moments=moments, capacity_bytes=capacity_bytes, wire=by_table, **search
        )
    if search:
        raise TypeError(f"make_plan() takes '{next(iter(search))}' with the scheme 'auto' only")
    given = cast("dict[str, Cut]", cuts)
    refuse_uncut(tables, given, world_size, named=isinstance(schemes, Mapping))
    model = CostModel(Workload.of(tables, ids=ids, moments=moments), world_size)
    parts = [part for table in tables for part in parts_of(table, given[table.name], world_size)]
    return Plan(world_size, in_order(place_parts(parts, model, capacity_bytes).tiles(), tables), by_table)


def cuts_of(tables: Iterable[Table], schemes: Schemes) -> dict[str, Cut | Literal["auto"]]:
    """Return the cut of each table, or ``"auto"``; the first key that matches a table counts.

    Raises
    ------
    PlanError
        If a scheme is none, or a key matches no table.
    """
    names = [t.name for t in tables]
    if not isinstance(schemes, Mapping):
        cut = _cut_of(schemes)
        return {name: cut for name in names}
    cuts = {key: _cut_of(scheme) for key, scheme in schemes.items()}
    for key in cuts:
        if not any(key == name or fnmatchcase(name, key) for name in names):
            raise PlanError(f"schemes name a table '{key}', which the model has not{did_you_mean(key, names)}")
    found: dict[str, Cut | Literal["auto"]] = {}
    for name in names:
        matching = [name] if name in cuts else [key for key in cuts if fnmatchcase(name, key)]
        found[name] = cuts[matching[0]] if matching else Cut()
    return found


def _cut_of(scheme: Scheme) -> Cut | Literal["auto"]:
    if isinstance(scheme, Cut):
        return scheme
    if scheme == AUTO:
        return "auto"
    if scheme not in SCHEMES:
        raise PlanError(
            f"no scheme {scheme!r}; use {', '.join(SCHEMES)}, {AUTO} or a Cut"
            f"{did_you_mean(str(scheme), [*SCHEMES, AUTO])}"
        )
    return SCHEMES[scheme]


def refuse_uncut(tables: Iterable[Table], cuts: Mapping[str, Cut], world_size: int, *, named: bool) -> None:
    """Raise `PlanError` if columns are to be cut, and are not: of a table that is named, or of all of them."""
    asked = [t for t in tables if t.name in cuts and cuts[t.name].cols != 1 and not cuts[t.name].replicated]
    narrow = [t for t in asked if t.dim <= column_unit(t)]
    if world_size == 1 or not narrow or (not named and len(narrow) < len(asked)):
        return
    table = max(narrow, key=lambda t: t.dim / column_unit(t))
    unit = column_unit(table)
    raise PlanError(
        f"table '{table.name}' of {table.dim} {table.dtype} columns cannot be cut by columns: parts are multiples of "
        f"{unit} columns, so that sums keep their order, and tables of at least {unit + 1} columns can be cut; cut it "
        "by rows, or raise its dim"
    )


def parts_of(table: Table, cut: Cut, world_size: int) -> list[Part]:
    """Parts of a table, hot rows first."""
    unit = column_unit(table)
    units = -(-table.dim // unit)
    count = min(cut.cols or world_size, units)
    bounds = [min(units * i // count * unit, table.dim) for i in range(count + 1)]
    hot = min(cut.hot_rows, table.rows)
    found: list[Part] = []
    if hot:
        found.append(Part(table, (range(hot),), range(table.dim), replicated=True))
    step = min(cut.rows or world_size, world_size)
    rows = tuple(range(first, table.rows, step) for first in range(hot, min(hot + step, table.rows)))
    if rows:
        found += [
            Part(table, rows, range(a, b), count, cut.replicated, cut.tier, cut.cache_rows) for a, b in pairwise(bounds)
        ]
    return found


def in_order(tiles: Sequence[Tile], tables: Sequence[Table]) -> tuple[Tile, ...]:
    """Tiles in the order of tables, columns and rows."""
    order = {t.name: i for i, t in enumerate(tables)}
    return tuple(sorted(tiles, key=lambda t: (order[t.table], t.cols.start, t.rows.start)))


@dataclass(frozen=True)
class Placement:
    """Parts with the rank of their first tile, and what each rank has then."""

    parts: tuple[tuple[Part, int], ...]
    loads: Array
    nbytes: Array

    def tiles(self) -> list[Tile]:
        """List all tiles."""
        return [tile for part, first in self.parts for tile in part.tiles(first, len(self.loads))]


def place_parts(parts: Sequence[Part], model: CostModel, capacity: int | None) -> Placement:
    """Choose ranks for parts: for those of several tiles, or with copies, first; then for single tiles by `balance`.

    Raises
    ------
    PlanError
        If there is no room for a part.
    """
    world_size = model.world_size
    loads, nbytes = np.zeros(world_size), np.zeros(world_size, dtype=np.int64)
    known: dict[tuple[object, ...], PartCost] = {}
    costs = [known.setdefault(key, known.get(key) or part_cost(p, model)) for p in parts for key in [p.shape]]
    placed: list[tuple[Part, int]] = []
    several = [i for i, p in enumerate(parts) if len(p.rows) > 1 or p.replicated]
    for i in sorted(several, key=lambda i: -costs[i].owner * len(parts[i].rows)):
        part, cost = parts[i], costs[i]
        count = len(part.rows)
        loads += count * cost.reader
        nbytes += count * cost.copy_bytes
        load, size = cost.owner - cost.reader, cost.nbytes - cost.copy_bytes
        first = _best_start(count, load, size, loads, nbytes, capacity)
        owners = (first + np.arange(count)) % world_size
        loads[owners] += load
        nbytes[owners] += size
        placed.append((part, first))
    if capacity is not None and nbytes.max() > capacity:
        rank = int(nbytes.argmax())
        raise PlanError(
            f"rank {rank} would hold {gib(nbytes[rank])}, {gib(nbytes[rank] - capacity)} more than its "
            f"{gib(capacity)}; copy fewer rows, cut into more parts, use narrower rows, or more ranks"
        )
    single = [i for i, p in enumerate(parts) if len(p.rows) == 1 and not p.replicated]
    item_loads = np.array([costs[i].owner for i in single])
    item_bytes = np.array([costs[i].nbytes for i in single], dtype=np.int64)
    result = best_placement(item_loads, item_bytes, loads, nbytes, capacity)
    if not isinstance(result, Placed):
        stuck, missing = result
        raise PlanError(
            f"{parts[single[stuck]].name} needs {gib(item_bytes[stuck])}, {gib(missing)} more than any rank has left "
            f"of its {gib(capacity or 0)}; cut it by rows or columns, use narrower rows, or more ranks"
        )
    placed += [(parts[i], rank) for i, rank in zip(single, result.chosen.tolist(), strict=True)]
    everyone = sum(cost.everyone * len(part.rows) for part, cost in zip(parts, costs, strict=True))
    return Placement(tuple(placed), result.loads + everyone, result.nbytes)


@dataclass(frozen=True)
class PartCost:
    """What each tile of a part costs: as the first one, which has most rows.

    Attributes
    ----------
    owner, reader, everyone
        Load of the owner, of a rank that has a copy, and of every rank besides.
    nbytes, copy_bytes
        Of the owner, and of a rank that has a copy.
    """

    owner: float
    reader: float
    everyone: float
    nbytes: int
    copy_bytes: int


def part_cost(part: Part, model: CostModel) -> PartCost:
    """Cost of one tile of a part."""
    cache_rows = 0 if part.tier == "device" else part.cache_rows
    tile = Tile(part.table.name, part.rows[0], part.cols, 0, (), part.tier, cache_rows)
    readers = (model.world_size - 1) * part.replicated
    cost = model.tile(tile, part.lanes, readers)
    nbytes = tile_bytes(part.table, tile, model.workload.by_table[part.table.name].moments)
    copied = tile_bytes(part.table, tile) if part.replicated else 0
    owner, everyone = float(cost.owner_bytes @ cost.prices), float(cost.everyone_bytes @ cost.prices)
    reader = float(cost.reader_bytes @ cost.prices) if part.replicated else 0.0
    return PartCost(owner, reader, everyone, nbytes, copied)


def _best_start(count: int, load: float, nbytes: int, loads: Array, held: Array, capacity: int | None) -> int:
    """The rank from which on so many tiles fit, and leave the busiest of their owners with the least load."""
    world_size = len(loads)
    step = count if world_size % count == 0 else 1

    def largest(values: Array) -> Array:
        around = np.concatenate([values, values[: count - 1]])
        return np.lib.stride_tricks.sliding_window_view(around, count)[::step].max(1)

    most = largest(held) + nbytes
    overflow = most > capacity if capacity is not None else np.zeros(len(most), dtype=bool)
    return int(np.lexsort((most, largest(loads) + load, overflow))[0]) * step
