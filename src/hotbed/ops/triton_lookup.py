# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Pooled lookup in Triton: one launch per arena, whatever its features look like.

A program pools a block of consecutive samples of ONE feature. So everything that differs between features (fixed or
ragged, where the table starts, sum or mean) is a scalar of the program, ids are read side by side, and the rows of the
block, wherever they lie, are in flight together. Two reads depend on each other, the id and its row; a one-hot bag
needs nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import BagLayout
from hotbed.ops.triton_launch import STRICT, TILE, ceil_div, power_of_two, rows_per_program


@triton.jit
def _weighted_rows(
    weight, ids, weights, at, live, base, D: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTED: tl.constexpr
):
    """Rows ``[samples, BLOCK_D]`` of the ids at these positions, times their weights; zeros where not ``live``."""
    col = tl.arange(0, BLOCK_D)
    id = tl.load(ids + at, mask=live, other=-1).to(tl.int64)
    mask = (id >= 0)[:, None] & (col < D)[None, :]
    rows = tl.load(weight + (id + base)[:, None] * D + col[None, :], mask=mask, other=0.0)
    if WEIGHTED:
        rows = rows * tl.load(weights + at, mask=live, other=0.0)[:, None]
    return rows


@triton.jit(do_not_specialize=["batch_size"])
def _lookup_kernel(
    out,  # [B, F, D]
    weight,  # [S, D]
    ids,
    features,  # [F, 5], see BagLayout
    offsets,  # [ragged features, B + 1]
    weights,  # parallel to ids; read where WEIGHTED
    batch_size,
    F: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_MEAN: tl.constexpr,
):
    """``out[b, f] = Σ_j weights[j] · weight[base + ids[j]]`` over the ids j of bag (b, f), left to right; ÷ count."""
    feature = features + tl.program_id(1) * 5
    start = tl.load(feature)
    fixed = tl.load(feature + 1)
    base = tl.load(feature + 3)
    sample = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = sample < batch_size
    # Masks and not a branch: a fixed feature reads no offsets, and every value has one definition (one layout).
    ragged = sample * 0 + fixed < 0
    row = offsets + tl.load(feature + 2) * (batch_size + 1) + sample
    begin = tl.load(row, mask=in_batch & ragged, other=0)
    end = tl.load(row + 1, mask=in_batch & ragged, other=0)
    first = start + tl.where(ragged, begin, sample * fixed)
    length = tl.where(ragged, end - begin, tl.where(in_batch, fixed, 0))
    longest = tl.max(length, axis=0)

    # The first id is outside the loop: a one-hot bag is then straight-line code, and −0 stays −0.
    acc = _weighted_rows(weight, ids, weights, first, length > 0, base, D, BLOCK_D, WEIGHTED)
    for j in range(1, longest):
        live = length > j
        rows = _weighted_rows(weight, ids, weights, first + j, live, base, D, BLOCK_D, WEIGHTED)
        acc = tl.where(live[:, None], acc + rows, acc)
    if HAS_MEAN:
        mean = tl.load(feature + 4) != 0
        count = tl.where(mean, tl.maximum(length, 1), 1).to(tl.float32)
        acc = tl.div_rn(acc, tl.broadcast_to(count[:, None], [BLOCK_B, BLOCK_D]))
    col = tl.arange(0, BLOCK_D)
    to = out + (sample * F + tl.program_id(1))[:, None] * D + col[None, :]
    tl.store(to, acc, mask=in_batch[:, None] & (col < D)[None, :])


def lookup(weight: Tensor, bags: BagLayout) -> Tensor:
    """Pool the rows of each bag, see `hotbed.ops.reference.lookup`."""
    launches["triton.lookup"] += 1
    features, dim = len(bags.features), weight.shape[1]
    out = weight.new_empty(bags.batch_size, features, dim)
    if out.numel() == 0:
        return out
    block_d = power_of_two(dim)
    block_b = rows_per_program(block_d, TILE)
    with torch.cuda.device_of(weight):
        _lookup_kernel[(ceil_div(bags.batch_size, block_b), features)](
            out,
            weight,
            bags.ids,
            bags.features,
            bags.offsets,
            bags.ids if bags.weights is None else bags.weights,
            bags.batch_size,
            F=features,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_B=block_b,
            WEIGHTED=bags.weights is not None,
            HAS_MEAN=bags.has_mean,
            **STRICT,
        )
    return out
