# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""The optimizers' formulas in Triton: what happens to a row once its gradient is summed.

A rule is a pure function of a tile of ``R`` rows::

    w, m0, m1 = rule(w, m0, m1, g, hyper, D, BLOCK_D)

``w`` and ``g`` are ``[R, BLOCK_D]``, zero beyond column ``D``; ``m0``, ``m1`` are the rule's moments, ``[R]`` per row
or ``[R, BLOCK_D]`` per element (what a rule does not have is passed through); ``hyper`` ``[R]`` points at each row's
line of hyperparameters, entry 0 being the table's "active" flag. Loading, storing and masking is the caller's. To add
an optimizer, write its function and list it in `RULES`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hotbed.ops import layout

_BLOCK = tl.constexpr(layout.BLOCK)


@triton.jit
def block_sum(x, BLOCK_D: tl.constexpr):
    """``[R, BLOCK_D] → [R]``: a halving tree inside each block of 16 columns, then the blocks in column order.

    Each reduction but the last adds exactly two values, and the last picks one, so the order of additions is written
    here and not left to the compiler.
    """
    R: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = BLOCK_D // _BLOCK
    x = tl.reshape(x, [R, BLOCKS, 2, 8])
    x = tl.reshape(tl.sum(x, axis=2), [R, BLOCKS, 2, 4])
    x = tl.reshape(tl.sum(x, axis=2), [R, BLOCKS, 2, 2])
    x = tl.reshape(tl.sum(x, axis=2), [R, BLOCKS, 2])
    x = tl.sum(x, axis=2)
    at = tl.arange(0, BLOCKS)[None, :]
    total = tl.sum(tl.where(at == 0, x, 0.0), axis=1)
    for b in tl.static_range(1, BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        total = total + tl.sum(tl.where(at == b, x, 0.0), axis=1)
    return total


@triton.jit
def _sgd(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``w ← w − lr · g``."""
    lr = tl.load(hyper + 1)
    return w - lr[:, None] * g, m0, m1


@triton.jit
def _rowwise_adagrad(w, m0, m1, g, hyper, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``v ← v + mean_d(g_d²)``, ``w ← w − lr · g / (√v + ε)``."""
    lr = tl.load(hyper + 1)
    eps = tl.load(hyper + 2)
    square = block_sum(g * g, BLOCK_D)
    v = m0 + tl.div_rn(square, tl.full(square.shape, D, tl.float32))
    step = tl.div_rn(lr, tl.sqrt_rn(v) + eps)
    return w - step[:, None] * g, v, m1


RULES: dict[str, Any] = {"sgd": _sgd, "rowwise_adagrad": _rowwise_adagrad}
