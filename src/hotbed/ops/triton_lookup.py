# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""Pool the rows of bags in Triton, and compute the gradient of their weights, in one launch per arena.

A program processes a block of consecutive samples of ONE feature. Therefore all properties of the feature (fixed or
ragged, first slot of the table, pooling) are scalars of the program. Ids are read contiguously, and all rows of the
block are in flight together. Only two reads depend on each other, the id and its row.

The kernel is compiled separately for three types of batches. With one id per bag, it needs no loop. With the same
number of ids in every bag, it reads four ids together. Otherwise it makes no assumption.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed import specs
from hotbed.ops.backend import launches
from hotbed.ops.layout import BLOCK, BagLayout, Rows
from hotbed.ops.rows import table_of
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

MEAN = tl.constexpr(specs.MEAN)


@triton.jit
def _bounds(feature, offsets, sample, batch_size):
    """Return the position of the first id (int64) and the number of ids (int32) of the bags of these samples.

    Bags beyond the batch have no ids.
    """
    fixed = tl.load(feature + FIXED)
    in_batch = sample < batch_size
    # Masks instead of a branch, so that a fixed feature reads no offsets and every value has one layout.
    ragged = sample * 0 + fixed < 0
    row = offsets + tl.load(feature + RAGGED_ROW) * (batch_size + 1) + sample
    begin = tl.load(row, mask=in_batch & ragged, other=0)
    end = tl.load(row + 1, mask=in_batch & ragged, other=0)
    first = tl.load(feature + START) + tl.where(ragged, begin, sample * fixed)
    return first, tl.where(ragged, end - begin, tl.where(in_batch, fixed, 0)).to(tl.int32)


@triton.jit
def mean_divisors(pooling, length):
    """Return the divisors of the sums of bags with these lengths; see `hotbed.specs.divisors`."""
    return tl.where(pooling == MEAN, tl.maximum(length, 1), 1).to(tl.float32)


@triton.jit
def _rows_of_ids(rows, ids, at, live, feature, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WIDE: tl.constexpr):
    """Return the rows ``[samples, BLOCK_D]`` of the ids at these positions, or zeros where not ``live``."""
    id = tl.load(ids + at, mask=live, other=-1).to(tl.int64)
    slot = tl.where(id >= 0, id + tl.load(feature + BASE), -1)
    return load_rows(rows, locate(rows, slot, tl.load(feature + TABLE), HAS_WIDE), D, BLOCK_D, HAS_WIDE)


