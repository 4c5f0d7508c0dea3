# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""List occurrences in Triton: which slot every id of a batch reads, and which bag it belongs to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotbed.ops.backend import launches
from hotbed.ops.layout import BagLayout, Occurrences
from hotbed.ops.triton_lookup import mean_divisors
from hotbed.ops.triton_runtime import (
    BASE,
    FEATURE,
    FIXED,
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
    """Slot ``ids[i] + base``, owner ``b · width + position``, scale ``weights[i] / count`` of every id i of bag (b, f).

    The programs of one feature take its ids in turn, so a feature with long bags keeps as many programs busy as one
    with single ids; which bag an id belongs to is a division where the feature is fixed, a binary search where it is
    ragged. One ragged feature, three samples, mean pooling, slots from 10 on::

        ids [5, 6, 5], offsets [0, 2, 2, 3]   →   slots [15, 16, 15], owners [0, 0, 2], scale [0.5, 0.5, 1]

    What there is room for behind the ids of the last feature is padding: slot ``nowhere``, owner 0.
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

    Slots are int32 where they fit, as `group` sorts them.
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
    """Whether slots up to a limit can be int32: half as many bits are half as many passes of a sort."""
    return limit is not None and limit < _INT32_LIMIT
