# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Sum the gradients of each distinct slot in Triton, and apply the optimizer's rule to its row.

A slot's gradient is the canonical sum: its occurrences left to right in runs of 32, then the runs left to right.
Segments are of very different lengths (Criteo has tables of 3 rows, 20,000 occurrences each, beside millions of rows
that occur once), so the parallel unit is the run:

1. `_runs_kernel`: a program sums tiles of neighbouring runs, those of a tile side by side. A run that is its slot's
   only one gets the rule at once; most are. The others leave their partial sum in a scratch buffer.
2. `_long_kernel`: a program per slot of several runs adds the partial sums in run order and applies the rule.

The host does not know how many runs there are, so where a long slot (one of several runs) keeps its partial sums
follows from positions in the sorted occurrences, cut into windows of 32. No two first runs of long slots start in one
window, nor two last ones (they are more than 32 apart), nor two that are not last (each is full, so at least 32 apart).
So a long slot is announced in the window of its first occurrence, and the scratch row ``2 · window + (1 if last else
0)`` of a run is its own: N / 16 rows, 55 MB for 1.7M occurrences of 128 columns, instead of N.

`segment_sum` runs the same kernels with rows of ``out`` for slots, and stores where `update` applies the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import BLOCK, RUN, Groups, Occurrences, Rows, RuleStep
from hotbed.ops.triton_rows import as_float32
from hotbed.ops.triton_rules import Target, apply, target_of
from hotbed.ops.triton_runtime import STRICT, TILE, ceil_div, power_of_two, programs, rows_per_program
from hotbed.ops.triton_segment import spread_values


class Sums(NamedTuple):
    """What `segment_sum` fills, in place of a `Target`."""

    out: Any  # [n, D]
    gate: Any


NO_RULE = {"RULE": None, "USES": (), "HYPER": 0, "KINDS": (), "BLOCK_T": 1, "HAS_WIDE": False}


