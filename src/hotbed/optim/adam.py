"""Train tables with Adam and its variants: AdamW, row-wise Adam, and LAMB (Adam with a trust ratio)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.optim.base import SparseOptimizer
from hotbed.optim.rule import Moment, Rule, Steps, sqrt

FIRST = Moment("exp_avg", "element")
BETAS = ("beta1", "beta2")


class AdamBase(SparseOptimizer):
    """Base of optimizers that keep decaying means of g and g². It defines their options and checks."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        max_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model, {**options, "max_grad_norm": max_grad_norm, "max_norm": max_norm}, groups)

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        betas = group["betas"]
        numbers = isinstance(betas, (tuple, list)) and all(isinstance(b, (int, float)) for b in betas)
        if not numbers or len(betas) != 2 or not all(0 <= ctypes.c_float(b).value < 1 for b in betas):
            self.refuse(group, "betas", "two values in [0, 1) as float32")
        if not self.number(group, "eps") > 0:
            self.refuse(group, "eps", "a positive float32")

    @override
    def own(self, group: Mapping[str, Any]) -> list[float]:
        return [*map(float, group["betas"]), float(group["eps"]), *(float(group[n]) for n in self.rule.hyper[3:])]


def _direction(m: Tensor, v: Tensor, h: Mapping[str, Tensor]) -> Tensor:
    """Compute ``m̂ / (√v̂ + ε)`` with v ``[U, D]`` or ``[U, 1]``."""
    return m / h["1 - beta1^t"] / (sqrt(v / h["1 - beta2^t"]) + h["eps"])


def _adam_direction(moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor]) -> Tensor:
    """Update both moments and compute ``m̂ / (√v̂ + ε)``."""
    m, v = moments["exp_avg"], moments["exp_avg_sq"]
    m.copy_(h["beta1"] * m + (1 - h["beta1"]) * g)
    v.copy_(h["beta2"] * v + (1 - h["beta2"]) * (g * g))
    return _direction(m, v, h)


def _adam(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Tensor:
    return w - h["lr"] * _adam_direction(moments, g, h)


class Adam(AdamBase):
    """Adam on the rows that a batch uses.

    ``m ← β₁m + (1 − β₁)g``, ``v ← β₂v + (1 − β₂)g²``, ``w ← w − lr · m̂ / (√v̂ + ε)`` with ``m̂ = m / (1 − β₁ᵗ)`` and
    ``v̂ = v / (1 − β₂ᵗ)``. t counts the steps of the table.

    Source: Kingma and Ba 2015. The optimizer is *lazy*, as `torch.optim.SparseAdam` and FBGEMM's Adam are: m and v of a
    row decay only in steps that update the row, although t counts all steps. Dense Adam would decay m and v, and move
    the row, in every step.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate. It has no default.
    betas
        β₁ and β₂.
    eps
        ε, outside the root.
    weight_decay
        λ of ``g ← g + λ · w``. It applies to updated rows only. `AdamW` has decoupled weight decay.
    max_grad_norm, max_norm, groups
        See `SparseOptimizer`.
    """

    rule = Rule("adam", _adam, hyper=(*BETAS, "eps"), moments=(FIRST, Moment("exp_avg_sq", "element")), corrected=BETAS)


class AdamW(Adam):
    """`Adam` with decoupled weight decay: ``w ← w − lr · λ · w`` before the rule, for updated rows.

    Source: Loshchilov and Hutter 2019, as in `torch.optim.AdamW`. FBGEMM's Adam decays weights in the same way.

    Parameters
    ----------
    model, lr, betas, eps, max_grad_norm, max_norm, groups
        See `Adam`.
    weight_decay
        λ.
    """

    weight_decay_mode = "decoupled"

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
        max_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(
            model,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            max_norm=max_norm,
            groups=groups,
        )


def _partial_rowwise_adam(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Steps:
    m, v = moments["exp_avg"], moments["exp_avg_sq"]
    beta2 = h["beta2"][:, 0]
    m.copy_(h["beta1"] * m + (1 - h["beta1"]) * g)
    v.copy_(beta2 * v + (1 - beta2) * ((yield g * g) / dim))
    return w - h["lr"] * _direction(m, v[:, None], h)


class PartialRowWiseAdam(AdamBase):
    """`Adam` with one second moment per row: ``v ← β₂v + (1 − β₂) mean_d(g_d²)``.

    Source: FBGEMM's ``PARTIAL_ROWWISE_ADAM``. It saves nearly half of Adam's state. It is *lazy*, as `Adam` is.

    Parameters
    ----------
    model, lr, betas, eps, max_grad_norm, max_norm, groups
        See `Adam`.
    weight_decay
        λ of ``w ← w − lr · λ · w`` (decoupled, as in FBGEMM). It applies to updated rows only.
    """

    rule = Rule(
        "partial_rowwise_adam",
        _partial_rowwise_adam,
        hyper=(*BETAS, "eps"),
        moments=(FIRST, Moment("exp_avg_sq", "row")),
        corrected=BETAS,
    )
    weight_decay_mode = "decoupled"


def _lamb(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Steps:
    r = _adam_direction(moments, g, h) + h["weight_decay"] * w
    w_norm = sqrt((yield w * w))
    r_norm = sqrt((yield r * r))
    trust = torch.where((w_norm > 0) & (r_norm > 0), w_norm / r_norm, 1.0)
    return w - h["lr"] * trust[:, None] * r


class LAMB(AdamBase):
    """LAMB, which treats each row as a separate layer.

    ``r = m̂ / (√v̂ + ε) + λ · w``, ``w ← w − lr · (‖w‖ / ‖r‖) · r`` with m̂ and v̂ of `Adam`. The ratio is 1 if a norm
    is 0.

    Source: You et al. 2020, Algorithm 2 with φ the identity. Norms are per row, as in FBGEMM's ``LAMB``. The optimizer
    is *lazy*, as `Adam` is.

    Parameters
    ----------
    model, lr, betas, eps, max_grad_norm, max_norm, groups
        See `Adam`.
    weight_decay
        λ.
    """

    rule = Rule(
        "lamb",
        _lamb,
        hyper=(*BETAS, "eps", "weight_decay"),
        moments=(FIRST, Moment("exp_avg_sq", "element")),
        corrected=BETAS,
    )
    weight_decay_mode = "own"
