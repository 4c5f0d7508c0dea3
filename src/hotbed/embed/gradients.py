"""Keep gradients of looked-up vectors from backward to the optimizer's step, which applies the rule once per row.

`PooledLookup` is the lookup as autograd sees it: forward pools rows, backward hands (bags, gradient) to the
`TableUpdater` of each optimizer, where they wait. `TableUpdater.apply` is the step: it joins what waits by arena and
lets each `TableGroup` update its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotbed.embed.arena import Arena, untied
from hotbed.embed.idle_tables import IdleTables
from hotbed.embed.row_gradients import RowGradient, by_arena, squares, summed
from hotbed.embed.step_state import StepState, used_options
from hotbed.embed.table_group import Contribution, Request, TableGroup
from hotbed.errors import OptimizerError
from hotbed.ops import BackendName, Occurrences, RuleStep
from hotbed.ops.exact_sum import no_sums
from hotbed.optim import Rule
from hotbed.torch_hooks import are_tables_left_out

VECTOR_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that looked-up vectors may have."""


class TableUpdater:
    """One optimizer's end of a collection; see `hotbed.optim.Updater`.

    Gradients of ``ranks`` ranks add up; each counts ``1 / ranks``, because their losses are means. ``on_grad`` is
    called for every gradient that arrives, with a function that says whether it is finite; ``on_stepped``, if given,
    with the tables when gradients have been used.
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
        """Arenas that have tables of other collections, too; see `hotbed.embed.shared_arenas`."""
        return {arena for group in self._groups if group.is_shared for arena in group.arenas}

    def add(self, tables: Collection[str], groups: Sequence[TableGroup]) -> None:
        """Train tables of a further collection, too, in arenas that it shares with those of this updater."""
        self.tables |= set(tables)
        new = [group for group in groups if not self.tables.isdisjoint(group.tables)]
        self._groups += new
        self._group_of |= {t: group for group in new for t in group.tables if t in self.tables}
        self.state_of_steps.add(tables)

    def receive(self, contribution: Contribution) -> None:
        """Keep a gradient for the step, if it may be of a table of this optimizer."""
        if not self.tables.isdisjoint(contribution.tables):
            self._on_grad(contribution.finite)
            self._waiting.append(contribution)
            self._sums = None

    @torch.no_grad()
    def apply(self, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor | None, gate: Tensor | None) -> None:
        """Coalesce all gradients that wait and apply the rule once per row; then forget them."""
        self._refuse_lost(hyper)
        found = by_arena(self._waiting) if self._sums is None else dict(self._sums)
        device = next(iter(self._group_of.values())).device if self._group_of else torch.device("cpu")
        backends: list[BackendName] = [arena.backend for group in self._groups for arena in group.arenas]
        self.state_of_steps.count(hyper, gate, device, backends[0] if backends else "auto")
        factor, gate = self.state_of_steps.factors(inv_scale, gate, device)
        steps: dict[Arena, RuleStep] = {}
        for group in self._groups:
            for arena in group.arenas:
                if arena not in steps:
                    steps[arena] = self.state_of_steps.step(arena, hyper, factor, gate)
            # Of an arena that several groups share, the first updates the tables of all.
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
        """Sum the squares of the gradients that wait: of rows of this rank, each counted once. See `sums_of`."""
        if self._sums is None:
            found = {
                arena: RowGradient(*of_arena, is_summed=False) for arena, of_arena in by_arena(self._waiting).items()
            }
            self._sums = {arena: summed(arena, gradient)[:2] for arena, gradient in found.items()}
        device = next(iter(self._group_of.values())).device
        total = no_sums(device)
        for arena, of_arena in self._sums.items():
            scale, _ = self.state_of_steps.factors(factor, None, arena.store.device)
            total += squares(arena, *of_arena, trained, scale).to(device)
        return total

    def prepare(self, hyper: Mapping[str, Sequence[float]]) -> Hashable:
        """Write hyperparameters where kernels read them; return which tables are trained, and with which options."""
        self._refuse_lost(hyper)
        for group in self._groups:
            for arena in group.arenas:
                self.state_of_steps.write(arena, hyper)
        return tuple(hyper), used_options(hyper)

    def _refuse_lost(self, hyper: Mapping[str, Sequence[float]]) -> None:
        for table in hyper:
            if table not in self.tables:
                raise OptimizerError(
                    f"table '{table}' is trained by an optimizer that was made later; make one optimizer, and use its "
                    "`groups` to treat tables differently"
                )

    def clear(self, tables: Collection[str] | None = None) -> None:
        """Drop the waiting gradients, or those of some tables."""
        kept: list[Contribution] = []
        for waiting in self._waiting:
            if tables is None or waiting.tables.issubset(tables):
                waiting.drop()
            else:
                kept.append(waiting)
        self._waiting, self._sums = kept, None

    def finite(self) -> Tensor:
        """Return, as 0-d bool, whether every waiting gradient is finite."""
        flags = [waiting.finite() for waiting in self._waiting]
        return torch.stack(flags).all() if flags else torch.tensor(True)

    def state(self, table: str) -> dict[str, Tensor]:
        """Return a table's moments and its ``step``; of a table that is all on this rank, their memory, not a copy."""
        group = self._group_of[table]
        moments = () if are_tables_left_out() else self.rule.moments
        found = {m.name: untied(group.moment(table, m.name)) for m in moments}
        return {**found, "step": self.state_of_steps.counts[self.state_of_steps.order[table]]}

    def load_state(self, table: str, state: Mapping[str, Tensor]) -> None:
        """Overwrite a table's moments and ``step`` with what `state` returned."""
        group = self._group_of[table]
        for moment in () if are_tables_left_out() else self.rule.moments:
            group.load_moment(table, moment.name, state[moment.name])
        self.state_of_steps.counts[self.state_of_steps.order[table]] = state["step"]


