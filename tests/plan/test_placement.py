"""Every scheme cuts tables into tiles that cover them, on ranks that share the work."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hotbed.cli.pages.plan_page import plan_grids
from hotbed.cli.pages.report_page import print_table
from hotbed.errors import PlanError
from hotbed.optim import Moment, RowWiseAdagrad
from hotbed.plan import Cut, Plan, make_plan
from hotbed.plan.cost import Cost, CostModel, tile_bytes
from hotbed.plan.schemes import SCHEMES
from hotbed.plan.tiling import Tile, column_unit
from hotbed.plan.workload import Workload
from hotbed.specs import Table

TABLES = [Table("a", 100, 64), Table("b", 3, 64), Table("c", 50, 20), Table("d", 1, 256, dtype="int8")]


def rank_costs(tiles: Sequence[Tile], tables: Sequence[Table], world_size: int, **uses: Any) -> list[Cost]:
    return CostModel(Workload.of(tables, **uses), world_size).ranks(tiles).costs


def of(plan: Plan, table: str) -> list[Tile]:
    return list(plan.by_table[table])


@given(
    world_size=st.integers(1, 9),
    tables=st.lists(
        st.builds(
            lambda rows, dim, dtype: (rows, dim, dtype),
            st.integers(1, 40),
            st.integers(1, 300),
            st.sampled_from(["fp32", "int8"]),
        ),
        min_size=1,
        max_size=5,
    ),
    cut=st.builds(
        Cut, rows=st.integers(0, 5), cols=st.integers(0, 5), replicated=st.booleans(), hot_rows=st.integers(0, 50)
    ),
)
def test_any_cut_of_any_table_is_a_valid_plan(world_size, tables, cut):
    made = [Table(f"t{i}", rows, dim, dtype=dtype) for i, (rows, dim, dtype) in enumerate(tables)]
    if cut.cols != 1 and world_size > 1 and not cut.replicated and all(t.dim <= column_unit(t) for t in made):
        with pytest.raises(PlanError, match=r"column parts of table 't[0-9]+': got"):
            make_plan(made, world_size, cut)
        return
    plan = make_plan(made, world_size, cut)
    plan.check(made)
    for t in plan.tiles:
        rows = next(m.rows for m in made if m.name == t.table)
        hot = bool(cut.hot_rows) and t.rows == range(min(cut.hot_rows, rows))
        everyone = tuple(r for r in range(world_size) if r != t.owner)
        assert t.readers == (everyone if cut.replicated or hot else ())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rank_holds_everything_whatever_the_scheme(scheme):
    plan = make_plan(TABLES, 1, scheme)
    assert {t.owner for t in plan.tiles} == {0}
    plan.check(TABLES)


def test_table_wise_is_one_tile_per_table():
    plan = make_plan(TABLES, 3)
    assert [(t.rows, t.cols) for t in plan.tiles] == [(range(t.rows), range(t.dim)) for t in TABLES]


def test_row_wise_is_strided_and_small_tables_use_fewer_ranks():
    plan = make_plan(TABLES, 4, "row")
    assert [(t.rows, t.owner) for t in of(plan, "a")] == [(range(k, 100, 4), k) for k in range(4)]
    assert [t.rows for t in of(plan, "b")] == [range(k, 3, 4) for k in range(3)]
    assert len(of(plan, "d")) == 1


def test_column_wise_cuts_at_multiples_of_16_or_128():
    plan = make_plan(TABLES, 3, "column")
    assert [t.cols for t in of(plan, "a")] == [range(16), range(16, 32), range(32, 64)]
    assert [t.cols for t in of(plan, "c")] == [range(16), range(16, 20)]
    assert [t.cols for t in of(plan, "d")] == [range(128), range(128, 256)]
    alone = make_plan(TABLES[:1], 3, "column")
    assert sorted(t.owner for t in alone.tiles) == [0, 1, 2]


def test_rows_of_a_grid_stay_inside_a_node():
    """Hierarchical sharding: two nodes of two ranks, a table's columns to nodes, its rows over the ranks of a node."""
    plan = make_plan([TABLES[0]], 4, "grid")
    by_cols: dict[range, list[int]] = {}
    for t in plan.tiles:
        by_cols.setdefault(t.cols, []).append(t.owner)
    assert sorted(by_cols.values()) == [[0, 1], [2, 3]]


def test_data_parallel_tables_are_read_by_all_and_hot_rows_too():
    plan = make_plan(TABLES[:2], 3, {"a": Cut(rows=0, hot_rows=10), "b": "dp"})
    hot, *cold = of(plan, "a")
    assert hot.rows == range(10) and len(hot.readers) == 2
    assert [(t.rows, t.readers) for t in cold] == [(range(10 + k, 100, 3), ()) for k in range(3)]
    (whole,) = of(plan, "b")
    assert whole.ranks == (0, 1, 2)


def test_work_decides_and_not_bytes():
    """A small table that is looked up often is the heavy one."""
    tables = [Table("large", 1_000_000, 16), Table("busy", 10, 16), Table("idle", 10, 16)]
    plan = make_plan(tables, 2, ids={"busy": 50.0})
    owner = {t.table: t.owner for t in plan.tiles}
    assert owner["large"] == owner["idle"] != owner["busy"]


