"""Show what data hold, on a console and as a page: ``hotbed inspect DATA [--html FILE]``."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from hotbed.cli.pages.report_page import (
    BLUE,
    ORANGE,
    RED,
    Figures,
    Table,
    drawing,
    html_figures,
    html_lines,
    html_page,
    html_table,
    print_table,
    shorten,
)
from hotbed.data.drafting.profile import BINS, REACH, ColumnProfile, upper_edge
from hotbed.data.inspection import DataSummary

MOST_PANELS = 120
"""Columns that are drawn, which takes 4 s of a core; of more, those with the largest drift, or the first."""
MOST_DRIFTS = 40
"""Columns in the figure of drift, those with the largest."""
ALIKE, UNLIKE = 0.1, 0.25
"""Stability indices below which distributions are alike, and from which they are unlike."""
_FEW = 20
_SIZES = [m * 10**e for e in range(7) for m in (1, 2, 5)]


def print_data(console: Console, found: Mapping[str, Any]) -> None:
    """Print what `inspect_data` found: rows, labels, a line per column, drift, and faults."""
    for line in _lines(found):
        console.print(line, soft_wrap=True)
    print_table(console, _columns(found))
    if "against" in found:
        for line in _drift_lines(found["against"]):
            console.print(line, soft_wrap=True)
        print_table(console, _drift(found["against"]))
    for fault in found.get("faults", ()):
        console.print(f"✗ {_fault_name(fault)}: {fault['message']}", soft_wrap=True)
    if found.get("faults") == []:
        console.print(f"all rows are what {found['recipe']} says", soft_wrap=True)


def page(found: Mapping[str, Any], after: DataSummary, before: DataSummary | None) -> str:
    """Return the page of a dataset, and of its drift from an earlier one."""
    drift: Mapping[str, Any] | None = found.get("against")
    names = _columns_to_draw(after, drift)
    few = f" {len(names):,} of {len(after.columns):,} columns; no times." if len(names) < len(after.columns) else ""
    legend = f'<p><span style="color:{BLUE}">■</span> now <span style="color:{ORANGE}">■</span> before</p>'
    about = (
        "Of ids and categories: which share of all values the most frequent 1, 2, 5, … of them have. Of numbers: "
        f"the share in each interval of sizes, four per doubling; negative ones on the left.{few}"
    )
    with drawing() as figures:
        sections = {"": html_lines(*_lines(found)), **_faults(found)}
        if drift is not None:
            sections["Drift"] = [*html_lines(*_drift_lines(drift)), *_drift_bars(figures, drift)]
            sections["Drift"].append(html_table(_drift(drift)))
        sections["Columns"] = [html_table(_columns(found))]
        panels = (_panel(figures, after.columns[n], before and before.columns.get(n)) for n in names)
        sections["Distributions"] = [*html_lines(about), legend if before else "", html_figures(panels)]
        return html_page(str(found["path"]), sections)


def _lines(found: Mapping[str, Any]) -> list[str]:
    """Describe the rows and labels."""
    more = "".join(f", {found[key]:,} {key.replace('_', ' ')}" for key in ("files", "row_groups") if key in found)
    lines = [f"{found['path']}: {found['kind']}, {found['rows']:,} rows{more}, {len(found['columns']):,} columns"]
    if splits := ", ".join(f"{split} {n:,}" for split, n in found["samples"].items() if split != "all"):
        lines.append(f"splits: {splits}")
    for label in found["labels"]:
        low, high = label["interval"]
        rule = f", positive where {label['positive']}" if "positive" in label else ""
        by_split = "".join(f"; {split} {rate:.3%}" for split, rate in label["rate_by_split"].items())
        rate = f"{label['rate']:.3%} positive ({low:.3%} to {high:.3%}{rule})"
        lines.append(f"label {label['label']}: {rate} of {label['samples']:,} samples{by_split}")
    return [*lines, f"no label: {found['no_label']}"] if "no_label" in found else lines


def _columns(found: Mapping[str, Any]) -> Table:
    rows: list[list[str]] = []
    for column in found["columns"]:
        numbers: Mapping[str, Any] = column.get("numbers", {})
        hottest = (column.get("hottest") or [{}])[0]
        exponent, top, distinct = column.get("zipf_exponent"), column.get("top_shares", {}), column.get("distinct")
        lengths = column.get("lengths")
        error = column.get("distinct_error")
        cells = [
            column["column"],
            column["type"],
            f"{column['missing']:.2%}" if column["missing"] else "–",
            "–" if distinct is None else f"≈ {distinct:,} ± {error:.1%}" if error else f"{distinct:,}",
            shorten(str(hottest.get("value", "–")), 40),
            f"{hottest['share']:.2%}" if hottest else "–",
            f"{top['100']:.1%}" if "100" in top else "–",
            "–" if exponent is None else f"{exponent:.2f}",
            f"{lengths['mean']:.3g} ({lengths['low']:,} to {lengths['high']:,})" if lengths else "–",
            *(_number(numbers.get(key)) for key in ("low", "mean", "high")),
        ]
        rows.append(cells)
    counts = ("missing", "distinct", "hottest", "its share", "top 100", "Zipf", "ids", "low", "mean", "high")
    return Table("columns", ("column", "type", *counts), rows, left=("type", "hottest"))


def _number(value: float | str | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:,.6g}"


def _fault_name(fault: Mapping[str, Any]) -> str:
    return f"{fault['problem']} ({fault['values']:,} values)" if fault["values"] else str(fault["problem"])


def _faults(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the section of faults, if data were compared with a recipe."""
    if "faults" not in found:
        return {}
    if not found["faults"]:
        return {"Recipe": html_lines(f"All rows are what {found['recipe']} says.")}
    items = (f"<li><b>{escape(_fault_name(of))}</b>: {escape(of['message'])}</li>" for of in found["faults"])
    return {f"Not as {found['recipe']} says": [f'<ul class="bad">{"".join(items)}</ul>']}


