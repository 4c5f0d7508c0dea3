# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""An optimizer's step over a tile of rows in Triton: load row and moments, apply the rule, round, store.

The steps and their order are `hotbed.ops.reference_rules.apply_rule`'s. Those that no table uses are left out at
compile time; of the others each table's hyperparameters decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.layout import Rows, RuleStep
from hotbed.ops.triton_launch import power_of_two
from hotbed.ops.triton_layout import (
    ACTIVE,
    DECAY,
    FIRST_SLOT,
    L2,
    MAX_GRAD_NORM,
    MAX_NORM,
    TABLE_ENTRY,
)
from hotbed.ops.triton_rows import load_rows, locate, row_pointers, store_rows
from hotbed.ops.triton_rules import RULES, Hyper, limited, value
from hotbed.optim import COMMON

_NONE, _PER_ROW, _PER_ELEMENT = 0, 1, 2


class Target(NamedTuple):
    """What a step changes, and by which numbers."""

    rows: Any  # RowPointers
    moment0: Any  # [S], [S, D] or unused
    moment1: Any
    hyper: Any  # [T, HYPER]
    seeds: Any  # [T]
    inv_scale: Any
    gate: Any


def target_of(step: RuleStep, rows: Rows, state: Mapping[str, Tensor]) -> tuple[Target, dict[str, Any]]:
    """Arguments of `apply`: pointers, and what it is compiled for."""
    unused = 2 - len(step.rule.moments)
    moments = [state[moment.name] for moment in step.rule.moments] + [step.hyper] * unused
    kinds = [_PER_ROW if moment.per == "row" else _PER_ELEMENT for moment in step.rule.moments] + [_NONE] * unused
    pointers = Target(row_pointers(rows), *moments, step.hyper, step.seeds, step.inv_scale, step.gate)
    return pointers, {
        "RULE": RULES[step.rule.name],
        "USES": tuple(name in step.uses for name in ("active", *COMMON)),
        "HYPER": step.hyper.shape[1],
        "KINDS": tuple(kinds),
        "BLOCK_T": min(power_of_two(len(rows.tables)), 32),
        "HAS_WIDE": len(rows.wide) > 0,
    }


@triton.jit
def apply(
    target,
    tables,  # T
    slot,  # [R]; −1: none
    g,  # [R, BLOCK_D] summed gradient, zero beyond D
    RULE: tl.constexpr,
    USES: tl.constexpr,  # by column of hyper
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Apply the rule to those of these slots whose table is active."""
    table = _table_of(target.rows.tables, tables, slot, BLOCK_T)
    line = target.hyper + table * HYPER
    slot = tl.where(tl.load(line + ACTIVE) != 0, slot, -1)
    hyper = Hyper(line[:, None], (slot >= 0)[:, None])
    places = locate(target.rows, slot, table, HAS_WIDE)
    w = load_rows(target.rows, places, D, BLOCK_D, HAS_WIDE)
    m0 = _load_moment(target.moment0, slot, D, BLOCK_D, KINDS[0])
    m1 = _load_moment(target.moment1, slot, D, BLOCK_D, KINDS[1])

    g = g * tl.load(target.inv_scale)
    if USES[MAX_GRAD_NORM]:
        g = limited(g, value(hyper, MAX_GRAD_NORM), BLOCK_D)
    if USES[L2]:
        l2 = value(hyper, L2)
        g = tl.where(l2 == 0, g, g + l2 * w)
    if USES[DECAY]:
        decay = value(hyper, DECAY)
        w = tl.where(decay == 0, w, w - decay * w)
    w, m0, m1 = RULE(w, m0, m1, g, hyper, D, BLOCK_D)
    # Beyond D a rule may have made 0 / 0 of it.
    w = tl.where(tl.arange(0, BLOCK_D)[None, :] < D, w, 0.0)
    if USES[MAX_NORM]:
        w = limited(w, value(hyper, MAX_NORM), BLOCK_D)

    store_rows(target.rows, places, w, tl.load(target.seeds + table), D, BLOCK_D, HAS_WIDE)
    _store_moment(target.moment0, m0, slot, D, BLOCK_D, KINDS[0])
    _store_moment(target.moment1, m1, slot, D, BLOCK_D, KINDS[1])


@triton.jit
def _table_of(entries, tables, slot, BLOCK_T: tl.constexpr):
    """Table ``[R]`` of each slot: how many tables start at or before it, but for one; 0 for slots below 0."""
    table = tl.full(slot.shape, -1, tl.int32)
    for t in range(0, tables, BLOCK_T):
        at = t + tl.arange(0, BLOCK_T)
        first = tl.load(entries + at * TABLE_ENTRY + FIRST_SLOT, mask=at < tables, other=0x7FFFFFFFFFFFFFFF)
        table += tl.sum((first[None, :] <= slot[:, None]).to(tl.int32), axis=1)
    return tl.maximum(table, 0)


@triton.jit
def _load_moment(moment, slot, D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr):
    """A moment of a tile of rows: ``[R]``, ``[R, BLOCK_D]``, or a zero where the rule has none."""
    if KIND == 1:
        return tl.load(moment + slot, mask=slot >= 0, other=0.0)
    elif KIND == 2:
        col = tl.arange(0, BLOCK_D)[None, :]
        return tl.load(moment + slot[:, None] * D + col, mask=(slot >= 0)[:, None] & (col < D), other=0.0)
    else:
        return 0.0


@triton.jit
def _store_moment(moment, value, slot, D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr):
    if KIND == 1:
        tl.store(moment + slot, value, mask=slot >= 0)
    elif KIND == 2:
        col = tl.arange(0, BLOCK_D)[None, :]
        tl.store(moment + slot[:, None] * D + col, value, mask=(slot >= 0)[:, None] & (col < D))
