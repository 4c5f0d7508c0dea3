# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Group occurrences by slot, in Triton; the host never learns a size that only the device knows.

`group` sorts; then blocks count the groups that start in them, and each numbers its own by what those before it have
counted; runs likewise, and by kind, so that they are listed by kind without a second sort. Buffers have room for the
worst case (N groups, N runs), and how much of them is valid stays on the device. So the whole step can be captured in a
CUDA graph, and integer arithmetic alone decides the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import LONG, RUN, Groups, Occurrences, RunOrder
from hotbed.ops.triton_occurrences import fits_int32
from hotbed.ops.triton_runtime import STRICT, ceil_div, power_of_two

_BLOCK = 1024
"""Positions per program: eight per thread of four warps."""
_NONE = tl.constexpr(127)
"""Above all kinds of runs."""
KINDS = tl.constexpr(LONG + 1)
"""Number of kinds of runs."""
_PACK = tl.constexpr(5)
"""Kinds that are counted at once, in parts of one integer of 64 bits."""
_PACKS = tl.constexpr(-(-(LONG + 1) // 5))
"""How many such integers count all kinds."""
_BITS = tl.constexpr(11)
"""Bits of each part: a block has up to `_BLOCK` runs of a kind."""
_ALL_BITS = tl.constexpr((1 << 11) - 1)


@triton.jit
def _in_pack(kind, pack):
    """Give 1 in the part of each kind of this pack, 0 for all other kinds."""
    return tl.where(kind // _PACK == pack, tl.full(kind.shape, 1, tl.int64) << ((kind % _PACK) * _BITS), 0)


@triton.jit
def _part(counted, kind):
    """Read the part of a kind."""
    return (counted >> ((kind % _PACK) * _BITS)).to(tl.int32) & _ALL_BITS


@triton.jit
def _is_first(ordered, i, live):
    """Whether each of these positions has another slot than the one before it."""
    slot = tl.load(ordered + i, mask=live, other=0)
    before = tl.load(ordered + i - 1, mask=live & (i > 0), other=0)
    return live & ((i == 0) | (slot != before))


@triton.jit
def _before(counts, BLOCK: tl.constexpr):
    """``Σ counts[b]`` over the programs before this one."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.program_id(0), BLOCK):
        b = start + tl.arange(0, BLOCK)
        found += tl.load(counts + b, mask=b < tl.program_id(0), other=0)
    return tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["total"])
def _count_groups_kernel(counts, lasts, ordered, total, BLOCK: tl.constexpr):
    """``counts[b]`` groups start in block b, the last of them at ``lasts[b]``; −1 where none does."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = _is_first(ordered, i, i < total)
    tl.store(counts + tl.program_id(0), tl.sum(first.to(tl.int32), axis=0))
    tl.store(lasts + tl.program_id(0), tl.max(tl.where(first, i, -1), axis=0))


@triton.jit
def _start(ordered, lasts, i, live, HALVINGS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the group of each position starts: in this block, found by halving; else the last start before it."""
    begin = tl.program_id(0) * BLOCK
    slot = tl.load(ordered + i, mask=live, other=0)
    low, high = i * 0 + begin, i
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        same = tl.load(ordered + middle, mask=live, other=0) == slot
        low, high = tl.where(same, low, middle + 1), tl.where(same, middle, high)
    # Of a block that begins inside a group, these positions are of it.
    behind = i * 0 + begin
    before = tl.load(ordered + behind - 1, mask=live & (behind > 0), other=0)
    inside = (low == begin) & (behind > 0) & (before == slot)
    last = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, tl.program_id(0), BLOCK):
        b = start + tl.arange(0, BLOCK)
        last = tl.maximum(last, tl.load(lasts + b, mask=b < tl.program_id(0), other=-1))
    return tl.where(inside, tl.max(last, axis=0), low)


@triton.jit
def _left(ordered, i, live, total, MOST: tl.constexpr, HALVINGS: tl.constexpr):
    """How many positions from each one on have its slot: up to MOST."""
    slot = tl.load(ordered + i, mask=live, other=0)
    low, high = i * 0 + 1, i * 0 + MOST
    for _ in range(HALVINGS):
        middle = (low + high + 1) // 2
        at = i + middle - 1
        same = (at < total) & (tl.load(ordered + at, mask=live & (at < total), other=0) == slot)
        low, high = tl.where(same, middle, low), tl.where(same, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["total", "blocks"])
def _place_groups_kernel(
    rows,  # [N]
    number,  # [N]
    kinds,  # [N]
    run_counts,  # [KINDS, blocks]
    ordered,  # [N]
    counts,  # [blocks]
    lasts,  # [blocks]
    total,  # N
    blocks,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,  # halvings that shrink BLOCK positions to one
    IN_RUN: tl.constexpr,  # halvings that shrink RUN + 1 positions to one
):
    """``rows[g] = ordered[i]`` where group g starts at i, which ``number`` counts from 1; kinds of runs, and how many.

    Each RUN-th occurrence of a group starts a run. ``kinds[i]`` is there as in `RunOrder`, else `_NONE`; ``run_counts``
    has the runs that start in each block, by kind. Slot 3 once, slot 7 forty times::

        kinds [0, 33, _NONE × 31, 8, _NONE × 7]
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    starts_here = _is_first(ordered, i, live)
    g = _before(counts, BLOCK) + tl.cumsum(starts_here.to(tl.int32), axis=0)
    tl.store(number + i, g, mask=live)
    tl.store(rows + g - 1, tl.load(ordered + i, mask=live, other=0), mask=starts_here)

    run_starts = live & ((i - _start(ordered, lasts, i, live, IN_BLOCK, BLOCK)) % RUN == 0)
    left = _left(ordered, i, run_starts, total, RUN + 1, IN_RUN)
    alone = tl.where(left == 1, 0, left)  # LONG where there are more than RUN
    kind = tl.where(run_starts, tl.where(starts_here, alone, tl.minimum(left, RUN)), _NONE)
    tl.store(kinds + i, kind.to(tl.int8), mask=live)
    part = tl.arange(0, 8)
    for pack in tl.static_range(_PACKS):  # pyright: ignore[reportGeneralTypeIssues]
        k = pack * _PACK + part
        found = _part(tl.sum(_in_pack(kind, pack), axis=0), part)
        tl.store(run_counts + k * blocks + tl.program_id(0), found, mask=(part < _PACK) & (k < KINDS))


@triton.jit(do_not_specialize=["blocks"])
def _add_runs_kernel(run_counts, totals, blocks, BLOCK: tl.constexpr):
    """Replace the runs of a kind that start in each block by those that start before it; ``totals``: in all blocks."""
    row = run_counts + tl.program_id(0) * blocks
    before = blocks * 0
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        count = tl.load(row + b, mask=b < blocks, other=0)
        tl.store(row + b, before + tl.cumsum(count, axis=0) - count, mask=b < blocks)
        before += tl.sum(count, axis=0)
    tl.store(totals + tl.program_id(0), before)


@triton.jit(do_not_specialize=["total", "blocks"])
def _place_runs_kernel(
    run_starts,  # [N + 1]
    group_runs,  # [N + 1]
    counts,  # [2]
    by_kind,  # [N]
    kinds_in_order,  # [N]
    number,  # [N]
    kinds,  # [N]
    run_counts,  # [KINDS, blocks]: before each block
    totals,  # [KINDS]
    total,  # N
    blocks,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``run_starts[r] = i`` where run r starts, ``group_runs[g]`` = its first run, both closed by one end entry.

    The runs of each kind are listed behind those of all smaller kinds.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    kind = tl.load(kinds + i, mask=live, other=_NONE).to(tl.int32)
    k_all = tl.arange(0, BLOCK_K)
    before = tl.load(run_counts + k_all * blocks + tl.program_id(0), mask=k_all < KINDS, other=0)
    in_all = tl.load(totals + k_all, mask=k_all < KINDS, other=0)
    run_first = kind != _NONE
    at = tl.gather(tl.cumsum(in_all, axis=0) - in_all + before, tl.where(run_first, kind, 0), axis=0)
    for pack in tl.static_range(_PACKS):  # pyright: ignore[reportGeneralTypeIssues]
        up_to_here = _part(tl.cumsum(_in_pack(kind, pack), axis=0), kind)
        at += tl.where(kind // _PACK == pack, up_to_here - 1, 0)
    tl.store(by_kind + at, i, mask=run_first)
    tl.store(kinds_in_order + at, kind.to(tl.int8), mask=run_first)

    r = tl.sum(before, axis=0) + tl.cumsum(run_first.to(tl.int32), axis=0) - 1
    g = tl.load(number + i, mask=live, other=1) - 1
    tl.store(run_starts + r, i, mask=run_first)
    tl.store(group_runs + g, r, mask=_is_first(number, i, live))
    last = i == total - 1
    tl.store(run_starts + r + 1, i + 1, mask=last)
    tl.store(group_runs + g + 1, r + 1, mask=last)
    tl.store(counts + i * 0, g + 1, mask=last)
    tl.store(counts + i * 0 + 1, r + 1, mask=last)


def group(occurrences: Occurrences) -> Groups:
    """Group occurrences of equal slots and cut each group into runs, see `hotbed.ops.reference.group`.

    Entries of the buffers beyond the valid ones are left unwritten.
    """
    launches["triton.group"] += 1
    slots = occurrences.slots
    total = len(slots)

    def room(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=slots.device)

    if total == 0:
        return Groups(room(0), room(0), room(1).zero_(), room(1).zero_(), room(2).zero_())
    with torch.cuda.device_of(slots):
        blocks = ceil_div(total, _BLOCK)
        ordered, order = torch.sort(slots.to(torch.int32) if fits_int32(occurrences.limit) else slots, stable=True)
        first_counts, lasts = room(blocks, torch.int32), room(blocks, torch.int32)
        run_counts, totals = room(KINDS.value * blocks, torch.int32), room(KINDS.value, torch.int32)
        number, kinds, kinds_in_order = room(total, torch.int32), room(total, torch.int8), room(total, torch.int8)
        rows, by_kind, run_starts, group_runs = room(total), room(total), room(total + 1), room(total + 1)
        counts = room(2)
        options = {"BLOCK": _BLOCK, **STRICT}
        _count_groups_kernel[(blocks,)](first_counts, lasts, ordered, total, **options)
        _place_groups_kernel[(blocks,)](
            rows,
            number,
            kinds,
            run_counts,
            ordered,
            first_counts,
            lasts,
            total,
            blocks,
            RUN=RUN,
            IN_BLOCK=(_BLOCK - 1).bit_length(),
            IN_RUN=RUN.bit_length(),
            **options,
        )
        _add_runs_kernel[(KINDS.value,)](run_counts, totals, blocks, **options)
        _place_runs_kernel[(blocks,)](
            run_starts,
            group_runs,
            counts,
            by_kind,
            kinds_in_order,
            number,
            kinds,
            run_counts,
            totals,
            total,
            blocks,
            BLOCK_K=power_of_two(KINDS.value),
            **options,
        )
    return Groups(order, rows, run_starts, group_runs, counts, RunOrder(by_kind, kinds_in_order, number))


def runs_of(groups: Groups) -> RunOrder:
    """Return the order of runs, which `group` of this backend makes."""
    assert groups.runs is not None, "groups of another backend"
    return groups.runs


@triton.jit(do_not_specialize=["total"])
def _spread_kernel(out, order, number, values, total, BLOCK: tl.constexpr):
    """``out[order[p]] = values[number[p] − 1]``."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = p < total
    g = tl.load(number + p, mask=live, other=1) - 1
    tl.store(out + tl.load(order + p, mask=live, other=0), tl.load(values + g, mask=live, other=0), mask=live)


def spread(groups: Groups, values: Tensor) -> Tensor:
    """Give every occurrence the value of its group, see `hotbed.ops.reference.spread`."""
    launches["triton.spread"] += 1
    out = torch.empty_like(groups.order)
    total = len(out)
    if total:
        with torch.cuda.device_of(out):
            _spread_kernel[(ceil_div(total, _BLOCK),)](
                out, groups.order, runs_of(groups).numbers, values.contiguous(), total, BLOCK=_BLOCK, **STRICT
            )
    return out
