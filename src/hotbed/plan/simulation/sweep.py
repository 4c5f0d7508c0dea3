"""Vary the number of ranks, or a figure of a hardware profile, and show how the step time depends on it.

A sweep over ranks keeps the samples per rank (weak scaling), and a sweep over a figure keeps the samples per step. A
new plan is searched at each point, whereas `elasticities` keeps one plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotbed.checks import check_known
from hotbed.errors import PlanError
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import COUNTS, DIMENSIONS, Hardware, format_quantity, parse_quantity
from hotbed.plan.search import Found
from hotbed.plan.simulation.simulate import Simulation, Stragglers, simulate
from hotbed.plan.step_time import estimate_step

RANKS = "ranks"
POINTS = 7
"""Number of points of a sweep over a figure; consecutive values have equal ratios."""
MOST_RANKS = 16384
NUDGE = 1.05
"""`elasticities` multiplies or divides each figure by this factor."""
ASSUMED_FACTOR = 1.5
"""The true value of an assumed figure is expected to be at most this factor better or worse."""
_TIMES = ("message_s", "launch_s", "overheads")
_RATES = ("gather", "scatter", "stream", "flops", "host_stream", "host_link", "disk_read", "node_link", "network")
_MEASURED = ("all_to_all", "all_reduce", "efficiency", "mlp")
_CURVES = ("gather", "scatter", "flops", "overheads", *_MEASURED)
_ACROSS = ("network", "network_efficiency", "oversubscription")
"""Figures that only exchanges between nodes depend on."""
_FIGURES = (*_RATES, *_TIMES, *_MEASURED)
_AROUND = 4
_UNUSED = ("price_per_hour", "disk_latency")


@dataclass(frozen=True)
class Sweep:
    """The number of ranks, or a figure of a hardware profile, and the values to try."""

    what: str  # `RANKS`, or a figure of the hardware profile
    values: tuple[float, ...]  # ascending: numbers of ranks, values in SI units, or factors of a figure that is a curve

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Parse ``ranks=8..4096`` (doubled at each point), or ``network=100Gbit/s..1.6Tbit/s``."""
        what, equals, bounds = text.partition("=")
        low_text, dots, high_text = bounds.partition("..")
        known = [RANKS, *(name for name in DIMENSIONS if name not in _UNUSED)]
        if not equals or not dots:
            raise PlanError(f"--sweep: got {text!r}, expected e.g. ranks=8..4096 or network=100Gbit/s..800Gbit/s")
        check_known("--sweep", what, known, PlanError)
        dimension = "number" if what == RANKS or what in _CURVES else DIMENSIONS[what]
        curve = f". {what} is a curve, so pass a range of factors, e.g. {what}=0.5..2" if what in _CURVES else ""
        low, high = (
            parse_quantity(f"--sweep: {what}", bound, dimension, PlanError, curve) for bound in (low_text, high_text)
        )
        if not 0 < low <= high:
            raise PlanError(
                f"--sweep: got {text!r}, expected a first value above 0, and a second value of at least that"
            )
        if what != RANKS:
            values = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)] if high > low else [low]
            whole = what in COUNTS
            return cls(what, tuple(sorted({round(v) if whole else v for v in values})))
        if low != int(low) or high > MOST_RANKS:
            raise PlanError(
                f"--sweep: got {text!r}, expected a whole number of ranks first, and at most {MOST_RANKS:,} last"
            )
        return cls(what, tuple(low * 2**i for i in range(int(math.log2(high / low) + 1e-9) + 1)))

    @classmethod
    def around(cls, ranks: int, replicas: int) -> Sweep:
        """Return a sweep from a quarter of ``ranks`` to four times ``ranks``, in multiples of ``replicas``."""
        values = [ranks * 2**i / _AROUND for i in range(2 * int(math.log2(_AROUND)) + 1)]
        return cls(RANKS, tuple(v for v in values if 1 <= v <= MOST_RANKS and v == int(v) and v % replicas == 0))

    def check(self, here: Hardware, ranks: int, replicas: int) -> None:
        """Raise `PlanError` if the ranks are no multiple of the replicas, or if the figure has no effect."""
        if self.what == RANKS:
            if self.values[0] % replicas:
                raise PlanError(
                    f"--sweep: ranks: got {self.values[0]:g} first, expected a multiple of parallel.replicas {replicas}"
                )
        elif reason := _why_unused(self.what, here, ranks, replicas):
            raise PlanError(f"--sweep: {self.what} of {here.name} has no effect with {ranks:,} ranks: {reason}")

    def hardware(self, here: Hardware, value: float) -> Hardware:
        """Return a copy of the profile in which the figure has this value.

        If the figure is a curve, the curve is multiplied by the value.
        """
        if self.what in _CURVES:
            return here.scaled(self.what, value)
        return here.with_(**{self.what: int(value) if self.what in COUNTS else value})

    def format_value(self, value: float) -> str:
        """Format a value with its unit."""
        if self.what == RANKS:
            return f"{value:,.0f}"
        return f"× {value:.3g}" if self.what in _CURVES else format_quantity(value, DIMENSIONS[self.what])


