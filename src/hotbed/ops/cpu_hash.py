# pyright: basic
"""The hash of `hotbed.ops.random` in Numba."""

from __future__ import annotations

import numpy as np

from hotbed.ops.cpu_runtime import kernel


@kernel()
def mix32(x):
    """MurmurHash3's 32-bit finalizer; Numba widens uint32 arithmetic to 64 bits, so every result is cast back."""
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@kernel()
def row_key(seed, row):
    """The part of a cell's hash that its seed (uint32) and row (int64) decide."""
    low = np.uint32(row & 0xFFFFFFFF)
    high = np.uint32((row >> 32) & 0xFFFFFFFF)
    return mix32(np.uint32(np.uint32(mix32(np.uint32(low ^ seed)) ^ high) ^ np.uint32(0x9E3779B9)))


@kernel()
def cell_bits(key, col):
    """32 random bits of a column in the row of a `row_key`."""
    return mix32(np.uint32(key + np.uint32(np.uint32(col) * np.uint32(0x9E3779B9))))
