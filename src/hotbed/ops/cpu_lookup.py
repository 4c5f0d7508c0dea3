# pyright: basic, reportCallIssue=false
"""Pooled lookup on the CPU: one pass over all bags of an arena, rows prefetched ahead."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_memory import empty
from hotbed.ops.cpu_runtime import LINE, PREFETCH_BAGS, kernel, launch, prefetch
from hotbed.ops.layout import BASE, FIXED, MEAN, RAGGED_ROW, START, BagLayout

NO_WEIGHTS = np.empty(0, np.float32)
SAMPLES_PER_TASK = 64


def lookup(weight: Tensor, bags: BagLayout) -> Tensor:
    """Pool the rows of each bag: ``[B, F, D]``; see the reference."""
    launches["cpu.lookup"] += 1
    out = empty((bags.batch_size, len(bags.features), weight.shape[1]))
    per_id = NO_WEIGHTS if bags.weights is None else bags.weights.numpy()
    launch(_lookup, weight.numpy(), bags.ids.numpy(), bags.features.numpy(), bags.offsets.numpy(), per_id, out.numpy())
    return out


@kernel(inline="always")
def bag_bounds(features, offsets, f, b):
    """Position of the first id of a bag, and past its last."""
    start = features[f, START]
    fixed = features[f, FIXED]
    if fixed >= 0:
        return start + b * fixed, start + (b + 1) * fixed
    row = features[f, RAGGED_ROW]
    return start + offsets[row, b], start + offsets[row, b + 1]


@kernel(parallel=True)
def _lookup(weight, ids, features, offsets, per_id, out):
    samples, count, dim = out.shape
    tasks = (samples + SAMPLES_PER_TASK - 1) // SAMPLES_PER_TASK
    for task in prange(tasks):
        first = task * SAMPLES_PER_TASK * count
        last = min((task + 1) * SAMPLES_PER_TASK, samples) * count
        for q in range(first, last):
            ahead = min(q + PREFETCH_BAGS, last - 1)
            at, stop = bag_bounds(features, offsets, ahead % count, ahead // count)
            if at < stop:
                row = (np.int64(ids[at]) + features[ahead % count, BASE]) * dim
                for d in range(0, dim, LINE):
                    prefetch(weight, row + d)
            b = q // count
            f = q % count
            _pool(weight, ids, features, offsets, per_id, out, b, f)


@kernel()
def _pool(weight, ids, features, offsets, per_id, out, b, f):
    dim = out.shape[2]
    start, stop = bag_bounds(features, offsets, f, b)
    base = features[f, BASE]
    if start == stop:
        out[b, f, :] = 0
        return
    slot = np.int64(ids[start]) + base
    if per_id.shape[0]:
        for d in range(dim):
            out[b, f, d] = weight[slot, d] * per_id[start]
    else:
        for d in range(dim):
            out[b, f, d] = weight[slot, d]
    for i in range(start + 1, stop):
        ahead = (np.int64(ids[min(i + PREFETCH_BAGS, stop - 1)]) + base) * dim
        for d in range(0, dim, LINE):
            prefetch(weight, ahead + d)
        slot = np.int64(ids[i]) + base
        if per_id.shape[0]:
            for d in range(dim):
                out[b, f, d] += weight[slot, d] * per_id[i]
        else:
            for d in range(dim):
                out[b, f, d] += weight[slot, d]
    if features[f, MEAN]:
        length = np.float32(stop - start)
        for d in range(dim):
            out[b, f, d] /= length
