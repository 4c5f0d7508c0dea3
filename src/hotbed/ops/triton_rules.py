# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Apply an optimizer's rule to a tile of rows in Triton: load rows and moments, compute, round, store.

A rule is a pure function of a tile of ``R`` rows::

    w, m0, m1 = rule(w, m0, m1, g, hyper, D, BLOCK_D)

``w`` and ``g`` are ``[R, BLOCK_D]`` and zero beyond column ``D``. ``m0`` and ``m1`` are the rule's moments, ``[R]`` per
row or ``[R, BLOCK_D]`` per element. A rule returns unused moments unchanged. `value` reads the hyperparameters of each
row. The rule's own hyperparameters begin at ``OWN``, and the bias corrections follow them. The caller loads, stores and
masks. To add an optimizer, write its function and list it in `RULES`.

Divisions and roots are correctly rounded (`_div`, ``sqrt_rn``). Each statement adds in the order of `hotbed.optim`.

`apply` runs a whole step in the order of `hotbed.ops.reference.apply_rule`. Operations that no table uses are excluded
at compile time. The hyperparameters of each table control the other operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import no_kernel
from hotbed.ops.layout import Rows, RuleStep
from hotbed.ops.triton_rows import load_rows, numbered, row_pointers, store_rows
from hotbed.ops.triton_runtime import (
    ACTIVE,
    BLOCK,
    DECAY,
    L2,
    LR,
    MAX_GRAD_NORM,
    MAX_NORM,
    OWN,
)
from hotbed.optim import COMMON


class Hyper(NamedTuple):
    """Hyperparameters of the rows of a tile, ``[R, 1]`` each."""

    line: Any  # pointer to each row's entry of `RuleStep.hyper`
    live: Any  # whether the row exists
    active: Any  # whether the row is updated


@triton.jit
def value(hyper, column):
    """Return one hyperparameter of each row ``[R, 1]``. It is 1 for inactive rows, so that none divides by 0."""
    return tl.where(hyper.active, tl.load(hyper.line + column, mask=hyper.live, other=1.0), 1.0)


@triton.jit
def block_sums(x, BLOCK_D: tl.constexpr):
    """Sum each block of 16 columns with a halving tree, ``[R, BLOCK_D] → [R, BLOCK_D / 16]``.

    Each reduction adds exactly two values, so the compiler cannot choose the order of additions.
    """
    R: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = BLOCK_D // BLOCK
    x = tl.reshape(x, [R, BLOCKS, 2, 8])
    x = tl.reshape(tl.sum(x, axis=2), [R, BLOCKS, 2, 4])
    x = tl.reshape(tl.sum(x, axis=2), [R, BLOCKS, 2, 2])
    x = tl.reshape(tl.sum(x, axis=2), [R, BLOCKS, 2])
    return tl.sum(x, axis=2)


