"""Define `SparseOptimizer`: it updates the rows of embedding tables that a batch touched.

``loss.backward()`` leaves, per arena, the ids and the gradient of the pooled vectors; ``step()`` sums the gradients of
each distinct row over everything that arrived since the last step, then applies the rule to that row once. So
accumulating gradients over micro-batches is exact, and a step that is skipped touches nothing. (Exact, not bit for bit
the sum of one large batch: a row's occurrences are added in the order of micro-batches, then features, then samples.)
A step that is to be dropped is forgotten with ``zero_grad()`` of the *optimizer*; ``model.zero_grad()`` does not
reach it.

A table has no dense gradient and is no ``nn.Parameter``. What stands for it in ``param_groups`` is its *handle*, a 0-d
tensor: ``requires_grad`` of the handle says whether the table is trained. The gradient of the first handle is the
factor that the waiting gradients are still to be multiplied with (1, or what ``GradScaler.unscale_`` made of it; NaN
where they are not finite), which is how the optimizers work with ``torch.amp.GradScaler``.
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
from hotbed.optim.table_groups import TableSelection, resolve_groups, table_places
from hotbed.torch_private import call_after_backward, running_backward

WeightDecayMode = Literal["l2", "decoupled"]


class Trained(NamedTuple):
    """A table that an optimizer trains, and what its moments started at, by name."""

    collection: SparseModule
    table: str
    updater: Updater
    initial: Mapping[str, float]


class SparseOptimizer(torch.optim.Optimizer):
    """Base of the sparse optimizers.

    What happens to a row, once the gradients of all its occurrences are summed: clip the norm of its gradient
    (``max_grad_norm``), L2 or decoupled weight decay, the optimizer's rule, scale the row down to ``max_norm``, round
    to the table's dtype. Rows that a batch does not touch stay as they are, to the bit.

    Parameters
    ----------
    model
        Any module that contains embedding collections, all of whose tables are trained; or a `TableSelection`.
    defaults
        Options of the default group. These mean the same for every optimizer: ``lr``; ``weight_decay``;
        ``max_grad_norm``, the largest norm of a row's summed gradient (a longer one is scaled down; None: any);
        ``max_norm``, the largest norm of a row after its update (None: any). Norms are float32: one beyond 1.8e19
        overflows, and what has it is scaled to 0.
    groups
        Groups of tables with their own hyperparameters, ``[{"tables": ["users"], "lr": 0.01}]``. Tables are named as
        in the collection, or ``path.to.collection.table`` where a name occurs in several collections. All tables that
        no group names form one more group with the defaults.

    Attributes
    ----------
    gate
        0-d tensor on the tables' device; where it is 0, a step touches nothing, and nobody waits for it. None: open.

    Raises
    ------
    SpecError
        If the model has no collection, a group names an unknown table or option, or a hyperparameter is out of range.
    """

    rule: Rule
    weight_decay_mode: Literal["l2", "decoupled", "own"] = "l2"
    """Whether ``weight_decay`` is added to the gradient, taken off the row, or a hyperparameter of the rule."""
    _step_supports_amp_scaling = True

    def __init__(
        self, model: nn.Module, defaults: dict[str, Any], groups: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        places = table_places(model)
        if not places:
            raise SpecError(
                f"{type(model).__name__} has no hotbed.EmbeddingCollection; sparse optimizers update embedding tables "
                "only, use torch.optim for the rest"
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
                    self.refuse(group, name, "it must be positive as a float32, or None for no limit")
            elif name != "betas" and not 0 <= self.number(group, name) < math.inf:
                self.refuse(group, name, "it must be finite as a float32, and not negative")

    def number(self, group: Mapping[str, Any], name: str) -> float:
        """An option as the float32 that kernels take; `SpecError` if it is no number."""
        value = group[name]
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(group, name, "it must be a number")
        return ctypes.c_float(value).value

    @classmethod
    def rule_for(cls, options: Mapping[str, Any]) -> Rule:
        """The rule of an optimizer that is made with these options."""
        return cls.rule

    def refuse(self, group: Mapping[str, Any], name: str, rule: str) -> NoReturn:
        """Raise `SpecError` for an option of a group."""
        tables = ", ".join(group["tables"])
        raise SpecError(f"{type(self).__name__}: {name} is {group[name]!r} for {tables}; {rule}")

    def trains(self, group: Mapping[str, Any]) -> bool:
        """Whether a step with these options changes rows."""
        return True

    def own(self, group: Mapping[str, Any]) -> list[float]:
        """The rule's own hyperparameters, in kernel order."""
        return [float(group[name]) for name in self.rule.hyper]

    def _hyper(self, group: Mapping[str, Any]) -> list[float]:
        """`COMMON` and own hyperparameters, in kernel order."""
        lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        limits = [math.inf if group.get(n) is None else float(group[n]) for n in ("max_grad_norm", "max_norm")]
        l2 = decay if self.weight_decay_mode == "l2" else 0.0
        decoupled = lr * decay if self.weight_decay_mode == "decoupled" else 0.0
        return [lr, *limits, l2, decoupled, *self.own(group)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for torch's own constructor: every table is in a group from the start.

        Raises
        ------
        OptimizerError
            If called later; give ``groups`` to the constructor.
        """
        if hasattr(self, "_updaters"):
            raise OptimizerError("every table is in a group already; give `groups` when making the optimizer")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients that arrived since the last step, once per distinct row; frozen tables are left alone."""
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
        """Whether `in_backward` was called."""
        return self._steps_in_backward

    def waiting_factor(self) -> Tensor | None:
        """Return what the waiting gradients are still to be multiplied with; None: nothing."""
        lead: Tensor = self.param_groups[0]["params"][0]
        return None if lead.grad is None else lead.grad.detach().clone()

    @torch.no_grad()
    def scale_waiting(self, factor: float) -> None:
        """Multiply the gradients that wait, when a step uses them."""
        lead: Tensor = self.param_groups[0]["params"][0]
        if lead.grad is not None:
            lead.grad *= factor
            self._is_clipped = True

    def trained_now(self) -> dict[Updater, set[str]]:
        """List the tables that are not frozen, by updater."""
        found: dict[Updater, set[str]] = {updater: set() for updater in self._each_updater()}
        for group in self.param_groups:
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                if handle.requires_grad and table in self._updaters[path].tables:
                    found[self._updaters[path]].add(table)
        return found

    @torch.no_grad()
    def prepare(self) -> tuple[Hashable, ...]:
        """Write hyperparameters where kernels read them, for a replayed step; return what else it depends on."""
        hyper = self._hyper_of_tables()
        return tuple(updater.prepare(of_tables) for updater, of_tables in hyper.items())

    def _each_updater(self) -> list[Updater]:
        """List the updaters, each once: collections that share arenas have one."""
        return list(dict.fromkeys(self._updaters.values()))

    def _hyper_of_tables(self) -> dict[Updater, dict[str, list[float]]]:
        """Hyperparameters, in kernel order, of the tables that a step trains now, by updater."""
        hyper: dict[Updater, dict[str, list[float]]] = {updater: {} for updater in self._each_updater()}
        for group in self.param_groups:
            if not self.trains(group):
                continue
            self.check(group)  # schedules and users change options
            values = self._hyper(group)
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                if handle.requires_grad:
                    hyper[self._updaters[path]][table] = self._within(values, self._max_norms[path].get(table))
        return hyper

    @staticmethod
    def _within(hyper: list[float], max_norm: float | None) -> list[float]:
        """Hyperparameters of a table that has a largest norm of its own."""
        at = COMMON.index("max_norm")
        return hyper if max_norm is None else [*hyper[:at], min(hyper[at], max_norm), *hyper[at + 1 :]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that wait for a step."""
        super().zero_grad(set_to_none)
        self._is_clipped = False
        for updater in self._each_updater():
            updater.clear()

    def in_backward(self) -> Self:
        """Step at the end of every backward that reaches the tables, as TorchRec does.

        Nobody need call `step` or `zero_grad` then, or keep the optimizer: the tables do. It knows nothing of a
        ``GradScaler``, and gradients do not accumulate; let `step` be called where you need either.
        """
        self._steps_in_backward = True
        for collection in dict.fromkeys(trained.collection for trained in self._trained):
            collection.kept.append(self)
        return self

    def _queue_step(self) -> None:
        """Have the step taken at the end of the backward pass that runs; forget what one that failed has left."""
        running = running_backward()
        if running == self._backward:
            return
        if self._backward is not None:
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
            lead.grad = torch.ones_like(lead)  # a new one: GradScaler scales it in place, which its version hides
        if self._check_finite:
            lead.grad.masked_fill_(~finite(), torch.nan)

    def _refuse_late_gradient(self) -> None:
        if any(updater.is_waiting for updater in self._each_updater()):
            raise OptimizerError(
                "a gradient of tables arrived after clip_grad_norm_: got another backward, expected step(). Clip once, "
                "after the last backward before a step"
            )

    def _amp_factors(self) -> tuple[Tensor | None, Tensor | None]:
        """1 / loss scale and "nothing overflowed", as GradScaler left them; None where there is nothing to say."""
        lead: Tensor = self.param_groups[0]["params"][0]
        if not hasattr(self, "grad_scale"):
            return (self.waiting_factor() if self._is_clipped else None), None
        scale: Tensor | None = self.grad_scale  # pyright: ignore[reportAttributeAccessIssue]
        gate = torch.as_tensor(self.found_inf, device=lead.device) == 0  # pyright: ignore[reportAttributeAccessIssue]
        if not self._check_finite:
            # The first step under a scaler: backward did not look for overflow yet, so look here.
            self._check_finite = True
            for updater in self._each_updater():
                gate = gate & updater.finite()
        unscaled = torch.ones_like(lead) if lead.grad is None else lead.grad.detach().clone()
        return (unscaled if scale is None else unscaled / scale), gate

    def state_dict(self) -> dict[str, Any]:
        """Moments by table (full copies are not made: tensors are views) and parameter groups, as torch does it."""
        self._refresh_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy moments into the tables and take over the parameter groups.

        The saved optimizer may have been made with a part of this one's model, or the other way round: what is ``user``
        in the state of ``FTRL(model.wide)`` is ``wide.user`` for an optimizer of ``model``.

        Raises
        ------
        OptimizerError
            If it is no optimizer's state, an option is out of range, the groups name other tables, or a moment has
            another shape; then nothing is changed.
        """
        check_form(state_dict)
        here = [group["tables"] for group in self.param_groups]
        there = [group.get("tables") for group in state_dict["param_groups"]]
        if not are_same_groups(here, there):
            raise OptimizerError(f"the saved optimizer has groups of tables {there}, this one {here}; make them equal")
        groups = [{**g, "tables": own} for g, own in zip(state_dict["param_groups"], here, strict=True)]
        state_dict = {**state_dict, "param_groups": groups}
        self._refresh_state()
        handles = [handle for group in self.param_groups for handle in group["params"]]
        own = {i: {name: view.shape for name, view in self.state[h].items()} for i, h in enumerate(handles)}
        saved = {i: {name: t.shape for name, t in s.items()} for i, s in state_dict["state"].items()}
        if {i: s for i, s in own.items() if s} != saved:
            raise OptimizerError(f"the saved moments are {saved}, this optimizer needs {own}")
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
        """Raise `OptimizerError` unless a saved group has all options, in their ranges."""
        for name in self._options:
            if name not in group:
                raise OptimizerError(f"the saved optimizer has no option '{name}', which this one needs")
        if len(group["params"]) != len(group["tables"]):
            raise OptimizerError(
                f"the saved optimizer has {len(group['params'])} params for {len(group['tables'])} tables of a group"
            )
        try:
            self.check(group)
        except (SpecError, TypeError) as error:
            raise OptimizerError(f"the saved optimizer has an option that cannot be: {error}") from None

    def trained(self) -> list[Trained]:
        """The tables it trains: all that it was made for, less those that a later optimizer has taken over."""
        return [trained for trained in self._trained if trained.table in trained.updater.tables]

    def _refresh_state(self) -> None:
        self.state.clear()
        for group in self.param_groups:
            for name, handle in zip(group["tables"], group["params"], strict=True):
                path, table = self._places[name]
                self.state[handle] = self._updaters[path].state(table)
