# pyright: basic, reportCallIssue=false
"""Compute the dot interaction on the CPU: products by torch (AMX or AVX-512 where there is), triangles in Numba."""

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from hotbed.large_tensors import empty
from hotbed.ops.backend import launches
from hotbed.ops.cpu_runtime import kernel, launch


def interaction(vectors: Tensor, width: int) -> Tensor:
    """Dot interaction ``[B, width]``; see the reference."""
    launches["cpu.interaction"] += 1
    vectors = vectors.contiguous()
    gram = torch.bmm(vectors, vectors.mT)
    out = empty((len(vectors), width), vectors.dtype)
    launch(_gather, _bits(vectors), _bits(gram), _bits(out))
    return out


def interaction_backward(grad: Tensor, vectors: Tensor) -> Tensor:
    """Gradient ``[B, n, D]`` of `interaction`; see the reference."""
    launches["cpu.interaction_backward"] += 1
    samples, n, dim = vectors.shape
    gram = torch.empty(samples, n, n, dtype=vectors.dtype)
    grad = grad.to(vectors.dtype).contiguous()
    launch(_scatter, _bits(grad), dim, _bits(gram))
    out = torch.bmm(gram, vectors, out=empty(vectors.shape, vectors.dtype))
    out[:, 0] += grad[:, :dim]
    return out


def _bits(t: Tensor):
    """As integers of the same size: the kernels only move values."""
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
