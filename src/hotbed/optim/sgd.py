"""Train tables with gradient descent, plain or with momentum."""

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

    Source: `torch.optim.SGD` (dampening 0). The optimizer is lazy: the momentum of a row that a batch does not use
    neither decays nor moves the row. If no group has momentum, the optimizer keeps no state.

    Examples
    --------
    >>> table, item = hb.Table("items", rows=1000, dim=8), hb.Feature("item", "items")
    >>> model = hb.EmbeddingCollection([table], [item])
    >>> optimizer = SGD(model, lr=0.1, momentum=0.9)
    >>> vectors = model(hb.Jagged.from_dict({"item": [3, 5, 3]}))
    >>> vectors["item"].sum().backward()
    >>> optimizer.step()  # updates rows 3 and 5

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate. It has no default.
    momentum
        μ.
    weight_decay
        λ of ``g ← g + λ · w``. It applies to updated rows only.
    max_grad_norm, max_norm, groups
        See `SparseOptimizer`.
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
                "0, because the optimizer was created with momentum 0 and keeps no momentum. Pass momentum to the "
                "constructor (OneCycleLR sets it unless cycle_momentum=False)",
            )
