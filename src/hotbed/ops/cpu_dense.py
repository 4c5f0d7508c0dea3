# pyright: basic, reportCallIssue=false
"""Compute the dot interaction, and the gradient of ReLU with its sum by column, on the CPU in Numba.

torch computes the products of the dot interaction with AMX or AVX-512 if available. Kernels in this file copy the
triangles.

torch writes the gradient of ReLU in one operation and reads it again to sum it for the bias. The kernel in this file
needs one pass. Each task processes a part of the rows. The parts depend only on the shape. Sums are float32, over the
rows of each part in order, then over the parts in order. Therefore the bits do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.large_tensors import empty
from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import load
from hotbed.ops.cpu_runtime import kernel, launch

_MOST_PARTS = 64
_MIN_ROWS = 32
"""Smallest number of rows per part."""


def relu_backward(of_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient ``[B, N]`` of a ReLU's input, and its sum ``[N]``; see `triton_dense.relu_backward`."""
    if out.dtype == torch.float16:  # Numba does not support it, and float32 holds its values exactly
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
    """Return float32 values, or the bits of bfloat16, as an array."""
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
    # This is a separate loop, so that both loops are vectorized. The row is still in the cache.
    for column in range(row.shape[0]):
        total[column] += load(row, column)


def interaction(vectors: Tensor, width: int) -> Tensor:
    """Compute the dot interaction ``[B, width]``; see the reference."""
    launches["cpu.interaction"] += 1
    vectors = vectors.contiguous()
    gram = torch.bmm(vectors, vectors.mT)
    out = empty((len(vectors), width), vectors.dtype)
    launch(_gather, _bits(vectors), _bits(gram), _bits(out))
    return out


def interaction_backward(grad: Tensor, vectors: Tensor) -> Tensor:
    """Compute the gradient ``[B, n, D]`` of `interaction`; see the reference."""
    launches["cpu.interaction_backward"] += 1
    samples, n, dim = vectors.shape
    gram = torch.empty(samples, n, n, dtype=vectors.dtype)
    grad = grad.to(vectors.dtype).contiguous()
    launch(_scatter, _bits(grad), dim, _bits(gram))
    out = torch.bmm(gram, vectors, out=empty(vectors.shape, vectors.dtype))
    out[:, 0] += grad[:, :dim]
    return out


def _bits(t: Tensor):
    """Return a view as integers of the same size, because the kernels only copy values."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()]).numpy()


@kernel(parallel=True)
def _gather(vectors, gram, out):
    samples, n, dim = vectors.shape
    for b in prange(samples):
        for d in range(dim):
            out[b, d] = vectors[b, 0, d]
        at = dim
        for i in range(1, n):
            for j in range(i):
                out[b, at + j] = gram[b, i, j]
            at += i
        for d in range(at, out.shape[1]):
            out[b, d] = 0


@kernel(parallel=True)
def _scatter(grad, dim, gram):
    samples, n, _ = gram.shape
    for b in prange(samples):
        at = dim
        for i in range(n):
            for j in range(i):
                gram[b, i, j] = grad[b, at + j]
                gram[b, j, i] = grad[b, at + j]
            gram[b, i, i] = 0
            at += i
