# pyright: basic, reportCallIssue=false
"""Initial values on the CPU: `hotbed.ops.reference.initial_values_`, bit for bit."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_hash import cell_bits, row_key
from hotbed.ops.cpu_runtime import kernel, launch


def initial_values_(out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
    """Fill ``out [rows, cols]`` with the initial values of a rectangle of a table; see the reference."""
    launches["cpu.initial_values"] += 1
    scale = np.float32(bound / (1 << 23))
    if isinstance(rows, range):
        launch(_fill, out.numpy(), np.uint32(seed), rows.start, rows.step, cols.start, cols.step, scale)
    else:
        launch(_fill_rows, out.numpy(), np.uint32(seed), rows.numpy(), cols.start, cols.step, scale)


@kernel(parallel=True)
def _fill(out, seed, row_start, row_step, col_start, col_step, scale):
    for i in prange(out.shape[0]):
        key = row_key(seed, np.int64(row_start + i * row_step))
        for j in range(out.shape[1]):
            out[i, j] = _value(key, col_start + j * col_step, scale)


@kernel(parallel=True)
def _fill_rows(out, seed, rows, col_start, col_step, scale):
    for i in prange(out.shape[0]):
        key = row_key(seed, rows[i])
        for j in range(out.shape[1]):
            out[i, j] = _value(key, col_start + j * col_step, scale)


@kernel(inline="always")
def _value(key, col, scale):
    return np.float32(np.int32(cell_bits(key, col) >> np.uint32(8)) - np.int32(1 << 23)) * scale
