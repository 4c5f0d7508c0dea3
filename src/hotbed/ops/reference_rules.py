"""Define every optimizer's rule: what happens to rows once their gradients are summed, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator

import torch
from torch import Tensor

from hotbed.ops.layout import BLOCK, DECAY, L2, LR, MAX_GRAD_NORM, MAX_NORM, OWN
from hotbed.optim import COMMON, Rule

Steps = Generator[Tensor, Tensor, Tensor]
"""Yields what is to be summed over the columns of each row ``[U, cols]``, is sent the sums ``[U]``, returns rows."""


def apply_rule(rule: Rule, w: Tensor, moments: dict[str, Tensor], g: Tensor, hyper: Tensor) -> Tensor:
    """One step of some rows.

    In this order: ``g ← g · min(1, max_grad_norm / ‖g‖)``; ``g ← g + l2 · w``; ``w ← w − decay · w``; the rule;
    ``w ← w · min(1, max_norm / ‖w‖)``. Each line is left out where its hyperparameter is off (∞, 0).

    Parameters
    ----------
    rule
        Which formula.
    w
        Rows ``[U, D]`` float32.
    moments
        Of these rows, by name, ``[U]`` or ``[U, D]``; updated in place.
    g
        Summed gradients ``[U, D]``.
    hyper
        ``[U, 6 + H + C]``: each row's line of `RuleStep.hyper`.

    Returns
    -------
    Tensor
        The new rows ``[U, D]`` float32.
    """
    steps = rule_steps(rule, w, moments, g, hyper, w.shape[1])
    sums = None
    while True:
        try:
            sums = block_sum(next(steps) if sums is None else steps.send(sums))
        except StopIteration as end:
            return end.value


def rule_steps(
    rule: Rule,
    w: Tensor,
    moments: dict[str, Tensor],
    g: Tensor,
    hyper: Tensor,
    dim: int,
    uses: Collection[str] = COMMON,
) -> Steps:
    """`apply_rule` in steps, for rows of which only some columns are here: sums over columns are left to the caller.

    Parameters
    ----------
    rule, w, moments, g, hyper
        As in `apply_rule`, of the columns that are here.
    dim
        Columns of whole rows.
    uses
        As in `RuleStep`; norms that are not limited are not asked for.
    """
    if "max_grad_norm" in uses:
        g = yield from _limited(g, hyper[:, MAX_GRAD_NORM])
    l2, decay = hyper[:, L2, None], hyper[:, DECAY, None]
    g = torch.where(l2 == 0, g, g + l2 * w)
    w = torch.where(decay == 0, w, w - decay * w)
    own = [moments[m.name] for m in rule.moments]
    w = yield from _RULES[rule.name](w, own, g, hyper[:, LR, None], hyper[:, OWN:, None], dim)
    if "max_norm" in uses:
        w = yield from _limited(w, hyper[:, MAX_NORM])
    return w


def sums_rows(rule: Rule, uses: Collection[str]) -> bool:
    """Whether `rule_steps` sums over columns."""
    return rule.name in _SUMMING or not {"max_grad_norm", "max_norm"}.isdisjoint(uses)


def block_sum(x: Tensor) -> Tensor:
    """Sum over the last dim ``D``: halving trees inside blocks of `BLOCK` columns, then the blocks in column order."""
    return sum_of_blocks(blocks_of(x))


def blocks_of(x: Tensor) -> Tensor:
    """Sums of blocks of `BLOCK` columns ``[…, ⌈D / 16⌉]``, by halving trees."""
    if x.shape[-1] % BLOCK:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    x = x.unflatten(-1, (-1, BLOCK))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_of_blocks(blocks: Tensor) -> Tensor:
    """Sum of the blocks of each row, in column order."""
    total = blocks[..., 0]
    for b in range(1, blocks.shape[-1]):
        total = total + blocks[..., b]
    return total


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of float32; ``torch.sqrt`` is not on every CPU."""
    return x.double().sqrt().float()


