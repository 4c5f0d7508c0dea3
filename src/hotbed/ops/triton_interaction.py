# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Dot interaction in Triton, forward and backward, one program per sample.

Both read the vectors of a sample where they lie (``dense`` and ``embeddings`` are never concatenated in memory), and
neither the Gram matrix nor its gradient exists outside a program. At DLRM's size (27 vectors of 128) a sample is 14 KB
of float32 reads for 93,000 multiply-adds, so on the tensor cores the kernels are bound by memory. A float32 product is
three TF32 ones (each operand split into a TF32 number and its TF32 rest), which keeps about float32's accuracy and
leaves the tensor cores usable; sums are float32 for every dtype.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_launch import STRICT, power_of_two

_ELEMENTS = 4096
"""Elements of the tile of vectors in one step of the loop over D: 32 vectors of 128, DLRM's case, are one step."""

_UPCAST = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter multiplies the bit patterns of bfloat16; there, products are made of exact float32 copies."""


@triton.jit
def _dot(a, b):
    """``a b`` with float32 sums."""
    if _UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _vectors(dense, embeddings, sample, col, N: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """These columns of a sample's vectors, ``dense`` first: ``[BLOCK_N, columns]``, zeros outside."""
    n = tl.arange(0, BLOCK_N)[:, None]
    inside = col[None, :] < D
    rest = tl.load(
        embeddings + sample * (N - 1) * D + (n - 1) * D + col[None, :], mask=(n > 0) & (n < N) & inside, other=0.0
    )
    first = tl.load(dense + sample * D + col[None, :] + n * 0, mask=(n == 0) & inside, other=0.0)
    return tl.where(n == 0, first, rest)


@triton.jit
def _interaction_kernel(
    out,  # [B, WIDTH]
    dense,  # [B, D]
    embeddings,  # [B, N − 1, D]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
):
    """``out = [dense | (V Vᵀ)[i, j] for j < i, row by row | 0]`` with V = [dense; embeddings]."""
    sample = tl.program_id(0).to(tl.int64)
    to = out + sample * WIDTH
    gram = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        v = _vectors(dense, embeddings, sample, col, N, D, BLOCK_N)
        gram += _dot(v, tl.trans(v))
        tl.store(to + col, tl.load(dense + sample * D + col, mask=col < D), mask=col < D)
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    tl.store(to + D + i * (i - 1) // 2 + j, gram.to(out.dtype.element_ty), mask=(j < i) & (i < N))
    pad = tl.arange(0, BLOCK_PAD)
    USED: tl.constexpr = D + N * (N - 1) // 2
    tl.store(to + USED + pad, tl.zeros([BLOCK_PAD], out.dtype.element_ty), mask=USED + pad < WIDTH)


@triton.jit
def _interaction_backward_kernel(
    grad_dense,  # [B, D]
    grad_embeddings,  # [B, N − 1, D]
    grad,  # [B, WIDTH]
    dense,  # [B, D]
    embeddings,  # [B, N − 1, D]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``dV = (G + Gᵀ) V`` with G the strict lower triangle of the Gram gradient; ``d dense = dV[0] + grad[:D]``."""
    sample = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    pair = D + high * (high - 1) // 2 + low
    gram = tl.load(grad + sample * WIDTH + pair, mask=(i != j) & (high < N), other=0.0)
    n = tl.arange(0, BLOCK_N)[:, None]
    for start in range(0, D, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        inside = col[None, :] < D
        v = _vectors(dense, embeddings, sample, col, N, D, BLOCK_N)
        dv = _dot(gram, v)
        straight = (n == 0) & inside
        dv += tl.load(grad + sample * WIDTH + col[None, :] + n * 0, mask=straight, other=0.0).to(tl.float32)
        dv = dv.to(grad_dense.dtype.element_ty)
        tl.store(grad_dense + sample * D + col[None, :] + n * 0, dv, mask=straight)
        to = grad_embeddings + sample * (N - 1) * D + (n - 1) * D + col[None, :]
        tl.store(to, dv, mask=(n > 0) & (n < N) & inside)


def _launch(vectors: int, dim: int) -> dict[str, int]:
    """Tile sizes: four warps where the Gram matrix is up to 64 × 64; programs beside each other hide the latency."""
    block_n = max(power_of_two(vectors), 16)
    return {
        "BLOCK_N": block_n,
        "BLOCK_D": min(max(power_of_two(dim), 16), max(_ELEMENTS // block_n, 16)),
        "num_warps": 4 if block_n <= 64 else 8,
        "num_stages": 1,
    }


def interaction(dense: Tensor, embeddings: Tensor, width: int) -> Tensor:
    """Dot interaction, see `hotbed.ops.reference.interaction`."""
    launches["triton.interaction"] += 1
    dtype = torch.promote_types(dense.dtype, embeddings.dtype)
    out = torch.empty(len(dense), width, dtype=dtype, device=dense.device)
    if len(dense) == 0:
        return out
    vectors, dim = embeddings.shape[1] + 1, dense.shape[1]
    with torch.cuda.device_of(dense):
        _interaction_kernel[(len(dense),)](
            out,
            dense.to(dtype).contiguous(),
            embeddings.to(dtype).contiguous(),
            WIDTH=width,
            N=vectors,
            D=dim,
            BLOCK_PAD=power_of_two(width - dim - vectors * (vectors - 1) // 2),
            **_launch(vectors, dim),
            **STRICT,
        )
    return out


def interaction_backward(grad: Tensor, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the dot interaction, see `hotbed.ops.reference.interaction_backward`."""
    launches["triton.interaction_backward"] += 1
    dtype = torch.promote_types(dense.dtype, embeddings.dtype)
    grad_dense = torch.empty_like(dense, dtype=dtype, memory_format=torch.contiguous_format)
    grad_embeddings = torch.empty_like(embeddings, dtype=dtype, memory_format=torch.contiguous_format)
    if len(dense) == 0:
        return grad_dense, grad_embeddings
    vectors, dim = embeddings.shape[1] + 1, dense.shape[1]
    with torch.cuda.device_of(dense):
        _interaction_backward_kernel[(len(dense),)](
            grad_dense,
            grad_embeddings,
            grad.to(dtype).contiguous(),
            dense.to(dtype).contiguous(),
            embeddings.to(dtype).contiguous(),
            WIDTH=grad.shape[1],
            N=vectors,
            D=dim,
            **_launch(vectors, dim),
            **STRICT,
        )
    return grad_dense, grad_embeddings
