"""Train tables with FTRL (follow the regularized leader)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.optim.base import SparseOptimizer
from hotbed.optim.rule import Moment, Rule, sqrt


def _ftrl(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Tensor:
    z, n = moments["z"], moments["n"]
    grown = n + g * g
    sigma = (sqrt(grown) - sqrt(n)) / h["lr"]
    z.copy_(z + (g - sigma * w))
    n.copy_(grown)
    shrunk = torch.copysign(h["l1"].expand_as(z), z) - z
    return torch.where(z.abs() <= h["l1"], 0.0, shrunk / ((h["beta"] + sqrt(grown)) / h["lr"] + h["l2"]))


class FTRL(SparseOptimizer):
    """FTRL-Proximal: sparse weights for linear and wide parts.

    ``σ = (√(n + g²) − √n) / lr``, ``z ← z + g − σ · w``, ``n ← n + g²``. Then ``w = 0`` where ``|z| ≤ λ₁``, and
    ``w = (sgn(z) · λ₁ − z) / ((β + √n) / lr + λ₂)`` elsewhere.

    Source: McMahan et al. 2013, Algorithm 1. A weight is a function of z and n. Therefore the initial value of a row
    matters only in the first σ; use `Table(init_bound=0)`. With ``init_bound=0`` and a constant lr, FTRL equals its
    dense form, because a zero gradient changes nothing. Otherwise even a zero gradient changes the weights of a row.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        α of the paper. It has no default. A weight depends on the current α, so a schedule of α rescales the weights. A
        step with lr 0 is skipped.
    beta
        β.
    l1, l2
        λ₁ and λ₂.
    initial_accumulator
        Initial value of every n.
    max_grad_norm, groups
        See `SparseOptimizer`.
    """

    rule = Rule(
        "ftrl",
        _ftrl,
        hyper=("beta", "l1", "l2"),
        moments=(Moment("z", "element"), Moment("n", "element", "initial_accumulator")),
    )

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator: float = 0.0,
        max_grad_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        options = {"lr": lr, "beta": beta, "l1": l1, "l2": l2, "initial_accumulator": initial_accumulator}
        super().__init__(model, {**options, "max_grad_norm": max_grad_norm}, groups)

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not self.number(group, "lr") > 0:
            self.refuse(group, "lr", "a positive float32")

    @override
    def trains(self, group: Mapping[str, Any]) -> bool:
        return float(group["lr"]) > 0
