# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Average rows in their order, in Triton: gradients of dense parameters, of which each rank gives a row.

A sum of torch adds in an order of its own, and an addition for each rank is a launch, of which thousands of ranks have
thousands. Here a program has some columns and adds their rows from the first to the last, so bits are those of one
addition after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_rows import as_float32, round_nearest
from hotbed.ops.triton_runtime import STRICT, ceil_div

_COLUMNS = 128
"""Columns of a program: few, because a share is short where ranks are many, and all its rows wait for each other."""
_TOGETHER = 16
"""Rows that are asked for at once."""


@triton.jit(do_not_specialize=["rows", "columns"])
def _mean_of_rows_kernel(
    mean,  # [n], written
    values,  # [T, n]
    rows,  # T, at least 1
    columns,  # n
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """``mean = ((values[0] + values[1]) + …) ÷ rows``, each addition rounded to the dtype of values."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < columns
    total = as_float32(tl.load(values + column, mask=live, other=0.0))
    at = values + column
    for _ in tl.range(1, rows, loop_unroll_factor=TOGETHER):
        at += columns
        more = as_float32(tl.load(at, mask=live, other=0.0))
        total = as_float32(round_nearest(total + more, values.dtype.element_ty))
    ranks = tl.zeros([COLUMNS], tl.float32) + rows.to(tl.float32)
    tl.store(mean + column, round_nearest(tl.div_rn(total, ranks), values.dtype.element_ty), mask=live)


def mean_of_rows(values: Tensor) -> Tensor:
    """Average rows ``[T, n]``, float32, bfloat16 or float16, into ``[n]`` of the same dtype."""
    launches["triton.mean_of_rows"] += 1
    rows, columns = values.shape
    mean = torch.empty(columns, dtype=values.dtype, device=values.device)
    if columns:
        with torch.cuda.device_of(values):
            _mean_of_rows_kernel[(ceil_div(columns, _COLUMNS),)](
                mean, values.contiguous(), rows, columns, COLUMNS=_COLUMNS, TOGETHER=_TOGETHER, **STRICT
            )
    return mean
