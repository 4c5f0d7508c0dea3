"""The search: plans that cover, fit, are near the bound and the same every time; costs that rise with what is done."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotbed.errors import PlanError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Cut, make_plan, milp
from hotbed.plan.candidates import form_for, form_of, hot_prefix
from hotbed.plan.cost import CostModel, table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.hit_rates import Counted, Zipf
from hotbed.plan.limits import limits_of
from hotbed.plan.schemes import schemes_from
from hotbed.plan.search import EQUAL_LOAD, WORTHWHILE, search
from hotbed.plan.step_time import estimate_step
from hotbed.plan.tier_choice import place_in_tiers
from hotbed.plan.workload import DenseWork, TableUse, Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40")
T0 = (
    *(227605432, 39061, 17296, 7425, 20266, 4, 7123, 1544, 64, 130229467, 3067956, 405283, 11, 2209, 11939, 155, 4),
    *(977, 15, 292775614, 40790948, 187188510, 590152, 12974, 109, 37),
)
"""Rows of Criteo 1TB, all values: 421 GiB with 128 float32 columns."""


def criteo(**options: Any) -> Workload:
    tables = [Table(f"C{i}", rows, 128) for i, rows in enumerate(T0, 1)]
    return Workload.of(tables, moments=RowWiseAdagrad.rule.moments, **{"batch_size": 65536, **options})


@st.composite
def workloads(draw: st.DrawFn, most_tables: int = 6) -> Workload:
    tables = [
        Table(f"t{i}", draw(st.integers(1, 5000)), draw(st.sampled_from([4, 16, 32, 64, 128, 144])))
        for i in range(draw(st.integers(1, most_tables)))
    ]
    ids = {t.name: draw(st.floats(0, 20)) for t in tables}
    return Workload.of(tables, ids=ids, moments=RowWiseAdagrad.rule.moments, batch_size=draw(st.integers(1, 4096)))


@settings(max_examples=40, deadline=None)
@given(workloads(), st.integers(1, 9), st.booleans())
def test_plans_cover_the_tables_and_are_no_better_than_the_bound(work: Workload, ranks: int, with_hardware: bool):
    found = search(work, ranks, A100 if with_hardware else None)
    found.plan.check([use.table for use in work.uses])  # a Plan covers each table exactly, or cannot be made
    assert found.load >= found.bound.load * (1 - 1e-9)
    assert search(work, ranks, A100 if with_hardware else None).plan == found.plan


@settings(max_examples=30, deadline=None)
@given(workloads(), st.integers(1, 5), st.integers(1, 2_000_000))
def test_capacity_holds_or_the_error_says_how_much_is_missing(work: Workload, ranks: int, capacity: int):
    try:
        found = search(work, ranks, capacity_bytes=capacity)
    except PlanError as error:
        assert "more than" in str(error) or "too few; cheapest ways out: " in str(error)
        return
    assert found.costs.memory["device"].max() <= capacity


FIXED = st.sampled_from(
    [
        None,
        Cut(rows=0),
        Cut(rows=0, tier="host"),
        Cut(cols=0, rows=2, tier="disk", cache_rows=9, hot_rows=3),
        Cut(replicated=True),
        Cut(hot_rows=10),
    ]
)


OF_TWO = Workload.of(
    [Table("t0", 1, 4), Table("t1", 245, 32), Table("t2", 8, 16)],
    ids={"t0": 0.0, "t1": 3.0},
    moments=RowWiseAdagrad.rule.moments,
    batch_size=1462,
)
"""Where a rank has tiles of two tables, but of one of them not all rows."""
ONE_EACH = Workload.of(
    [Table("t0", 3, 64), Table("t1", 1, 4), Table("t2", 40, 128)],
    ids={"t1": 0.0},
    moments=RowWiseAdagrad.rule.moments,
)
"""Where two tiles of the first table on one rank, and none on that with most of the last, would be best."""


@settings(max_examples=60, deadline=None)
@example(OF_TWO, 4, [None, Cut(cols=0, rows=2, tier="disk", cache_rows=9, hot_rows=3), *[None] * 4], 1.0, False)
@example(ONE_EACH, 3, [Cut(rows=0), None, Cut(hot_rows=10), *[None] * 3], 1.5, False)
@given(workloads(), st.integers(1, 6), st.lists(FIXED, min_size=6, max_size=6), st.floats(0.1, 1.5), st.booleans())
def test_with_cuts_of_their_own_and_slower_memory_plans_are_no_better_than_the_bound(
    work: Workload, ranks: int, cuts: list[Cut | None], share: float, disk: bool
):
    fixed = {
        u.table.name: cut for u, cut in zip(work.uses, cuts, strict=False) if cut and (u.table.dim > 16 or cut.cols)
    }
    capacity = int(sum(u.table.rows * u.table.dim * 4 for u in work.uses) / ranks * share) + 10_000
    flash = A100.with_(disk_bytes=10**12, disk_read=1e9)
    try:
        found = search(
            work, ranks, flash, fixed=fixed, capacity_bytes=capacity, tiers=("device", "host", "disk")[: 2 + disk]
        )
    except PlanError as error:
        assert any(said in str(error) for said in (" more than ", "column parts of table", " more. Use a smaller"))
        return
    found.plan.check([use.table for use in work.uses])
    assert found.load >= found.bound.load * (1 - 1e-9)
    assert not found.limits.over(found.costs)
    for name, cut in fixed.items():
        if cut == Cut(rows=0) and found.model.workload.by_table[name].table.rows >= ranks:
            assert {t.owner for t in found.plan.by_table[name]} == set(range(ranks))
        if cut.tier != "device":
            others = {t.tier for t in found.plan.by_table[name] if t.rows.start >= cut.hot_rows}
            assert others <= {cut.tier}


def test_a_table_stays_in_the_memory_that_its_cut_says():
    big, small = Table("big", 2_000_000_000, 64), Table("small", 1000, 64)
    own = {"big": Cut(rows=0, tier="host", cache_rows=1000)}
    for tiers in (("device",), ("device", "host")):
        found = search(Workload.of([big, small], batch_size=8192), 8, A100, fixed=own, tiers=tiers)
        assert {(t.tier, t.cache_rows) for t in found.plan.by_table["big"]} == {("host", 1000)}
        assert {t.tier for t in found.plan.by_table["small"]} == {"device"}
        assert found.gap >= -1e-9
    with pytest.raises(PlanError, match=r"92\.1 GiB of host memory"):
        search(Workload.of([big, small], batch_size=8192), 8, A100.with_(host_bytes=10**11), fixed=own)


def test_rows_in_slower_memory_take_nothing_of_the_capacity():
    table = Table("t", 1_000_000, 64)
    assert {t.tier for t in make_plan([table], 2, Cut(rows=0, tier="host"), capacity_bytes=1 << 20).tiles} == {"host"}
    with pytest.raises(PlanError, match=r"memory of rank 0: got 0\.119 GiB of rows"):
        make_plan([table], 2, Cut(rows=0), capacity_bytes=1 << 20)


def test_tables_that_are_looked_up_more_stay_in_faster_memory_whatever_unit_popularity_has():
    tables = [Table("a", 400_000, 64), Table("b", 400_000, 64)]
    plans = [
        search(
            Workload.of(tables, ids={"a": 1.0, "b": 100.0}, batch_size=8192, popularity=popularity),
            2,
            A100,
            capacity_bytes=52 << 20,
            tiers=("device", "host"),
        ).plan
        for popularity in (None, {t.name: Zipf(t.rows) for t in tables}, {"b": Zipf(400_000, ids=7.0)})
    ]
    assert {t.tier for t in plans[0].by_table["b"]} == {"device"}
    assert {t.tier for t in plans[0].by_table["a"]} == {"device", "host"}
    assert plans[1] == plans[2] == plans[0]


def test_hot_rows_are_the_same_whatever_unit_popularity_has():
    table, ids = Table("t", 1_000_000, 64), 20.0
    known = [Zipf(table.rows), Zipf(table.rows, ids=ids), Counted(torch.tensor([50, 3, 1, *[0] * 999_997]), samples=1)]
    found: list[list[Cut]] = []
    for popularity in known:
        use = TableUse(table=table, ids=ids, popularity=popularity)
        model = CostModel(Workload(uses=(use,), batch_size=8 * 1024), 8, A100)
        found.append(list(hot_prefix(use, 8, model)))
    assert found[0] == found[1] == list(hot_prefix(replace(use, popularity=None), 8, model))
    (cut,) = found[0]
    hot = cut.hot_rows  # of which a rank's 1,024 samples look each up 2.3 times, and the next one less
    law = Zipf(table.rows, ids=ids)
    assert (
        (law.accesses(hot) - law.accesses(hot - 1)) * 1024 >= 2.3 > (law.accesses(hot + 1) - law.accesses(hot)) * 1024
    )
    assert found[2] == [Cut(rows=8, hot_rows=3)]


@settings(max_examples=15, deadline=None)
@given(workloads(most_tables=3), st.integers(2, 3))
@example(Workload.of([Table("t0", 3, 4), Table("t1", 1, 4)], moments=RowWiseAdagrad.rule.moments, batch_size=1), 2)
def test_no_assignment_of_whole_tables_is_better(work: Workload, ranks: int):
    """But for what ends a search: a plan within 1 % of the bound, and plans within half a percent count as equal."""
    model = CostModel(work, ranks, A100)
    loads = [form_of(use, Cut(), model).largest for use in work.uses]
    everyone = sum(form_of(use, Cut(), model).everyone for use in work.uses)
    best = min(
        max(sum(x for x, at in zip(loads, chosen, strict=True) if at == r) for r in range(ranks))
        for chosen in itertools.product(range(ranks), repeat=len(loads))
    )
    found = search(work, ranks, A100)
    assert found.load <= EQUAL_LOAD * max(best + everyone, WORTHWHILE * found.bound.load) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(workloads(most_tables=2), st.integers(1, 16), st.sampled_from(["batch", "ids", "dim"]))
def test_cost_does_not_fall_where_more_is_done(work: Workload, ranks: int, what: str):
    (use, *others) = work.uses
    if what == "batch":
        more = replace(work, batch_size=2 * work.batch_size)
    elif what == "ids":
        more = replace(work, uses=(replace(use, ids=2 * use.ids), *others))
    else:
        wider = replace(use.table, dim=use.table.dim + 16)
        more = replace(work, uses=(replace(use, table=wider), *others))
    flat = A100.with_(gather={64: 1e12}, scatter={64: 1e12})  # by which wider rows are read no faster

    def cost(of: Workload) -> np.ndarray:
        plan = make_plan([u.table for u in of.uses], ranks)
        return np.sort(CostModel(of, ranks, flat).ranks(plan).parts.sum(0))

    assert (cost(more) >= cost(work) * (1 - 1e-9)).all()


def test_all_values_of_criteo_on_eight_ranks_of_80_gb():
    found = search(criteo(), 8, Hardware.load("a100-80"))
    assert found.costs.imbalance <= 1.02
    assert found.gap <= 0.02
    assert found.costs.nbytes.max() <= 1.06 * found.costs.nbytes.mean()
    assert not limits_of(found.model).over(found.costs)


def test_what_makes_tables_too_large_is_said_with_ways_out():
    with pytest.raises(PlanError) as caught:
        search(criteo(), 8, A100.with_(device_bytes=48 * 10**9))
    said = str(caught.value)
    assert said.startswith("rows and moments take 424 GiB, ")
    missing = said.split(" more than 8 ranks")[0].split("GiB, ")[1]
    assert f"memory.tier host for the coldest {missing}; memory.tier disk for" in said
    assert said.endswith("bf16 rows, which save 210 GiB; 3 more ranks")
    small = A100.with_(device_bytes=10**9)
    with pytest.raises(PlanError, match=r"got 0\.931 GiB.*\(activations .*batch size"):
        search(criteo(dense=DenseWork(activation_bytes=1e6)), 8, small)


def test_rows_that_devices_cannot_hold_are_in_slower_memory_the_popular_ones_not():
    found = search(criteo(), 8, A100, tiers=("device", "host"))
    tiers = {tile.tier for tile in found.plan.tiles}
    assert tiers == {"device", "host"}
    assert all(t.rows.start > 1000 for t in found.plan.tiles if t.tier == "host")
    assert not found.limits.over(found.costs)
    assert found.costs.imbalance <= 1.02 and found.bound.memory > 0


def test_tables_may_have_schemes_of_their_own_and_the_others_are_searched_for():
    tables = [Table("users", 1000, 64), Table("items", 5000, 64), Table("shops", 10, 64)]
    plan = make_plan(tables, 4, {"users": "row", "i*": Cut(cols=2), "*": "auto"}, hardware=A100, batch_size=4096)
    assert [t.rows for t in plan.by_table["users"]] == [range(k, 1000, 4) for k in range(4)]
    assert {t.cols for t in plan.by_table["items"]} == {range(32), range(32, 64)}
    assert "shops" in plan.by_table
    with pytest.raises(TypeError, match="make_plan: got 'batch_size', which requires the scheme 'auto'"):
        make_plan(tables, 4, "row", batch_size=4)


@pytest.mark.parametrize("ranks", [128, pytest.param(1024, marks=pytest.mark.full)])
def test_hundreds_and_thousands_of_ranks_are_planned(ranks: int):
    """The tables of few rows, which are cut into few tiles, make a row-wise plan of them uneven."""
    found = search(criteo(), ranks, A100)
    rows = make_plan([use.table for use in found.model.workload.uses], ranks, "row")
    assert found.load <= found.model.ranks(rows).load.max() * 1.005
    assert found.plan.world_size == ranks


@pytest.mark.skipif(not milp.is_available(), reason="needs scipy: pip install 'hotbed[plan]'")
@pytest.mark.parametrize("loads", [(8, 7, 6, 5, 4), (9, 7, 7, 5, 3, 3), (1,)])
def test_the_integer_program_finds_the_balance_loads(loads: tuple[int, ...]):
    tables = [Table(f"t{i}", 10, 16) for i in range(len(loads))]
    work = Workload.of(tables, ids={t.name: float(x) for t, x in zip(tables, loads, strict=True)})
    model = CostModel(work, 2)
    solved = milp.solve({u.table.name: [form_of(u, Cut(), model)] for u in work.uses}, 2, 1 << 40)
    assert solved is not None
    totals = np.zeros(2)
    for (form, owners), load in zip(solved, loads, strict=True):
        assert len(owners) == form.tiles == 1
        totals[owners] += load
    assert totals.max() == -(-sum(loads) // 2) or len(loads) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"users": {"row": 2}},
            "plan.yaml: a cut of table 'users': got 'row', expected one of rows, .* did you mean 'rows'",
        ),
        ({"users": 3}, r"plan\.yaml: table 'users': got 3"),
        ({"users": {"rows": -1}}, "a cut: rows: got -1, expected at least 0"),
    ],
)
def test_what_is_no_scheme_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        schemes_from(values, "plan.yaml")


def test_tables_that_are_too_narrow_to_be_cut_by_columns_are_said():
    message = "column parts of table 't': got 16 fp32 columns"
    with pytest.raises(PlanError, match=message):
        make_plan([Table("t", 100, 16)], 2, "column")
    with pytest.raises(PlanError, match="multiples of 128 columns"):
        make_plan([Table("t", 100, 128, dtype="int8"), Table("u", 9, 64)], 2, {"t": "column", "*": "auto"})
    assert len(make_plan([Table("t", 100, 16)], 1, "column").tiles) == 1
    assert len(make_plan([Table("t", 100, 16), Table("u", 9, 64)], 2, "column").tiles) == 3


def test_tables_whose_vectors_are_pooled_by_owners_are_not_copied() -> None:
    work = Workload.of([Table("t", 100, 16)], ids={"t": 20.0}, batch_size=8192, wire={"t": "pooled"})
    model, use = CostModel(work, 8, A100), work.uses[0]
    copied, whole = (form_of(use, cut, model) for cut in (Cut(replicated=True), Cut()))
    assert copied.total < whole.total  # and yet
    chosen = form_for(use, np.inf, np.inf, 2**40, model, copies=True, columns=False)
    assert not chosen.cut.replicated and not chosen.cut.hot_rows


def test_the_dense_part_takes_products_and_moved_bytes_and_its_launches() -> None:
    def dense(**options: Any) -> float:
        work = criteo(dense=DenseWork(flops=1e6, **options))
        model = CostModel(work, 8, A100)
        plan = make_plan([use.table for use in work.uses], 8, "row")
        return estimate_step(plan, model.ranks(plan), model).dense

    plain, moving = dense(), dense(moved_bytes=1e5)
    assert moving - plain == pytest.approx(1e5 * 65536 / 8 / A100.stream)
    assert dense(moved_bytes=1e5, launches=100) == pytest.approx(moving + 100 * A100.launch_s)


SLOW = A100.with_(network=1e9, ranks_per_node=2)
"""On more than two ranks, exchanges take most of a step."""


def long_bags(**options: Any) -> Workload:
    """Two tables of 100 ids per bag, and two of one id, with different dims."""
    tables = [Table("long", 50_000, 64), Table("long too", 60_000, 64), Table("one", 50_000, 32), Table("1", 9, 32)]
    ids = {"long": 100.0, "long too": 100.0}
    return Workload.of(tables, ids=ids, moments=RowWiseAdagrad.rule.moments, batch_size=8192, **options)


def test_tables_of_many_ids_per_bag_send_pooled_vectors() -> None:
    found = search(long_bags(), 4, SLOW)
    assert found.plan.wire == {"long": "pooled", "long too": "pooled"}
    for name in found.plan.wire:
        assert len({tile.rows for tile in found.plan.by_table[name]}) == 1
    by_rows = search(long_bags(wire=dict.fromkeys(["long", "long too", "one", "1"], "rows")), 4, SLOW)
    assert by_rows.plan.wire == {}
    assert found.load < 0.8 * by_rows.load
    steps = [estimate_step(one.plan, one.costs, one.model).seconds for one in (found, by_rows)]
    assert steps[0] < steps[1]
    again = CostModel(long_bags(), 4, SLOW).ranks(found.plan)  # the plan has its wire formats with it
    assert np.array_equal(again.load, found.costs.load)


@pytest.mark.parametrize(
    "options",
    [
        {"forward_codec": "bf16"},
        {"backward_codec": "fp16"},
        {"wire": {"long": "rows", "long too": "rows"}},
        {"bags": {"long": 100.0, "long too": 100.0}},  # bags of one id
    ],
)
def test_tables_send_rows_where_pooled_vectors_are_not_exact_or_not_fewer(options: dict[str, Any]) -> None:
    assert search(long_bags(**options), 4, SLOW).plan.wire == {}


def test_pooled_vectors_are_not_chosen_where_they_save_less_than_they_cost() -> None:
    assert search(long_bags(), 4, SLOW.with_(launch_s=1.0)).plan.wire == {}
    assert search(long_bags(), 4).plan.wire == search(long_bags(), 1, SLOW).plan.wire == {}
    free = search(long_bags(fused_pooling=True), 4, SLOW.with_(launch_s=1.0))
    assert free.plan.wire.keys() >= {"long", "long too"}


@pytest.mark.parametrize("cut", [Cut(), Cut(rows=0), Cut(replicated=True), Cut(hot_rows=10)])
def test_tables_with_given_cuts_keep_the_given_wire_format(cut: Cut) -> None:
    found = search(long_bags(), 4, SLOW, fixed={"long": cut})
    assert found.plan.wire.keys() <= {"long too"}
    assert search(long_bags(), 4, SLOW, fixed={"one": cut}).plan.wire == {"long": "pooled", "long too": "pooled"}
    assert found.gap >= -1e-9


def test_given_pooled_vectors_stay_also_where_rows_would_be_faster() -> None:
    assert search(long_bags(wire={"1": "pooled"}), 4, SLOW).plan.wire.keys() == {"1", "long", "long too"}
    plan = make_plan([Table("t", 100, 16)], 2, "auto", wire="pooled", hardware=A100)
    assert plan.wire == {"t": "pooled"}


def test_make_plan_chooses_the_wire_format_of_searched_tables_only() -> None:
    tables = [use.table for use in long_bags().uses]
    options: dict[str, Any] = {"ids": {"long": 100.0, "long too": 100.0}, "hardware": SLOW, "batch_size": 8192}
    assert make_plan(tables, 4, "auto", **options).wire == {"long": "pooled", "long too": "pooled"}
    assert make_plan(tables, 4, "auto", wire="rows", **options).wire == {}
    assert make_plan(tables, 4, {"long": "table", "*": "auto"}, **options).wire.keys() <= {"long too"}
    assert make_plan(tables, 4, "auto", bags={"long": 100.0, "long too": 100.0}, **options).wire == {}


def test_rows_in_several_memories_are_not_pooled() -> None:
    """A bag over two memories of a rank would be summed in parts."""
    work = long_bags()
    nbytes = sum(table_bytes(use.table, use.moments) for use in work.uses)
    found = search(work, 4, SLOW, capacity_bytes=nbytes // 8, tiers=("device", "host"))
    assert any(tile.tier == "host" for tile in found.plan.tiles)
    for name in found.plan.wire:
        assert len({tile.rows for tile in found.plan.by_table[name]}) == 1
    whole = make_plan([use.table for use in work.uses], 2, wire={"long": "pooled"})
    placed = place_in_tiers(whole, [use.table for use in work.uses], {"device": nbytes // 8}, "host")
    assert len(placed.by_table["long"]) == 2 and placed.wire == {}


@settings(max_examples=25, deadline=None)
@given(workloads(), st.integers(2, 6), st.floats(1e6, 1e10), st.sampled_from([0.0, 1e-6, 1e-4]))
def test_plans_with_free_wire_formats_are_above_the_bound_and_not_slower_than_plans_by_rows(
    work: Workload, ranks: int, network: float, launch_s: float
) -> None:
    hardware = A100.with_(network=network, ranks_per_node=1, launch_s=launch_s, message_s=launch_s)
    found = search(work, ranks, hardware)
    assert found.gap >= -1e-9
    by_rows = search(replace(work, wire={use.table.name: "rows" for use in work.uses}), ranks, hardware)
    assert by_rows.gap >= -1e-9
    assert found.bound.load <= by_rows.bound.load * (1 + 1e-9)
    assert found.load <= EQUAL_LOAD * max(by_rows.load, WORTHWHILE * found.bound.load) * (1 + 1e-9)
