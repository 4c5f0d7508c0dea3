"""Count what a plan costs: bytes and load of each tile, and what crosses the wire in a training step.

*Bytes*: rows, and for the owner the optimizer's moments. *Load* per sample of the global batch: ids that fall into the
tile × its columns, which is what lookups and updates move. An update moves twice what a lookup does, as Mudigere et al.
(2021, arXiv 2104.05158) count it. The owner does both; where ranks hold copies, each looks up its own samples. Ids are
taken to fall evenly on the rows of a table: hot rows are busier than that, which nothing here knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hotbed.ops.layout import BLOCK
from hotbed.ops.rows import Codec, encoded_bytes
from hotbed.optim import Moment
from hotbed.plan.tiling import Plan, Tile, count_common
from hotbed.specs import Table, row_bytes

LOOKUP_SHARE = 1 / 3
"""Share of the load of an id that is its lookup; the rest is its update."""


class Cost(NamedTuple):
    """Memory and load that a rank is given."""

    nbytes: int
    load: float

    def plus(self, other: Cost) -> Cost:
        """The sum."""
        return Cost(self.nbytes + other.nbytes, self.load + other.load)


def tile_bytes(table: Table, tile: Tile, moments: Sequence[Moment] = ()) -> int:
    """Bytes of a tile's rows and of these moments (none for a reader)."""
    wide = len(range(tile.rows.start, min(tile.rows.stop, table.fp32_rows), tile.rows.step))
    cols = len(tile.cols)
    beside = sum(m.nbytes(cols) for m in moments)
    return (
        wide * row_bytes("fp32", cols)
        + (len(tile.rows) - wide) * row_bytes(table.dtype, cols)
        + len(tile.rows) * beside
    )


def table_bytes(table: Table, moments: Sequence[Moment] = ()) -> int:
    """Bytes of all rows of a table and of these moments."""
    return tile_bytes(table, Tile(table.name, range(table.rows), range(table.dim), 0), moments)


def tile_load(table: Table, tile: Tile, ids: float = 1.0) -> float:
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
        load = tile_load(table, tile, (ids or {}).get(tile.table, 1.0))
        lookup = LOOKUP_SHARE * load / len(tile.ranks)
        update = (1 - LOOKUP_SHARE) * load
        costs[tile.owner] = costs[tile.owner].plus(Cost(tile_bytes(table, tile, moments), lookup + update))
        for reader in tile.readers:
            costs[reader] = costs[reader].plus(Cost(tile_bytes(table, tile), lookup))
    return costs


def gib(nbytes: int) -> str:
    """Bytes for a message."""
    return f"{nbytes / 2**30:,.3g} GiB"


SLOT_BYTES = 8
"""Of an id on the wire."""


class Traffic(NamedTuple):
    """Bytes that a rank sends to others in a step."""

    ids: float
    rows: float
    gradients: float
    copies: float
    """Updated rows, to the ranks that read copies of them."""
    sums: float
    """Sums over columns, between the owners of a row's parts."""
    dense: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def step_traffic(
    plan: Plan,
    distinct: Mapping[str, float],
    *,
    touched: Mapping[str, float] | None = None,
    dense_values: int = 0,
    row_sums: int = 0,
    forward: Codec = "fp32",
    backward: Codec = "fp32",
) -> list[Traffic]:
    """Bytes that each rank sends in a training step, without the counts that go ahead and without framing.

    Ids are taken to fall evenly on the rows of a table.

    Parameters
    ----------
    plan
        Where tiles are; all tables with the wire format ``"rows"``.
    distinct
        By table, distinct rows of one rank's batch.
    touched
        By table, distinct rows of all ranks' batches together; needed where ranks read copies or rows are cut.
    dense_values
        Number of dense parameters, whose gradients are averaged.
    row_sums
        How often the optimizer sums over the columns of a row: row-wise AdaGrad once.
    forward, backward
        Codecs of rows and of gradients.
    """
    size = plan.world_size
    rows = {table: max(tile.rows[-1] + 1 for tile in tiles) for table, tiles in plan.by_table.items()}
    sent = [[0.0] * 5 for _ in range(size)]
    for tile in plan.tiles:
        share = len(tile.rows) / rows[tile.table]
        units, cols = distinct[tile.table] * share, len(tile.cols)
        for rank in range(size):
            if rank == tile.owner:
                continue
            sent[rank][0] += units * SLOT_BYTES
            sent[rank][2] += units * encoded_bytes(backward, cols)
            if rank not in tile.readers:
                sent[tile.owner][1] += units * encoded_bytes(forward, cols)
        changed = (touched or distinct)[tile.table] * share
        sent[tile.owner][3] += len(tile.readers) * changed * (SLOT_BYTES + 4 * cols)
        for other in plan.by_table[tile.table] if row_sums else ():
            if other.owner != tile.owner:
                share = count_common(tile.rows, other.rows) / rows[tile.table]
                sent[tile.owner][4] += row_sums * (touched or distinct)[tile.table] * share * 4 * -(-cols // BLOCK)
    dense = 2 * (size - 1) / size * 4 * dense_values
    return [Traffic(ids, moved, back, copies, sums, dense) for ids, moved, back, copies, sums in sent]
