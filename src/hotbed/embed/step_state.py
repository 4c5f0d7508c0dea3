"""Keep hyperparameters and counts of steps where kernels read them, in the device's memory, and write them in place.

A step then launches next to nothing before its kernels, and the host never waits: what has not changed since the last
step is not written again; what has (a learning rate that a schedule moves) is copied from page-locked memory while the
host goes on. Tensors keep their addresses from step to step, as a CUDA graph of the step needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotbed import ops
from hotbed.embed.arena import Arena
from hotbed.ops import BackendName, RuleStep
from hotbed.ops.layout import OWN
from hotbed.ops.rows import step_seeds
from hotbed.optim import COMMON, Rule
from hotbed.store.memory import to_device

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
