# pyright: basic, reportCallIssue=false
"""List occurrences and group them by slot, on the CPU.

Slots are sorted by a stable radix sort of at most 11 bits a pass. Where the occurrences lie table by table, each thread
sorts whole tables in its own cache; else all threads sort all of them together. (`torch.sort` compares 64-bit keys and
took three times as long, see docs/log.md.)
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import BatchError
from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import peek, poke
from hotbed.ops.cpu_lookup import NO_WEIGHTS, bag_bounds, divisor
from hotbed.ops.cpu_runtime import kernel, launch
from hotbed.ops.layout import BASE, FIXED, OUT, POOLING, RAGGED_ROW, RUN, START, BagLayout, Groups, Occurrences

Array = NDArray[np.int64]
RUNS_PER_TASK = 512
"""Parallel work over groups is dealt out by runs: a slot of the whole batch does not hold up one thread."""

RADIX_BITS = 11
KEY_BITS = 63


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id; see the reference."""
    launches["cpu.occurrences"] += 1
    slots = torch.empty(bags.total, dtype=torch.int64, device="cpu")
    owners = torch.empty(bags.total, dtype=torch.int64, device="cpu")
    scaled = bags.weights is not None or bags.has_divisors
    scale = torch.empty(bags.total if scaled else 0, dtype=torch.float32, device="cpu")
    per_id = NO_WEIGHTS if bags.weights is None else bags.weights.numpy()
    firsts = launch(
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
    total = int(firsts[-1])  # there may be room for more
    segments = _segments(bags.features[:, BASE].numpy(), firsts)
    return Occurrences(slots[:total], owners[:total], scale[:total] if scaled else None, segments)


def _segments(bases: Array, firsts: Array) -> tuple[int, ...] | None:
    """`Occurrences.segments` from the slot of each feature's table and where its occurrences start."""
    steps = np.diff(bases)
    if (steps < 0).any():
        return None
    return (*firsts[:-1][np.concatenate([[True], steps > 0])].tolist(), int(firsts[-1]))


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
        base, place, pooling = features[f, BASE], room + features[f, OUT], features[f, POOLING]
        for b in range(samples):
            start, stop = bag_bounds(features, offsets, f, b)
            for i in range(start, stop):
                poke(slots, i + shift, np.int64(peek(ids, i)) + base)
                poke(owners, i + shift, b * width + place)
                if scale.shape[0]:
                    factor = per_id[i] if per_id.shape[0] else np.float32(1)
                    scale[i + shift] = factor / divisor(pooling, stop - start) if pooling else factor
    return firsts


def group(occurrences: Occurrences) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs; see the reference."""
    launches["cpu.group"] += 1
    slots, segments = occurrences.slots, occurrences.segments
    total, threads = len(slots), torch.get_num_threads()
    order = torch.empty(total, dtype=torch.int64, device="cpu")
    rows = torch.empty(total, dtype=torch.int64, device="cpu")
    run_starts = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    group_runs = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    counts = torch.empty(2, dtype=torch.int64, device="cpu")
    slot_bits, place_bits = int(slots.max()).bit_length() if total else 0, total.bit_length()
    if slot_bits + place_bits > KEY_BITS:
        raise BatchError(
            f"{total:,} ids, of which the largest names slot {int(slots.max()):,}: a sort key has {KEY_BITS} bits, and "
            f"these take {slot_bits} + {place_bits}; use smaller batches"
        )
    if segments is not None and _busiest(segments, threads) * threads <= 2 * total:
        cuts = np.array(segments)
        ordered = launch(_sort_segments, slots.numpy(), cuts, order.numpy())
    else:
        ordered = launch(_sort, slots.numpy(), order.numpy(), slot_bits, place_bits, threads)
        cuts = np.linspace(0, total, threads + 1).astype(np.int64)
    launch(_cut, ordered, cuts, rows.numpy(), run_starts.numpy(), group_runs.numpy(), counts.numpy())
    return Groups(order, rows, run_starts, group_runs, counts)


def _busiest(segments: tuple[int, ...], threads: int) -> int:
    """Most occurrences of any thread, where each takes as many neighbouring segments as the others."""
    return max(int(part.sum()) for part in np.array_split(np.diff(segments), threads))


@kernel(parallel=True)
def _sort_segments(slots, segments, order):
    """Stable order of the slots into ``order``, one segment per task; returns the slots in this order."""
    ordered = np.empty_like(slots)
    for s in prange(segments.shape[0] - 1):
        if segments[s] < segments[s + 1]:
            _sort_segment(slots, segments[s], segments[s + 1], order, ordered)
    return ordered


@kernel()
def _sort_segment(slots, start, stop, order, ordered):
    """Sort the slots at ``start … stop − 1``.

    What is moved is ``slot · 2^place_bits + place``, both counted from the segment's first.
    """
    total = stop - start
    low = high = peek(slots, start)
    for p in range(start, stop):
        low, high = min(low, peek(slots, p)), max(high, peek(slots, p))
    place_bits, slot_bits = _bit_length(total), _bit_length(high - low)
    keys, spare = np.empty(total, np.int64), np.empty(total, np.int64)
    for p in range(total):
        poke(keys, p, ((peek(slots, start + p) - low) << place_bits) | p)
    passes = (slot_bits + RADIX_BITS - 1) // RADIX_BITS
    digit = (slot_bits + passes - 1) // passes if passes else 0
    mask = (1 << digit) - 1
    starts = np.empty(1 << digit, np.int64)
    for i in range(passes):
        shift = place_bits + i * digit
        starts[:] = 0
        _count_digits(keys, 0, total, shift, mask, starts)
        before = 0
        for bucket in range(1 << digit):
            count = peek(starts, bucket)
            poke(starts, bucket, before)
            before += count
        _deal(keys, 0, total, shift, mask, starts, spare)
        keys, spare = spare, keys
    for p in range(total):
        key = peek(keys, p)
        poke(order, start + p, start + (key & ((1 << place_bits) - 1)))
        poke(ordered, start + p, low + (key >> place_bits))


@kernel()
def _count_digits(keys, start, stop, shift, mask, counts):
    """Count the digits of the keys at ``start … stop − 1``."""
    for p in range(start, stop):
        digit = (peek(keys, p) >> shift) & mask
        poke(counts, digit, peek(counts, digit) + 1)


@kernel()
def _deal(keys, start, stop, shift, mask, places, out):
    """Write each of these keys to the next place of its digit."""
    for p in range(start, stop):
        key = peek(keys, p)
        digit = (key >> shift) & mask
        to = peek(places, digit)
        poke(places, digit, to + 1)
        poke(out, to, key)


@kernel()
def _bit_length(x):
    bits = 0
    while x >> bits:
        bits += 1
    return bits


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
            _count_digits(keys, c * size, min((c + 1) * size, total), shift, mask, starts[c])
        before = 0
        for bucket in range(buckets):
            for c in range(chunks):
                count = starts[c, bucket]
                starts[c, bucket] = before
                before += count
        for c in prange(chunks):
            _deal(keys, c * size, min((c + 1) * size, total), shift, mask, starts[c], spare)
        keys, spare = spare, keys
    for c in prange(chunks):
        for p in range(c * size, min((c + 1) * size, total)):
            key = peek(keys, p)
            poke(order, p, key & ((1 << place_bits) - 1))
            poke(spare, p, key >> place_bits)
    return spare


@kernel(parallel=True)
def _cut(ordered, cuts, rows, run_starts, group_runs, counts):
    """Groups and runs of sorted slots; every task takes the groups that begin between two ``cuts``."""
    tasks = cuts.shape[0] - 1
    starts = np.empty(tasks + 1, np.int64)
    for task in prange(tasks + 1):
        start = cuts[task]
        while 0 < start < ordered.shape[0] and peek(ordered, start) == peek(ordered, start - 1):
            start += 1
        starts[task] = start
    groups, runs = np.zeros(tasks + 1, np.int64), np.zeros(tasks + 1, np.int64)
    for task in prange(tasks):
        groups[task + 1], runs[task + 1] = _count(ordered, starts[task], starts[task + 1])
    for task in range(tasks):
        groups[task + 1] += groups[task]
        runs[task + 1] += runs[task]
    for task in prange(tasks):
        _fill(ordered, starts[task], starts[task + 1], groups[task], runs[task], rows, run_starts, group_runs)
    run_starts[runs[tasks]] = ordered.shape[0]
    group_runs[groups[tasks]] = runs[tasks]
    counts[0] = groups[tasks]
    counts[1] = runs[tasks]


@kernel()
def _count(ordered, start, stop):
    """Number of groups and of runs of sorted slots, the first of which begins a group."""
    groups = runs = left = 0  # `left`: places in the current run
    last = np.int64(-1)
    for p in range(start, stop):
        slot = peek(ordered, p)
        new_group = slot != last
        new_run = new_group | (left == 0)
        groups += new_group
        runs += new_run
        left = RUN - 1 if new_run else left - 1
        last = slot
    return groups, runs


@kernel()
def _fill(ordered, start, stop, group, run, rows, run_starts, group_runs):
    """Write the groups and runs that `_count` counted, from ``group`` and ``run`` on.

    Each place writes its group and its run, again and again the same: where groups are short, a branch costs more.
    """
    left = 0
    last = np.int64(-1)
    first_run = run_start = np.int64(0)
    for p in range(start, stop):
        slot = peek(ordered, p)
        new_group = slot != last
        new_run = new_group | (left == 0)
        first_run = run if new_group else first_run
        run_start = p if new_run else run_start
        group += new_group
        run += new_run
        left = RUN - 1 if new_run else left - 1
        last = slot
        poke(rows, group - 1, slot)
        poke(group_runs, group - 1, first_run)
        poke(run_starts, run - 1, run_start)


def spread(groups: Groups, values: Tensor) -> Tensor:
    """Give every occurrence the value of its group; see the reference."""
    launches["cpu.spread"] += 1
    out = torch.empty_like(groups.order)
    launch(
        _spread,
        groups.order.numpy(),
        groups.run_starts.numpy(),
        groups.group_runs.numpy(),
        groups.counts.numpy(),
        values.numpy(),
        out.numpy(),
    )
    return out


@kernel(parallel=True)
def _spread(order, run_starts, group_runs, counts, values, out):
    groups, runs = counts[0], counts[1]
    for task in prange((runs + RUNS_PER_TASK - 1) // RUNS_PER_TASK):
        first, last = task * RUNS_PER_TASK, min((task + 1) * RUNS_PER_TASK, runs)
        g = np.searchsorted(group_runs[:groups], first, side="right") - 1
        for r in range(first, last):
            while peek(group_runs, g + 1) <= r:
                g += 1
            value = values[g]
            for p in range(peek(run_starts, r), peek(run_starts, r + 1)):
                poke(out, peek(order, p), value)
