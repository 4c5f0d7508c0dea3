"""Count the bytes that each rank sends in a training step, under a plan and for numbers of distinct rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hotbed.ops.rows import Codec
from hotbed.plan.cost import sums_bytes, tile_traffic
from hotbed.plan.tiling import Plan, count_common


class Traffic(NamedTuple):
    """Bytes that a rank sends to others in a step, for the tables."""

    ids: float
    rows: float
    gradients: float
    copies: float
    """Updated rows, to the ranks that read copies of them."""
    sums: float
    """Sums over columns, between the owners of a row's parts."""

    @property
    def total(self) -> float:
        return sum(self)


def step_traffic(
    plan: Plan,
    distinct: Mapping[str, float],
    *,
    touched: Mapping[str, float] | None = None,
    row_sums: int = 0,
    forward: Codec = "fp32",
    backward: Codec = "fp32",
) -> list[Traffic]:
    """Count the bytes of rows that each rank sends in a training step, without headers and lists of counts.

    ``distinct`` has the number of distinct rows of each table in a rank's batch, and ``touched`` in all batches. These
    rows are assumed to be spread evenly over the table.
    """
    size = plan.world_size
    rows = {table: max(tile.rows[-1] + 1 for tile in tiles) for table, tiles in plan.by_table.items()}
    sent = [[0.0] * 5 for _ in range(size)]
    for tile in plan.tiles:
        share, cols = len(tile.rows) / rows[tile.table], len(tile.cols)
        changed = (touched or distinct)[tile.table] * share
        message = tile_traffic(cols, distinct[tile.table] * share, changed, forward=forward, backward=backward)
        for rank in range(size):
            if rank == tile.owner:
                continue
            sent[rank][0] += message.ids
            sent[rank][2] += message.gradients
            if rank not in tile.readers:
                sent[tile.owner][1] += message.rows
        sent[tile.owner][3] += len(tile.readers) * message.copies
        for other in plan.by_table[tile.table] if row_sums else ():
            if other.owner != tile.owner:
                common = count_common(tile.rows, other.rows) / rows[tile.table]
                sent[tile.owner][4] += row_sums * sums_bytes(cols, (touched or distinct)[tile.table] * common)
    return [Traffic(*of_rank) for of_rank in sent]
