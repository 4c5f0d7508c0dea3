"""From backward to the optimizer: gradients of pooled vectors wait in an updater until the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed.bags import version
from hotbed.embed.arena import Arena
from hotbed.errors import OptimizerError
from hotbed.ops import BagLayout, Occurrences, RuleStep
from hotbed.optim import Rule


class PooledLookup(torch.autograd.Function):
    """Forward: one lookup of an arena. Backward: hand layout and gradient to the updaters; tables get no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arena: Arena, bags: BagLayout, updaters: Iterable[TableUpdater]) -> Tensor:
        """Pooled vectors ``[B, F, D]``; ``anchor`` only makes autograd record the call."""
        ctx.arena, ctx.bags, ctx.updaters = arena, bags, updaters
        ctx.version = version(bags.ids)
        return arena.store.lookup(bags)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[None, None, None, None]:
        """Leave the gradient where the optimizer's step finds it."""
        grad = grad_outputs[0].flatten(0, 1).contiguous()
        for updater in ctx.updaters:
            updater.receive(ctx.arena, Waiting(ctx.bags, ctx.version, grad))
        return None, None, None, None


class Waiting(NamedTuple):
    """A gradient that waits for the step: its bags, the version of their ids at lookup, and ``[B · F, D]``."""

    bags: BagLayout
    version: int
    grad: Tensor


class TableUpdater:
    """One optimizer's end of a collection; see `hotbed.optim.Updater`."""

    def __init__(
        self, rule: Rule, tables: Sequence[str], arenas: Sequence[Arena], on_grad: Callable[[Tensor], None]
    ) -> None:
        self.rule = rule
        self.tables = set(tables)
        self._arena_of = {t: arena for arena in arenas for t in arena.tables if t in self.tables}
        self._on_grad = on_grad
        self._waiting: dict[Arena, list[Waiting]] = defaultdict(list)

    def receive(self, arena: Arena, waiting: Waiting) -> None:
        """Keep a gradient for the step, if it concerns a table of this optimizer."""
        if not self.tables.isdisjoint(arena.tables):
            self._waiting[arena].append(waiting)
            self._on_grad(waiting.grad)

    @torch.no_grad()
    def apply(self, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor | None, gate: Tensor | None) -> None:
        """Coalesce everything that waits and apply the rule once per row; then forget it."""
        for table in hyper:
            if table not in self.tables:
                raise OptimizerError(
                    f"table '{table}' is trained by an optimizer that was made later; make one optimizer, and use its "
                    "`groups` to treat tables differently"
                )
        for waiting in self._waiting.values():
            if any(version(w.bags.ids) != w.version for w in waiting):
                raise OptimizerError(
                    "ids were changed in place between the lookup and the step, so it is lost which rows the gradients "
                    "belong to; give every batch its own tensor, or step before reusing it"
                )
        for arena, waiting in self._waiting.items():
            store = arena.store
            one = torch.ones((), dtype=torch.float32, device=store.device)
            idle = [0.0] * (1 + len(self.rule.hyper))
            rows = [[1.0, *hyper[t]] if t in hyper else idle for t in arena.tables]
            step = RuleStep(
                rule=self.rule,
                bases=arena.bases,
                hyper=torch.tensor(rows, dtype=torch.float32, device=store.device),
                inv_scale=one if inv_scale is None else inv_scale,
                gate=one if gate is None else gate,
            )
            found = Occurrences.concatenate(
                [store.occurrences(w.bags) for w in waiting], [len(w.grad) for w in waiting]
            )
            store.update(step, found, waiting[0].grad if len(waiting) == 1 else torch.cat([w.grad for w in waiting]))
        self._waiting.clear()

    def clear(self) -> None:
        """Forget everything that waits."""
        self._waiting.clear()

    def finite(self) -> Tensor:
        """0-d bool: whether every waiting gradient is finite."""
        flags = [torch.isfinite(w.grad).all() for waiting in self._waiting.values() for w in waiting]
        return torch.stack(flags).all() if flags else torch.tensor(True)

    def moment(self, table: str, name: str) -> Tensor:
        """A view of a moment of a table, ``[R]`` or ``[R, D]``."""
        return self._arena_of[table].view(table, name)
