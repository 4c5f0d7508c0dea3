# pyright: basic, reportCallIssue=false
"""Locate rows of every dtype, compute random bits of their elements, and fill in initial values, in Numba.

`hotbed.ops.rows` has the definitions. Kernels read rows from a `RowArrays`. They check the dtype of low-precision rows
(``kind``, see `hotbed.ops.cpu_narrow`) at run time, once per row. Therefore one compiled kernel supports all dtypes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import prefetch_bytes
from hotbed.ops.cpu_narrow import BF16, FP8, FP16, INT8, WIDE
from hotbed.ops.cpu_runtime import kernel, launch
from hotbed.ops.layout import FIRST_NARROW, FIRST_WIDE, SCALE_BLOCK, WIDE_ROWS, Rows

# -- random bits -----------------------------------------------------------------------------------------------------


@kernel()
def mix32(x):
    """Apply MurmurHash3's 32-bit finalizer. Results are cast, because Numba computes uint32 arithmetic in 64 bits."""
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@kernel()
def row_key(seed, row):
    """Return the part of an element's hash that depends on its seed (uint32) and row (int64)."""
    low = np.uint32(row & 0xFFFFFFFF)
    high = np.uint32((row >> 32) & 0xFFFFFFFF)
    return mix32(np.uint32(np.uint32(mix32(np.uint32(low ^ seed)) ^ high) ^ np.uint32(0x9E3779B9)))


@kernel()
def cell_bits(key, col):
    """Return the 32 random bits of a column in the row of a `row_key`."""
    return mix32(np.uint32(key + np.uint32(np.uint32(col) * np.uint32(0x9E3779B9))))


# -- locations of rows ---------------------------------------------------------------------------------------------


_KINDS = {torch.float32: WIDE, torch.bfloat16: BF16, torch.float16: FP16, torch.int8: INT8, torch.float8_e4m3fn: FP8}
_NO_BYTES = np.empty(0, np.uint8)


class RowArrays(NamedTuple):
    """`Rows` as flat arrays for kernels. Low-precision rows are bytes. Wide rows begin ``stride`` values apart."""

    dim: int
    stride: int
    kind: int
    wide: np.ndarray
    narrow: np.ndarray
    exponents: np.ndarray
    tables: np.ndarray


def row_arrays(rows: Rows) -> RowArrays:
    """Return views of an arena's tensors with contiguous rows."""
    kind = _KINDS[rows.narrow.dtype]
    return RowArrays(
        rows.dim,
        rows.dim,
        kind,
        rows.wide.view(-1).numpy(),
        _NO_BYTES if kind == WIDE else rows.narrow.view(torch.uint8).view(-1).numpy(),
        rows.exponents.view(-1).numpy(),
        rows.tables.numpy(),
    )


def strided_row_arrays(rows: Rows) -> RowArrays:
    """Return views of an arena's tensors. Wide rows may be strided."""
    if rows.wide.is_contiguous():
        return row_arrays(rows)
    contiguous = row_arrays(replace(rows, wide=rows.wide[:0]))
    return contiguous._replace(stride=rows.wide.stride(0), wide=span_of(rows.wide))


def span_of(rows: Tensor) -> np.ndarray:
    """Return a flat view from the first value to the last value of strided rows ``[n]`` or ``[n, D]``."""
    width = 1 if rows.dim() == 1 else rows.shape[1]
    size = (len(rows) - 1) * rows.stride(0) + width if len(rows) else 0
    return rows.as_strided((size,), (1,)).numpy()


@kernel(inline="always")
def place(rows, table, row):
    """Return whether a row of a table is wide, and its position in ``wide`` or ``narrow``."""
    wide_rows = rows.tables[table, WIDE_ROWS]
    if row < wide_rows:
        return True, rows.tables[table, FIRST_WIDE] + row
    return False, rows.tables[table, FIRST_NARROW] + row - wide_rows


@kernel(inline="always")
def prefetch_row(rows, wide, at):
    """Prefetch a row."""
    if wide:
        prefetch_bytes(rows.wide, at * rows.stride, rows.dim * 4)
    else:
        nbytes = rows.dim * (2 if rows.kind <= FP16 else 1)
        prefetch_bytes(rows.narrow, at * nbytes, nbytes)
        if rows.kind == INT8:
            blocks = (rows.dim + SCALE_BLOCK - 1) // SCALE_BLOCK
            prefetch_bytes(rows.exponents, at * blocks, blocks)


# -- initial values --------------------------------------------------------------------------------------------------


def initial_values_(out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
    """Fill ``out [rows, cols]`` with the initial values of a rectangle of a table; see the reference."""
    launches["cpu.initial_values"] += 1
    if bound == 0:
        out.zero_()
        return
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
