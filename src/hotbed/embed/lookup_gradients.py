"""Keep the gradients of looked-up vectors from backward until the optimizer's step, which updates each row once.

`PooledLookup` is the autograd function of a lookup. Its forward pools rows. Its backward passes bags and gradients to
the `TableUpdater` of each optimizer, which keeps them until the step. `TableUpdater.apply` is the step: it concatenates
the gradients of each arena and lets each `TableGroup` update its rows.

`StepState` keeps hyperparameters and step counts in device memory, where kernels read them. The step copies only values
that have changed, e.g. a scheduled learning rate, from page-locked memory, so the host does not wait. Tensors keep
their addresses, because a CUDA graph of the step needs that.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotbed import ops
from hotbed.embed.arena import Arena, view_as_storage
from hotbed.embed.idle_tables import IdleTables
from hotbed.embed.local_tables import merge_gradients
from hotbed.embed.row_sums import RowGradient, kernels_of, sum_gradient
from hotbed.embed.table_group import CHANGED, Contribution, Request, TableGroup
from hotbed.errors import OptimizerError
from hotbed.ops import BackendName, Occurrences, RuleStep
from hotbed.ops.exact_sum import no_sums, sums_of
from hotbed.ops.layout import OWN
from hotbed.ops.reference import blocks_of
from hotbed.ops.rows import step_seeds
from hotbed.optim import COMMON, Rule
from hotbed.store.memory import to_device
from hotbed.torch_hooks import are_tables_left_out


def group_by_arena(waiting: Sequence[Contribution]) -> dict[Arena, tuple[Occurrences, Tensor]]:
    """Concatenate the gradients that wait for a step, by arena."""
    if any(contribution.changed() for contribution in waiting):
        raise OptimizerError(CHANGED)
    found: dict[Arena, list[RowGradient]] = defaultdict(list)
    for contribution in merge_gradients(waiting):
        for arena, occurrences, grad in contribution.gradients():
            found[arena].append(RowGradient(occurrences, grad, contribution.is_summed))
    return {arena: concatenate_gradients(arena, of_arena) for arena, of_arena in found.items()}


def concatenate_gradients(arena: Arena, found: Sequence[RowGradient]) -> tuple[Occurrences, Tensor]:
    """Concatenate the occurrences and gradients of one arena."""
    if len(found) == 1 and (found[0].occurrences.leaf is None or kernels_of(arena).SUMS_LEAVES):
        return found[0].occurrences, found[0].grad
    # Each gradient is summed first, because ranks exchange sums. So all plans add in the same order.
    found = [gradient if gradient.is_summed else sum_gradient(arena, gradient) for gradient in found]
    if len(found) == 1:
        return found[0].occurrences, found[0].grad
    grads = [gradient.grad for gradient in found]
    return Occurrences.concatenate([p.occurrences for p in found], list(map(len, grads))), torch.cat(grads)


def sum_squares(
    arena: Arena, occurrences: Occurrences, sums: Tensor, trained: Collection[str], scale: Tensor
) -> Tensor:
    """Sum the squares of scaled gradients ``[U, D]`` of the rows of some tables, see `sums_of`."""
    is_trained = torch.tensor([table in trained for table in arena.tables], device=scale.device)
    measure = is_trained[arena.locate(occurrences.slots)[0]] & (occurrences.slots < arena.store.slots)  # no padding
    return sums_of(torch.where(measure[:, None], blocks_of((sums * scale).square()), 0.0))


_OFF = {"max_grad_norm": float("inf"), "max_norm": float("inf"), "l2": 0.0, "decay": 0.0}


@dataclass
class _HyperTensors:
    """Tensors that kernels read for the tables of an arena."""

    # values in `hyper`: the distinct tuples of hyperparameters, and for each table the index of its tuple
    written: tuple[tuple[tuple[float, ...], ...], tuple[int, ...]] | None
    hyper: Tensor  # as in `RuleStep`
    measure: Tensor | None  # [T], indices in `StepState.counts`; None: all, in order
    betas: Tensor  # [T, C] float64, hyperparameters with bias correction
    seeds: Tensor  # [T], seeds of stochastic rounding; unused if no row is rounded


class StepState:
    """Hyperparameters and step counts ``[tables]`` int64 of the tables of one optimizer.

    Gradients are sums over ``ranks`` ranks, which `factors` turns into means.
    """

    def __init__(self, rule: Rule, tables: Collection[str], ranks: int) -> None:
        self.rule, self._ranks = rule, ranks
        self.order = {t: i for i, t in enumerate(tables)}
        self.counts = torch.zeros(len(self.order), dtype=torch.int64, device="cpu")
        self._corrected = [OWN + rule.hyper.index(name) for name in rule.corrected]
        self._trained: dict[tuple[bool, ...], Tensor] = {}  # kept, because captured steps read them
        self._tensors: dict[Arena, _HyperTensors] = {}
        self._open: tuple[Tensor, Tensor] | None = None

    def add(self, tables: Collection[str]) -> None:
        """Add tables before the first step."""
        self.order |= {t: len(self.order) + i for i, t in enumerate(tables)}
        self.counts = torch.zeros(len(self.order), dtype=torch.int64, device="cpu")

    def factors(self, inv_scale: Tensor | None, gate: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `RuleStep.inv_scale`, which includes the mean over ranks, and `RuleStep.gate`."""
        if self._open is None or self._open[0].device != device:
            one = torch.ones((), dtype=torch.float32, device=device)
            self._open = one / self._ranks, one
        return self._open[0] if inv_scale is None else inv_scale / self._ranks, self._open[1] if gate is None else gate

    def count(
        self, hyper: Mapping[str, Sequence[float]], gate: Tensor | None, device: torch.device, backend: BackendName
    ) -> None:
        """Count a step of all trained tables, unless the gate is closed.

        Tables that the batch did not look up are counted, too, so counts do not depend on the tables of the arena.
        """
        self.counts = self.counts.to(device)
        names = tuple(map(hyper.__contains__, self.order))
        trained = self._trained.get(names)
        if trained is None or trained.device != device:
            self._trained[names] = trained = torch.tensor(names, dtype=torch.int64, device=device)
        if gate is None:
            self.counts += trained
        elif device.type == "cuda" and (found := _find_triton(device, backend)) is not None:
            found.count_steps_(self.counts, trained, gate)
        else:
            self.counts += trained * (gate != 0)

    def step(self, arena: Arena, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor, gate: Tensor) -> RuleStep:
        """Return the hyperparameters and rounding seeds for the shards of an arena."""
        tensors = self.write(arena, hyper)
        counts = self.counts if tensors.measure is None else self.counts[tensors.measure.to(self.counts.device)]
        device = arena.store.device  # tables of one optimizer may be on several
        counts, inv_scale, gate = counts.to(device), inv_scale.to(device), gate.to(device)
        if self._corrected:
            tensors.hyper[:, OWN + len(self.rule.hyper) :] = 1 - tensors.betas ** counts[:, None]
        if arena.rounds:  # a new tensor, because the average of replicas reads it after the step
            tensors.seeds = _choose_seed_kernel(arena)(arena.seeds, counts)
        return RuleStep(
            rule=self.rule,
            hyper=tensors.hyper,
            seeds=tensors.seeds,
            uses=used_options(hyper),
            inv_scale=inv_scale,
            gate=gate,
        )

    def write(self, arena: Arena, hyper: Mapping[str, Sequence[float]]) -> _HyperTensors:
        """Write the hyperparameters of an arena's tables to the device if any has changed."""
        idle = (0.0,) * (len(COMMON) + len(self.rule.hyper))
        # The tables of a parameter group share one list of hyperparameters, so there are few different lists.
        found = list(map(hyper.get, arena.tables))
        number = {key: i for i, key in enumerate(dict.fromkeys(map(id, found)))}
        different = {id(values): values for values in found}
        values = tuple(
            (0.0, *idle) if values_of_table is None else (1.0, *values_of_table)
            for values_of_table in different.values()
        )
        wanted = values, tuple(map(number.__getitem__, map(id, found)))
        device = arena.store.device
        tensors = self._tensors.get(arena)
        if tensors is None or tensors.hyper.device != device:
            self._tensors[arena] = tensors = self._allocate(arena, 1 + len(idle), device)
        if tensors.written != wanted:
            of_table = torch.tensor(values, dtype=torch.float32, device="cpu").view(len(values), 1 + len(idle))
            of_table = of_table[torch.tensor(wanted[1], dtype=torch.int64, device="cpu")]
            _copy_to_device(tensors.hyper[:, : 1 + len(idle)], of_table)
            if self._corrected:
                _copy_to_device(tensors.betas, of_table[:, self._corrected].double())
            tensors.written = wanted
        return tensors

    def _allocate(self, arena: Arena, columns: int, device: torch.device) -> _HyperTensors:
        tables, corrected = len(arena.tables), len(self._corrected)
        positions = [self.order.get(t, 0) for t in arena.tables]
        is_in_order = positions == list(range(len(self.order)))
        return _HyperTensors(
            written=None,
            hyper=torch.zeros(tables, columns + corrected, dtype=torch.float32, device=device),
            measure=None if is_in_order else torch.tensor(positions, dtype=torch.int64, device=device),
            betas=torch.zeros(tables, corrected, dtype=torch.float64, device=device),
            seeds=torch.zeros(tables, dtype=torch.int64, device=device),
        )


