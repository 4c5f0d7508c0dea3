"""`Locator` says where every row is: against a search over all tiles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.embed.shard_routing import ARENA_TYPE, COLUMN_SHARD, COPY, OWNER, SLOT, Locator
from hotbed.plan import Plan, Tile, make_plan
from hotbed.specs import Table
from tests.tilings import tilings

TABLES = [Table("a", 23, 40), Table("b", 1, 40, dtype="bf16"), Table("c", 12, 40, dtype="fp16"), Table("d", 9, 40)]
OTHERS = [Table("e", 5, 16)]
"""Of another dim, so in the plan but not of this locator."""
CPU = torch.device("cpu")

worlds = st.integers(1, 4)
plans = worlds.flatmap(lambda size: tilings([*TABLES, *OTHERS], size))


def locators(plan: Plan) -> list[Locator]:
    """Of every rank."""
    return [Locator(TABLES, plan, rank, CPU) for rank in range(plan.world_size)]


def tiles_of_rows(plan: Plan) -> list[list[int]]:
    """By key, the tiles that hold the row, numbered among those of the locator's tables."""
    names = [t.name for t in TABLES]
    tiles = [tile for tile in plan.tiles if tile.table in names]
    return [
        [i for i, tile in enumerate(tiles) if tile.table == table.name and row in tile.rows]
        for table in TABLES
        for row in range(table.rows)
    ]


def rows_by_slot(locator: Locator, tiles: list[int]) -> list[tuple[int, int]]:
    """(tile, row) of each slot of an arena of these tiles."""
    shards = locator.shards(tiles)
    return [(i, row) for i, shard in zip(tiles, shards, strict=True) for row in shard.rows]


def row_of(locator: Locator, key: int) -> int:
    return key - max(first for first in locator.first_keys.tolist() if first <= key)


@given(plan=plans, data=st.data())
def test_rows_are_found_in_the_tiles_that_hold_them(plan, data):
    locator = locators(plan)[-1]
    expected = tiles_of_rows(plan)
    keys = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=60))
    found = locator.find(torch.tensor(keys, dtype=torch.int64))
    pairs = list(zip(found.row.tolist(), found.tile.tolist(), strict=True))
    assert sorted(pairs) == [(at, tile) for at, key in enumerate(keys) for tile in expected[key]]


@given(plan=plans)
def test_every_rank_knows_every_slot_of_every_other(plan):
    everyone = locators(plan)
    keys = torch.arange(sum(t.rows for t in TABLES))
    for asking in everyone:
        assert torch.equal(asking.entries[:COPY], everyone[0].entries[:COPY])
        found = asking.find(keys)
        entry = asking.entries[:, found.tile]
        owned = [[rows_by_slot(p, p.owned(arena_type)) for arena_type in p.arena_types] for p in everyone]
        columns = (found.row, found.tile, entry[OWNER], entry[ARENA_TYPE], asking.slots(keys, found))
        for key, tile, owner, arena_type, slot in zip(*(c.tolist() for c in columns), strict=True):
            assert owned[owner][arena_type][slot] == (tile, row_of(asking, key))


@given(plan=plans)
def test_what_is_found_without_waiting_is_what_is_found(plan):
    locator = locators(plan)[0]
    keys = torch.arange(sum(t.rows for t in TABLES))
    expected = locator.find(keys)
    pairs, inside = locator.find_without_waiting(keys)
    assert len(pairs.row) == len(keys) * len(locator._layers)  # known without a look at values
    here = slice(None) if inside is None else inside
    assert torch.equal(pairs.row[here], expected.row)
    assert torch.equal(pairs.tile[here], expected.tile)


@given(plan=plans)
def test_readers_know_the_slots_of_their_copies_and_owners_those_of_the_readers(plan):
    everyone = locators(plan)
    keys = torch.arange(sum(t.rows for t in TABLES))
    for rank, locator in enumerate(everyone):
        assert torch.equal(locator.copies, everyone[0].copies)
        assert torch.equal(locator.entries[COPY], locator.copies[rank])
        assert locator.has_readers == any(tile.readers for tile in locator.tiles)
        for i, tile in enumerate(locator.tiles):
            assert (locator.copies[rank, i] >= 0) == (rank in tile.readers)
        copied = [rows_by_slot(locator, locator.copied(arena_type)) for arena_type in locator.arena_types]
        found = locator.find(keys)
        here = locator.entries[COPY, found.tile] >= 0
        columns = (found.row, found.tile, locator.entries[ARENA_TYPE, found.tile], locator.slots(keys, found, COPY))
        for key, tile, arena_type, slot in zip(*(c[here].tolist() for c in columns), strict=True):
            assert copied[arena_type][slot] == (tile, row_of(locator, key))


@given(plan=plans)
def test_tiles_of_one_width_and_dtype_are_one_kind_and_equal_columns_one_lane(plan):
    locator = locators(plan)[0]
    dtypes = {t.name: t.dtype for t in TABLES}
    for tile, entry in zip(locator.tiles, locator.entries.T.tolist(), strict=True):
        assert locator.arena_types[entry[ARENA_TYPE]] == (
            len(tile.cols),
            dtypes[tile.table],
            tile.tier,
            tile.cache_rows > 0,
        )
        assert locator.column_shards[entry[COLUMN_SHARD]] == (tile.cols.start, tile.cols.stop)
    assert len(set(locator.arena_types)) == len(locator.arena_types)
    assert len(set(locator.column_shards)) == len(locator.column_shards)


def test_common_schemes_are_searched_in_one_pass():
    """A scheme that cuts rows of all tables alike needs one look into a sorted list, whatever the number of tiles."""
    for scheme in ("table", "row", "dp"):
        (layer,) = Locator(TABLES, make_plan(TABLES, 4, scheme), 0, CPU)._layers
        assert layer.complete


def test_slots_of_a_rank_follow_each_other_in_the_order_of_the_plan():
    table = Table("t", 10, 32)
    plan = Plan(
        2,
        (
            Tile("t", range(1, 10, 2), range(32), 1, (0,)),
            Tile("t", range(0, 4, 2), range(32), 0),
            Tile("t", range(4, 10, 2), range(32), 1),
        ),
    )
    locator = Locator([table], plan, 0, CPU)
    assert locator.entries[SLOT].tolist() == [0, 0, 5]
    assert locator.entries[COPY].tolist() == [0, -1, -1]
    keys = torch.tensor([8, 3, 2, 9])
    found = locator.find(keys)
    order = torch.argsort(found.row, stable=True)
    assert found.tile[order].tolist() == [2, 0, 1, 0]
    assert locator.slots(keys, found)[order].tolist() == [7, 1, 1, 4]
