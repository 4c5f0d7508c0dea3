"""Show a plan and its simulation, on a console and as a page: ``hotbed plan [--html FILE]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from rich.console import Console

from hotbed.cli.pages.report_page import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    TIER_COLORS,
    WIDTH,
    Columns,
    Page,
    ReportTable,
    draw_page,
    print_lines,
    print_table,
    set_rows,
)
from hotbed.plan.cost import PARTS, TIERS, Cost, tile_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found
from hotbed.plan.simulation.simulate import THREADS, Simulation, format_amount
from hotbed.plan.simulation.sweep import ASSUMED_FACTOR, RANKS, Point, Sweep, assumed_range, first_that_fits
from hotbed.plan.step_time import Term, estimate_step, parts_of_busiest
from hotbed.plan.tiling import Plan, extent
from hotbed.train.runs.report import size

MOST_BARS = 64  # largest number of ranks that are drawn; of more ranks, a sample is drawn
MOST_TILES = 60  # largest number of a rank's tiles that are drawn as single boxes; smaller tiles share a box
MOST_RANKS = 16  # largest number of ranks that are printed; of more ranks, only four are printed
_FIRST = (BLUE, "#9ec1e0", GREEN, "#8cd17d", "#2f7d5b", PURPLE)
PART_COLORS = (*_FIRST, "#e8a0b8", "#f1ce63", ORANGE, GRAY, RED, "#7b6d5a")  # colors of `hotbed.plan.cost.PARTS`
RESOURCES: tuple[str, ...] = ("device memory", "arithmetic", "links", "host link", "disk", "cores")
RESOURCE_COLORS: dict[str, str] = dict(zip(RESOURCES, (BLUE, GREEN, RED, ORANGE, GRAY, PURPLE), strict=True))
_BAR = 20  # largest length of a bar of load, in characters
_EDGE = {"edgecolor": "white", "linewidth": 0.3}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"


def plan_grids(plan: Plan, costs: Sequence[Cost]) -> list[ReportTable]:
    """Return two tables for a console: how tables are cut, and the bytes and the load of each rank."""
    most = max(cost.load for cost in costs) or 1.0
    ranks: list[list[str]] = []
    for rank, cost in enumerate(costs):
        load = f"{'█' * round(_BAR * cost.load / most)} {cost.load / most:.0%}"
        count = sum(rank in tile.ranks for tile in plan.tiles)
        ranks.append([str(rank), str(count), f"{cost.nbytes / 2**20:,.1f} MiB", load])
    tables = _tables(plan)
    tables = tables._replace(head=tables.head[:-1], rows=[row[:-1] for row in tables.rows])
    return [tables, ReportTable("Ranks", ("rank", "tiles", "memory", "load"), ranks, left=("load",))]


def _tables(plan: Plan) -> ReportTable:
    """Return a row per table: cuts and copies (e.g. ``4 row parts``), owners (``0 … 7``) and tiers.

    The cut also marks tables that send pooled vectors.
    """
    rows: list[list[str]] = []
    for name, tiles in plan.by_table.items():
        cuts = ((len({t.rows for t in tiles}), "row"), (len({t.cols for t in tiles}), "column"))
        parts = [f"{count} {of} parts" for count, of in cuts if count > 1]
        if copied := [t for t in tiles if t.readers]:
            some = f"{sum(len(t.rows) for t in copied if t.cols.start == 0):,}"
            which = "all" if len(copied) == len(tiles) else some
            parts.append(f"{which} rows on {max(len(t.ranks) for t in copied)} ranks")
        owners = sorted({t.owner for t in tiles})
        is_range = len(owners) > 2 and owners == list(range(owners[0], owners[-1] + 1))
        named = f"{owners[0]} … {owners[-1]}" if is_range else ", ".join(map(str, owners))
        tiers = " + ".join(tier for tier in TIERS if any(t.tier == tier for t in tiles))
        cut = (", ".join(parts) or "whole") + "; pooled vectors" * (plan.wire.get(name) == "pooled")
        rows.append([name, "{:,} × {:,}".format(*extent(tiles)), cut, named, tiers])
    left = ("cut", "owners", "memory")
    return ReportTable("Tables", ("table", "rows × columns", *left), rows, left)


def print_plan(to: Console, found: Found, others: dict[str, float], device_bytes: int | None) -> None:
    """Print the tables and ranks of a plan, its estimated step, and its distance from the lower bound."""
    costs, plan = found.costs, found.plan
    print_table(to, _tables(found.plan))
    title, ranks = "Ranks", list(range(plan.world_size))
    if plan.world_size > MOST_RANKS:
        order = costs.load.argsort()[::-1].tolist()
        title += ": busiest, median, idlest, fullest"
        ranks = [order[0], order[len(order) // 2], order[-1], int(costs.nbytes.argmax())]
    rows = [
        [str(rank), _ms(costs.load[rank]), *(size(int(costs.memory[tier][rank])) for tier in TIERS)] for rank in ranks
    ]
    print_table(to, ReportTable(title, ("rank", "load", *TIERS), rows))
    reserved = ", ".join(f"{what} {size(nbytes)}" for what, nbytes in found.limits.reserved.items() if nbytes)
    limit = f"{size(found.limits.device)} per rank"
    limit += " (the recipe's memory.device_bytes)" * (found.limits.device == device_bytes)
    memory = f"device memory: rows {size(int(costs.memory['device'].max()))} of {limit}; reserved: {reserved}"
    times = {name: _ms(seconds) if math.isfinite(seconds) else "does not fit" for name, seconds in others.items()}
    lines = (f"the recipe's plan {name}: {time}" for name, time in times.items())
    print_lines(to, (*_step_lines(found), memory, *lines))


def print_simulation(to: Console, simulation: Simulation, terms: Sequence[Term], hardware: Hardware) -> None:
    """Print a simulated step, its resources, and its terms with the sources of their rates."""
    print_lines(to, _simulated_lines(simulation))
    print_table(to, _resources(simulation))
    columns: Columns = {
        "term": lambda t: t.name,
        "ms": lambda t: f"({t.seconds * 1e3:.3g})" if t.hidden else f"{t.seconds * 1e3:.3g}",
        "kernels": lambda t: str(t.kernels or ""),
        "amount": lambda t: "" if t.unit == "s" else format_amount(t.amount, t.unit),
        "counted by": lambda t: t.counted,
        "at": lambda t: ", ".join(t.figures),
    }
    left = ("counted by", "at")
    print_table(to, ReportTable.of("Terms of a step, busiest rank", terms, columns, left))
    if any(term.hidden for term in terms):
        to.print("times in brackets are overlapped, so they are not added to the step")
    used = dict.fromkeys(figure for term in terms for figure in term.figures)
    sources = {figure: hardware.origin_of(figure) for figure in used}
    cited = {name for text in sources.values() for name in text[text.rfind("(") + 1 :].rstrip(")").split(", ")}
    print_lines(to, (f"{figure}: {source}" for figure, source in sources.items()))
    print_lines(to, (source for source in hardware.sources if source.split(":", 1)[0] in cited))


def print_sweep(to: Console, sweep: Sweep, points: Sequence[Point]) -> None:
    """Print a table with a row per point, and why points do not fit."""
    print_table(to, _sweep(sweep, points))
    steps = [point.simulation.step_s if point.simulation else None for point in points]
    if sweep.what != RANKS and len(steps) > 1 and len(set(steps)) == 1:
        to.print(f"{sweep.what} makes no difference: at all of these values, a different resource limits the step")
    problems = dict.fromkeys(point.problem for point in points if point.problem)
    print_lines(to, (f"does not fit: {problem}" for problem in problems))


def _step_lines(found: Found) -> list[str]:
    costs, step = found.costs, estimate_step(found.plan, found.costs, found.model)
    parts = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in parts_of_busiest(costs).items())
    rate = found.model.workload.batch_size / step.seconds
    summands = ", ".join(f"{n} {getattr(step, n) * 1e3:.3g}" for n in ("tables", "dense", "messages", "launches"))
    of = "(by formula: the busiest rank's parts, without waits for other ranks)"
    lines = [f"step: {_ms(step.seconds)}, {rate:,.0f} samples/s; {summands} ms {of}"]
    low, high, assumed = assumed_range(found)
    if assumed:
        figures = f"all assumed figures were {ASSUMED_FACTOR:g} times better or worse: {', '.join(assumed)}"
        lines.append(f"the step would take {low * 1e3:,.4g} to {_ms(high)} if {figures}")
    bound = f"{found.gap:.1%} above the lower bound of {_ms(found.bound.load)} ({found.bound.binds})"
    load = f"load: max/mean {costs.imbalance:.3f}; {bound}; found by {found.method}"
    return [*lines, f"busiest rank (ms): {parts}", load]


def _simulated_lines(simulation: Simulation) -> list[str]:
    spent = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in simulation.critical.items())
    lines = [
        f"simulated: {_ms(simulation.step_s)}, {simulation.samples_per_s:,.0f} samples/s on "
        f"{simulation.nodes:,} nodes; bound by {simulation.binds}; ranks wait {simulation.waiting:.1%} of a step "
        "(unlike the formula, the simulation includes waits for other ranks and for cores)",
        f"the rank that waits least (ms): {spent}",
    ]
    if simulation.per_billion is not None:
        price = f"{simulation.per_billion:,.2f} per billion samples"
        lines.append(f"price: {price}, at {simulation.price_per_hour:g} per node and hour")
    return lines


def _resources(simulation: Simulation) -> ReportTable:
    columns: Columns = {
        "resource": lambda named: named[0],
        "mean": lambda named: format_amount(named[1].amount, named[1].unit),
        "most": lambda named: format_amount(named[1].most, named[1].unit),
        "in use": lambda named: _ms(named[1].seconds),
        "of the step": lambda named: f"{named[1].utilisation:.1%}",
    }
    return ReportTable.of("Resources of a rank, per step", simulation.usage.items(), columns)


def _sweep(sweep: Sweep, points: Sequence[Point]) -> ReportTable:
    first = first_that_fits(list(points))
    rows: list[list[str]] = []
    for point in points:
        cells = ["does not fit", "", "", "", "", ""]
        if (step := point.simulation) is not None and first is not None:
            cells = [_ms(step.step_s), f"{step.samples_per_s:,.0f}", f"{point.efficiency(first):.1%}"]
            price = "" if step.per_billion is None else f"{step.per_billion:,.2f}"
            cells += [f"{step.waiting:.1%}", step.binds, price]
        rows.append([sweep.format_value(point.value), *cells])
    title = "ranks, at a constant batch per rank" if sweep.what == RANKS else sweep.what
    head = (sweep.what, "step", "samples/s", "efficiency", "waiting", "bound by", "per billion samples")
    return ReportTable(f"Sweep of {title}", head, rows, left=("bound by",))


def render_plan(name: str, found: Found, simulation: Simulation, sweep: Sweep, points: Sequence[Point]) -> str:
    """Return the HTML page of a plan, its simulation, and a sweep over ranks."""
    work, hardware = found.model.workload, found.model.hardware
    assert hardware is not None
    replicas = f" in {work.replicas:,} replicas" if work.replicas > 1 else ""
    ranks, which = _sample_ranks(found)
    title = f"{name}: {found.plan.world_size * work.replicas:,} ranks{replicas} of {hardware.name}"
    with draw_page(title) as page:
        page.text(*_simulated_lines(simulation), *_step_lines(found))
        page.heading("Memory of ranks: tiles by tier", f"{which} A box is a tile of a table, or a copy of a tile.")
        _memory(page, found, ranks)
        page.table(_tables(found.plan))
        page.heading("Load of ranks: time for tables in a step")
        page.text(f"{which} The dense part takes the same time on all ranks, and is not drawn.")
        _load(page, found, ranks)
        page.heading("Timeline of a few steps")
        _timeline(page, simulation)
        page.heading("Resources of a rank, per step")
        page.table(_resources(simulation))
        page.heading("Scaling")
        _scaling(page, sweep, points)
        return page.render()


def _sample_ranks(found: Found) -> tuple[list[int], str]:
    """Return the ranks to draw, and a description: all ranks, or a sample with the busiest, idlest and fullest rank."""
    count, fullest = found.plan.world_size, int(found.costs.nbytes.argmax())
    if count <= MOST_BARS:
        return list(range(count)), f"All ranks{' of a replica' if found.model.workload.replicas > 1 else ''}."
    order = found.costs.load.argsort(kind="stable")[::-1].tolist()
    ranks = [order[round(i * (count - 1) / (MOST_BARS - 2))] for i in range(MOST_BARS - 1)]
    last = "last. The rank with the most bytes is one of them"
    if fullest not in ranks:
        ranks.append(fullest)
        last = "last but one. The last rank has the most bytes"
    which = (
        f"A sample of {len(ranks)} of {count:,} ranks at equal steps, by load: the busiest first, the idlest {last}."
    )
    return ranks, which


def _memory(page: Page, found: Found, ranks: Sequence[int]) -> None:
    uses, limit = found.model.workload.by_table, found.limits.device
    column = {rank: i for i, rank in enumerate(ranks)}
    axes = _rank_axes(page, "bytes of rows and moments", ranks)
    tops = [0.0] * len(ranks)
    for tier in TIERS:
        tiles: list[list[int]] = [[] for _ in ranks]
        for tile in found.plan.tiles:
            if tile.tier == tier:
                table, moments = uses[tile.table].table, uses[tile.table].moments
                for rank in (rank for rank in tile.ranks if rank in column):
                    tiles[column[rank]].append(tile_bytes(table, tile, moments if rank == tile.owner else ()))
        boxes: list[tuple[int, float, int]] = []  # column, bottom, height
        for i, own in enumerate(tiles):
            largest = sorted(own)[::-1]
            heights = [*largest[:MOST_TILES], *([rest] if (rest := sum(largest[MOST_TILES:])) else [])]
            *bottoms, tops[i] = accumulate(heights, initial=tops[i])
            boxes += [(i, bottom, height) for bottom, height in zip(bottoms, heights, strict=True)]
        if boxes:
            at, bottom, height = zip(*boxes, strict=True)
            axes.bar(at, height, 0.86, bottom, color=TIER_COLORS[tier], label=tier, **_EDGE)
    most = max(tops) or 1.0
    axes.set_yticks(marks := [0, most / 2, most], [size(int(mark)) for mark in marks])
    axes.set_ylim(0, most * 1.03)
    if limit <= most:
        axes.axhline(limit, color=RED, linestyle="--", linewidth=1)
    title = f"room for rows on the device: {size(limit)} per rank"
    axes.set_title(title, loc="right", color=RED if limit <= most else "#666666")
    page.figures(page.svg(axes, "memory of ranks", legend=6))


def _load(page: Page, found: Found, ranks: Sequence[int]) -> None:
    axes = _rank_axes(page, "milliseconds of a step", ranks)
    bottom = np.zeros(len(ranks))
    for number, (name, color) in enumerate(zip(PARTS, PART_COLORS, strict=True)):
        ms = 1e3 * found.costs.parts[list(ranks), number]
        if ms.any():
            axes.bar(range(len(ranks)), ms, 0.86, bottom, color=color, label=name, **_EDGE)
            bottom += ms
    mean = 1e3 * float(found.costs.load.mean())
    axes.axhline(mean, color="#222222", linestyle="--", linewidth=1)
    axes.set_title(f"mean {mean:.4g} ms (dashed)", loc="right", color="#666666")
    page.figures(page.svg(axes, "load of ranks", legend=6))


def _rank_axes(page: Page, title: str, ranks: Sequence[int]) -> Any:
    axes = page.axes(title, WIDTH, 3.6)
    every = math.ceil(len(ranks) / 32)
    axes.set_xticks(range(0, len(ranks), every), [str(rank) for rank in ranks[::every]])
    axes.set_xlim(-0.6, max(len(ranks), 4) - 0.4)
    axes.set_xlabel("rank")
    return axes


def _timeline(page: Page, simulation: Simulation) -> None:
    events = simulation.events
    if not events:
        page.text("No event takes any time.")
        return
    begin = min(event.start for event in events)
    whole = 1e3 * (max(event.start + event.seconds for event in events) - begin)
    ranks = list(dict.fromkeys(event.rank for event in events))
    which = f"Ranks {', '.join(map(str, ranks))}. Every other rank has the same load as one of these."
    if len(ranks) >= 3:
        named = zip(ranks, ("busiest", "median", "idlest"), strict=False)
        which = f"By load of tables, {', '.join(f'rank {rank} is the {name}' for rank, name in named)}."
    page.text(f"{which} Gaps are waits. To zoom, write the timeline with --trace FILE.")
    rows = sorted({(ranks.index(e.rank), THREADS.index(e.thread)) for e in events})
    axes = page.axes("milliseconds since the first drawn step began", WIDTH, 0.9 + 0.27 * len(rows))
    for resource in (name for name in RESOURCES if any(e.resource == name for e in events)):
        own = [e for e in events if e.resource == resource]
        at = [rows.index((ranks.index(e.rank), THREADS.index(e.thread))) for e in own]
        starts, widths = [1e3 * (e.start - begin) for e in own], [1e3 * e.seconds for e in own]
        axes.barh(at, widths, 0.8, starts, color=RESOURCE_COLORS[resource], label=resource, **_EDGE)
        for event, row, start, width in zip(own, at, starts, widths, strict=True):
            if width > whole * (0.0055 * len(event.name) + 0.004):  # the name fits into its box
                axes.text(start + width / 2, row, event.name, ha="center", va="center", color="white", fontsize=7)
    set_rows(axes, [f"rank {ranks[rank]} {THREADS[thread]}" for rank, thread in rows])
    axes.set_xlim(0, whole or 1)
    page.figures(page.svg(axes, "timeline", legend=6))


def _scaling(page: Page, sweep: Sweep, points: Sequence[Point]) -> None:
    first = first_that_fits(list(points))
    missing = [f"{p.ranks:,} ranks: {p.problem}" for p in points if p.simulation is None][:3]
    if first is None or first.simulation is None:
        page.text("No plan fits any of these numbers of ranks.", *missing)
        return
    fitting = [(p.ranks, p.simulation.samples_per_s, f"{p.efficiency(first):.0%}") for p in points if p.simulation]
    counts, rates, _ = zip(*fitting, strict=True)
    high, per_rank = max(p.ranks for p in points), first.simulation.samples_per_s / first.ranks
    axes = page.axes("samples/s by ranks", 8.0, 3.6)
    axes.plot([first.ranks, high], [per_rank * first.ranks, per_rank * high], color=GRAY, linestyle="--")
    axes.plot(counts, rates, color=BLUE, marker="o")
    for count, rate, efficiency in fitting:
        axes.annotate(efficiency, (count, rate), (0, 7), textcoords="offset points", ha="center")
    for point in points:
        if point.simulation is None:
            axes.text(point.ranks, min(rates), "does not fit", ha="center", color=RED)
    axes.loglog()
    axes.set_xticks([p.ranks for p in points], [f"{p.ranks:,}" for p in points])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter(lambda mark, _: format_amount(mark, "/s"))  # pyright: ignore[reportUnknownLambdaType]
    axes.minorticks_off()
    axes.margins(0.06, 0.12)
    page.text("The batch per rank is constant. The dashed line is where every rank is as fast as at the first point.")
    page.figures(page.svg(axes, "scaling"))
    page.table(_sweep(sweep, points))
    page.text(*missing)
