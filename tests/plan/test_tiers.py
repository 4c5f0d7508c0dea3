"""Rows into memories by popularity: budgets are kept, and what is accessed more is nowhere slower."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import PlanError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Cut, Tile, make_plan
from hotbed.plan.cost import tile_bytes
from hotbed.plan.hit_rates import Counted, Curve, Zipf
from hotbed.plan.tier_choice import hot_rows, place_in_tiers, with_cache
from hotbed.specs import Table

TABLES = [Table("a", 1000, 32), Table("b", 40, 16, dtype="int8", fp32_rows=5), Table("c", 300, 32)]
MOMENTS = RowWiseAdagrad.rule.moments
BY_TABLE = {t.name: MOMENTS for t in TABLES}


def test_zipf_shares_are_those_of_the_law() -> None:
    for exponent in (0.8, 1.0, 1.3):
        weights = torch.arange(1, 50_001, dtype=torch.float64) ** -exponent
        law = Zipf(50_000, exponent, ids=3.0)
        for rows in (0, 1, 999, 1000, 1001, 30_000, 50_000):
            expected = 3 * float(weights[:rows].sum() / weights.sum())
            assert law.accesses(rows) == pytest.approx(expected, rel=1e-6)
        for row in (1, 17, 4_321):
            share = 3 * float(weights[row - 1] / weights.sum())
            assert law.rows_above(share * (1 - 1e-9)) == row
            assert law.rows_above(share * (1 + 1e-9)) == row - 1
    assert Zipf(10).rows_above(0) == 10
    assert Zipf(1000, 0.01).rows_above(1e-300) == 1000  # whatever the law would say of more rows
    assert [Zipf(1000, 0.0).rows_above(x) for x in (0.0009, 0.001, 0.0011)] == [1000, 1000, 0]  # all alike


def test_counted_rows_that_are_not_in_order_count_as_later_ones() -> None:
    counted = Counted(torch.tensor([9, 1, 5, 5, 0]), samples=10)
    assert [counted.rows_above(x) for x in (0.9, 0.5, 0.1, 0.0, 1.0)] == [1, 4, 4, 5, 0]
    assert [counted.accesses(n) for n in (0, 1, 5)] == [0.0, 0.9, 2.0]


def test_a_curve_takes_rows_between_its_points_for_alike() -> None:
    curve = Curve([1, 1, 10, 100], [0.5, 0.5, 0.95, 1.0])
    assert [curve.rows_above(x) for x in (0.6, 0.5, 0.049, 0.04, 0.0005, 0.0)] == [0, 1, 10, 10, 100, 100]
    assert [curve.accesses(n) for n in (0, 1, 10, 55, 100)] == pytest.approx([0, 0.5, 0.95, 0.975, 1.0])


def test_room_that_is_left_is_for_rows_without_an_access_in_the_order_of_tables() -> None:
    counts = {"a": [3] * 5 + [0] * 995, "b": [1] * 40, "c": [0] * 300}
    known = {name: Counted(torch.tensor(values), samples=3) for name, values in counts.items()}
    by_name = {t.name: t for t in TABLES}

    def bytes_of(rows: dict[str, int]) -> int:
        tiles = [Tile(t, range(n), range(by_name[t].dim), 0) for t, n in rows.items() if n]
        return sum(tile_bytes(by_name[t.table], t, MOMENTS) for t in tiles)

    wanted = {"a": 105, "b": 40, "c": 0}
    assert hot_rows(TABLES, bytes_of(wanted), popularity=known, moments=MOMENTS) == wanted
    found = hot_rows(TABLES, bytes_of({"a": 5, "b": 20, "c": 0}), popularity=known, moments=MOMENTS)
    assert found["c"] == 0 and found["a"] < 5 and found["b"] == 40  # b has more accesses per byte


def test_copies_that_a_rank_reads_take_of_its_budget() -> None:
    plan = make_plan(TABLES, 2, {"a": "row", "b": "dp", "c": "row"})
    copied = [t for t in plan.tiles if t.readers]
    assert {t.table for t in copied} == {"b"}
    budget = 30_000
    placed = place_in_tiers(plan, TABLES, {"device": budget}, "disk", moments=BY_TABLE)
    by_name = {t.name: t for t in TABLES}
    for rank in range(2):
        here = [t for t in placed.tiles if t.tier == "device" and (t.owner == rank or rank in t.readers)]
        used = sum(tile_bytes(by_name[t.table], t, MOMENTS) for t in here)
        assert used <= budget < used + 2 * tile_bytes(by_name["a"], Tile("a", range(1), range(32), 0), MOMENTS)


def bytes_in(plan, tier: str, rank: int) -> int:  # type: ignore[no-untyped-def]
    by_name = {t.name: t for t in TABLES}
    return sum(tile_bytes(by_name[t.table], t, MOMENTS) for t in plan.tiles if (t.tier, t.owner) == (tier, rank))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["table", "row", "column", Cut(rows=2, cols=2)]),
    st.integers(1, 4),
    st.integers(0, 200_000),
    st.integers(0, 60_000),
    st.floats(0.5, 1.5),
)
def test_budgets_are_kept_and_tiles_cover_the_tables(
    scheme: str | Cut, size: int, device: int, host: int, exponent: float
) -> None:
    popularity = {t.name: Zipf(t.rows, exponent) for t in TABLES}
    plan = place_in_tiers(
        make_plan(TABLES, size, scheme),
        TABLES,
        {"device": device, "host": host},
        "disk",
        popularity=popularity,
        moments=BY_TABLE,
        cache_rows=50,
    )
    plan.check(TABLES)
    for rank in range(size):
        assert bytes_in(plan, "device", rank) <= device
        assert bytes_in(plan, "host", rank) <= host
    for tile in plan.tiles:
        assert (tile.cache_rows > 0) == (tile.tier != "device")
    order = ["device", "host", "disk"]
    for tiles in plan.by_table.values():  # within a part of a table no row is slower than one after it
        parts: dict[object, list[Tile]] = {}
        for t in tiles:
            parts.setdefault((t.cols, t.rows.step, t.rows.start % t.rows.step), []).append(t)
        for part in parts.values():
            tiers = [order.index(t.tier) for t in sorted(part, key=lambda t: t.rows.start)]
            assert tiers == sorted(tiers)


def test_no_other_prefixes_that_fit_are_faster() -> None:
    tables = [Table("x", 6, 16), Table("y", 9, 16)]
    popularity = {"x": Zipf(6, 1.2, ids=2.0), "y": Zipf(9, 0.7)}
    for rows in range(16):
        budget = rows * 64
        plan = place_in_tiers(make_plan(tables, 1), tables, {"device": budget}, "disk", popularity=popularity)
        first = {t.table: len(t.rows) for t in plan.tiles if t.tier == "device"}
        taken = sum(popularity[name].accesses(n) for name, n in first.items())
        best = max(
            popularity["x"].accesses(i) + popularity["y"].accesses(j)
            for i in range(7)
            for j in range(10)
            if i + j <= rows
        )
        assert taken == pytest.approx(best)


def test_copied_tiles_stay_and_a_larger_budget_takes_no_row_away() -> None:
    plan = make_plan(TABLES, 2, Cut(rows=0, hot_rows=10))
    placed = place_in_tiers(plan, TABLES, {"device": 0}, "host")
    assert {t for t in plan.tiles if t.readers} <= set(placed.tiles)
    assert {t.tier for t in placed.tiles if not t.readers} == {"host"}
    before = dict.fromkeys(("a", "b", "c"), 0)
    for budget in range(0, 200_000, 7_000):
        rows = hot_rows(TABLES, budget, moments=MOMENTS)
        assert all(rows[name] >= before[name] for name in before)
        before = rows
    assert before == {"a": 1000, "b": 40, "c": 300}


def test_caches_are_shared_out() -> None:
    plan = place_in_tiers(make_plan(TABLES, 1), TABLES, {"device": 10_000}, "disk", cache_rows=100)
    shared = [t.cache_rows for t in plan.tiles if t.tier == "disk"]
    assert 100 <= sum(shared) <= 100 + len(shared)
    in_host = make_plan(TABLES, 1, Cut(tier="host"))
    assert not any(t.cache_rows for t in with_cache(in_host, 100, ("disk",)).tiles)
    assert all(t.cache_rows for t in with_cache(in_host, 100).tiles)
    assert with_cache(plan, 0).tiles == tuple(Tile(**{**vars(t), "cache_rows": 0}) for t in plan.tiles)


def test_budgets_are_checked() -> None:
    with pytest.raises(PlanError, match="bytes of tier 'device': got -1, expected at least 0"):
        place_in_tiers(make_plan(TABLES, 1), TABLES, {"device": -1}, "host")
    with pytest.raises(PlanError, match="a budget of 10 bytes"):
        hot_rows(TABLES, 10)
