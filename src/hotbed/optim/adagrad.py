"""Train tables by AdaGrad, with one moment per element or per row."""

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
    """The check that AdaGrad never divides by 0."""

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not self.number(group, "eps") + self.number(group, "initial_accumulator") > 0:
            tables = ", ".join(group["tables"])
            raise SpecError(
                f"{type(self).__name__}: eps and initial_accumulator are both 0 as float32 for {tables}; "
                "one must be positive"
            )


def _adagrad(w: Tensor, moments: dict[str, Tensor], g: Tensor, h: Mapping[str, Tensor], dim: int) -> Tensor:
    v = moments["sum_of_squares"]
    v.add_(g * g)
    return w - h["lr"] * g / (sqrt(v) + h["eps"])


class Adagrad(AdagradBase):
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

    Source: Neo/ZionEX (arXiv 2104.05158 §4.1) and FBGEMM's exact row-wise AdaGrad. g is the summed gradient of the row;
    mean_d sums 16-column blocks in column order.

    c is 1 but for tables that several replicas train separately and average (``ParallelOptions(replicas=M)``): the
    momentum-scaled rule of 2D sparse parallelism (arXiv 2508.03854). There a replica sees B/M of the B samples of a
    batch. If a sample's gradient of a row has mean μ and variance σ², the mean over B samples adds ``|μ|² + σ²/B`` to v
    per step, that over B/M adds ``|μ|² + Mσ²/B``, and averaging v over replicas leaves it so. Hence v is too large by a
    factor between 1 (the replicas' gradients agree) and M (they are noise, or one replica alone has seen the row); its
    root makes steps too short by up to √M, and ``c = M`` makes them longer by √M. But by that much for *every* row:
    where replicas agree, which is where rows are popular, steps are then too long. So c is a hyperparameter in
    ``[1, M]``, and no value of it gives the steps of one group; ``ParallelOptions(exact=True)`` does. With
    ``eps_inside`` the rule is the plain one with ``lr · √c`` and ``ε · c``.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    lr
        Learning rate; there is no default.
    eps
        ε, outside the root.
    eps_inside
        ``√(v / c + ε)``, as the paper has it, in the place of ``√(v / c) + ε``.
    moment_scale
        c, at least 1; default: the number of replicas that are averaged, 1 without any. v is stored unscaled.
    delayed_moment
        Divide by the root of v as it was before this step's gradient. Where replicas begin a step with one v (they are
        averaged after every step), averaging them then equals one step with the mean of their gradients. Needs an
        ``initial_accumulator``, because v is not there yet when a row is first met.
    initial_accumulator
        Value that every v starts at.
    weight_decay
        λ, for touched rows.
    weight_decay_mode
        ``"l2"``: ``g ← g + λ · w`` before everything else. ``"decoupled"``: ``w ← w − lr · λ · w`` beside the rule.
    max_grad_norm, max_norm, groups
        As for every `SparseOptimizer`.
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
            raise SpecError(f"weight_decay_mode is {weight_decay_mode!r}, must be 'l2' or 'decoupled'")
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
            self.refuse(group, "moment_scale", "it must be at least 1, or None for the number of replicas")
        if self.delayed_moment and not self.number(group, "initial_accumulator") > 0:
            self.refuse(group, "initial_accumulator", "delayed_moment needs it to be positive")

    @override
    def own(self, group: Mapping[str, Any]) -> list[float]:
        eps = float(group["eps"])
        outside, inside = (0.0, eps) if self.eps_inside else (eps, 0.0)
        return [outside, inside, float(self._scale(group)), float(self.delayed_moment)]

    def _scale(self, group: Mapping[str, Any]) -> Any:
        given = group["moment_scale"]
        return self._replicas if given is None else given
