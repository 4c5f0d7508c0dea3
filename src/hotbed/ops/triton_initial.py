# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Initial values in Triton; bits equal to `hotbed.ops.reference.initial_values_`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_launch import STRICT, TILE, ceil_div, power_of_two, rows_per_program
from hotbed.ops.triton_random import random_bits


@triton.jit(do_not_specialize=["seed", "row_start", "row_step", "rows", "col_start", "col_step"])
def _initial_kernel(
    out,  # [rows, cols] float32
    which,  # [rows] int64, or anything where rows are a range
    row_stride,
    col_stride,
    seed,
    row_start,
    row_step,
    rows,
    col_start,
    col_step,
    scale,  # bound / 2²³
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ANY_ROWS: tl.constexpr,
):
    """``out[r, c] = float(k − 2²³) · scale``, k the upper 24 bits of hash(seed, r, c)."""
    at_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at_col = tl.arange(0, BLOCK_COLS)
    if ANY_ROWS:
        row = tl.load(which + at_row, mask=at_row < rows, other=0)
    else:
        row = row_start.to(tl.int64) + at_row * row_step
    col = col_start.to(tl.int64) + at_col.to(tl.int64) * col_step
    k = random_bits(seed, row, col[None, :]) >> 8
    value = (k.to(tl.int32) - (1 << 23)).to(tl.float32) * scale
    mask = (at_row < rows)[:, None] & (at_col < COLS)[None, :]
    tl.store(out + at_row[:, None] * row_stride + at_col[None, :] * col_stride, value, mask=mask)


def initial_values_(out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
    """Fill ``out`` with the initial values of a rectangle of a table, see `hotbed.ops.reference.initial_values_`."""
    launches["triton.initial_values"] += 1
    if out.numel() == 0:
        return
    block_cols = power_of_two(len(cols))
    block_rows = rows_per_program(block_cols, TILE)
    first, step = (rows.start, rows.step) if isinstance(rows, range) else (0, 1)
    with torch.cuda.device_of(out):
        _initial_kernel[(ceil_div(len(rows), block_rows),)](
            out,
            out if isinstance(rows, range) else rows,
            out.stride(0),
            out.stride(1),
            seed,
            first,
            step,
            len(rows),
            cols.start,
            cols.step,
            bound / (1 << 23),
            COLS=len(cols),
            BLOCK_COLS=block_cols,
            BLOCK_ROWS=block_rows,
            ANY_ROWS=not isinstance(rows, range),
            **STRICT,
        )
