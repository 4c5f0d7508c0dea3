# pyright: basic, reportCallIssue=false
"""List occurrences and group them by slot, on the CPU.

Slots are sorted by a stable radix sort with up to 11 bits per pass. If the occurrences of each table are adjacent, each
thread sorts whole tables in its own cache. Otherwise all threads sort all occurrences together. `torch.sort` compares
64-bit keys and took three times as long.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.errors import BatchError
from hotbed.large_tensors import empty
from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import peek, poke
from hotbed.ops.cpu_lookup import NO_WEIGHTS, bag_bounds, divisor
from hotbed.ops.cpu_runtime import kernel, launch
from hotbed.ops.layout import BASE, FIXED, OUT, POOLING, RAGGED_ROW, RUN, START, BagLayout, Groups, Occurrences

RUNS_PER_TASK = 512
"""Number of runs per task. Work is divided by runs, so that a very frequent slot does not delay one thread."""

RADIX_BITS = 11
KEY_BITS = 63


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id; see the reference."""
    launches["cpu.occurrences"] += 1
    slots, owners = empty((bags.total,), torch.int64), empty((bags.total,), torch.int64)
    scaled = bags.weights is not None or bags.has_divisors
    scale = empty((bags.total if scaled else 0,), torch.float32)
    per_id = NO_WEIGHTS if bags.weights is None else bags.weights.numpy()
    firsts, segments, known = launch(
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
    total = int(firsts[-1])  # bags.total may be larger
    scale = scale[:total] if scaled else None
    return Occurrences(slots[:total], owners[:total], scale, torch.from_numpy(segments) if known else None)


@kernel(parallel=True)
def _occurrences(ids, features, offsets, per_id, samples, width, room, slots, owners, scale):
    """Return the start of each feature's occurrences, `Occurrences.segments`, and whether the segments are valid.

    They are valid if features are in the order of their tables. Features of one table are one segment.
    """
    count = features.shape[0]
    firsts = np.zeros(count + 1, np.int64)
    for f in range(count):
        fixed = features[f, FIXED]
        total = samples * fixed if fixed >= 0 else offsets[features[f, RAGGED_ROW], samples]
        firsts[f + 1] = firsts[f] + total
    for f in prange(count):
        _list_feature(np.int64(f), firsts, ids, features, offsets, per_id, samples, width, room, slots, owners, scale)
    segments, parts, known = np.empty(count + 1, np.int64), 0, True
    for f in range(count):
        known &= f == 0 or features[f, BASE] >= features[f - 1, BASE]
        if f == 0 or features[f, BASE] > features[f - 1, BASE]:
            segments[parts] = firsts[f]
            parts += 1
    segments[parts] = firsts[count]
    return firsts, segments[: parts + 1], known


@kernel(_nrt=False)
def _list_feature(f, firsts, ids, features, offsets, per_id, samples, width, room, slots, owners, scale):
    """List the occurrences of a feature."""
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


def group(occurrences: Occurrences) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs; see the reference."""
    launches["cpu.group"] += 1
    slots, segments, leaf_bits = occurrences.slots, occurrences.segments, 0
    if occurrences.leaf is not None:
        slots, leaf_bits = slots.long() * occurrences.leaves + occurrences.leaf, occurrences.leaves.bit_length() - 1
    total, threads = len(slots), torch.get_num_threads()
    sizes = total, total, total + 1, total + 1, 2
    order, rows, run_starts, group_runs, counts = (empty((size,), torch.int64) for size in sizes)
    run_leaves = empty((total if leaf_bits else 0,), torch.int64)
    found = rows.numpy(), run_starts.numpy(), group_runs.numpy(), counts.numpy(), leaf_bits, run_leaves.numpy()
    if segments is not None and _are_even(segments.numpy(), threads):
        ordered = empty((total,), torch.int64)
        launch(_group_segments, slots.numpy(), segments.numpy(), ordered.numpy(), order.numpy(), *found)
    else:
        slot_bits, place_bits = int(slots.max()).bit_length() if total else 0, total.bit_length()
        if slot_bits + place_bits > KEY_BITS:
            raise BatchError(
                f"sort key: got {slot_bits} + {place_bits} bits for {total:,} ids and the largest slot "
                f"{int(slots.max()):,}, expected at most {KEY_BITS} bits. Use smaller batches"
            )
        launch(_group_all, slots.numpy(), slot_bits, place_bits, threads, order.numpy(), *found)
    return Groups(order, rows, run_starts, group_runs, counts, run_leaves=run_leaves if leaf_bits else None)


@kernel()
def _are_even(segments, threads):
    """Return whether each thread has at most twice the mean work if all get equal numbers of adjacent segments."""
    parts = segments.shape[0] - 1
    each, more, most, at = parts // threads, parts % threads, 0, 0
    for thread in range(threads):
        end = at + each + (thread < more)
        most = max(most, segments[end] - segments[at])
        at = end
    return most * threads <= 2 * segments[parts]


@kernel(parallel=True)
def _group_segments(slots, segments, ordered, order, rows, run_starts, group_runs, counts, leaf_bits, run_leaves):
    """Group slots, one segment per task. ``ordered`` is scratch space.

    With ``leaf_bits``, slots are ``slot · 2^leaf_bits + virtual rank``.
    """
    tasks = segments.shape[0] - 1
    groups, runs = np.zeros(tasks + 1, np.int64), np.zeros(tasks + 1, np.int64)
    for s in prange(tasks):
        start, stop = segments[s], segments[s + 1]
        if start < stop:
            _sort_segment(slots, start, stop, order, ordered)
            groups[s + 1], runs[s + 1] = _count(ordered, start, stop, leaf_bits)
    _add_up(groups, runs, slots.shape[0], run_starts, group_runs, counts)
    for s in prange(tasks):
        start, stop = segments[s], segments[s + 1]
        _fill(ordered, start, stop, groups[s], runs[s], rows, run_starts, group_runs, leaf_bits, run_leaves)


@kernel()
def _sort_segment(slots, start, stop, order, ordered):
    """Sort the slots at ``start … stop − 1`` in memory that stays in the cache of this thread.

    Sort keys are ``slot · 2^place_bits + position``. Slots are relative to the smallest, and positions to ``start``.
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
    """Write each of these keys to the next position of its digit."""
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
def _group_all(
    slots, slot_bits, place_bits, chunks, order, rows, run_starts, group_runs, counts, leaf_bits, run_leaves
):
    """Group slots with ``chunks`` threads that sort all slots together.

    Sort keys are ``slot · 2^place_bits + position``, so that a pass moves one number per id.
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
    ordered, cuts = spare, np.empty(chunks + 1, np.int64)  # each task processes the groups that begin in its chunk
    for c in range(chunks + 1):
        cut = min(c * size, total)
        if c and cuts[c - 1] > cut:  # one group is longer than a whole chunk
            cut = cuts[c - 1]
        while 0 < cut < total and peek(ordered, cut) >> leaf_bits == peek(ordered, cut - 1) >> leaf_bits:
            cut += 1
        cuts[c] = cut
    groups, runs = np.zeros(chunks + 1, np.int64), np.zeros(chunks + 1, np.int64)
    for c in prange(chunks):
        groups[c + 1], runs[c + 1] = _count(ordered, cuts[c], cuts[c + 1], leaf_bits)
    _add_up(groups, runs, total, run_starts, group_runs, counts)
    for c in prange(chunks):
        start, stop = cuts[c], cuts[c + 1]
        _fill(ordered, start, stop, groups[c], runs[c], rows, run_starts, group_runs, leaf_bits, run_leaves)


@kernel()
def _count(ordered, start, stop, leaf_bits):
    """Count the groups and runs of sorted slots. The first slot begins a group."""
    groups = runs = left = 0  # `left`: remaining positions of the current run
    last = np.int64(-1)
    for p in range(start, stop):
        slot = peek(ordered, p)
        groups += slot >> leaf_bits != last >> leaf_bits
        new_run = (slot != last) | (left == 0)
        runs += new_run
        left = RUN - 1 if new_run else left - 1
        last = slot
    return groups, runs


@kernel()
def _add_up(groups, runs, total, run_starts, group_runs, counts):
    """Replace the numbers of groups and runs per task by cumulative sums, and write the totals."""
    tasks = groups.shape[0] - 1
    for task in range(tasks):
        groups[task + 1] += groups[task]
        runs[task + 1] += runs[task]
    run_starts[runs[tasks]] = total
    group_runs[groups[tasks]] = runs[tasks]
    counts[0] = groups[tasks]
    counts[1] = runs[tasks]


@kernel()
def _fill(ordered, start, stop, group, run, rows, run_starts, group_runs, leaf_bits, run_leaves):
    """Write the groups and runs that `_count` counted, from ``group`` and ``run`` on.

    Each position writes its group and run, so the same values are written repeatedly. A branch would be slower for
    short groups.
    """
    left = 0
    last = np.int64(-1)
    first_run = run_start = np.int64(0)
    for p in range(start, stop):
        slot = peek(ordered, p)
        new_group = slot >> leaf_bits != last >> leaf_bits
        new_run = (slot != last) | (left == 0)
        first_run = run if new_group else first_run
        run_start = p if new_run else run_start
        group += new_group
        run += new_run
        left = RUN - 1 if new_run else left - 1
        last = slot
        poke(rows, group - 1, slot >> leaf_bits)
        poke(group_runs, group - 1, first_run)
        poke(run_starts, run - 1, run_start)
        if leaf_bits:
            poke(run_leaves, run - 1, slot & ((1 << leaf_bits) - 1))


def spread(groups: Groups, values: Tensor) -> Tensor:
    """Return the value of the group of every occurrence; see the reference."""
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
