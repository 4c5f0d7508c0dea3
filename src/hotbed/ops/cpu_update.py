# pyright: basic, reportCallIssue=false
"""Segment-sum fused with the optimizer rule on the CPU.

Theory of operation: groups of equal slots are dealt out to tasks by number of runs, so that a row that a whole batch
touches does not hold up one thread. Pass 1 sums the runs of long groups (more than one run) into a scratch buffer, in
parallel over runs. Pass 2 goes over all groups: it sums the only run, or the scratch rows in run order, and applies the
rule to the row while the sum is still in cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_runtime import LINE, PREFETCH_BAGS, kernel, launch, prefetch, sum_of_squares
from hotbed.ops.layout import BLOCK, Groups, Occurrences, RuleStep

SGD, ROWWISE_ADAGRAD = range(2)
_RULES = {"sgd": SGD, "rowwise_adagrad": ROWWISE_ADAGRAD}

NO_SCALE = np.empty(0, np.float32)
NO_MOMENT = np.empty((0, 1), np.float32)
RUNS_PER_TASK = 512


def update(
    step: RuleStep,
    weight: Tensor,
    state: Mapping[str, Tensor],
    occurrences: Occurrences,
    groups: Groups,
    grad: Tensor,
) -> None:
    """Sum the gradient of each distinct slot and apply the rule to its row, once; see the reference."""
    launches["cpu.update"] += 1
    if not bool(step.gate):
        return
    moment = NO_MOMENT
    if step.rule.moments:
        first = state[step.rule.moments[0].name]
        moment = (first[:, None] if first.dim() == 1 else first).numpy()
    launch(
        _update,
        _RULES[step.rule.name],
        weight.numpy(),
        moment,
        groups.order.numpy(),
        groups.rows.numpy(),
        groups.run_starts.numpy(),
        groups.group_runs.numpy(),
        groups.counts.numpy(),
        occurrences.bags.numpy(),
        NO_SCALE if occurrences.scale is None else occurrences.scale.numpy(),
        grad.numpy(),
        step.bases.numpy(),
        step.hyper.numpy(),
        np.float32(step.inv_scale.item()),
    )


@kernel(inline="always")
def _add_run(acc, grad, order, bags, scale, start, stop):
    """Sum the occurrences ``start … stop − 1`` of the sorted order, left to right, into ``acc``."""
    dim = grad.shape[1]
    for p in range(start, stop):
        at = order[p]
        bag = bags[at]
        if scale.shape[0]:
            factor = scale[at]
            if p == start:
                for d in range(dim):
                    acc[d] = grad[bag, d] * factor
            else:
                for d in range(dim):
                    acc[d] += grad[bag, d] * factor
        elif p == start:
            for d in range(dim):
                acc[d] = grad[bag, d]
        else:
            for d in range(dim):
                acc[d] += grad[bag, d]


@kernel(inline="always")
def _prefetch_row(matrix, row):
    dim = matrix.shape[1]
    for d in range(0, dim, LINE):
        prefetch(matrix, row * dim + d)


@kernel()
def _apply(rule, weight, moment, row, g, h):
    """Apply a rule to one row; ``g`` is the summed gradient, zero-padded to whole blocks, ``h`` the hyperparameters."""
    dim = weight.shape[1]
    if rule == SGD:
        step = h[1]
    else:
        v = moment[row, 0] + sum_of_squares(g, g.shape[0] // BLOCK) / np.float32(dim)
        moment[row, 0] = v
        step = h[1] / (np.sqrt(v) + h[2])
    for d in range(dim):
        weight[row, d] -= step * g[d]


@kernel(parallel=True)
def _update(
    rule, weight, moment, order, rows, run_starts, group_runs, counts, bags, scale, grad, bases, hyper, inv_scale
):
    groups, runs = counts[0], counts[1]
    dim = weight.shape[1]
    padded = (dim + BLOCK - 1) // BLOCK * BLOCK

    # Pass 1: runs of long groups.
    long_runs = np.empty(2 * (runs - groups), np.int64)  # k ≥ 2 runs of a group are at most 2 · (k − 1)
    scratch_of = np.empty(groups, np.int64)
    count = 0
    for g in range(groups):
        scratch_of[g] = count
        if group_runs[g + 1] - group_runs[g] > 1:
            for r in range(group_runs[g], group_runs[g + 1]):
                long_runs[count] = r
                count += 1
    scratch = np.empty((count, dim), np.float32)
    for i in prange(count):
        r = long_runs[i]
        _add_run(scratch[i], grad, order, bags, scale, run_starts[r], run_starts[r + 1])

    # Pass 2: every group.
    tasks = (runs + RUNS_PER_TASK - 1) // RUNS_PER_TASK
    for task in prange(tasks):
        acc = np.zeros(padded, np.float32)
        begin = np.searchsorted(group_runs[:groups], task * RUNS_PER_TASK)
        end = np.searchsorted(group_runs[:groups], (task + 1) * RUNS_PER_TASK)
        for g in range(begin, end):
            ahead = g + PREFETCH_BAGS
            if ahead < end:
                _prefetch_row(weight, rows[ahead])
                _prefetch_row(grad, bags[order[run_starts[group_runs[ahead]]]])
            row = rows[g]
            h = hyper[np.searchsorted(bases, row, side="right") - 1]
            if h[0] == 0:
                continue
            first, last = group_runs[g], group_runs[g + 1]
            if last - first == 1:
                _add_run(acc, grad, order, bags, scale, run_starts[first], run_starts[last])
            else:
                at = scratch_of[g]
                for d in range(dim):
                    acc[d] = scratch[at, d]
                for i in range(at + 1, at + last - first):
                    for d in range(dim):
                        acc[d] += scratch[i, d]
            for d in range(dim):
                acc[d] *= inv_scale
            _apply(rule, weight, moment, row, acc, h)
