"""Show a dataset's columns and their drift, on a console and as a page: ``hotbed inspect DATA [--html FILE]``."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from rich.console import Console

from hotbed.cli.pages.report_page import (
    BLUE,
    ORANGE,
    RED,
    Columns,
    Page,
    ReportTable,
    draw_page,
    format_cell,
    print_lines,
    print_table,
    set_rows,
    shorten,
)
from hotbed.data.drafting.profile import BINS, REACH, ColumnProfile, upper_edge
from hotbed.data.inspection import DataSummary

MOST_PANELS = 120
"""Largest number of columns that are drawn, in about 4 s. Columns with the largest drift are drawn first."""
MOST_DRIFTS = 40  # largest number of columns in the figure of drift
MOVED, UNLIKE = 0.1, 0.25  # from these stability indices on, a distribution has changed, or is a different one
_SIZES = [m * 10**e for e in range(7) for m in (1, 2, 5)]


def print_data(console: Console, found: Mapping[str, Any]) -> None:
    """Print the rows, labels, columns, drift and faults that `inspect_data` found."""
    print_lines(console, _lines(found))
    print_table(console, _columns(found))
    if "against" in found:
        print_lines(console, _drift_lines(found["against"]))
        print_table(console, _drift(found["against"]))
    print_lines(console, (f"✗ {_fault_name(fault)}: {fault['message']}" for fault in found.get("faults", ())))
    if found.get("faults") == []:
        console.print(f"all rows match {found['recipe']}", soft_wrap=True)


def render_data(found: Mapping[str, Any], after: DataSummary, before: DataSummary | None) -> str:
    """Return the HTML page of a dataset, with its drift from an earlier dataset."""
    with draw_page(str(found["path"])) as page:
        page.text(*_lines(found))
        if found.get("faults"):
            items = (f"<li><b>{escape(_fault_name(of))}</b>: {escape(of['message'])}</li>" for of in found["faults"])
            page.heading(f"Differences from {found['recipe']}")
            page.html(f'<ul class="bad">{"".join(items)}</ul>')
        elif "faults" in found:
            page.heading("Recipe", f"All rows match {found['recipe']}.")
        if drift := found.get("against"):
            page.heading("Drift", *_drift_lines(drift))
            _drift_bars(page, drift)
            page.table(_drift(drift))
        page.heading("Columns")
        page.table(_columns(found))
        _distributions(page, after, before, drift)
        return page.render()


def _lines(found: Mapping[str, Any]) -> list[str]:
    more = "".join(f", {found[key]:,} {key.replace('_', ' ')}" for key in ("files", "row_groups") if key in found)
    lines = [f"{found['path']}: {found['kind']}, {found['rows']:,} rows{more}, {len(found['columns']):,} columns"]
    if splits := ", ".join(f"{split} {n:,}" for split, n in found["samples"].items() if split != "all"):
        lines.append(f"splits: {splits}")
    for label in found["labels"]:
        low, high = label["interval"]
        rule = f", positive if {label['positive']}" if "positive" in label else ""
        by_split = "".join(f"; {split} {rate:.3%}" for split, rate in label["rate_by_split"].items())
        rate = f"{label['rate']:.3%} positive ({low:.3%} to {high:.3%}{rule})"
        lines.append(f"label {label['label']}: {rate} of {label['samples']:,} samples{by_split}")
    return [*lines, f"no label: {found['no_label']}"] if "no_label" in found else lines


def _columns(found: Mapping[str, Any]) -> ReportTable:
    def distinct(column: Mapping[str, Any]) -> str:
        value, error = column.get("distinct"), column.get("distinct_error")
        return f"≈ {value:,} ± {error:.1%}" if error else format_cell(value, ",")

    def hottest(column: Mapping[str, Any], key: str) -> Any:
        return (column.get("hottest") or [{}])[0].get(key)

    def lengths(column: Mapping[str, Any]) -> str:
        found = column.get("lengths")
        return f"{found['mean']:.3g} ({found['low']:,} to {found['high']:,})" if found else "–"

    def number(column: Mapping[str, Any], key: str) -> str:
        value = column.get("numbers", {}).get(key)
        return value if isinstance(value, str) else format_cell(value, ",.6g")

    columns: Columns = {
        "column": lambda c: c["column"],
        "type": lambda c: c["type"],
        "missing": lambda c: format_cell(c["missing"] or None, ".2%"),
        "distinct": distinct,
        "hottest": lambda c: shorten(format_cell(hottest(c, "value")), 40),
        "its share": lambda c: format_cell(hottest(c, "share"), ".2%"),
        "top 100": lambda c: format_cell(c.get("top_shares", {}).get("100"), ".1%"),
        "Zipf": lambda c: format_cell(c.get("zipf_exponent"), ".2f"),
        "ids": lengths,
        **{key: lambda c, key=key: number(c, key) for key in ("low", "mean", "high")},
    }
    return ReportTable.of("columns", found["columns"], columns, left=("type", "hottest"))


def _fault_name(fault: Mapping[str, Any]) -> str:
    return f"{fault['problem']} ({fault['values']:,} values)" if fault["values"] else str(fault["problem"])


def _drift_lines(drift: Mapping[str, Any]) -> list[str]:
    lines = [f"against {drift['path']}, {drift['rows']:,} rows:"]
    for label in drift["labels"]:
        (before, after), (low, high) = label["rates"], label["interval"]
        change = f"{label['change']:+.3%} ({low:+.3%} to {high:+.3%})"
        lines.append(f"label {label['label']}: {before:.3%} → {after:.3%}, {change}")
    for key, name in (("only_before", "removed"), ("only_after", "new")):
        if drift[key]:
            lines.append(f"{name} columns: {', '.join(drift[key])}")
    return lines


def _drift(drift: Mapping[str, Any]) -> ReportTable:
    columns: Columns = {
        "column": lambda c: c["column"],
        "stability index": lambda c: format_cell(c.get("stability_index"), ".3f"),
        "Jensen-Shannon": lambda c: format_cell(c.get("jensen_shannon"), ".4f"),
        "unseen": _unseen,
        "new values": lambda c: format_cell(c.get("unseen_values"), ","),
        "missing before": lambda c: f"{c['missing'][0]:.2%}",
        "now": lambda c: f"{c['missing'][1]:.2%}",
    }
    return ReportTable.of("drift", drift["columns"], columns)


def _unseen(column: Mapping[str, Any]) -> str:
    error = column.get("unseen_share_error")
    return format_cell(column.get("unseen_share"), ".2%") + (f" ± {error:.2%}" if error else "")


def _drift_bars(page: Page, drift: Mapping[str, Any]) -> None:
    if not (columns := [column for column in drift["columns"] if "stability_index" in column]):
        return
    few = f" The {MOST_DRIFTS} largest of {len(columns):,} are drawn." if len(columns) > MOST_DRIFTS else ""
    text = f"Left: population stability index. Below {MOVED}, a distribution is unchanged; from {UNLIKE} on, it is a "
    page.text(f"{text}different one. Right: share of the values that the earlier data lacks.{few}")
    columns, rows = columns[:MOST_DRIFTS], np.arange(min(len(columns), MOST_DRIFTS))
    index = [column["stability_index"] for column in columns]
    left, right = page.axes("stability index", 9.0, 0.6 + 0.2 * len(columns), panels=2)
    colors = [RED if i >= UNLIKE else ORANGE if i >= MOVED else BLUE for i in index]
    left.bar_label(left.barh(rows, index, color=colors), [f"{i:.3f}" for i in index], padding=3)
    left.set_xlim(0, 1.15 * max(2 * UNLIKE, *index))
    for mark in (MOVED, UNLIKE):
        left.axvline(mark, color="#bbbbbb", linestyle="--", linewidth=0.8, zorder=0)
    shares = [column.get("unseen_share", 0.0) for column in columns]
    right.bar_label(right.barh(rows, shares, color=BLUE), [_unseen(column) for column in columns], padding=3)
    right.set_xlim(0, 1.3)
    right.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    right.set_title("unseen before")
    set_rows(left, [shorten(column["column"], 34) for column in columns])
    set_rows(right, [""] * len(columns))
    page.figures(page.svg(left, "drift by column"))


def _distributions(page: Page, after: DataSummary, before: DataSummary | None, drift: Mapping[str, Any] | None) -> None:
    names = [name for name, column in after.columns.items() if column.values is not None and not column.is_time]
    order = [] if drift is None else [column["column"] for column in drift["columns"] if column["column"] in names]
    names = list(dict.fromkeys([*order, *names]))[:MOST_PANELS]
    few = f" {len(names):,} of {len(after.columns):,} columns; no times." if len(names) < len(after.columns) else ""
    text = "Ids and categories: share of all occurrences that the most frequent 1, 2, 5, … values have. Numbers: share "
    text += "of the numbers in each interval of magnitudes, four per doubling, with negative numbers on the left."
    page.heading("Distributions", f"{text}{few}")
    if before is not None:
        page.html(f'<p><span style="color:{BLUE}">■</span> now <span style="color:{ORANGE}">■</span> before</p>')
    drawn: list[str] = []
    for now in (after.columns[name] for name in names):
        axes = page.axes(shorten(now.name, 30), height=1.9)
        axes.figure.set_layout_engine(None)  # a constrained layout takes twice the time
        axes.figure.subplots_adjust(0.11, 0.14, 0.95, 0.86)
        if now.missing:
            axes.set_title(f"{now.missing / max(1, now.rows):.1%} missing", loc="right", color="#666666", fontsize=7)
        (_draw_numbers if now.is_measure else _draw_values)(axes, now, before and before.columns.get(now.name))
        drawn.append(page.svg(axes, f"distribution of {now.name}"))
    page.figures(*drawn)


def _draw_values(axes: Any, now: ColumnProfile, before: ColumnProfile | None) -> None:
    counted = [(of.values, color) for of, color in ((before, ORANGE), (now, BLUE)) if of is not None and of.values]
    most = max(2, *(values.ranked for values, _ in counted))
    sizes = [*range(1, most)] if most <= 20 else [n for n in _SIZES if n < most]
    for values, color in counted:
        own = [n for n in [*sizes, most] if n <= max(1, values.ranked)] or [1]
        if values.total:
            axes.plot(own, values.top_shares(own), color=color, marker="." if len(own) < 3 else "", clip_on=False)
    marks = [10**e for e in range(7) if 10**e <= most]
    axes.set_xscale("log")
    axes.set_xlim(1, most)
    axes.set_xticks(marks, [f"{n:,}" for n in marks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.03)
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])


def _draw_numbers(axes: Any, now: ColumnProfile, before: ColumnProfile | None) -> None:
    counts = [of.bins[: BINS - 1].astype(np.float64) for of in (now, before) if of is not None]
    shares = [of / max(1.0, float(of.sum())) for of in counts]
    filled = np.flatnonzero(np.sum(shares, axis=0))
    if not len(filled):
        axes.set_axis_off()
        return
    first, last = int(filled[0]), int(filled[-1])
    drawn = slice(first, last + 1)
    most = max(float(of.max()) for of in shares)
    axes.stairs(shares[0][drawn], np.arange(first, last + 2), fill=True, color=BLUE)
    if before is not None:
        axes.plot(np.arange(first, last + 1) + 0.5, shares[1][drawn], color=ORANGE)
    marks = [first] + [REACH] * (first < REACH < last) + [last] * (last > first)
    axes.set_xlim(first, last + 1)
    axes.set_xticks([n + 0.5 for n in marks], [f"{upper_edge(n):,.3g}" for n in marks])
    axes.set_ylim(0, most * 1.03)
    axes.set_yticks([0, most], ["0%", f"{most:.0%}"])
