"""Placement: greedy and Karmarkar-Karp, the better one kept, memory respected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.plan import balance
from hotbed.plan.balance import Assignment, balance_loads


def placed(
    loads: Sequence[float],
    nbytes: Sequence[int] | None = None,
    start: Sequence[float] = (0.0, 0.0),
    held: Sequence[int] | None = None,
    capacity: int | None = None,
) -> Assignment | tuple[int, int]:
    sizes = [1] * len(loads) if nbytes is None else nbytes
    before = [0] * len(start) if held is None else held
    ints = (np.array(sizes, dtype=np.int64), np.array(before, dtype=np.int64))
    return balance_loads(np.array(loads, dtype=float), ints[0], np.array(start, dtype=float), ints[1], capacity)


def busiest(found: Assignment | tuple[int, int]) -> float:
    assert isinstance(found, Assignment)
    return float(found.loads.max())


def best_of_all(work: Sequence[float], places: int) -> float:
    """Load of the busiest place in the best of all assignments; places are alike, so their loads are kept sorted."""
    reached = {(0.0,) * places}
    for load in work:
        reached = {
            tuple(sorted((*before[:at], before[at] + load, *before[at + 1 :])))
            for before in reached
            for at in range(places)
        }
    return min(loads[-1] for loads in reached)


@pytest.fixture
def no_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_level", lambda *_: None)


@pytest.mark.usefixtures("no_moves")
def test_karmarkar_karp_wins_where_greedy_does_not_and_is_kept(monkeypatch: pytest.MonkeyPatch):
    """The textbook case: greedy puts 8+5+4 against 7+6, differencing 8+6 against 7+5+4."""
    assert busiest(found := placed([8, 7, 6, 5, 4])) == 16.0
    assert isinstance(found, Assignment) and found.method == "Karmarkar-Karp"
    monkeypatch.setattr(balance, "_MOST_DIFFERENCES", 0)
    assert busiest(found := placed([8, 7, 6, 5, 4])) == 17.0
    assert isinstance(found, Assignment) and found.method == "greedy"


@pytest.mark.usefixtures("no_moves")
def test_greedy_wins_where_karmarkar_karp_does_not():
    """Differencing makes equal sets before it looks at what places have already."""
    found = placed([5, 5], start=[10.0, 0.0])
    assert busiest(found) == 10.0
    assert isinstance(found, Assignment) and found.method == "greedy"


def test_local_moves_go_on_where_greedy_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(balance, "_MOST_DIFFERENCES", 0)
    assert busiest(placed([8, 7, 6, 5, 4])) < 17.0


@given(work=st.lists(st.integers(1, 30), min_size=1, max_size=7), places=st.integers(1, 3))
def test_never_worse_than_four_thirds_of_the_best(work: list[int], places: int):
    """The bound of greedy, longest first (Graham 1969): 4/3 − 1/(3 places)."""
    best = best_of_all(work, places)
    assert best <= busiest(placed(work, start=[0.0] * places)) <= best * (4 / 3 - 1 / (3 * places)) + 1e-9


@given(work=st.lists(st.integers(1, 30), min_size=1, max_size=8), places=st.integers(1, 3))
def test_karmarkar_karp_against_all_assignments(work: list[int], places: int):
    """Best for up to two items more than places, else its ratio (Michiels et al. 2007): 7/6 or 4/3 − 1/(3 places)."""
    best = best_of_all(work, places)
    loads = np.array(work, dtype=float)
    chosen = balance._karmarkar_karp(loads, np.zeros(places))
    assert chosen.shape == loads.shape
    most = float(np.bincount(chosen, weights=loads, minlength=places).max())
    ratio = 1.0 if len(work) <= places + 2 else {1: 1.0, 2: 7 / 6}.get(places, 4 / 3 - 1 / (3 * places))
    assert best <= most <= best * ratio + 1e-9


@given(
    items=st.lists(st.tuples(st.integers(1, 10), st.floats(0, 10)), max_size=12),
    start=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), min_size=1, max_size=4),
    capacity=st.integers(10, 40),
)
def test_capacity_holds_or_an_item_is_named(
    items: list[tuple[int, float]], start: list[tuple[int, float]], capacity: int
):
    nbytes, loads = [n for n, _ in items], [load for _, load in items]
    held = [n for n, _ in start]
    found = placed(loads, nbytes, [load for _, load in start], held, capacity)
    if not isinstance(found, Assignment):
        stuck, missing = found
        assert 0 <= stuck < len(items) and missing > 0
        return
    for size, at in zip(nbytes, found.chosen, strict=True):
        held[at] += size
    assert held == found.nbytes.tolist()
    assert max(held) <= capacity
    again = placed(loads, nbytes, [load for _, load in start], [n for n, _ in start], capacity)
    assert isinstance(again, Assignment) and again.chosen.tolist() == found.chosen.tolist()


def test_items_move_from_places_that_overflow():
    """Karmarkar-Karp knows no memory: two large items of little work would share a place."""
    loads, nbytes, none = np.array([1.0, 1.0, 2.0]), np.array([10, 10, 1]), np.zeros(2, dtype=np.int64)
    moved = balance._repaired(np.array([0, 0, 1]), loads, nbytes, np.zeros(2), none, 12)
    assert moved is not None and moved.tolist() == [1, 0, 1]
    assert balance._repaired(np.array([0, 0, 1]), loads, nbytes, np.zeros(2), none, 9) is None


def test_at_equal_load_memory_is_even():
    """Four items of one load: the two large ones are not on one place."""
    found = placed([1, 1, 1, 1], [10, 10, 1, 1])
    assert isinstance(found, Assignment)
    assert found.loads.tolist() == [2.0, 2.0] and found.nbytes.tolist() == [11, 11]