@triton.jit
def _row_of_id(
    rows,
    ids,
    weights,
    at,
    live,
    feature,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Return `_rows_of_ids` times the weights of the ids."""
    row = _rows_of_ids(rows, ids, at, live, feature, D, BLOCK_D, HAS_WIDE)
    if WEIGHTED:
        row = row * tl.load(weights + at, mask=live, other=0.0)[:, None]
    return row


_ANY, _ONE, _FIXED = (tl.constexpr(kind) for kind in range(3))
"""Types of batches by the number of ids per bag: any numbers, all 1, all equal."""


def _kind(bags: BagLayout) -> int:
    """Return the type of a batch."""
    known = bags.ids_per_bag
    return (_ANY if not known else _ONE if known == 1 else _FIXED).value


@triton.jit(do_not_specialize=["batch_size", "width", "room", "ids_per_bag", "blocks"])
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
    ids_per_bag,  # read where KIND is _FIXED
    blocks,  # programs per feature
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Compute ``out[b, f] = Σ_j weights[j] · row[ids[j]] ÷ divisor`` over the ids j of bag (b, f), left to right."""
    feature = features + tl.program_id(0) // blocks * FEATURE
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    live = sample < batch_size
    if KIND == _ONE:
        first = tl.load(feature + START) + sample
    elif KIND == _FIXED:
        first = tl.load(feature + START) + sample * ids_per_bag
    else:
        first, length = _bounds(feature, offsets, sample, batch_size)
        live = length > 0

    # The first id is outside the loop, so that −0 stays −0.
    acc = _row_of_id(rows, ids, weights, first, live, feature, D, BLOCK_D, HAS_WIDE, WEIGHTED)
    if KIND == _FIXED:
        length = tl.where(live, ids_per_bag, 0)
        for j in range(1, ids_per_bag, 4):
            live1, live2, live3 = length > j + 1, length > j + 2, length > j + 3
            row0 = _row_of_id(rows, ids, weights, first + j, live, feature, D, BLOCK_D, HAS_WIDE, WEIGHTED)
            row1 = _row_of_id(rows, ids, weights, first + j + 1, live1, feature, D, BLOCK_D, HAS_WIDE, WEIGHTED)
            row2 = _row_of_id(rows, ids, weights, first + j + 2, live2, feature, D, BLOCK_D, HAS_WIDE, WEIGHTED)
            row3 = _row_of_id(rows, ids, weights, first + j + 3, live3, feature, D, BLOCK_D, HAS_WIDE, WEIGHTED)
            acc = acc + row0
            acc = tl.where(live1[:, None], acc + row1, acc)
            acc = tl.where(live2[:, None], acc + row2, acc)
            acc = tl.where(live3[:, None], acc + row3, acc)
    elif KIND == _ANY:
        for j in range(1, tl.max(length, axis=0)):
            live = length > j
            row = _row_of_id(rows, ids, weights, first + j, live, feature, D, BLOCK_D, HAS_WIDE, WEIGHTED)
            acc = tl.where(live[:, None], acc + row, acc)
    if HAS_DIVISORS:
        if KIND == _ONE:
            length = tl.full([BLOCK_B], 1, tl.int32)
        by = mean_divisors(tl.load(feature + POOLING), length)
        acc = tl.div_rn(acc, tl.broadcast_to(by[:, None], [BLOCK_B, BLOCK_D]))
    col = tl.arange(0, BLOCK_D)
    to = out + (sample * width + room + tl.load(feature + OUT))[:, None] * D + col[None, :]
    tl.store(to, round_nearest(acc, out.dtype.element_ty), mask=(sample < batch_size)[:, None] & (col < D)[None, :])


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    out,  # [count, D] float32
    rows,
    slots,  # [count]
    tables,  # [count], tables of the slots; unused if all rows are float32
    count,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_WIDE: tl.constexpr,
):
    """Compute ``out[i] = row[slots[i]]``."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    slot = tl.load(slots + i, mask=i < count, other=-1)
    table = tl.load(tables + i, mask=i < count, other=0)
    values = load_rows(rows, locate(rows, slot, table, HAS_WIDE), D, BLOCK_D, HAS_WIDE)
    col = tl.arange(0, BLOCK_D)
    tl.store(out + i[:, None] * D + col[None, :], values, mask=(i < count)[:, None] & (col < D)[None, :])


@triton.jit(do_not_specialize=["batch_size", "width", "room", "blocks"])
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
    blocks,  # programs per feature
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
):
    """Compute ``out[j] = row[ids[j]] · grad[b, f] ÷ divisor`` for the ids j of bag (b, f)."""
    feature = features + tl.program_id(0) // blocks * FEATURE
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    first, length = _bounds(feature, offsets, sample, batch_size)
    col = tl.arange(0, BLOCK_D)
    bag = sample * width + room + tl.load(feature + OUT)
    g = tl.load(grad + bag[:, None] * D + col[None, :], mask=(length > 0)[:, None] & (col < D)[None, :], other=0.0)
    g = as_float32(g)
    for j in range(tl.max(length, axis=0)):
        live = length > j
        dot = block_sum(_rows_of_ids(rows, ids, first + j, live, feature, D, BLOCK_D, HAS_WIDE) * g, BLOCK_D)
        if HAS_DIVISORS:
            dot = tl.div_rn(dot, mean_divisors(tl.load(feature + POOLING), length))
        tl.store(out + first + j, dot, mask=live)


def lookup(rows: Rows, bags: BagLayout, out: Tensor) -> None:
    """Pool the rows of each bag, see `hotbed.ops.reference.lookup`. ``out`` must be contiguous."""
    launches["triton.lookup"] += 1
    features, dim = len(bags.features), rows.dim
    if features == 0 or bags.batch_size == 0:
        return
    block_d = power_of_two(dim)
    kind = _kind(bags)
    block_b = rows_per_program(block_d, TILE if kind == _ONE.value else TILE // 2)
    blocks = ceil_div(bags.batch_size, block_b)
    with torch.cuda.device_of(out):
        _lookup_kernel[(blocks * features,)](
            out,
            row_pointers(rows),
            bags.ids,
            bags.features,
            bags.offsets,
            bags.ids if bags.weights is None else bags.weights,
            bags.batch_size,
            bags.width,
            bags.room,
            bags.ids_per_bag or 0,
            blocks,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_B=block_b,
            HAS_WIDE=len(rows.wide) > 0,
            WEIGHTED=bags.weights is not None,
            HAS_DIVISORS=bags.has_divisors,
            KIND=kind,
            **STRICT,
        )


def gather(rows: Rows, slots: Tensor, out: Tensor) -> None:
    """Copy the rows at slots to ``out``, see `hotbed.ops.reference.gather`. ``out`` must be contiguous."""
    launches["triton.gather"] += 1
    if not len(slots):
        return
    dim = rows.dim
    block_d = power_of_two(dim)
    block_b = rows_per_program(block_d, TILE)
    with torch.cuda.device_of(out):
        tables = slots if rows.narrow.dtype == torch.float32 else table_of(rows, slots)
        _gather_kernel[(ceil_div(len(slots), block_b),)](
            out,
            row_pointers(rows),
            slots,
            tables,
            len(slots),
            D=dim,
            BLOCK_D=block_d,
            BLOCK_B=block_b,
            HAS_WIDE=len(rows.wide) > 0,
            **STRICT,
        )


def weight_gradient(rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
    """Compute the gradient of weights, see `hotbed.ops.reference.weight_gradient`. ``out`` must be contiguous."""
    launches["triton.weight_gradient"] += 1
    features, dim = len(bags.features), rows.dim
    if features == 0 or bags.batch_size == 0:
        return
    block_d = max(power_of_two(dim), BLOCK)
    block_b = rows_per_program(block_d, TILE // 2)
    blocks = ceil_div(bags.batch_size, block_b)
    with torch.cuda.device_of(out):
        _weight_gradient_kernel[(blocks * features,)](
            out,
            row_pointers(rows),
            grad.contiguous(),
            bags.ids,
            bags.features,
            bags.offsets,
            bags.batch_size,
            bags.width,
            bags.room,
            blocks,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_B=block_b,
            HAS_WIDE=len(rows.wide) > 0,
            HAS_DIVISORS=bags.has_divisors,
            **STRICT,
        )
