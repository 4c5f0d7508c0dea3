# pyright: basic, reportCallIssue=false
"""A hash table from int64 keys to the numbers 0, 1, 2, … in which they were added; open addressing, linear probing."""

from __future__ import annotations

import numpy as np
from numba import prange

from hotbed.ops.cpu_runtime import kernel

EMPTY = -1
"""What a free place holds; keys are not negative."""


@kernel(inline="always")
def _place(key, mask):
    """Where the search for a key begins: the upper half of a product with the golden ratio (Fibonacci hashing)."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))


@kernel(parallel=True)
def find(places, numbers, keys, out):
    """Number of each key ``[n]`` into ``out``, −1 for those that are not there."""
    mask = places.shape[0] - 1
    for i in prange(keys.shape[0]):
        at = _place(keys[i], mask)
        while places[at] != EMPTY and places[at] != keys[i]:
            at = (at + 1) & mask
        out[i] = numbers[at] if places[at] != EMPTY else -1


@kernel()
def add(places, numbers, keys, first):
    """Add distinct keys that are not there, numbered from ``first`` on; there must be room."""
    mask = places.shape[0] - 1
    for i in range(keys.shape[0]):
        at = _place(keys[i], mask)
        while places[at] != EMPTY:
            at = (at + 1) & mask
        places[at] = keys[i]
        numbers[at] = first + i
