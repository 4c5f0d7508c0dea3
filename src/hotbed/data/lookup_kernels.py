# pyright: basic
"""Kernels that count lookups and follow stack distances; what they compute is told in the modules that use them.

They are compiled by every process that uses them, which takes seconds: they serve measurements, not training.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_kernel = njit(nogil=True, error_model="numpy")


@_kernel
def count(values, bounds, done, accesses, batches, last, distinct, ends):
    """Count the rows of some batches, and list those of each batch in ``distinct``, once each.

    ``bounds [features, batches + 1]`` says where in ``values`` the ids of a feature begin at each batch.
    """
    n = 0
    for batch in range(len(ends)):
        for feature in range(len(bounds)):
            for i in range(bounds[feature, batch], bounds[feature, batch + 1]):
                row = values[i]
                accesses[row] += 1
                if last[row] != done + batch + 1:  # 0 is "in no batch yet"
                    last[row] = done + batch + 1
                    batches[row] += 1
                    distinct[n] = row
                    n += 1
        ends[batch] = n


@_kernel
def slot_of(row, hash):
    """Bijection of the numbers below a power of 2: multiplications by odd numbers and shifts, both of which invert."""
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
def follow(rows, ends, hash, last, taken_by, tree, histogram, clock):
    """Add the stack distances of the rows of some batches, which end at ``ends``, to the histogram."""
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
