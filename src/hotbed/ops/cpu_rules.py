# pyright: basic, reportCallIssue=false
"""Apply an optimizer's rule to one row in place, in Numba. `hotbed.optim` has the definitions.

One compiled function has all rules and selects the rule at run time. One function per rule and dtype compiles 15 %
faster, but again for each further rule. One predictable branch per row costs almost no time (docs/decisions/cpu.md).
"""

from __future__ import annotations

import numpy as np

from hotbed.ops.cpu_runtime import kernel
from hotbed.ops.cpu_sums import sum_of_products
from hotbed.ops.layout import BLOCK, DECAY, L2, LR, MAX_GRAD_NORM, MAX_NORM, OWN

SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB, FTRL = range(8)
RULES = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "adagrad": ADAGRAD,
    "rowwise_adagrad": ROWWISE_ADAGRAD,
    "adam": ADAM,
    "partial_rowwise_adam": PARTIAL_ROWWISE_ADAM,
    "lamb": LAMB,
    "ftrl": FTRL,
}


TILE = 16
"""Number of rows of one table that are updated together."""


@kernel()
def has_no_options(h):
    """Return whether a table has no limits of norms and no weight decay, so that only the rule is applied."""
    return h[MAX_GRAD_NORM] == np.inf and h[L2] == 0 and h[DECAY] == 0 and h[MAX_NORM] == np.inf


