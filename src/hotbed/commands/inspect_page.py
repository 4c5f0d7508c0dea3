"""Draw what data hold as one HTML file, which needs nothing beside it: ``hotbed inspect DATA --html FILE``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.commands.svg import FAINT, INK, box, html_page, html_table, legend, line, svg, text
from hotbed.data.inspection import DataSummary
from hotbed.data.profile import BINS, REACH, ColumnProfile, upper_edge

MOST_PANELS = 120
"""Columns that are drawn; of more, those with the largest drift, or the first."""
MOST_DRIFTS = 40
"""Columns in the drawing of drift, those with the largest."""
NOW, BEFORE, ALARM = "#4878a8", "#d98e32", "#c44e52"
ALIKE, UNLIKE = 0.1, 0.25
"""Stability indices between which distributions have moved."""
_ACROSS, _WIDE, _TALL = 3, 390, 190
_FEW = 20
_SIZES = [m * 10**e for e in range(7) for m in (1, 2, 5)]
_STYLE = "td:nth-child(2),th:nth-child(2){text-align:left;overflow-wrap:anywhere}.bad{color:#c44e52}"


def page(found: Mapping[str, Any], after: DataSummary, before: DataSummary | None) -> str:
    """Make the page."""
    name = str(found["path"])
    body = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{escape(found['kind'])}, {found['rows']:,} rows in {len(found['columns']):,} columns{_splits(found)}.</p>",
        *(_label(label) for label in found["labels"]),
    ]
    if "no_label" in found:
        body.append(f"<p>No label: {escape(found['no_label'])}</p>")
    if "faults" in found:
        body += _faults(found["recipe"], found["faults"])
    drift: Mapping[str, Any] | None = found.get("against")
    if drift is not None:
        body += _drift(drift)
    body += ["<h2>Columns</h2>", _table(found["columns"]), "<h2>Distributions</h2>"]
    names = _drawn(after, drift)
    if len(names) < len(after.columns):
        body.append(f"<p>{len(names):,} of {len(after.columns):,} columns; no times.</p>")
    body.append(
        "<p>Of ids and categories: which share of all values the most frequent 1, 2, 5, … of them have. Of numbers: "
        "the share in each interval of sizes, four per doubling; negative ones on the left.</p>"
    )
    body.append(_panels([(after.columns[n], before and before.columns.get(n)) for n in names], before is not None))
    return html_page(name, body, _STYLE)


def _splits(found: Mapping[str, Any]) -> str:
    splits = [f"{escape(split)} {n:,}" for split, n in found["samples"].items() if split != "all"]
    return f" (splits: {', '.join(splits)})" if splits else ""


def _label(label: Mapping[str, Any]) -> str:
    low, high = label["interval"]
    rule = f", where {escape(label['positive'])}" if "positive" in label else ""
    rates = "".join(f"; {escape(split)} {rate:.3%}" for split, rate in label["rate_by_split"].items())
    return (
        f"<p>Label <b>{escape(label['label'])}</b>: {label['rate']:.3%} of {label['samples']:,} are positive{rule} "
        f"(95 % interval {low:.3%} to {high:.3%}){rates}.</p>"
    )


def _faults(recipe: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    if not faults:
        return [f"<p>All rows are what {escape(recipe)} says.</p>"]
    items = [
        f"<li><b>{escape(fault['problem'])}</b>{f' ({v:,} values)' if (v := fault['values']) else ''}: "
        f"{escape(fault['message'])}</li>"
        for fault in faults
    ]
    return [f'<h2 class="bad">Not as {escape(recipe)} says</h2>', f"<ul>{''.join(items)}</ul>"]


def _table(columns: Sequence[Mapping[str, Any]]) -> str:
    names = ("column", "type", "missing", "distinct", "hottest", "top 1", "top 100", "Zipf", "ids")
    rows: list[list[str]] = []
    for column in columns:
        numbers: Mapping[str, Any] = column.get("numbers", {})
        hottest = (column.get("hottest") or [{}])[0]
        exponent, top = column.get("zipf_exponent"), column.get("top_shares", {})
        cells = [
            column["column"],
            column["type"],
            f"{column['missing']:.2%}" if column["missing"] else "–",
            distinct_text(column),
            _short(str(hottest.get("value", "–")), 24),
            *(f"{top[n]:.1%}" if n in top else "–" for n in ("1", "100")),
            "–" if exponent is None else f"{exponent:.2f}",
            f"{column['lengths']['mean']:.3g} ({column['lengths']['low']:,} to {column['lengths']['high']:,})"
            if "lengths" in column
            else "–",
            *(number_text(numbers.get(key)) for key in ("low", "mean", "high")),
        ]
        rows.append(cells)
    return html_table((*names, "low", "mean", "high"), rows)


def distinct_text(column: Mapping[str, Any]) -> str:
    """The number of distinct values, with its error where it is estimated."""
    if "distinct" not in column:
        return "–"
    error = column["distinct_error"]
    return f"{column['distinct']:,}" if not error else f"≈ {column['distinct']:,} ± {error:.1%}"


def number_text(value: float | str | None) -> str:
    """A number or time as tables have it."""
    return "–" if value is None else value if isinstance(value, str) else f"{value:,.6g}"


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


# -- drift -------------------------------------------------------------------------------------------------------


def _drift(drift: Mapping[str, Any]) -> list[str]:
    body = [f"<h2>Drift against {escape(drift['path'])} ({drift['rows']:,} rows)</h2>"]
    for label in drift["labels"]:
        low, high = label["interval"]
        body.append(
            f"<p>Label <b>{escape(label['label'])}</b>: {label['rates'][0]:.3%} before, {label['rates'][1]:.3%} now, a "
            f"change of {label['change']:+.3%} (95 % interval {low:+.3%} to {high:+.3%}).</p>"
        )
    for key, where in (("only_before", "no longer there"), ("only_after", "new")):
        if drift[key]:
            body.append(f"<p>Columns that are {where}: {escape(', '.join(drift[key]))}.</p>")
    columns = [column for column in drift["columns"] if "stability_index" in column]
    if columns:
        more = f" The {MOST_DRIFTS} largest of {len(columns):,}." if len(columns) > MOST_DRIFTS else ""
        body.append(
            f"<p>Population stability index: alike below {ALIKE}, moved from there on, unlike from {UNLIKE}. Beside it "
            f"the share of the values now that never occurred before.{more}</p>"
        )
        body.append(_drift_bars(columns[:MOST_DRIFTS]))
    return body


def _drift_bars(columns: Sequence[Mapping[str, Any]]) -> str:
    """For each column a bar of its index and one of its unseen share."""
    left, middle, wide = 210, 760, 460
    most = max(2 * UNLIKE, *(column["stability_index"] for column in columns))
    height = 34 + 22 * len(columns)
    parts = [text(left, 14, "stability index"), text(middle, 14, "unseen before")]
    for mark in (ALIKE, UNLIKE):
        x = left + mark / most * wide
        parts += [line([(x, 20), (x, height - 8)], FAINT, dash="4 3")]
    for i, column in enumerate(columns):
        y, index = 24.0 + 22 * i, column["stability_index"]
        color = ALARM if index >= UNLIKE else BEFORE if index >= ALIKE else NOW
        about = f"{column['column']}: stability index {index:.4f}, Jensen-Shannon {column['jensen_shannon']:.4f} bit"
        parts += [text(left - 8, y + 13, _short(column["column"], 28), anchor="end")]
        parts += [box(left, y, index / most * wide, 16, color, about)]
        parts += [text(left + index / most * wide + 6, y + 13, f"{index:.3f}", size=11)]
        if (unseen := column.get("unseen_share")) is None:
            continue
        error = column["unseen_share_error"]
        said = f"{unseen:.2%}" + (f" ± {error:.2%}" if error else "")
        about = f"{column['column']}: {said} of the values, {column['unseen_values']:,} different ones"
        parts += [box(middle, y, unseen * 300, 16, NOW, about), text(middle + unseen * 300 + 6, y + 13, said, size=11)]
    return svg(parts, height, "drift by column")


# -- distributions -----------------------------------------------------------------------------------------------


def _drawn(after: DataSummary, drift: Mapping[str, Any] | None) -> list[str]:
    """Columns that are drawn, in the order of the drift where there is one."""
    names = [name for name, column in after.columns.items() if column.values is not None and not column.is_time]
    if drift is not None:
        order = [column["column"] for column in drift["columns"]]
        names = [name for name in order if name in names] + [name for name in names if name not in order]
    return names[:MOST_PANELS]


def _panels(columns: Sequence[tuple[ColumnProfile, ColumnProfile | None]], of_two: bool) -> str:
    top = 26 if of_two else 4
    height = top + _TALL * math.ceil(len(columns) / _ACROSS)
    parts = legend({"now": NOW, "before": BEFORE}, 4, 14) if of_two else []
    for i, (now, before) in enumerate(columns):
        x, y = float(i % _ACROSS * _WIDE), float(top + i // _ACROSS * _TALL)
        parts += _panel(now, before, x, y)
    return svg(parts, height, "distributions by column")


def _panel(now: ColumnProfile, before: ColumnProfile | None, left: float, top: float) -> list[str]:
    """One column: its name, its missing share, and a curve of its values or bars of its numbers."""
    low, high, x0, x1 = top + _TALL - 36, top + 28, left + 40, left + _WIDE - 24
    missing = f"{now.missing / max(1, now.rows):.1%} missing" if now.missing else ""
    parts = [text(left + 4, top + 16, _short(now.name, 34), size=13)]
    parts += [text(x1, top + 16, missing, anchor="end", size=11, color="#666666")] if missing else []
    parts += [line([(x0, low), (x1, low)], INK), line([(x0, low), (x0, high)], INK)]
    draw = _bars if now.is_measure else _curve
    return parts + draw(now, before, (x0, x1), lambda share: low - (low - high) * share, low)


Across = tuple[float, float]
Height = Callable[[float], float]


def _curve(now: ColumnProfile, before: ColumnProfile | None, at: Across, y: Height, low: float) -> list[str]:
    counted = [(of.values, color) for of, color in ((before, BEFORE), (now, NOW)) if of is not None and of.values]
    most = max(2, *(values.ranked for values, _ in counted))
    sizes = [*range(1, most)] if most <= _FEW else [n for n in _SIZES if n < most]
    sizes.append(most)

    def x(rank: float) -> float:
        return at[0] + (at[1] - at[0]) * math.log(rank) / math.log(most)

    parts = [text(at[0] - 6, y(s) + 4, f"{s:.0%}", anchor="end", size=10) for s in (0.0, 0.5, 1.0)]
    marks = [10**e for e in range(7) if 10**e <= most]
    parts += [text(x(n), low + 14, f"{n:,}", anchor="middle", size=10) for n in marks]
    for values, color in counted:
        own = [n for n in sizes if n <= max(1, values.ranked)] or [1]
        shares = values.top_shares(own)
        if values.total:
            parts.append(line([(x(n), y(s)) for n, s in zip(own, shares, strict=True)], color, width=2))
    return parts


def _bars(now: ColumnProfile, before: ColumnProfile | None, at: Across, y: Height, low: float) -> list[str]:
    shown = [of for of in (now, before) if of is not None]
    shares = [_shares(of.bins) for of in shown]
    there = np.flatnonzero(np.sum(shares, axis=0))
    if not len(there):
        return []
    first, last = int(there[0]), int(there[-1])
    wide = (at[1] - at[0]) / (last - first + 1)
    most = max(float(of.max()) for of in shares)
    parts = [text(at[0] - 6, y(s) + 4, f"{s * most:.0%}", anchor="end", size=10) for s in (0.0, 1.0)]
    for number in there.tolist():
        about = f"up to {upper_edge(number):,.4g}: {shares[0][number]:.2%}"
        tall = low - y(float(shares[0][number]) / most)
        parts.append(box(at[0] + (number - first) * wide, low - tall, wide, tall, NOW, about))
    if before is not None:
        middle = [(at[0] + (n - first + 0.5) * wide, y(float(shares[1][n]) / most)) for n in range(first, last + 1)]
        parts.append(line(middle, BEFORE, width=2))
    marks = [first] + [REACH] * (first < REACH < last) + [last] * (last > first)
    anchors = {first: "start", last: "end"}
    for n in marks:
        x, anchor = at[0] + (n - first + 0.5) * wide, anchors.get(n, "middle")
        parts.append(text(x, low + 14, f"{upper_edge(n):,.3g}", anchor=anchor, size=10))
    return parts


def _shares(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the numbers in each bin but that of missing ones."""
    counts = bins[: BINS - 1].astype(np.float64)
    return counts / max(1.0, float(counts.sum()))
