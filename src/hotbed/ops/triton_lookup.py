# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Pool the rows of bags in Triton, and compute the gradient of their weights: one launch per arena.

A program serves a block of consecutive samples of ONE feature. So everything that differs between features (fixed or
ragged, where the table starts, how it is pooled) is a scalar of the program, ids are read side by side, and the rows of
the block, wherever they lie, are in flight together. Two reads depend on each other, the id and its row; a one-hot bag
needs nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed import pooling
from hotbed.ops.backend import launches
from hotbed.ops.layout import BLOCK, BagLayout, Rows
from hotbed.ops.triton_rows import as_float32, load_rows, locate, round_nearest, row_pointers
from hotbed.ops.triton_rules import block_sum
from hotbed.ops.triton_runtime import (
    BASE,
    FEATURE,
    FIXED,
    OUT,
    POOLING,
    RAGGED_ROW,
    START,
    STRICT,
    TABLE,
    TILE,
    ceil_div,
    power_of_two,
    rows_per_program,
)

MEAN = tl.constexpr(pooling.MEAN)


@triton.jit
def _bounds(feature, offsets, sample, batch_size):
    """Position of the first id and number of ids of the bags of these samples; none beyond the batch."""
    fixed = tl.load(feature + FIXED)
    in_batch = sample < batch_size
    # Masks and not a branch: a fixed feature reads no offsets, and every value has one definition (one layout).
    ragged = sample * 0 + fixed < 0
    row = offsets + tl.load(feature + RAGGED_ROW) * (batch_size + 1) + sample
    begin = tl.load(row, mask=in_batch & ragged, other=0)
    end = tl.load(row + 1, mask=in_batch & ragged, other=0)
    first = tl.load(feature + START) + tl.where(ragged, begin, sample * fixed)
    return first, tl.where(ragged, end - begin, tl.where(in_batch, fixed, 0))


@triton.jit
def divisors(pooling, length):
    """What the sums of bags of these lengths are divided by; see `hotbed.ops.reference.divisors`."""
    return tl.where(pooling == MEAN, tl.maximum(length, 1), 1).to(tl.float32)


@triton.jit
def _rows_of_ids(rows, ids, at, live, feature, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WIDE: tl.constexpr):
    """Rows ``[samples, BLOCK_D]`` of the ids at these positions; zeros where not ``live``."""
    id = tl.load(ids + at, mask=live, other=-1).to(tl.int64)
    slot = tl.where(id >= 0, id + tl.load(feature + BASE), -1)
    return load_rows(rows, locate(rows, slot, tl.load(feature + TABLE), HAS_WIDE), D, BLOCK_D, HAS_WIDE)


@triton.jit
def _weighted(rows, weights, at, live, WEIGHTED: tl.constexpr):
    """Rows ``[samples, BLOCK_D]`` times the weights at these positions."""
    if WEIGHTED:
        rows = rows * tl.load(weights + at, mask=live, other=0.0)[:, None]
    return rows


@triton.jit(do_not_specialize=["batch_size", "width", "room"])
def _lookup_kernel(
    out,  # [B, width, D]
    rows,
    ids,
    features,  # [F, 7], see BagLayout
    offsets,  # [ragged features, B + 1]
    weights,  # parallel to ids; read where WEIGHTED
    batch_size,
    width,
    room,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
):
    """``out[b, f] = Σ_j weights[j] · row[ids[j]]`` over the ids j of bag (b, f), left to right; ÷ count."""
    feature = features + tl.program_id(1) * FEATURE
    sample = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    first, length = _bounds(feature, offsets, sample, batch_size)

    # The first id is outside the loop: a one-hot bag is then straight-line code, and −0 stays −0.
    live = length > 0
    acc = _weighted(_rows_of_ids(rows, ids, first, live, feature, D, BLOCK_D, HAS_WIDE), weights, first, live, WEIGHTED)
    for j in range(1, tl.max(length, axis=0)):
        live = length > j
        each = _rows_of_ids(rows, ids, first + j, live, feature, D, BLOCK_D, HAS_WIDE)
        each = _weighted(each, weights, first + j, live, WEIGHTED)
        acc = tl.where(live[:, None], acc + each, acc)
    if HAS_DIVISORS:
        by = divisors(tl.load(feature + POOLING), length)
        acc = tl.div_rn(acc, tl.broadcast_to(by[:, None], [BLOCK_B, BLOCK_D]))
    col = tl.arange(0, BLOCK_D)
    to = out + (sample * width + room + tl.load(feature + OUT))[:, None] * D + col[None, :]
    tl.store(to, round_nearest(acc, out.dtype.element_ty), mask=(sample < batch_size)[:, None] & (col < D)[None, :])