@kernel(inline="always")
def rowwise_adagrad_steps(steps, m0, stride, slots, sums, dim, h, means):
    """Update the moments of up to `TILE` slots by their summed gradients ``[TILE · padded dim]``, or by mean squares.

    The moment of a slot is ``m0[slot · stride]``. The first row of ``steps [3, TILE]`` gets the factors of the summed
    gradients. The other rows are scratch space. The bits equal the bits of `apply_rule` for each row. Square roots and
    divisions of a tile are vectorized.
    """
    before, after = steps[1], steps[2]
    width = sums.shape[0] // TILE
    for k in range(slots.shape[0]):
        before[k] = m0[slots[k] * stride]
        if means.shape[0]:
            after[k] = means[k]
        else:
            after[k] = sum_of_products(sums, k * width, sums, k * width, width // BLOCK)
    columns = np.float32(1) if means.shape[0] else np.float32(dim)
    lr, eps, inside, share, delayed = h[LR], h[OWN], h[OWN + 1], h[OWN + 2], h[OWN + 3]
    for k in range(TILE):
        after[k] = before[k] + after[k] / columns
        v = after[k] if delayed == 0 else before[k]
        steps[0, k] = lr / (np.sqrt(v / share + inside) + eps)
    for k in range(slots.shape[0]):
        m0[slots[k] * stride] = after[k]


@kernel(inline="always")
def apply_rule(rule, w, m0, m1, g, h, scratch, means):
    """Update a row by one step.

    ``w`` is the row. ``m0`` and ``m1`` are its moments with one or ``dim`` values. ``g`` is the summed gradient,
    zero-padded to whole blocks; it is overwritten. ``h`` is the table's row of `RuleStep.hyper`. ``scratch`` has the
    length of ``g`` and is zero beyond ``dim``. ``means`` has the mean square of ``g`` in arenas with column shards.

    For example, row-wise AdaGrad with learning rate 0.1 and ε = 0::

        w [1, 1], m0 [0], g [3, 4]   →   m0 [12.5] = mean of 9 and 16
                                         w [0.915, 0.887] = 1 − 0.1 / √12.5 · g
    """
    dim = w.shape[0]
    blocks = g.shape[0] // BLOCK
    lr = h[LR]
    if h[MAX_GRAD_NORM] < np.inf:
        norm = np.sqrt(sum_of_products(g, 0, g, 0, blocks))
        if norm > h[MAX_GRAD_NORM]:
            factor = h[MAX_GRAD_NORM] / norm
            for d in range(dim):
                g[d] *= factor
    if h[L2] != 0:
        for d in range(dim):
            g[d] += h[L2] * w[d]
    if h[DECAY] != 0:
        for d in range(dim):
            w[d] -= h[DECAY] * w[d]

    if rule == SGD:
        for d in range(dim):
            w[d] -= lr * g[d]
    elif rule == MOMENTUM:
        for d in range(dim):
            m0[d] = h[OWN] * m0[d] + g[d]
            w[d] -= lr * m0[d]
    elif rule == ADAGRAD:
        for d in range(dim):
            m0[d] += g[d] * g[d]
            w[d] -= lr * g[d] / (np.sqrt(m0[d]) + h[OWN])
    elif rule == ROWWISE_ADAGRAD:
        before = m0[0]
        m0[0] += means[0] if means.shape[0] else sum_of_products(g, 0, g, 0, blocks) / np.float32(dim)
        v = m0[0] if h[OWN + 3] == 0 else before
        step = lr / (np.sqrt(v / h[OWN + 2] + h[OWN + 1]) + h[OWN])
        for d in range(dim):
            w[d] -= step * g[d]
    elif rule == FTRL:
        _ftrl(w, m0, m1, g, lr, h[OWN], h[OWN + 1], h[OWN + 2])
    else:
        corrections = OWN + 4 if rule == LAMB else OWN + 3
        _adam_direction(rule == PARTIAL_ROWWISE_ADAM, dim, m0, m1, g, h, h[corrections], h[corrections + 1])
        if rule == LAMB:
            for d in range(dim):
                g[d] += h[OWN + 3] * w[d]
            r_norm = np.sqrt(sum_of_products(g, 0, g, 0, blocks))
            w_norm = _norm(w, scratch)
            lr *= w_norm / r_norm if w_norm > 0 and r_norm > 0 else np.float32(1)
        for d in range(dim):
            w[d] -= lr * g[d]

    if h[MAX_NORM] < np.inf:
        norm = _norm(w, scratch)
        if norm > h[MAX_NORM]:
            factor = h[MAX_NORM] / norm
            for d in range(dim):
                w[d] *= factor


@kernel()
def _norm(w, scratch):
    for d in range(w.shape[0]):
        scratch[d] = w[d]
    return np.sqrt(sum_of_products(scratch, 0, scratch, 0, scratch.shape[0] // BLOCK))


@kernel()
def _adam_direction(per_row, dim, m, v, g, h, correction1, correction2):
    """Overwrite ``g`` with ``m̂ / (√v̂ + ε)``."""
    beta1, beta2, eps = h[OWN], h[OWN + 1], h[OWN + 2]
    one = np.float32(1)
    if per_row:
        square = sum_of_products(g, 0, g, 0, g.shape[0] // BLOCK) / np.float32(dim)
        v[0] = beta2 * v[0] + (one - beta2) * square
        denominator = np.sqrt(v[0] / correction2) + eps
        for d in range(dim):
            m[d] = beta1 * m[d] + (one - beta1) * g[d]
            g[d] = m[d] / correction1 / denominator
        return
    for d in range(dim):
        m[d] = beta1 * m[d] + (one - beta1) * g[d]
        v[d] = beta2 * v[d] + (one - beta2) * (g[d] * g[d])
        g[d] = m[d] / correction1 / (np.sqrt(v[d] / correction2) + eps)


@kernel()
def _ftrl(w, z, n, g, lr, beta, l1, l2):
    for d in range(w.shape[0]):
        grown = n[d] + g[d] * g[d]
        sigma = (np.sqrt(grown) - np.sqrt(n[d])) / lr
        z[d] += g[d] - sigma * w[d]
        n[d] = grown
        if np.abs(z[d]) <= l1:
            w[d] = 0
        else:
            shrunk = np.copysign(l1, z[d]) - z[d]
            w[d] = shrunk / ((beta + np.sqrt(grown)) / lr + l2)
