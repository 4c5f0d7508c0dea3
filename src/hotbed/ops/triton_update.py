# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Sum the gradients of each distinct slot in Triton, and apply the optimizer's rule to its row.

A slot's gradient is the canonical sum: its occurrences left to right in runs of 32, then the runs left to right. The
numbers of occurrences differ a lot. For example, Criteo has tables of 3 rows with 20,000 occurrences each, but most of
its rows have one occurrence. Therefore programs divide the work by runs:

1. `list_runs` lists the inputs of each run, in order of run lengths (`triton_group.py`).
2. `_runs_kernel` sums tiles of runs of equal length, all runs of a tile in parallel. It is compiled once without a loop
   for runs of a single occurrence, which are the most common, and once for other runs. If a run is its slot's only run,
   the rule is applied immediately. Other runs store their partial sum in a scratch buffer.
3. `_long_kernel` has one program per slot with several runs. It adds the partial sums in run order and applies the
   rule.

The host does not know the number of runs. Therefore the scratch row of a run depends on its position in the sorted
occurrences, which are divided into windows of 32. A *long* slot has several runs. Two last runs of long slots start
more than 32 positions apart. Two runs that are not last are full, so they start at least 32 positions apart. Therefore
the scratch row ``2 · window + (1 if last else 0)`` of a run is unique. The buffer has N / 16 rows instead of N, which
is 55 MB for 1.7M occurrences of 128 columns.

`segment_sum` and `square_blocks` run the same kernels with rows of ``out`` as slots. They store the sums instead of
applying the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import RUN, Groups, Occurrences, Rows, RuleStep
from hotbed.ops.triton_group import RunList, list_runs
from hotbed.ops.triton_rows import as_float32
from hotbed.ops.triton_rules import Target, apply, block_sums, target_of
from hotbed.ops.triton_runtime import BLOCK, STRICT, TILE, ceil_div, power_of_two, programs, rows_per_program


class Sums(NamedTuple):
    """Output of `segment_sum` and `square_blocks`, used instead of a `Target`."""

    out: Any  # [n, D] or [n, blocks]
    inv_scale: Any
    gate: Any


_SUMS = {"RULE": None, "USES": (), "HYPER": 0, "KINDS": (0, 0), "HAS_WIDE": False}
"""Compile-time constants of kernels that store sums. For sums of squares, ``HYPER`` is the columns of ``out``."""


