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
    for task in prange((samples + SAMPLES_PER_TASK - 1) // SAMPLES_PER_TASK):
        for b in range(task * SAMPLES_PER_TASK, min((task + 1) * SAMPLES_PER_TASK, samples)):
            d_dense[b] = grad[b, :dim]
            d_embeddings[b] = 0
            at = dim
            for i in range(features):  # vector i + 1 against vectors 0 … i
                g = grad[b, at]
                at += 1
                for d in range(dim):
                    d_dense[b, d] += g * embeddings[b, i, d]
                    d_embeddings[b, i, d] += g * dense[b, d]
                for j in range(i):
                    g = grad[b, at]
                    at += 1
                    for d in range(dim):
                        d_embeddings[b, j, d] += g * embeddings[b, i, d]
                        d_embeddings[b, i, d] += g * embeddings[b, j, d]
