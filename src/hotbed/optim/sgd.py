"""Train tables by gradient descent, plain and with momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from hotbed.optim.base import SparseOptimizer
from hotbed.optim.rule import Moment, Rule


def _sgd(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Tensor:
    return w - h["lr"] * g


def _momentum(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Tensor:
    m = moments["momentum_buffer"]
    m.copy_(h["momentum"] * m + g)
    return w - h["lr"] * m


PLAIN = Rule("sgd", _sgd)
MOMENTUM = Rule("momentum", _momentum, hyper=("momentum",), moments=(Moment("momentum_buffer", "element"),))


class SGD(SparseOptimizer):
    """Gradient descent: ``w ← w − lr · g``; with momentum ``m ← μ · m + g``, ``w ← w − lr · m``.

    Source: `torch.optim.SGD` (dampening 0). Lazy: the momentum of a row that a batch does not touch neither decays
    nor moves the row. Without momentum in any group there is no state beside the rows.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate; there is no default.
    momentum
        μ.
    weight_decay
        λ of ``g ← g + λ · w``, for touched rows.
    max_grad_norm, max_norm, groups
        As for every `SparseOptimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        max_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.rule = self.rule_for({"momentum": momentum, "groups": groups})
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(model, {**options, "max_grad_norm": max_grad_norm, "max_norm": max_norm}, groups)

    @classmethod
    @override
    def rule_for(cls, options: Mapping[str, Any]) -> Rule:
        groups: Sequence[Mapping[str, Any]] = options.get("groups") or ()
        return MOMENTUM if options.get("momentum") or any(group.get("momentum") for group in groups) else PLAIN

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if self.rule is PLAIN and self.number(group, "momentum") > 0:
            self.refuse(
                group,
                "momentum",
                "it was 0 when the optimizer was made, which therefore keeps no momentum; give it to the constructor "
                "(a OneCycleLR sets it unless cycle_momentum=False)",
            )
