# pyright: basic, reportCallIssue=false
"""Occurrences and groups on the CPU.

Slots are sorted by a stable radix sort of 11 bits a pass: the number of passes follows from the largest slot, so a sort
of 106k ids over 26M slots reads and writes them three times. (`torch.sort` compares 64-bit keys and took three times as
long, see docs/log.md.)
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.errors import BatchError
from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import peek, poke
from hotbed.ops.cpu_lookup import NO_WEIGHTS, bag_bounds
from hotbed.ops.cpu_runtime import kernel, launch
from hotbed.ops.layout import BASE, FIXED, MEAN, OUT, RAGGED_ROW, RUN, START, BagLayout, Groups, Occurrences

RADIX_BITS = 11


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id; see the reference."""
    launches["cpu.occurrences"] += 1
    slots = torch.empty(bags.total, dtype=torch.int64, device="cpu")
    owners = torch.empty(bags.total, dtype=torch.int64, device="cpu")
    scaled = bags.weights is not None or bags.has_mean
    scale = torch.empty(bags.total if scaled else 0, dtype=torch.float32, device="cpu")
    per_id = NO_WEIGHTS if bags.weights is None else bags.weights.numpy()
    launch(
        _occurrences,
        bags.ids.numpy(),
        bags.features.numpy(),
        bags.offsets.numpy(),
        per_id,
        bags.batch_size,
        bags.width,
        bags.room,
        slots.numpy(),
        owners.numpy(),
        scale.numpy(),
    )
    return Occurrences(slots, owners, scale if scaled else None)


@kernel(parallel=True)
def _occurrences(ids, features, offsets, per_id, samples, width, room, slots, owners, scale):
    count = features.shape[0]
    firsts = np.zeros(count + 1, np.int64)
    for f in range(count):
        fixed = features[f, FIXED]
        total = samples * fixed if fixed >= 0 else offsets[features[f, RAGGED_ROW], samples]
        firsts[f + 1] = firsts[f] + total
    for f in prange(count):
        shift = firsts[f] - features[f, START]
        for b in range(samples):
            start, stop = bag_bounds(features, offsets, f, b)
            for i in range(start, stop):
                slots[i + shift] = np.int64(ids[i]) + features[f, BASE]
                owners[i + shift] = b * width + room + features[f, OUT]
                if scale.shape[0]:
                    factor = per_id[i] if per_id.shape[0] else np.float32(1)
                    scale[i + shift] = factor / np.float32(stop - start) if features[f, MEAN] else factor


def group(slots: Tensor) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs; see the reference."""
    launches["cpu.group"] += 1
    total = len(slots)
    order = torch.empty(total, dtype=torch.int64, device="cpu")
    rows = torch.empty(total, dtype=torch.int64, device="cpu")
    run_starts = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    group_runs = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    counts = torch.empty(2, dtype=torch.int64, device="cpu")
    slot_bits = int(slots.max()).bit_length() if total else 0
    place_bits = total.bit_length()
    if slot_bits + place_bits > 63:
        raise BatchError(
            f"{total:,} ids, of which the largest names slot {int(slots.max()):,}: a sort key has 63 bits, and these "
            f"take {slot_bits} + {place_bits}; use smaller batches"
        )
    ordered = launch(_sort, slots.numpy(), order.numpy(), slot_bits, place_bits, torch.get_num_threads())
    _cut(ordered, rows.numpy(), run_starts.numpy(), group_runs.numpy(), counts.numpy())
    return Groups(order, rows, run_starts, group_runs, counts)


@kernel(parallel=True)
def _sort(slots, order, slot_bits, place_bits, chunks):
    """Stable order of the slots into ``order``, by ``chunks`` threads; returns the slots in this order.

    What is moved is ``slot · 2^place_bits + place``, so a pass moves one number per id.
    """
    total = slots.shape[0]
    size = (total + chunks - 1) // chunks
    passes = (slot_bits + RADIX_BITS - 1) // RADIX_BITS
    buckets = 1 << RADIX_BITS
    mask = buckets - 1
    keys, spare = np.empty(total, np.int64), np.empty(total, np.int64)
    for c in prange(chunks):
        for p in range(c * size, min((c + 1) * size, total)):
            poke(keys, p, (peek(slots, p) << place_bits) | p)
    for i in range(passes):
        shift = place_bits + i * RADIX_BITS
        starts = np.zeros((chunks, buckets), np.int64)
        for c in prange(chunks):
            own = starts[c]
            for p in range(c * size, min((c + 1) * size, total)):
                bucket = (peek(keys, p) >> shift) & mask
                poke(own, bucket, peek(own, bucket) + 1)
        before = 0
        for bucket in range(buckets):
            for c in range(chunks):
                count = starts[c, bucket]
                starts[c, bucket] = before
                before += count
        for c in prange(chunks):
            own = starts[c]
            for p in range(c * size, min((c + 1) * size, total)):
                key = peek(keys, p)
                bucket = (key >> shift) & mask
                to = peek(own, bucket)
                poke(own, bucket, to + 1)
                poke(spare, to, key)
        keys, spare = spare, keys
    for c in prange(chunks):
        for p in range(c * size, min((c + 1) * size, total)):
            key = peek(keys, p)
            poke(order, p, key & ((1 << place_bits) - 1))
            poke(spare, p, key >> place_bits)
    return spare


@kernel()
def _cut(ordered, rows, run_starts, group_runs, counts):
    groups = 0
    runs = 0
    left = 0  # places left in the current run
    for p in range(ordered.shape[0]):
        new_group = p == 0 or ordered[p] != ordered[p - 1]
        if new_group:
            rows[groups] = ordered[p]
            group_runs[groups] = runs
            groups += 1
        if new_group or left == 0:
            run_starts[runs] = p
            runs += 1
            left = RUN
        left -= 1
    run_starts[runs] = ordered.shape[0]
    group_runs[groups] = runs
    counts[0] = groups
    counts[1] = runs
