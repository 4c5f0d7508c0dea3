"""Place tiles on ranks, so that the busiest rank has as little load as can be.

Two heuristics, of which the better result is kept. *Greedy*: items in order of falling load, each to the place with the
least load that has room for it. *Karmarkar-Karp*, k-way: every item starts as a partition (itself, nothing, …); again
and again the two partitions with the largest spread are merged, the fullest set of one with the emptiest of the other,
so that large differences cancel; then items move from places that overflow.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

from hotbed.errors import PlanError
from hotbed.plan.cost import Cost, gib


def place(items: Sequence[Cost], start: Sequence[Cost], capacity: int | None, names: Sequence[str]) -> list[int]:
    """Choose a place for each item.

    Parameters
    ----------
    items
        What each item costs its place.
    start
        What each place has already.
    capacity
        Bytes that a place can hold, or None: any number.
    names
        What to call the items in an error.

    Raises
    ------
    PlanError
        If neither heuristic finds room for an item.
    """
    greedy = _greedy(items, start, capacity)
    repaired = _repaired(_karmarkar_karp(items, start), items, start, capacity)
    possible = [chosen for chosen in (greedy, repaired) if isinstance(chosen, list)]
    if isinstance(greedy, tuple) and repaired is None:
        stuck, missing = greedy
        raise PlanError(
            f"{names[stuck]} needs {gib(items[stuck].nbytes)}, {gib(missing)} more than any rank has left of its "
            f"{gib(capacity or 0)}; cut it by rows or columns, use narrower rows, or more ranks"
        )
    return min(possible, key=lambda chosen: busiest(chosen, items, start))


def busiest(chosen: Sequence[int], items: Sequence[Cost], start: Sequence[Cost]) -> float:
    """Load of the place that has most."""
    totals = [cost.load for cost in start]
    for item, at in zip(items, chosen, strict=True):
        totals[at] += item.load
    return max(totals)


def _greedy(items: Sequence[Cost], start: Sequence[Cost], capacity: int | None) -> list[int] | tuple[int, int]:
    """A place for each item; or the item that fits nowhere, and the bytes it lacks."""
    loads = list(start)
    chosen = [0] * len(items)
    for i in sorted(range(len(items)), key=lambda i: (-items[i].load, -items[i].nbytes, i)):
        fitting = [p for p, load in enumerate(loads) if capacity is None or load.nbytes + items[i].nbytes <= capacity]
        if not fitting:
            return i, min(load.nbytes for load in loads) + items[i].nbytes - (capacity or 0)
        chosen[i] = min(fitting, key=lambda p: (loads[p].load, loads[p].nbytes, p))
        loads[chosen[i]] = loads[chosen[i]].plus(items[i])
    return chosen


def _karmarkar_karp(items: Sequence[Cost], start: Sequence[Cost]) -> list[int]:
    """A place for each item, whatever fits."""
    places = len(start)
    ticket = count()  # makes ties repeatable
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, item in enumerate(items):
        sets = [(item.load, [i]), *((0.0, list[int]()) for _ in range(places - 1))]
        heapq.heappush(heap, (-item.load, next(ticket), sets))
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)  # sets in order of falling load
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda s: -s[0])
        least = merged[-1][0]
        merged = [(load - least, members) for load, members in merged]
        heapq.heappush(heap, (-merged[0][0], next(ticket), merged))
    chosen = [0] * len(items)
    if heap:
        idle_first = sorted(range(places), key=lambda p: start[p].load)
        for (_, members), at in zip(heap[0][2], idle_first, strict=True):
            for i in members:
                chosen[i] = at
    return chosen


def _repaired(
    chosen: list[int], items: Sequence[Cost], start: Sequence[Cost], capacity: int | None
) -> list[int] | None:
    """Move items from places that overflow to the least busy ones with room, those with little load first.

    None where that does not suffice.
    """
    if capacity is None:
        return chosen
    chosen = list(chosen)
    loads = list(start)
    for item, at in zip(items, chosen, strict=True):
        loads[at] = loads[at].plus(item)
    for full in range(len(loads)):
        for i in sorted((i for i, at in enumerate(chosen) if at == full), key=lambda i: (items[i].load, i)):
            if loads[full].nbytes <= capacity:
                break
            room = [p for p, load in enumerate(loads) if p != full and load.nbytes + items[i].nbytes <= capacity]
            if room:
                to = min(room, key=lambda p: (loads[p].load, p))
                chosen[i] = to
                loads[to] = loads[to].plus(items[i])
                loads[full] = Cost(loads[full].nbytes - items[i].nbytes, loads[full].load - items[i].load)
        if loads[full].nbytes > capacity:
            return None
    return chosen
