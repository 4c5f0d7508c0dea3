"""Schedule learning rates by stages, as TorchRec's ``WarmupOptimizer`` does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from typing_extensions import override

from hotbed.compat.torchrec.keyed import KeyedOptimizer, OptimizerWrapper
from hotbed.errors import SpecError


class WarmupPolicy(Enum):
    """Functions of the step that a `WarmupStage` multiplies the learning rate with."""

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass
class WarmupStage:
    """A part of a schedule.

    Parameters
    ----------
    policy
        Function of the step.
    max_iters
        Last step of the stage, counted from the first step of training.
    value
        Argument of the function: the factor at step 0 (linear), the factor (constant, step), the exponent (poly), the
        least factor (cosine) or the factor at the start (interpolate).
    lr_scale
        Further factor.
    decay_iters
        Length of the decay of poly (default: ``max_iters``), or steps between two drops of step (default: 1).
    sgdr_period
        Steps of a period of the cosine.
    start_interpolating_iters, end_value
        First step, and the factor at ``max_iters``, of interpolate.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        return self.lr_scale * self._unscaled(step)

    def _unscaled(self, step: int) -> float:
        # By value, so that TorchRec's own policies will do.
        if self.policy.value == "linear":
            return self.value + (1 - self.value) * step / self.max_iters
        if self.policy.value == "constant":
            return self.value
        if self.policy.value == "poly":
            return (1 - step / (self.decay_iters if self.decay_iters > 0 else self.max_iters)) ** self.value
        if self.policy.value == "step":
            return self.value ** (step // max(self.decay_iters, 1))
        if self.policy.value == "inv_sqrt":
            return 1 / math.sqrt(max(step, 1))
        if self.policy.value == "cosine_annealing_warm_restarts":
            turn = math.pi * (step % self.sgdr_period) / self.sgdr_period
            return self.value + (1 - self.value) * (1 + math.cos(turn)) / 2
        if self.policy.value == "interpolate":
            assert self.start_interpolating_iters is not None and self.end_value is not None
            done = (step - self.start_interpolating_iters) / (self.max_iters - self.start_interpolating_iters)
            return self.value + (self.end_value - self.value) * done
        return 1.0

    def check(self, start: int) -> None:
        """Raise `SpecError` unless the stage follows one that ends at step ``start``."""
        if self.max_iters <= start:
            raise SpecError(
                f"a WarmupStage has max_iters {self.max_iters}, expected more than {start}, where the stage before it "
                "ends. Count max_iters from the first step of training."
            )
        first = self.start_interpolating_iters
        if self.policy.value == "interpolate" and (first is None or self.end_value is None or first >= self.max_iters):
            raise SpecError(
                f"a WarmupStage has start_interpolating_iters {first} and end_value {self.end_value}, expected a step "
                f"before max_iters {self.max_iters} and a number. Set both."
            )


class WarmupOptimizer(OptimizerWrapper):
    """Set the learning rate of all groups of an optimizer by stages, after each step.

    Parameters
    ----------
    optimizer
        The optimizer. One that trains tables in backward may be combined into it.
    stages
        Stages in their order; after the last one, the learning rate is ``lr``.
    lr
        The learning rate that stages multiply.
    lr_param
        Name of the learning rate among the options of groups.
    param_name
        Name of the schedule's progress in ``state_dict``.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        own = [WarmupStage(**vars(stage)) for stage in stages]
        for stage, before in zip(own, [0, *(stage.max_iters for stage in own)], strict=False):
            stage.check(before)
        self._stages = [*own, WarmupStage(WarmupPolicy.NONE, max_iters=1 << 62)]
        self._lr, self._lr_param, self._param_name = lr, lr_param, param_name
        self._steps = self._stage = 0
        self._set_lr()

    def _set_lr(self) -> None:
        lr = self._lr * self._stages[self._stage].factor(self._steps)
        for group in self.param_groups:
            group[self._lr_param] = lr

    @override
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, then set the learning rate of the next step."""
        loss = super().step(closure)
        self._steps += 1
        if self._steps > self._stages[self._stage].max_iters and self._stage + 1 < len(self._stages):
            self._stage += 1
        self._set_lr()
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and how far the schedule is."""
        found = super().state_dict()
        progress = {"warmup": torch.tensor([self._steps, self._stage], device="cpu")}
        return {**found, "state": {**found["state"], self._param_name: progress}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        state = dict(state_dict["state"])
        progress = state.pop(self._param_name, None)
        if progress is not None:
            self._steps, self._stage = (int(n) for n in progress["warmup"].tolist())
        super().load_state_dict({**state_dict, "state": state})

    @override
    def post_load_state_dict(self) -> None:
        super().post_load_state_dict()
        self._set_lr()
