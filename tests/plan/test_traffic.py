"""What a plan says that ranks send, on cases that can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.net.traffic import step_traffic
from hotbed.plan import Plan, Tile

ROWS, DIM = 100, 32


def test_a_table_on_one_rank():
    plan = Plan(3, (Tile("t", range(ROWS), range(DIM), 1),))
    found = step_traffic(plan, {"t": 10}, backward="bf16")
    asking = (10 * 8, 0, 10 * DIM * 2, 0, 0)
    assert [tuple(t) for t in found] == [asking, (0, 2 * 10 * DIM * 4, 0, 0, 0), asking]
    assert found[0].total == sum(asking)


def test_rows_of_which_ranks_read_copies_go_to_the_readers_after_the_update():
    plan = Plan(3, (Tile("t", range(ROWS), range(DIM), 0, readers=(2,)),))
    owner, other, reader = step_traffic(plan, {"t": 10}, touched={"t": 25})
    assert owner == (0, 10 * DIM * 4, 0, 25 * (8 + 4 * DIM), 0)
    assert other == (80, 0, 10 * DIM * 4, 0, 0)
    assert reader == (80, 0, 10 * DIM * 4, 0, 0)


def test_parts_of_a_row_exchange_their_sums():
    halves = (Tile("t", range(ROWS), range(16), 0), Tile("t", range(ROWS), range(16, 32), 1))
    found = step_traffic(Plan(2, halves), {"t": 10}, touched={"t": 18}, row_sums=2)
    assert [t.sums for t in found] == [2 * 18 * 4, 2 * 18 * 4]


@pytest.mark.parametrize("scheme", ["row", "table"])
def test_all_ranks_together_send_what_they_ask_for(scheme: str):
    owners = range(4) if scheme == "row" else [2]
    tiles = tuple(Tile("t", range(i, ROWS, len(owners)), range(DIM), o) for i, o in enumerate(owners))
    found = step_traffic(Plan(4, tiles), {"t": 40})
    assert sum(t.rows for t in found) == pytest.approx(3 * 40 * DIM * 4)
    assert sum(t.gradients for t in found) == pytest.approx(3 * 40 * DIM * 4)


@given(st.integers(2, 8), st.integers(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_copies_of_popular_rows_never_send_less_than_rows_that_are_asked_for(
    ranks: int, hot: int, of_one: float, of_others: float
):
    """Rows that the ranks' batches touch together are at least those of one, and all of them go to every reader."""
    one = of_one * ROWS
    distinct, touched = {"t": one}, {"t": one + of_others * (min(ranks * one, ROWS) - one)}
    owners = range(ranks)
    others = [(*range(i), *range(i + 1, ranks)) for i in owners]
    plain = [Tile("t", range(i, ROWS, ranks), range(DIM), i) for i in owners]
    copied = [Tile("t", range(i, hot, ranks), range(DIM), i, readers=others[i]) for i in owners if i < hot]
    cold = [Tile("t", range(hot + i, ROWS, ranks), range(DIM), i) for i in owners]
    plans = Plan(ranks, tuple(plain)), Plan(ranks, (*copied, *cold))
    sent, with_hot = (sum(t.total for t in step_traffic(plan, distinct, touched=touched)) for plan in plans)
    assert with_hot >= sent * (1 - 1e-9)
