"""How near plans come to the lower bound with cuts of their own, and tiles that are uneven; the integer program."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotbed.errors import PlanError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Cut, milp
from hotbed.plan.balance import Assignment, balance_loads
from hotbed.plan.bound import lower_bound
from hotbed.plan.candidates import column_parts, form_of
from hotbed.plan.cost import HOST, CostModel, table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import search
from hotbed.plan.tiling import Tier, Tile
from hotbed.plan.workload import Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40")
needs_scipy = pytest.mark.skipif(not milp.is_available(), reason="needs scipy: pip install 'hotbed[plan]'")


@given(rows=st.integers(1, 200), parts=st.integers(1, 40))
def test_tiles_cost_in_all_what_the_table_costs_however_their_ranges_are_written(rows: int, parts: int):
    work = Workload.of([Table("t", rows, 32)], batch_size=512)
    model = CostModel(work, 4, A100)
    tiles = [Tile("t", range(k, rows, parts), range(32), 0) for k in range(min(parts, rows))]
    whole = model.tile(Tile("t", range(rows), range(32), 0))
    assert sum(model.tile(tile).owner.sum() for tile in tiles) == pytest.approx(whole.owner.sum())
    for tile in tiles:
        written = Tile("t", tile.rows[: len(tile.rows)], range(32), 0)  # a slice ends where the next row would be
        assert np.array_equal(model.tile(written).owner, model.tile(tile).owner)


def test_exchanges_that_a_cut_needs_are_in_the_bound():
    """The copies of a table of three rows take more than all tables: no plan does without."""
    tables = [Table("tiny", 3, 64), *(Table(f"t{i}", 10_000 * (i + 1), 64) for i in range(5))]
    work = Workload.of(tables, batch_size=4096)
    found = search(work, 8, A100, fixed={"tiny": Cut(replicated=True)})
    assert found.bound.exchanges == found.model.copies_s > found.costs.load.max()
    assert -1e-9 <= found.gap <= 0.02
    wide = Workload.of([Table("w", 1000, 64), Table("t", 1000, 16)], moments=RowWiseAdagrad.rule.moments, batch_size=64)
    cut = search(wide, 2, A100, fixed={"w": Cut(cols=2)})
    assert cut.bound.exchanges == cut.model.sums_s > 0
    assert -1e-9 <= cut.gap <= 0.05


def test_a_rank_with_a_piece_that_cannot_be_cut_gets_less_of_the_other_tables():
    tables = [Table("own", 50_000, 128), *(Table(f"t{i}", 300_000, 128) for i in range(3))]
    ids = {"own": 6.0} | {f"t{i}": 10.0 for i in range(3)}
    found = search(Workload.of(tables, ids=ids, batch_size=16 * 1024), 16, A100, fixed={"own": Cut()})
    owner = found.plan.by_table["own"][0].owner
    assert found.bound.binds == "a piece of table 'own'"
    assert -1e-9 <= found.gap <= 0.01
    assert not any(t.owner == owner and t.table != "own" for t in found.plan.tiles)


def test_tiles_that_cannot_be_cut_share_ranks_where_they_are_more():
    tables = [Table(f"t{i}", 1000, 16) for i in range(3)]
    fixed = {t.name: Cut() for t in tables}
    found = search(Workload.of(tables, ids={t.name: 1.0 for t in tables}, batch_size=64), 2, A100, fixed=fixed)
    assert found.bound.piece == pytest.approx(found.load)  # two of three are on one rank


def test_tables_of_fewer_rows_than_would_be_even_are_cut_by_columns_too():
    """17 rows on 16 ranks leave the busiest with two; four parts of five rows and a quarter of the columns do not."""
    flat = A100.with_(gather={64: 1e12}, scatter={64: 1e12})
    work = Workload.of([Table("t", 17, 256)], ids={"t": 2.0}, batch_size=4096)
    found = search(work, 16, flat, integer_program=False)
    assert len({t.cols for t in found.plan.tiles}) > 1
    assert found.costs.imbalance < 1.2


LARGE = st.builds(lambda digits, dim: (int(10**digits), dim), st.floats(0, 10.5), st.sampled_from([4, 16, 64, 256]))
"""Rows and columns of tables of up to 30 billion rows, whose bytes times rows are far beyond 64 bits."""


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(LARGE, min_size=1, max_size=3),
    ids=st.floats(0.1, 40),
    ranks=st.integers(1, 6),
    held=st.floats(0.05, 0.95),
    cache_rows=st.sampled_from([0, 100]),
    tiers=st.sampled_from([("device", "host"), ("device", "disk"), ("device", "host", "disk")]),
    overheads=st.sampled_from([{}, {"host_row": {1: 1e-8}}, {"host_row": {1: 1e-8}, "disk_row": {1: 3e-9}}]),
)
@example([(4_411_764_706, 256), (1_102_941_176, 256)], 20.0, 8, 0.2, 0, ("device", "host"), {})
def test_no_plan_with_slower_memory_is_below_the_bound(
    shapes: list[tuple[int, int]],
    ids: float,
    ranks: int,
    held: float,
    cache_rows: int,
    tiers: tuple[Tier, ...],
    overheads: dict[str, dict[int, float]],
):
    tables = [Table(f"t{i}", rows, dim) for i, (rows, dim) in enumerate(shapes)]
    moments = RowWiseAdagrad.rule.moments
    work = Workload.of(tables, ids={t.name: ids for t in tables}, moments=moments, batch_size=512 * ranks)
    endless = A100.with_(device_bytes=10**16, host_bytes=10**18, disk_bytes=10**18, disk_read=1e9, overheads=overheads)
    capacity = int(held * sum(table_bytes(t, moments) for t in tables) / ranks) + 10_000
    try:
        found = search(
            work,
            ranks,
            endless,
            capacity_bytes=capacity,
            tiers=tiers,
            cache_rows=cache_rows,
            integer_program=False,
        )
    except PlanError as error:  # copies of a few rows may be too many for the smallest devices
        assert "more than" in str(error)
        return
    assert found.gap >= -1e-9


def test_the_bound_of_rows_in_slower_memory_is_what_the_coldest_of_them_take():
    """Half of a table of four billion rows; a plan has the half with the larger numbers there."""
    table = Table("t", 1 << 32, 256)
    model = CostModel(Workload.of([table], ids={"t": 20.0}, batch_size=4096), 4, A100)
    half = range(table.rows // 2, table.rows)
    cold = float(model.tile(Tile("t", half, range(256), 0, tier="host")).owner[HOST])
    bound = lower_bound(model, {}, table_bytes(table) // 2)
    assert bound.memory == pytest.approx(cold / 4, rel=1e-6)
    assert lower_bound(model, {}, table_bytes(table)).memory > 10 * bound.memory


def test_of_several_slower_memories_each_table_has_the_cheapest_in_the_bound():
    """A narrow row of the host takes longer than its bytes of the disk; a wide one does not."""
    tables = [Table("narrow", 10_000, 16), Table("wide", 10_000, 1024)]
    here = A100.with_(disk_bytes=10**12, disk_read=A100.host_link / 4, overheads={"host_row": {1: 1e-7}})
    model = CostModel(Workload.of(tables, batch_size=4096), 2, here)
    least: dict[tuple[str, ...], float] = {}
    slower: list[list[Tier]] = [["host"], ["disk"], ["host", "disk"]]
    for tiers in slower:
        for table, stays in itertools.permutations(["narrow", "wide"], 2):
            bytes_of = table_bytes(model.workload.by_table[table].table)
            least[table, *tiers] = lower_bound(model, {}, bytes_of, tiers, [stays]).memory
        everything = sum(map(table_bytes, tables))
        least["both", *tiers] = lower_bound(model, {}, everything, tiers).memory
    assert least["narrow", "disk"] < least["narrow", "host"] and least["wide", "host"] < least["wide", "disk"]
    assert least["both", "host", "disk"] == pytest.approx(least["narrow", "disk"] + least["wide", "host"])
    assert least["both", "host", "disk"] < min(least["both", "host"], least["both", "disk"])


def test_disks_that_a_machine_has_not_are_not_in_the_bound():
    work = Workload.of([Table("t", 100_000, 64)], batch_size=4096)
    bounds = [
        search(work, 2, A100.with_(disk_bytes=0, disk_read=0.0), capacity_bytes=1 << 20, tiers=tiers).bound
        for tiers in (("device", "host"), ("device", "host", "disk"))
    ]
    assert bounds[0] == bounds[1] and bounds[0].memory > 0


@needs_scipy
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
def test_the_integer_program_is_never_worse_than_the_heuristics(loads: list[int], ranks: int):
    tables = [Table(f"t{i}", 10, 16) for i in range(len(loads))]
    work = Workload.of(tables, ids={t.name: float(x) for t, x in zip(tables, loads, strict=True)})
    model = CostModel(work, ranks)
    forms = {use.table.name: [form_of(use, Cut(), model)] for use in work.uses}
    solved = milp.solve(forms, ranks, 1 << 40)
    assert solved is not None
    totals = np.zeros(ranks)
    for form, owners in solved:
        np.add.at(totals, owners, form.largest)
    start = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    placed = balance_loads(
        np.array([form.largest for (form,) in forms.values()]), np.ones(len(loads), dtype=np.int64), *start, None
    )
    assert isinstance(placed, Assignment)
    assert totals.max() <= placed.loads.max() * (1 + milp.GAP)


@needs_scipy
def test_the_integer_program_counts_what_ranks_have_already():
    tables = [Table(f"t{i}", 10, 16) for i in range(3)]
    model = CostModel(Workload.of(tables), 2)
    forms = {use.table.name: [form_of(use, Cut(), model)] for use in model.workload.uses}
    load = next(iter(forms.values()))[0].largest
    for before, room in (([3 * load, 0.0], 1 << 40), ([0.0, 0.0], 2000)):
        solved = milp.solve(forms, 2, room, before, [0 if before[0] else 1500, 0])
        assert solved is not None
        assert [owners for _, owners in solved] == [[1], [1], [1]]


@pytest.mark.parametrize(("dim", "dtype", "parts"), [(16, "fp32", [1]), (64, "fp32", [1, 2, 4]), (128, "int8", [1])])
def test_columns_are_cut_into_whole_blocks(dim: int, dtype: Literal["fp32", "int8"], parts: list[int]):
    (use,) = Workload.of([Table("t", 10, dim, dtype=dtype)]).uses
    assert column_parts(use) == parts
