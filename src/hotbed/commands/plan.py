"""Search for the fastest plan of a recipe's tables, on hardware that need not be here: ``hotbed plan``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table as RichTable
from torch import nn

from hotbed.checkpoint.single_files import write_text
from hotbed.commands.arguments import (
    Parser,
    add_json,
    add_parameters,
    add_recipe,
    check_json,
    console,
    recipe_of,
    write_json,
)
from hotbed.commands.dry_run import cut_of, owners_of
from hotbed.commands.plan_simulation import Options, simulated, swept_and_shown
from hotbed.config import Recipe
from hotbed.data import Source
from hotbed.errors import PlanError, RecipeError
from hotbed.plan import Plan
from hotbed.plan.cost import TIERS
from hotbed.plan.hardware import Hardware
from hotbed.plan.ranks import ALIKE
from hotbed.plan.schemes import Schemes
from hotbed.plan.search import Found
from hotbed.plan.simulate import Stragglers
from hotbed.plan.step import estimate_step, parts_of_busiest
from hotbed.plan.sweep import ASSUMED_FACTOR, Sweep, assumed_range, first_that_fits
from hotbed.plan.tiling import extent
from hotbed.train.build import new_model, open_source
from hotbed.train.plan_search import plan_or_schemes, searched, searched_ranks
from hotbed.train.report import size

_MOST_RANKS = 16
"""Ranks that are shown one by one."""


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
    parser.add_argument("--html", help="File for a page with pictures of plan, timeline and scaling.")
    parser.add_argument("--out", help="File to write the plan to, for --plan of hotbed train.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Search, and show what was found."""
    hardware, ranks, replicas, out, json = parsed.hardware, parsed.ranks, parsed.replicas, parsed.out, parsed.json
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
        write_json(json, swept_without(recipe, ranks, options, error))
        return
    if out is not None:
        write_text(out, found.plan.to_json())
    to, figures = console(), as_dict(found, others)
    print_plan(to, found, others, recipe.memory.device_bytes)
    figures["faster"] = faster_settings(recipe, ranks, found)
    for setting, rate in figures["faster"].items():
        to.print(f"faster: {setting} trains {rate:,.0f} samples/s by formula", soft_wrap=True)
    if wanted:
        figures |= simulated(to, found, recipe, ranks, options, plan_for)
    write_json(json, figures)


def swept_without(recipe: Recipe, ranks: int, options: Options, error: PlanError) -> dict[str, Any]:
    """Sweep ranks where no plan fits so many; raises that error again if none fits any."""
    assert options.sweep is not None
    to = console()
    points, figures = swept_and_shown(to, Sweep.parse(options.sweep), recipe, ranks, options, plan_for)
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
    table = RichTable(
        "ranks",
        "replicas",
        "samples/s",
        "cost of 10⁹ samples",
        "",
        title=f"Ranks, by {chosen.goal}; samples/s by formula",
    )
    for tried in chosen.tried:
        rate = f"{tried.samples_per_s:,.0f}" if tried.found else "does not fit"
        cost = "–" if tried.cost is None else f"{tried.cost:,.4g}"
        table.add_row(str(tried.ranks), str(tried.replicas), rate, cost, "chosen" if tried is chosen.best else "")
    console().print(table)
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


def print_plan(to: Console, found: Found, others: dict[str, float], device_bytes: int | None) -> None:
    """Print tables with their cuts, ranks with their bytes and load, and how good the plan is."""
    costs, plan = found.costs, found.plan
    tables = RichTable(title="Tables", title_justify="left")
    for column in ("table", "rows × columns", "cut", "owners", "memory"):
        tables.add_column(column, justify="right" if "×" in column else "left")
    for name, tiles in plan.by_table.items():
        rows, cols = extent(tiles)
        tiers = " + ".join(tier for tier in TIERS if any(t.tier == tier for t in tiles))
        tables.add_row(name, f"{rows:,} × {cols:,}", cut_of(tiles), owners_of(tiles), tiers)
    to.print(tables)
    order = costs.load.argsort()[::-1].tolist()
    shown = range(plan.world_size)
    if plan.world_size > _MOST_RANKS:
        shown = [order[0], order[len(order) // 2], order[-1], int(costs.nbytes.argmax())]
    ranks = RichTable(title="Ranks" if len(shown) == plan.world_size else "Ranks: busiest, median, idlest, fullest")
    for column in ("rank", "load", *TIERS):
        ranks.add_column(column, justify="right")
    for rank in shown:
        ranks.add_row(
            str(rank), f"{costs.load[rank] * 1e3:,.4g} ms", *(size(int(costs.memory[tier][rank])) for tier in TIERS)
        )
    to.print(ranks)
    step = estimate_step(plan, costs, found.model)
    parts = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in parts_of_busiest(costs).items())
    to.print(
        f"step: {step.seconds * 1e3:,.4g} ms, {samples_per_s(found):,.0f} samples/s; tables {step.tables * 1e3:.3g}, "
        f"dense {step.dense * 1e3:.3g}, messages {step.messages * 1e3:.3g}, launches {step.launches * 1e3:.3g} ms "
        "(by formula: the parts of the busiest rank, which does not wait for other ranks)",
        soft_wrap=True,
    )
    low, high, assumed = assumed_range(found)
    if assumed:
        to.print(
            f"from {low * 1e3:,.4g} to {high * 1e3:,.4g} ms if all assumed figures were {ASSUMED_FACTOR:g} times "
            f"better or worse: {', '.join(assumed)}",
            soft_wrap=True,
        )
    to.print(f"busiest rank (ms): {parts}", soft_wrap=True)
    to.print(
        f"load: max/mean {costs.imbalance:.3f}; {found.gap:.1%} above the lower bound of "
        f"{found.bound.load * 1e3:,.4g} ms ({found.bound.binds}); found by {found.method}",
        soft_wrap=True,
    )
    most = int(costs.memory["device"].max())
    beside = ", ".join(f"{what} {size(nbytes)}" for what, nbytes in found.limits.beside.items() if nbytes)
    room = f"{size(found.limits.device)} per rank"
    if found.limits.device == device_bytes:
        room += " (the recipe's memory.device_bytes)"
    to.print(f"device memory: rows {size(most)} of {room}; beside: {beside}", soft_wrap=True)
    for name, seconds in others.items():
        does = f"{seconds * 1e3:,.4g} ms" if seconds < float("inf") else "does not fit"
        to.print(f"the recipe's own plan {name}: {does}")
