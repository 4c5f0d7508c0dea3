"""Find where rows are: which tile of a plan holds a row, on which rank, in which arena, at which slot.

Tiles with as many columns, one dtype and one kind of memory share an *arena kind*; every rank has an arena of each kind
for the tiles that it owns and one for those that it reads copies of. Slots number the rows of a rank's tiles, in the
order of the plan; so every rank knows every slot of every other.

A *lane* is a range of columns that tiles have. Units narrower than a row are moved in *cells*: a matrix of whole rows
is the same memory as one of narrower rows, its cells.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.embed.arena import Shard
from hotbed.plan import Plan, Tile
from hotbed.plan.tiling import Tier
from hotbed.specs import RowDtype, Table


@dataclass(frozen=True)
class Cells:
    """Some columns of some rows of a matrix ``[…, D]``; a unit has ``cols`` columns, in whole cells of ``width``.

    Columns 16 … 47 of row 1 of a matrix of 64 columns, in cells of 16, are cells 4 · 1 + 1 and 6: ``at = [5, 6]``.
    """

    at: Tensor
    width: int
    cols: int

    def take(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the units ``[n, cols]`` out of a matrix; ``out`` is contiguous memory to copy to."""
        cells = matrix.reshape(-1, self.width)
        if out is None:
            return torch.index_select(cells, 0, self.at).view(-1, self.cols)
        torch.index_select(cells, 0, self.at, out=out.view(-1, self.width))
        return out

    def put(self, units: Tensor, matrix: Tensor) -> None:
        """Write units ``[n, cols]`` to their places in a contiguous matrix."""
        matrix.view(-1, self.width).index_copy_(0, self.at, units.view(-1, self.width))


TABLE, OWNER, FIRST, STOP, STEP, KIND, LANE, SLOT, COPY = range(9)
"""Rows of `Locator.entries`."""


class Kind(NamedTuple):
    """What tiles of one arena have in common: number of columns, dtype, memory, and whether a cache is before it."""

    cols: int
    dtype: RowDtype
    tier: Tier = "device"
    cached: bool = False


class RowTiles(NamedTuple):
    """Pairs of a row ``[n]`` and a tile that holds it: a row has one in every lane that its table is cut into."""

    row: Tensor
    tile: Tensor


