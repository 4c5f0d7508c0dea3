"""Define `SparseOptimizer`, the base of optimizers that update only the table rows that a batch uses.

``loss.backward()`` stores the ids and the gradient of the pooled vectors of each arena. For each distinct row,
``step()`` sums the gradients of all backward passes since the last step. It then applies the rule once. Therefore
accumulating gradients over micro-batches is exact, and a skipped step changes nothing. The bits can differ from one
large batch, because a row's gradients are added in the order of micro-batches, then features, then samples. To drop
waiting gradients, call ``zero_grad()`` of the *optimizer*; ``model.zero_grad()`` does not reach them.

A table has no dense gradient and is not an ``nn.Parameter``. Its *handle*, a 0-d tensor, represents it in
``param_groups``. ``requires_grad`` of the handle sets whether the table is trained. The optimizers support
``torch.amp.GradScaler`` through the gradient of the first handle. It is a factor for the waiting gradients: 1, or the
value that ``GradScaler.unscale_`` set, or NaN if a gradient is not finite.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Self, overload

import torch
from torch import Tensor, nn

from hotbed.errors import OptimizerError, SpecError
from hotbed.optim.rule import COMMON, Rule, SparseModule, Updater
from hotbed.optim.saved_state import are_same_groups, check_form, check_step
from hotbed.optim.table_groups import TableSelection, locate_tables, resolve_groups
from hotbed.torch_private import call_after_backward, running_backward

WeightDecayMode = Literal["l2", "decoupled"]


class Trained(NamedTuple):
    """A table that an optimizer trains, and the initial values of its moments by name."""

    collection: SparseModule
    table: str
    updater: Updater
    initial: Mapping[str, float]


class SparseOptimizer(torch.optim.Optimizer):
    """Base of the sparse optimizers.

    A step first sums the gradients of a row over all its occurrences. It then clips the norm of the sum
    (``max_grad_norm``), applies L2 or decoupled weight decay, applies the optimizer's rule, scales the row down to
    ``max_norm``, and rounds it to the table's dtype. Rows that a batch does not use keep their bits.

    Parameters
    ----------
    model
        Any module that contains embedding collections, or a `TableSelection`. All tables of a module are trained.
    defaults
        Options of the default group. Four options mean the same for every optimizer. ``lr`` is the learning rate, and
        ``weight_decay`` is λ. ``max_grad_norm`` is the largest norm of a row's summed gradient (None: no limit). A
        longer gradient is scaled down. ``max_norm`` is the largest norm of a row after its update (None: no limit).
        Norms are float32: a norm above 1.8e19 overflows, and its row or gradient is scaled to 0.
    groups
        Groups of tables with their own hyperparameters, e.g. ``[{"tables": ["users"], "lr": 0.01}]``. A table has the
        name that it has in its collection. If the name occurs in several collections, use
        ``path.to.collection.table``. Tables without a group form one more group with the defaults.

    Attributes
    ----------
    gate
        0-d tensor on the tables' device. If it is 0, a step changes nothing. The host does not synchronize to read it.
        None: steps are always applied.

    Raises
    ------
    SpecError
        If the model has no collection, a group names an unknown table or option, or a hyperparameter is out of range.
    """

    rule: Rule
    weight_decay_mode: Literal["l2", "decoupled", "own"] = "l2"
    """How ``weight_decay`` applies: added to the gradient, subtracted from the row, or used by the rule."""
    _step_supports_amp_scaling = True

    def __init__(
        self, model: nn.Module, defaults: dict[str, Any], groups: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        places = locate_tables(model)
        if not places:
            raise SpecError(
                f"model: got {type(model).__name__}, expected a module with a hotbed.EmbeddingCollection, because "
                "sparse optimizers update embedding tables only. Use torch.optim for other parameters"
            )
        if isinstance(model, TableSelection):
            places = {name: places[name] for name in model.tables}
        trained = {path for path, _ in places.values()}
        collections = {p: m for p, m in model.named_modules() if isinstance(m, SparseModule) and p in trained}
        self._check_finite = False
        self._steps_in_backward = self._is_clipped = False
        self._backward: int | None = None
        self.gate: Tensor | None = None
        self._options = tuple(defaults)
        resolved = resolve_groups(places, groups or (), known=set(defaults))
        super().__init__(
            [
                {
                    **options,
                    "tables": names,
                    "params": [collections[p].handles[t] for p, t in (places[n] for n in names)],
                }
                for names, options in resolved
            ],
            defaults,
        )
        for group in self.param_groups:
            self.check(group)
        self._places = places
        self._max_norms = {path: collection.max_norms for path, collection in collections.items()}
        self._updaters: dict[str, Updater] = {}
        self._trained: list[Trained] = []
        for path, collection in collections.items():
            fill = {
                places[name][1]: {m.name: float(group[m.initial]) if m.initial else 0.0 for m in self.rule.moments}
                for group in self.param_groups
                for name in group["tables"]
                if places[name][0] == path
            }
            self._updaters[path] = collection.connect(self.rule, fill, self._on_grad, self._each_updater())
            self._updaters[path].optimizer = weakref.ref(self)
            self._trained += [Trained(collection, table, self._updaters[path], fill[table]) for table in fill]

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `SpecError` if an option of a group is out of range."""
        for name in self._options:
            value = group[name]
            if name in ("max_grad_norm", "max_norm"):
                if value is not None and not 0 < self.number(group, name) < math.inf:
                    self.refuse(group, name, "a positive float32, or None for no limit")
            elif name != "betas" and not 0 <= self.number(group, name) < math.inf:
                self.refuse(group, name, "a finite float32 of at least 0")

    def number(self, group: Mapping[str, Any], name: str) -> float:
        """Return an option as the float32 that kernels read. Raise `SpecError` if it is not a number."""
        value = group[name]
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(group, name, "a number")
        return ctypes.c_float(value).value

    @classmethod
    def rule_for(cls, options: Mapping[str, Any]) -> Rule:
        """Return the rule of an optimizer with these options."""
        return cls.rule

    def refuse(self, group: Mapping[str, Any], name: str, expected: str) -> NoReturn:
        """Raise `SpecError` for an option of a group."""
        tables = ", ".join(group["tables"])
        raise SpecError(f"{type(self).__name__}: {name}: got {group[name]!r} for {tables}, expected {expected}")

    def trains(self, group: Mapping[str, Any]) -> bool:
        """Return whether a step with these options changes rows."""
        return True

    def own(self, group: Mapping[str, Any]) -> list[float]:
        """Return the rule's own hyperparameters, in kernel order."""
        return [float(group[name]) for name in self.rule.hyper]

    def _hyper(self, group: Mapping[str, Any]) -> list[float]:
        """Return the `COMMON` and own hyperparameters, in kernel order."""
        lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        limits = [math.inf if group.get(n) is None else float(group[n]) for n in ("max_grad_norm", "max_norm")]
        l2 = decay if self.weight_decay_mode == "l2" else 0.0
        decoupled = lr * decay if self.weight_decay_mode == "decoupled" else 0.0
        return [lr, *limits, l2, decoupled, *self.own(group)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for torch's constructor only, because every table is in a group from the start.

        Raises
        ------
        OptimizerError
            If it is called after construction. Pass ``groups`` to the constructor instead.
        """
        if hasattr(self, "_updaters"):
            raise OptimizerError("every table is in a group already. Pass `groups` to the constructor")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients since the last step, once per distinct row. Frozen tables do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inv_scale, gate = self._amp_factors()
        gate = self.gate if gate is None else gate
        hyper = self._hyper_of_tables()
        for updater, of_tables in hyper.items():
            updater.apply(of_tables, inv_scale, gate)
        self.param_groups[0]["params"][0].grad = None
        self._is_clipped = False
        return loss

    @property
    def steps_in_backward(self) -> bool:
        """Return whether `in_backward` was called."""
        return self._steps_in_backward

    def waiting_factor(self) -> Tensor | None:
        """Return the factor for the waiting gradients in the next step. None: 1."""
        lead: Tensor = self.param_groups[0]["params"][0]
        return None if lead.grad is None else lead.grad.detach().clone()

    @torch.no_grad()
    def scale_waiting(self, factor: float) -> None:
        """Multiply the waiting gradients by ``factor`` when a step uses them."""
        lead: Tensor = self.param_groups[0]["params"][0]
        if lead.grad is not None:
            lead.grad *= factor
            self._is_clipped = True

    def trained_now(self) -> dict[Updater, set[str]]:
        """Return the tables that are not frozen, by updater."""
        found: dict[Updater, set[str]] = {updater: set() for updater in self._each_updater()}
        for group in self.param_groups:
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                if handle.requires_grad and table in self._updaters[path].tables:
                    found[self._updaters[path]].add(table)
        return found

    @torch.no_grad()
    def prepare(self) -> tuple[Hashable, ...]:
        """Write hyperparameters to the buffers that a replayed step reads. Return a key of its other dependencies."""
        hyper = self._hyper_of_tables()
        return tuple(updater.prepare(of_tables) for updater, of_tables in hyper.items())

    def _each_updater(self) -> list[Updater]:
        """List the updaters without repetition, because collections that share arenas have the same updater."""
        return list(dict.fromkeys(self._updaters.values()))

    def _hyper_of_tables(self) -> dict[Updater, dict[str, list[float]]]:
        """Return the hyperparameters, in kernel order, of the tables that a step trains now, by updater."""
        hyper: dict[Updater, dict[str, list[float]]] = {updater: {} for updater in self._each_updater()}
        for group in self.param_groups:
            if not self.trains(group):
                continue
            self.check(group)  # schedules and users can change options
            values = self._hyper(group)
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                if handle.requires_grad:
                    hyper[self._updaters[path]][table] = self._limit_norm(values, self._max_norms[path].get(table))
        return hyper

    @staticmethod
    def _limit_norm(hyper: list[float], max_norm: float | None) -> list[float]:
        """Apply the largest norm of a table to its hyperparameters."""
        at = COMMON.index("max_norm")
        return hyper if max_norm is None else [*hyper[:at], min(hyper[at], max_norm), *hyper[at + 1 :]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients that wait for a step."""
        super().zero_grad(set_to_none)
        self._is_clipped = False
        for updater in self._each_updater():
            updater.clear()

    def in_backward(self) -> Self:
        """Step at the end of every backward pass that reaches the tables, as TorchRec does.

        Do not call `step` or `zero_grad` afterwards. The tables keep the optimizer alive. This mode does not support a
        ``GradScaler`` or gradient accumulation. Call `step` instead if you need either of them.
        """
        self._steps_in_backward = True
        for collection in dict.fromkeys(trained.collection for trained in self._trained):
            collection.kept.append(self)
        return self

    def _queue_step(self) -> None:
        """Step at the end of the running backward pass."""
        running = running_backward()
        if running == self._backward:
            return
        if self._backward is not None:  # an earlier backward pass failed, so discard its gradients
            self.zero_grad()
        self._backward = running
        call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._backward = None
        self.step()

    def _on_grad(self, finite: Callable[[], Tensor]) -> None:
        if self._steps_in_backward:
            self._queue_step()
        lead: Tensor = self.param_groups[0]["params"][0]
        if self._is_clipped:
            self._refuse_late_gradient()
            lead.grad, self._is_clipped = None, False
        if lead.grad is None:
            lead.grad = torch.ones_like(lead)  # a new tensor, because GradScaler scales the old one in place
        if self._check_finite:
            lead.grad.masked_fill_(~finite(), torch.nan)

    def _refuse_late_gradient(self) -> None:
        if any(updater.is_waiting for updater in self._each_updater()):
            raise OptimizerError(
                "a gradient of tables arrived after clip_grad_norm_: got another backward pass, expected step(). Clip "
                "once, after the last backward pass before a step"
            )

    def _amp_factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Return 1 / loss scale and whether all gradients are finite, from GradScaler. None: not applicable."""
        lead: Tensor = self.param_groups[0]["params"][0]
        if not hasattr(self, "grad_scale"):
            return (self.waiting_factor() if self._is_clipped else None), None
        scale: Tensor | None = self.grad_scale  # pyright: ignore[reportAttributeAccessIssue]
        gate = torch.as_tensor(self.found_inf, device=lead.device) == 0  # pyright: ignore[reportAttributeAccessIssue]
        if not self._check_finite:
            # In the first step with a scaler, backward has not checked for overflow, so check here.
            self._check_finite = True
            for updater in self._each_updater():
                gate = gate & updater.finite()
        unscaled = torch.ones_like(lead) if lead.grad is None else lead.grad.detach().clone()
        return (unscaled if scale is None else unscaled / scale), gate

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of each table and the parameter groups, in torch's format. Moments are views."""
        self._refresh_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved moments into the tables, and replace the parameter groups.

        The saved optimizer may belong to a part of this optimizer's model, or the reverse. For example, ``user`` in the
        state of ``FTRL(model.wide)`` is ``wide.user`` for an optimizer of ``model``.

        Raises
        ------
        OptimizerError
            If the state is malformed, an option is out of range, the groups have other tables, or a moment has another
            shape. The optimizer is then unchanged.
        """
        check_form(state_dict)
        here = [group["tables"] for group in self.param_groups]
        there = [group.get("tables") for group in state_dict["param_groups"]]
        if not are_same_groups(here, there):
            raise OptimizerError(f"saved optimizer: got groups of tables {there}, expected {here}. Use the same groups")
        groups = [{**g, "tables": own} for g, own in zip(state_dict["param_groups"], here, strict=True)]
        state_dict = {**state_dict, "param_groups": groups}
        self._refresh_state()
        handles = [handle for group in self.param_groups for handle in group["params"]]
        own = {i: {name: view.shape for name, view in self.state[h].items()} for i, h in enumerate(handles)}
        saved = {i: {name: t.shape for name, t in s.items()} for i, s in state_dict["state"].items()}
        if {i: s for i, s in own.items() if s} != saved:
            raise OptimizerError(f"saved moments: got {saved}, expected {own}")
        for of in state_dict["state"].values():
            check_step(of.get("step", torch.zeros(())))
        for group in groups:
            self._check_saved(group)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                if self.state[handle]:
                    self._updaters[path].load_state(table, self.state[handle])
        self.state.clear()

    def _check_saved(self, group: Mapping[str, Any]) -> None:
        """Raise `OptimizerError` unless a saved group has all options and they are in range."""
        for name in self._options:
            if name not in group:
                raise OptimizerError(f"saved optimizer: got no option '{name}', expected one in every group")
        if len(group["params"]) != len(group["tables"]):
            raise OptimizerError(
                f"saved optimizer: got {len(group['params'])} params in a group, expected {len(group['tables'])}, one "
                "per table"
            )
        try:
            self.check(group)
        except (SpecError, TypeError) as error:
            raise OptimizerError(f"saved optimizer has an invalid option: {error}") from None

    def trained(self) -> list[Trained]:
        """Return the tables that it trains. Tables that a later optimizer trains are excluded."""
        return [trained for trained in self._trained if trained.table in trained.updater.tables]

    def _refresh_state(self) -> None:
        self.state.clear()
        for group in self.param_groups:
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                self.state[handle] = self._updaters[path].state(table)
