"""Results as a table on the terminal, as Markdown in docs/quality.md, and as a chart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.quality_results import BASELINE, LOGS, Line, Log, Results, compare
from benchmarks.quality_stats import Difference

RESOLUTION = 3e-4
"""Loss of AUC that a run on the planted log is to resolve: the 95 % interval is at most this far from its middle."""

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

_HEADER = (
    *("rows", "compute", "bytes per row", "seeds", "AUC"),
    *("ΔAUC · 10⁴", "of seeds", "of test set", "Δlogloss · 10⁴", "loss of AUC"),
)


def verdict(difference: Difference) -> str:
    """What the interval of a ΔAUC says about a loss."""
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    if high < 0:
        return "yes, below 3e-4" if low >= -RESOLUTION else "yes"
    return "below 3e-4 if any" if low >= -RESOLUTION else "not resolved"


def print_results(console: Console, results: Results) -> None:
    """One table per log."""
    for log in LOGS:
        lines = compare(results.runs(log))
        if lines:
            table = Table(*_HEADER, title=f"{log} log", title_justify="left", caption=_caption(results, log))
            for line in lines:
                table.add_row(*_cells(line))
            console.print(table)


def markdown(results: Results) -> str:
    """The same tables, with their captions."""
    parts: list[str] = []
    for log in LOGS:
        lines = compare(results.runs(log))
        if lines:
            rows = [_HEADER, ("---",) * len(_HEADER), *map(_cells, lines)]
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
            parts.append(f"### {log.capitalize()} log\n\n{_caption(results, log)}\n\n{table}")
    return "\n\n".join(parts)


def render(results: Results, page: Path) -> None:
    """Put the tables between the markers of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}", encoding="utf-8")


def draw(results: Results, path: Path) -> bool:
    """Chart of ΔAUC with its intervals, one panel per log; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = [(log, lines) for log in LOGS if (lines := compare(results.runs(log)))]
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    for i, (log, lines) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        shown = [line for line in lines if line.config != BASELINE][::-1]
        colours = ["tab:orange" if line.config.compute == "bf16" else "tab:blue" for line in shown]
        for y, (line, colour) in enumerate(zip(shown, colours, strict=True)):
            half = line.auc_difference.half_width
            axes.errorbar(
                line.auc_difference.mean * 1e4,
                y,
                xerr=half * 1e4 if math.isfinite(half) else None,
                fmt="o",
                color=colour,
                capsize=3,
            )
        axes.set_yticks(range(len(shown)), [f"{line.config.rows} / {line.config.compute}" for line in shown])
        axes.axvspan(-RESOLUTION * 1e4, 0, color="tab:green", alpha=0.15)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("ΔAUC · 10⁴ against fp32 / fp32 (95 % interval)")
        axes.set_title(f"{log} log")
    figure.savefig(path, dpi=150)
    return True


def _cells(line: Line) -> tuple[str, ...]:
    first = line.config.rows, line.config.compute, f"{line.row_bytes:.1f}", str(line.seeds), f"{line.auc:.5f}"
    if line.config == BASELINE:
        return (*first, *"–––––")
    auc, logloss = line.auc_difference, line.logloss_difference
    return (*first, _interval(auc), _scaled(auc.seeds), _scaled(auc.test), _interval(logloss), verdict(auc))


def _interval(difference: Difference) -> str:
    return f"{_scaled(difference.mean, '+')} ± {_scaled(difference.half_width)}"


def _scaled(value: float, sign: str = "") -> str:
    """In units of 1e-4."""
    return f"{value * 1e4:{sign}.2f}" if math.isfinite(value) else "?"


def _caption(results: Results, log: Log) -> str:
    section: dict[str, Any] = results.data[log]
    facts = {**section["about"], **{k: v for k, v in section["settings"].items() if k in ("samples", "test_samples")}}
    where = sorted({run["measured_on"] for run in section["runs"]})
    return "; ".join([*(f"{key.replace('_', ' ')} {_fact(value)}" for key, value in facts.items()), *where])


def _fact(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5f}" if isinstance(value, float) else str(value)