def used_options(hyper: Mapping[str, Sequence[float]]) -> frozenset[str]:
    """Return the names of common options that any table uses."""
    options = {id(values_of_table): values_of_table for values_of_table in hyper.values()}.values()
    return frozenset(
        name
        for name, off in _OFF.items()
        if any(values_of_table[COMMON.index(name)] != off for values_of_table in options)
    )


def _choose_seed_kernel(arena: Arena) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function for the seeds of a step: one Triton kernel if that backend serves the arena, else torch."""
    found = _find_triton(arena.store.device, arena.backend)
    return step_seeds if found is None else found.step_seeds


def _find_triton(device: torch.device, backend: BackendName) -> Any:
    """Return the Triton kernels of this module's operations if that backend serves the device."""
    if ops.select(device, backend).NAME != "triton":
        return None
    return importlib.import_module("hotbed.ops.triton_dense")


def _copy_to_device(into: Tensor, values: Tensor) -> None:
    """Copy host values to a device tensor without synchronization."""
    into.copy_(to_device(values, into.device))


VECTOR_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that looked-up vectors may have."""


class TableUpdater:
    """Connects one optimizer to the tables that it trains, see `hotbed.optim.Updater`.

    Gradients of ``ranks`` ranks are averaged, because losses are means. ``on_grad`` is called for every gradient, with
    a function that returns whether it is finite. ``on_stepped`` is called with the tables after each step.
    """

    def __init__(
        self,
        rule: Rule,
        tables: Collection[str],
        groups: Sequence[TableGroup],
        ranks: int,
        on_grad: Callable[[Callable[[], Tensor]], None],
        on_stepped: Callable[[Collection[str]], None] | None,
    ) -> None:
        self.rule = rule
        self.tables = set(tables)
        self._groups = [group for group in groups if not self.tables.isdisjoint(group.tables)]
        self._group_of = {t: group for group in self._groups for t in group.tables if t in self.tables}
        self._on_grad, self._on_stepped = on_grad, on_stepped
        self._waiting: list[Contribution] = []
        self._sums: dict[Arena, tuple[Occurrences, Tensor]] | None = None
        self.optimizer: Callable[[], Any] = lambda: None
        self.state_of_steps = StepState(rule, self._group_of, ranks)

    @property
    def shared_arenas(self) -> set[Arena]:
        """Arenas that also have tables of other collections, see `hotbed.embed.shared_arenas`."""
        return {arena for group in self._groups if group.is_shared for arena in group.arenas}

    def add(self, tables: Collection[str], groups: Sequence[TableGroup]) -> None:
        """Add tables of another collection that shares arenas with this updater."""
        self.tables |= set(tables)
        new = [group for group in groups if not self.tables.isdisjoint(group.tables)]
        self._groups += new
        self._group_of |= {t: group for group in new for t in group.tables if t in self.tables}
        self.state_of_steps.add(tables)

    def receive(self, contribution: Contribution) -> None:
        """Keep a gradient for the step if it may belong to a table of this optimizer."""
        if not self.tables.isdisjoint(contribution.tables):
            self._on_grad(contribution.finite)
            self._waiting.append(contribution)
            self._sums = None

    @torch.no_grad()
    def apply(self, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor | None, gate: Tensor | None) -> None:
        """Sum all waiting gradients, apply the rule once per row, and drop the gradients."""
        self._refuse_lost(hyper)
        found = group_by_arena(self._waiting) if self._sums is None else dict(self._sums)
        device = next(iter(self._group_of.values())).device if self._group_of else torch.device("cpu")
        backends: list[BackendName] = [arena.backend for group in self._groups for arena in group.arenas]
        self.state_of_steps.count(hyper, gate, device, backends[0] if backends else "auto")
        factor, gate = self.state_of_steps.factors(inv_scale, gate, device)
        steps: dict[Arena, RuleStep] = {}
        for group in self._groups:
            for arena in group.arenas:
                if arena not in steps:
                    steps[arena] = self.state_of_steps.step(arena, hyper, factor, gate)
            # The first group of a shared arena updates the tables of all groups.
            here = {arena: found.pop(arena) for arena in group.arenas if arena in found}
            group.update({arena: steps[arena] for arena in group.arenas}, here)
        self._waiting.clear()
        self._sums = None
        if self._on_stepped is not None:
            self._on_stepped(self.tables)

    @property
    def is_waiting(self) -> bool:
        """Whether any gradient waits for a step."""
        return bool(self._waiting)

    @torch.no_grad()
    def square_sums(self, trained: Collection[str], factor: Tensor | None) -> Tensor:
        """Sum the squares of waiting gradients of this rank's rows, each row counted once. See `sums_of`."""
        if self._sums is None:
            found = {
                arena: RowGradient(*of_arena, is_summed=False)
                for arena, of_arena in group_by_arena(self._waiting).items()
            }
            self._sums = {arena: sum_gradient(arena, gradient)[:2] for arena, gradient in found.items()}
        device = next(iter(self._group_of.values())).device
        total = no_sums(device)
        for arena, of_arena in self._sums.items():
            scale, _ = self.state_of_steps.factors(factor, None, arena.store.device)
            total += sum_squares(arena, *of_arena, trained, scale).to(device)
        return total

    def prepare(self, hyper: Mapping[str, Sequence[float]]) -> Hashable:
        """Write hyperparameters to the device. Return the trained tables and the options that they use."""
        self._refuse_lost(hyper)
        for group in self._groups:
            for arena in group.arenas:
                self.state_of_steps.write(arena, hyper)
        return tuple(hyper), used_options(hyper)

    def _refuse_lost(self, hyper: Mapping[str, Sequence[float]]) -> None:
        for table in hyper:
            if table not in self.tables:
                raise OptimizerError(
                    f"table '{table}' has two optimizers: the one made later trains it. Make one optimizer, and use "
                    "its `groups` to set options per table"
                )

    def clear(self, tables: Collection[str] | None = None) -> None:
        """Drop all waiting gradients, or only gradients of some tables."""
        kept: list[Contribution] = []
        for waiting in self._waiting:
            if tables is None or waiting.tables.issubset(tables):
                waiting.drop()
            else:
                kept.append(waiting)
        self._waiting, self._sums = kept, None

    def finite(self) -> Tensor:
        """Return whether every waiting gradient is finite, as a 0-d bool."""
        flags = [waiting.finite() for waiting in self._waiting]
        return torch.stack(flags).all() if flags else torch.tensor(True)

    def state(self, table: str) -> dict[str, Tensor]:
        """Return a table's moments and ``step``. Moments of a local table share its memory."""
        group = self._group_of[table]
        moments = () if are_tables_left_out() else self.rule.moments
        found = {m.name: view_as_storage(group.moment(table, m.name)) for m in moments}
        return {**found, "step": self.state_of_steps.counts[self.state_of_steps.order[table]]}

    def load_state(self, table: str, state: Mapping[str, Tensor]) -> None:
        """Overwrite a table's moments and ``step`` with what `state` returned."""
        group = self._group_of[table]
        for moment in () if are_tables_left_out() else self.rule.moments:
            group.load_moment(table, moment.name, state[moment.name])
        self.state_of_steps.counts[self.state_of_steps.order[table]] = state["step"]


