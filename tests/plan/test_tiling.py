"""Tiles and plans: exact cover, ranks, JSON, and whether a plan is one for these tables."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import PlanError
from hotbed.plan import Plan, Tile
from hotbed.specs import Table


def tile(rows: range, cols: range = range(32), owner: int = 0, **options: object) -> Tile:
    return Tile("t", rows, cols, owner, **options)


@given(data=st.data(), rows=st.integers(1, 30), blocks=st.integers(1, 4))
def test_a_plan_is_valid_exactly_if_every_cell_is_in_one_tile(data, rows, blocks):
    step = data.draw(st.integers(1, 4))
    whole = [
        tile(range(k, rows, step), range(16 * b, 16 * (b + 1))) for k in range(min(step, rows)) for b in range(blocks)
    ]
    kept = data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=len(whole) + 1))
    cells = [(r, c) for t in kept for r in t.rows for c in t.cols]
    height, width = max(r for r, _ in cells) + 1, max(c for _, c in cells) + 1
    if len(cells) == len(set(cells)) == height * width:
        assert Plan(1, tuple(kept)).tiles == tuple(kept)
    else:
        with pytest.raises(PlanError, match=r"got two tiles|without a tile"):
            Plan(1, tuple(kept))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tile(range(0)), r"a tile of table 't': got rows range\(0, 0\)"),
        (lambda: tile(range(9, 0, -1)), r"a tile of table 't': got rows range\(9, 0, -1\)"),
        (lambda: tile(range(9), range(0, 32, 2)), r"a tile of table 't': got columns range\(0, 32, 2\)"),
        (lambda: tile(range(9), owner=-1), r"a tile of table 't': got owner -1 and readers \(\)"),
        (lambda: tile(range(9), readers=(2, 1)), r"a tile of table 't': got readers \(2, 1\)"),
        (lambda: tile(range(9), readers=(0, 1)), r"a tile of table 't': got readers \(0, 1\)"),
        (lambda: tile(range(9), owner=0.5), r"a tile of table 't': got owner 0\.5 and readers \(\)"),
        (lambda: Plan.from_json('{"world_size": 1, "tiles": 5}'), "tiles of a plan: got 5"),
        (lambda: Plan.from_json('{"world_size": 1, "tiles": ["x"]}'), r"tiles of a plan: got \['x'\]"),
        *[
            (
                lambda rows=rows: Plan.from_dict(
                    {"world_size": 1, "tiles": [{"table": "t", "owner": 0, "rows": rows, "cols": [0, 4]}]}
                ),
                r"a tile of table 't': got rows \[0, .*below 2\^63",
            )
            for rows in ([0, 9, 0], [0, 10**20])
        ],
        (lambda: tile(range(9), tier="ssd"), "a tile of table 't': got tier 'ssd'"),
        (lambda: tile(range(9), cache_rows=-1), "a tile of table 't': got cache_rows -1"),
        (lambda: Plan(0, ()), "world_size: got 0, expected at least 1"),
        (lambda: Plan(2, (tile(range(9), owner=2),)), "a tile of table 't': got rank 2"),
        (lambda: Plan(2, (tile(range(9), readers=(3,)),)), "a tile of table 't': got rank 3"),
        (
            lambda: Plan(2, (tile(range(0, 9, 2)), tile(range(0, 9, 3), owner=1))),
            "row 0, columns 0 … 32 of table 't': got two tiles, of ranks 0 and 1",
        ),
        (lambda: Plan(1, (tile(range(0, 9, 2)),)), "columns 0 … 32 of table 't': got 4 of 9 rows without a tile"),
        (lambda: Plan(1, (tile(range(1, 9)),)), "1 of 9 rows"),
        (
            lambda: Plan(1, (tile(range(9), range(16, 32)),)),
            "columns 0 … 16 of table 't': got 9 of 9 rows without a tile",
        ),
        (
            lambda: Plan(1, (tile(range(9)),), {"t": "row"}),
            "wire of table 't': got 'row', expected one of rows, pooled",
        ),
        (
            lambda: Plan(1, (tile(range(9)),), {"t": ["rows"]}),
            r"wire of table 't': got \['rows'\], expected one of rows, pooled",
        ),
        (
            lambda: Plan(1, (tile(range(9)),), {"tt": "rows"}),
            "table in wire: got 'tt', expected one of t.*did you mean 't'",
        ),
        (
            lambda: Plan(2, (tile(range(0, 9, 2)), tile(range(1, 9, 2), readers=(1,))), {"t": "pooled"}),
            "wire of table 't': got 'pooled'",
        ),
        (
            lambda: Plan.from_dict({"world_size": 1, "tiles": [], "wire": "pooled"}),
            "wire of a plan: got 'pooled'",
        ),
        (
            lambda: Plan.from_json('{"world_size": 1, "tiles": [], "wires": {}}'),
            "key of a plan: got 'wires', expected one of world_size, tiles, wire.*did you mean 'wire'",
        ),
        (
            lambda: Plan.from_json("{"),
            "a plan is not valid JSON: the text is not JSON: Expecting property name enclosed in double",
        ),
        (lambda: Plan.from_json("[]"), "a plan: got a JSON list"),
        (lambda: Plan.from_dict({"world_size": 1}), "keys of a plan: got world_size"),
        (
            lambda: Plan.from_dict({"world_sise": 1, "tiles": []}),
            "key of a plan: got 'world_sise', expected one of world_size, tiles, wire.*did you mean 'world_size'",
        ),
        (lambda: Plan.from_dict({"world_size": 1, "tiles": [{"owner": 0}]}), r"a tile: got \{'owner': 0\}"),
        (
            lambda: Plan.from_dict(
                {"world_size": 1, "tiles": [{"table": "t", "owner": 0, "rows": [9], "cols": [0, 4]}]}
            ),
            r"a tile of table 't': got rows \[9\]",
        ),
        (
            lambda: Plan.from_dict({"world_size": 1, "tiles": [{"table": "t", "owner": 0, "rows": [0, 9], "cols": 4}]}),
            "a tile of table 't': got cols 4",
        ),
        (
            lambda: Plan.from_dict({"world_size": 1, "tiles": [{"table": "t", "owner": 0, "reader": []}]}),
            "key of a tile: got 'reader', expected one of table, rows, .* did you mean 'readers'",
        ),
        (
            lambda: Plan.from_dict(
                {
                    "world_size": 1,
                    "tiles": [{"table": "t", "owner": 0, "rows": [0, 9], "cols": [0, 4], "readers": "all"}],
                }
            ),
            r"a tile: got \{'table': 't', 'owner': 0, 'rows': \[0, 9\], 'cols': \[0, 4\], 'readers': 'all'\}",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_json_gives_the_plan_back():
    plan = Plan(
        3,
        (
            tile(range(0, 9, 2), readers=(1, 2)),
            tile(range(1, 9, 2), range(16), owner=1, tier="host", cache_rows=4),
            tile(range(1, 9, 2), range(16, 32), owner=2),
        ),
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["tiles"][0] == {
        "table": "t",
        "rows": [0, 9, 2],
        "cols": [0, 32],
        "owner": 0,
        "readers": [1, 2],
        "tier": "device",
        "cache_rows": 0,
    }
    assert Plan.from_dict(
        {"world_size": 1, "tiles": [{"table": "t", "owner": 0, "rows": [0, 9], "cols": [0, 4]}]}
    ).tiles == (tile(range(9), range(4)),)


def test_json_keeps_the_wire_formats():
    tiles = (tile(range(9)), Tile("u", range(4), range(16), 0), Tile("v", range(4), range(16), 0, (1,)))
    plan = Plan(2, tiles, {"t": "pooled", "v": "rows"})
    assert Plan.from_dict(plan.to_dict()) == plan
    assert json.loads(plan.to_json()) == plan.to_dict()
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_keeps_its_own_wire_formats():
    wire = {"t": "pooled"}
    plan = Plan(1, (tile(range(9)),), wire)
    wire["t"] = "anything"
    assert plan.wire == {"t": "pooled"}


def test_a_wire_format_for_no_table_is_refused():
    """`make_plan` takes one for all tables, a plan takes one by table."""
    with pytest.raises(PlanError, match="wire of a plan: got 'pooled'"):
        Plan(1, (tile(range(9)),), "pooled")


@pytest.mark.parametrize(
    ("table", "tiles", "message"),
    [
        (
            Table("u", 9, 32),
            [tile(range(9))],
            "table in the plan: got 't', expected one of u. Make a plan for this model.",
        ),
        (Table("t", 10, 32), [tile(range(9))], "table 't': got a plan for 9 × 32"),
        (Table("t", 9, 48), [tile(range(9))], "table 't': got a plan for 9 × 32"),
        (
            Table("t", 9, 32),
            [tile(range(9), range(8)), tile(range(9), range(8, 32))],
            r"table 't' \(fp32\): got a cut at columns 0 … 8",
        ),
        (
            Table("t", 9, 256, dtype="int8"),
            [tile(range(9), range(64)), tile(range(9), range(64, 256))],
            r"table 't' \(int8\): got a cut at columns 0 … 64",
        ),
    ],
)
def test_a_plan_for_another_model_is_refused(table, tiles, message):
    with pytest.raises(PlanError, match=message):
        Plan(1, tuple(tiles)).check([table])


def test_a_table_without_tiles_is_refused():
    with pytest.raises(PlanError, match="no tile of table 'u'"):
        Plan(1, (tile(range(9)),)).check([Table("t", 9, 32), Table("u", 9, 32)])


def test_the_last_column_cut_may_be_narrower():
    tiles = (tile(range(9), range(16)), tile(range(9), range(16, 20)))
    Plan(1, tiles).check([Table("t", 9, 20)])
