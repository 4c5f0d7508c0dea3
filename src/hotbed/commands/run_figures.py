# pyright: reportMissingImports=false
"""Draw the figures of a run's page with matplotlib, as SVG that stands in HTML."""

# matplotlib is an extra, which need not be installed where types are checked.

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hotbed.commands.run_records import Interval
from hotbed.errors import RecipeError
from hotbed.plan import Plan

Series = Sequence[tuple[int, Interval]]
"""Steps with means and intervals."""
_TIERS = ("device", "host", "disk")
_COLORS = ("#4878a8", "#d98e32", "#8a8a8a")
_WIDE, _TALL = 5.2, 3.0


class Figures:
    """Draw figures one after the other; each has ids of its own, as they stand in one page."""

    most_bars = 40
    """Bars of one figure."""
    most_ranks, most_tables = 64, 60
    """Columns and rows of a plan's map; of more, the first ranks, and the tables with most tiles."""

    def __init__(self) -> None:
        try:
            import matplotlib as mpl
            from matplotlib.figure import Figure
        except ImportError as error:
            raise RecipeError(
                f"--html of a run is drawn by matplotlib, which cannot be imported ({error}); "
                f"pip install 'hotbed[plot]', or leave --html out"
            ) from None
        self._figure, self._context, self._drawn = Figure, mpl.rc_context, 0

    def curves(self, title: str, series: Mapping[str, Series]) -> str:
        """Draw curves over steps, with a band where intervals are wide; single points are dots."""
        figure, axes = self._axes(_WIDE, _TALL, title)
        for number, (name, points) in enumerate(series.items()):
            steps, color = [step for step, _ in points], f"C{number}"
            axes.plot(
                steps, [i.mean for _, i in points], color=color, label=name, marker="." if len(steps) < 10 else ""
            )
            if any(i.high > i.low for _, i in points):
                axes.fill_between(
                    steps, [i.low for _, i in points], [i.high for _, i in points], color=color, alpha=0.2
                )
        if any(series):
            axes.legend(frameon=False, fontsize="small")
        axes.set_xlabel("step")
        return self._svg(figure, title)

    def bars(self, title: str, values: Mapping[str, float]) -> str:
        """Draw a bar for each value, the first on top."""
        figure, axes = self._axes(_WIDE, 0.9 + 0.24 * len(values), title)
        axes.barh(list(values), list(values.values()), color=_COLORS[0])
        axes.invert_yaxis()
        axes.set_xlim(0)
        return self._svg(figure, title)

    def plan(self, plan: Plan) -> tuple[str, str]:
        """Draw a map: a row per table, a column per rank, colors by tier, rings for copies; and say what it shows."""
        tables = sorted(plan.by_table, key=lambda name: -len(plan.by_table[name]))[: self.most_tables]
        tables = [name for name in plan.by_table if name in set(tables)]
        ranks = min(plan.world_size, self.most_ranks)
        figure, axes = self._axes(2.2 + max(0.26 * ranks, 2.6), 1.1 + 0.24 * len(tables), "tables by rank")
        owned: dict[str, set[tuple[int, int]]] = {tier: set() for tier in _TIERS}
        copied: set[tuple[int, int]] = set()
        for row, table in enumerate(tables):
            for tile in plan.by_table[table]:
                owned[tile.tier].add((tile.owner, row))
                copied.update((reader, row) for reader in tile.readers)
        for tier, color in zip(_TIERS, _COLORS, strict=True):
            if here := [cell for cell in sorted(owned[tier]) if cell[0] < ranks]:
                axes.scatter(*zip(*here, strict=True), marker="s", s=90, color=color, label=tier)
        if here := [cell for cell in sorted(copied) if cell[0] < ranks]:
            axes.scatter(*zip(*here, strict=True), s=24, facecolors="white", edgecolors="#222222", label="copy")
        axes.set_xlim(-0.7, ranks - 0.3)
        axes.set_ylim(len(tables) - 0.4, -0.6)
        axes.set_yticks(range(len(tables)), tables)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("rank")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
        note = f"{len(plan.by_table):,} tables in {len(plan.tiles):,} tiles on {plan.world_size:,} ranks"
        if len(tables) < len(plan.by_table) or ranks < plan.world_size:
            note += f"; drawn are the {len(tables):,} with most tiles, on the first {ranks:,} ranks"
        return self._svg(figure, "the plan"), f"{note}."

    def _axes(self, wide: float, tall: float, title: str) -> tuple[Any, Any]:
        figure = self._figure(figsize=(wide, tall), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        return figure, axes

    def _svg(self, figure: Any, label: str) -> str:
        """Return a figure as an element of HTML: without what files have before, and with ids of its own."""
        self._drawn += 1
        stream = io.StringIO()
        with self._context({"svg.fonttype": "none", "svg.hashsalt": label, "font.family": "sans-serif"}):
            figure.savefig(stream, format="svg", metadata={"Date": None})
        drawn = stream.getvalue()
        drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
        own = f"f{self._drawn}-"
        for before in ('id="', "url(#", 'href="#'):
            drawn = drawn.replace(before, f"{before}{own}")
        drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
        return f"<figure>{drawn}</figure>"