@triton.jit
def _finish(
    target,  # Target, or Sums if RULE is None
    slot,  # [R]; −1: no slot
    table,  # [R]
    number,  # [R], see `place_number`; unused if all rows are float32
    group,  # [R]; unused if no moment is by group
    total,  # [R, BLOCK_D]
    RULE: tl.constexpr,
    USES: tl.constexpr,
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Apply the rule to these slots, or store their sums, or sums of squares."""
    if RULE is None and HYPER > 0:
        total = total * tl.load(target.inv_scale)
        at = tl.arange(0, BLOCK_D // BLOCK)[None, :]
        to = target.out + slot[:, None] * HYPER + at
        tl.store(to, block_sums(total * total, BLOCK_D), mask=(slot >= 0)[:, None] & (at < HYPER))
    elif RULE is None:
        col = tl.arange(0, BLOCK_D)[None, :]
        tl.store(target.out + slot[:, None] * D + col, total, mask=(slot >= 0)[:, None] & (col < D))
    else:
        apply(target, slot, table, number, group, total, RULE, USES, HYPER, KINDS, HAS_WIDE, D, BLOCK_D)


@triton.jit
def _number(target, runs, run, slot, live, RULE: tl.constexpr):
    """Return the `place_number` of the rows of runs. It is unused if ``slot`` is the position."""
    if RULE is None:
        return slot
    elif target.rows.narrow.dtype.element_ty != tl.float32:
        return tl.load(runs.places + run, mask=live, other=-1)
    else:
        return slot


@triton.jit
def _group(runs, start, live, slot, KINDS: tl.constexpr):
    """Return the group of the run that starts at a position. It is unused if no moment is by group."""
    if KINDS[1] == 3:
        return tl.load(runs.numbers + start, mask=live, other=1) - 1
    else:
        return slot


@triton.jit
def _gradient(grad, scale, at, bag, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr):
    """Load gradients ``[R, BLOCK_D]`` of bags, times the factors of positions ``at``. Bag −1 has zeros."""
    col = tl.arange(0, BLOCK_D)[None, :]
    g = as_float32(tl.load(grad + bag.to(tl.int64)[:, None] * D + col, mask=(bag >= 0)[:, None] & (col < D), other=0.0))
    if SCALED:
        g = g * tl.load(scale + at, mask=bag >= 0, other=0.0)[:, None]
    return g


@triton.jit
def _runs_kernel(
    target,
    runs,  # RunList
    grad,  # [bags, D] of any float dtype
    partials,  # [2 · windows, D]; written unless SINGLE
    RULE: tl.constexpr,
    USES: tl.constexpr,
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    RUN: tl.constexpr,
    SCALED: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Compute ``p_r = Σ grad[bag(i)] · scale(i)`` over the occurrences i of run r.

    For slots of one run, apply the rule. For example, slot 3 occurs once and slot 7 forty times, with gradients of 1::

        SINGLE: the rule for slot 3 gets 1; else: partials[3] = 8, partials[0] = 32
    """
    singles = tl.load(runs.bounds).to(tl.int64)
    if SINGLE:
        first, behind = singles * 0, singles
    else:
        first, behind = singles, tl.load(runs.counts + 1)
    if tl.load(target.gate) == 0:
        behind = behind * 0
    for tile in range(first + tl.program_id(0) * R, behind, tl.num_programs(0).to(tl.int64) * R):
        run = tl.cast(tile, tl.int32) + tl.arange(0, R)
        live = run < behind.to(tl.int32)
        slot = tl.load(runs.slots + run, mask=live, other=-1)
        table = tl.load(runs.tables + run, mask=live, other=0)
        number = _number(target, runs, run, slot, live, RULE)
        bag = tl.load(runs.first_bags + run, mask=live, other=-1)
        if SCALED or not SINGLE or KINDS[1] == 3:
            start = tl.load(runs.starts + run, mask=live, other=0).to(tl.int32)
        else:
            start = slot
        group = _group(runs, start, live, slot, KINDS)
        acc = _gradient(grad, runs.scale, start, bag, D, BLOCK_D, SCALED)
        if SINGLE:
            _finish(target, slot, table, number, group, acc, RULE, USES, HYPER, KINDS, HAS_WIDE, D, BLOCK_D)
        else:
            kind = tl.load(runs.kinds + run, mask=live, other=0).to(tl.int32)
            to = tl.load(runs.partials + run, mask=live, other=-1)
            left = tl.minimum(kind, RUN) - 1
            # Four gradients and the bags of the next four are read together. Gradients are still added one by one.
            at = start + 1
            bag0 = tl.load(runs.bags + at, mask=left > 0, other=-1)
            bag1 = tl.load(runs.bags + at + 1, mask=left > 1, other=-1)
            bag2 = tl.load(runs.bags + at + 2, mask=left > 2, other=-1)
            bag3 = tl.load(runs.bags + at + 3, mask=left > 3, other=-1)
            for _ in range(1, tl.max(tl.minimum(kind, RUN), axis=0), 4):
                next0 = tl.load(runs.bags + at + 4, mask=left > 4, other=-1)
                next1 = tl.load(runs.bags + at + 5, mask=left > 5, other=-1)
                next2 = tl.load(runs.bags + at + 6, mask=left > 6, other=-1)
                next3 = tl.load(runs.bags + at + 7, mask=left > 7, other=-1)
                g0 = _gradient(grad, runs.scale, at, bag0, D, BLOCK_D, SCALED)
                g1 = _gradient(grad, runs.scale, at + 1, bag1, D, BLOCK_D, SCALED)
                g2 = _gradient(grad, runs.scale, at + 2, bag2, D, BLOCK_D, SCALED)
                g3 = _gradient(grad, runs.scale, at + 3, bag3, D, BLOCK_D, SCALED)
                acc = tl.where((bag0 >= 0)[:, None], acc + g0, acc)
                acc = tl.where((bag1 >= 0)[:, None], acc + g1, acc)
                acc = tl.where((bag2 >= 0)[:, None], acc + g2, acc)
                acc = tl.where((bag3 >= 0)[:, None], acc + g3, acc)
                bag0, bag1, bag2, bag3 = next0, next1, next2, next3
                at += 4
                left -= 4
            # The rule comes first, because its loads do not wait for the gradients, and storing partial sums does.
            alone = tl.where(to < 0, slot, -1)
            number = tl.where(to < 0, number, -1)
            _finish(target, alone, table, number, group, acc, RULE, USES, HYPER, KINDS, HAS_WIDE, D, BLOCK_D)
            col = tl.arange(0, BLOCK_D)[None, :]
            row = partials + to.to(tl.int64)[:, None] * D
            tl.store(row + col, acc, mask=(to >= 0)[:, None] & (col < D))


@triton.jit
def _partial(of_run, i, k, runs, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the partial sum ``[1, BLOCK_D]`` of run k + i, or zeros without such a run. Run k is at ``of_run``."""
    col = tl.arange(0, BLOCK_D)[None, :]
    at = 2 * i * D + tl.where(k + i == runs - 1, D, 0)
    return tl.load(of_run + at + col, mask=(k + i + col * 0 < runs) & (col < D), other=0.0)


@triton.jit
def _eight(of_run, i, k, runs, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the partial sums of runs k + i to k + i + 7."""
    return (
        _partial(of_run, i, k, runs, D, BLOCK_D),
        _partial(of_run, i + 1, k, runs, D, BLOCK_D),
        _partial(of_run, i + 2, k, runs, D, BLOCK_D),
        _partial(of_run, i + 3, k, runs, D, BLOCK_D),
        _partial(of_run, i + 4, k, runs, D, BLOCK_D),
        _partial(of_run, i + 5, k, runs, D, BLOCK_D),
        _partial(of_run, i + 6, k, runs, D, BLOCK_D),
        _partial(of_run, i + 7, k, runs, D, BLOCK_D),
    )


@triton.jit
def _added(acc, eight, k, runs):
    """Add the existing ones of eight partial sums to ``acc``, left to right."""
    for i in tl.static_range(8):  # pyright: ignore[reportGeneralTypeIssues]
        acc = tl.where(k + i < runs, acc + eight[i], acc)
    return acc


@triton.jit
def _long_kernel(
    target,
    runs,  # RunList
    partials,  # [2 · windows, D]
    RULE: tl.constexpr,
    USES: tl.constexpr,
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
):
    """Compute ``g = Σ_r p_r`` over the runs r of a slot, left to right, and apply the rule.

    In the example of `_runs_kernel`, one program processes slot 7. It applies the rule to 32 + 8.
    """
    first, behind = tl.load(runs.bounds + 1).to(tl.int64), tl.load(runs.counts + 1)
    if tl.load(target.gate) == 0:
        behind = behind * 0
    for run in range(first + tl.program_id(0), behind, tl.num_programs(0).to(tl.int64)):
        start = tl.load(runs.starts + run)
        group = runs.group_runs + tl.load(runs.numbers + start) - 1
        count = tl.load(group + 1) - tl.load(group)
        of_run = partials + 2 * (start // RUN).to(tl.int64) * D
        acc = _partial(of_run, 0, 0, count, D, BLOCK_D)
        # 32 independent loads are in flight, because the slot with the most runs determines the time of the kernel.
        for k in range(1, count, 32):
            of_run += 2 * (1 if k == 1 else 32) * D
            a = _eight(of_run, 0, k, count, D, BLOCK_D)
            b = _eight(of_run, 8, k, count, D, BLOCK_D)
            c = _eight(of_run, 16, k, count, D, BLOCK_D)
            d = _eight(of_run, 24, k, count, D, BLOCK_D)
            acc = _added(acc, a, k, count)
            acc = _added(acc, b, k + 8, count)
            acc = _added(acc, c, k + 16, count)
            acc = _added(acc, d, k + 24, count)
        slot = tl.zeros([1], tl.int64) + tl.load(runs.slots + run)
        table = tl.zeros([1], tl.int32) + tl.load(runs.tables + run)
        number = _number(target, runs, tl.zeros([1], tl.int64) + run, slot, slot >= 0, RULE)
        group = _group(runs, tl.zeros([1], tl.int64) + start, slot >= 0, slot, KINDS)
        _finish(target, slot, table, number, group, acc, RULE, USES, HYPER, KINDS, HAS_WIDE, D, BLOCK_D)


def segment_sum(occurrences: Occurrences, groups: Groups, grad: Tensor, places: Tensor | None, out: Tensor) -> None:
    """Sum the gradient of each distinct slot into a row of ``out``, see `hotbed.ops.reference.segment_sum`."""
    launches["triton.segment_sum"] += 1
    if len(groups.order) == 0:
        return
    with torch.cuda.device_of(grad):
        if places is None:
            places = torch.arange(len(groups.order), device=grad.device)
        runs = list_runs(occurrences, groups, places.contiguous(), None)
        # The gate is open, because at least one group exists.
        target = Sums(out, out, gate=groups.counts)
        _launch(target, _SUMS, runs, grad, out.shape[1], occurrences.scale is not None)


def square_blocks(occurrences: Occurrences, groups: Groups, grad: Tensor, inv_scale: Tensor, out: Tensor) -> None:
    """Sum the squares of each distinct slot's gradient in blocks, see `hotbed.ops.reference.square_blocks`."""
    launches["triton.square_blocks"] += 1
    if len(groups.order) == 0:
        return
    with torch.cuda.device_of(grad):
        runs = list_runs(occurrences, groups, torch.arange(len(groups.order), device=grad.device), None)
        compiled = {**_SUMS, "HYPER": out.shape[1]}
        target = Sums(out, inv_scale, gate=groups.counts)
        _launch(target, compiled, runs, grad, grad.shape[-1], occurrences.scale is not None)


def update(
    step: RuleStep, rows: Rows, state: Mapping[str, Tensor], occurrences: Occurrences, groups: Groups, grad: Tensor
) -> None:
    """Sum the gradient of each distinct slot and apply the rule to its row, see `hotbed.ops.reference.update`."""
    launches["triton.update"] += 1
    if len(groups.order) == 0:
        return
    target, compiled = target_of(step, rows, state)
    with torch.cuda.device_of(grad):
        runs = list_runs(occurrences, groups, groups.rows, rows)
        _launch(target, compiled, runs, grad, rows.dim, occurrences.scale is not None)


def _launch(
    target: Target | Sums, compiled: dict[str, Any], runs: RunList, grad: Tensor, dim: int, scaled: bool
) -> None:
    """Launch the kernels.

    For example, 41 occurrences of 16 columns have 2 windows, partials ``[4, 16]`` and tiles of
    ``rows_per_program(16, TILE // 2)`` runs. With at most 32 occurrences, no slot has several runs. With one
    occurrence, no run has several occurrences.
    """
    total = len(runs.slots)
    block_d = max(power_of_two(dim), BLOCK.value)
    # float32 rows that are not multiples of 16 bytes are read one value at a time. Each address needs registers.
    tile_rows = rows_per_program(block_d, TILE // 2 if dim % 4 == 0 else TILE // 8)
    partials = torch.empty(2 * ceil_div(total, RUN), dim, dtype=torch.float32, device=grad.device)
    grad = grad.contiguous()
    compiled = {**compiled, "D": dim, "BLOCK_D": block_d, "RUN": RUN, **STRICT}
    for single, most in ((True, total), (False, total // 2)):
        if most:
            grid = (min(ceil_div(most, tile_rows), programs(grad.device)),)
            _runs_kernel[grid](target, runs, grad, partials, **compiled, R=tile_rows, SCALED=scaled, SINGLE=single)
    if total > RUN:
        # One column per thread: with fewer bytes of each partial sum per thread, more sums are in flight.
        warps = min(max(block_d // 32, 1), 8)
        grid = (min(ceil_div(total, RUN), programs(grad.device)),)
        _long_kernel[grid](target, runs, partials, **compiled, num_warps=warps)