@triton.jit
def _finish(
    target,  # Target, or Sums where RULE is None
    tables,
    slot,  # [R]; −1: none
    total,  # [R, BLOCK_D]
    RULE: tl.constexpr,
    USES: tl.constexpr,
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Apply the rule to these slots, or store their sums."""
    if RULE is None:
        col = tl.arange(0, BLOCK_D)[None, :]
        tl.store(target.out + slot[:, None] * D + col, total, mask=(slot >= 0)[:, None] & (col < D))
    else:
        apply(target, tables, slot, total, RULE, USES, HYPER, KINDS, BLOCK_T, HAS_WIDE, D, BLOCK_D)


@triton.jit
def _gradient(grad, scale, at, bag, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr):
    """Gradient rows ``[R, BLOCK_D]`` of occurrences ``at``, times their factors; zeros where ``at``, ``bag`` are −1."""
    col = tl.arange(0, BLOCK_D)[None, :]
    g = as_float32(tl.load(grad + bag[:, None] * D + col, mask=(bag >= 0)[:, None] & (col < D), other=0.0))
    if SCALED:
        g = g * tl.load(scale + at, mask=at >= 0, other=0.0)[:, None]
    return g


@triton.jit(do_not_specialize=["total", "tables"])
def _runs_kernel(
    target,
    tables,  # T
    slots,  # [N]
    bags,  # [N]
    scale,  # [N]; read where SCALED
    order,  # [N]
    run_starts,  # [N + 1]
    counts,  # [2]
    grad,  # [bags, D] of any float dtype
    partials,  # [2 · windows, D]
    total,  # N
    RULE: tl.constexpr,
    USES: tl.constexpr,
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    RUN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``p_r = Σ grad[bag(i)] · scale(i)`` over the occurrences i of run r; slots of one run: the rule at once.

    Slot 3 once and slot 7 forty times, all gradients 1::

        run_starts [0, 1, 33, 41]   slot 3: 1 to the rule; slot 7: 32 into partials[0], 8 into partials[3]
    """
    runs = tl.load(counts + 1)
    if tl.load(target.gate) == 0:
        runs = runs * 0
    for tile in range(tl.program_id(0).to(tl.int64) * R, runs, tl.num_programs(0).to(tl.int64) * R):
        run = tile + tl.arange(0, R)
        live = run < runs
        start = tl.load(run_starts + run, mask=live, other=0)
        end = tl.load(run_starts + run + 1, mask=live, other=0)
        at = tl.load(order + start, mask=live, other=-1)
        slot = tl.load(slots + at, mask=at >= 0, other=-1)
        at_behind = tl.load(order + start - 1, mask=live & (start > 0), other=-1)
        at_ahead = tl.load(order + end, mask=live & (end < total), other=-1)
        slot_behind = tl.load(slots + at_behind, mask=at_behind >= 0, other=-1)
        slot_ahead = tl.load(slots + at_ahead, mask=at_ahead >= 0, other=-1)

        acc = _gradient(grad, scale, at, tl.load(bags + at, mask=at >= 0, other=-1), D, BLOCK_D, SCALED)
        # Three reads depend on each other, so four occurrences are read together; they are still added one by one.
        for i in range(1, tl.max(end - start, axis=0), 4):
            i0 = start + i
            at0 = tl.load(order + i0, mask=i0 < end, other=-1)
            at1 = tl.load(order + i0 + 1, mask=i0 + 1 < end, other=-1)
            at2 = tl.load(order + i0 + 2, mask=i0 + 2 < end, other=-1)
            at3 = tl.load(order + i0 + 3, mask=i0 + 3 < end, other=-1)
            bag0 = tl.load(bags + at0, mask=at0 >= 0, other=-1)
            bag1 = tl.load(bags + at1, mask=at1 >= 0, other=-1)
            bag2 = tl.load(bags + at2, mask=at2 >= 0, other=-1)
            bag3 = tl.load(bags + at3, mask=at3 >= 0, other=-1)
            g0 = _gradient(grad, scale, at0, bag0, D, BLOCK_D, SCALED)
            g1 = _gradient(grad, scale, at1, bag1, D, BLOCK_D, SCALED)
            g2 = _gradient(grad, scale, at2, bag2, D, BLOCK_D, SCALED)
            g3 = _gradient(grad, scale, at3, bag3, D, BLOCK_D, SCALED)
            acc = tl.where((bag0 >= 0)[:, None], acc + g0, acc)
            acc = tl.where((bag1 >= 0)[:, None], acc + g1, acc)
            acc = tl.where((bag2 >= 0)[:, None], acc + g2, acc)
            acc = tl.where((bag3 >= 0)[:, None], acc + g3, acc)

        is_first = slot_behind != slot
        is_last = slot_ahead != slot
        only = is_first & is_last
        # First the rule: its loads do not wait for the gradients, as storing partial sums does.
        alone = tl.where(only, slot, -1)
        _finish(target, tables, alone, acc, RULE, USES, HYPER, KINDS, BLOCK_T, HAS_WIDE, D, BLOCK_D)
        col = tl.arange(0, BLOCK_D)[None, :]
        to = 2 * (start // RUN) + is_last.to(tl.int64)
        tl.store(partials + to[:, None] * D + col, acc, mask=((slot >= 0) & ~only)[:, None] & (col < D))


@triton.jit(do_not_specialize=["total"])
def _announce_kernel(long, run_starts, group_runs, counts, total, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """``long[window of its first occurrence] = g`` for every group g of several runs."""
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = g < tl.load(counts)
    first = tl.load(group_runs + g, mask=live, other=0)
    live = live & (tl.load(group_runs + g + 1, mask=live, other=0) - first > 1)
    tl.store(long + tl.load(run_starts + first, mask=live, other=0) // RUN, g, mask=live)


@triton.jit
def _partial(partials, window, k, runs, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Partial sum ``[1, BLOCK_D]`` of run k of a long slot; zeros where it has no such run."""
    col = tl.arange(0, BLOCK_D)[None, :]
    at = 2 * (window + k) + (k == runs - 1).to(tl.int64)
    return tl.load(partials + at * D + col, mask=(k + col * 0 < runs) & (col < D), other=0.0)


@triton.jit(do_not_specialize=["tables"])
def _long_kernel(
    target,
    tables,  # T
    long,  # [windows]: a group, or −1
    rows,  # [≥ groups]: slot of each group
    group_runs,  # [N + 1]
    partials,  # [2 · windows, D]
    RULE: tl.constexpr,
    USES: tl.constexpr,
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``g = Σ_r p_r`` over the runs r of a slot, left to right; then the rule.

    In the example of `_runs_kernel` the program of window 0 has slot 7: it gives 32 + 8 to the rule.
    """
    window = tl.program_id(0).to(tl.int64)
    group = tl.load(long + window)
    if (group >= 0) & (tl.load(target.gate) != 0):
        runs = tl.load(group_runs + group + 1) - tl.load(group_runs + group)
        acc = _partial(partials, window, 0, runs, D, BLOCK_D)
        # Eight partial sums are in flight together; they are still added one by one.
        for k in range(1, runs, 8):
            p0 = _partial(partials, window, k, runs, D, BLOCK_D)
            p1 = _partial(partials, window, k + 1, runs, D, BLOCK_D)
            p2 = _partial(partials, window, k + 2, runs, D, BLOCK_D)
            p3 = _partial(partials, window, k + 3, runs, D, BLOCK_D)
            p4 = _partial(partials, window, k + 4, runs, D, BLOCK_D)
            p5 = _partial(partials, window, k + 5, runs, D, BLOCK_D)
            p6 = _partial(partials, window, k + 6, runs, D, BLOCK_D)
            p7 = _partial(partials, window, k + 7, runs, D, BLOCK_D)
            acc = acc + p0
            acc = tl.where(k + 1 < runs, acc + p1, acc)
            acc = tl.where(k + 2 < runs, acc + p2, acc)
            acc = tl.where(k + 3 < runs, acc + p3, acc)
            acc = tl.where(k + 4 < runs, acc + p4, acc)
            acc = tl.where(k + 5 < runs, acc + p5, acc)
            acc = tl.where(k + 6 < runs, acc + p6, acc)
            acc = tl.where(k + 7 < runs, acc + p7, acc)
        slot = tl.zeros([1], tl.int64) + tl.load(rows + group)
        _finish(target, tables, slot, acc, RULE, USES, HYPER, KINDS, BLOCK_T, HAS_WIDE, D, BLOCK_D)


def segment_sum(occurrences: Occurrences, groups: Groups, grad: Tensor, places: Tensor | None, out: Tensor) -> None:
    """Sum the gradient of each distinct slot into a row of ``out``, see `hotbed.ops.reference.segment_sum`."""
    launches["triton.segment_sum"] += 1
    if len(groups.order) == 0:
        return
    with torch.cuda.device_of(grad):
        if places is None:
            places = torch.arange(len(groups.order), device=grad.device)
        rows = places.contiguous()
        target = Sums(out, gate=groups.counts)  # open: there is a group
        _launch(target, 0, NO_RULE, spread_values(groups, rows), rows, occurrences, groups, grad, out.shape[1])


def update(
    step: RuleStep, rows: Rows, state: Mapping[str, Tensor], occurrences: Occurrences, groups: Groups, grad: Tensor
) -> None:
    """Sum the gradient of each distinct slot and apply the rule to its row, see `hotbed.ops.reference.update`."""
    launches["triton.update"] += 1
    if len(groups.order) == 0:
        return
    target, compiled = target_of(step, rows, state)
    with torch.cuda.device_of(grad):
        _launch(target, len(rows.tables), compiled, occurrences.slots, groups.rows, occurrences, groups, grad, rows.dim)


def _launch(
    target: Target | Sums,
    tables: int,
    compiled: dict[str, Any],
    slots: Tensor,
    rows: Tensor,
    occurrences: Occurrences,
    groups: Groups,
    grad: Tensor,
    dim: int,
) -> None:
    """Sum, and finish each sum at the slot that ``slots`` names by occurrence and ``rows`` by group.

    For 41 occurrences of 16 columns::

        windows 2, partials [4, 16], tiles of rows_per_program(16, TILE // 2) runs
        one program of `_long_kernel` for each window; with 32 occurrences or fewer there is none
    """
    total = len(groups.order)
    block_d = max(power_of_two(dim), BLOCK)
    tile_rows = rows_per_program(block_d, TILE // 2)
    windows = ceil_div(total, RUN)
    partials = torch.empty(2 * windows, dim, dtype=torch.float32, device=grad.device)
    _runs_kernel[(min(ceil_div(total, tile_rows), programs(grad.device)),)](
        target,
        tables,
        slots,
        occurrences.bags,
        slots if occurrences.scale is None else occurrences.scale,
        groups.order,
        groups.run_starts,
        groups.counts,
        grad.contiguous(),
        partials,
        total,
        **compiled,
        D=dim,
        BLOCK_D=block_d,
        R=tile_rows,
        RUN=RUN,
        SCALED=occurrences.scale is not None,
        **STRICT,
    )
    if total <= RUN:
        return
    long = torch.full((windows,), -1, dtype=torch.int64, device=grad.device)
    _announce_kernel[(ceil_div(total, 1024),)](
        long, groups.run_starts, groups.group_runs, groups.counts, total, RUN=RUN, BLOCK=1024, **STRICT
    )
    _long_kernel[(windows,)](
        target,
        tables,
        long,
        rows,
        groups.group_runs,
        partials,
        **compiled,
        D=dim,
        BLOCK_D=block_d,
        num_warps=max(min(block_d // 128, 4), 1),
        **STRICT,
    )
