"""Simulate the plan that was found, and vary ranks or hardware: the second half of ``hotbed plan``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from hotbed.checkpoint.single_files import write_text
from hotbed.commands.arguments import check_json
from hotbed.commands.plan_page import page
from hotbed.config import Recipe
from hotbed.errors import PlanError, RecipeError
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found
from hotbed.plan.simulate import Simulation, Stragglers, amount_text, simulate
from hotbed.plan.step import Term, terms_of
from hotbed.plan.sweep import RANKS, Point, Sweep, elasticities, first_that_fits
from hotbed.plan.timeline import chrome_trace
from hotbed.train.plan_search import hardware_of

Search = Callable[[Recipe, int, Hardware | None], Found]
"""Finds the plan of a recipe for so many ranks, on its hardware or another."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of a simulation."""

    stragglers: Stragglers  # ranks that are slow now and then
    sweep: str | None  # as typed
    price: float | None  # of a node per hour; else the hardware's
    trace: str | None  # files to write
    html: str | None

    @property
    def of_ranks(self) -> bool:
        """Whether ranks are varied, and nothing is asked for that only the plan for one number of them has."""
        varied = self.sweep is not None and Sweep.parse(self.sweep).what == RANKS
        return varied and self.trace is None and self.html is None

    def check(self, recipe: Recipe) -> None:
        """Refuse what cannot be, before anything is searched for."""
        if self.sweep is not None:
            sweep = Sweep.parse(self.sweep)
            here = hardware_of(recipe)
            for value in sweep.values if sweep.what != RANKS else ():
                sweep.hardware(here, value)
        for option, file in (("--trace", self.trace), ("--html", self.html)):
            if file is not None:
                check_json(file, option)
        if self.price is not None and not (math.isfinite(self.price) and self.price > 0):
            raise RecipeError(f"--price is {self.price:g}, must be finite and above 0: what a node costs per hour")

    def check_ranks(self, recipe: Recipe, ranks: int) -> None:
        """Refuse a sweep that cannot be with so many ranks and the recipe's replicas."""
        if self.sweep is not None:
            Sweep.parse(self.sweep).check(hardware_of(recipe), ranks, recipe.parallel.replicas)

    def priced(self, simulation: Simulation) -> Simulation:
        """The simulation with the price that was given."""
        return simulation if self.price is None else replace(simulation, price_per_hour=self.price)


def simulated(
    to: Console, found: Found, recipe: Recipe, ranks: int, options: Options, search_of: Search
) -> dict[str, Any]:
    """Simulate, show and write what was asked for; return it for ``--json``."""
    sweep = None if options.sweep is None else Sweep.parse(options.sweep)
    simulation = options.priced(simulate(found.plan, found.costs, found.model, stragglers=options.stragglers))
    print_simulation(to, simulation)
    terms, here = terms_of(found.plan, found.costs, found.model), found.model.hardware
    assert here is not None
    print_terms(to, terms, here)
    result: dict[str, Any] = {"simulation": simulation.to_dict()}
    result["terms"] = [asdict(term) | {"rates": {name: here.said_of(name) for name in term.figures}} for term in terms]
    points: list[Point] = []
    if sweep is not None:
        points, result["sweep"] = swept_and_shown(to, sweep, recipe, ranks, options, search_of)
        if sweep.what != RANKS:
            result["elasticity"] = elasticities(found, options.stragglers)
            print_elasticities(to, result["elasticity"])
    if options.trace is not None:
        write_text(options.trace, json.dumps(chrome_trace(simulation.events)))
    if options.html is not None:
        if sweep is None or sweep.what != RANKS:
            points = swept(Sweep.around(ranks, recipe.parallel.replicas), recipe, ranks, options, search_of)
        write_text(options.html, page(recipe.name, found, simulation, points))
    return result


def swept_and_shown(
    to: Console, sweep: Sweep, recipe: Recipe, ranks: int, options: Options, search_of: Search
) -> tuple[list[Point], dict[str, Any]]:
    """Sweep, and show the points; return them, and what ``--json`` has of them."""
    points = swept(sweep, recipe, ranks, options, search_of)
    print_sweep(to, sweep, points)
    return points, {"of": sweep.what, "points": [point_dict(point, points) for point in points]}


def swept(sweep: Sweep, recipe: Recipe, ranks: int, options: Options, search_of: Search) -> list[Point]:
    """Search and simulate at each point."""
    found: list[Point] = []
    for value in sweep.values:
        here, of_ranks, hardware = recipe, ranks, None
        if sweep.what == RANKS:
            of_ranks = int(value)
            batch = max(round(recipe.train.batch_size * of_ranks / ranks), 1)
            here = replace(recipe, train=replace(recipe.train, batch_size=batch))
        else:
            hardware = sweep.hardware(hardware_of(recipe), value)
        try:
            plan = search_of(here, of_ranks, hardware)
        except PlanError as error:
            found.append(Point(value, of_ranks, None, str(error)))
            continue
        simulation = simulate(plan.plan, plan.costs, plan.model, stragglers=options.stragglers)
        found.append(Point(value, of_ranks, options.priced(simulation)))
    return found


