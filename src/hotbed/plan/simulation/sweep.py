"""Vary the number of ranks, or a figure of the hardware: what to try, and how much the step's time depends on it.

A sweep of ranks keeps the samples of a rank (weak scaling); one over a figure of the hardware keeps the samples of a
step. Plans are searched for anew at each point; `elasticities` keep the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotbed.checks import check_known
from hotbed.errors import PlanError
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import COUNTS, DIMENSIONS, Hardware
from hotbed.plan.quantities import parse, show
from hotbed.plan.search import Found
from hotbed.plan.simulation.simulate import Simulation, Stragglers, simulate
from hotbed.plan.step_time import estimate_step

RANKS = "ranks"
POINTS = 7
"""Of a sweep over a figure of the hardware, from the first to the last by equal factors."""
MOST_RANKS = 16384
NUDGE = 1.05
"""By which factor figures are changed for elasticities."""
ASSUMED_FACTOR = 1.5
"""How much better or worse an assumed figure may be than its profile states."""
_TIMES = ("message_s", "launch_s", "overheads")
_RATES = ("gather", "scatter", "stream", "flops", "host_stream", "host_link", "disk_read", "node_link", "network")
_MEASURED = ("all_to_all", "all_reduce", "efficiency", "mlp")
_CURVES = ("gather", "scatter", "flops", "overheads", *_MEASURED)
_ACROSS = ("network", "network_efficiency", "oversubscription")
"""What exchanges between nodes go over."""
_AROUND = 4
_NO_PART = ("price_per_hour", "disk_latency")


@dataclass(frozen=True)
class Sweep:
    """What is varied, and over which values."""

    what: str  # `RANKS`, or a figure of the hardware
    values: tuple[float, ...]
    """Rising: numbers of ranks; values of the figure in units of the International System; of a curve, factors."""

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Read ``ranks=8..4096`` (doubled from point to point), or ``network=100Gbit/s..1.6Tbit/s``."""
        what, equals, bounds = text.partition("=")
        low_text, dots, high_text = bounds.partition("..")
        known = [RANKS, *(name for name in DIMENSIONS if name not in _NO_PART)]
        if not equals or not dots:
            raise PlanError(f"--sweep is {text!r}, must be like ranks=8..4096 or network=100Gbit/s..800Gbit/s")
        check_known("--sweep", what, known, PlanError)
        dimension = "number" if what == RANKS or what in _CURVES else DIMENSIONS[what]
        curve = f"; {what} is a curve, all of which is multiplied: {what}=0.5..2" if what in _CURVES else ""
        low, high = (parse(f"--sweep: {what}", bound, dimension, PlanError, curve) for bound in (low_text, high_text))
        if not 0 < low <= high:
            raise PlanError(f"--sweep is {text!r}: the first value must be above 0, and the second not below it")
        if what != RANKS:
            values = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)] if high > low else [low]
            whole = what in COUNTS
            return cls(what, tuple(sorted({round(v) if whole else v for v in values})))
        if low != int(low) or high > MOST_RANKS:
            raise PlanError(
                f"--sweep is {text!r}: ranks must begin with a whole number, and end with {MOST_RANKS:,} at most"
            )
        return cls(what, tuple(low * 2**i for i in range(int(math.log2(high / low) + 1e-9) + 1)))

    @classmethod
    def around(cls, ranks: int, replicas: int) -> Sweep:
        """Ranks from a quarter of so many to four times as many."""
        values = [ranks * 2**i / _AROUND for i in range(2 * int(math.log2(_AROUND)) + 1)]
        return cls(RANKS, tuple(v for v in values if 1 <= v <= MOST_RANKS and v == int(v) and v % replicas == 0))

    def check(self, here: Hardware, ranks: int, replicas: int) -> None:
        """Refuse numbers of ranks that replicas do not divide, and figures that no formula reads."""
        if self.what == RANKS:
            if self.values[0] % replicas:
                raise PlanError(
                    f"--sweep: ranks begin with {self.values[0]:g}, must begin with a multiple of parallel.replicas "
                    f"{replicas}"
                )
        elif instead := _unread(self.what, here, ranks, replicas):
            raise PlanError(f"--sweep: nothing reads {self.what} of {here.name} with {ranks:,} ranks: {instead}")

    def hardware(self, here: Hardware, value: float) -> Hardware:
        """The hardware at a point of a sweep over a figure."""
        if self.what in _CURVES:
            return here.scaled(self.what, value)
        return here.with_(**{self.what: int(value) if self.what in COUNTS else value})

    def shown(self, value: float) -> str:
        """A value with its unit."""
        if self.what == RANKS:
            return f"{value:,.0f}"
        return f"× {value:.3g}" if self.what in _CURVES else show(value, DIMENSIONS[self.what])


