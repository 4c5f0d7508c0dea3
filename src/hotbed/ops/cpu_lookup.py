# pyright: basic, reportCallIssue=false
"""Pooled lookup on the CPU: one pass over the bags of an arena, feature by feature, rows prefetched ahead."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import (
    LINE_BYTES,
    load,
    prefetch_bytes,
    store,
    store_block,
    stream_line,
    streams_end,
)
from hotbed.ops.cpu_rows import WIDE, place, prefetch_row, read_narrow, row_arrays
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, flat, kernel, launch
from hotbed.ops.cpu_sums import sum_of_products, sum_rows
from hotbed.ops.layout import BASE, BLOCK, FIXED, MEAN, OUT, RAGGED_ROW, START, TABLE, BagLayout, Rows

NO_WEIGHTS = np.empty(0, np.float32)
MIN_SAMPLES_PER_TASK = 64
STREAM_BYTES = 8 << 20
"""From this size on pooled vectors are written past the caches, which would not keep them and would first read what is
overwritten (docs/log.md)."""


def lookup(rows: Rows, bags: BagLayout, out: Tensor) -> None:
    """Pool the rows of each bag into ``out [B, width, D]``; see the reference."""
    launches["cpu.lookup"] += 1
    if out.dtype == torch.float16:  # which Numba does not know
        wide = out.float()
        lookup(rows, bags, wide)
        out.copy_(wide)
        return
    per_id = NO_WEIGHTS if bags.weights is None else bags.weights.numpy()
    launch(
        _lookup,
        row_arrays(rows),
        bags.ids.numpy(),
        bags.features.numpy(),
        bags.offsets.numpy(),
        per_id,
        bags.batch_size,
        bags.width,
        bags.room,
        flat(out),
        streams(out),
        samples_per_task(bags.batch_size),
    )


def samples_per_task(samples: int) -> int:
    """How many neighbouring samples of a feature make a task: few tasks, for each begins with rows not prefetched."""
    return max(-(-samples // torch.get_num_threads()), MIN_SAMPLES_PER_TASK)


def streams(out: Tensor) -> bool:
    """Whether pooled vectors ``[B, width, D]`` are written past the caches: many whole cache lines."""
    line = out.shape[2] * out.element_size() % LINE_BYTES == 0 and out.data_ptr() % LINE_BYTES == 0
    return line and out.nbytes >= STREAM_BYTES


def weight_gradient(rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
    """Gradient of the per-id weights, into ``out [N]``; see the reference."""
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
    """Position of the first id of a bag, and past its last."""
    start = features[f, START]
    fixed = features[f, FIXED]
    if fixed >= 0:
        return start + b * fixed, start + (b + 1) * fixed
    row = features[f, RAGGED_ROW]
    return start + offsets[row, b], start + offsets[row, b + 1]


@kernel(inline="always")
def _find(rows, features, f, id):
    """Where the row of an id is, see `place`."""
    if rows.kind == WIDE:
        return True, np.int64(id) + features[f, BASE]
    return place(rows, features[f, TABLE], np.int64(id))


@kernel(parallel=True)
def _lookup(rows, ids, features, offsets, per_id, samples, width, room, out, streamed, per_task):
    count = features.shape[0]
    dim, kind, wide_rows = rows.dim, rows.kind, rows.wide
    chunks = (samples + per_task - 1) // per_task
    for task in prange(chunks * count):
        # Neighbouring samples of one feature: their ids lie one after the other, so rows are prefetched across bags.
        f = task % count
        first_sample = task // count * per_task
        last_sample = min(first_sample + per_task, samples)
        first, _ = bag_bounds(features, offsets, f, first_sample)
        _, last = bag_bounds(features, offsets, f, last_sample - 1)
        base = features[f, BASE]
        copied = kind == WIDE and not per_id.shape[0]
        acc = np.empty(dim, np.float32)
        row = np.empty(dim, np.float32)
        for i in range(first, min(first + PREFETCH_ROWS, last)):
            wide, at = _find(rows, features, f, ids[i])
            prefetch_row(rows, wide, at)
        for b in range(first_sample, last_sample):
            start, stop = bag_bounds(features, offsets, f, b)
            to = (b * width + room + features[f, OUT]) * dim
            if stop - start == 1 and copied:
                at = (np.int64(ids[start]) + base) * dim
                if start + PREFETCH_ROWS < last:
                    prefetch_bytes(wide_rows, (np.int64(ids[start + PREFETCH_ROWS]) + base) * dim, dim * 4)
                _write(out, to, wide_rows, at, dim, streamed)
                continue
            if start == stop:
                acc[:] = 0
            elif kind == WIDE:
                _pool_wide(acc, wide_rows, dim, ids, base, per_id, start, stop, last)
            else:
                _pool(rows, features, f, ids, per_id, start, stop, last, acc, row)
            if features[f, MEAN] and start < stop:
                length = np.float32(stop - start)
                for d in range(dim):
                    acc[d] /= length
            _write(out, to, acc, 0, dim, streamed)
        if streamed:
            streams_end()


@kernel(inline="always")
def _write(out, to, values, at, dim, streamed):
    if streamed:
        for d in range(0, dim, LINE_BYTES // out.itemsize):
            stream_line(out, to + d, values, at + d)
    else:
        whole = dim // BLOCK * BLOCK
        for d in range(0, whole, BLOCK):
            store_block(out, to + d, values, at + d)
        for d in range(whole, dim):
            store(out, to + d, load(values, at + d))


@kernel()
def _pool_wide(acc, wide_rows, dim, ids, base, per_id, start, stop, last):
    # A function of its own: inlined, it took registers from the loop that copies rows of one-hot features.
    sum_rows(acc, wide_rows, dim, ids, base, per_id, start, stop, last)


@kernel()
def _pool(rows, features, f, ids, per_id, start, stop, last, acc, row):
    """Sum the rows of ids ``start … stop − 1``, at least one, into ``acc``; ``row`` is scratch."""
    for i in range(start, stop):
        if i + PREFETCH_ROWS < last:
            wide, at = _find(rows, features, f, ids[i + PREFETCH_ROWS])
            prefetch_row(rows, wide, at)
        wide, at = _find(rows, features, f, ids[i])
        factor = per_id[i] if per_id.shape[0] else np.float32(1)  # times 1 changes no bit
        if wide:
            _add(acc, rows.wide, at * rows.dim, factor, i == start)
        else:
            read_narrow(rows, at, row)
            _add(acc, row, 0, factor, i == start)


@kernel(inline="always")
def _add(acc, row, at, factor, first):
    # `load` and not an index: Numba asks of an index whether it is negative, and then no loop becomes vector code.
    if first:
        for d in range(acc.shape[0]):
            acc[d] = load(row, at + d) * factor
    else:
        for d in range(acc.shape[0]):
            acc[d] += load(row, at + d) * factor


@kernel(parallel=True)
def _weight_gradient(rows, ids, features, offsets, samples, width, room, grad, out, per_task):
    count = features.shape[0]
    blocks = (rows.dim + BLOCK - 1) // BLOCK
    for task in prange((samples + per_task - 1) // per_task):
        row = np.zeros(blocks * BLOCK, np.float32)
        g = np.zeros(blocks * BLOCK, np.float32)
        for b in range(task * per_task, min((task + 1) * per_task, samples)):
            for f in range(count):
                start, stop = bag_bounds(features, offsets, f, b)
                of_bag = (b * width + room + features[f, OUT]) * rows.dim
                for d in range(rows.dim):
                    g[d] = load(grad, of_bag + d)
                for i in range(start, stop):
                    wide, at = _find(rows, features, f, ids[i])
                    if wide:
                        for d in range(rows.dim):
                            row[d] = load(rows.wide, at * rows.dim + d)
                    else:
                        read_narrow(rows, at, row)
                    dot = sum_of_products(row, 0, g, 0, blocks)
                    out[i] = dot / np.float32(stop - start) if features[f, MEAN] else dot
