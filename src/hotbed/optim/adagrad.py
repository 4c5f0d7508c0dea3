"""AdaGrad, with one moment per element or per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from hotbed.errors import SpecError
from hotbed.optim.base import SparseOptimizer, WeightDecayMode
from hotbed.optim.rules import Moment, Rule


class Adagrad(SparseOptimizer):
    """AdaGrad: ``v ← v + g²``, ``w ← w − lr · g / (√v + ε)``, element by element.

    Source: Duchi et al. 2011, as in `torch.optim.Adagrad` (lr_decay 0). Equal to its dense form when weight_decay is
    0, because a zero gradient changes nothing.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate; there is no default.
    eps
        ε, outside the root.
    initial_accumulator
        Value that every v starts at.
    weight_decay
        λ of ``g ← g + λ · w``, for touched rows.
    max_grad_norm, max_norm, groups
        As for every `SparseOptimizer`.
    """

    rule = Rule("adagrad", hyper=("eps",), moments=(Moment("sum_of_squares", "element", "initial_accumulator"),))

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        max_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        options = {"lr": lr, "eps": eps, "initial_accumulator": initial_accumulator, "weight_decay": weight_decay}
        super().__init__(model, {**options, "max_grad_norm": max_grad_norm, "max_norm": max_norm}, groups)

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not self.number(group, "eps") + self.number(group, "initial_accumulator") > 0:
            tables = ", ".join(group["tables"])
            raise SpecError(
                f"{type(self).__name__}: eps and initial_accumulator are both 0 as float32 for {tables}; "
                "one must be positive"
            )


class RowWiseAdagrad(Adagrad):
    """AdaGrad with one moment per row: ``v ← v + mean_d(g_d²)``, ``w ← w − lr · g / (√v + ε)``.

    Source: Neo/ZionEX (arXiv 2104.05158 §4.1) and FBGEMM's exact row-wise AdaGrad. g is the summed gradient of the row;
    mean_d sums 16-column blocks in column order.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate; there is no default.
    eps
        ε, outside the root.
    initial_accumulator
        Value that every v starts at.
    weight_decay
        λ, for touched rows.
    weight_decay_mode
        ``"l2"``: ``g ← g + λ · w`` before everything else. ``"decoupled"``: ``w ← w − lr · λ · w`` beside the rule.
    max_grad_norm, max_norm, groups
        As for every `SparseOptimizer`.
    """

    rule = Rule("rowwise_adagrad", hyper=("eps",), moments=(Moment("sum_of_squares", "row", "initial_accumulator"),))

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        eps: float = 1e-8,
        initial_accumulator: float = 0.0,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = "l2",
        max_grad_norm: float | None = None,
        max_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if weight_decay_mode not in ("l2", "decoupled"):
            raise SpecError(f"weight_decay_mode is {weight_decay_mode!r}, must be 'l2' or 'decoupled'")
        self.weight_decay_mode = weight_decay_mode
        super().__init__(
            model,
            lr,
            eps=eps,
            initial_accumulator=initial_accumulator,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            max_norm=max_norm,
            groups=groups,
        )
