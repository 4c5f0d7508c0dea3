# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Compute the dot interaction in Triton, forward and backward, one program per sample.

Neither the Gram matrix nor its gradient exists outside a program. At DLRM's size (27 vectors of 128) a sample is 14 KB
of float32 reads for 93,000 multiply-adds, so on the tensor cores the kernels are bound by memory. A float32 product is
three TF32 ones (each operand split into a TF32 number and its TF32 rest), which keeps about float32's accuracy and
leaves the tensor cores usable; AMD's matrix units take float32 as it is. Sums are float32 for every dtype.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_rows import as_float32, round_nearest
from hotbed.ops.triton_runtime import STRICT, power_of_two

_BYTES = 8192
"""Bytes of the tile of vectors in one step of the loop over D, of two-byte values: DLRM's 32 vectors of 128 columns.

Of float32, whose splitting into TF32 numbers takes three times the registers, it is half as many.
"""
_FORWARD, _BACKWARD = 32, 16
"""Rows of the Gram matrix per warp. Few warps wait for each other the least, and many programs fit beside each other; a
warp's registers are the limit, which hold both operands of a product backward. Figures: docs/log.md, 2026-11-27."""

_UPCAST = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter multiplies the bit patterns of bfloat16; there, products are made of exact float32 copies."""


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """``a b`` with float32 sums."""
    if _UPCAST:
        a = as_float32(a)
        b = as_float32(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _interaction_kernel(
    out,  # [B, WIDTH]
    vectors,  # [B, N, D]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out = [V[0] | (V Vᵀ)[i, j] for j < i, row by row | 0]``."""
    sample = tl.program_id(0).to(tl.int64)
    to = out + sample * WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    gram = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)[None, :]
        v = tl.load(vectors + sample * N * D + i * D + col, mask=(i < N) & (col < D), other=0.0)
        gram += _dot(v, tl.trans(v), PRECISION)
        tl.store(to + col + i * 0, v, mask=(i == 0) & (col < D))
    tl.store(to + D + i * (i - 1) // 2 + j, round_nearest(gram, dtype), mask=(j < i) & (i < N))
    pad = tl.arange(0, BLOCK_PAD)
    USED: tl.constexpr = D + N * (N - 1) // 2
    tl.store(to + USED + pad, tl.zeros([BLOCK_PAD], dtype), mask=USED + pad < WIDTH)


@triton.jit
def _interaction_backward_kernel(
    out,  # [B, N, D]
    grad,  # [B, WIDTH]
    vectors,  # [B, N, D]
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out = (G + Gᵀ) V`` with G the strict lower triangle of the Gram gradient; ``out[0] += grad[:D]``."""
    sample = tl.program_id(0).to(tl.int64)
    grad += sample * WIDTH
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    high = tl.maximum(i, j)
    pair = D + high * (high - 1) // 2 + tl.minimum(i, j)
    gram = tl.load(grad + pair, mask=(i != j) & (high < N), other=0.0)
    for start in range(0, D, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)[None, :]
        mask = (i < N) & (col < D)
        at = sample * N * D + i * D + col
        dv = _dot(gram, tl.load(vectors + at, mask=mask, other=0.0), PRECISION)
        dv += as_float32(tl.load(grad + col + i * 0, mask=(i == 0) & (col < D), other=0.0))
        tl.store(out + at, round_nearest(dv, out.dtype.element_ty), mask=mask)


def _precision() -> str:
    """How a product of float32 is made; of other dtypes it says nothing, but has to be one that the GPU knows."""
    return "ieee" if torch.version.hip else "tf32x3"


def _launch(vectors: int, dim: int, dtype: torch.dtype, rows_per_warp: int) -> dict[str, int | str]:
    """Tile sizes, and warps."""
    block_n = max(power_of_two(vectors), 16)
    nbytes = _BYTES if dtype.itemsize == 2 else _BYTES // 2
    return {
        "BLOCK_N": block_n,
        "BLOCK_D": min(max(power_of_two(dim), 16), max(nbytes // dtype.itemsize // block_n, 16)),
        "num_warps": max(block_n // rows_per_warp, 1) if block_n <= 64 else 8,
        "num_stages": 1,
        "PRECISION": _precision(),
    }


def interaction(vectors: Tensor, width: int) -> Tensor:
    """Dot interaction, see `hotbed.ops.reference.interaction`."""
    launches["triton.interaction"] += 1
    samples, n, dim = vectors.shape
    out = vectors.new_empty(samples, width)
    if samples:
        with torch.cuda.device_of(out):
            _interaction_kernel[(samples,)](
                out,
                vectors.contiguous(),
                WIDTH=width,
                N=n,
                D=dim,
                BLOCK_PAD=power_of_two(width - dim - n * (n - 1) // 2),
                **_launch(n, dim, vectors.dtype, _FORWARD),
                **STRICT,
            )
    return out


def interaction_backward(grad: Tensor, vectors: Tensor) -> Tensor:
    """Gradient of the dot interaction, see `hotbed.ops.reference.interaction_backward`."""
    launches["triton.interaction_backward"] += 1
    samples, n, dim = vectors.shape
    out = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    if samples:
        with torch.cuda.device_of(out):
            _interaction_backward_kernel[(samples,)](
                out,
                grad.to(vectors.dtype).contiguous(),
                vectors.contiguous(),
                WIDTH=grad.shape[1],
                N=n,
                D=dim,
                **_launch(n, dim, vectors.dtype, _BACKWARD),
                **STRICT,
            )
    return out