def _limited(x: Tensor, limit: Tensor) -> Steps:
    """Rows ``[U, D]`` scaled down to norms of at most ``limit [U]``; the others as they are."""
    norm = sqrt((yield x * x))
    return torch.where((norm > limit)[:, None], x * (limit / norm)[:, None], x)


def _sgd(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    return w - lr * g


def _momentum(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    (m,) = moments
    m.copy_(own[:, 0] * m + g)
    return w - lr * m


def _adagrad(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    (v,) = moments
    v.add_(g * g)
    return w - lr * g / (sqrt(v) + own[:, 0])


def _rowwise_adagrad(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor, dim: int) -> Steps:
    (v,) = moments
    before = v.clone()
    v.add_((yield g * g) / dim)
    return w - rowwise_step_size(before[:, None], v[:, None], lr, own) * g


def rowwise_step_size(before: Tensor, after: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    """``lr / (√(v / c + ε_inside) + ε)``, v from after the step, or from before it where ``delayed``.

    ``own [U, 4, …]`` are the rule's own hyperparameters; the others are ``[U, …]``.
    """
    eps, eps_inside, scale, delayed = own.unbind(1)
    v = torch.where(delayed == 0, after, before)
    return lr / (sqrt(v / scale + eps_inside) + eps)


def _adam(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor, dim: int) -> Steps:
    direction = yield from _adam_direction(moments, g, own, own[:, 3:], dim)
    return w - lr * direction


def _lamb(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor, dim: int) -> Steps:
    r = (yield from _adam_direction(moments, g, own, own[:, 4:], dim)) + own[:, 3] * w
    w_norm = sqrt((yield w * w))
    r_norm = sqrt((yield r * r))
    trust = torch.where((w_norm > 0) & (r_norm > 0), w_norm / r_norm, 1.0)
    return w - lr * trust[:, None] * r


def _adam_direction(moments: list[Tensor], g: Tensor, own: Tensor, corrections: Tensor, dim: int) -> Steps:
    """``m̂ / (√v̂ + ε)``; v is per element or per row."""
    m, v = moments
    beta1, beta2, eps = own[:, 0], own[:, 1], own[:, 2]
    m.copy_(beta1 * m + (1 - beta1) * g)
    if v.dim() == 1:
        v.copy_(beta2[:, 0] * v + (1 - beta2[:, 0]) * ((yield g * g) / dim))
        v = v[:, None]
    else:
        v.copy_(beta2 * v + (1 - beta2) * (g * g))
    return m / corrections[:, 0] / (sqrt(v / corrections[:, 1]) + eps)


def _ftrl(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    z, n = moments
    beta, l1, l2 = own[:, 0], own[:, 1], own[:, 2]
    grown = n + g * g
    sigma = (sqrt(grown) - sqrt(n)) / lr
    z.copy_(z + (g - sigma * w))
    n.copy_(grown)
    shrunk = torch.copysign(l1.expand_as(z), z) - z
    return torch.where(z.abs() <= l1, 0.0, shrunk / ((beta + sqrt(grown)) / lr + l2))


_Elementwise = Callable[[Tensor, list[Tensor], Tensor, Tensor, Tensor], Tensor]


def _steps(formula: _Elementwise) -> Callable[[Tensor, list[Tensor], Tensor, Tensor, Tensor, int], Steps]:
    """A rule that sums nothing, as one that does."""

    def steps(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor, dim: int) -> Steps:
        yield from ()
        return formula(w, moments, g, lr, own)

    return steps


_RULES: dict[str, Callable[[Tensor, list[Tensor], Tensor, Tensor, Tensor, int], Steps]] = {
    "sgd": _steps(_sgd),
    "momentum": _steps(_momentum),
    "adagrad": _steps(_adagrad),
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "ftrl": _steps(_ftrl),
}
_SUMMING = ("rowwise_adagrad", "partial_rowwise_adam", "lamb")
