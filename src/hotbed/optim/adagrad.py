"""Train tables with AdaGrad, with one moment per element or per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.errors import SpecError
from hotbed.optim.base import SparseOptimizer, WeightDecayMode
from hotbed.optim.rule import Moment, Rule, SparseModule, Steps, sqrt


class AdagradBase(SparseOptimizer):
    """AdaGrad with the check that it never divides by 0."""

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not self.number(group, "eps") + self.number(group, "initial_accumulator") > 0:
            tables = ", ".join(group["tables"])
            raise SpecError(
                f"{type(self).__name__}: eps and initial_accumulator: got 0 and 0 as float32 for {tables}, expected a "
                "positive number for at least one"
            )


def _adagrad(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Tensor:
    v = moments["sum_of_squares"]
    v.add_(g * g)
    return w - h["lr"] * g / (sqrt(v) + h["eps"])


class Adagrad(AdagradBase):
    """AdaGrad: ``v ← v + g²``, ``w ← w − lr · g / (√v + ε)``, element by element.

    Source: Duchi et al. 2011, as in `torch.optim.Adagrad` (lr_decay 0). With weight_decay 0 it equals dense AdaGrad,
    because a zero gradient changes nothing.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate. It has no default.
    eps
        ε, outside the root.
    initial_accumulator
        Initial value of every v.
    weight_decay
        λ of ``g ← g + λ · w``. It applies to updated rows only.
    max_grad_norm, max_norm, groups
        See `SparseOptimizer`.
    """

    rule = Rule(
        "adagrad", _adagrad, hyper=("eps",), moments=(Moment("sum_of_squares", "element", "initial_accumulator"),)
    )

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


def _rowwise_adagrad(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Steps:
    v = moments["sum_of_squares"]
    before = v.clone()
    v.add_((yield g * g) / dim)
    used = torch.where(h["delayed"] == 0, v[:, None], before[:, None])
    return w - h["lr"] / (sqrt(used / h["moment_scale"] + h["eps_inside"]) + h["eps"]) * g


class RowWiseAdagrad(AdagradBase):
    """AdaGrad with one moment per row: ``v ← v + mean_d(g_d²)``, ``w ← w − lr · g / (√(v / c) + ε)``.

    Source: Neo/ZionEX (arXiv 2104.05158 §4.1) and FBGEMM's exact row-wise AdaGrad. g is the summed gradient of the row.
    mean_d sums blocks of 16 columns in column order.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate. It has no default.
    eps
        ε, outside the root.
    eps_inside
        Whether to divide by ``√(v / c + ε)``, as the paper does, instead of ``√(v / c) + ε``.
    moment_scale
        c, at least 1 (default: the number of replicas that are averaged, or 1 without replicas). v is stored unscaled.
        M replicas that are averaged (``ParallelOptions(replicas=M)``) see B/M of the B samples of a batch each. Let a
        sample's gradient of a row have mean μ and variance σ². v then grows by ``|μ|² + Mσ²/B`` per step, instead of
        ``|μ|² + σ²/B``. So v is too large, by a factor from 1 (all gradients agree) to M (gradients are noise, or one
        replica has the row). ``c = M`` corrects noise, but makes the steps of popular rows too long. No c gives the
        steps of training without replicas; ``ParallelOptions(exact=True)`` does. Source: momentum-scaled row-wise
        AdaGrad of 2D sparse parallelism (arXiv 2508.03854). ``eps_inside`` gives ``lr · √c`` and ``ε · c``.
    delayed_moment
        Whether to divide by the root of v from before this step's gradient. With replicas that are averaged after every
        step, the average then equals one step with the mean of their gradients, because they begin with the same v. It
        needs a positive ``initial_accumulator``, because v is 0 before a row's first gradient.
    initial_accumulator
        Initial value of every v.
    weight_decay
        λ. It applies to updated rows only.
    weight_decay_mode
        ``"l2"``: ``g ← g + λ · w`` before the rule. ``"decoupled"``: ``w ← w − lr · λ · w`` in addition to the rule.
    max_grad_norm, max_norm, groups
        See `SparseOptimizer`.
    """

    rule = Rule(
        "rowwise_adagrad",
        _rowwise_adagrad,
        hyper=("eps", "eps_inside", "moment_scale", "delayed"),
        moments=(Moment("sum_of_squares", "row", "initial_accumulator"),),
    )

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        eps: float = 1e-8,
        eps_inside: bool = False,
        moment_scale: float | None = None,
        delayed_moment: bool = False,
        initial_accumulator: float = 0.0,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = "l2",
        max_grad_norm: float | None = None,
        max_norm: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if weight_decay_mode not in ("l2", "decoupled"):
            raise SpecError(f"weight_decay_mode: got {weight_decay_mode!r}, expected 'l2' or 'decoupled'")
        self.weight_decay_mode = weight_decay_mode
        self.eps_inside, self.delayed_moment = eps_inside, delayed_moment
        self._replicas = max((m.replicas for m in model.modules() if isinstance(m, SparseModule)), default=1)
        options = {"lr": lr, "eps": eps, "initial_accumulator": initial_accumulator, "weight_decay": weight_decay}
        limits = {"max_grad_norm": max_grad_norm, "max_norm": max_norm}
        super().__init__(model, {**options, **limits, "moment_scale": moment_scale}, groups)

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        resolved = {**group, "moment_scale": self._scale(group)}
        super().check(resolved)
        if not self.number(resolved, "moment_scale") >= 1:
            self.refuse(group, "moment_scale", "at least 1, or None for the number of replicas")
        if self.delayed_moment and not self.number(group, "initial_accumulator") > 0:
            self.refuse(group, "initial_accumulator", "a positive number with delayed_moment")

    @override
    def own(self, group: Mapping[str, Any]) -> list[float]:
        eps = float(group["eps"])
        outside, inside = (0.0, eps) if self.eps_inside else (eps, 0.0)
        return [outside, inside, float(self._scale(group)), float(self.delayed_moment)]

    def _scale(self, group: Mapping[str, Any]) -> Any:
        given = group["moment_scale"]
        return self._replicas if given is None else given