@triton.jit(do_not_specialize=["batch_size", "width", "room"])
def _weight_gradient_kernel(
    out,  # parallel to ids
    rows,
    grad,  # [B · width, D]
    ids,
    features,  # [F, 7], see BagLayout
    offsets,  # [ragged features, B + 1]
    batch_size,
    width,
    room,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
):
    """``out[j] = row[ids[j]] · grad[b, f]`` for the ids j of bag (b, f); ÷ count."""
    feature = features + tl.program_id(1) * FEATURE
    sample = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    first, length = _bounds(feature, offsets, sample, batch_size)
    col = tl.arange(0, BLOCK_D)
    bag = sample * width + room + tl.load(feature + OUT)
    g = tl.load(grad + bag[:, None] * D + col[None, :], mask=(length > 0)[:, None] & (col < D)[None, :], other=0.0)
    g = as_float32(g)
    for j in range(tl.max(length, axis=0)):
        live = length > j
        dot = block_sum(_rows_of_ids(rows, ids, first + j, live, feature, D, BLOCK_D, HAS_WIDE) * g, BLOCK_D)
        if HAS_DIVISORS:
            dot = tl.div_rn(dot, divisors(tl.load(feature + POOLING), length))
        tl.store(out + first + j, dot, mask=live)


def lookup(rows: Rows, bags: BagLayout, out: Tensor) -> None:
    """Pool the rows of each bag, see `hotbed.ops.reference.lookup`; ``out`` must be contiguous."""
    launches["triton.lookup"] += 1
    features, dim = len(bags.features), rows.dim
    if features == 0 or bags.batch_size == 0:
        return
    block_d = power_of_two(dim)
    block_b = rows_per_program(block_d, TILE)
    with torch.cuda.device_of(out):
        _lookup_kernel[(ceil_div(bags.batch_size, block_b), features)](
            out,
            row_pointers(rows),
            bags.ids,
            bags.features,
            bags.offsets,
            bags.ids if bags.weights is None else bags.weights,
            bags.batch_size,
            bags.width,
            bags.room,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_B=block_b,
            HAS_WIDE=len(rows.wide) > 0,
            WEIGHTED=bags.weights is not None,
            HAS_DIVISORS=bags.has_divisors,
            **STRICT,
        )


def weight_gradient(rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
    """Gradient of the per-id weights, see `hotbed.ops.reference.weight_gradient`; ``out`` must be contiguous."""
    launches["triton.weight_gradient"] += 1
    features, dim = len(bags.features), rows.dim
    if features == 0 or bags.batch_size == 0:
        return
    block_d = max(power_of_two(dim), BLOCK)
    block_b = rows_per_program(block_d, TILE // 2)
    with torch.cuda.device_of(out):
        _weight_gradient_kernel[(ceil_div(bags.batch_size, block_b), features)](
            out,
            row_pointers(rows),
            grad.contiguous(),
            bags.ids,
            bags.features,
            bags.offsets,
            bags.batch_size,
            bags.width,
            bags.room,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_B=block_b,
            HAS_WIDE=len(rows.wide) > 0,
            HAS_DIVISORS=bags.has_divisors,
            **STRICT,
        )
