"""Find the tiles of rows by binary search.

Tiles of a table may be cut at different columns, and then a row is in several tiles. So tiles form *layers*, in which
each row is in at most one tile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.plan import Tile

TABLE, OWNER, FIRST, STOP, STEP, ARENA_TYPE, COLUMN_SHARD, SLOT, COPY = range(9)
"""Rows of `hotbed.embed.shard_routing.Locator.entries`."""


class RowTiles(NamedTuple):
    """Pairs of a row ``[n]`` and a tile ``[n]`` that holds it. A row has one pair per column shard of its table."""

    row: Tensor
    tile: Tensor


class TileLayer(NamedTuple):
    """Disjoint tiles of several tables. The tiles of one table have one row step.

    A binary search finds the tile of a row. Tiles are sorted by table, row modulo the step, and first row. ``step [T]``
    (0 for a table without tiles in the layer), ``base [T]`` and ``span [T]`` define their sort keys ``base + residue ·
    span + first row``. For example, three tiles of 9 rows with step 3 have ``keys`` 0, 10, 20. Row 4 has the key
    0 + 1 · 9 + 4 = 13, so it is in the second tile. ``plain`` means that every step is 1, so keys are row numbers.
    ``complete`` means that every row is in some tile.
    """

    step: Tensor
    base: Tensor
    span: Tensor
    keys: Tensor
    tiles: Tensor
    plain: bool
    complete: bool

    def find(self, keys: Tensor, first_keys: Tensor, entries: Tensor) -> RowTiles:
        """Return the tiles of rows, given by key. Rows that are in no tile of the layer are left out."""
        row, tile, inside = self.pairs(keys, first_keys, entries)
        if inside is None:
            return RowTiles(row, tile)
        which = inside.nonzero()[:, 0]
        return RowTiles(which, tile[which])

    def pairs(self, keys: Tensor, first_keys: Tensor, entries: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows, candidate tiles, and a mask of rows that are in their tile (None if all are)."""
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


def make_layers(
    tiles: Sequence[Tile], number: Mapping[str, int], rows: Sequence[int], device: torch.device
) -> list[TileLayer]:
    """Sort tiles into layers, one per pair of columns and row step of a table. A grid of two columns has two layers."""

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    combs: dict[int, dict[tuple[range, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, tile in enumerate(tiles):
        combs[number[tile.table]][tile.cols, tile.rows.step].append(i)
    layers: list[TileLayer] = []
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
            TileLayer(
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
