# pyright: reportMissingImports=false
"""Build report pages of tables and figures without scripts, fonts or addresses, and print the same tables.

matplotlib draws all figures. It is an extra, so type checks work without it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table as RichTable

from hotbed.cli.arguments import check_json
from hotbed.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console

BLUE, ORANGE, GRAY, RED, GREEN, PURPLE = "#4878a8", "#d98e32", "#8a8a8a", "#c44e52", "#59a14f", "#b07aa1"
TIER_COLORS = {"device": BLUE, "host": ORANGE, "disk": GRAY}
WIDTH = 12.0
"""Width in inches of figures that fill a page."""
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hotbed",
    "font.family": "sans-serif",
    "font.size": 8,
    "text.parse_math": False,  # names may have dollar signs
}
_STYLE = (
    "body{font-family:system-ui,sans-serif;color:#222;margin:24px auto;max-width:1240px;padding:0 20px}"
    "h1{font-size:22px;overflow-wrap:anywhere}h2{font-size:17px;margin:28px 0 4px}"
    "p,li{margin:4px 0 10px;line-height:1.4;max-width:1000px;overflow-wrap:anywhere}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 14px 3px 0;text-align:right;vertical-align:top;"
    "white-space:nowrap}td:first-child,th:first-child,.left{text-align:left;white-space:normal;min-width:9ch;"
    "overflow-wrap:anywhere}tr:nth-child(even) td{background:#f6f6f6}"
    ".figures{display:flex;flex-wrap:wrap;gap:8px}figure{margin:0}.figures figure{max-width:100%}"
    ".figures svg{max-width:100%;height:auto}.wide{overflow-x:auto}.bad{color:#c44e52}"
)


class Table(NamedTuple):
    """A table for a page or a console; all columns but the first and those in ``left`` are aligned to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()


def print_table(console: Console, table: Table) -> None:
    """Print a table."""
    shown = RichTable(title=table.title, title_justify="left")
    for i, name in enumerate(table.head):
        shown.add_column(name, justify="left" if not i or name in table.left else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def html_table(table: Table) -> str:
    """Return a table as HTML, without its title."""

    def row(tag: str, cells: Sequence[str]) -> str:
        marks = [' class="left"' if name in table.left else "" for name in table.head]
        parts = (f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    rows = [row("th", table.head), *(row("td", cells) for cells in table.rows)]
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def html_page(title: str, sections: Mapping[str, Iterable[str]]) -> str:
    """Return a whole page: a title, then sections of HTML by their headings; the first may have an empty heading."""
    body = [f"<h1>{escape(title)}</h1>"]
    for heading, parts in sections.items():
        body += [f"<h2>{escape(heading)}</h2>" if heading else "", *parts]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width"/><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"/><style>{_STYLE}</style></head>\n<body>\n'
        f"{''.join(body)}\n</body></html>\n"
    )


def html_lines(*lines: str) -> list[str]:
    """Return lines of text as paragraphs."""
    return [f"<p>{escape(line)}</p>" for line in lines if line]


def html_figures(drawn: Iterable[str], kind: str = "figures") -> str:
    """Return figures in rows, or with ``kind`` "wide" one that may be wider than the window."""
    return f'<div class="{kind}">{"".join(drawn)}</div>'


def shorten(text: str, length: int) -> str:
    """Cut a text after ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def require_matplotlib(what: str, instead: str) -> None:
    """Raise `RecipeError` if matplotlib, which draws ``what``, cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise RecipeError(
            f"{what} is drawn by matplotlib, which cannot be imported ({error}); pip install 'hotbed[plot]', or "
            f"{instead}"
        ) from None


def check_html(file: str | None) -> None:
    """Refuse a page that cannot be written or drawn, before anything is read."""
    if file is not None:
        check_json(file, "--html")
        require_matplotlib("--html", "leave --html out")


@contextmanager
def drawing() -> Generator[Figures]:
    """Yield what draws the figures of one page."""
    from matplotlib import rc_context

    with rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's fonts may have it
        yield Figures()


class Figures:
    """Figures of one page. Their elements have different ids, because they share the page."""

    def __init__(self) -> None:
        self._drawn = 0

    def axes(self, title: str, width: float = 3.95, height: float = 2.3, panels: int = 1) -> Any:
        """Return the axes of a new figure of this size in inches, or an array of them if there are more panels."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        found = figure.subplots(1, panels)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_title(title, loc="left")
        return found

    def bars(self, title: str, values: Mapping[str, float]) -> str:
        """Draw a bar for each value, the first on top."""
        axes = self.axes(title, height=0.7 + 0.19 * len(values))
        axes.barh(range(len(values)), list(values.values()), color=BLUE)
        axes.set_yticks(range(len(values)), [shorten(name, 30) for name in values])
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.set_xlim(0)
        return self.svg(axes.figure, title)

    def svg(self, figure: Any, label: str) -> str:
        """Return a figure as an element of HTML, labelled for readers that do not see it."""
        self._drawn += 1
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
        drawn = stream.getvalue()
        drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
        for before in ('id="', "url(#", 'href="#'):
            drawn = drawn.replace(before, f"{before}f{self._drawn}-")
        drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
        return f"<figure>{drawn}</figure>"