@dataclass(frozen=True)
class Point:
    """Result at one value of a sweep."""

    value: float
    ranks: int
    simulation: Simulation | None  # None if no plan fits
    problem: str = ""  # why no plan fits

    def efficiency(self, first: Point) -> float | None:
        """Return the samples/s per rank, divided by the samples/s per rank of the first point; None without a plan."""
        if self.simulation is None or first.simulation is None:
            return None
        return self.simulation.samples_per_s / self.ranks / (first.simulation.samples_per_s / first.ranks)


def _why_unused(figure: str, here: Hardware, ranks: int, replicas: int) -> str:
    """Return why a figure has no effect, and what to vary instead; return an empty text if it has an effect."""
    size, nodes = ranks // replicas, -(-ranks // here.ranks_per_node)
    if figure in _CURVES and not getattr(here, figure):
        return "the profile has no value. Measure it with `hotbed doctor --measure FILE`, or add it to your profile"
    if figure == "cores_per_node" and not (here.cores_shared and (here.overheads or here.mlp)):
        return "only measured overheads or mlp of ranks that share cores use it. Vary gather, scatter and flops instead"
    if figure == "stream" and here.cores_shared:
        return "only layers on GPUs use it. Vary gather and scatter instead"
    if figure == "launch_s" and "step" in here.overheads:
        return "the measured overheads include launches. Vary overheads instead"
    if figure in _ACROSS and nodes == 1:
        return "all ranks are on one node. Vary node_link instead, or raise --ranks"
    if figure in (*_ACROSS, "node_link") and replicas == 1:
        beyond = nodes > 1
        if all(here.curve_of(curves, size, beyond=beyond) for curves in (here.all_to_all, here.all_reduce)):
            return "measured all_to_all and all_reduce replace it. Vary these curves instead"
    return ""


def first_that_fits(points: list[Point]) -> Point | None:
    """Return the first point with a plan (see `Point.efficiency`), or None."""
    return next((point for point in points if point.simulation is not None), None)


def elasticities(found: Found, stragglers: Stragglers | None = None) -> dict[str, float]:
    """Improve each figure of the hardware by 1 %, and return by how many percent a plan's step becomes shorter.

    A better rate is higher, and a better fixed time is shorter. The keys are the figures, and the figure with the
    largest effect is first. Figures without effect are omitted.
    """
    here = found.model.hardware
    assert here is not None
    before = simulate(found.plan, found.costs, found.model, stragglers=stragglers).step_s
    result: dict[str, float] = {}
    for figure in _FIGURES:
        if not getattr(here, figure):
            continue
        changed = here.scaled(figure, 1 / NUDGE if figure in _TIMES else NUDGE)
        model = CostModel(found.model.workload, found.model.world_size, changed)
        after = simulate(found.plan, model.ranks(found.plan), model, stragglers=stragglers).step_s
        result[figure] = -math.log(after / before) / math.log(NUDGE)
    return dict(sorted(((f, e) for f, e in result.items() if abs(e) > 1e-4), key=lambda item: -item[1]))


def assumed_range(found: Found) -> tuple[float, float, list[str]]:
    """Return the shortest and the longest step in seconds, and the assumed figures that change the step.

    For the shortest step, all figures that the profile only assumes are better by `ASSUMED_FACTOR`; for the longest,
    all of them are worse by this factor.
    """
    here = found.model.hardware
    assert here is not None

    def seconds(hardware: Hardware) -> float:
        model = CostModel(found.model.workload, found.model.world_size, hardware)
        return estimate_step(found.plan, model.ranks(found.plan), model).seconds

    before, names, better, worse = seconds(here), list[str](), here, here
    for figure in _FIGURES:
        if not getattr(here, figure) or "assumed" not in here.origin_of(figure):
            continue
        factor = 1 / ASSUMED_FACTOR if figure in _TIMES else ASSUMED_FACTOR
        if seconds(here.scaled(figure, factor)) != before:
            names.append(figure)
            better, worse = better.scaled(figure, factor), worse.scaled(figure, 1 / factor)
    return seconds(better), seconds(worse), names
