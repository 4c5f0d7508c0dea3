"""Join gradients of rows of one arena, and sum the gradients of each row.

Keep hyperparameters and counts of steps where kernels read them, in the device's memory, and write them in place.

A step then launches next to nothing before its kernels, and the host never waits: what has not changed since the last
step is not written again; what has (a learning rate that a schedule moves) is copied from page-locked memory while the
host goes on. Tensors keep their addresses from step to step, as a CUDA graph of the step needs.

Keep gradients of looked-up vectors from backward to the optimizer's step, which applies the rule once per row.

`PooledLookup` is the lookup as autograd sees it: forward pools rows, backward hands (bags, gradient) to the
`TableUpdater` of each optimizer, where they wait. `TableUpdater.apply` is the step: it joins what waits by arena and
lets each `TableGroup` update its rows.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotbed import ops
from hotbed.embed.arena import Arena, untied
from hotbed.embed.idle_tables import IdleTables
from hotbed.embed.local_tables import joined
from hotbed.embed.table_group import CHANGED, Contribution, Request, TableGroup
from hotbed.errors import OptimizerError
from hotbed.ops import BackendName, Occurrences, RuleStep
from hotbed.ops.exact_sum import no_sums, sums_of
from hotbed.ops.layout import OWN
from hotbed.ops.reference_rules import blocks_of
from hotbed.ops.rows import step_seeds
from hotbed.optim import COMMON, Rule
from hotbed.store.memory import to_device
from hotbed.torch_hooks import are_tables_left_out


class RowGradient(NamedTuple):
    """A gradient of rows of one arena, and whether each row's gradients from one rank are one sum already."""

    occurrences: Occurrences
    grad: Tensor
    is_summed: bool


def by_arena(waiting: Sequence[Contribution]) -> dict[Arena, tuple[Occurrences, Tensor]]:
    """Join the gradients that wait for a step, by arena."""
    if any(contribution.changed() for contribution in waiting):
        raise OptimizerError(CHANGED)
    found: dict[Arena, list[RowGradient]] = defaultdict(list)
    for contribution in joined(waiting):
        for arena, occurrences, grad in contribution.gradients():
            found[arena].append(RowGradient(occurrences, grad, contribution.is_summed))
    return {arena: concatenated(arena, of_arena) for arena, of_arena in found.items()}


def concatenated(arena: Arena, found: Sequence[RowGradient]) -> tuple[Occurrences, Tensor]:
    """Join gradients of one arena: their occurrences, and the gradients one after the other."""
    if len(found) == 1:
        return found[0].occurrences, found[0].grad
    # Each is summed first, as those are that ranks send each other, so that no plan changes the order of additions.
    found = [gradient if gradient.is_summed else summed(arena, gradient) for gradient in found]
    grads = [gradient.grad for gradient in found]
    return Occurrences.concatenate([p.occurrences for p in found], list(map(len, grads))), torch.cat(grads)


def summed(arena: Arena, gradient: RowGradient) -> RowGradient:
    """Sum a gradient to one row per slot; on a GPU into one row per id, because the host does not know the number."""
    store, limit, kernels = arena.store, arena.store.slots, ops.select(arena.store.device, arena.backend)
    groups = gradient.occurrences.groups or kernels.group(replace(gradient.occurrences, limit=limit))
    on_host = store.device.type == "cpu"
    count = int(groups.counts[0]) if on_host else len(groups.rows)
    sums = store.empty((count, store.dim), torch.float32)
    here, slots = torch.arange(count, device=sums.device), groups.rows[:count]
    kernels.segment_sum(gradient.occurrences, groups, gradient.grad, here, sums)
    if on_host:
        return RowGradient(Occurrences(slots, here, None), sums, True)
    slots = torch.where(here < groups.counts[0], slots, limit)  # beyond them there is nothing: padding
    return RowGradient(Occurrences(slots, here, None, limit=limit), sums, True)


def squares(arena: Arena, occurrences: Occurrences, sums: Tensor, trained: Collection[str], scale: Tensor) -> Tensor:
    """Sum the squares of gradients ``[U, D]`` times a factor, of rows of some tables; see `sums_of`."""
    is_trained = torch.tensor([table in trained for table in arena.tables], device=scale.device)
    counted = is_trained[arena.locate(occurrences.slots)[0]] & (occurrences.slots < arena.store.slots)  # else padding
    return sums_of(torch.where(counted[:, None], blocks_of((sums * scale).square()), 0.0))


_OFF = {"max_grad_norm": float("inf"), "max_norm": float("inf"), "l2": 0.0, "decay": 0.0}


@dataclass
class _Lines:
    """Tensors that kernels read for an arena's tables."""

    # source of `hyper`: the distinct lines, and the line of each table
    written: tuple[tuple[tuple[float, ...], ...], tuple[int, ...]] | None
    hyper: Tensor  # as in `RuleStep`
    counted: Tensor | None  # [T], positions of the tables' counts; None: all, in order
    betas: Tensor  # [T, C] float64, hyperparameters with bias correction
    seeds: Tensor  # [T], of stochastic rounding; unused if no row is rounded


