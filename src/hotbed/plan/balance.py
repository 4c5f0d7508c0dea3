"""Assign items to ranks. Minimize the load of the busiest rank, then even out memory.

The best result of these heuristics is used:

- *Greedy*: each item, by falling load (or by the larger of its shares of load and bytes), goes to the least loaded rank
  with room for it.
- *Karmarkar-Karp*, k-way, for few items and ranks: each item starts as a partition (itself, nothing, …). The two
  partitions with the largest spread are merged repeatedly, the fullest set of one with the emptiest of the other. Then
  items move away from ranks without room.
- *Local moves* improve both: items of the busiest rank move, or are swapped with items of other ranks. The same is done
  for bytes, without raising the largest load.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_MOST_DIFFERENCES = 40_000
"""Upper limit of items × ranks for Karmarkar-Karp."""
_MOST_SCORES = 4_000_000
"""Upper limit of items × ranks for the second greedy order."""
_MOST_MOVES = 400
_OTHERS = 4
"""Number of least loaded ranks that a local move considers."""
_NEARLY = 1 + 1e-9


class Assignment(NamedTuple):
    """A rank for each item, and the resulting load and bytes of each rank."""

    chosen: Array
    loads: Array
    nbytes: Array
    method: str

    @property
    def worth(self) -> tuple[float, int]:
        """Largest load and largest bytes of a rank. Smaller is better."""
        return float(self.loads.max()), int(self.nbytes.max())


def balance_loads(
    loads: Array, nbytes: Array, start_loads: Array, start_bytes: Array, capacity: int | None
) -> Assignment | tuple[int, int]:
    """Assign items to ranks, or return the item that fits on no rank and its missing bytes."""
    limit = np.iinfo(np.int64).max if capacity is None else capacity
    found: list[Assignment] = []
    stuck: tuple[int, int] | None = None
    for greedy in (_greedy, _greedy_by_need):
        if greedy is _greedy_by_need and found and len(loads) * len(start_loads) > _MOST_SCORES:
            break
        chosen = greedy(loads, nbytes, start_loads, start_bytes, limit)
        if isinstance(chosen, tuple):
            stuck = stuck or chosen
        else:
            found.append(_placed(chosen, loads, nbytes, start_loads, start_bytes, limit, "greedy"))
    if len(loads) * len(start_loads) <= _MOST_DIFFERENCES:
        repaired = _repaired(_karmarkar_karp(loads, start_loads), loads, nbytes, start_loads, start_bytes, limit)
        if repaired is not None:
            found.append(_placed(repaired, loads, nbytes, start_loads, start_bytes, limit, "Karmarkar-Karp"))
    if not found:
        assert stuck is not None
        return stuck
    return min(found, key=lambda placed: placed.worth)


def _placed(
    chosen: Array, loads: Array, nbytes: Array, start_loads: Array, start_bytes: Array, limit: int, method: str
) -> Assignment:
    chosen = chosen.copy()
    totals, held = start_loads.copy(), start_bytes.copy()
    np.add.at(totals, chosen, loads)
    np.add.at(held, chosen, nbytes)
    if len(loads):
        _level(chosen, loads, nbytes, totals, held, limit)
        _level(chosen, nbytes, loads, held, totals, float(totals.max()) * _NEARLY)
    return Assignment(chosen, totals, held, method)


def _greedy(loads: Array, nbytes: Array, start_loads: Array, start_bytes: Array, limit: int) -> Array | tuple[int, int]:
    """Assign items by falling load, or return the item that fits on no rank and its missing bytes."""
    chosen = np.zeros(len(loads), dtype=np.int64)
    heap = [
        (load, held, p) for p, (load, held) in enumerate(zip(start_loads.tolist(), start_bytes.tolist(), strict=True))
    ]
    heapq.heapify(heap)
    sizes, weights = nbytes.tolist(), loads.tolist()
    for i in np.lexsort((np.arange(len(loads)), -nbytes, -loads)).tolist():
        full: list[tuple[float, int, int]] = []
        while heap and heap[0][1] + sizes[i] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            return i, min(held for _, held, _ in full) + sizes[i] - limit
        load, held, at = heap[0]
        chosen[i] = at
        heapq.heapreplace(heap, (load + weights[i], held + sizes[i], at))
        for entry in full:
            heapq.heappush(heap, entry)
    return chosen


def _greedy_by_need(
    loads: Array, nbytes: Array, start_loads: Array, start_bytes: Array, limit: int
) -> Array | tuple[int, int]:
    """Assign items by the larger of their shares of load and bytes, for scarce memory."""
    totals, held = start_loads.copy(), start_bytes.copy()
    chosen = np.zeros(len(loads), dtype=np.int64)
    load_unit, byte_unit = (1 / max(float(x.sum() + s.sum()), 1e-300) for x, s in ((loads, totals), (nbytes, held)))
    need = np.maximum(loads * load_unit, nbytes * byte_unit)
    for i in np.lexsort((np.arange(len(loads)), -nbytes, -loads, -need)).tolist():
        score = np.maximum((totals + loads[i]) * load_unit, (held + nbytes[i]) * byte_unit)
        score[held > limit - nbytes[i]] = np.inf
        at = int(score.argmin())
        if score[at] == np.inf:
            return i, int(held.min() + nbytes[i] - limit)
        chosen[i] = at
        totals[at] += loads[i]
        held[at] += nbytes[i]
    return chosen


def _karmarkar_karp(loads: Array, start_loads: Array) -> Array:
    """Assign items to ranks without regard to memory."""
    ranks = len(start_loads)
    ticket = count()  # makes ties repeatable
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, load in enumerate(loads.tolist()):
        sets = [(load, [i]), *((0.0, list[int]()) for _ in range(ranks - 1))]
        heapq.heappush(heap, (-load, next(ticket), sets))
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)  # sets in order of falling load
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda s: -s[0])
        least = merged[-1][0]
        merged = [(load - least, members) for load, members in merged]
        heapq.heappush(heap, (-merged[0][0], next(ticket), merged))
    chosen = np.zeros(len(loads), dtype=np.int64)
    if heap:
        idle_first = np.argsort(start_loads, kind="stable")
        for (_, members), at in zip(heap[0][2], idle_first, strict=True):
            chosen[members] = at
    return chosen


def _repaired(
    chosen: Array, loads: Array, nbytes: Array, start_loads: Array, start_bytes: Array, limit: int
) -> Array | None:
    """Move items, lightest first, from overfull ranks to the least busy ones with room. Return None on failure."""
    chosen = chosen.copy()
    totals, held = start_loads.copy(), start_bytes.copy()
    np.add.at(totals, chosen, loads)
    np.add.at(held, chosen, nbytes)
    for full in np.flatnonzero(held > limit):
        here = np.flatnonzero(chosen == full)
        for i in here[np.argsort(loads[here], kind="stable")]:
            if held[full] <= limit:
                break
            room = np.flatnonzero(held <= limit - nbytes[i])
            room = room[room != full]
            if len(room):
                to = room[totals[room].argmin()]
                chosen[i] = to
                for sums, values in ((totals, loads), (held, nbytes)):
                    sums[to] += values[i]
                    sums[full] -= values[i]
        if held[full] > limit:
            return None
    return chosen


def _level(chosen: Array, values: Array, others: Array, sums: Array, other_sums: Array, limit: float) -> None:
    """Lower the largest of ``sums`` in place by moves and swaps of items that keep ``other_sums`` within the limit."""
    for _ in range(_MOST_MOVES):
        top = int(sums.argmax())
        here = np.flatnonzero((chosen == top) & (values > 0))
        best: tuple[float, int, int, int] | None = None
        for low in np.argsort(sums, kind="stable")[:_OTHERS].tolist():
            there = np.flatnonzero(chosen == low)
            back = np.concatenate([[-1], there])  # −1: a move without a swap
            given = values[here][:, None] - np.where(back < 0, 0, values[back])[None]
            moved = others[here][:, None] - np.where(back < 0, 0, others[back])[None]
            after = np.maximum(sums[top] - given, sums[low] + given)
            allowed = (given > 0) & (other_sums[low] + moved <= limit) & (other_sums[top] - moved <= limit)
            after = np.where(allowed, after, np.inf)
            if after.size:
                at = int(after.argmin())
                if best is None or after.flat[at] < best[0]:
                    best = (float(after.flat[at]), low, int(here[at // len(back)]), int(back[at % len(back)]))
        if best is None or best[0] * _NEARLY >= sums[top]:
            return
        _, low, item, returned = best
        for i, source, target in ((item, top, low), (returned, low, top)):
            if i >= 0:
                chosen[i] = target
                for total, of in ((sums, values), (other_sums, others)):
                    total[source] -= of[i]
                    total[target] += of[i]
