# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Add values along the binary tree over virtual ranks in Triton.

Values of a slot are read once, from left to right. For each level of the tree, a program keeps a value in registers:
the left half of a node, until the right half is complete. This is a binary counter. Its carries are the additions. For
example, the values of four virtual ranks::

    value   levels 0 and 1 afterwards
    x₀      x₀, –
    x₁      –, x₀ + x₁
    x₂      x₂, x₀ + x₁
    x₃      –, –           the sum is (x₀ + x₁) + (x₂ + x₃)

An absent half is −0.0, which does not change bits when it is added. The highest bit in which the leaves of two adjacent
values differ is the level where they meet. It is where the carry of the first value ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_rows import as_float32, round_nearest
from hotbed.ops.triton_runtime import STRICT, TILE, ceil_div, power_of_two, programs, rows_per_program


@triton.jit
def _absent(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return −0.0. Triton's ``full`` would replace it by 0.0."""
    return tl.full([ROWS, COLUMNS], -(2**31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def no_halves(LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left halves before the first value, ``[ROWS, COLUMNS]`` for each level."""
    halves = ()
    for _ in tl.static_range(LEVELS):
        halves = halves + (_absent(ROWS, COLUMNS),)  # noqa: RUF005
    return halves


@triton.jit
def add_value(halves, value, meet, LEVELS: tl.constexpr, DTYPE: tl.constexpr):
    """Add the next value ``[R, C]`` float32. Return the left halves, and the value of its largest complete node.

    ``meet`` has the bits in which the value's leaf and the next value's leaf differ, and is at least ``2^LEVELS``
    after the last value. The returned value is then the sum. Sums are rounded to DTYPE.
    """
    after = ()
    for level in tl.static_range(LEVELS):
        is_complete = meet >= 2 << level
        is_left = (meet >= 1 << level) & (meet < 2 << level)
        half = halves[level]
        total = as_float32(round_nearest(half + value, DTYPE))
        kept = tl.where(is_left, value, tl.where(is_complete, _absent(half.shape[0], half.shape[1]), half))
        after = after + (kept,)  # noqa: RUF005
        value = tl.where(is_complete, total, value)
    return after, value


@triton.jit
def _meet(key, following, exists, LEVELS: tl.constexpr):
    """Return the bits in which keys differ from the following keys, at most ``2^LEVELS``, which is without one."""
    return tl.minimum(tl.where(exists, key ^ following, 1 << LEVELS), 1 << LEVELS).to(tl.int32)


@triton.jit
def _add_along_tree_kernel(
    values,  # [n, D]
    keys,  # [N]
    places,  # [N]
    count,  # one entry
    LEVELS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
):
    """Add the values of each slot that has several.

    A program takes R entries at a time. It adds the values of the slots that begin in these entries, in parallel.
    """
    col = tl.arange(0, BLOCK_D)[None, :]
    total = tl.load(count)
    for tile in range(tl.program_id(0).to(tl.int64) * R, total, tl.num_programs(0).to(tl.int64) * R):
        at = tile + tl.arange(0, R)
        key = tl.load(keys + at, mask=at < total, other=0)
        before = tl.load(keys + at - 1, mask=(at > 0) & (at < total), other=-1)
        following = tl.load(keys + at + 1, mask=at + 1 < total, other=0)
        meet = _meet(key, following, at + 1 < total, LEVELS)
        live = (at < total) & ((key >> LEVELS) != (before >> LEVELS)) & (meet < 1 << LEVELS)
        place = tl.load(places + at, mask=live, other=0)
        to = values + place[:, None] * D + col
        halves = no_halves(LEVELS, R, BLOCK_D)
        while tl.max(live.to(tl.int32), axis=0) > 0:
            value = tl.load(values + place[:, None] * D + col, mask=live[:, None] & (col < D), other=0.0)
            is_last = live & (meet >= 1 << LEVELS)
            live = live & (meet < 1 << LEVELS)
            at += 1
            key = following
            following = tl.load(keys + at + 1, mask=live & (at + 1 < total), other=0)
            place = tl.load(places + at, mask=live, other=0)
            halves, value = add_value(halves, value, meet[:, None], LEVELS, tl.float32)
            tl.store(to, value, mask=is_last[:, None] & (col < D))
            meet = _meet(key, following, at + 1 < total, LEVELS)


def add_along_tree(keys: Tensor, places: Tensor, count: Tensor, leaves: int, values: Tensor) -> None:
    """Add the values of each slot along the tree, in place, see `hotbed.ops.reference.add_along_tree`."""
    launches["triton.add_along_tree"] += 1
    levels, dim = leaves.bit_length() - 1, values.shape[1]
    if levels and len(keys):
        block_d = power_of_two(dim)
        # Registers have a value of each level. Rows that are not multiples of 16 bytes need more for addresses.
        tile_rows = rows_per_program(block_d, TILE // power_of_two(levels + 1) // (1 if dim % 4 == 0 else 4))
        with torch.cuda.device_of(values):
            _add_along_tree_kernel[(min(ceil_div(len(keys), tile_rows), programs(values.device)),)](
                values, keys, places, count, LEVELS=levels, D=dim, BLOCK_D=block_d, R=tile_rows, **STRICT
            )
