"""Make pages that need nothing beside them, with tables, and drawings in SVG: no scripts, fonts or addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH = 1180
"""Of all drawings, in pixels."""
INK, FAINT = "#222222", "#dddddd"
_STYLE = (
    "body{font-family:system-ui,sans-serif;color:#222;margin:24px auto;max-width:1240px;padding:0 20px}"
    "h1{font-size:22px;overflow-wrap:anywhere}h2{font-size:17px;margin:28px 0 4px}"
    "p,li{margin:4px 0 10px;line-height:1.4;max-width:1000px;overflow-wrap:anywhere}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 14px 3px 0;text-align:right;vertical-align:top}"
    "td:first-child,th:first-child{text-align:left;overflow-wrap:anywhere}tr:nth-child(even) td{background:#f6f6f6}"
    "svg{font-family:inherit;max-width:100%;height:auto}"
)


def html_page(title: str, body: Iterable[str], style: str = "") -> str:
    """A whole page; ``style`` is added to that of all pages."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width"/><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"/><style>{_STYLE}{style}</style></head>\n<body>\n'
        f"{''.join(body)}\n</body></html>\n"
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of texts; without a head it has rows alone."""
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    named = f' class="{kind}"' if kind else ""
    return f"<table{named}>{top}{cells}</table>"


def svg(parts: Iterable[str], height: float, label: str) -> str:
    """A drawing of `WIDTH` and this height; ``label`` says what it shows to those who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def box(x: float, y: float, width: float, height: float, color: str, title: str, edge: str = "white") -> str:
    """A filled rectangle, with what is shown when a pointer is over it."""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.2):.2f}" height="{max(height, 0.2):.2f}" fill="{color}" '
        f'stroke="{edge}" stroke-width="0.4"><title>{escape(title)}</title></rect>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, color: str = INK) -> str:
    """Text that ends, begins or is centred at ``x``."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(words)}</text>'
    )


def line(points: Sequence[tuple[float, float]], color: str = INK, *, dash: str = "", width: float = 1.0) -> str:
    """A line through points."""
    at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'


def dot(x: float, y: float, color: str, title: str) -> str:
    """A point of a curve."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{escape(title)}</title></circle>'


def legend(colors: Mapping[str, str], x: float, y: float) -> list[str]:
    """Names beside their colors, in a line."""
    found: list[str] = []
    for name, color in colors.items():
        found += [box(x, y - 10, 12, 12, color, name), text(x + 17, y, name)]
        x += 34 + 7 * len(name)
    return found


def grid(low: float, high: float, left: float, labels: Sequence[tuple[float, str]]) -> list[str]:
    """Horizontal lines between ``left`` and the right edge, with labels at their left; heights as given."""
    found = [line([(left, low), (WIDTH - 10, low)]), line([(left, low), (left, high)])]
    for y, words in labels:
        found += [line([(left, y), (WIDTH - 10, y)], FAINT), text(left - 6, y + 4, words, anchor="end")]
    return found
