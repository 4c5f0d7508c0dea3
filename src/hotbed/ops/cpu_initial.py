# pyright: basic, reportCallIssue=false
"""Initial values on the CPU: `hotbed.ops.reference.initial_values_`, bit for bit."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_runtime import kernel, launch


def initial_values_(out: Tensor, *, seed: int, rows: range, cols: range, bound: float) -> None:
    """Fill ``out [rows, cols]`` with the initial values of a rectangle of a table; see the reference."""
    launches["cpu.initial_values"] += 1
    scale = np.float32(bound / (1 << 23))
    launch(_fill, out.numpy(), np.uint32(seed), rows.start, rows.step, cols.start, cols.step, scale)


@kernel()
def _mix32(x):
    # Numba widens uint32 arithmetic to 64 bits, so every result is cast back.
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@kernel(parallel=True)
def _fill(out, seed, row_start, row_step, col_start, col_step, scale):
    for i in prange(out.shape[0]):
        row = np.int64(row_start + i * row_step)
        low = np.uint32(row & 0xFFFFFFFF)
        high = np.uint32((row >> 32) & 0xFFFFFFFF)
        key = _mix32(np.uint32(np.uint32(_mix32(np.uint32(low ^ seed)) ^ high) ^ np.uint32(0x9E3779B9)))
        for j in range(out.shape[1]):
            col = np.uint32(col_start + j * col_step)
            cell = _mix32(np.uint32(key + np.uint32(col * np.uint32(0x9E3779B9))))
            out[i, j] = np.float32(np.int32(cell >> np.uint32(8)) - np.int32(1 << 23)) * scale
