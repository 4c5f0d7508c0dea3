"""Records of a file, read and written by threads that hold no lock of Python's; each call is for one thread.

A hash table from int64 keys to the numbers 0, 1, 2, … in which they were added; open addressing, linear probing.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types

from hotbed.ops.cpu_runtime import kernel

# pyright: basic, reportCallIssue=false


_SIGNATURE = types.int64(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _SIGNATURE)
_pwrite = types.ExternalFunction("pwrite", _SIGNATURE)


@kernel()
def read_records(file, numbers, at, out):
    """Read the records with these rising numbers ``[n]`` into rows ``at [n]`` of ``out [m, bytes]``.

    Neighbours in the file that are neighbours in ``out`` are read by one call. Returns how many records were read: all,
    or those before a failure.
    """
    size = out.shape[1]
    first = 0
    while first < numbers.shape[0]:
        last = first + 1
        while last < numbers.shape[0] and numbers[last] == numbers[last - 1] + 1 and at[last] == at[last - 1] + 1:
            last += 1
        done, wanted = 0, (last - first) * size
        while done < wanted:
            here, there = out.ctypes.data + at[first] * size + done, numbers[first] * size + done
            count = _pread(file, here, wanted - done, there)
            if count <= 0:
                return first
            done += count
        first = last
    return first


@kernel()
def write_records(file, numbers, records):
    """Write ``records [n, bytes]`` to the places of these rising numbers; neighbours by one call. Returns as above."""
    size = records.shape[1]
    first = 0
    while first < numbers.shape[0]:
        last = first + 1
        while last < numbers.shape[0] and numbers[last] == numbers[last - 1] + 1:
            last += 1
        done, wanted = 0, (last - first) * size
        while done < wanted:
            count = _pwrite(
                file, records.ctypes.data + first * size + done, wanted - done, numbers[first] * size + done
            )
            if count <= 0:
                return first
            done += count
        first = last
    return first


# pyright: basic, reportCallIssue=false


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
