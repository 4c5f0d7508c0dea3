"""`Locator` says where every row is: against a search over all tiles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.embed.shard_routing import Locator
from hotbed.plan import Plan
from hotbed.specs import Table
from tests.tilings import tilings

TABLES = [Table("a", 23, 40), Table("b", 1, 40, dtype="bf16"), Table("c", 12, 40, dtype="fp16"), Table("d", 9, 40)]
OTHERS = [Table("e", 5, 16)]
"""Of another dim, so in the plan but not of this locator."""
CPU = torch.device("cpu")

worlds = st.integers(1, 4)
plans = worlds.flatmap(lambda size: tilings([*TABLES, *OTHERS], size))


def tiles_of_rows(plan: Plan) -> list[list[int]]:
    """By key, the tiles that hold the row, numbered among those of the locator's tables."""
    names = [t.name for t in TABLES]
    tiles = [tile for tile in plan.tiles if tile.table in names]
    return [
        [i for i, tile in enumerate(tiles) if tile.table == table.name and row in tile.rows]
        for table in TABLES
        for row in range(table.rows)
    ]


@given(plan=plans, data=st.data())
def test_rows_are_found_in_the_tiles_that_hold_them(plan, data):
    locator = Locator(TABLES, plan, plan.world_size - 1, CPU)
    expected = tiles_of_rows(plan)
    keys = torch.tensor(data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=60)), dtype=torch.int64)
    found = locator.find(keys)
    pairs = list(zip(found.row.tolist(), found.tile.tolist(), strict=True))
    assert sorted(pairs) == [(at, tile) for at, key in enumerate(keys.tolist()) for tile in expected[key]]
    padded, inside = locator.find_without_waiting(keys)
    assert len(padded.row) == len(keys) * len(locator._layers)  # known without a look at values
    here = slice(None) if inside is None else inside
    assert torch.equal(padded.row[here], found.row)
    assert torch.equal(padded.tile[here], found.tile)
