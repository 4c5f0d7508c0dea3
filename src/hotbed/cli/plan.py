"""Search for the fastest plan of a recipe's tables, on hardware that need not be here: ``hotbed plan``."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from hotbed.checkpoint.single_files import write_text_uri
from hotbed.cli.arguments import (
    Parser,
    add_json,
    add_parameters,
    add_recipe,
    check_json,
    console,
    recipe_of,
    write_json,
)
from hotbed.cli.pages.plan_page import page, print_plan, print_simulation, print_sweep
from hotbed.cli.pages.report_page import Table, check_html, print_table
from hotbed.config import Recipe
from hotbed.data import Source
from hotbed.errors import PlanError, RecipeError
from hotbed.plan import Plan
from hotbed.plan.cost import TIERS
from hotbed.plan.hardware import Hardware
from hotbed.plan.ranks import ALIKE
from hotbed.plan.schemes import Schemes
from hotbed.plan.search import Found
from hotbed.plan.simulation.simulate import Simulation, Stragglers, simulate
from hotbed.plan.simulation.sweep import RANKS, Point, Sweep, assumed_range, elasticities, first_that_fits
from hotbed.plan.simulation.timeline import chrome_trace
from hotbed.plan.step_time import estimate_step, parts_of_busiest, terms_of
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import hardware_of, plan_or_schemes, searched, searched_ranks


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a simulation."""

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
        if self.trace is not None:
            check_json(self.trace, "--trace")
        check_html(self.html)
        if self.price is not None and not (math.isfinite(self.price) and self.price > 0):
            raise RecipeError(f"--price is {self.price:g}, must be finite and above 0: what a node costs per hour")

    def check_ranks(self, recipe: Recipe, ranks: int) -> None:
        """Refuse a sweep that cannot be with so many ranks and the recipe's replicas."""
        if self.sweep is not None:
            Sweep.parse(self.sweep).check(hardware_of(recipe), ranks, recipe.parallel.replicas)

    def priced(self, simulation: Simulation) -> Simulation:
        """Return the simulation with the price that was given."""
        return simulation if self.price is None else replace(simulation, price_per_hour=self.price)


