# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""List the ids of a batch, group them by slot and list the runs of each group, in Triton.

The host never learns a size that only the device knows. Buffers have room for the worst case (N groups and N runs), and
the number of valid entries stays on the device. Therefore the whole step can be captured in a CUDA graph. Integer
arithmetic alone decides the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops import layout
from hotbed.ops.backend import launches
from hotbed.ops.layout import RUN, BagLayout, Groups, Occurrences, Rows, RunOrder
from hotbed.ops.triton_lookup import mean_divisors
from hotbed.ops.triton_rows import locate, place_number, row_pointers
from hotbed.ops.triton_runtime import (
    BASE,
    FEATURE,
    FIRST_SLOT,
    FIXED,
    LONG,
    OUT,
    POOLING,
    RAGGED_ROW,
    START,
    STRICT,
    TABLE_ENTRY,
    ceil_div,
    power_of_two,
)

_BLOCK = 1024
"""Positions per program: eight per thread of four warps."""
_LIST_BLOCK = 512
"""Positions per program that lists runs: four per thread of four warps."""
# -- occurrences -----------------------------------------------------------------------------------------------------

_INT32_LIMIT = 1 << 31


@triton.jit(do_not_specialize=["batch_size", "width", "room", "steps", "blocks", "count", "nowhere"])
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
    count,  # N
    nowhere,  # slot of padding
    FEATURES: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
):
    """Write the slot, the bag and the factor of every id.

    For id i of bag (b, f), the slot is ``ids[i] + base``, the owner is ``b · width + position``, and the scale is
    ``weights[i] / divisor``. The programs of a feature process its ids in turn, so that features with long bags use the
    same number of programs as features with single ids. A division finds the bag of an id of a fixed feature, and a
    binary search finds it for a ragged feature. For example, one ragged feature with three samples, mean pooling and
    slots from 10 on::

        ids [5, 6, 5], offsets [0, 2, 2, 3]   →   slots [15, 16, 15], owners [0, 0, 2], scale [0.5, 0.5, 1]

    Entries after the ids of the last feature are padding with slot ``nowhere`` and owner 0.
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
        # Ragged bag b has ids offsets[b] ≤ i < offsets[b + 1]. Therefore b is the last bag that starts at or before i.
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
                factor = tl.div_rn(factor, mean_divisors(tl.load(feature + POOLING), length))
            tl.store(scale + to, factor, mask=live)
    if f == FEATURES - 1:
        behind = out_start + total + (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
        for block in range(behind, count, blocks.to(tl.int64) * BLOCK):
            to = block + tl.arange(0, BLOCK)
            tl.store(slots + to, tl.zeros([BLOCK], tl.int64) + nowhere, mask=to < count)
            tl.store(owners + to, tl.zeros([BLOCK], tl.int64), mask=to < count)
            if WEIGHTED or HAS_DIVISORS:
                tl.store(scale + to, tl.zeros([BLOCK], tl.float32), mask=to < count)


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id, see `hotbed.ops.reference.occurrences`.

    Slots are int32 if they fit, because `group` then sorts them faster.
    """
    launches["triton.occurrences"] += 1
    features = len(bags.features)
    scaled = bags.weights is not None or bags.has_divisors
    dtype = torch.int32 if fits_int32(bags.limit) else torch.int64
    slots = torch.empty(bags.total, dtype=dtype, device=bags.ids.device)
    owners = torch.empty(bags.total, dtype=torch.int64, device=bags.ids.device)
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
                bags.total,
                bags.limit or 0,
                FEATURES=features,
                BLOCK_F=power_of_two(features),
                BLOCK=_BLOCK,
                WEIGHTED=bags.weights is not None,
                HAS_DIVISORS=bags.has_divisors,
                **STRICT,
            )
    return Occurrences(slots, owners, scale, limit=bags.limit)


def fits_int32(limit: int | None) -> bool:
    """Return whether slots up to a limit fit into int32. A sort of int32 needs half the number of passes."""
    return limit is not None and limit < _INT32_LIMIT


# -- groups ----------------------------------------------------------------------------------------------------------

# `group` sorts the slots. Each block of positions then counts the groups that start in it. The counts of the blocks
# before it are the number of its first group. Runs are numbered in the same way, separately for each length. Therefore
# the list of runs is ordered by length without a second sort.

