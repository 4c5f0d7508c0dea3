"""Show a plan and its simulation, on a console and as a page: ``hotbed plan [--html FILE]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from hotbed.cli.dry_run import cut_of, owners_of
from hotbed.cli.pages.report_page import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    TIER_COLORS,
    WIDTH,
    Figures,
    Table,
    drawing,
    html_figures,
    html_lines,
    html_page,
    html_table,
    print_table,
)
from hotbed.plan.cost import PARTS, TIERS, tile_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found
from hotbed.plan.simulation.simulate import THREADS, Simulation, format_amount
from hotbed.plan.simulation.sweep import ASSUMED_FACTOR, RANKS, Point, Sweep, assumed_range, first_that_fits
from hotbed.plan.step_time import Term, estimate_step, parts_of_busiest
from hotbed.plan.tiling import extent
from hotbed.train.runs.report import size

MOST_BARS = 64
"""Ranks that are drawn; of more, a sample."""
MOST_TILES = 60
"""Tiles of a rank that are drawn one by one, the largest; the others are one box."""
MOST_RANKS = 16
"""Ranks that are printed one by one."""
_FIRST = (BLUE, "#9ec1e0", GREEN, "#8cd17d", "#2f7d5b", PURPLE)
PART_COLORS = (*_FIRST, "#e8a0b8", "#f1ce63", ORANGE, GRAY, RED, "#7b6d5a")
"""Colors of `hotbed.plan.cost.PARTS`."""
RESOURCES: tuple[str, ...] = ("device memory", "arithmetic", "links", "host link", "disk", "cores")
RESOURCE_COLORS: dict[str, str] = dict(zip(RESOURCES, (BLUE, GREEN, RED, ORANGE, GRAY, PURPLE), strict=True))
_EDGE = {"edgecolor": "white", "linewidth": 0.3}


# -- printed -----------------------------------------------------------------------------------------------------


def print_plan(to: Console, found: Found, others: dict[str, float], device_bytes: int | None) -> None:
    """Print tables with their cuts, ranks with their bytes and load, and how good the plan is."""
    costs, plan = found.costs, found.plan
    print_table(to, _tables(found))
    title, shown = "Ranks", list(range(plan.world_size))
    if plan.world_size > MOST_RANKS:
        order = costs.load.argsort()[::-1].tolist()
        title += ": busiest, median, idlest, fullest"
        shown = [order[0], order[len(order) // 2], order[-1], int(costs.nbytes.argmax())]
    rows = [
        [str(rank), f"{costs.load[rank] * 1e3:,.4g} ms", *(size(int(costs.memory[tier][rank])) for tier in TIERS)]
        for rank in shown
    ]
    print_table(to, Table(title, ("rank", "load", *TIERS), rows))
    for line in _step_lines(found):
        to.print(line, soft_wrap=True)
    most = int(costs.memory["device"].max())
    beside = ", ".join(f"{what} {size(nbytes)}" for what, nbytes in found.limits.beside.items() if nbytes)
    room = f"{size(found.limits.device)} per rank"
    if found.limits.device == device_bytes:
        room += " (the recipe's memory.device_bytes)"
    to.print(f"device memory: rows {size(most)} of {room}; beside: {beside}", soft_wrap=True)
    for name, seconds in others.items():
        does = f"{seconds * 1e3:,.4g} ms" if seconds < float("inf") else "does not fit"
        to.print(f"the recipe's own plan {name}: {does}")


def print_simulation(to: Console, simulation: Simulation, terms: Sequence[Term], here: Hardware) -> None:
    """Print what a step is spent on, what binds, its terms with their sources, and what a billion samples cost."""
    for line in _simulated_lines(simulation):
        to.print(line, soft_wrap=True)
    print_table(to, _resources(simulation))
    print_table(to, _terms(terms))
    if any(term.hidden for term in terms):
        to.print("in brackets: beside the step, not added")
    used = dict.fromkeys(figure for term in terms for figure in term.figures)
    said = [here.origin_of(figure) for figure in used]
    for figure, words in zip(used, said, strict=True):
        to.print(f"{figure}: {words}", soft_wrap=True)
    named = {name for words in said for name in words[words.rfind("(") + 1 :].rstrip(")").split(", ")}
    for source in here.sources:
        if source.split(":", 1)[0] in named:
            to.print(source, soft_wrap=True)


def print_sweep(to: Console, sweep: Sweep, points: Sequence[Point]) -> None:
    """Print a row for each point."""
    print_table(to, _sweep(sweep, points))
    steps = [point.simulation.step_s if point.simulation else None for point in points]
    if sweep.what != RANKS and len(steps) > 1 and len(set(steps)) == 1:
        to.print(f"{sweep.what} makes no difference here: the step waits for something else at all of these values")
    for problem in {point.problem: None for point in points if point.problem}:
        to.print(f"does not fit: {problem}", soft_wrap=True)


def _step_lines(found: Found) -> list[str]:
    """Describe the step by formula."""
    costs, step = found.costs, estimate_step(found.plan, found.costs, found.model)
    parts = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in parts_of_busiest(costs).items())
    rate = found.model.workload.batch_size / step.seconds
    lines = [
        f"step: {step.seconds * 1e3:,.4g} ms, {rate:,.0f} samples/s; tables {step.tables * 1e3:.3g}, "
        f"dense {step.dense * 1e3:.3g}, messages {step.messages * 1e3:.3g}, launches {step.launches * 1e3:.3g} ms "
        "(by formula: the parts of the busiest rank, which does not wait for other ranks)"
    ]
    low, high, assumed = assumed_range(found)
    if assumed:
        lines.append(
            f"from {low * 1e3:,.4g} to {high * 1e3:,.4g} ms if all assumed figures were {ASSUMED_FACTOR:g} times "
            f"better or worse: {', '.join(assumed)}"
        )
    return [
        *lines,
        f"busiest rank (ms): {parts}",
        f"load: max/mean {costs.imbalance:.3f}; {found.gap:.1%} above the lower bound of "
        f"{found.bound.load * 1e3:,.4g} ms ({found.bound.binds}); found by {found.method}",
    ]


def _simulated_lines(simulation: Simulation) -> list[str]:
    spent = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in simulation.critical.items())
    lines = [
        f"simulated: {simulation.step_s * 1e3:,.4g} ms, {simulation.samples_per_s:,.0f} samples/s on "
        f"{simulation.nodes:,} nodes; bound by {simulation.binds}; ranks wait {simulation.waiting:.1%} of a step "
        "(unlike the formula, this includes waiting for other ranks and for cores)",
        f"the rank that waits least (ms): {spent}",
    ]
    if simulation.per_billion is not None:
        price = f"{simulation.per_billion:,.2f} per billion samples"
        lines.append(f"price: {price}, at {simulation.price_per_hour:g} per node and hour")
    return lines


def _tables(found: Found) -> Table:
    rows: list[list[str]] = []
    for name, tiles in found.plan.by_table.items():
        count, columns = extent(tiles)
        tiers = " + ".join(tier for tier in TIERS if any(t.tier == tier for t in tiles))
        rows.append([name, f"{count:,} × {columns:,}", cut_of(tiles), owners_of(tiles), tiers])
    left = ("cut", "owners", "memory")
    return Table("Tables", ("table", "rows × columns", *left), rows, left)


def _resources(simulation: Simulation) -> Table:
    rows = [
        [
            name,
            *(format_amount(amount, usage.unit) for amount in (usage.amount, usage.most)),
            f"{usage.seconds * 1e3:,.4g} ms",
            f"{usage.utilisation:.1%}",
        ]
        for name, usage in simulation.usage.items()
    ]
    head = ("resource", "mean", "most", "in use", "of the step")
    return Table("Resources of a rank, per step", head, rows)


def _terms(terms: Sequence[Term]) -> Table:
    """Return what a step of the busiest rank adds up from, and where each amount and rate is from."""
    rows: list[list[str]] = []
    for term in terms:
        amount = "" if term.unit == "s" else format_amount(term.amount, term.unit)
        time = f"({term.seconds * 1e3:.3g})" if term.hidden else f"{term.seconds * 1e3:.3g}"
        rows.append([term.name, time, str(term.kernels or ""), amount, term.counted, ", ".join(term.figures)])
    left = ("counted by", "at")
    return Table("Terms of a step, busiest rank", ("term", "ms", "kernels", "amount", *left), rows, left)


def _sweep(sweep: Sweep, points: Sequence[Point]) -> Table:
    first = first_that_fits(list(points))
    rows: list[list[str]] = []
    for point in points:
        at, simulation = sweep.format_value(point.value), point.simulation
        if simulation is None or first is None:
            rows.append([at, "does not fit", "", "", "", "", ""])
            continue
        cells = [
            at,
            f"{simulation.step_s * 1e3:,.4g} ms",
            f"{simulation.samples_per_s:,.0f}",
            f"{point.efficiency(first):.1%}",
            f"{simulation.waiting:.1%}",
            simulation.binds,
            "" if simulation.per_billion is None else f"{simulation.per_billion:,.2f}",
        ]
        rows.append(cells)
    title = "ranks, with as many samples each" if sweep.what == RANKS else sweep.what
    head = (sweep.what, "step", "samples/s", "efficiency", "waiting", "bound by", "per billion samples")
    return Table(f"Sweep of {title}", head, rows, left=("bound by",))


# -- the page ----------------------------------------------------------------------------------------------------


def page(name: str, found: Found, simulation: Simulation, sweep: Sweep, points: Sequence[Point]) -> str:
    """Return the page of a plan; ``points`` are those of a sweep of ranks."""
    work, here = found.model.workload, found.model.hardware
    assert here is not None
    ranks = found.plan.world_size * work.replicas
    of_replicas = f" in {work.replicas:,} replicas" if work.replicas > 1 else ""
    shown = _shown(found)
    which = _which(found, shown)
    trace = "Gaps are waits. The same, to zoom into: --trace FILE."
    with drawing() as figures:
        sections = {
            "": html_lines(*_simulated_lines(simulation), *_step_lines(found)),
            "Memory of ranks: tiles by tier": [
                *html_lines(f"{which} A box is a tile of a table, or a copy of one."),
                _memory(figures, found, shown),
                html_table(_tables(found)),
            ],
            "Load of ranks: what a step does for tables": [
                *html_lines(f"{which} The dense part is the same on all ranks, and not shown here."),
                _load(figures, found, shown),
            ],
            "Timeline of a few steps": [
                *html_lines(f"{_drawn_ranks(simulation)} {trace}"),
                _timeline(figures, simulation),
            ],
            "Resources of a rank, per step": [html_table(_resources(simulation))],
            "Scaling": _scaling(figures, sweep, points),
        }
        return html_page(f"{name}: {ranks:,} ranks{of_replicas} of {here.name}", sections)


def _shown(found: Found) -> list[int]:
    """Return the ranks that are drawn: all, or by load the busiest, the idlest, and evenly between; and the fullest."""
    size_of = found.plan.world_size
    if size_of <= MOST_BARS:
        return list(range(size_of))
    order = found.costs.load.argsort(kind="stable")[::-1].tolist()
    picked = [order[round(i * (size_of - 1) / (MOST_BARS - 2))] for i in range(MOST_BARS - 1)]
    return list(dict.fromkeys([*picked, int(found.costs.nbytes.argmax())]))


def _which(found: Found, shown: Sequence[int]) -> str:
    group = "All ranks of a group" if found.model.workload.replicas > 1 else "All ranks"
    if len(shown) == found.plan.world_size:
        return f"{group}."
    fullest = int(found.costs.nbytes.argmax())
    last = "last, evenly picked between; the one with most bytes is among them"
    if fullest == shown[-1] and len(shown) == MOST_BARS:
        last = "last but one, evenly picked between; the last is the one with most bytes"
    return (
        f"A sample of {len(shown)} of {found.plan.world_size:,} ranks, ordered by load: the busiest first, the idlest "
        f"{last}."
    )


def _memory(figures: Figures, found: Found, shown: Sequence[int]) -> str:
    uses, limit = found.model.workload.by_table, found.limits.device
    place = {rank: i for i, rank in enumerate(shown)}
    axes = _rank_axes(figures, "bytes of rows and moments", shown)
    bottom = np.zeros(len(shown))
    for tier in TIERS:
        tiles: list[list[int]] = [[] for _ in shown]
        for tile in found.plan.tiles:
            if tile.tier == tier:
                table, moments = uses[tile.table].table, uses[tile.table].moments
                for rank in (rank for rank in tile.ranks if rank in place):
                    tiles[place[rank]].append(tile_bytes(table, tile, moments if rank == tile.owner else ()))
        at: list[int] = []
        heights: list[int] = []
        for i, own in enumerate(tiles):
            largest = sorted(own)[::-1]
            boxes = [*largest[:MOST_TILES], *([rest] if (rest := sum(largest[MOST_TILES:])) else [])]
            at += [i] * len(boxes)
            heights += boxes
        if at:
            bottoms = _stack(at, heights, bottom)
            axes.bar(at, heights, 0.86, bottoms, color=TIER_COLORS[tier], label=tier, **_EDGE)
    most = float(bottom.max()) or 1.0
    marks = [most * f for f in (0, 0.5, 1)]
    axes.set_yticks(marks, [size(int(mark)) for mark in marks])
    axes.set_ylim(0, most * 1.03)
    words = f"room for rows on the device: {size(limit)} per rank"
    if limit <= most:
        axes.axhline(limit, color=RED, linestyle="--", linewidth=1)
    axes.set_title(words, loc="right", color=RED if limit <= most else "#666666")
    return _with_legend(figures, axes, "memory of ranks")


def _stack(at: Sequence[int], heights: Sequence[int], bottom: NDArray[np.float64]) -> list[float]:
    """Return where each box of a column starts, and add the boxes to ``bottom``, the heights of columns."""
    starts: list[float] = []
    for i, height in zip(at, heights, strict=True):
        starts.append(float(bottom[i]))
        bottom[i] += height
    return starts


def _load(figures: Figures, found: Found, shown: Sequence[int]) -> str:
    axes = _rank_axes(figures, "milliseconds of a step", shown)
    bottom = np.zeros(len(shown))
    for number, (name, color) in enumerate(zip(PARTS, PART_COLORS, strict=True)):
        ms = 1e3 * found.costs.parts[list(shown), number]
        if ms.any():
            axes.bar(range(len(shown)), ms, 0.86, bottom, color=color, label=name, **_EDGE)
            bottom += ms
    mean = 1e3 * float(found.costs.load.mean())
    axes.axhline(mean, color="#222222", linestyle="--", linewidth=1)
    axes.set_title(f"mean {mean:.4g} ms (dashed)", loc="right", color="#666666")
    return _with_legend(figures, axes, "load of ranks")


def _rank_axes(figures: Figures, title: str, shown: Sequence[int]) -> Any:
    axes = figures.axes(title, WIDTH, 3.6)
    every = math.ceil(len(shown) / 32)
    axes.set_xticks(range(0, len(shown), every), [str(rank) for rank in shown[::every]])
    axes.set_xlim(-0.6, max(len(shown), 4) - 0.4)
    axes.set_xlabel("rank")
    return axes


def _with_legend(figures: Figures, axes: Any, label: str) -> str:
    """Add a legend below the axes, and return the figure."""
    axes.figure.legend(loc="outside lower center", ncols=6, frameon=False)
    return html_figures([figures.svg(axes.figure, label)])


def _drawn_ranks(simulation: Simulation) -> str:
    ranks = list(dict.fromkeys(event.rank for event in simulation.events))
    names = ("busiest", "median", "idlest")
    if len(ranks) < len(names):
        return f"Ranks of unequal load: {', '.join(map(str, ranks))}; all others are like one of them."
    return "Of tables, " + ", ".join(f"rank {r} is the {n}" for r, n in zip(ranks, names, strict=False)) + "."


def _timeline(figures: Figures, simulation: Simulation) -> str:
    events = simulation.events
    if not events:
        return "<p>Nothing takes any time.</p>"
    begin = min(event.start for event in events)
    whole = 1e3 * (max(event.start + event.seconds for event in events) - begin)
    ranks = list(dict.fromkeys(event.rank for event in events))
    rows = sorted({(ranks.index(e.rank), THREADS.index(e.thread)) for e in events})
    axes = figures.axes("milliseconds since the first step shown began", WIDTH, 0.9 + 0.27 * len(rows))
    for resource in (name for name in RESOURCES if any(e.resource == name for e in events)):
        own = [e for e in events if e.resource == resource]
        at = [rows.index((ranks.index(e.rank), THREADS.index(e.thread))) for e in own]
        starts, widths = [1e3 * (e.start - begin) for e in own], [1e3 * e.seconds for e in own]
        axes.barh(at, widths, 0.8, starts, color=RESOURCE_COLORS[resource], label=resource, **_EDGE)
        for event, row, start, width in zip(own, at, starts, widths, strict=True):
            if width > whole * (0.0055 * len(event.name) + 0.004):  # the name fits into its box
                axes.text(start + width / 2, row, event.name, ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"rank {ranks[rank]} {THREADS[thread]}" for rank, thread in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, whole or 1)
    return _with_legend(figures, axes, "timeline")


def _scaling(figures: Figures, sweep: Sweep, points: Sequence[Point]) -> list[str]:
    first = first_that_fits(list(points))
    missing = html_lines(*[f"{p.ranks:,} ranks: {p.problem}" for p in points if p.simulation is None][:3])
    if first is None or first.simulation is None:
        return [*html_lines("No plan fits any of these numbers of ranks."), *missing]
    there = [(p.ranks, p.simulation.samples_per_s, f"{p.efficiency(first):.0%}") for p in points if p.simulation]
    counts, rates = [n for n, _, _ in there], [rate for _, rate, _ in there]
    high, per_rank = max(p.ranks for p in points), first.simulation.samples_per_s / first.ranks
    axes = figures.axes("samples/s by ranks", 8.0, 3.6)
    axes.plot([first.ranks, high], [per_rank * first.ranks, per_rank * high], color=GRAY, linestyle="--")
    axes.plot(counts, rates, color=BLUE, marker="o")
    for count, rate, words in there:
        axes.annotate(words, (count, rate), (0, 7), textcoords="offset points", ha="center")
    least, most = min(rates), max(per_rank * high, *rates)
    for point in points:
        if point.simulation is None:
            axes.text(point.ranks, least, "does not fit", ha="center", color=RED)
    exponents = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    marks = [factor * 10.0**e for e in exponents for factor in (1, 2, 5)]
    marks = [mark for mark in marks if 0.9 * least <= mark <= 1.1 * most]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([p.ranks for p in points], [f"{p.ranks:,}" for p in points])
    axes.set_yticks(marks, [format_amount(mark, "/s") for mark in marks])
    axes.minorticks_off()
    axes.margins(0.06, 0.12)
    note = "Each rank has as many samples at every point; dashed: all as fast as those of the first point."
    return [
        *html_lines(note),
        html_figures([figures.svg(axes.figure, "scaling")]),
        html_table(_sweep(sweep, points)),
        *missing,
    ]
