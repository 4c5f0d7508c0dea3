"""The definition of every optimizer's rule: what happens to rows once their gradients are summed, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotbed.ops.layout import BLOCK, DECAY, L2, LR, MAX_GRAD_NORM, MAX_NORM, OWN
from hotbed.optim import Rule


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
    g = _limited(g, hyper[:, MAX_GRAD_NORM])
    l2, decay = hyper[:, L2, None], hyper[:, DECAY, None]
    g = torch.where(l2 == 0, g, g + l2 * w)
    w = torch.where(decay == 0, w, w - decay * w)
    w = _RULES[rule.name](w, [moments[m.name] for m in rule.moments], g, hyper[:, LR, None], hyper[:, OWN:, None])
    return _limited(w, hyper[:, MAX_NORM])


def block_sum(x: Tensor) -> Tensor:
    """Sum over the last dim ``D``: halving trees inside blocks of `BLOCK` columns, then the blocks in column order."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    total = x[..., 0, 0]
    for b in range(1, x.shape[-2]):
        total = total + x[..., b, 0]
    return total


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of float32; ``torch.sqrt`` is not on every CPU."""
    return x.double().sqrt().float()


def _limited(x: Tensor, limit: Tensor) -> Tensor:
    """Rows ``[U, D]`` scaled down to norms of at most ``limit [U]``; the others as they are."""
    norm = sqrt(block_sum(x * x))
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


def _rowwise_adagrad(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    (v,) = moments
    v.add_(block_sum(g * g) / g.shape[1])
    return w - lr / (sqrt(v[:, None]) + own[:, 0]) * g


def _adam(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    return w - lr * _adam_direction(moments, g, own, corrections=own[:, 3:])


def _lamb(w: Tensor, moments: list[Tensor], g: Tensor, lr: Tensor, own: Tensor) -> Tensor:
    r = _adam_direction(moments, g, own, corrections=own[:, 4:]) + own[:, 3] * w
    w_norm, r_norm = sqrt(block_sum(w * w)), sqrt(block_sum(r * r))
    trust = torch.where((w_norm > 0) & (r_norm > 0), w_norm / r_norm, 1.0)
    return w - lr * trust[:, None] * r


def _adam_direction(moments: list[Tensor], g: Tensor, own: Tensor, corrections: Tensor) -> Tensor:
    """``m̂ / (√v̂ + ε)``; v is per element or per row."""
    m, v = moments
    beta1, beta2, eps = own[:, 0], own[:, 1], own[:, 2]
    m.copy_(beta1 * m + (1 - beta1) * g)
    if v.dim() == 1:
        v.copy_(beta2[:, 0] * v + (1 - beta2[:, 0]) * (block_sum(g * g) / g.shape[1]))
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


_RULES: dict[str, Callable[[Tensor, list[Tensor], Tensor, Tensor, Tensor], Tensor]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "ftrl": _ftrl,
}