# -- drift -------------------------------------------------------------------------------------------------------


def _drift_lines(drift: Mapping[str, Any]) -> list[str]:
    lines = [f"against {drift['path']}, {drift['rows']:,} rows:"]
    for label in drift["labels"]:
        (before, after), (low, high) = label["rates"], label["interval"]
        change = f"{label['change']:+.3%} ({low:+.3%} to {high:+.3%})"
        lines.append(f"label {label['label']}: {before:.3%} → {after:.3%}, {change}")
    for key, where in (("only_before", "are no longer there"), ("only_after", "are new")):
        if drift[key]:
            lines.append(f"columns that {where}: {', '.join(drift[key])}")
    return lines


def _drift(drift: Mapping[str, Any]) -> Table:
    rows: list[list[str]] = []
    for column in drift["columns"]:
        index, divergence = (column.get(key) for key in ("stability_index", "jensen_shannon"))
        cells = [
            column["column"],
            "–" if index is None else f"{index:.3f}",
            "–" if divergence is None else f"{divergence:.4f}",
            _unseen(column),
            f"{column['unseen_values']:,}" if "unseen_values" in column else "–",
            *(f"{share:.2%}" for share in column["missing"]),
        ]
        rows.append(cells)
    head = ("column", "stability index", "Jensen-Shannon", "unseen", "new values", "missing before", "now")
    return Table("drift", head, rows)


def _unseen(column: Mapping[str, Any]) -> str:
    """Return the share of values that were not seen before, with its error if it is estimated."""
    if "unseen_share" not in column:
        return "–"
    error = column["unseen_share_error"]
    return f"{column['unseen_share']:.2%}" + (f" ± {error:.2%}" if error else "")


