# pyright: basic, reportCallIssue=false
"""Dot interaction on the CPU, one sample at a time in cache; float32 only (autocast is undone for it)."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_memory import empty
from hotbed.ops.cpu_runtime import dot_rows, kernel, launch
from hotbed.ops.layout import BLOCK

SAMPLES_PER_TASK = 16
UNROLL = 4
"""Rows that `_add_rows` adds at once."""


def interaction(dense: Tensor, embeddings: Tensor, width: int) -> Tensor:
    """Dot interaction ``[B, width]``; see the reference."""
    launches["cpu.interaction"] += 1
    out = empty((len(dense), width))
    launch(_forward, dense.contiguous().numpy(), embeddings.contiguous().numpy(), out.numpy())
    return out


def interaction_backward(grad: Tensor, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `interaction` for dense and embeddings; see the reference."""
    launches["cpu.interaction_backward"] += 1
    d_dense, d_embeddings = empty(dense.shape), empty(embeddings.shape)
    launch(
        _backward,
        grad.contiguous().numpy(),
        dense.contiguous().numpy(),
        embeddings.contiguous().numpy(),
        d_dense.numpy(),
        d_embeddings.numpy(),
    )
    return d_dense, d_embeddings


@kernel(parallel=True)
def _forward(dense, embeddings, out):
    samples, features, dim = embeddings.shape
    blocks = (dim + BLOCK - 1) // BLOCK
    stride = blocks * BLOCK
    used = dim + (features + 1) * features // 2
    for task in prange((samples + SAMPLES_PER_TASK - 1) // SAMPLES_PER_TASK):
        vectors = np.zeros((features + 1) * stride, np.float32)
        for b in range(task * SAMPLES_PER_TASK, min((task + 1) * SAMPLES_PER_TASK, samples)):
            for d in range(dim):
                vectors[d] = dense[b, d]
                out[b, d] = dense[b, d]
            for f in range(features):
                for d in range(dim):
                    vectors[(f + 1) * stride + d] = embeddings[b, f, d]
            at = dim
            for i in range(1, features + 1):
                for j in range(i):
                    out[b, at] = dot_rows(vectors, i * stride, j * stride, blocks)
                    at += 1
            out[b, used:] = 0


@kernel(parallel=True)
def _backward(grad, dense, embeddings, d_dense, d_embeddings):
    samples, features, dim = embeddings.shape
    count = features + 1
    padded = (count + UNROLL - 1) // UNROLL * UNROLL
    for task in prange((samples + SAMPLES_PER_TASK - 1) // SAMPLES_PER_TASK):
        vectors = np.zeros((padded, dim), np.float32)
        gram = np.zeros((count, padded), np.float32)  # gradient of the whole Gram matrix; the diagonal stays 0
        for b in range(task * SAMPLES_PER_TASK, min((task + 1) * SAMPLES_PER_TASK, samples)):
            vectors[0] = dense[b]
            vectors[1:count] = embeddings[b]
            at = dim
            for i in range(1, count):
                for j in range(i):
                    gram[i, j] = grad[b, at]
                    gram[j, i] = grad[b, at]
                    at += 1
            d_dense[b] = grad[b, :dim]
            d_embeddings[b] = 0
            for i in range(count):
                out = d_dense[b] if i == 0 else d_embeddings[b, i - 1]
                for j in range(0, padded, UNROLL):
                    _add_rows(out, vectors, j, gram[i, j], gram[i, j + 1], gram[i, j + 2], gram[i, j + 3])


@kernel()
def _add_rows(out, rows, j, g0, g1, g2, g3):
    """Add four scaled rows, in order; four at a time, so that ``out`` is loaded and stored a quarter as often."""
    for d in range(out.shape[0]):
        out[d] = (((out[d] + g0 * rows[j, d]) + g1 * rows[j + 1, d]) + g2 * rows[j + 2, d]) + g3 * rows[j + 3, d]
