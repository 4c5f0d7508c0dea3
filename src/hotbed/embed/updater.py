"""From backward to the optimizer's step: gradients of looked-up vectors wait in a `TableUpdater`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.embed.arena import Arena
from hotbed.errors import OptimizerError
from hotbed.ops import BagLayout, Occurrences, RuleStep
from hotbed.ops.layout import OWN
from hotbed.ops.random import step_seeds
from hotbed.optim import COMMON, Rule

_OFF = {"max_grad_norm": float("inf"), "max_norm": float("inf"), "l2": 0.0, "decay": 0.0}


class Waiting(NamedTuple):
    """A gradient that waits for the step: its bags, what `BagLayout.versions` was at lookup, its rows ``[…, D]``."""

    bags: BagLayout
    versions: tuple[int, int, int]
    grad: Tensor


class TableUpdater:
    """One optimizer's end of a collection; see `hotbed.optim.Updater`."""

    def __init__(
        self, rule: Rule, tables: Collection[str], arenas: Sequence[Arena], on_grad: Callable[[Tensor], None]
    ) -> None:
        self.rule = rule
        self.tables = set(tables)
        self._arena_of = {t: arena for arena in arenas for t in arena.tables if t in self.tables}
        self._on_grad = on_grad
        self._waiting: dict[Arena, list[Waiting]] = defaultdict(list)
        self._steps = {a: torch.zeros(len(a.tables), dtype=torch.int64, device="cpu") for a in self._arena_of.values()}
        self._hyper: dict[Arena, tuple[object, Tensor]] = {}

    def receive(self, arena: Arena, waiting: Sequence[Waiting]) -> None:
        """Keep gradients for the step, if they concern a table of this optimizer."""
        if not self.tables.isdisjoint(arena.tables):
            for one in waiting:
                self._waiting[arena].append(one)
                self._on_grad(one.grad)

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
            if any(w.bags.versions() != w.versions for w in waiting):
                raise OptimizerError(
                    "ids, offsets or per-id weights were changed in place between the lookup and the step, so it is "
                    "lost which rows the gradients belong to; give every batch its own tensors, or step before reusing "
                    "them"
                )
        for arena in self._steps:
            store = arena.store
            one = torch.ones((), dtype=torch.float32, device=store.device)
            step = self._step(arena, hyper, one if inv_scale is None else inv_scale, one if gate is None else gate)
            waiting = self._waiting.get(arena)
            if not waiting:
                continue
            arena.updates += 1
            found = Occurrences.concatenate(
                [store.occurrences(w.bags) for w in waiting], [len(w.grad) for w in waiting]
            )
            store.update(step, found, waiting[0].grad if len(waiting) == 1 else torch.cat([w.grad for w in waiting]))
        self._waiting.clear()

    def _step(self, arena: Arena, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor, gate: Tensor) -> RuleStep:
        """What this step does to the tables of an arena.

        Their steps are counted here, whether or not the batch touched them (so a table's count does not depend on what
        shares its arena), unless the gate is closed.
        """
        idle = (0.0,) * (len(COMMON) + len(self.rule.hyper))
        lines = tuple((1.0, *hyper[t]) if t in hyper else (0.0, *idle) for t in arena.tables)
        last = self._hyper.get(arena)
        if last is None or last[0] != lines or last[1].device != arena.store.device:
            table = torch.tensor(lines, dtype=torch.float32, device=arena.store.device)
            self._hyper[arena] = last = lines, table
        values = last[1]
        steps = self._steps[arena] = self._steps[arena].to(arena.store.device)
        steps += ((values[:, 0] != 0) & (gate != 0)).long()
        if self.rule.corrected:
            at = [OWN + self.rule.hyper.index(name) for name in self.rule.corrected]
            powers = values[:, at].double() ** steps[:, None]
            values = torch.cat([values, (1 - powers).float()], dim=1)
        columns = {name: 1 + i for i, name in enumerate(COMMON)}
        return RuleStep(
            rule=self.rule,
            hyper=values,
            seeds=step_seeds(arena.seeds, steps),
            uses=frozenset(
                name for name, off in _OFF.items() if any(line[0] and line[columns[name]] != off for line in lines)
            ),
            inv_scale=inv_scale,
            gate=gate,
        )

    def clear(self) -> None:
        """Forget everything that waits."""
        self._waiting.clear()

    def finite(self) -> Tensor:
        """0-d bool: whether every waiting gradient is finite."""
        flags = [torch.isfinite(w.grad).all() for waiting in self._waiting.values() for w in waiting]
        return torch.stack(flags).all() if flags else torch.tensor(True)

    def state(self, table: str) -> dict[str, Tensor]:
        """Views of a table's moments and of its ``step``."""
        arena = self._arena_of[table]
        moments = {m.name: arena.moment(table, m.name) for m in self.rule.moments}
        return {**moments, "step": self._steps[arena][list(arena.tables).index(table)]}
