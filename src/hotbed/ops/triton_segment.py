# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""List occurrences and group them by slot, in Triton; the host never learns a size that only the device knows.

`group` sorts, marks where groups and runs start, and numbers both by a cumulative sum; buffers have room for the worst
case (N groups, N runs), and how much of them is valid stays on the device. So the whole step can be captured in a CUDA
graph, and integer arithmetic alone decides the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import RUN, BagLayout, Groups, Occurrences, RunOrder
from hotbed.ops.triton_lookup import divisors
from hotbed.ops.triton_runtime import (
    BASE,
    FEATURE,
    FIXED,
    LONG,
    OUT,
    POOLING,
    RAGGED_ROW,
    START,
    STRICT,
    ceil_div,
    power_of_two,
)

_BLOCK = 1024
"""Positions per program: eight per thread of four warps."""
_NONE = tl.constexpr(127)
"""Above all kinds of runs."""
_INT32_LIMIT = 1 << 31


@triton.jit(do_not_specialize=["batch_size", "width", "room", "steps", "blocks"])
def _occurrences_kernel(
    slots,  # [N]
    owners,  # [N]
    scale,  # [N]; written where WEIGHTED or HAS_DIVISORS
    ids,
    features,  # [F, 7], see BagLayout
    offsets,  # [ragged features, B + 1]
    weights,  # parallel to ids; read where WEIGHTED
    batch_size,
    width,
    room,
    steps,  # halvings that shrink B + 1 candidates to one
    blocks,  # programs per feature
    BLOCK_F: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
):
    """Slot ``ids[i] + base``, owner ``b · width + position``, scale ``weights[i] / count`` of every id i of bag (b, f).

    The programs of one feature take its ids in turn, so a feature with long bags keeps as many programs busy as one
    with single ids; which bag an id belongs to is a division where the feature is fixed, a binary search where it is
    ragged. One ragged feature, three samples, mean pooling, slots from 10 on::

        ids [5, 6, 5], offsets [0, 2, 2, 3]   →   slots [15, 16, 15], owners [0, 0, 2], scale [0.5, 0.5, 1]
    """
    f = tl.program_id(0) // blocks
    others = tl.arange(0, BLOCK_F)
    before = others < f
    fixed_before = tl.load(features + others * FEATURE + FIXED, mask=before, other=0)
    row_before = tl.load(features + others * FEATURE + RAGGED_ROW, mask=before, other=0)
    ragged_before = before & (fixed_before < 0)
    total_before = tl.load(offsets + row_before * (batch_size + 1) + batch_size, mask=ragged_before, other=0)
    out_start = tl.sum(tl.where(ragged_before, total_before, fixed_before * batch_size), axis=0)

    feature = features + f * FEATURE
    start = tl.load(feature + START)
    fixed = tl.load(feature + FIXED)
    row = offsets + tl.load(feature + RAGGED_ROW) * (batch_size + 1)
    base = tl.load(feature + BASE)
    position = room + tl.load(feature + OUT)
    total = fixed * batch_size
    halvings = 0
    if fixed < 0:
        total = tl.load(row + batch_size)
        halvings = steps
    for block in range((tl.program_id(0) % blocks).to(tl.int64) * BLOCK, total, blocks.to(tl.int64) * BLOCK):
        i = block + tl.arange(0, BLOCK)
        live = i < total
        ragged = i * 0 + fixed < 0
        # Ragged bag b holds ids offsets[b] ≤ i < offsets[b + 1]: b is the last that starts at or before i.
        low = tl.zeros([BLOCK], tl.int64)
        high = low + batch_size
        for _ in range(halvings):
            middle = (low + high + 1) // 2
            right = tl.load(row + middle, mask=live, other=0) <= i
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle - 1)
        begin = tl.load(row + low, mask=live & ragged, other=0)
        end = tl.load(row + low + 1, mask=live & ragged, other=0)
        sample = tl.where(ragged, low, i // tl.maximum(fixed, 1))
        length = tl.where(ragged, end - begin, fixed)
        to = out_start + i
        tl.store(slots + to, tl.load(ids + start + i, mask=live, other=0).to(tl.int64) + base, mask=live)
        tl.store(owners + to, sample * width + position, mask=live)
        if WEIGHTED or HAS_DIVISORS:
            factor = tl.full([BLOCK], 1.0, tl.float32)
            if WEIGHTED:
                factor = tl.load(weights + start + i, mask=live, other=0.0)
            if HAS_DIVISORS:
                factor = tl.div_rn(factor, divisors(tl.load(feature + POOLING), length))
            tl.store(scale + to, factor, mask=live)


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id, see `hotbed.ops.reference.occurrences`."""
    launches["triton.occurrences"] += 1
    features = len(bags.features)
    scaled = bags.weights is not None or bags.has_divisors
    slots = torch.empty(bags.total, dtype=torch.int64, device=bags.ids.device)
    owners = torch.empty_like(slots)
    scale = torch.empty(bags.total, dtype=torch.float32, device=slots.device) if scaled else None
    if bags.total:
        with torch.cuda.device_of(slots):
            blocks = ceil_div(bags.batch_size, _BLOCK)
            _occurrences_kernel[(blocks * features,)](
                slots,
                owners,
                slots if scale is None else scale,
                bags.ids,
                bags.features,
                bags.offsets,
                bags.ids if bags.weights is None else bags.weights,
                bags.batch_size,
                bags.width,
                bags.room,
                (bags.batch_size + 1).bit_length(),
                blocks,
                BLOCK_F=power_of_two(features),
                BLOCK=_BLOCK,
                WEIGHTED=bags.weights is not None,
                HAS_DIVISORS=bags.has_divisors,
                **STRICT,
            )
    return Occurrences(slots, owners, scale)


# -- groups --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["total"])
def _mark_groups_kernel(first, ordered, total, BLOCK: tl.constexpr):
    """``first[i] = 1`` where ``ordered[i]`` differs from its predecessor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    slot = tl.load(ordered + i, mask=live)
    before = tl.load(ordered + i - 1, mask=live & (i > 0), other=-1)
    tl.store(first + i, (slot != before).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["total"])
def _place_groups_kernel(rows, starts, ordered, first, number, total, BLOCK: tl.constexpr):
    """``rows[g] = ordered[i]``, ``starts[g] = i`` where group g = number[i] − 1 starts at i."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    starts_here = tl.load(first + i, mask=i < total, other=0) != 0
    g = tl.load(number + i, mask=starts_here, other=1) - 1
    tl.store(rows + g, tl.load(ordered + i, mask=starts_here), mask=starts_here)
    tl.store(starts + g, i, mask=starts_here)


@triton.jit(do_not_specialize=["total"])
def _mark_runs_kernel(run_first, kinds, starts, number, total, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """``run_first[i] = 1`` at every RUN-th occurrence of a group; ``kinds[i]`` is there as in `RunOrder`, else `_NONE`.

    Slot 3 once, slot 7 forty times::

        kinds [0, 33, _NONE × 31, 8, _NONE × 7]
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    g = tl.load(number + i, mask=live, other=1)
    start = tl.load(starts + g - 1, mask=live, other=0)
    first = (i - start) % RUN == 0
    groups = tl.load(number + total - 1)
    end = tl.load(starts + g, mask=live & first & (g < groups), other=total)
    left = end - i
    kind = tl.where(i == start, tl.where(left == 1, 0, tl.where(left > RUN, LONG, left)), tl.minimum(left, RUN))
    tl.store(run_first + i, first.to(tl.int32), mask=live)
    tl.store(kinds + i, tl.where(first, kind, _NONE).to(tl.int8), mask=live)


@triton.jit(do_not_specialize=["total"])
def _place_runs_kernel(
    run_starts, group_runs, counts, first, number, run_first, run_number, total, BLOCK: tl.constexpr
):
    """``run_starts[r] = i`` where run r starts, ``group_runs[g]`` = its first run, both closed by one end entry."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    g = tl.load(number + i, mask=live, other=1) - 1
    r = tl.load(run_number + i, mask=live, other=1) - 1
    tl.store(run_starts + r, i, mask=live & (tl.load(run_first + i, mask=live, other=0) != 0))
    tl.store(group_runs + g, r, mask=live & (tl.load(first + i, mask=live, other=0) != 0))
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
        return Groups(room(0), room(0), slots.new_zeros(1), slots.new_zeros(1), slots.new_zeros(2))
    with torch.cuda.device_of(slots):
        grid = (ceil_div(total, _BLOCK),)
        # Half as many bits are half as many passes of the sort.
        narrow = occurrences.limit is not None and occurrences.limit <= _INT32_LIMIT
        ordered, order = torch.sort(slots.to(torch.int32) if narrow else slots, stable=True)
        first, run_first, kinds = room(total, torch.int32), room(total, torch.int32), room(total, torch.int8)
        rows, starts = room(total), room(total)
        run_starts, group_runs, counts = room(total + 1), room(total + 1), room(2)
        _mark_groups_kernel[grid](first, ordered, total, BLOCK=_BLOCK, **STRICT)
        number = first.cumsum(0, dtype=torch.int32)
        _place_groups_kernel[grid](rows, starts, ordered, first, number, total, BLOCK=_BLOCK, **STRICT)
        _mark_runs_kernel[grid](run_first, kinds, starts, number, total, RUN=RUN, BLOCK=_BLOCK, **STRICT)
        run_number = run_first.cumsum(0, dtype=torch.int32)
        _place_runs_kernel[grid](
            run_starts, group_runs, counts, first, number, run_first, run_number, total, BLOCK=_BLOCK, **STRICT
        )
        kinds, by_kind = torch.sort(kinds, stable=True)
    return Groups(order, rows, run_starts, group_runs, counts, RunOrder(by_kind, kinds, number))


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
