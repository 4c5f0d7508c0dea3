# pyright: basic, reportCallIssue=false
"""A set-associative cache's places: a key may be in any of the ways of one set, which its hash decides.

Every place has a key (−1: free), the time of its last use, and how often it was used.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from hotbed.ops.cpu_runtime import kernel

FREE = -1


@kernel(inline="always")
def _set_of(key, sets):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed % np.uint64(sets))


@kernel()
def sets_of(keys, sets, out):
    """Set of each key ``[n]``."""
    for i in range(keys.shape[0]):
        out[i] = _set_of(keys[i], sets)


@kernel(parallel=True)
def find(keys, sets, first_set, ways, wanted, out):
    """Place of each wanted key ``[n]`` into ``out``, −1 where it is not here; of all sets some, from one on, are."""
    for i in prange(wanted.shape[0]):
        first = (_set_of(wanted[i], sets) - first_set) * ways
        out[i] = -1
        for at in range(first, first + ways):
            if keys[at] == wanted[i]:
                out[i] = at
                break


@kernel()
def use(times, counts, places, now):
    """Note that these places are used now."""
    for i in range(places.shape[0]):
        times[places[i]] = now
        counts[places[i]] += 1


@kernel()
def take(keys, times, counts, sets, first_set, ways, by_count, wanted, now, protected, out, evicted):
    """Find a place for each of these distinct keys ``[n]``, which are not here, and note that it is used now.

    That of the least recently used key of its set, or, ``by_count``, the least often used one (of equals the least
    recently used); free places first, and none that was used since the time ``protected``: then ``out`` is −1.
    ``evicted`` gets the key that was there, or −1.
    """
    for i in range(wanted.shape[0]):
        first = (_set_of(wanted[i], sets) - first_set) * ways
        best = -1
        for at in range(first, first + ways):
            if keys[at] == FREE:
                best = at
                break
            if times[at] >= protected:
                continue
            if best < 0:
                best = at
            elif by_count and counts[at] != counts[best]:
                if counts[at] < counts[best]:
                    best = at
            elif times[at] < times[best]:
                best = at
        out[i] = best
        evicted[i] = FREE
        if best >= 0:
            evicted[i] = keys[best]
            keys[best] = wanted[i]
            times[best] = now
            counts[best] = 1
