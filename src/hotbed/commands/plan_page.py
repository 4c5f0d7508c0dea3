"""Draw a plan and its simulation as one HTML file, which needs nothing beside it: no scripts, fonts or addresses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from hotbed.commands.svg import FAINT, INK, WIDTH, box, dot, grid, html_page, html_table, legend, line, svg, text
from hotbed.plan.cost import PARTS, TIERS, tile_bytes
from hotbed.plan.search import Found
from hotbed.plan.simulate import Simulation, amount_text
from hotbed.plan.sweep import Point, first_that_fits
from hotbed.plan.timeline import THREADS
from hotbed.train.report import size

MOST_BARS = 64
"""Ranks that are drawn; of more, a sample."""
MOST_TILES = 60
"""Tiles of a rank that are drawn one by one, the largest; the others are one box."""
TIER_COLORS = {"device": "#4878a8", "host": "#d98e32", "disk": "#8a8a8a"}
PART_COLORS = dict(
    zip(
        PARTS,
        (
            *("#4878a8", "#9ec1e0", "#59a14f", "#8cd17d", "#2f7d5b", "#b07aa1", "#e8a0b8", "#f1ce63"),
            *("#d98e32", "#8a8a8a", "#c44e52", "#7b6d5a"),
        ),
        strict=False,
    )
)
RESOURCE_COLORS = {
    "device memory": "#4878a8",
    "arithmetic": "#59a14f",
    "links": "#c44e52",
    "host link": "#d98e32",
    "disk": "#8a8a8a",
    "cores": "#b07aa1",
}
_LEFT, _TALL = 90, 300


def page(name: str, found: Found, simulation: Simulation, points: Sequence[Point]) -> str:
    """Make the page."""
    work, here = found.model.workload, found.model.hardware
    assert here is not None
    ranks = found.plan.world_size * work.replicas
    of_replicas = f" in {work.replicas:,} replicas" if work.replicas > 1 else ""
    price = "" if simulation.per_billion is None else f" A billion samples cost {simulation.per_billion:,.2f}."
    shown = _shown(found)
    body = [
        f"<h1>{escape(name)}: {ranks:,} ranks{of_replicas} of {escape(here.name)}</h1>",
        f"<p>Simulated: {simulation.step_s * 1e3:,.4g} ms per step of {work.batch_size:,} samples, "
        f"{simulation.samples_per_s:,.0f} samples/s on {simulation.nodes:,} nodes, bound by "
        f"<b>{escape(simulation.binds)}</b>; ranks wait {simulation.waiting:.1%} of a step. "
        f"The busiest rank has {found.costs.imbalance:.3f} times "
        f"the mean load, {found.gap:.1%} above the lower bound.{price}</p>",
        "<h2>Memory of ranks: tiles by tier</h2>",
        f"<p>{_which(found, shown)} A box is a tile of a table, or a copy of one.</p>",
        _memory(found, shown),
        "<h2>Load of ranks: what a step does for tables</h2>",
        f"<p>{_which(found, shown)} The dense part is the same on all ranks, and not shown here.</p>",
        _load(found, shown),
        "<h2>Timeline of a few steps</h2>",
        f"<p>{_drawn_ranks(simulation)} Gaps are waits. The same, to zoom into: <code>--trace FILE</code>.</p>",
        _timeline(simulation),
        "<h2>Resources of a rank, per step</h2>",
        _resources(simulation),
        "<h2>Scaling</h2>",
        _scaling(points),
    ]
    return html_page(name, body)


def _shown(found: Found) -> list[int]:
    """Ranks that are drawn: all, or by load the busiest, the idlest, and evenly between; and the fullest."""
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


def _memory(found: Found, shown: Sequence[int]) -> str:
    uses = found.model.workload.by_table
    tiles: dict[int, list[tuple[str, int, str]]] = {rank: [] for rank in shown}
    for tile in found.plan.tiles:
        use = uses[tile.table]
        words = f"{tile.table} rows {tile.rows.start}:{tile.rows.stop}:{tile.rows.step} columns {tile.cols.start}:"
        words += f"{tile.cols.stop}, {tile.tier}"
        if tile.owner in tiles:
            tiles[tile.owner].append((tile.tier, tile_bytes(use.table, tile, use.moments), words))
        for reader in tile.readers:
            if reader in tiles:
                tiles[reader].append((tile.tier, tile_bytes(use.table, tile), f"copy of {words}"))
    most = max((sum(nbytes for _, nbytes, _ in own) for own in tiles.values()), default=1) or 1
    limit = found.limits.device
    height = _TALL + 60
    scale = _TALL / most
    parts = grid(_TALL + 20, 20, _LEFT, [(_TALL + 20 - most * f * scale, size(int(most * f))) for f in (0, 0.5, 1)])
    wide = (WIDTH - _LEFT - 20) / len(shown)
    for i, rank in enumerate(shown):
        y = _TALL + 20.0
        for tier in TIERS:
            own = sorted((nbytes, words) for of, nbytes, words in tiles[rank] if of == tier)[::-1]
            few = own[:MOST_TILES]
            if rest := own[MOST_TILES:]:
                few.append((sum(nbytes for nbytes, _ in rest), f"{len(rest)} smaller tiles, {tier}"))
            for nbytes, words in few:
                y -= nbytes * scale
                about = f"rank {rank}: {words}, {size(nbytes)}"
                parts.append(box(_LEFT + 4 + i * wide, y, wide * 0.86, nbytes * scale, TIER_COLORS[tier], about))
    if limit <= most:
        y = _TALL + 20 - limit * scale
        parts += [line([(_LEFT, y), (WIDTH - 10, y)], "#c44e52", dash="5 3")]
        parts += [text(WIDTH - 12, y - 4, f"room on the device {size(limit)}", anchor="end", color="#c44e52")]
    parts += _rank_labels(shown, wide, _TALL + 36)
    words = f"room for rows on the device: {size(limit)} per rank"
    parts += [*legend(TIER_COLORS, _LEFT, height - 6), text(WIDTH - 12, height - 6, words, anchor="end")]
    return svg(parts, height, "memory of ranks")


def _load(found: Found, shown: Sequence[int]) -> str:
    parts_of = found.costs.parts
    most = float(found.costs.load.max()) or 1.0
    scale = _TALL / most
    labels = [(_TALL + 20 - most * f * scale, f"{most * f * 1e3:.3g} ms") for f in (0, 0.5, 1)]
    parts = grid(_TALL + 20, 20, _LEFT, labels)
    wide = (WIDTH - _LEFT - 20) / len(shown)
    for i, rank in enumerate(shown):
        y = _TALL + 20.0
        for number, name in enumerate(PARTS):
            seconds = float(parts_of[rank, number])
            if seconds > 0:
                y -= seconds * scale
                about = f"rank {rank}: {name} {seconds * 1e3:.4g} ms"
                parts.append(box(_LEFT + 4 + i * wide, y, wide * 0.86, seconds * scale, PART_COLORS[name], about))
    y = _TALL + 20 - float(found.costs.load.mean()) * scale
    parts += [line([(_LEFT, y), (WIDTH - 10, y)], INK, dash="5 3"), text(WIDTH - 12, y - 4, "mean", anchor="end")]
    parts += _rank_labels(shown, wide, _TALL + 36)
    there = {n: c for i, (n, c) in enumerate(PART_COLORS.items()) if parts_of[:, i].any()}
    return svg([*parts, *legend(there, _LEFT, _TALL + 54)], _TALL + 60, "load of ranks")


def _rank_labels(shown: Sequence[int], wide: float, y: float) -> list[str]:
    every = max(math.ceil(len(shown) * 34 / (WIDTH - _LEFT)), 1)
    return [
        text(_LEFT + 4 + (i + 0.43) * wide, y, str(rank), anchor="middle", size=11)
        for i, rank in enumerate(shown)
        if i % every == 0
    ]


def _drawn_ranks(simulation: Simulation) -> str:
    ranks = list(dict.fromkeys(event.rank for event in simulation.events))
    names = ("busiest", "median", "idlest")
    if len(ranks) < len(names):
        return f"Ranks of unequal load: {', '.join(map(str, ranks))}; all others are like one of them."
    return "Of tables, " + ", ".join(f"rank {r} is the {n}" for r, n in zip(ranks, names, strict=False)) + "."


def _timeline(simulation: Simulation) -> str:
    events = simulation.events
    if not events:
        return "<p>Nothing takes any time.</p>"
    begin = min(event.start for event in events)
    end = max(event.start + event.seconds for event in events)
    scale = (WIDTH - 150) / max(end - begin, 1e-300)
    rows = list(dict.fromkeys((event.rank, event.thread) for event in events))
    ranks = list(dict.fromkeys(rank for rank, _ in rows))
    rows.sort(key=lambda row: (ranks.index(row[0]), THREADS.index(row[1])))
    parts: list[str] = []
    for i, (rank, thread) in enumerate(rows):
        y = 24 + 26 * i
        parts += [text(4, y + 15, f"rank {rank} {thread}"), line([(140, y + 20), (WIDTH - 10, y + 20)], FAINT)]
        for event in events:
            if (event.rank, event.thread) == (rank, thread):
                about = f"{event.name}: {event.seconds * 1e3:.4g} ms, {event.resource}"
                x, wide = 140 + (event.start - begin) * scale, event.seconds * scale
                parts.append(box(x, y, wide, 20, RESOURCE_COLORS[event.resource], about))
                if wide > 7 * len(event.name) + 6:
                    parts.append(text(x + wide / 2, y + 14, event.name, anchor="middle", size=11, color="white"))
    height = 24 + 26 * len(rows) + 44
    for i in range(6):
        at = (end - begin) * i / 5
        parts.append(text(140 + at * scale, height - 26, f"{at * 1e3:.3g} ms", anchor="end" if i == 5 else "middle"))
    return svg([*parts, *legend(RESOURCE_COLORS, 140, height - 6)], height, "timeline")


def _resources(simulation: Simulation) -> str:
    rows = [
        (
            name,
            *(amount_text(amount, usage.unit) for amount in (usage.amount, usage.most)),
            f"{usage.seconds * 1e3:,.4g} ms",
            f"{usage.utilisation:.1%}",
        )
        for name, usage in simulation.usage.items()
    ]
    return html_table(("resource", "mean", "rank with most", "in use", "of the step"), rows)


def _scaling(points: Sequence[Point]) -> str:
    first = first_that_fits(list(points))
    there: Mapping[int, Simulation] = {p.ranks: p.simulation for p in points if p.simulation is not None}
    missing = [p for p in points if p.simulation is None]
    said = "".join(f"<p>{p.ranks:,} ranks: {escape(p.problem)}</p>" for p in missing[:3])
    if first is None or first.simulation is None:
        return f"<p>No plan fits any of these numbers of ranks.</p>{said}"
    per_rank = first.simulation.samples_per_s / first.ranks
    low, high = min(p.ranks for p in points), max(p.ranks for p in points)
    rates = [s.samples_per_s for s in there.values()]
    most, least = max(per_rank * high, *rates), min(rates)

    def x(ranks: float) -> float:
        return _LEFT + 30 + (WIDTH - _LEFT - 90) * math.log(ranks / low) / max(math.log(high / low), 1e-9)

    def y(rate: float) -> float:
        return _TALL - (_TALL - 40) * math.log(rate / least) / max(math.log(most / least), 1e-9)

    marks = [10.0**e for e in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
    marks = [factor * mark for mark in marks for factor in (1, 2, 5) if least <= factor * mark <= most]
    parts = grid(_TALL + 10, 20, _LEFT, [(y(m), amount_text(m, "/s")) for m in marks])
    ideal = [(x(n), y(per_rank * n)) for n in (first.ranks, high)]
    parts += [line(ideal, "#8a8a8a", dash="5 3"), line([(x(n), y(s.samples_per_s)) for n, s in there.items()], width=2)]
    for point in points:
        parts.append(text(x(point.ranks), _TALL + 28, f"{point.ranks:,}", anchor="middle"))
        if point.simulation is None:
            parts.append(text(x(point.ranks), _TALL - 4, "does not fit", anchor="middle", size=11, color="#c44e52"))
            continue
        rate = point.simulation.samples_per_s
        about = f"{point.ranks:,} ranks: {rate:,.0f} samples/s, bound by {point.simulation.binds}"
        parts.append(dot(x(point.ranks), y(rate), "#4878a8", about))
        parts.append(text(x(point.ranks), y(rate) - 10, f"{point.efficiency(first):.0%}", anchor="middle", size=11))
    note = "<p>Samples/s by ranks, each with as many samples; dashed: all as fast as those of the first point.</p>"
    return note + svg(parts, _TALL + 40, "scaling") + said