class StepState:
    """Hyperparameters, and counts of steps ``[tables]`` int64, of the tables of one optimizer.

    Gradients of ``ranks`` ranks add up.
    """

    def __init__(self, rule: Rule, tables: Collection[str], ranks: int) -> None:
        self.rule, self._ranks = rule, ranks
        self.order = {t: i for i, t in enumerate(tables)}
        self.counts = torch.zeros(len(self.order), dtype=torch.int64, device="cpu")
        self._corrected = [OWN + rule.hyper.index(name) for name in rule.corrected]
        self._trained: dict[tuple[bool, ...], Tensor] = {}  # kept, for a captured step reads them
        self._lines: dict[Arena, _Lines] = {}
        self._open: tuple[Tensor, Tensor] | None = None

    def add(self, tables: Collection[str]) -> None:
        """Count the steps of further tables, too; before the first step."""
        self.order |= {t: len(self.order) + i for i, t in enumerate(tables)}
        self.counts = torch.zeros(len(self.order), dtype=torch.int64, device="cpu")

    def factors(self, inv_scale: Tensor | None, gate: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the factor of all gradients, with the mean over ranks in it, and the gate, as `RuleStep` has them."""
        if self._open is None or self._open[0].device != device:
            one = torch.ones((), dtype=torch.float32, device=device)
            self._open = one / self._ranks, one
        return self._open[0] if inv_scale is None else inv_scale / self._ranks, self._open[1] if gate is None else gate

    def count(
        self, hyper: Mapping[str, Sequence[float]], gate: Tensor | None, device: torch.device, backend: BackendName
    ) -> None:
        """Count the step of the tables that are trained.

        Whether or not the batch touched them, so that a table's count does not depend on what shares its arena; but not
        while the gate is closed.
        """
        self.counts = self.counts.to(device)
        names = tuple(map(hyper.__contains__, self.order))
        trained = self._trained.get(names)
        if trained is None or trained.device != device:
            self._trained[names] = trained = torch.tensor(names, dtype=torch.int64, device=device)
        if gate is None:
            self.counts += trained
        elif device.type == "cuda" and (found := _triton(device, backend)) is not None:
            found.count_steps_(self.counts, trained, gate)
        else:
            self.counts += trained * (gate != 0)

    def step(self, arena: Arena, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor, gate: Tensor) -> RuleStep:
        """Make what kernels need to update the shards of an arena: hyperparameters by shard, seeds for rounding."""
        lines = self.write(arena, hyper)
        counts = self.counts if lines.counted is None else self.counts[lines.counted.to(self.counts.device)]
        device = arena.store.device  # tables of one optimizer may be on several
        counts, inv_scale, gate = counts.to(device), inv_scale.to(device), gate.to(device)
        if self._corrected:
            lines.hyper[:, OWN + len(self.rule.hyper) :] = 1 - lines.betas ** counts[:, None]
        if arena.rounds:  # a tensor of its own: what averages replicas reads it after the step
            lines.seeds = _seeds_by(arena)(arena.seeds, counts)
        return RuleStep(
            rule=self.rule,
            hyper=lines.hyper,
            seeds=lines.seeds,
            uses=used_options(hyper),
            inv_scale=inv_scale,
            gate=gate,
        )

    def write(self, arena: Arena, hyper: Mapping[str, Sequence[float]]) -> _Lines:
        """Write the hyperparameters of an arena's tables, if any has changed."""
        idle = (0.0,) * (len(COMMON) + len(self.rule.hyper))
        # Tables of a group have one list of hyperparameters, so there are few different lines.
        found = list(map(hyper.get, arena.tables))
        number = {key: i for i, key in enumerate(dict.fromkeys(map(id, found)))}
        different = {id(values): values for values in found}
        values = tuple((0.0, *idle) if line is None else (1.0, *line) for line in different.values())
        wanted = values, tuple(map(number.__getitem__, map(id, found)))
        device = arena.store.device
        lines = self._lines.get(arena)
        if lines is None or lines.hyper.device != device:
            self._lines[arena] = lines = self._allocated(arena, 1 + len(idle), device)
        if lines.written != wanted:
            of_table = torch.tensor(values, dtype=torch.float32, device="cpu").view(len(values), 1 + len(idle))
            of_table = of_table[torch.tensor(wanted[1], dtype=torch.int64, device="cpu")]
            _write(lines.hyper[:, : 1 + len(idle)], of_table)
            if self._corrected:
                _write(lines.betas, of_table[:, self._corrected].double())
            lines.written = wanted
        return lines

    def _allocated(self, arena: Arena, columns: int, device: torch.device) -> _Lines:
        tables, corrected = len(arena.tables), len(self._corrected)
        places = [self.order.get(t, 0) for t in arena.tables]
        everyone = places == list(range(len(self.order)))
        return _Lines(
            written=None,
            hyper=torch.zeros(tables, columns + corrected, dtype=torch.float32, device=device),
            counted=None if everyone else torch.tensor(places, dtype=torch.int64, device=device),
            betas=torch.zeros(tables, corrected, dtype=torch.float64, device=device),
            seeds=torch.zeros(tables, dtype=torch.int64, device=device),
        )


def used_options(hyper: Mapping[str, Sequence[float]]) -> frozenset[str]:
    """Name the common options that are on for any table."""
    options = {id(line): line for line in hyper.values()}.values()
    return frozenset(name for name, off in _OFF.items() if any(line[COMMON.index(name)] != off for line in options))


def _seeds_by(arena: Arena) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what computes the seeds of a step: one kernel of Triton where that serves the arena, else torch."""
    found = _triton(arena.store.device, arena.backend)
    return step_seeds if found is None else found.step_seeds


def _triton(device: torch.device, backend: BackendName) -> Any:
    """Return the kernels of Triton for what is here, where that backend serves a device."""
    if ops.select(device, backend).NAME != "triton":
        return None
    return importlib.import_module("hotbed.ops.triton_dense")


def _write(into: Tensor, values: Tensor) -> None:
    """Copy values of the host to where kernels read them, without waiting for the device."""
    into.copy_(to_device(values, into.device))


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
        """Arenas that have tables of other collections, too; see `hotbed.embed.single_lookup`."""
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
