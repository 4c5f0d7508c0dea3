"""Find the fastest sharding plan for this machine or a hardware profile, and simulate it: ``hotbed plan``."""

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

from hotbed.checkpoint.storage import write_text_uri
from hotbed.cli.arguments import (
    Parser,
    add_json,
    add_parameters,
    add_recipe,
    check_json,
    console,
    parse_recipe,
    save_json,
)
from hotbed.cli.pages.plan_page import print_plan, print_simulation, print_sweep, render_plan
from hotbed.cli.pages.report_page import Columns, ReportTable, check_html, format_cell, print_table
from hotbed.config import Recipe
from hotbed.data import Source
from hotbed.errors import PlanError, RecipeError
from hotbed.plan import Plan
from hotbed.plan.cost import TIERS
from hotbed.plan.hardware import Hardware
from hotbed.plan.ranks import TOLERANCE
from hotbed.plan.schemes import AUTO, Schemes
from hotbed.plan.search import Found
from hotbed.plan.simulation.simulate import Simulation, Stragglers, chrome_trace, simulate
from hotbed.plan.simulation.sweep import RANKS, Point, Sweep, assumed_range, elasticities, first_that_fits
from hotbed.plan.step_time import estimate_step, parts_of_busiest, terms_of
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import find_plan, find_ranks, hardware_of, plan_or_schemes


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of `hotbed plan --simulate`."""

    stragglers: Stragglers
    sweep: Sweep | None
    price: float | None  # per node and hour; None means the price in the hardware profile
    trace: str | None  # file of the timeline to write
    html: str | None  # file of the page to write

    def simulate(self, found: Found) -> Simulation:
        """Simulate a plan with the stragglers and the price of these options."""
        simulation = simulate(found.plan, found.costs, found.model, stragglers=self.stragglers)
        return simulation if self.price is None else replace(simulation, price_per_hour=self.price)


def add_arguments(parser: Parser) -> None:
    """Add the recipe's options, the machine, and the options of the simulation."""
    parser.usage = "hotbed plan RECIPE.yaml --hardware NAME|FILE --ranks N [--simulate] [--key value …]"
    add_recipe(parser)
    parser.add_argument("--hardware", help="Built-in hardware profile, or a file. Short for --parallel.hardware.")
    number = int | Literal["auto"]
    parser.add_argument(
        "--ranks", type=number, default=1, help="Number of processes of all replicas; auto: the best number."
    )
    parser.add_argument("--replicas", type=number | None, help="Short for --parallel.replicas; auto: the best number.")
    parser.add_argument("--simulate", action="store_true", help="Simulate steps. The options below also do this.")
    add_parameters(parser, Stragglers, "stragglers.")
    text = "Range of ranks or of a hardware figure to simulate, e.g. ranks=8..4096, network=100Gbit/s..800Gbit/s."
    parser.add_argument("--sweep", help=text)
    text = "Price per node and hour, e.g. 32.8 (default: the price in the hardware profile)."
    parser.add_argument("--price", type=float | None, help=text)
    parser.add_argument("--trace", help="JSON file for the timeline of some ranks, which Chrome and Perfetto show.")
    parser.add_argument("--html", help="HTML file for figures of plan, timeline and scaling. Needs matplotlib.")
    parser.add_argument("--out", help="Plan file to write, for `hotbed train --plan FILE`.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Search for a plan, print it, and simulate it."""
    ranks, replicas, out, to, values = parsed.ranks, parsed.replicas, parsed.out, console(), vars(parsed)
    stragglers = Stragglers(**{field.name: values[f"stragglers.{field.name}"] for field in fields(Stragglers)})
    requested = {name: values[name] for name in ("sweep", "price", "trace", "html")}
    simulates = parsed.simulate or stragglers != Stragglers() or any(v is not None for v in requested.values())
    recipe = parse_recipe(parsed)
    if parsed.hardware is not None:
        recipe = _in_parallel(recipe, hardware=parsed.hardware)
    for option in ("out", "trace"):
        if values[option] is not None:
            check_json(values[option], f"--{option}")
    if (sweep := None if parsed.sweep is None else Sweep.parse(parsed.sweep)) is not None:
        requested["sweep"], hardware = sweep, hardware_of(recipe)
        for value in sweep.values if sweep.what != RANKS else ():
            sweep.hardware(hardware, value)
    check_html(parsed.html)
    if parsed.price is not None and not (math.isfinite(parsed.price) and parsed.price > 0):
        raise RecipeError(f"--price: got {parsed.price:g}, expected a finite number above 0, per node and hour")
    options = SimulationOptions(stragglers=stragglers, **requested)
    if "auto" in (ranks, replicas):
        count = recipe.parallel.replicas if replicas is None else replicas
        ranks, replicas = choose_ranks(recipe, ranks, count, options.price)
    if replicas is not None:
        recipe = _in_parallel(recipe, replicas=replicas)
    if sweep is not None:
        sweep.check(hardware_of(recipe), ranks, recipe.parallel.replicas)
    try:
        found, others = find_plans(recipe, ranks)
    except PlanError as error:  # a sweep over ranks may find a number that fits
        if sweep is None or sweep.what != RANKS or any(v is not None for v in (out, options.trace, options.html)):
            raise
        points, figures = print_points(to, sweep, recipe, ranks, options)
        if first_that_fits(points) is None:
            raise
        to.print(f"--ranks {ranks} does not fit: {error}", soft_wrap=True)
        save_json(parsed.json, {"problem": str(error), "sweep": figures})
        return
    if out is not None:
        write_text_uri(out, found.plan.to_json())
    print_plan(to, found, others, recipe.memory.device_bytes)
    figures = to_json(found, others) | {"faster": faster_settings(recipe, ranks, found)}
    for setting, rate in figures["faster"].items():
        to.print(f"faster: {setting} trains {rate:,.0f} samples/s by formula", soft_wrap=True)
    if simulates:
        figures |= run_simulation(to, found, recipe, ranks, options)
    save_json(parsed.json, figures)


def _in_parallel(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, parallel=replace(recipe.parallel, **changes))


def choose_ranks(
    recipe: Recipe, ranks: int | Literal["auto"], replicas: int | Literal["auto"], price: float | None = None
) -> tuple[int, int]:
    """Choose the numbers that are ``auto``, print a table of the candidates, and return ranks and replicas."""
    if ranks != "auto" and ranks < 1:
        raise RecipeError(f"--ranks: got {ranks}, expected auto or at least 1")
    model, source = _open_model(recipe)
    options: dict[str, Any] = {"schemes": _schemes_in(recipe), "others": "auto", "price": price}
    chosen = find_ranks(model, recipe, ranks, replicas, source, **options)
    columns: Columns = {
        "ranks": lambda tried: str(tried.ranks),
        "replicas": lambda tried: str(tried.replicas),
        "samples/s": lambda tried: f"{tried.samples_per_s:,.0f}" if tried.found else "does not fit",
        "cost of 10⁹ samples": lambda tried: format_cell(tried.cost, ",.4g"),
        "": lambda tried: "chosen" if tried is chosen.best else "",
    }
    title = f"Ranks, by {chosen.goal}; samples/s by formula"
    print_table(console(), ReportTable.of(title, chosen.tried, columns))
    return chosen.best.ranks, chosen.best.replicas


def find_plans(recipe: Recipe, ranks: int) -> tuple[Found, dict[str, float]]:
    """Search for the best plan, and estimate the seconds of a step if all tables have the scheme in the recipe.

    The dict maps the scheme's name to these seconds, which are infinite if no such plan fits. It is empty if
    ``parallel.plan`` is not the name of one scheme for all tables.
    """
    scheme = plan_or_schemes(recipe.parallel)
    found = search_plan(recipe, ranks)
    others: dict[str, float] = {}
    if isinstance(scheme, str) and scheme != AUTO:
        try:
            model, source = _open_model(recipe)
            own = find_plan(model, recipe, ranks // recipe.parallel.replicas, source)
            others[scheme] = estimate_step(own.plan, own.costs, own.model).seconds
        except PlanError:
            others[scheme] = float("inf")
    return found, others


def faster_settings(recipe: Recipe, ranks: int, found: Found) -> dict[str, float]:
    """Return settings that train faster than a plan over several nodes, e.g. ``--ranks 8``.

    The values are the samples per second with each setting.
    """
    hardware, parallel = found.model.hardware, recipe.parallel
    assert hardware is not None
    node, result = hardware.ranks_per_node, dict[str, float]()
    if ranks <= node:
        return result
    tried = {f"--ranks {count}": (recipe, count) for count in dict.fromkeys((ranks // 2, node)) if count < ranks}
    hops = 1 if found.model.links is not None and found.model.links.in_two_hops else node
    if (ranks // parallel.replicas) % hops == 0:
        tried[f"--parallel.ranks_per_node {hops}"] = (_in_parallel(recipe, ranks_per_node=hops), ranks)
    for setting, (changed, count) in tried.items():
        try:
            other = search_plan(changed, count)
        except (PlanError, RecipeError):  # the tables do not fit, or the replicas do not divide the ranks
            continue
        if samples_per_s(other) > TOLERANCE * samples_per_s(found):
            result[setting] = samples_per_s(other)
    return result


def samples_per_s(found: Found) -> float:
    """Return a plan's samples per second by formula (see `estimate_step`)."""
    return found.model.workload.batch_size / estimate_step(found.plan, found.costs, found.model).seconds


def search_plan(recipe: Recipe, ranks: int, hardware: Hardware | None = None) -> Found:
    """Search for a plan for this many ranks on a hardware (default: the recipe's hardware)."""
    count = recipe.parallel.replicas
    if ranks < 1 or ranks % count:
        raise RecipeError(f"--ranks: got {ranks}, expected a positive multiple of parallel.replicas {count}")
    model, source = _open_model(recipe)
    options: dict[str, Any] = {"schemes": _schemes_in(recipe), "others": "auto", "hardware": hardware}
    return find_plan(model, recipe, ranks // count, source, **options)


def _schemes_in(recipe: Recipe) -> Schemes:
    """Return the recipe's schemes by table, or ``auto`` if the recipe has no scheme or one scheme for all tables."""
    given = plan_or_schemes(recipe.parallel)
    if isinstance(given, Plan):
        raise PlanError(f"parallel.plan: got {recipe.parallel.plan}, a complete plan, so there is nothing to search")
    return given if isinstance(given, Mapping) else "auto"


def _open_model(recipe: Recipe) -> tuple[nn.Module, Source]:
    source = open_source(recipe.data)
    with torch.device("meta"):
        return new_model(recipe, source), source


def to_json(found: Found, others: dict[str, float]) -> dict[str, Any]:
    """Return the results of a search for ``--json``."""
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
        "beside_bytes": dict(limits.reserved),
        "others_step_s": {name: seconds if seconds < float("inf") else None for name, seconds in others.items()},
    }


def run_simulation(to: Console, found: Found, recipe: Recipe, ranks: int, options: SimulationOptions) -> dict[str, Any]:
    """Simulate a plan, print the results, write the files of ``options``, and return the results for ``--json``."""
    sweep, simulation = options.sweep, options.simulate(found)
    terms, hardware = terms_of(found.plan, found.costs, found.model), found.model.hardware
    assert hardware is not None
    print_simulation(to, simulation, terms, hardware)
    rates = [{"rates": {name: hardware.origin_of(name) for name in term.figures}} for term in terms]
    result: dict[str, Any] = {"simulation": simulation.to_dict()}
    result["terms"] = [asdict(term) | of_term for term, of_term in zip(terms, rates, strict=True)]
    points: list[Point] = []
    if sweep is not None:
        points, result["sweep"] = print_points(to, sweep, recipe, ranks, options)
        if sweep.what != RANKS:
            result["elasticity"] = elasticity = elasticities(found, options.stragglers)
            values = ", ".join(f"{figure} {value:.2f}" for figure, value in elasticity.items()) or "none"
            to.print(f"step time saved, in %, if a figure is 1 % better: {values}", soft_wrap=True)
    if options.trace is not None:
        write_text_uri(options.trace, json.dumps(chrome_trace(simulation.events)))
    if options.html is not None:
        if sweep is None or sweep.what != RANKS:
            sweep = Sweep.around(ranks, recipe.parallel.replicas)
            points = simulate_points(sweep, recipe, ranks, options)
        write_text_uri(options.html, render_plan(recipe.name, found, simulation, sweep, points))
    return result


def print_points(
    to: Console, sweep: Sweep, recipe: Recipe, ranks: int, options: SimulationOptions
) -> tuple[list[Point], dict[str, Any]]:
    """Run and print a sweep. Return the points, and the results for ``--json``."""
    points = simulate_points(sweep, recipe, ranks, options)
    print_sweep(to, sweep, points)
    first, figures = first_that_fits(points), list[dict[str, Any]]()
    for point in points:
        about: dict[str, Any] = {"value": point.value, "ranks": point.ranks, "fits": point.simulation is not None}
        if point.simulation is None or first is None:
            figures.append(about | {"problem": point.problem})
        else:
            figures.append(about | {"efficiency": point.efficiency(first)} | point.simulation.to_dict())
    return points, {"of": sweep.what, "points": figures}


def simulate_points(sweep: Sweep, recipe: Recipe, ranks: int, options: SimulationOptions) -> list[Point]:
    """Search for a plan at each value of a sweep, and simulate the plan. If ranks vary, the batch per rank is kept."""
    found: list[Point] = []
    for value in sweep.values:
        changed, count, hardware = recipe, ranks, None
        if sweep.what == RANKS:
            count = int(value)
            batch = max(round(recipe.train.batch_size * count / ranks), 1)
            changed = replace(recipe, train=replace(recipe.train, batch_size=batch))
        else:
            hardware = sweep.hardware(hardware_of(recipe), value)
        try:
            found.append(Point(value, count, options.simulate(search_plan(changed, count, hardware))))
        except PlanError as error:
            found.append(Point(value, count, None, str(error)))
    return found