def _drift_bars(figures: Figures, drift: Mapping[str, Any]) -> list[str]:
    """Draw for each column a bar of its index and one of its unseen share."""
    columns = [column for column in drift["columns"] if "stability_index" in column]
    if not columns:
        return []
    few = f" The {MOST_DRIFTS} largest of {len(columns):,}." if len(columns) > MOST_DRIFTS else ""
    about = (
        f"Population stability index: alike below {ALIKE}, moved from there on, unlike from {UNLIKE}. Beside it the "
        f"share of the values now that never occurred before.{few}"
    )
    columns, places = columns[:MOST_DRIFTS], np.arange(min(len(columns), MOST_DRIFTS))
    index = [column["stability_index"] for column in columns]
    unseen = [column.get("unseen_share", 0.0) for column in columns]
    left, right = figures.axes("stability index", 9.0, 0.6 + 0.2 * len(columns), panels=2)
    colors = [RED if i >= UNLIKE else ORANGE if i >= ALIKE else BLUE for i in index]
    left.bar_label(left.barh(places, index, color=colors), [f"{i:.3f}" for i in index], padding=3)
    left.set_xlim(0, 1.15 * max(2 * UNLIKE, *index))
    left.set_yticks(places, [shorten(column["column"], 34) for column in columns])
    for mark in (ALIKE, UNLIKE):
        left.axvline(mark, color="#bbbbbb", linestyle="--", linewidth=0.8, zorder=0)
    said = ["" if "unseen_share" not in column else _unseen(column) for column in columns]
    right.bar_label(right.barh(places, unseen, color=BLUE), said, padding=3)
    right.set_xlim(0, 1.3)
    right.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    right.set_yticks([])
    right.set_title("unseen before", loc="left")
    for axes in (left, right):
        axes.set_ylim(len(columns) - 0.4, -0.6)
    return [*html_lines(about), html_figures([figures.svg(left.figure, "drift by column")])]


# -- distributions -----------------------------------------------------------------------------------------------


def _columns_to_draw(after: DataSummary, drift: Mapping[str, Any] | None) -> list[str]:
    """Return the columns that are drawn, those with the largest drift first."""
    names = [name for name, column in after.columns.items() if column.values is not None and not column.is_time]
    order = [] if drift is None else [column["column"] for column in drift["columns"] if column["column"] in names]
    return list(dict.fromkeys([*order, *names]))[:MOST_PANELS]


def _panel(figures: Figures, now: ColumnProfile, before: ColumnProfile | None) -> str:
    """Draw one column: its name, its missing share, and a curve of its values or bars of its numbers."""
    axes = figures.axes(shorten(now.name, 30), height=1.9)
    axes.figure.set_layout_engine(None)  # a constrained layout takes twice the time
    axes.figure.subplots_adjust(0.11, 0.14, 0.95, 0.86)
    if now.missing:
        axes.set_title(f"{now.missing / max(1, now.rows):.1%} missing", loc="right", color="#666666", fontsize=7)
    (_bars if now.is_measure else _curve)(axes, now, before)
    return figures.svg(axes.figure, f"distribution of {now.name}")


def _curve(axes: Any, now: ColumnProfile, before: ColumnProfile | None) -> None:
    counted = [(of.values, color) for of, color in ((before, ORANGE), (now, BLUE)) if of is not None and of.values]
    most = max(2, *(values.ranked for values, _ in counted))
    sizes = [*range(1, most)] if most <= _FEW else [n for n in _SIZES if n < most]
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


def _bars(axes: Any, now: ColumnProfile, before: ColumnProfile | None) -> None:
    shares = [_shares(of.bins) for of in (now, before) if of is not None]
    there = np.flatnonzero(np.sum(shares, axis=0))
    if not len(there):
        axes.set_axis_off()
        return
    first, last = int(there[0]), int(there[-1])
    shown = slice(first, last + 1)
    most = max(float(of.max()) for of in shares)
    axes.stairs(shares[0][shown], np.arange(first, last + 2), fill=True, color=BLUE)
    if before is not None:
        axes.plot(np.arange(first, last + 1) + 0.5, shares[1][shown], color=ORANGE)
    marks = [first] + [REACH] * (first < REACH < last) + [last] * (last > first)
    axes.set_xlim(first, last + 1)
    axes.set_xticks([n + 0.5 for n in marks], [f"{upper_edge(n):,.3g}" for n in marks])
    axes.set_ylim(0, most * 1.03)
    axes.set_yticks([0, most], ["0%", f"{most:.0%}"])


def _shares(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of the numbers in each bin, without missing ones."""
    counts = bins[: BINS - 1].astype(np.float64)
    return counts / max(1.0, float(counts.sum()))
