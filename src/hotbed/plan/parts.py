"""Cut tables into parts, and assign parts to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hotbed.errors import PlanError
from hotbed.plan.balance import Assignment, balance_loads
from hotbed.plan.cost import CostModel, gib, tile_bytes
from hotbed.plan.schemes import Cut
from hotbed.plan.tiling import Tier, Tile, WireFormat, column_unit
from hotbed.specs import Table

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """Row parts of one column part of a table. Consecutive ranks own them."""

    table: Table
    rows: tuple[range, ...]
    cols: range
    col_parts: int = 1  # number of column parts of its rows
    replicated: bool = False
    tier: Tier = "device"
    cache_rows: int = 0
    wire: WireFormat = "rows"

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"table '{self.table.name}', columns {self.cols.start} … {self.cols.stop - 1},"

    @property
    def shape(self) -> tuple[object, ...]:
        """Key of its cost: parts with equal keys have equal costs."""
        rows = self.rows[0]
        residue = rows.start if rows.step == 1 or self.table.fp32_rows else 0
        return (
            *(self.table.name, len(self.rows), len(rows), rows.stop, rows.step, residue),
            *(len(self.cols), self.col_parts, self.replicated, self.tier, self.cache_rows),
            self.wire,
        )

    def tiles(self, first: int, world_size: int) -> list[Tile]:
        """Return its tiles. ``first`` is the rank of the first one."""
        found: list[Tile] = []
        for i, rows in enumerate(self.rows):
            owner = (first + i) % world_size
            readers = (*range(owner), *range(owner + 1, world_size)) if self.replicated else ()
            cache_rows = 0 if self.tier == "device" else self.cache_rows
            found.append(Tile(self.table.name, rows, self.cols, owner, readers, self.tier, cache_rows))
        return found

    def split(self) -> list[Part]:
        """Return one part per row part."""
        return [replace(self, rows=(rows,)) for rows in self.rows]


def parts_of(table: Table, cut: Cut, world_size: int) -> list[Part]:
    """Return the parts of a table, hot rows first."""
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
    """Sort tiles by table, columns and rows."""
    order = {t.name: i for i, t in enumerate(tables)}
    return tuple(sorted(tiles, key=lambda t: (order[t.table], t.cols.start, t.rows.start)))


@dataclass(frozen=True)
class Placement:
    """Parts with the ranks of their first tiles, and the resulting load and bytes of each rank."""

    parts: tuple[tuple[Part, int], ...]
    loads: Array
    nbytes: Array

    @property
    def wire(self) -> dict[str, WireFormat]:
        """Wire formats by table."""
        return {part.table.name: part.wire for part, _ in self.parts}

    def tiles(self) -> list[Tile]:
        """List all tiles."""
        return [tile for part, first in self.parts for tile in part.tiles(first, len(self.loads))]


def place_parts(parts: Sequence[Part], model: CostModel, capacity: int | None) -> Placement:
    """Assign parts to ranks: parts of several tiles or with copies first, then single tiles by `balance_loads`."""
    world_size = model.world_size
    loads, nbytes = np.zeros(world_size), np.zeros(world_size, dtype=np.int64)
    costs = [_tile_costs(part, model) for part in parts]
    placed: list[tuple[Part, int]] = []
    several = [i for i, p in enumerate(parts) if len(p.rows) > 1 or p.replicated]
    for i in sorted(several, key=lambda i: -float(costs[i].owners.sum())):
        part, cost = parts[i], costs[i]
        loads += cost.reader
        nbytes += cost.copy_bytes
        first = _best_start(cost.owners, cost.nbytes, loads, nbytes, capacity)
        owners = (first + np.arange(len(part.rows))) % world_size
        loads[owners] += cost.owners
        nbytes[owners] += cost.nbytes
        placed.append((part, first))
    if capacity is not None and nbytes.max() > capacity:
        rank = int(nbytes.argmax())
        raise PlanError(
            f"memory of rank {rank}: got {gib(nbytes[rank])} of rows, {gib(nbytes[rank] - capacity)} more than its "
            f"{gib(capacity)}. Copy fewer rows, cut into more parts, use a smaller dtype, or more ranks"
        )
    single = [i for i, p in enumerate(parts) if len(p.rows) == 1 and not p.replicated]
    item_loads = np.array([costs[i].owners[0] for i in single])
    item_bytes = np.array([costs[i].nbytes[0] for i in single], dtype=np.int64)
    result = balance_loads(item_loads, item_bytes, loads, nbytes, capacity)
    if not isinstance(result, Assignment):
        stuck, missing = result
        raise PlanError(
            f"{parts[single[stuck]].name} needs {gib(item_bytes[stuck])}, {gib(missing)} more than any rank has left "
            f"of its {gib(capacity or 0)}. Cut it by rows or columns, use a smaller dtype, or more ranks"
        )
    placed += [(parts[i], rank) for i, rank in zip(single, result.chosen.tolist(), strict=True)]
    everyone = sum(cost.everyone for cost in costs)
    return Placement(tuple(placed), result.loads + everyone, result.nbytes)


@dataclass(frozen=True)
class PartCost:
    """Cost of each tile of a part, taken from the first tile, which has the most rows."""

    owner: float  # load of the owner
    reader: float  # load of a rank with a copy
    everyone: float  # additional load of every rank
    nbytes: int  # device memory of the owner
    copy_bytes: int  # device memory of a rank with a copy


def cost_class(rows: range) -> tuple[int, int]:
    """Return the cost class of a tile of a part: tiles differ by one row, or behind hot rows by their first row."""
    return rows.start // rows.step, len(rows)


def part_cost(part: Part, model: CostModel) -> PartCost:
    """Estimate the cost of one tile of a part."""
    cache_rows = 0 if part.tier == "device" else part.cache_rows
    tile = Tile(part.table.name, part.rows[0], part.cols, 0, (), part.tier, cache_rows)
    readers = (model.world_size - 1) * part.replicated
    cost = model.tile(tile, part.col_parts, readers, part.wire)
    nbytes = tile_bytes(part.table, tile, model.workload.by_table[part.table.name].moments)
    copied = tile_bytes(part.table, tile) if part.replicated else 0
    owner, everyone = float(cost.owner_bytes @ cost.prices), float(cost.everyone_bytes @ cost.prices)
    reader = float(cost.reader_bytes @ cost.prices) if part.replicated else 0.0
    on_device = part.tier == "device"
    return PartCost(owner, reader, everyone, nbytes * on_device, copied * on_device)


class _TileCosts(NamedTuple):
    """Costs of the tiles of a part: of owners in addition to readers, of a reader, and of every rank."""

    owners: Array
    nbytes: Array
    reader: float
    everyone: float
    copy_bytes: int


def _tile_costs(part: Part, model: CostModel) -> _TileCosts:
    key = (*part.shape, part.rows[-1], cost_class(part.rows[-1]))
    if key not in model.memo:
        by_class: dict[tuple[int, int], PartCost] = {}
        costs = [
            by_class[key]
            if (key := cost_class(rows)) in by_class
            else by_class.setdefault(key, part_cost(replace(part, rows=(rows,)), model))
            for rows in part.rows
        ]
        model.memo[key] = _TileCosts(
            np.array([c.owner - c.reader for c in costs]),
            np.array([c.nbytes - c.copy_bytes for c in costs], dtype=np.int64),
            sum(c.reader for c in costs),
            sum(c.everyone for c in costs),
            sum(c.copy_bytes for c in costs),
        )
    return model.memo[key]


def _best_start(load: Array, size: Array, loads: Array, held: Array, capacity: int | None) -> int:
    """Return the first rank of the fitting assignment with the least load on the busiest owner."""
    # Tiles that share a node keep sharing it: they start at multiples of their number, if that divides the ranks. One
    # tile per rank may start anywhere, so only the first tiles matter, which are larger than the last one.
    world_size, count = len(loads), len(load)
    step = count if world_size % count == 0 else 1
    if count == world_size > 1:
        step, count = 1, max(int((load > load[-1]).sum()), int((size > size[-1]).sum()))
        if not count:
            return 0

    def largest(values: Array) -> Array:
        around = np.concatenate([values, values[: count - 1]])
        return np.lib.stride_tricks.sliding_window_view(around, count)[::step].max(1)

    most = largest(held) + size[0]
    overflow = most > capacity if capacity is not None else np.zeros(len(most), dtype=bool)
    return int(np.lexsort((most, largest(loads) + load[0], overflow))[0]) * step
