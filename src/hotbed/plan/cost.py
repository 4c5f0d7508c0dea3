"""What a tile costs the ranks that hold it.

*Bytes*: rows, and for the owner the optimizer's moments. *Work* per sample: ids that fall into the tile × its columns,
which is what lookups and updates move (ALGORITHMS: Neo's cost per shard, without the bandwidths that all ranks share).
Ids fall evenly on the rows of a strided tile; where a plan cuts contiguous ranges, they do not, so what is known about
popularity should be given as ``ids``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hotbed.optim import Moment
from hotbed.plan.tiling import Tile
from hotbed.specs import Table, row_bytes


class Cost(NamedTuple):
    """Memory and work that a rank is given."""

    nbytes: int
    work: float

    def plus(self, other: Cost) -> Cost:
        """The sum."""
        return Cost(self.nbytes + other.nbytes, self.work + other.work)


def tile_bytes(table: Table, tile: Tile, moments: Sequence[Moment] = ()) -> int:
    """Bytes of a tile's rows and of these moments (none for a reader)."""
    wide = len(range(tile.rows.start, min(tile.rows.stop, table.fp32_rows), tile.rows.step))
    cols = len(tile.cols)
    beside = sum(4 if m.per == "row" else 4 * cols for m in moments)
    return (
        wide * row_bytes("fp32", cols)
        + (len(tile.rows) - wide) * row_bytes(table.dtype, cols)
        + len(tile.rows) * beside
    )


def tile_work(table: Table, tile: Tile, ids: float = 1.0) -> float:
    """Expected ids of a sample that fall into a tile × its columns; ``ids`` per sample for the whole table."""
    return ids * len(tile.rows) / table.rows * len(tile.cols)


def rank_costs(
    tiles: Sequence[Tile],
    tables: Sequence[Table],
    world_size: int,
    *,
    ids: Mapping[str, float] | None = None,
    moments: Sequence[Moment] = (),
) -> list[Cost]:
    """Cost of each rank.

    Parameters
    ----------
    tiles
        Tiles of a plan.
    tables
        The tables they are of.
    world_size
        Number of ranks.
    ids
        By table, mean ids per sample; 1 where not given.
    moments
        Of the optimizer's rule.
    """
    by_name = {t.name: t for t in tables}
    costs = [Cost(0, 0.0)] * world_size
    for tile in tiles:
        table = by_name[tile.table]
        work = tile_work(table, tile, (ids or {}).get(tile.table, 1.0))
        costs[tile.owner] = costs[tile.owner].plus(Cost(tile_bytes(table, tile, moments), work))
        for reader in tile.readers:
            costs[reader] = costs[reader].plus(Cost(tile_bytes(table, tile), 0.0))
    return costs
