# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Compute small dense operations in Triton: ReLU's gradient, the loss, means, step counts and the dot interaction.

torch needs several launches or passes for most of them. The order of every sum depends only on shapes, so bits repeat.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_rows import as_float32, round_nearest
from hotbed.ops.triton_runtime import STRICT, TILE, _mix32, ceil_div, power_of_two, rows_per_program
from hotbed.ops.triton_tree import add_value, no_halves

# -- ReLU ------------------------------------------------------------------------------------------------------------
#
# torch writes the gradient in one kernel and reads it again to sum it for the bias. These kernels need one pass. Each
# program processes a part of the rows of some columns, and a second kernel sums the parts.

_COLUMNS = 128
"""Largest number of columns per program: 256 bytes of a row of two-byte values."""
_PROGRAMS = 1024
"""Approximate number of programs per gradient, several per multiprocessor."""
_PARTS = 256
"""Largest number of parts of the rows. A program of the second kernel reads them in few loads."""
_SUMMED_COLUMNS = 32
"""Columns per program that sums parts: 128 bytes of float32."""


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
    """Compute ``gradient = of_out`` where ``out`` is above 0, else 0, and ``sums[part] = Σ gradient`` over a part."""
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
        tl.store(gradient + at, value.to(gradient.dtype.element_ty), mask=live)  # exact, because it had this dtype
        found += tl.where(live, value, 0.0)
    to = sums + tl.program_id(0).to(tl.int64) * COLUMNS + tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(to, tl.sum(found, axis=0), mask=tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C) < COLUMNS)


