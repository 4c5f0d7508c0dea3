# pyright: basic, reportCallIssue=false
"""Occurrences and groups on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_lookup import NO_WEIGHTS, bag_bounds
from hotbed.ops.cpu_runtime import kernel, launch
from hotbed.ops.layout import BASE, FIXED, MEAN, RAGGED_ROW, RUN, START, BagLayout, Groups, Occurrences


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
        slots.numpy(),
        owners.numpy(),
        scale.numpy(),
    )
    return Occurrences(slots, owners, scale if scaled else None)


@kernel(parallel=True)
def _occurrences(ids, features, offsets, per_id, samples, slots, owners, scale):
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
                owners[i + shift] = b * count + f
                if scale.shape[0]:
                    factor = per_id[i] if per_id.shape[0] else np.float32(1)
                    scale[i + shift] = factor / np.float32(stop - start) if features[f, MEAN] else factor


def group(slots: Tensor) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs; see the reference."""
    launches["cpu.group"] += 1
    total = len(slots)
    ordered, order = torch.sort(slots, stable=True)
    rows = torch.empty(total, dtype=torch.int64, device="cpu")
    run_starts = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    group_runs = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    counts = torch.empty(2, dtype=torch.int64, device="cpu")
    _cut(ordered.numpy(), rows.numpy(), run_starts.numpy(), group_runs.numpy(), counts.numpy())
    return Groups(order, rows, run_starts, group_runs, counts)


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