_NONE = tl.constexpr(127)
"""Value above all values of `RunOrder.kinds`."""
KINDS = tl.constexpr(layout.LONG + 1)
"""Number of values of `RunOrder.kinds`."""
_PACK = tl.constexpr(5)
"""Number of kinds that are counted at once, in separate bits of one 64-bit integer."""
_PACKS = tl.constexpr(-(-(layout.LONG + 1) // 5))
"""Number of such integers for all kinds."""
_BITS = tl.constexpr(11)
"""Bits per kind, because a block has up to `_BLOCK` runs of a kind."""
_ALL_BITS = tl.constexpr((1 << 11) - 1)


@triton.jit
def _in_pack(kind, pack):
    """Return 1 in the bits of each kind of this pack, and 0 for all other kinds."""
    return tl.where(kind // _PACK == pack, tl.full(kind.shape, 1, tl.int64) << ((kind % _PACK) * _BITS), 0)


@triton.jit
def _part(counted, kind):
    """Return the count of a kind."""
    return (counted >> ((kind % _PACK) * _BITS)).to(tl.int32) & _ALL_BITS


@triton.jit
def _is_first(ordered, i, live):
    """Return whether the slot of each position differs from the previous slot."""
    slot = tl.load(ordered + i, mask=live, other=0)
    before = tl.load(ordered + i - 1, mask=live & (i > 0), other=0)
    return live & ((i == 0) | (slot != before))


@triton.jit
def _before(counts, BLOCK: tl.constexpr):
    """Return ``Σ counts[b]`` over the programs before this one."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.program_id(0), BLOCK):
        b = start + tl.arange(0, BLOCK)
        found += tl.load(counts + b, mask=b < tl.program_id(0), other=0)
    return tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["total"])
def _count_groups_kernel(counts, lasts, ordered, total, BLOCK: tl.constexpr):
    """Write the number of groups that start in block b to ``counts[b]``, and the last start to ``lasts[b]``, or −1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = _is_first(ordered, i, i < total)
    tl.store(counts + tl.program_id(0), tl.sum(first.to(tl.int32), axis=0))
    tl.store(lasts + tl.program_id(0), tl.max(tl.where(first, i, -1), axis=0))


@triton.jit
def _start(ordered, lasts, i, live, HALVINGS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the start of the group of each position. Search in this block, else use the last start before it."""
    begin = tl.program_id(0) * BLOCK
    slot = tl.load(ordered + i, mask=live, other=0)
    low, high = i * 0 + begin, i
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        same = tl.load(ordered + middle, mask=live, other=0) == slot
        low, high = tl.where(same, low, middle + 1), tl.where(same, middle, high)
    # These positions belong to a group that started in an earlier block.
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
    """Return the number of positions with the same slot from each position on, up to MOST."""
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
    """Write the slot of each group, the group number of each position (from 1), and the kinds of runs.

    Group g that starts at i has ``rows[g] = ordered[i]``. Each RUN-th occurrence of a group starts a run. ``kinds[i]``
    is the kind of the run that starts at i as in `RunOrder`, or `_NONE`. ``run_counts`` has the number of runs that
    start in each block, by kind. For example, slot 3 occurs once and slot 7 forty times::

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
    alone = tl.where(left == 1, 0, left)  # LONG for more than RUN occurrences
    kind = tl.where(run_starts, tl.where(starts_here, alone, tl.minimum(left, RUN)), _NONE)
    tl.store(kinds + i, kind.to(tl.int8), mask=live)
    part = tl.arange(0, 8)
    for pack in tl.static_range(_PACKS):  # pyright: ignore[reportGeneralTypeIssues]
        k = pack * _PACK + part
        found = _part(tl.sum(_in_pack(kind, pack), axis=0), part)
        tl.store(run_counts + k * blocks + tl.program_id(0), found, mask=(part < _PACK) & (k < KINDS))


@triton.jit(do_not_specialize=["blocks"])
def _add_runs_kernel(run_counts, totals, blocks, BLOCK: tl.constexpr):
    """Replace the number of runs of a kind per block by the number in earlier blocks. Write the sum to ``totals``."""
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
    """Write the start of run r to ``run_starts[r]``, and the first run of group g to ``group_runs[g]``.

    Both end with one more entry. Runs are listed in order of their kinds.
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

    Invalid entries of the buffers are not written.
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
    """Return the order of runs, which only `group` of this backend creates."""
    assert groups.runs is not None, "groups of another backend"
    return groups.runs


@triton.jit(do_not_specialize=["total"])
def _spread_kernel(out, order, number, values, total, BLOCK: tl.constexpr):
    """Compute ``out[order[p]] = values[number[p] − 1]``."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = p < total
    g = tl.load(number + p, mask=live, other=1) - 1
    tl.store(out + tl.load(order + p, mask=live, other=0), tl.load(values + g, mask=live, other=0), mask=live)


def spread(groups: Groups, values: Tensor) -> Tensor:
    """Return the value of the group of every occurrence, see `hotbed.ops.reference.spread`."""
    launches["triton.spread"] += 1
    out = torch.empty_like(groups.order)
    total = len(out)
    if total:
        with torch.cuda.device_of(out):
            _spread_kernel[(ceil_div(total, _BLOCK),)](
                out, groups.order, runs_of(groups).numbers, values.contiguous(), total, BLOCK=_BLOCK, **STRICT
            )
    return out


# -- runs ------------------------------------------------------------------------------------------------------------

# The list of runs has everything that a kernel needs to sum a run: its slot, the slot's table and its first bag. It
# also has the bags of all occurrences, in the order in which kernels read them. Therefore only two reads depend on each
# other: the entry of the list, and the row, moments and hyperparameters to which it points.


class RunList(NamedTuple):
    """Buffers of a batch's runs for kernels: ``[N]`` by run as in `RunOrder`, or by position in ``order``."""

    slots: Any  # int64, by run: slot
    tables: Any  # int32, by run: table of the slot
    places: Any  # int64, by run: `place_number` of the slot; unused if all rows are float32
    partials: Any  # int32, by run: row of the scratch buffer, or −1 if it is its slot's only run
    first_bags: Any  # int32, by run: bag of the first occurrence
    starts: Any  # int64, by run: first position
    kinds: Any  # int8, by run: see `RunOrder`
    numbers: Any  # int32, by position: group, counted from 1
    bags: Any  # int32, by position: bag
    scale: Any  # float32, by position: factor; unused if occurrences have no factors
    bounds: Any  # [2] int32: number of runs of a single occurrence; first run that is the first of several
    group_runs: Any  # [N + 1] int64, as in `Groups`
    counts: Any  # [2] int64, as in `Groups`


@triton.jit
def _tables_of(entries, tables, slot, live, halvings):
    """Return the table of each slot: the last table that starts at or before the slot."""
    low = tl.zeros(slot.shape, tl.int32)
    high = low + tables - 1
    for _ in range(halvings):
        middle = (low + high + 1) // 2
        right = tl.load(entries + middle * TABLE_ENTRY + FIRST_SLOT, mask=live, other=0) <= slot
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["tables", "halvings", "total", "nowhere"])
def _list_kernel(
    runs,  # RunList; writes slots, tables, places, partials, first_bags, bags, scale and bounds
    rows,  # [≥ groups]: slot of each group
    stored,  # RowPointers; read where PLACED
    order,  # [N]
    bags,  # [N]
    scale,  # [N]; read where SCALED
    entries,  # [T, 7], see Rows.tables
    tables,  # T
    halvings,  # halvings that shrink T tables to one
    total,  # N
    nowhere,  # slot of padding, which is written as −1
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PLACED: tl.constexpr,
    HAS_WIDE: tl.constexpr,
):
    """Write the inputs of each run and of each position.

    For example, slot 3 of a table occurs once, and slot 7 forty times::

        kinds [0, 8, 33]   →   slots [3, 7, 7], partials [−1, 3, 0], bounds [1, 2]
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_order = i < total
    at = tl.load(order + i, mask=in_order, other=0)
    tl.store(runs.bags + i, tl.load(bags + at, mask=in_order, other=0).to(tl.int32), mask=in_order)
    if SCALED:
        tl.store(runs.scale + i, tl.load(scale + at, mask=in_order, other=0.0), mask=in_order)

    count = tl.load(runs.counts + 1)
    live = i < count
    kind = tl.load(runs.kinds + i, mask=live, other=0).to(tl.int32)
    next_kind = tl.load(runs.kinds + i + 1, mask=i + 1 < count, other=-1).to(tl.int32)
    start = tl.load(runs.starts + i, mask=live, other=0)
    end = start + tl.minimum(tl.maximum(kind, 1), RUN)
    number = tl.load(runs.numbers + start, mask=live, other=1)
    behind = tl.load(runs.numbers + start - 1, mask=live & (start > 0), other=0)
    ahead = tl.load(runs.numbers + end, mask=live & (end < total), other=0)
    partial = tl.where(
        (behind != number) & (ahead != number), -1, 2 * (start // RUN) + (ahead != number).to(tl.int64)
    ).to(tl.int32)
    slot = tl.load(rows + number - 1, mask=live, other=0)
    first = tl.load(order + start, mask=live, other=0)
    table = _tables_of(entries, tables, slot, live, halvings)
    slot = tl.where(slot == nowhere, -1, slot)
    tl.store(runs.slots + i, slot, mask=live)
    tl.store(runs.tables + i, table, mask=live)
    if PLACED:
        tl.store(runs.places + i, place_number(locate(stored, slot, table, HAS_WIDE), HAS_WIDE), mask=live)
    tl.store(runs.partials + i, partial, mask=live)
    tl.store(runs.first_bags + i, tl.load(bags + first, mask=live, other=0).to(tl.int32), mask=live)

    # Kinds are ascending. So each bound is between two adjacent runs, before the first run, or after the last run.
    last = i == count - 1
    tl.store(runs.bounds + i * 0, i * 0, mask=(i == 0) & (kind != 0))
    tl.store(runs.bounds + i * 0, i + 1, mask=live & (kind == 0) & (last | (next_kind != 0)))
    tl.store(runs.bounds + i * 0 + 1, i * 0, mask=(i == 0) & (kind == LONG))
    tl.store(runs.bounds + i * 0 + 1, i + 1, mask=live & (kind != LONG) & (last | (next_kind == LONG)))


def list_runs(occurrences: Occurrences, groups: Groups, group_slots: Tensor, rows: Rows | None) -> RunList:
    """List the runs of a batch with at least one occurrence.

    ``group_slots [≥ groups]`` has the slot of each group. The first slot without a row is padding. Without ``rows``,
    slots belong to no table, and no slot is padding.
    """
    runs, total, device = runs_of(groups), len(groups.order), groups.order.device
    scaled = occurrences.scale is not None
    slots = torch.empty(total, dtype=torch.int64, device=device)
    # Each buffer begins at a multiple of 16 bytes, because kernels are compiled for this alignment.
    buffers = torch.empty(4, ceil_div(total, 4) * 4, dtype=torch.int32, device=device)
    of_table, partials, first_bags, bags = buffers.unbind()
    scale = torch.empty(total, dtype=torch.float32, device=device) if scaled else bags
    bounds = torch.empty(2, dtype=torch.int32, device=device)
    placed = rows is not None and rows.narrow.dtype != torch.float32
    found = RunList(
        slots,
        of_table,
        torch.empty_like(slots) if placed else slots,
        partials,
        first_bags,
        runs.starts,
        runs.kinds,
        runs.numbers,
        bags,
        scale,
        bounds,
        groups.group_runs,
        groups.counts,
    )
    tables = 1 if rows is None else len(rows.tables)
    pointers = row_pointers(rows) if rows is not None and placed else groups.counts
    _list_kernel[(ceil_div(total, _LIST_BLOCK),)](
        found,
        group_slots,
        pointers,
        groups.order,
        occurrences.bags,
        occurrences.scale if scaled else bags,
        groups.counts if rows is None else rows.tables,
        tables,
        (tables - 1).bit_length(),
        total,
        -1 if rows is None else len(rows.wide) + len(rows.narrow),
        RUN=RUN,
        BLOCK=_LIST_BLOCK,
        SCALED=scaled,
        PLACED=placed,
        HAS_WIDE=rows is not None and placed and len(rows.wide) > 0,
        **STRICT,
    )
    return found
