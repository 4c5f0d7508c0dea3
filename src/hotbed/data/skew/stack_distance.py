"""Measure hit rates of LRU caches of all sizes in one pass over the looked-up rows.

An LRU cache of C rows always holds the C most recently used rows (Mattson et al., "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970). The *stack distance* of a lookup is 1 + the number of distinct rows that
were used since the row's previous use. A lookup hits if its distance is at most C, so a histogram of distances yields
the hit rates for all C. Each use of a row takes the next position on a time line, and frees the row's previous
position. A Fenwick tree counts the taken positions after a position, in O(log M) for M rows. When the time line is
full, the taken positions are moved to the beginning.

*Batches.* All rows of a batch are looked up before any of these rows moves, as in a cache that serves a batch at once.

*Sampling.* A share ``rate`` of all rows is sampled: the rows with a hash below a threshold. All lookups of a sampled
row are measured, and distances are divided by the rate (Waldspurger et al., "Efficient MRC construction with SHARDS",
FAST 2015). The sample may have too many or too few of the hottest rows. Therefore, as in SHARDS-adj, the difference
between the expected and the sampled lookups counts as hits at the smallest distance. The hash maps rows to *slots*
one to one, and rows below the threshold are sampled, so arrays are indexed by slot.

Numba compiles the kernels in every process, which takes seconds. Only measurements use these kernels, not training.
"""
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotbed.checks import Count, Range, Size, check
from hotbed.data.hashing import mix
from hotbed.errors import SpecError

_kernel = njit(nogil=True, error_model="numpy")


@_kernel
def count_batches(values, bounds, done, accesses, batches, last, distinct, ends):
    """Count the rows of some batches, and write the distinct rows of each batch to ``distinct``.

    ``bounds [features, batches + 1]`` has, for each feature, the positions in ``values`` where batches begin. ``ends``
    gets the positions in ``distinct`` where batches end.
    """
    n = 0
    for batch in range(len(ends)):
        for feature in range(len(bounds)):
            for i in range(bounds[feature, batch], bounds[feature, batch + 1]):
                row = values[i]
                accesses[row] += 1
                if last[row] != done + batch + 1:  # 0 means no batch yet
                    last[row] = done + batch + 1
                    batches[row] += 1
                    distinct[n] = row
                    n += 1
        ends[batch] = n


@_kernel
def slot_of(row, hash):
    """Return the slot of a row. Shifts and products with odd numbers map the numbers below a power of 2 one to one."""
    offset, mask, half = hash[0], hash[1], hash[2]
    x = (np.uint64(row) + offset) & mask
    x = (x * np.uint64(0x9E3779B97F4A7C15)) & mask
    x ^= x >> half
    x = (x * np.uint64(0xBF58476D1CE4E5B9)) & mask
    x ^= x >> half
    return np.int64((x * np.uint64(0x94D049BB133111EB)) & mask)


@_kernel
def _add(tree, position, value):
    while position < len(tree):
        tree[position] += value
        position += position & -position


@_kernel
def _taken_up_to(tree, position):
    total = 0
    while position:
        total += tree[position]
        position &= position - 1
    return total


@_kernel
def _move_to_the_beginning(last, taken_by, tree):
    count = 0
    for position in range(1, len(taken_by)):
        slot = taken_by[position]
        taken_by[position] = 0
        if slot:
            count += 1
            taken_by[count] = slot
            last[slot - 1] = count
    for position in range(1, len(tree)):
        tree[position] = min(position, count) - min(position & (position - 1), count)
    return count


@_kernel
def follow_batches(rows, ends, hash, last, taken_by, tree, histogram, clock):
    """Add the stack distances of batches of rows to the histogram. ``ends`` has the positions where batches end."""
    now, taken = clock[0], clock[1]
    start = 0
    for end in ends:
        for i in range(start, end):
            slot = slot_of(rows[i], hash)
            if slot < len(last):
                position = last[slot]
                histogram[taken - _taken_up_to(tree, position) + 1 if position else 0] += 1
        for i in range(start, end):
            slot = slot_of(rows[i], hash)
            if slot < len(last):
                if now == len(tree) - 1:
                    now = _move_to_the_beginning(last, taken_by, tree)
                before = last[slot]
                if before:
                    taken_by[before] = 0
                    _add(tree, before, -1)
                else:
                    taken += 1
                now += 1
                last[slot] = now
                taken_by[now] = slot + 1
                _add(tree, now, 1)
        start = end
    clock[0], clock[1] = now, taken


Integers = NDArray[np.int64]


class StackDistances:
    """Stack distances of a sample of the rows of one table.

    The share ``rate`` of sampled rows is rounded to whole rows; 1 samples all rows, which is exact. There are up to
    ``2 · rate · rows`` slots of 28 bytes. `lookups` counts all lookups, sampled or not.
    """

    def __init__(self, rows: int, *, rate: float = 1.0, seed: int = 0) -> None:
        check("rows", rows, Count, SpecError)
        check("rate", rate, Annotated[float, Range(above=0, most=1)], SpecError)
        check("seed", seed, Size, SpecError)
        bits = (rows - 1).bit_length()
        slots = max(1, round(rate * (1 << bits)))
        positions = 2 * slots + 64  # so that the time line moves at most once per `slots` lookups
        dtype = np.int32 if positions < 1 << 31 else np.int64
        self.rate = slots / (1 << bits)
        self.lookups = 0
        # number of lookups by stack distance among sampled rows; entry 0 counts the first lookups of rows
        self.histogram: Integers = np.zeros(slots + 1, dtype=np.int64)
        offset = int(mix(np.array([seed], dtype=np.uint64))[0])
        self._hash = np.array([offset, (1 << bits) - 1, (bits + 1) // 2], dtype=np.uint64)
        self._last = np.zeros(slots, dtype=dtype)  # position of each slot's last use, or 0
        self._taken_by = np.zeros(positions, dtype=dtype)  # slot + 1 by position, or 0
        self._tree = np.zeros(positions, dtype=dtype)
        self._clock = np.zeros(2, dtype=np.int64)  # the last position, and the number of taken positions

    def follow(self, rows: Integers, ends: Integers) -> None:
        """Look up ``rows [n]`` batch by batch. ``ends`` has the batches' ends. The rows of a batch must be distinct."""
        self.lookups += len(rows)
        follow_batches(rows, ends, self._hash, self._last, self._taken_by, self._tree, self.histogram, self._clock)

    def hit_rates(self, cache_rows: Sequence[int]) -> NDArray[np.float64]:
        """Return the hit rates of LRU caches with these numbers of rows (NaN if no lookup was sampled).

        The first lookup of a row is a miss. A distance d among sampled rows means 1 + (d − 1) / rate among all rows.
        """
        sampled, expected = int(self.histogram.sum()), self.rate * self.lookups
        if not sampled:
            return np.full(len(cache_rows), np.nan)
        sizes = np.asarray(cache_rows, dtype=np.float64)
        reach = np.clip(1 + np.floor((sizes - 1) * self.rate), 0, len(self.histogram) - 1).astype(np.int64)
        hits = np.cumsum(self.histogram)[reach] - self.histogram[0] + (expected - sampled)
        return np.where(reach > 0, np.clip(hits / expected, 0, 1), 0.0)