class Locator:
    """Locate the rows of the tables of one dim.

    Example: table "t" of 9 rows is cut by row over 3 ranks; tile r has rows r, r + 3, r + 6 of owner r. Its column of
    `entries` is: table 0, owner r, first row r, stop r + 7, step 3, kind 0, lane 0, slot 0, no copy (−1). Row 4 is in
    tile 1, at slot (4 − 1) / 3 = 1. A second table in the plan has keys from 9 on (``first_keys = [0, 9, …]``), and its
    tile on rank r has slots from 3 on.
    """

    def __init__(self, tables: Sequence[Table], plan: Plan, rank: int, device: torch.device) -> None:
        self.tables = list(tables)
        self.rank = rank
        number = {t.name: i for i, t in enumerate(tables)}
        self.tiles = [tile for tile in plan.tiles if tile.table in number]
        dtypes: dict[str, RowDtype] = {t.name: t.dtype for t in tables}
        kinds = [Kind(len(t.cols), dtypes[t.table], t.tier, t.cache_rows > 0) for t in self.tiles]
        self.kinds = list(dict.fromkeys(kinds))  # the same on all ranks
        self._owned: dict[Kind, list[int]] = defaultdict(list)
        self._copied: dict[Kind, list[int]] = defaultdict(list)
        # distinct ranges of columns, by first column
        self.lanes = sorted({(t.cols.start, t.cols.stop) for t in self.tiles})
        self.has_readers = any(tile.readers for tile in self.tiles)  # whether any rank holds a copy of any rows
        self.dim = tables[0].dim
        owned: dict[tuple[int, Kind], int] = defaultdict(int)
        copied: dict[tuple[int, Kind], int] = defaultdict(int)
        copies = torch.full((plan.world_size, len(self.tiles)), -1, dtype=torch.int64)
        rows: list[list[int]] = []
        for i, (tile, kind) in enumerate(zip(self.tiles, kinds, strict=True)):
            if rank == tile.owner:
                self._owned[kind].append(i)
            if rank in tile.readers:
                self._copied[kind].append(i)
            for reader in tile.readers:
                copies[reader, i] = copied[reader, kind]
                copied[reader, kind] += len(tile.rows)
            place = [number[tile.table], tile.owner, tile.rows.start, tile.rows[-1] + 1, tile.rows.step]
            lane = self.lanes.index((tile.cols.start, tile.cols.stop))
            slot = owned[tile.owner, kind]
            rows.append([*place, self.kinds.index(kind), lane, slot, int(copies[rank, i])])
            owned[tile.owner, kind] += len(tile.rows)
        self._lane_starts = torch.tensor([start for start, _ in self.lanes], dtype=torch.int64, device=device)
        self._cell = [
            math.gcd(self.dim, kind.cols, *(a for a, b in self.lanes if b - a == kind.cols)) for kind in self.kinds
        ]
        self.copies = copies.to(device)  # [W, tiles] int64: first slot of the copies on every rank
        # by kind, [W, owned tiles], in the order of their slots
        self.copies_of_owned = [copies[:, self._owned[kind]].to(device) for kind in self.kinds]
        lines = [
            0 if _overlap(plan.by_table[tile.table]) else row[LANE] for tile, row in zip(self.tiles, rows, strict=True)
        ]
        # [tiles]: units of one bag and one line get positions of their own (`hotbed.embed.pooled_exchange`). The line
        # of a tile is its lane, or 0 if lanes of its table overlap, because its rows are not all cut at the same
        # columns.
        self.lines = torch.tensor(lines, dtype=torch.int64, device=device)
        self.keys = sum(t.rows for t in tables)  # number of keys, which number the rows of all tables
        # [T + 1] int64: key of row 0 of each table
        self.first_keys = torch.tensor([0, *accumulate(t.rows for t in tables)], device=device)
        # [9, tiles] int64: table; owner; first row, stop row, row step; kind; lane; first slot in the owner's arena;
        # first slot in this rank's arena of copies, or −1 without a copy
        self.entries = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 9).T.contiguous()
        stream = self.entries[KIND]
        if self.has_readers:
            stream = 2 * stream + (self.entries[COPY] >= 0)
        self.streams = len(self.kinds) * (2 if self.has_readers else 1)  # number of streams (`hotbed.embed.route`)
        few = self.streams * plan.world_size < 256  # with one more, for what is in none; radix sorts like few bits
        # message of a tile's units: stream · W + owner
        self.messages = (stream * plan.world_size + self.entries[OWNER]).to(torch.uint8 if few else torch.int32)
        self._row_keys = self.first_keys[self.entries[TABLE]] + self.entries[FIRST]
        self._strided = bool((self.entries[STEP] > 1).any())
        self._layers = _layers(self.tiles, number, [t.rows for t in tables], device)

    def owned(self, kind: Kind) -> list[int]:
        """List the tiles of this kind that this rank owns, in the order of their slots."""
        return self._owned[kind]

    def copied(self, kind: Kind) -> list[int]:
        """List the tiles of this kind that this rank reads a copy of, in the order of their slots."""
        return self._copied[kind]

    def shards(self, tiles: Sequence[int]) -> list[Shard]:
        """Return these tiles as shards of an arena."""
        by_name = {t.name: t for t in self.tables}
        return [Shard(by_name[t.table], t.rows, t.cols) for t in (self.tiles[i] for i in tiles)]

    def cells(self, kind: int, rows: Tensor, lane: Tensor) -> Cells:
        """Find where units of a kind are in a matrix of whole rows, by row ``[n]`` and lane ``[n]``."""
        cols, width = self.kinds[kind].cols, self._cell[kind]
        first = rows * (self.dim // width) + torch.div(self._lane_starts[lane], width, rounding_mode="floor")
        if width < cols:
            first = (first[:, None] + torch.arange(cols // width, device=rows.device)).flatten()
        return Cells(first, width, cols)

    def find(self, keys: Tensor) -> RowTiles:
        """Find the tiles that hold these rows ``[n]``, given by key; layer by layer, inside a layer in their order."""
        found = [layer.find(keys, self.first_keys, self.entries) for layer in self._layers]
        if len(found) == 1:
            return found[0]
        return RowTiles(torch.cat([f.row for f in found]), torch.cat([f.tile for f in found]))

    def find_without_waiting(self, keys: Tensor) -> tuple[RowTiles, Tensor | None]:
        """Like `find`, but with ``n`` pairs per layer, so that the host need not synchronize.

        The second result tells which of them are there ``[n · layers]`` bool; None: all.
        """
        found = [layer.pairs(keys, self.first_keys, self.entries) for layer in self._layers]
        rows, tiles = [row for row, _, _ in found], [tile for _, tile, _ in found]
        whole = RowTiles(*(of[0] if len(of) == 1 else torch.cat(of) for of in (rows, tiles)))
        if all(inside is None for *_, inside in found):
            return whole, None
        everywhere = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        return whole, torch.cat([everywhere if inside is None else inside for *_, inside in found])

    def slots(self, keys: Tensor, found: RowTiles, column: int = SLOT) -> Tensor:
        """Number the slot of each row found, in its owner's arena, or with ``COPY`` among this rank's copies."""
        within = keys[found.row] - self._row_keys[found.tile]
        if self._strided:
            within = torch.div(within, self.entries[STEP][found.tile], rounding_mode="floor")
        return self.entries[column][found.tile] + within


def _overlap(tiles: Sequence[Tile]) -> bool:
    """Say whether any two of the distinct ranges of columns of these tiles have a column in common."""
    lanes = sorted({(t.cols.start, t.cols.stop) for t in tiles})
    return any(stop > start for (_, stop), (start, _) in pairwise(lanes))


class _Layer(NamedTuple):
    """Tiles of which no two of a table have a row in common, all those of a table with one row step.

    A row's tile is found by one binary search. ``step [T]`` (0: the layer has no tile of the table), ``base [T]`` and
    ``span [T]`` order the tiles by (table, residue of the row by the step, first row), so that ``keys`` of the tiles
    rise: of 9 rows with step 3 they are ``base + residue · span + first row`` = 0, 10, 20, and row 4 has 0 + 1 · 9 + 4,
    between 10 and 20. ``plain``: every step is 1, and keys of tiles are those of their first rows. ``complete``:
    every row is in some tile.
    """

    step: Tensor
    base: Tensor
    span: Tensor
    keys: Tensor
    tiles: Tensor
    plain: bool
    complete: bool

    def find(self, keys: Tensor, first_keys: Tensor, entries: Tensor) -> RowTiles:
        row, tile, inside = self.pairs(keys, first_keys, entries)
        if inside is None:
            return RowTiles(row, tile)
        which = inside.nonzero()[:, 0]
        return RowTiles(which, tile[which])

    def pairs(self, keys: Tensor, first_keys: Tensor, entries: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """List each row and what would be its tile, and whether it is in it (None: all are)."""
        rows = torch.arange(len(keys), device=keys.device)
        if self.plain and self.complete:
            at = torch.searchsorted(self.keys, keys, right=True) - 1
            return rows, self.tiles[at], None
        table = torch.searchsorted(first_keys, keys, right=True) - 1
        row = keys - first_keys[table]
        step = self.step[table]
        residue = row % step.clamp(min=1)
        at = torch.searchsorted(self.keys, self.base[table] + residue * self.span[table] + row, right=True) - 1
        tile = self.tiles[at.clamp(min=0)]
        if self.complete:
            return rows, tile, None
        first = entries[FIRST][tile]
        inside = (at >= 0) & (step > 0) & (entries[TABLE][tile] == table) & (row >= first) & (row < entries[STOP][tile])
        return rows, tile, inside & ((row - first) % entries[STEP][tile] == 0)


def _layers(
    tiles: Sequence[Tile], number: Mapping[str, int], rows: Sequence[int], device: torch.device
) -> list[_Layer]:
    """Sort tiles into as few layers as a table has pairs (columns, row step): grids of two columns have two."""

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    combs: dict[int, dict[tuple[range, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, tile in enumerate(tiles):
        combs[number[tile.table]][tile.cols, tile.rows.step].append(i)
    layers: list[_Layer] = []
    for depth in range(max(len(found) for found in combs.values())):
        step, base, span = ([0] * len(rows) for _ in range(3))
        entries: list[tuple[int, int]] = []
        covered = 0
        total = 0
        for t, found in sorted(combs.items()):
            base[t], span[t] = total, rows[t]
            if depth >= len(found):
                continue
            (_, step[t]), members = list(found.items())[depth]
            for i in members:
                start = tiles[i].rows.start
                entries.append((base[t] + start % step[t] * span[t] + start, i))
                covered += len(tiles[i].rows)
            total += step[t] * span[t]
        entries.sort()
        layers.append(
            _Layer(
                step=numbers(step),
                base=numbers(base),
                span=numbers(span),
                keys=numbers([key for key, _ in entries]),
                tiles=numbers([i for _, i in entries]),
                plain=set(step) == {1},
                complete=covered == sum(rows),
            )
        )
    return layers