def point_dict(point: Point, points: list[Point]) -> dict[str, Any]:
    """A point of a sweep, for ``--json``."""
    first = first_that_fits(points)
    about: dict[str, Any] = {"value": point.value, "ranks": point.ranks, "fits": point.simulation is not None}
    if point.simulation is None or first is None:
        return about | {"problem": point.problem}
    return about | {"efficiency": point.efficiency(first)} | point.simulation.to_dict()


def print_simulation(to: Console, simulation: Simulation) -> None:
    """Print what a step is spent on, what binds, and what a billion samples cost."""
    spent = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in simulation.critical.items())
    to.print(
        f"simulated: {simulation.step_s * 1e3:,.4g} ms, {simulation.samples_per_s:,.0f} samples/s on "
        f"{simulation.nodes:,} nodes; bound by {simulation.binds}; ranks wait {simulation.waiting:.1%} of a step "
        "(unlike the formula, this includes waiting for other ranks and for cores)",
        soft_wrap=True,
    )
    to.print(f"the rank that waits least (ms): {spent}", soft_wrap=True)
    if simulation.per_billion is not None:
        to.print(
            f"price: {simulation.per_billion:,.2f} per billion samples, at {simulation.price_per_hour:g} per node and "
            "hour",
            soft_wrap=True,
        )
    shown = RichTable(title="Resources of a rank, per step", title_justify="left")
    for column in ("resource", "mean", "most", "in use"):
        shown.add_column(column, justify="left" if column == "resource" else "right")
    for name, usage in simulation.usage.items():
        amounts = [amount_text(value, usage.unit) for value in (usage.amount, usage.most)]
        shown.add_row(name, *amounts, f"{usage.utilisation:.1%}")
    to.print(shown)


def print_terms(to: Console, terms: list[Term], here: Hardware) -> None:
    """Print what a step of the busiest rank adds up from, and where each amount and rate is from."""
    shown = RichTable(title="Terms of a step, busiest rank", title_justify="left")
    for column in ("term", "ms", "kernels", "amount", "counted by", "at"):
        shown.add_column(column, justify="right" if column in ("ms", "kernels", "amount") else "left")
    for term in terms:
        amount = "" if term.unit == "s" else amount_text(term.amount, term.unit)
        time = f"({term.seconds * 1e3:.3g})" if term.hidden else f"{term.seconds * 1e3:.3g}"
        shown.add_row(term.name, time, str(term.kernels or ""), amount, term.counted, ", ".join(term.figures))
    to.print(shown)
    if any(term.hidden for term in terms):
        to.print("in brackets: beside the step, not added")
    used = dict.fromkeys(figure for term in terms for figure in term.figures)
    for figure in used:
        to.print(f"{figure}: {here.said_of(figure)}", soft_wrap=True)
    for source in here.sources:
        name = source.split(":", 1)[0]
        if any(name in _names(here.said_of(figure)) for figure in used):
            to.print(f"{source}", soft_wrap=True)


def _names(said: str) -> list[str]:
    """The sources that a figure names, at the end of what is said of it."""
    return said[said.rfind("(") + 1 :].rstrip(")").split(", ")


def print_sweep(to: Console, sweep: Sweep, points: list[Point]) -> None:
    """Print a row for each point."""
    title = "ranks, with as many samples each" if sweep.what == RANKS else sweep.what
    shown = RichTable(title=f"Sweep of {title}", title_justify="left")
    columns = [sweep.what, "step", "samples/s", "efficiency", "waiting", "bound by", "per billion samples"]
    for column in columns:
        shown.add_column(column, justify="left" if column == "bound by" else "right")
    first = first_that_fits(points)
    for point in points:
        at, simulation = sweep.shown(point.value), point.simulation
        if simulation is None or first is None:
            shown.add_row(at, "does not fit", "", "", "", "", "")
            continue
        shown.add_row(
            at,
            f"{simulation.step_s * 1e3:,.4g} ms",
            f"{simulation.samples_per_s:,.0f}",
            f"{point.efficiency(first):.1%}",
            f"{simulation.waiting:.1%}",
            simulation.binds,
            "" if simulation.per_billion is None else f"{simulation.per_billion:,.2f}",
        )
    to.print(shown)
    steps = [point.simulation.step_s if point.simulation else None for point in points]
    if sweep.what != RANKS and len(steps) > 1 and len(set(steps)) == 1:
        to.print(f"{sweep.what} makes no difference here: the step waits for something else at all of these values")
    for problem in {point.problem: None for point in points if point.problem}:
        to.print(f"does not fit: {problem}", soft_wrap=True)


def print_elasticities(to: Console, found: dict[str, float]) -> None:
    """Print on which figures the step depends."""
    shown = ", ".join(f"{figure} {value:.2f}" for figure, value in found.items()) or "none"
    to.print(f"a figure 1 % better makes the step of the plan found so many percent shorter: {shown}", soft_wrap=True)