class Updaters(WeakSet[TableUpdater]):
    """The updaters of one collection's optimizers. ``idle`` records gradients that no optimizer receives."""

    def __init__(self, tables: nn.Module, idle: Callable[[], list[str]]) -> None:
        super().__init__()
        self.idle = IdleTables(tables, idle)


class PooledLookup(torch.autograd.Function):
    """Pool in forward with one launch per request. Pass bags and gradients to the updaters in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        requests: Sequence[Request],
        outputs: Sequence[Tensor],
        updaters: Updaters,
    ) -> tuple[Tensor, ...]:
        """Fill the outputs ``[B, width, D]`` and return each without its ``room``.

        Autograd records the call if ``anchor`` requires a gradient. ``weights`` are an input for the case that they
        require a gradient, but requests have their values. Outputs are passed in a list, so that autograd treats the
        returned tensors as new.
        """
        ctx.requests, ctx.updaters = requests, updaters
        ctx.versions = [request.bags.versions() for request in requests]
        ctx.updates = [request.source.updates for request in requests]
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        for source, bags, output, _ in requests:
            source.store.lookup(bags, outputs[output])
        room = {output: bags.room for _, bags, output, _ in requests}
        # Return no view without room, because autograd forbids in-place changes of a view from a Function.
        return tuple(out[:, room[i] :] if room[i] else out for i, out in enumerate(outputs))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Pass the gradients to the updaters, which keep them for the optimizer's step."""
        updaters = list[TableUpdater](ctx.updaters)
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = torch.zeros(ctx.weights.shape, dtype=torch.float32, device=ctx.weights.device)
        for request, versions, updates in zip(ctx.requests, ctx.versions, ctx.updates, strict=True):
            source, bags, output, trained = request
            grad = grad_outputs[output]
            if grad is None:
                continue  # nothing depends on this output
            rows, width = _view_as_rows(grad)
            bags = replace(bags, width=width, room=0)
            if of_weights is not None:
                if source.updates != updates:
                    raise OptimizerError(
                        "rows were updated between a lookup and its backward: the gradient of per-id weights needs the "
                        "rows of the lookup. Call backward before the optimizer's step"
                    )
                source.store.weight_gradient(bags, rows, of_weights)
            if not (trained and ctx.needs_input_grad[0]):
                continue
            if not updaters:
                ctx.updaters.idle.reach()
                continue
            contribution = source.contribution(bags, versions, rows)
            for updater in updaters:
                updater.receive(contribution)
            if not any(contribution.tables <= updater.tables for updater in updaters):
                ctx.updaters.idle.reach()
        return None, None if of_weights is None else of_weights.to(ctx.weights.dtype), None, None, None


def _view_as_rows(grad: Tensor) -> tuple[Tensor, int]:
    """View a gradient ``[B, F, D]`` as rows ``[…, D]`` and return the rows per sample. Copy only if necessary."""
    batch, features, dim = grad.shape
    if batch == 0 or grad.stride(2) != 1 or (features > 1 and grad.stride(1) != dim) or grad.stride(0) % dim:
        return grad.contiguous().view(batch * features, dim), features
    width = grad.stride(0) // dim if batch > 1 else features
    return grad.as_strided(((batch - 1) * width + features, dim), (dim, 1)), width
