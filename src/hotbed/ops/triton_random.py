# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Random numbers by counter in Triton; bits equal to `hotbed.ops.random`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, row, col):
    """32 random bits per cell, ``[R, C]`` uint32.

    ``seed`` is a scalar or ``[R]`` integers of 32 bits, ``row [R]`` int64, ``col [1 or R, C]`` integers.
    """
    key = _mix32((row & 0xFFFFFFFF).to(tl.uint32) ^ seed.to(tl.uint32))
    key = _mix32(key ^ (row >> 32).to(tl.uint32) ^ 0x9E3779B9)
    return _mix32(key[:, None] + col.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _mix32(x):
    """MurmurHash3's 32-bit finalizer; ``x`` is uint32, so products wrap and shifts are logical."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