class Updaters(WeakSet[TableUpdater]):
    """The updaters of one collection's optimizers; ``idle`` notes gradients that none of them takes."""

    def __init__(self, tables: nn.Module, idle: Callable[[], list[str]]) -> None:
        super().__init__()
        self.idle = IdleTables(tables, idle)


class PooledLookup(torch.autograd.Function):
    """Forward: one launch per request. Backward: hand bags and gradients to the updaters; tables get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        requests: Sequence[Request],
        outputs: Sequence[Tensor],
        updaters: Updaters,
    ) -> tuple[Tensor, ...]:
        """Fill the outputs ``[B, width, D]`` and return each without its room.

        ``anchor`` makes autograd record the call if it requires a gradient. ``weights`` are given in case they require
        a gradient; requests carry their values. Outputs are in a list, so that autograd takes what is returned for new
        tensors.
        """
        ctx.requests, ctx.updaters = requests, updaters
        ctx.versions = [request.bags.versions() for request in requests]
        ctx.updates = [request.source.updates for request in requests]
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        for source, bags, output, _ in requests:
            source.store.lookup(bags, outputs[output])
        room = {output: bags.room for _, bags, output, _ in requests}
        # No view where there is no room: autograd forbids changing a Function's view in place.
        return tuple(out[:, room[i] :] if room[i] else out for i, out in enumerate(outputs))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Hand the gradients to the updaters, where the optimizer's step finds them."""
        updaters = list[TableUpdater](ctx.updaters)
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = torch.zeros(ctx.weights.shape, dtype=torch.float32, device=ctx.weights.device)
        for request, versions, updates in zip(ctx.requests, ctx.versions, ctx.updates, strict=True):
            source, bags, output, trained = request
            grad = grad_outputs[output]
            if grad is None:
                continue  # nothing depends on this output
            rows, width = _rows_of(grad)
            bags = replace(bags, width=width, room=0)
            if of_weights is not None:
                if source.updates != updates:
                    raise OptimizerError(
                        "rows were updated between the lookup and its backward, which needs them as they were for the "
                        "gradient of the per-id weights; call backward before the optimizer's step"
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


def _rows_of(grad: Tensor) -> tuple[Tensor, int]:
    """View a gradient ``[B, F, D]`` as rows ``[…, D]``, and count these per sample; copied only if it must be."""
    batch, features, dim = grad.shape
    if batch == 0 or grad.stride(2) != 1 or (features > 1 and grad.stride(1) != dim) or grad.stride(0) % dim:
        return grad.contiguous().view(batch * features, dim), features
    width = grad.stride(0) // dim if batch > 1 else features
    return grad.as_strided(((batch - 1) * width + features, dim), (dim, 1)), width
