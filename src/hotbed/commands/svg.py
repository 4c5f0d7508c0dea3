"""Draw with SVG inside a page: boxes, lines, texts, legends and axes as text, without a library or a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH = 1180
"""Of all drawings, in pixels."""
INK, FAINT = "#222222", "#dddddd"


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