def add_arguments(parser: Parser) -> None:
    """Add the recipe's options, and the machine."""
    parser.usage = "hotbed plan RECIPE.yaml --hardware NAME|FILE --ranks N [--simulate] [--key value …]"
    add_recipe(parser)
    parser.add_argument("--hardware", help="Built-in profile or a file; short for parallel.hardware.")
    number = int | Literal["auto"]
    parser.add_argument("--ranks", type=number, default=1, help="Processes, of all replicas together; auto: the best.")
    parser.add_argument("--replicas", type=number | None, help="Short for --parallel.replicas; auto: the best number.")
    parser.add_argument("--simulate", action="store_true", help="Simulate steps; so do the options below.")
    add_parameters(parser, Stragglers, "stragglers.")
    parser.add_argument("--sweep", help="ranks=8..4096, or a figure of the hardware: network=100Gbit/s..800Gbit/s.")
    parser.add_argument("--price", type=float | None, help="Of a node per hour, for the price of a billion samples.")
    parser.add_argument("--trace", help="File for the timeline of some ranks, for Chrome or Perfetto.")
    parser.add_argument("--html", help="File for a page with figures of plan, timeline and scaling (needs matplotlib).")
    parser.add_argument("--out", help="File to write the plan to, for --plan of hotbed train.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Search, and show what was found."""
    hardware, ranks, replicas, out = parsed.hardware, parsed.ranks, parsed.replicas, parsed.out
    values, wanted = vars(parsed), parsed.simulate
    stragglers = Stragglers(**{field.name: values[f"stragglers.{field.name}"] for field in fields(Stragglers)})
    names = ("sweep", "price", "trace", "html")
    options = Options(stragglers=stragglers, **{name: values[name] for name in names})
    wanted |= stragglers != Stragglers() or any(getattr(options, name) is not None for name in names)
    recipe = recipe_of(parsed)
    if hardware is not None:
        recipe = replace(recipe, parallel=replace(recipe.parallel, hardware=hardware))
    if out is not None:
        check_json(out)
    options.check(recipe)
    if "auto" in (ranks, replicas):
        count = recipe.parallel.replicas if replicas is None else replicas
        ranks, replicas = chosen_ranks(recipe, ranks, count, options.price)
    if replicas is not None:
        recipe = replace(recipe, parallel=replace(recipe.parallel, replicas=replicas))
    options.check_ranks(recipe, ranks)
    try:
        found, others = found_plan(recipe, ranks)
    except PlanError as error:
        if out is not None or not options.of_ranks:
            raise
        write_json(parsed.json, swept_without(recipe, ranks, options, error))
        return
    if out is not None:
        write_text_uri(out, found.plan.to_json())
    to, figures = console(), as_dict(found, others)
    print_plan(to, found, others, recipe.memory.device_bytes)
    figures["faster"] = faster_settings(recipe, ranks, found)
    for setting, rate in figures["faster"].items():
        to.print(f"faster: {setting} trains {rate:,.0f} samples/s by formula", soft_wrap=True)
    if wanted:
        figures |= simulated(to, found, recipe, ranks, options)
    write_json(parsed.json, figures)


def swept_without(recipe: Recipe, ranks: int, options: Options, error: PlanError) -> dict[str, Any]:
    """Sweep ranks where no plan fits so many; raises that error again if none fits any."""
    assert options.sweep is not None
    to = console()
    points, figures = swept_and_shown(to, Sweep.parse(options.sweep), recipe, ranks, options)
    if first_that_fits(points) is None:
        raise error
    to.print(f"--ranks {ranks} does not fit: {error}", soft_wrap=True)
    return {"problem": str(error), "sweep": figures}


def chosen_ranks(
    recipe: Recipe, ranks: int | Literal["auto"], replicas: int | Literal["auto"], price: float | None = None
) -> tuple[int, int]:
    """Choose the number of ranks, or of replicas, and print a table of what was tried; a price is of a node's hour."""
    if ranks != "auto" and ranks < 1:
        raise RecipeError(f"--ranks is {ranks}, must be auto or at least 1")
    source = open_source(recipe.data)
    schemes = _schemes_of(recipe)
    options: dict[str, Any] = {"schemes": schemes, "others": "auto", "price": price}
    chosen = searched_ranks(_model_of(recipe, source), recipe, ranks, replicas, source, **options)
    rows = [
        [
            str(tried.ranks),
            str(tried.replicas),
            f"{tried.samples_per_s:,.0f}" if tried.found else "does not fit",
            "–" if tried.cost is None else f"{tried.cost:,.4g}",
            "chosen" if tried is chosen.best else "",
        ]
        for tried in chosen.tried
    ]
    head = ("ranks", "replicas", "samples/s", "cost of 10⁹ samples", "")
    print_table(console(), Table(f"Ranks, by {chosen.goal}; samples/s by formula", head, rows))
    return chosen.best.ranks, chosen.best.replicas


def found_plan(recipe: Recipe, ranks: int) -> tuple[Found, dict[str, float]]:
    """The plan that the search finds, and the step's seconds under the recipe's own scheme, if that has another name.

    Schemes by table in ``parallel.plan`` are kept; tables without one are searched for.
    """
    given = plan_or_schemes(recipe.parallel)
    found = plan_for(recipe, ranks)
    others: dict[str, float] = {}
    if isinstance(given, str) and given != "auto":
        try:
            source = open_source(recipe.data)
            own = searched(_model_of(recipe, source), recipe, ranks // recipe.parallel.replicas, source)
            others[given] = estimate_step(own.plan, own.costs, own.model).seconds
        except PlanError:
            others[given] = float("inf")
    return found, others


def faster_settings(recipe: Recipe, ranks: int, found: Found) -> dict[str, float]:
    """Return settings that train more samples per second than a plan over several nodes, with these rates.

    Half as many ranks, the ranks of one node, and exchanges in two hops are tried.
    """
    here, parallel = found.model.hardware, recipe.parallel
    assert here is not None
    node, result = here.ranks_per_node, dict[str, float]()
    if ranks <= node:
        return result
    tried = {f"--ranks {count}": (recipe, count) for count in dict.fromkeys((ranks // 2, node)) if count < ranks}
    if parallel.ranks_per_node is None and (ranks // parallel.replicas) % node == 0:
        two_hops = replace(recipe, parallel=replace(parallel, ranks_per_node=node))
        tried[f"--parallel.ranks_per_node {node}"] = (two_hops, ranks)
    for setting, (of_setting, count) in tried.items():
        try:
            other = plan_for(of_setting, count)
        except (PlanError, RecipeError):  # the tables do not fit, or the replicas do not divide the ranks
            continue
        if samples_per_s(other) > ALIKE * samples_per_s(found):
            result[setting] = samples_per_s(other)
    return result


def samples_per_s(found: Found) -> float:
    """Return the rate of a plan by formula."""
    step = estimate_step(found.plan, found.costs, found.model)
    return found.model.workload.batch_size / step.seconds


def plan_for(recipe: Recipe, ranks: int, hardware: Hardware | None = None) -> Found:
    """The plan that the search finds for so many ranks, on the recipe's hardware or another; errors of `found_plan`."""
    count = recipe.parallel.replicas
    if ranks < 1 or ranks % count:
        raise RecipeError(f"--ranks is {ranks}, must be a multiple of parallel.replicas {count}, and at least 1")
    source = open_source(recipe.data)
    model, schemes = _model_of(recipe, source), _schemes_of(recipe)
    return searched(model, recipe, ranks // count, source, schemes=schemes, others="auto", hardware=hardware)


def _schemes_of(recipe: Recipe) -> Schemes:
    """The schemes by table that a recipe has; the search chooses where it has none, or one for all."""
    given = plan_or_schemes(recipe.parallel)
    if isinstance(given, Plan):
        raise PlanError(f"parallel.plan is {recipe.parallel.plan}, a whole plan: there is nothing to search for")
    return given if isinstance(given, Mapping) else "auto"


def _model_of(recipe: Recipe, source: Source) -> nn.Module:
    with torch.device("meta"):
        return new_model(recipe, source)


def as_dict(found: Found, others: dict[str, float]) -> dict[str, Any]:
    """What was found, for ``--json``."""
    costs, limits = found.costs, found.limits
    return {
        "plan": found.plan.to_dict(),
        "step_s": estimate_step(found.plan, costs, found.model).to_dict(),
        "samples_per_s": samples_per_s(found),
        "assumed": dict(zip(("best_step_s", "worst_step_s", "figures"), assumed_range(found), strict=True)),
        "load_s": found.load,
        "bound_s": found.bound.load,
        "bound": found.bound.binds,
        "gap": found.gap,
        "imbalance": costs.imbalance,
        "method": found.method,
        "busiest_rank_s": parts_of_busiest(costs),
        "ranks": [
            {"load_s": float(load), "bytes": {tier: int(costs.memory[tier][rank]) for tier in TIERS}}
            for rank, load in enumerate(costs.load)
        ],
        "room_bytes": dict(limits.room),
        "beside_bytes": dict(limits.beside),
        "others_step_s": {name: seconds if seconds < float("inf") else None for name, seconds in others.items()},
    }


# -- simulated ---------------------------------------------------------------------------------------------------


def simulated(to: Console, found: Found, recipe: Recipe, ranks: int, options: Options) -> dict[str, Any]:
    """Simulate, show and write what was asked for; return it for ``--json``."""
    sweep = None if options.sweep is None else Sweep.parse(options.sweep)
    simulation = options.priced(simulate(found.plan, found.costs, found.model, stragglers=options.stragglers))
    terms, here = terms_of(found.plan, found.costs, found.model), found.model.hardware
    assert here is not None
    print_simulation(to, simulation, terms, here)
    result: dict[str, Any] = {"simulation": simulation.to_dict()}
    result["terms"] = [asdict(term) | {"rates": {name: here.said_of(name) for name in term.figures}} for term in terms]
    points: list[Point] = []
    if sweep is not None:
        points, result["sweep"] = swept_and_shown(to, sweep, recipe, ranks, options)
        if sweep.what != RANKS:
            result["elasticity"] = found_on = elasticities(found, options.stragglers)
            shown = ", ".join(f"{figure} {value:.2f}" for figure, value in found_on.items()) or "none"
            words = "a figure 1 % better makes the step of the plan found so many percent shorter"
            to.print(f"{words}: {shown}", soft_wrap=True)
    if options.trace is not None:
        write_text_uri(options.trace, json.dumps(chrome_trace(simulation.events)))
    if options.html is not None:
        if sweep is None or sweep.what != RANKS:
            sweep = Sweep.around(ranks, recipe.parallel.replicas)
            points = swept(sweep, recipe, ranks, options)
        write_text_uri(options.html, page(recipe.name, found, simulation, sweep, points))
    return result


def swept_and_shown(
    to: Console, sweep: Sweep, recipe: Recipe, ranks: int, options: Options
) -> tuple[list[Point], dict[str, Any]]:
    """Sweep, and show the points; return them, and what ``--json`` has of them."""
    points = swept(sweep, recipe, ranks, options)
    print_sweep(to, sweep, points)
    return points, {"of": sweep.what, "points": [point_dict(point, points) for point in points]}


def swept(sweep: Sweep, recipe: Recipe, ranks: int, options: Options) -> list[Point]:
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
            plan = plan_for(here, of_ranks, hardware)
        except PlanError as error:
            found.append(Point(value, of_ranks, None, str(error)))
            continue
        simulation = simulate(plan.plan, plan.costs, plan.model, stragglers=options.stragglers)
        found.append(Point(value, of_ranks, options.priced(simulation)))
    return found


def point_dict(point: Point, points: list[Point]) -> dict[str, Any]:
    """Return a point of a sweep for ``--json``."""
    first = first_that_fits(points)
    about: dict[str, Any] = {"value": point.value, "ranks": point.ranks, "fits": point.simulation is not None}
    if point.simulation is None or first is None:
        return about | {"problem": point.problem}
    return about | {"efficiency": point.efficiency(first)} | point.simulation.to_dict()