def test_bytes_of_a_tile():
    prefix = Table("p", 100, 256, dtype="int8", fp32_rows=10)
    strided = Tile("p", range(1, 100, 4), range(256), 0)
    assert tile_bytes(prefix, strided) == 3 * 1024 + 22 * (256 + 2)
    assert tile_bytes(prefix, strided, RowWiseAdagrad.rule.moments) == 3 * 1024 + 22 * 258 + 25 * 4
    half = Tile("p", range(100), range(128), 0)
    assert tile_bytes(prefix, half, [Moment("m", per="element")]) == 10 * 512 + 90 * 129 + 100 * 512


def test_readers_hold_rows_and_look_up_but_have_no_moments():
    table = Table("t", 10, 16)
    (owner, reader) = rank_costs(
        [Tile("t", range(10), range(16), 0, (1,))], [table], 2, moments=RowWiseAdagrad.rule.moments
    )
    assert owner == (10 * 64 + 40, pytest.approx(16 * (1 / 6 + 2 / 3)))  # half the lookups, all updates
    assert reader == (10 * 64, pytest.approx(16 / 6))


def test_memory_limits_are_kept_or_the_error_says_what_does_not_fit():
    tables = [Table(f"t{i}", 1 << 20, 64) for i in range(4)]  # 256 MiB each
    plan = make_plan(tables, 2, capacity_bytes=600 << 20)
    assert max(c.nbytes for c in rank_costs(plan.tiles, tables, 2)) <= 600 << 20
    with pytest.raises(PlanError, match=r"table 't.', columns 0 … 63, needs 0\.25 GiB, 0\.109 GiB more than any rank"):
        make_plan(tables, 2, capacity_bytes=400 << 20)
    with pytest.raises(PlanError, match="memory of rank 0: got 1 GiB of rows"):
        make_plan(tables, 2, "dp", capacity_bytes=512 << 20)


def test_parts_go_where_they_fit_even_if_others_have_less_work():
    tables = [Table("x", 1 << 20, 64), Table("y", 1 << 20, 64), Table("z", 10, 64)]
    plan = make_plan(tables, 4, Cut(rows=2), ids={"z": 100.0}, capacity_bytes=200 << 20)
    assert max(c.nbytes for c in rank_costs(plan.tiles, tables, 4)) < 200 << 20


def test_what_crosses_the_wire_is_chosen_for_all_tables_or_by_table():
    assert make_plan(TABLES, 2).wire == make_plan(TABLES, 2, wire="rows").wire == {}
    assert make_plan(TABLES, 2, wire="pooled").wire == dict.fromkeys("abcd", "pooled")
    some = make_plan(TABLES, 2, {"a": "dp"}, wire={"b": "pooled", "a": "rows"})
    assert some.wire == {"b": "pooled", "a": "rows"}
    assert make_plan(TABLES, 1, "dp", wire="pooled").wire["a"] == "pooled"  # one rank has no copies


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_plan(TABLES, 2, "dp", wire="pooled"), "wire of table 'a': got 'pooled'"),
        (lambda: make_plan(TABLES, 2, Cut(hot_rows=1), wire={"c": "pooled"}), "wire of table 'c': got 'pooled'"),
        (
            lambda: make_plan(TABLES, 2, wire="vectors"),
            "wire of table 'a': got 'vectors', expected one of rows, pooled",
        ),
        (lambda: make_plan(TABLES, 2, wire={"x": "rows"}), "table in wire: got 'x', expected one of a, b, c, d"),
        (lambda: make_plan(TABLES, 0), "world_size: got 0, expected at least 1"),
        (lambda: make_plan(TABLES, 2.0, "column"), "world_size: got 2.0, expected an integer"),
        (
            lambda: make_plan(TABLES, 2, None),
            "scheme: got None, expected one of table, row, column, grid, dp, auto. Or",
        ),
        (
            lambda: make_plan(TABLES, 2, ids={"a": -3.0}),
            "ids of table 'a' per sample: got -3.0, expected a finite number at least 0",
        ),
        (
            lambda: make_plan(TABLES, 2, ids={"a": float("nan")}),
            "ids of table 'a' per sample: got nan, expected a finite number at least 0",
        ),
        (
            lambda: make_plan(TABLES, 2, "rows"),
            "scheme: got 'rows', expected one of table, row, column, grid, dp, auto.*did you mean 'row'",
        ),
        (
            lambda: make_plan(TABLES, 2, {"aa": "row"}),
            "table in schemes: got 'aa', expected one of a, b, c, d.*did you mean 'a'",
        ),
        (lambda: make_plan(TABLES, 2, ids={"x": 2.0}), "table in ids: got 'x', expected one of a, b, c, d"),
        (lambda: Cut(rows=-1), "a cut: rows: got -1, expected at least 0"),
        (lambda: Cut(cols=1.5), "a cut: cols: got 1.5, expected an integer"),
        (lambda: Cut(hot_rows=-2), "a cut: hot_rows: got -2, expected at least 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_plan_is_shown_by_table_and_rank():
    plan = make_plan([*TABLES[:2], Table("e", 40, 16)], 3, {"a": Cut(rows=0, hot_rows=10), "b": "dp"})
    console = Console(record=True, width=100, file=io.StringIO())
    for table in plan_grids(plan, rank_costs(plan.tiles, [*TABLES[:2], Table("e", 40, 16)], 3)):
        print_table(console, table)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert "a 100 × 64 4 row parts, 10 rows on 3 ranks 0 … 2" in lines
    assert any(line.startswith("b 3 × 64 all rows on 3 ranks ") for line in lines)
    assert any(line.startswith("e 40 × 16 whole ") for line in lines)
    assert sum(line.endswith("█ 100%") for line in lines) == 1