@dataclass(frozen=True)
class Point:
    """What was found at a value of a sweep; no simulation where no plan fits."""

    value: float
    ranks: int
    simulation: Simulation | None
    problem: str = ""

    def efficiency(self, first: Point) -> float | None:
        """Samples/s of a rank ÷ those of a rank at the first point with a plan."""
        if self.simulation is None or first.simulation is None:
            return None
        return self.simulation.samples_per_s / self.ranks / (first.simulation.samples_per_s / first.ranks)


def _unread(figure: str, here: Hardware, ranks: int, replicas: int) -> str:
    """Why no formula reads a figure, and what to do; nothing if one does."""
    size, nodes = ranks // replicas, -(-ranks // here.ranks_per_node)
    if figure in _CURVES and not getattr(here, figure):
        return "it has none; measure it with `hotbed doctor --measure FILE`, or add it to a profile of your own"
    if figure == "cores_per_node" and not (here.cores_shared and (here.overheads or here.mlp)):
        return "only measured overheads and mlp of ranks that share cores do; vary gather, scatter and flops"
    if figure == "stream" and here.cores_shared:
        return "only layers on GPUs do; vary gather and scatter"
    if figure == "launch_s" and "step" in here.overheads:
        return "its measured overheads have launches; vary overheads"
    if figure in _ACROSS and nodes == 1:
        return "they are all on one node; vary node_link, or give more --ranks"
    if figure in (*_ACROSS, "node_link") and replicas == 1:
        beyond = nodes > 1
        if all(here.curve_of(curves, size, beyond=beyond) for curves in (here.all_to_all, here.all_reduce)):
            return "all_to_all and all_reduce were measured, and replace it; vary these"
    return ""


def first_that_fits(points: list[Point]) -> Point | None:
    """The point that efficiencies are relative to."""
    return next((point for point in points if point.simulation is not None), None)


def elasticities(found: Found, stragglers: Stragglers | None = None) -> dict[str, float]:
    """By how many percent the step of a plan gets shorter where a figure gets 1 % better; the largest first.

    Rates get faster, fixed times shorter; figures on which the step does not depend are left out.
    """
    here = found.model.hardware
    assert here is not None
    before = simulate(found.plan, found.costs, found.model, stragglers=stragglers).step_s
    result: dict[str, float] = {}
    for figure in (*_RATES, *_TIMES, *_MEASURED):
        if not getattr(here, figure):
            continue
        changed = here.scaled(figure, 1 / NUDGE if figure in _TIMES else NUDGE)
        model = CostModel(found.model.workload, found.model.world_size, changed)
        after = simulate(found.plan, model.ranks(found.plan), model, stragglers=stragglers).step_s
        result[figure] = -math.log(after / before) / math.log(NUDGE)
    return dict(sorted(((f, e) for f, e in result.items() if abs(e) > 1e-4), key=lambda item: -item[1]))


def assumed_range(found: Found) -> tuple[float, float, list[str]]:
    """Estimate a plan's step if every figure that its profile assumes were `ASSUMED_FACTOR` times better or worse.

    The result is the shortest and the longest step in seconds, and the assumed figures that change it.
    """
    here = found.model.hardware
    assert here is not None

    def seconds(hardware: Hardware) -> float:
        model = CostModel(found.model.workload, found.model.world_size, hardware)
        return estimate_step(found.plan, model.ranks(found.plan), model).seconds

    before, names, better, worse = seconds(here), list[str](), here, here
    for figure in (*_RATES, *_TIMES, *_MEASURED):
        if not getattr(here, figure) or "assumed" not in here.said_of(figure):
            continue
        factor = 1 / ASSUMED_FACTOR if figure in _TIMES else ASSUMED_FACTOR
        if seconds(here.scaled(figure, factor)) != before:
            names.append(figure)
            better, worse = better.scaled(figure, factor), worse.scaled(figure, 1 / factor)
    return seconds(better), seconds(worse), names