@triton.jit
def block_sum(x, BLOCK_D: tl.constexpr):
    """Sum columns, ``[R, BLOCK_D] → [R]``: `block_sums`, then the blocks in column order.

    Each reduction in this function selects one value.
    """
    BLOCKS: tl.constexpr = BLOCK_D // BLOCK
    x = block_sums(x, BLOCK_D)
    at = tl.arange(0, BLOCKS)[None, :]
    total = tl.sum(tl.where(at == 0, x, 0.0), axis=1)
    for b in tl.static_range(1, BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        total = total + tl.sum(tl.where(at == b, x, 0.0), axis=1)
    return total


@triton.jit
def norm(x, BLOCK_D: tl.constexpr):
    """Return ``‖x‖`` of each row ``[R, 1]``."""
    return tl.sqrt_rn(block_sum(x * x, BLOCK_D))[:, None]


@triton.jit
def _div(x, y):
    """Return ``x / y``, correctly rounded, after broadcasting."""
    x, y = tl.broadcast(x, y)
    return tl.div_rn(x, y)


@triton.jit
def _ratio(x, y, where):
    """Return ``x / y`` where ``where`` is set, and 1 elsewhere."""
    return _div(tl.where(where, x, 1.0), tl.where(where, y, 1.0))


@triton.jit
def limited(x, limit, BLOCK_D: tl.constexpr):
    """Scale rows down to norms of at most ``limit [R, 1]``."""
    length = norm(x, BLOCK_D)
    return x * _ratio(limit, length, length > limit)


@triton.jit
def _mean_square(g, D: tl.constexpr, BLOCK_D: tl.constexpr):
    square = block_sum(g * g, BLOCK_D)
    return tl.div_rn(square, tl.full(square.shape, D, tl.float32))


@triton.jit
def _sgd(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``w ← w − lr · g``."""
    lr = value(hyper, LR)
    return w - lr * g, m0, m1


@triton.jit
def _momentum(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``m ← μ · m + g``, ``w ← w − lr · m``."""
    lr = value(hyper, LR)
    m = value(hyper, OWN) * m0 + g
    return w - lr * m, m, m1


@triton.jit
def _adagrad(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``v ← v + g²``, ``w ← w − lr · g / (√v + ε)``."""
    lr = value(hyper, LR)
    v = m0 + g * g
    return w - _div(lr * g, tl.sqrt_rn(v) + value(hyper, OWN)), v, m1


@triton.jit
def _rowwise_adagrad(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``v ← v + mean_d(g_d²)``, ``w ← w − lr / (√(v / c + ε_inside) + ε) · g``, with the old v if delayed."""
    lr = value(hyper, LR)
    v = m0 + _mean_square(g, D, BLOCK_D)
    return _descended(w, lr, m0, v, g, hyper), v, m1


@triton.jit
def _rowwise_adagrad_by_mean(w, m0, mean, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute `_rowwise_adagrad` with a given ``mean_d(g_d²) [R]`` over all column shards."""
    lr = value(hyper, LR)
    v = m0 + mean
    return _descended(w, lr, m0, v, g, hyper), v, mean


@triton.jit
def _descended(w, lr, before, after, g, hyper):
    """Return ``w − lr / (√(v / c + ε_inside) + ε) · g`` with v ``[R]`` from before or after the step."""
    used = tl.where(value(hyper, OWN + 3) == 0, after[:, None], before[:, None])
    root = tl.sqrt_rn(_div(used, value(hyper, OWN + 2)) + value(hyper, OWN + 1))
    return w - _div(lr, root + value(hyper, OWN)) * g


@triton.jit
def _direction(m, v, hyper, CORRECTIONS: tl.constexpr):
    """Return ``m̂ / (√v̂ + ε)``, with bias correction of m ``[R, BLOCK_D]`` and v ``[R, BLOCK_D]`` or ``[R, 1]``."""
    first = _div(m, value(hyper, CORRECTIONS))
    return _div(first, tl.sqrt_rn(_div(v, value(hyper, CORRECTIONS + 1))) + value(hyper, OWN + 2))


@triton.jit
def _decayed(m, beta, x):
    """Return ``β · m + (1 − β) · x``."""
    return beta * m + (1 - beta) * x


@triton.jit
def _adam(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``m ← β₁m + (1 − β₁)g``, ``v ← β₂v + (1 − β₂)g²``, ``w ← w − lr · m̂ / (√v̂ + ε)``."""
    lr = value(hyper, LR)
    m = _decayed(m0, value(hyper, OWN), g)
    v = _decayed(m1, value(hyper, OWN + 1), g * g)
    return w - lr * _direction(m, v, hyper, OWN + 3), m, v


@triton.jit
def _partial_rowwise_adam(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute `_adam` with ``v ← β₂v + (1 − β₂) mean_d(g_d²)``."""
    lr = value(hyper, LR)
    m = _decayed(m0, value(hyper, OWN), g)
    v = _decayed(m1[:, None], value(hyper, OWN + 1), _mean_square(g, D, BLOCK_D)[:, None])
    return w - lr * _direction(m, v, hyper, OWN + 3), m, tl.reshape(v, m1.shape)


@triton.jit
def _lamb(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``r = m̂ / (√v̂ + ε) + λ · w``, ``w ← w − lr · (‖w‖ / ‖r‖) · r``."""
    lr = value(hyper, LR)
    m = _decayed(m0, value(hyper, OWN), g)
    v = _decayed(m1, value(hyper, OWN + 1), g * g)
    r = _direction(m, v, hyper, OWN + 4) + value(hyper, OWN + 3) * w
    w_norm, r_norm = norm(w, BLOCK_D), norm(r, BLOCK_D)
    trust = _ratio(w_norm, r_norm, (w_norm > 0) & (r_norm > 0))
    return w - lr * trust * r, m, v


@triton.jit
def _ftrl(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute ``z ← z + (g − (√(n + g²) − √n) / lr · w)``, then ``w`` from z and n."""
    lr = value(hyper, LR)
    beta, l1, l2 = value(hyper, OWN), value(hyper, OWN + 1), value(hyper, OWN + 2)
    n = m1 + g * g
    z = m0 + (g - _div(tl.sqrt_rn(n) - tl.sqrt_rn(m1), lr) * w)
    shrunk = tl.where(z < 0, -l1, l1) - z
    return tl.where(tl.abs(z) <= l1, 0.0, _div(shrunk, _div(beta + tl.sqrt_rn(n), lr) + l2)), z, n


RULES: dict[str, Any] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "partial_rowwise_adam": _partial_rowwise_adam,
    "lamb": _lamb,
    "ftrl": _ftrl,
}


# -- a whole step ----------------------------------------------------------------------------------------------------


_NONE, _PER_ROW, _PER_ELEMENT, _PER_GROUP = 0, 1, 2, 3


class Target(NamedTuple):
    """Tensors that a step updates, and its inputs."""

    rows: Any  # RowPointers
    moment0: Any  # [S], [S, D] or unused
    moment1: Any  # like moment0; or the mean squares by group, for row-wise AdaGrad with column shards
    hyper: Any  # [T, HYPER]
    seeds: Any  # [T]
    inv_scale: Any
    gate: Any


def target_of(step: RuleStep, rows: Rows, state: Mapping[str, Tensor]) -> tuple[Target, dict[str, Any]]:
    """Return the arguments of `apply`: the pointers, and the compile-time constants."""
    if step.rule.name not in RULES:
        raise no_kernel(step.rule, "triton", RULES)
    unused = 2 - len(step.rule.moments)
    moments = [state[moment.name] for moment in step.rule.moments] + [step.hyper] * unused
    kinds = [_PER_ROW if moment.per == "row" else _PER_ELEMENT for moment in step.rule.moments] + [_NONE] * unused
    rule = RULES[step.rule.name]
    if step.mean_squares is not None:
        rule, moments[1], kinds[1] = _rowwise_adagrad_by_mean, step.mean_squares, _PER_GROUP
    pointers = Target(row_pointers(rows), *moments, step.hyper, step.seeds, step.inv_scale, step.gate)
    return pointers, {
        "RULE": rule,
        "USES": tuple(name in step.uses for name in ("active", *COMMON)),
        "HYPER": step.hyper.shape[1],
        "KINDS": tuple(kinds),
        "HAS_WIDE": len(rows.wide) > 0,
    }


@triton.jit
def apply(
    target,
    slot,  # [R]; −1: no slot
    table,  # [R]
    number,  # [R], see `place_number`; unused if all rows are float32
    group,  # [R]; unused if no moment is by group
    g,  # [R, BLOCK_D] summed gradient, zero beyond D
    RULE: tl.constexpr,
    USES: tl.constexpr,  # by column of hyper
    HYPER: tl.constexpr,
    KINDS: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Apply the rule to the slots of active tables.

    For example, a tile has slots 3, −1, 7. Their tables start at slots 0 and 5, and only the second table is active::

        table [0, 0, 1]: rows of slots 3 and 7 are loaded, slot [−1, −1, 7]: one is updated and stored

    Rows are loaded before the kernel knows which tables are active, so that the loads do not wait for another load.
    """
    line = target.hyper + table * HYPER
    active = tl.load(line + ACTIVE, mask=slot >= 0, other=0.0) != 0
    hyper = Hyper(line[:, None], (slot >= 0)[:, None], active[:, None])
    places = numbered(target.rows, slot, table, number, HAS_WIDE)
    w = load_rows(target.rows, places, D, BLOCK_D, HAS_WIDE)
    m0 = _load_moment(target.moment0, slot, D, BLOCK_D, KINDS[0])
    m1 = _load_moment(target.moment1, slot if KINDS[1] != 3 else tl.where(slot >= 0, group, -1), D, BLOCK_D, KINDS[1])

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
    # Beyond column D, a rule may have computed 0 / 0.
    w = tl.where(tl.arange(0, BLOCK_D)[None, :] < D, w, 0.0)
    if USES[MAX_NORM]:
        w = limited(w, value(hyper, MAX_NORM), BLOCK_D)

    slot = tl.where(active, slot, -1)
    store_rows(target.rows, places, active, w, tl.load(target.seeds + table), D, BLOCK_D, HAS_WIDE)
    _store_moment(target.moment0, m0, slot, D, BLOCK_D, KINDS[0])
    _store_moment(target.moment1, m1, slot, D, BLOCK_D, KINDS[1])


@triton.jit
def _load_moment(moment, slot, D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr):
    """Load a moment of a tile of rows: ``[R]``, ``[R, BLOCK_D]``, or 0 if the rule does not have it."""
    if KIND == 1 or KIND == 3:
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
