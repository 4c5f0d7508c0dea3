# pyright: basic, reportCallIssue=false
"""Pass a gradient through ReLU and add it up by column, in Numba: what a layer's backward does before its products.

torch reads and writes the gradient in one operation and reads it again to sum it for the bias. Here one pass does both:
each task takes a part of the rows. Which rows are a part follows from the shape alone, and sums are float32, each part
from its first row to its last and the parts in order, so bits do not depend on threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import load
from hotbed.ops.cpu_runtime import kernel, launch

_MOST_PARTS = 64
_MIN_ROWS = 32
"""Rows of a part, at least: fewer are not worth a sum of their own."""


def relu_backward(of_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient ``[B, N]`` of a ReLU's input, and its sum ``[N]``; see `triton_relu.relu_backward`."""
    if out.dtype == torch.float16:  # all of its values are float32's, too
        gradient, total = relu_backward(of_out.float(), out.float())
        return gradient.half(), total.half()
    launches["cpu.relu_backward"] += 1
    of_out, out = of_out.contiguous(), out.contiguous()
    rows, columns = out.shape
    per_part = max(-(-rows // _MOST_PARTS), _MIN_ROWS)
    gradient, sums = torch.empty_like(out), torch.zeros(max(-(-rows // per_part), 1), columns)
    launch(_pass_and_sum, _values(gradient), sums.numpy(), _values(of_out), _values(out), per_part)
    return gradient, sums[0].to(out.dtype)


def _values(t: Tensor) -> np.ndarray:
    """As kernels take it: float32, or the bits of bfloat16."""
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()


@kernel(parallel=True)
def _pass_and_sum(gradient, sums, of_out, out, per_part):
    """``gradient = of_out`` where ``out`` is above 0 or NaN, else 0; ``sums[0] = Σ gradient`` over all rows."""
    for part in prange(sums.shape[0]):
        for row in range(part * per_part, min((part + 1) * per_part, out.shape[0])):
            _pass_row(gradient[row], of_out[row], out[row])
            _add_row(sums[part], gradient[row])
    for part in range(1, sums.shape[0]):
        for column in range(sums.shape[1]):
            sums[0, column] += sums[part, column]


@kernel()
def _pass_row(gradient, of_out, out):
    for column in range(out.shape[0]):
        gradient[column] = gradient.dtype.type(0) if load(out, column) <= 0 else of_out[column]


@kernel()
def _add_row(total, row):
    # A loop of its own: the row is in the cache, and each loop becomes vector code.
    for column in range(row.shape[0]):
        total[column] += load(row, column)
