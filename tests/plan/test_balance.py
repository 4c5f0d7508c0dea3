"""Placement: greedy and Karmarkar-Karp, the better one kept, memory respected."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import PlanError
from hotbed.plan import balance
from hotbed.plan.balance import busiest, place
from hotbed.plan.cost import Cost

EMPTY = Cost(0, 0.0)


def items(*work: float, nbytes: int = 1) -> list[Cost]:
    return [Cost(nbytes, float(w)) for w in work]


def test_karmarkar_karp_wins_where_greedy_does_not_and_is_kept(monkeypatch):
    """The textbook case: greedy puts 8+5+4 against 7+6, differencing 8+6 against 7+5+4."""
    some = items(8, 7, 6, 5, 4)
    start = [EMPTY, EMPTY]
    assert busiest(place(some, start, None, []), some, start) == 16.0
    monkeypatch.setattr(balance, "_karmarkar_karp", lambda *a: balance._greedy(*a, None))
    assert busiest(place(some, start, None, []), some, start) == 17.0


def test_greedy_wins_where_karmarkar_karp_does_not(monkeypatch):
    """Differencing makes equal sets before it looks at what places have already."""
    some, start = items(5, 5), [Cost(0, 10.0), EMPTY]
    assert busiest(place(some, start, None, []), some, start) == 10.0
    monkeypatch.setattr(balance, "_greedy", lambda *a: balance._karmarkar_karp(*a[:2]))
    assert busiest(place(some, start, None, []), some, start) == 15.0


@given(
    work=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    places=st.integers(1, 3),
)
def test_never_worse_than_four_thirds_of_the_best(work, places):
    """The bound of greedy, longest first (Graham 1969): 4/3 − 1/(3 places)."""
    some, start = items(*work), [EMPTY] * places
    best = min(busiest(c, some, start) for c in itertools.product(range(places), repeat=len(some)))
    assert best <= busiest(place(some, start, None, []), some, start) <= best * (4 / 3 - 1 / (3 * places)) + 1e-9


@given(
    costs=st.lists(st.builds(Cost, st.integers(1, 10), st.floats(0, 10)), max_size=12),
    start=st.lists(st.builds(Cost, st.integers(0, 5), st.floats(0, 10)), min_size=1, max_size=4),
    capacity=st.integers(10, 40),
)
def test_capacity_holds_or_the_error_names_an_item(costs, start, capacity):
    try:
        chosen = place(costs, start, capacity, [f"item {i}" for i in range(len(costs))])
    except PlanError as error:
        assert "item " in str(error)
        return
    held = [s.nbytes for s in start]
    for cost, at in zip(costs, chosen, strict=True):
        held[at] += cost.nbytes
    assert max(held) <= max(capacity, *(s.nbytes for s in start))


def test_items_move_from_places_that_overflow():
    """Karmarkar-Karp knows no memory: two large items of little work would share a place."""
    costs = [Cost(10, 1.0), Cost(10, 1.0), Cost(1, 2.0)]
    moved = balance._repaired([0, 0, 1], costs, [EMPTY, EMPTY], 12)
    assert moved == [1, 0, 1]
    assert balance._repaired([0, 0, 1], costs, [EMPTY, EMPTY], 9) is None


def test_the_error_says_how_much_is_missing():
    with pytest.raises(PlanError, match=r"the big one needs 3 GiB, 2 GiB more than any rank has left of its 2 GiB"):
        place([Cost(3 << 30, 1.0)], [Cost(1 << 30, 0.0), Cost(2 << 30, 0.0)], 2 << 30, ["the big one"])
