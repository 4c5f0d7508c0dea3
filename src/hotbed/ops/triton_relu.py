# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Pass a gradient through ReLU and add it up by column, in Triton: what a layer's backward does before its products.

torch reads and writes the gradient in one kernel and reads it again to sum it for the bias. Here one pass does both:
each program takes a part of the rows of some columns, and a second kernel adds the parts up. Which rows are a part
follows from the shape alone, and sums are float32, so bits repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_rows import as_float32, round_nearest
from hotbed.ops.triton_runtime import STRICT, TILE, ceil_div, power_of_two, rows_per_program

_COLUMNS = 128
"""Columns of a program, at most: 256 bytes of a row of two-byte values."""
_PROGRAMS = 1024
"""Programs that share a gradient, about: several for each multiprocessor."""
_PARTS = 256
"""Parts that the rows of a column are cut into, at most: a program of the second kernel adds them in few loads."""
_SUMMED_COLUMNS = 32
"""Columns of a program that adds up parts: 128 bytes of float32."""


@triton.jit(do_not_specialize=["rows", "per_part"])
def _relu_backward_kernel(
    gradient,  # [B, COLUMNS], written
    sums,  # [parts, COLUMNS]
    of_out,  # [B, COLUMNS], a row every STEP elements
    out,  # [B, COLUMNS]
    rows,  # B
    per_part,  # rows of a part, a multiple of BLOCK_R
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """``gradient = of_out`` where ``out`` is above 0, else 0; ``sums[part] = Σ gradient`` over the part's rows."""
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(0) * per_part
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(first, tl.minimum(first + per_part, rows), BLOCK_R):
        row = (start + tl.arange(0, BLOCK_R))[:, None]
        live = (row < rows) & (col < COLUMNS)
        at = row.to(tl.int64) * COLUMNS + col
        is_zero = as_float32(tl.load(out + at, mask=live, other=0.0)) <= 0.0
        given = tl.load(of_out + row.to(tl.int64) * STEP + col, mask=live, other=0.0)
        value = tl.where(is_zero, 0.0, as_float32(given))
        tl.store(gradient + at, value.to(gradient.dtype.element_ty), mask=live)  # exact: it was of this dtype
        found += tl.where(live, value, 0.0)
    to = sums + tl.program_id(0).to(tl.int64) * COLUMNS + tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(to, tl.sum(found, axis=0), mask=tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C) < COLUMNS)


@triton.jit(do_not_specialize=["parts"])
def _add_parts_kernel(out, sums, parts, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """``out = Σ sums`` by column."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, parts, BLOCK_R):
        part = (start + tl.arange(0, BLOCK_R))[:, None]
        live = (part < parts) & (column[None, :] < COLUMNS)
        found += tl.load(sums + part * COLUMNS + column[None, :], mask=live, other=0.0)
    tl.store(out + column, round_nearest(tl.sum(found, axis=0), out.dtype.element_ty), mask=column < COLUMNS)


def relu_backward(of_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient of a ReLU's input, and the sum of it over all rows.

    Parameters
    ----------
    of_out, out
        ``[B, N]``: the gradient of what a ReLU gave, and what it gave; both float32, bfloat16 or float16.

    Returns
    -------
    tuple[Tensor, Tensor]
        ``[B, N]``, and ``[N]``: float32 sums, rounded to the same dtype.
    """
    launches["triton.relu_backward"] += 1
    out = out.contiguous()
    if of_out.stride(-1) != 1:  # a gradient may be columns of a wider one
        of_out = of_out.contiguous()
    rows, columns = out.shape
    gradient, total = torch.empty_like(out), torch.empty(columns, dtype=out.dtype, device=out.device)
    if not out.numel():
        return gradient, total.zero_()
    block_c = min(power_of_two(columns), _COLUMNS)
    block_r = rows_per_program(block_c, TILE)
    across = ceil_div(columns, block_c)
    most = min(max(_PROGRAMS // across, 1), _PARTS)
    per_part = ceil_div(ceil_div(rows, most), block_r) * block_r
    parts = ceil_div(rows, per_part)
    sums = torch.empty(parts, columns, dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        _relu_backward_kernel[(parts, across)](
            gradient,
            sums,
            of_out,
            out,
            rows,
            per_part,
            COLUMNS=columns,
            STEP=of_out.stride(0),
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            **STRICT,
        )
        _add_parts_kernel[(ceil_div(columns, _SUMMED_COLUMNS),)](
            total,
            sums,
            parts,
            COLUMNS=columns,
            BLOCK_R=rows_per_program(_SUMMED_COLUMNS, TILE),
            BLOCK_C=_SUMMED_COLUMNS,
            **STRICT,
        )
    return gradient, total
