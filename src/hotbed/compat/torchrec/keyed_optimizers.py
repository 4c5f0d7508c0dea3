"""Combine, wrap and schedule optimizers by the names of their parameters, as TorchRec does."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed import optim
from hotbed.checks import check_unique
from hotbed.errors import OptimizerError, SpecError

State = MutableMapping[str, Any]


class KeyedOptimizer(torch.optim.Optimizer):
    """Optimizer with parameter names instead of numbers in its ``state_dict``.

    ``state_dict()`` returns ``{"state": {name: state of the parameter}}``. After ``save_param_groups(True)``, it also
    has the key ``param_groups``. `load_state_dict` copies values into the existing tensors of the state.

    Parameters
    ----------
    params, state
        Parameters by name, and state by parameter.
    param_groups
        Groups of parameters, as in ``torch.optim``.
    """

    def __init__(
        self, params: Mapping[str, Tensor], state: Mapping[Any, Any], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._params, self._state, self._groups = dict(params), state, param_groups
        self._set_up()
        known = set(self._params.values())
        if others := [key for key in state if key not in known]:
            raise OptimizerError(
                f"state of a KeyedOptimizer: got {len(others)} keys that are not in params, expected none. Add all "
                "parameters of the state to `params`."
            )

    def _set_up(self) -> None:
        """Set the attributes that torch's schedulers and hooks use.

        torch's constructor is not called, because it would also build parameter groups.
        """
        self.defaults: dict[str, Any] = {}
        self._saves_groups = False
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # torch saves only the attributes of its own optimizers

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters by name."""
        return self._params

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """State by parameter."""
        return self._state

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Groups of parameters with their options."""
        return self._groups

    def save_param_groups(self, save: bool) -> None:
        """Choose whether ``state_dict`` has ``param_groups``."""
        self._saves_groups = save

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params.values():
            param.grad = None

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `OptimizerError`, because all parameters must get their names in the constructor."""
        raise OptimizerError(
            "a KeyedOptimizer does not support add_param_group. Build a second KeyedOptimizer for the parameters, and "
            "combine both with CombinedOptimizer."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        names = {id(param): name for name, param in self.params.items()}
        state = {names[id(param)]: dict(of) for param, of in self.state.items()}
        if not self._saves_groups:
            return {"state": state}
        groups = [
            {**deepcopy(_options(group)), "params": sorted(names[id(param)] for param in group["params"])}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy a saved ``state_dict`` into the state of this optimizer.

        The state must exist, so run a step or `init_state` before.
        """
        saved, state = state_dict["state"], self.state
        named = {name: state[param] for name, param in self.params.items() if param in state}
        if len(named) != len(saved) or not set(named) <= set(saved):
            raise OptimizerError(
                f"saved state: got {_list_names(saved)}, expected {_list_names(named)}. Load the state into an "
                "optimizer with the same parameters, after a step or init_state()."
            )
        for name, of in named.items():
            if set(of) != set(saved[name]):
                raise OptimizerError(
                    f"saved state of {name}: got {_list_names(saved[name])}, expected {_list_names(of)}. Load the "
                    "state of an optimizer with the same class."
                )
            _load(of, saved[name])
        if self._saves_groups:
            self._load_groups(state_dict["param_groups"])
        self.post_load_state_dict()

    def _load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        names = {id(param): name for name, param in self.params.items()}
        by_names = {tuple(sorted(group["params"])): group for group in saved}
        for group in self.param_groups:
            key = tuple(sorted(names[id(param)] for param in group["params"]))
            if key not in by_names:
                raise OptimizerError(
                    f"saved param_groups: got {_list_names(map(str, by_names))}, expected {key}. Build the optimizer "
                    "with the groups of the saved optimizer."
                )
            group.update(deepcopy(_options(by_names[key])))

    def post_load_state_dict(self) -> None:
        """Do nothing. Subclasses override this method to adapt to a loaded state."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Run a step with gradients of 0, which creates the state that `load_state_dict` overwrites.

        The parameters in ``sparse_grad_parameter_names`` get a sparse gradient.
        """
        for name, param in self.params.items():
            if param.requires_grad:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse() if name in (sparse_grad_parameter_names or ()) else zeros
        self.step()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _list_names(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + " …" * (len(listed) > 5) if listed else "nothing"


def _load(state: State, saved: Mapping[str, Any]) -> None:
    """Copy saved values into a state: into existing tensors in place, and otherwise as new values."""
    for name, value in state.items():
        new = saved[name]
        if isinstance(value, Tensor):
            value.detach().copy_(new)
        elif isinstance(value, dict):
            _load(cast("State", value), new)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(new)
        else:
            state[name] = deepcopy(new)


class _DelegatingOptimizer(KeyedOptimizer):
    """Base of optimizers that delegate state and steps to a wrapped optimizer."""

    optimizer: Any

    @property
    @override
    def state(self) -> Any:
        return self.optimizer.state

    @property
    @override
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @override
    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class KeyedOptimizerWrapper(_DelegatingOptimizer):
    """Wrap an optimizer of named parameters.

    ``optim_factory`` builds the optimizer. Its argument is the list of parameters, or ``params`` itself if
    ``pass_params_dict`` is true.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        self.optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        super().__init__(params, self.optimizer.state, self.optimizer.param_groups)
        self.defaults = self.optimizer.defaults

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if all(isinstance(key, int) for key in state_dict["state"]) and "param_groups" in state_dict:
            self.optimizer.load_state_dict(dict(state_dict))
        else:
            super().load_state_dict(state_dict)


class OptimizerWrapper(_DelegatingOptimizer):
    """Base of optimizers that modify the steps of a wrapped optimizer."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self.optimizer = optimizer
        self._set_up()
        self.defaults = optimizer.defaults

    @property
    @override
    def params(self) -> Mapping[str, Any]:
        return self.optimizer.params

    @override
    def save_param_groups(self, save: bool) -> None:
        self.optimizer.save_param_groups(save)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()


class TablesOptimizer(_DelegatingOptimizer):
    """Present a sparse optimizer of hotbed as a keyed optimizer. All ranks must save and load its state together.

    `step` and `zero_grad` do nothing if the optimizer steps in backward. The state of a table has the table's name as
    its key. If ``path`` is set, the key is ``PATH.TABLE.weight``; ``path`` is the path of the tables in the model.
    """

    def __init__(self, optimizer: optim.SparseOptimizer, path: str = "") -> None:
        self.optimizer = optimizer
        tables = [table for group in optimizer.param_groups for table in group["tables"]]
        self._names = [f"{path}.{table}.weight" if path else table for table in tables]
        self._set_up()

    @property
    @override
    def params(self) -> Mapping[str, Any]:
        return dict(zip(self._names, (p for group in self.param_groups for p in group["params"]), strict=True))

    @property
    @override
    def state(self) -> Any:
        params, state = self.params, self.optimizer.state_dict()["state"]
        return {params[name]: state[i] for i, name in enumerate(self._names) if i in state}

    @override
    def step(self, closure: Any = None) -> Any:
        return None if self.optimizer.steps_in_backward else super().step(closure)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.optimizer.steps_in_backward:
            super().zero_grad(set_to_none)

    @override
    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing, because tables have their moments from the start."""

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved, state = state_dict["state"], self.optimizer.state_dict()
        groups = iter(state_dict.get("param_groups", ()))
        own = {i: name for i, name in enumerate(self._names) if i in state["state"]}
        if missing := [name for name in own.values() if name not in saved]:
            raise OptimizerError(
                f"saved state: got {_list_names(saved)}, which lacks {_list_names(missing)}. Load the state of a model "
                "with the same tables."
            )
        state["state"] = {i: saved[name] for i, name in own.items()}
        state["param_groups"] = [g | _options(next(groups, {})) for g in state["param_groups"]]
        self.optimizer.load_state_dict(state)


class CombinedOptimizer(KeyedOptimizer):
    """Combine several optimizers into one.

    ``optims`` are optimizers, or pairs (name, optimizer). The name is a prefix of the names of the parameters.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer] | torch.optim.Optimizer]) -> None:
        named = [of if isinstance(of, tuple) else ("", of) for of in optims]
        self.optimizers = [(name, _as_keyed(of, i)) for i, (name, of) in enumerate(named)]
        self._set_up()
        names = [_add_prefix(prefix, name) for prefix, of in self.optimizers for name in of.params]
        fix = "Pass names of the optimizers: CombinedOptimizer([('first', optimizer), …])."
        check_unique("parameter of the optimizers", names, SpecError, fix)

    @property
    @override
    def params(self) -> Mapping[str, Any]:
        return {_add_prefix(prefix, name): param for prefix, of in self.optimizers for name, param in of.params.items()}

    @property
    @override
    def state(self) -> Any:
        return {param: state for _, of in self.optimizers for param, state in of.state.items()}

    @property
    @override
    def param_groups(self) -> Any:
        return [group for _, of in self.optimizers for group in of.param_groups]

    @override
    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        for _, of in self.optimizers:
            of.save_param_groups(save)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, of in self.optimizers:
            of.zero_grad(set_to_none)

    @override
    def step(self, closure: Any = None) -> Any:
        for _, of in self.optimizers:
            of.step(closure)

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for prefix, of in self.optimizers:
            own = of.state_dict()
            state |= {_add_prefix(prefix, name): of_param for name, of_param in own["state"].items()}
            for group in own.get("param_groups", ()):
                names = [_add_prefix(prefix, name) for name in group["params"]]
                groups.append({**group, "params": names})
        return {"state": state, "param_groups": groups} if groups else {"state": state}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(state_dict.get("param_groups", ()))
        for prefix, of in self.optimizers:
            names = {_add_prefix(prefix, name): name for name in of.params}
            there = state_dict["state"]
            saved: dict[str, Any] = {"state": {name: there[full] for full, name in names.items() if full in there}}
            if groups:
                own = [group for group in groups if set(group["params"]) <= set(names)]
                saved["param_groups"] = [{**g, "params": [names[full] for full in g["params"]]} for g in own]
            of.load_state_dict(saved)
        self.post_load_state_dict()

    @override
    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        for _, of in self.optimizers:
            of.init_state(sparse_grad_parameter_names)

    @override
    def post_load_state_dict(self) -> None:
        for _, of in self.optimizers:
            of.post_load_state_dict()


def _add_prefix(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _as_keyed(of: Any, number: int) -> KeyedOptimizer:
    """Convert an optimizer of `CombinedOptimizer` to a keyed optimizer.

    The parameters of a torch optimizer have no names. They are named ``NUMBER.POSITION``: the number of the optimizer
    in ``optims``, and the position of the parameter in the optimizer.
    """
    if isinstance(of, KeyedOptimizer):
        return of
    if isinstance(of, optim.SparseOptimizer):
        return TablesOptimizer(of)
    if not isinstance(of, torch.optim.Optimizer):
        raise SpecError(
            f"optims of CombinedOptimizer: got a {type(of).__name__}, expected an optimizer. Wrap a factory: "
            "KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.Adam(params))."
        )
    params = [param for group in of.param_groups for param in group["params"]]
    return KeyedOptimizerWrapper({f"{number}.{i}": param for i, param in enumerate(params)}, lambda _: of)


class GradientClipping(Enum):
    """Ways in which `GradientClippingOptimizer` clips gradients."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clip the gradients of an optimizer's parameters before each step.

    The gradients of tables that are updated in backward are not clipped, because `step` runs later. TorchRec does the
    same.

    Parameters
    ----------
    clipping
        NORM clips the norm of all gradients together, VALUE clips each value, and NONE clips nothing.
    max_gradient, norm_type
        Largest norm or value, and the type of the norm, e.g. 2 or ``"inf"``.
    enable_global_grad_clip, param_to_pgs
        Ignored. All ranks have equal gradients, because parameters are not sharded.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[nn.Parameter, Any] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._clipping, self._limit, self._norm_type = GradientClipping(clipping.value), max_gradient, float(norm_type)

    @override
    def step(self, closure: Any = None) -> Any:
        params = [p for g in self.param_groups for p in g["params"] if isinstance(p, Tensor) and p.grad is not None]
        if self._clipping is GradientClipping.NORM and params:
            nn.utils.clip_grad_norm_(params, self._limit, self._norm_type)
        elif self._clipping is GradientClipping.VALUE and params:
            nn.utils.clip_grad_value_(params, self._limit)
        return super().step(closure)


class WarmupPolicy(Enum):
    """Functions from the step to a factor of the learning rate, for `WarmupStage`."""

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
    """One stage of a learning rate schedule.

    Parameters
    ----------
    policy, lr_scale
        Function from the step to a factor of the learning rate, and a second, constant factor.
    max_iters
        Last step of the stage, counted from the first step of training.
    value
        Argument of the policy. LINEAR: factor at step 0. CONSTANT: the factor. STEP: factor of each drop. POLY:
        exponent. COSINE_ANNEALING_WARM_RESTARTS: smallest factor. INTERPOLATE: factor at the first step.
    decay_iters
        POLY: number of steps of the decay (default: ``max_iters``). STEP: steps between two drops (default: 1).
    sgdr_period
        Number of steps of a period of COSINE_ANNEALING_WARM_RESTARTS.
    start_interpolating_iters, end_value
        First step of INTERPOLATE, and its factor at ``max_iters``.
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
        return self.lr_scale * _FACTORS.get(self.policy.value, _FACTORS["none"])(self, step)

    def check(self, start: int) -> None:
        """Raise `SpecError` if the stage is invalid, or does not end after ``start``, the end of the previous stage."""
        if self.max_iters <= start:
            raise SpecError(
                f"max_iters of a WarmupStage: got {self.max_iters}, expected more than {start}, the end of the "
                "previous stage. Count max_iters from the first step of training."
            )
        first = self.start_interpolating_iters
        if self.policy.value == "interpolate" and (first is None or self.end_value is None or first >= self.max_iters):
            raise SpecError(
                f"a WarmupStage: got start_interpolating_iters {first} and end_value {self.end_value}, expected a step "
                f"before max_iters {self.max_iters} and a number for INTERPOLATE. Set both."
            )


def _cosine(stage: WarmupStage, step: int) -> float:
    turn = math.pi * (step % stage.sgdr_period) / stage.sgdr_period
    return stage.value + (1 - stage.value) * (1 + math.cos(turn)) / 2


def _interpolate(stage: WarmupStage, step: int) -> float:
    assert stage.start_interpolating_iters is not None and stage.end_value is not None
    done = (step - stage.start_interpolating_iters) / (stage.max_iters - stage.start_interpolating_iters)
    return stage.value + (stage.end_value - stage.value) * done


_FACTORS: dict[str, Callable[[WarmupStage, int], float]] = {
    "none": lambda s, step: 1.0,
    "linear": lambda s, step: s.value + (1 - s.value) * step / s.max_iters,
    "constant": lambda s, step: s.value,
    "poly": lambda s, step: (1 - step / (s.decay_iters if s.decay_iters > 0 else s.max_iters)) ** s.value,
    "step": lambda s, step: s.value ** (step // max(s.decay_iters, 1)),
    "inv_sqrt": lambda s, step: 1 / math.sqrt(max(step, 1)),
    "cosine_annealing_warm_restarts": _cosine,
    "interpolate": _interpolate,
}
"""Functions of the policies. Keys are values of the enum, so that the enum of TorchRec works, too."""


class WarmupOptimizer(OptimizerWrapper):
    """Schedule the learning rate of an optimizer in stages. After each step, set it in all parameter groups.

    Parameters
    ----------
    stages
        Stages in their order. After the last stage, the learning rate is ``lr``.
    lr, lr_param
        Learning rate that is multiplied by the factors of the stages, and its key in the parameter groups.
    param_name
        Name under which ``state_dict`` stores the current step and stage.
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
        loss = super().step(closure)
        self._steps += 1
        if self._steps > self._stages[self._stage].max_iters and self._stage + 1 < len(self._stages):
            self._stage += 1
        self._set_lr()
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        progress = {"warmup": torch.tensor([self._steps, self._stage], device="cpu")}
        return {**found, "state": {**found["state"], self._param_name: progress}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict["state"])
        progress = state.pop(self._param_name, None)
        if progress is not None:
            self._steps, self._stage = (int(n) for n in progress["warmup"].tolist())
        super().load_state_dict({**state_dict, "state": state})

    @override
    def post_load_state_dict(self) -> None:
        super().post_load_state_dict()
        self._set_lr()
