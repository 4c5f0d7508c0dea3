# pyright: basic, reportCallIssue=false
"""Pool the rows of bags on the CPU, in one pass over the bags of an arena, feature by feature, with prefetching."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import LINE_BYTES, load, peek, prefetch_bytes, store_row, stream_row, streams_end
from hotbed.ops.cpu_narrow import WIDE, read_stored_row
from hotbed.ops.cpu_rows import place, prefetch_row, row_arrays
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, flat, kernel, launch
from hotbed.ops.cpu_sums import sum_of_products, sum_rows, sum_stored_rows
from hotbed.ops.layout import (
    BASE,
    BLOCK,
    FIRST_NARROW,
    FIRST_SLOT,
    FIRST_WIDE,
    FIXED,
    OUT,
    POOLING,
    RAGGED_ROW,
    START,
    TABLE,
    WIDE_ROWS,
    BagLayout,
    Rows,
)
from hotbed.specs import MEAN

NO_WEIGHTS = np.empty(0, np.float32)
MIN_SAMPLES_PER_TASK = 64
STREAM_BYTES = 8 << 20
"""From this size on, pooled vectors bypass the caches, which cannot keep them and would first read the old contents."""


def lookup(rows: Rows, bags: BagLayout, out: Tensor) -> None:
    """Pool the rows of each bag into ``out [B, width, D]``; see the reference."""
    launches["cpu.lookup"] += 1
    if out.dtype == torch.float16:  # Numba does not support it
        wide = out.float()
        lookup(rows, bags, wide)
        out.copy_(wide)
        return
    per_id = NO_WEIGHTS if bags.weights is None else bags.weights.numpy()
    only_wide = rows.narrow.dtype == torch.float32
    launch(
        _lookup_wide if only_wide else _lookup,
        flat(rows.wide) if only_wide else row_arrays(rows),
        rows.dim,
        bags.ids.numpy(),
        bags.features.numpy(),
        bags.offsets.numpy(),
        per_id,
        bags.batch_size,
        bags.width,
        bags.room,
        flat(out),
        should_stream(out),
        samples_per_task(bags.batch_size),
    )


def samples_per_task(samples: int) -> int:
    """Return the number of adjacent samples per task. Tasks are few, because their first rows are not prefetched."""
    return max(-(-samples // torch.get_num_threads()), MIN_SAMPLES_PER_TASK)


def should_stream(out: Tensor) -> bool:
    """Return whether pooled vectors ``[B, width, D]`` bypass the caches. They must be large and fill cache lines."""
    fills_lines = out.shape[2] * out.element_size() % LINE_BYTES == 0 and out.data_ptr() % LINE_BYTES == 0
    return fills_lines and out.nbytes >= STREAM_BYTES


def gather(rows: Rows, slots: Tensor, out: Tensor) -> None:
    """Copy the rows at slots ``[n]`` to ``out [n, D]``; see the reference."""
    launches["cpu.gather"] += 1
    per_task = samples_per_task(len(slots))
    launch(_gather, row_arrays(rows), slots.numpy(), flat(out), should_stream(out[:, None]), per_task)


def weight_gradient(rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
    """Write the gradient of the per-id weights to ``out [N]``; see the reference."""
    launches["cpu.weight_gradient"] += 1
    launch(
        _weight_gradient,
        row_arrays(rows),
        bags.ids.numpy(),
        bags.features.numpy(),
        bags.offsets.numpy(),
        bags.batch_size,
        bags.width,
        bags.room,
        flat(grad),
        out.numpy(),
        samples_per_task(bags.batch_size),
    )


@kernel(inline="always")
def bag_bounds(features, offsets, f, b):
    """Return the position of the first id of a bag, and the position after its last id."""
    start = features[f, START]
    fixed = features[f, FIXED]
    if fixed >= 0:
        return start + b * fixed, start + (b + 1) * fixed
    row = features[f, RAGGED_ROW]
    return start + offsets[row, b], start + offsets[row, b + 1]


@kernel(inline="always")
def divisor(pooling, count):
    """Return the divisor of the sum of a bag of ``count > 0`` ids; see `hotbed.specs.divisors`."""
    return np.float32(count) if pooling == MEAN else np.float32(1)


@kernel(inline="always")
def _find(rows, features, f, id):
    """Locate the row of an id, see `place`."""
    if rows.kind == WIDE:
        return True, np.int64(id) + features[f, BASE]
    return place(rows, features[f, TABLE], np.int64(id))


@kernel(inline="always")
def _task(task, features, offsets, samples, per_task):
    """Return the feature of a task, its first sample, the sample after its last, and the position after its last id.

    The samples of a task are adjacent samples of one feature. Their ids are contiguous, so that rows are prefetched
    across bags.
    """
    f = task % features.shape[0]
    first_sample = task // features.shape[0] * per_task
    last_sample = min(first_sample + per_task, samples)
    return f, first_sample, last_sample, bag_bounds(features, offsets, f, last_sample - 1)[1]


@kernel(parallel=True)
def _lookup_wide(wide, dim, ids, features, offsets, per_id, samples, width, room, out, streamed, per_task):
    """Look up rows of a float32 arena. Its slots are positions in ``wide``."""
    chunks = (samples + per_task - 1) // per_task
    for task in prange(chunks * features.shape[0]):
        f, first_sample, last_sample, last = _task(task, features, offsets, samples, per_task)
        first, _ = bag_bounds(features, offsets, f, first_sample)
        base = features[f, BASE]
        for i in range(first, min(first + PREFETCH_ROWS, last)):
            prefetch_bytes(wide, (np.int64(ids[i]) + base) * dim, dim * 4)
        if features[f, FIXED] == 1 and not per_id.shape[0]:
            to = (first_sample * width + room + features[f, OUT]) * dim
            _copy_rows(wide, dim, ids, base, first, last, out, to, width * dim, streamed)
        else:
            _pool_bags(
                wide, dim, ids, features, f, offsets, per_id, first_sample, last_sample, width, room, out, streamed
            )
        if streamed:
            streams_end()


@kernel()
def _copy_rows(wide, dim, ids, base, first, last, out, to, step, streamed):
    """Copy the rows of ids ``first … last − 1``. Each is a bag and is written ``step`` values after the previous."""
    for i in range(first, last):
        if i + PREFETCH_ROWS < last:
            prefetch_bytes(wide, (np.int64(peek(ids, i + PREFETCH_ROWS)) + base) * dim, dim * 4)
        _write(out, to, wide, (np.int64(peek(ids, i)) + base) * dim, dim, streamed)
        to += step


@kernel()
def _pool_bags(wide, dim, ids, features, f, offsets, per_id, first_sample, last_sample, width, room, out, streamed):
    """Pool the bags of at least one sample of a feature."""
    base, acc = features[f, BASE], np.empty(dim, np.float32)
    last = bag_bounds(features, offsets, f, last_sample - 1)[1]
    for b in range(first_sample, last_sample):
        start, stop = bag_bounds(features, offsets, f, b)
        if start == stop:
            acc[:] = 0
        else:
            sum_rows(acc, wide, dim, ids, base, per_id, start, stop, last)
        _divide(features, f, stop - start, acc)
        _write(out, (b * width + room + features[f, OUT]) * dim, acc, 0, dim, streamed)


@kernel(parallel=True)
def _lookup(rows, _, ids, features, offsets, per_id, samples, width, room, out, streamed, per_task):
    """Look up rows of an arena with low-precision rows, which may have wide rows before them."""
    chunks = (samples + per_task - 1) // per_task
    for task in prange(chunks * features.shape[0]):
        f, first_sample, last_sample, last = _task(task, features, offsets, samples, per_task)
        first, _ = bag_bounds(features, offsets, f, first_sample)
        table = features[f, TABLE]
        for i in range(first, min(first + PREFETCH_ROWS, last)):
            is_wide, at = place(rows, table, np.int64(ids[i]))
            prefetch_row(rows, is_wide, at)
        acc = np.empty(rows.dim, np.float32)
        _pool_samples(
            rows, f, first_sample, last_sample, last, ids, features, offsets, per_id, width, room, acc, out, streamed
        )


@kernel()
def _pool_samples(
    rows, f, first_sample, last_sample, last, ids, features, offsets, per_id, width, room, acc, out, streamed
):
    # This is a separate function with only intrinsics in its loop, so that Numba does not count references per bag.
    dim, kind, wide, narrow, exponents = rows.dim, rows.kind, rows.wide, rows.narrow, rows.exponents
    table = features[f, TABLE]
    prefix, in_wide = rows.tables[table, WIDE_ROWS], rows.tables[table, FIRST_WIDE]
    in_narrow = rows.tables[table, FIRST_NARROW]
    for b in range(first_sample, last_sample):
        start, stop = bag_bounds(features, offsets, f, b)
        if start == stop:
            acc[:] = 0
        else:
            sum_stored_rows(
                acc, kind, wide, narrow, exponents, dim, ids, prefix, in_wide, in_narrow, per_id, start, stop, last
            )
        _divide(features, f, stop - start, acc)
        _write(out, (b * width + room + features[f, OUT]) * dim, acc, 0, dim, streamed)
    if streamed:
        streams_end()


@kernel(inline="always")
def _divide(features, f, count, acc):
    """Divide the sum of a bag of ``count`` ids according to the feature's pooling."""
    if features[f, POOLING] and count:
        by = divisor(features[f, POOLING], count)
        for d in range(acc.shape[0]):
            acc[d] /= by