@triton.jit(do_not_specialize=["parts"])
def _add_parts_kernel(out, sums, parts, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute ``out = Σ sums`` by column."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, parts, BLOCK_R):
        part = (start + tl.arange(0, BLOCK_R))[:, None]
        live = (part < parts) & (column[None, :] < COLUMNS)
        found += tl.load(sums + part * COLUMNS + column[None, :], mask=live, other=0.0)
    tl.store(out + column, round_nearest(tl.sum(found, axis=0), out.dtype.element_ty), mask=column < COLUMNS)


def relu_backward(of_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a ReLU's input ``[B, N]`` and its sum over all rows ``[N]``, rounded from float32.

    ``of_out`` is the gradient of the ReLU's output ``out``.
    """
    launches["triton.relu_backward"] += 1
    out = out.contiguous()
    if of_out.stride(-1) != 1:  # rows may be strided, but the columns of a row must be contiguous
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


# -- loss ------------------------------------------------------------------------------------------------------------
#
# torch needs five launches for the sum and three for its gradient. In these kernels, each program sums a block of
# logits, and one more program sums the results.

_LOSS_BLOCK = 1024


@triton.jit
def _log_of_one_plus(e):
    """Return ``log(1 + e)`` for e in [0, 1]. A factor corrects the rounding of 1 + e (Kahan's ``log1p``)."""
    one = 1.0 + e
    is_lost = one == 1.0
    return tl.where(is_lost, e, tl.log(one) * tl.div_rn(e, tl.where(is_lost, 1.0, one - 1.0)))


@triton.jit(do_not_specialize=["total", "logits_per_weight"])
def _cross_entropy_kernel(
    sums,  # [programs]
    gradient,  # [B, T]
    logits,  # [B, T]
    labels,  # [B, T]
    weights,  # [B, 1] or [B, T]; read where WEIGHTED
    total,  # B · T
    logits_per_weight,  # T, or 1
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Compute ``Σ w · ((1 − y) · x − log σ(x))`` of a block, and ``w · (σ(x) − y)`` per logit."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    x = tl.load(logits + i, mask=live, other=0.0)
    y = tl.load(labels + i, mask=live, other=0.0)
    e = tl.exp(-tl.abs(x))
    loss = (1.0 - y) * x - (tl.minimum(x, 0.0) - _log_of_one_plus(e))
    grad = tl.div_rn(tl.where(x >= 0, 1.0, e), 1.0 + e) - y
    if WEIGHTED:
        w = tl.load(weights + i // logits_per_weight, mask=live, other=0.0)
        loss = loss * w
        grad = grad * w
    tl.store(gradient + i, grad, mask=live)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(live, loss, 0.0), axis=0))


@triton.jit(do_not_specialize=["count"])
def _total_kernel(out, sums, count, BLOCK: tl.constexpr):
    """Compute ``out[0] = Σ sums``."""
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += tl.load(sums + i, mask=i < count, other=0.0)
    tl.store(out, tl.sum(found, axis=0))


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum the weighted binary cross-entropy of logits, as torch's ``binary_cross_entropy_with_logits`` defines it.

    Logits and labels are ``[B, T]`` float32. Weights are ``[B, 1]`` or ``[B, T]``, or None for 1. Return the sum (0-d
    float32) and its gradient ``[B, T]``.
    """
    launches["triton.cross_entropy"] += 1
    logits, labels = logits.contiguous(), labels.contiguous()
    gradient, total = torch.empty_like(logits), torch.empty((), dtype=torch.float32, device=logits.device)
    count = logits.numel()
    if not count:
        return total.zero_(), gradient
    programs = ceil_div(count, _LOSS_BLOCK)
    sums = torch.empty(programs, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(programs,)](
            sums,
            gradient,
            logits,
            labels,
            labels if weights is None else weights.contiguous(),
            count,
            1 if weights is None else count // weights.numel(),
            BLOCK=_LOSS_BLOCK,
            WEIGHTED=weights is not None,
            **STRICT,
        )
        _total_kernel[(1,)](total, sums, programs, BLOCK=_LOSS_BLOCK, **STRICT)
    return total, gradient


# -- means over ranks ------------------------------------------------------------------------------------------------
#
# torch's sum has an unspecified order, and one addition per rank would need thousands of launches for thousands of
# ranks. In this kernel, a program adds the rows of some columns along the tree over virtual ranks. Each row is read
# once (`hotbed.ops.triton_tree`).

_MEAN_COLUMNS = 128
"""Columns per program. They are few, because shards are short with many ranks, and rows are added sequentially."""
_TOGETHER = 16
"""Number of rows that are loaded at once."""


@triton.jit(do_not_specialize=["rows", "columns", "divisor"])
def _mean_of_rows_kernel(
    mean,  # [n], written
    values,  # [T, n]
    meets,  # [T], see `add_value`
    rows,  # T, at least 1
    columns,  # n
    divisor,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Add the rows along the tree, and divide the sum. Each addition is rounded to the dtype of values."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = column < columns
    at = values + column
    halves = no_halves(LEVELS, 1, COLUMNS)
    total = tl.zeros([1, COLUMNS], tl.float32)
    following = as_float32(tl.load(at, mask=live, other=0.0))
    for row in tl.range(0, rows, loop_unroll_factor=TOGETHER):
        total = following
        at += columns
        following = as_float32(tl.load(at, mask=live & (row + 1 + column * 0 < rows), other=0.0))
        halves, total = add_value(halves, total, tl.load(meets + row), LEVELS, values.dtype.element_ty)
    by = tl.zeros([1, COLUMNS], tl.float32) + divisor.to(tl.float32)
    tl.store(mean + column, round_nearest(tl.div_rn(total, by), values.dtype.element_ty), mask=live)


def reduce_mean(values: Tensor, leaves: Sequence[int], divisor: int) -> Tensor:
    """Add rows ``[T, n]`` in float32, bfloat16 or float16 along the tree, and divide the sum.

    Return ``[n]`` in the same dtype. Rows are values of ascending ``leaves``.
    """
    launches["triton.mean_of_rows"] += 1
    rows, columns = values.shape
    mean = torch.empty(columns, dtype=values.dtype, device=values.device)
    if columns:
        levels = (leaves[0] ^ leaves[-1]).bit_length()
        with torch.cuda.device_of(values):
            _mean_of_rows_kernel[(ceil_div(columns, _MEAN_COLUMNS),)](
                mean,
                values.contiguous(),
                _meets(tuple(leaves), values.device),
                rows,
                columns,
                divisor,
                LEVELS=levels,
                COLUMNS=_MEAN_COLUMNS,
                TOGETHER=_TOGETHER,
                **STRICT,
            )
    return mean


@cache
def _meets(leaves: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the bits in which each leaf differs from the next, and a bit above them for the last leaf.

    They are copied to the device once, because each copy waits for the device.
    """
    last = 1 << (leaves[0] ^ leaves[-1]).bit_length()
    meets = [leaf ^ following for leaf, following in pairwise(leaves)]
    return torch.tensor([*meets, last], dtype=torch.int32).to(device)


# -- steps -----------------------------------------------------------------------------------------------------------

_STEP_BLOCK = 256


@triton.jit(do_not_specialize=["total"])
def _count_steps_kernel(counts, trained, gate, total, BLOCK: tl.constexpr):
    """Compute ``counts += trained`` unless ``gate`` is 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    behind = total
    if tl.load(gate) == 0:
        behind = total * 0
    live = i < behind
    tl.store(counts + i, tl.load(counts + i, mask=live) + tl.load(trained + i, mask=live), mask=live)


def count_steps_(counts: Tensor, trained: Tensor, gate: Tensor) -> None:
    """Increment the step counts ``[tables]`` of trained tables (``trained`` is 1) unless ``gate`` (0-d) is 0."""
    launches["triton.count_steps_"] += 1
    total = len(counts)
    if total:
        with torch.cuda.device_of(counts):
            programs = (ceil_div(total, _STEP_BLOCK),)
            _count_steps_kernel[programs](counts, trained, gate, total, BLOCK=_STEP_BLOCK, **STRICT)


@triton.jit(do_not_specialize=["total"])
def _step_seeds_kernel(
    out,  # [T]
    table_seeds,  # [T]
    steps,  # [T]
    total,  # T
    BLOCK: tl.constexpr,
):
    """Compute ``out = mix(mix(low(step) ^ seed) ^ high(step) ^ golden)``, 32 bits each."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    step = tl.load(steps + i, mask=live, other=0)
    key = _mix32((step & 0xFFFFFFFF).to(tl.uint32) ^ tl.load(table_seeds + i, mask=live, other=0).to(tl.uint32))
    tl.store(out + i, _mix32(key ^ (step >> 32).to(tl.uint32) ^ 0x9E3779B9).to(tl.int64), mask=live)


def step_seeds(table_seeds: Tensor, steps: Tensor) -> Tensor:
    """Compute the seeds of a step's stochastic rounding, see `hotbed.ops.rows.step_seeds`."""
    launches["triton.step_seeds"] += 1
    out = torch.empty_like(table_seeds)
    total = len(out)
    if total:
        with torch.cuda.device_of(out):
            _step_seeds_kernel[(ceil_div(total, _STEP_BLOCK),)](
                out, table_seeds, steps.contiguous(), total, BLOCK=_STEP_BLOCK, **STRICT
            )
    return out


# -- dot interaction -------------------------------------------------------------------------------------------------

# One program computes a sample. Neither the Gram matrix nor its gradient exists outside a program. At DLRM's size (27
# vectors of 128), a sample is 14 KB of float32 reads for 93,000 multiply-adds. Therefore memory limits the kernels on
# tensor cores. A float32 product is three TF32 ones: each operand is split into a TF32 number and its TF32 rest. This
# keeps about float32's accuracy on tensor cores. AMD's matrix units compute float32 products directly. Sums are float32
# for every dtype.

_BYTES = 8192
"""Bytes of the tile of two-byte vectors in one step of the loop over D, e.g. DLRM's 32 vectors of 128 columns.

For float32 it is half of that, because splitting into TF32 numbers needs three times the registers.
"""
_FORWARD, _BACKWARD = 32, 16
"""Rows of the Gram matrix per warp, forward and backward.

With few warps, warps wait less for each other and more programs run concurrently. The registers of a warp are the
limit. In backward, they hold both operands of a product.
"""

_UPCAST = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether to multiply exact float32 copies, because Triton's interpreter multiplies the bit patterns of bfloat16."""


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Compute ``a b`` with float32 sums."""
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
    """Compute ``out = [V[0] | (V Vᵀ)[i, j] for j < i, row by row | 0]``."""
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
    """Compute ``out = (G + Gᵀ) V`` and ``out[0] += grad[:D]``. G is the strict lower triangle of the Gram gradient."""
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
    """Return the precision of float32 products. Other dtypes ignore it, but the GPU must support it."""
    # tf32x3 computes with tensor cores, and is nearly as exact as float32.
    return "ieee" if torch.version.hip else "tf32x3"


def _launch(vectors: int, dim: int, dtype: torch.dtype, rows_per_warp: int) -> dict[str, int | str]:
    """Return tile sizes and the number of warps."""
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
    """Compute the dot interaction, see `hotbed.ops.reference.interaction`."""
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
    """Compute the gradient of the dot interaction, see `hotbed.ops.reference.interaction_backward`."""
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
