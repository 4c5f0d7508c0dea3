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
def _first_place(key, sets, ways):
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed % np.uint64(sets)) * ways


@kernel(parallel=True)
def find(keys, ways, wanted, out):
    """Place of each wanted key ``[n]`` into ``out``, −1 where it is not here."""
    sets = keys.shape[0] // ways
    for i in prange(wanted.shape[0]):
        first = _first_place(wanted[i], sets, ways)
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
def take(keys, times, counts, ways, by_count, wanted, now, out, evicted):
    """Find a place for each of these distinct keys ``[n]``, which are not here.

    That of the least recently used key of its set, or, ``by_count``, the least often used one (of equals the least
    recently used); free places first, and none that is used now: then ``out`` is −1. ``evicted`` gets the key that was
    there, or −1.
    """
    sets = keys.shape[0] // ways
    for i in range(wanted.shape[0]):
        first = _first_place(wanted[i], sets, ways)
        best = -1
        for at in range(first, first + ways):
            if keys[at] == FREE:
                best = at
                break
            if times[at] == now:
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