@kernel(inline="always")
def _write(out, to, values, at, dim, streamed):
    if streamed:
        stream_row(out, to, values, at, dim)
    else:
        store_row(out, to, values, at, dim)


@kernel(parallel=True)
def _gather(rows, slots, out, streamed, per_task):
    dim = rows.dim
    for task in prange((slots.shape[0] + per_task - 1) // per_task):
        first, last = task * per_task, min((task + 1) * per_task, slots.shape[0])
        if rows.kind == WIDE:
            for i in range(first, last):
                if i + PREFETCH_ROWS < last:
                    prefetch_bytes(rows.wide, slots[i + PREFETCH_ROWS] * dim, dim * 4)
                _write(out, i * dim, rows.wide, slots[i] * dim, dim, streamed)
        else:
            _gather_of_tables(rows, slots, first, last, np.empty(dim, np.float32), out, streamed)
        if streamed:
            streams_end()


@kernel()
def _gather_of_tables(rows, slots, first, last, acc, out, streamed):
    # It works like `_pool_samples`, for the slots of one table after the other instead of ids.
    dim, kind, wide, narrow, exponents = rows.dim, rows.kind, rows.wide, rows.narrow, rows.exponents
    first_slots = rows.tables[:, FIRST_SLOT]
    while first < last:
        table = np.searchsorted(first_slots, slots[first], side="right") - 1
        begin, end = first_slots[table], first + 1
        after = first_slots[table + 1] if table + 1 < first_slots.shape[0] else np.iinfo(np.int64).max
        while end < last and begin <= slots[end] < after:
            end += 1
        wide_end, in_wide = begin + rows.tables[table, WIDE_ROWS], rows.tables[table, FIRST_WIDE] - begin
        in_narrow = rows.tables[table, FIRST_NARROW]
        for i in range(first, end):
            sum_stored_rows(
                acc, kind, wide, narrow, exponents, dim, slots, wide_end, in_wide, in_narrow, NO_WEIGHTS, i, i + 1, end
            )
            _write(out, i * dim, acc, 0, dim, streamed)
        first = end


@kernel(parallel=True)
def _weight_gradient(rows, ids, features, offsets, samples, width, room, grad, out, per_task):
    chunks = (samples + per_task - 1) // per_task
    blocks = (rows.dim + BLOCK - 1) // BLOCK
    for task in prange(chunks * features.shape[0]):
        f, first_sample, last_sample, last = _task(task, features, offsets, samples, per_task)
        row = np.zeros(blocks * BLOCK, np.float32)  # like g, padded with zeros to whole blocks
        g = np.zeros(blocks * BLOCK, np.float32)
        for b in range(first_sample, last_sample):
            start, stop = bag_bounds(features, offsets, f, b)
            of_bag = (b * width + room + features[f, OUT]) * rows.dim
            for d in range(rows.dim):
                g[d] = load(grad, of_bag + d)
            for i in range(start, stop):
                if i + PREFETCH_ROWS < last:
                    ahead, ahead_at = _find(rows, features, f, ids[i + PREFETCH_ROWS])
                    prefetch_row(rows, ahead, ahead_at)
                wide, at = _find(rows, features, f, ids[i])
                if wide:
                    for d in range(rows.dim):
                        row[d] = load(rows.wide, at * rows.dim + d)
                else:
                    read_stored_row(row, rows.kind, rows.narrow, rows.exponents, rows.dim, at)
                dot = sum_of_products(row, 0, g, 0, blocks)
                out[i] = dot / divisor(features[f, POOLING], stop - start) if features[f, POOLING] else dot
