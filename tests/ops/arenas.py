"""Arenas with optimizer state: a step by a backend, and the same step by plain Python, one row after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hotbed.ops import Occurrences, Rows, RuleStep, reference
from hotbed.optim import COMMON, Rule

from .cases import Kernels, naive_sum, random_rows, raw_of, values_of
from .naive_rules import step_of_row

TABLES, WIDE = [4, 5, 15], [1, 5, 4]
ALL = np.arange(sum(TABLES))
EVERYWHERE = slice(None)
SEGMENTS = {
    "few": [*range(24), *([20] * 35)],
    "single": list(range(23, 3, -1)),
    "one_row": [0] * 70,
    "at_run_length": [7] * 32 + [8] * 33 + [9] * 31 + [0],
    "two_runs_each": [i % 3 for i in range(3 * 40)],
    "over_1024": [2] * 1100 + [5] * 40 + [3, 23],
    "one_to_nine_runs": [slot for slot in range(9) for _ in range(32 * slot + 1)],
    "random": torch.randint(0, 24, (200,), generator=torch.Generator().manual_seed(3)).tolist(),
}
OFF = {"lr": 0.1, "max_grad_norm": torch.inf, "max_norm": torch.inf, "l2": 0.0, "decay": 0.0}
OPTIONS = {
    "none": {},
    "l2": {"l2": [0.3, 0.0, 0.1]},
    "decay": {"decay": [0.0, 0.2, 0.01]},
    "max_grad_norm": {"max_grad_norm": [0.5, torch.inf, 6.0]},
    "max_norm": {"max_norm": [0.1, 0.2, torch.inf]},
    "mixed": {
        "max_grad_norm": [torch.inf, 0.5, 4.0],
        "l2": [0.3, 0.0, 0.1],
        "decay": [0.0, 0.2, 0.05],
        "max_norm": [0.2, torch.inf, 1.0],
    },
}
"""Options per table; some are off in some tables."""

OWN = {
    "eps": 1e-3,
    "eps_inside": 0.02,
    "moment_scale": 3.0,
    "delayed": 0.0,
    "momentum": 0.9,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "beta": 1.0,
    "l1": 0.3,
    "l2": 0.5,
}
SIGNED = ("momentum_buffer", "exp_avg", "z")


@dataclass(frozen=True)
class Arena:
    """Rows of some tables, their moments, and the hyperparameters of a step by table."""

    rule: Rule
    rows: Rows
    moments: dict[str, Tensor]
    hyper: Tensor
    seeds: Tensor
    uses: frozenset[str] = field(default_factory=frozenset)

    @staticmethod
    def make(
        rule: Rule,
        dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        tables: list[int] = TABLES,
        wide: list[int] = WIDE,
        active: tuple[int, ...] = (1, 1, 1),
        options: dict[str, list[float]] | None = None,
    ) -> Arena:
        """Random rows and moments; ``options`` are the `COMMON` ones that differ from `OFF`, by table."""
        gen = torch.Generator().manual_seed(0)
        slots = sum(tables)
        moments = {}
        for m in rule.moments:
            shape = (slots,) if m.per == "row" else (slots, dim)
            moments[m.name] = (torch.randn if m.name in SIGNED else torch.rand)(shape, generator=gen)
        chosen = options or {}
        hyper = []
        for t in range(len(tables)):
            own = {name: OWN[name] * (1 - t / (8 * len(tables))) for name in rule.hyper}
            common = [chosen[name][t] if name in chosen else OFF[name] for name in COMMON]
            hyper.append([active[t], *common, *own.values(), *(1 - own[b] ** (3 + t) for b in rule.corrected)])
        return Arena(
            rule,
            random_rows(tables, wide, dim, dtype),
            moments,
            torch.tensor(hyper),
            torch.randint(0, 2**32, (len(tables),), generator=gen),
            frozenset(chosen) - {"lr"},
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.narrow.dtype

    def step(self, seeds: Tensor, inv_scale: Tensor, gate: Tensor) -> RuleStep:
        return RuleStep(rule=self.rule, hyper=self.hyper, seeds=seeds, uses=self.uses, inv_scale=inv_scale, gate=gate)

    def updated(
        self,
        backend: Kernels,
        occurrences: Occurrences,
        grad: Tensor,
        *,
        inv_scale: float = 1.0,
        gate: object = True,
        mean_squares: Tensor | None = None,
    ) -> Arena:
        """The arena after the step; this one stays as it is."""
        arena, found = backend.put(self), backend.put(occurrences)
        step = arena.step(arena.seeds, backend.put(torch.tensor(inv_scale)), backend.put(torch.tensor(gate)))
        step = replace(step, mean_squares=backend.put(mean_squares))
        groups = backend.ops.group(found)
        backend.ops.update(step, arena.rows, arena.moments, found, groups, backend.put(grad))
        return backend.back(arena)

    def updated_naively(
        self, occurrences: Occurrences, grad: Tensor, *, inv_scale: float = 1.0
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Values of the rows ``[S, D]`` before they are rounded to what holds them, and moments."""
        values = values_of(self.rows)
        moments = {name: m.numpy().copy() for name, m in self.moments.items()}
        own_names = [*self.rule.hyper, *(f"1 - {name}^t" for name in self.rule.corrected)]
        for slot, total in naive_sum(occurrences, grad).items():
            active, *hyper = self.hyper[int((self.rows.tables[:, 0] <= slot).sum()) - 1].numpy()
            if not active:
                continue
            common = dict(zip(COMMON, hyper, strict=False))
            own = dict(zip(own_names, hyper[len(COMMON) :], strict=True))
            state = {name: m[slot] for name, m in moments.items()}
            values[slot] = step_of_row(self.rule.name, values[slot], state, total * np.float32(inv_scale), common, own)
            for name, moment in state.items():
                moments[name][slot] = moment
        return values, moments

    def bits(self, at: np.ndarray | slice = EVERYWHERE) -> list[np.ndarray]:
        """Everything that is kept of these rows, as integers."""
        return [raw_of(self.rows)[at], *(m.view(torch.int32).numpy()[at] for m in self.moments.values())]

    def with_values(self, values: Tensor) -> Arena:
        """With these float32 rows ``[S, D]``."""
        return replace(self, rows=replace(self.rows, wide=values, narrow=values[:0]))


oracle = Kernels("reference", torch.device("cpu"), reference)
"""What kernels are compared with, bit for bit."""


def gradient(bags: int, dim: int) -> Tensor:
    return torch.randn(bags, dim, generator=torch.Generator().manual_seed(9))


def assert_same(a: Arena, b: Arena, at: np.ndarray | slice = EVERYWHERE) -> None:
    """Bit for bit, in these rows."""
    for x, y in zip(a.bits(at), b.bits(at), strict=True):
        assert np.array_equal(x, y)


def others(slots: list[int]) -> np.ndarray:
    """All slots but these."""
    return np.array([i for i in ALL if i not in slots], dtype=np.int64)
