"""Build HTML pages of tables and figures, and print such tables on a console.

A page is one file without scripts, fonts or external addresses. matplotlib (an optional package) draws the figures as
SVG.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rich.table import Table as RichTable

from hotbed.cli.arguments import check_json
from hotbed.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console

BLUE, ORANGE, GRAY, RED, GREEN, PURPLE = "#4878a8", "#d98e32", "#8a8a8a", "#c44e52", "#59a14f", "#b07aa1"
TIER_COLORS = {"device": BLUE, "host": ORANGE, "disk": GRAY}
WIDTH = 12.0  # width in inches of figures that fill a page
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hotbed",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "text.parse_math": False,  # names may contain dollar signs
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
Columns = Mapping[str, Callable[[Any], str]]  # by head of a column, a function that returns the cell of an entry


class ReportTable(NamedTuple):
    """A table for a page or a console. The first column and the columns in ``left`` are aligned to the left."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    @classmethod
    def of(cls, title: str, entries: Iterable[Any], columns: Columns, left: Sequence[str] = ()) -> Self:
        """Build a table with a row per entry."""
        return cls(title, list(columns), [[cell(entry) for cell in columns.values()] for entry in entries], left)


def format_cell(value: Any, spec: str = "") -> str:
    """Format a value, e.g. with ``.1%``. None and NaN become a dash."""
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, spec)


def shorten(text: str, length: int) -> str:
    """Shorten a text to at most ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def print_table(console: Console, table: ReportTable) -> None:
    """Print a table under its title."""
    if table.title:
        console.print(table.title, style="table.title", soft_wrap=True, highlight=False)
    drawn = RichTable()
    for i, name in enumerate(table.head):
        drawn.add_column(name, justify="left" if not i or name in table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    console.print(drawn)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines without wrapping them."""
    for line in lines:
        console.print(line, soft_wrap=True)


def check_html(file: str | None) -> None:
    """Raise `RecipeError` before any work if the file of a page cannot be written, or matplotlib is missing."""
    if file is not None:
        check_json(file, "--html")
        require_matplotlib("--html", "remove --html")


def require_matplotlib(what: str, instead: str) -> None:
    """Raise `RecipeError` if matplotlib, which draws ``what``, cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise RecipeError(
            f"{what} needs matplotlib, which cannot be imported ({error}). Run pip install 'hotbed[plot]', or {instead}"
        ) from None


@contextmanager
def draw_page(title: str) -> Generator[Page]:
    """Yield an empty page, and set matplotlib's options until the page is finished."""
    from matplotlib import rc_context  # pyright: ignore[reportMissingImports]

    with rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the fonts of the reader's browser may have this glyph
        yield Page(title)


class Page:
    """A page that is built from top to bottom."""

    def __init__(self, title: str) -> None:
        self._title, self._drawn = title, 0
        self._parts = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str, *lines: str) -> None:
        """Add a heading, and lines of text below it."""
        self.html(f"<h2>{escape(text)}</h2>")
        self.text(*lines)

    def text(self, *lines: str) -> None:
        """Add lines of text as paragraphs, except empty ones."""
        self._parts += [f"<p>{escape(line)}</p>" for line in lines if line]

    def html(self, markup: str) -> None:
        """Add HTML."""
        self._parts.append(markup)

    def figures(self, *drawn: str, wide: bool = False) -> None:
        """Add drawn figures side by side, or one ``wide`` figure that may be wider than the window."""
        self.html(f'<div class="{"wide" if wide else "figures"}">{"".join(drawn)}</div>')

    def table(self, table: ReportTable) -> None:
        """Add a table without its title."""
        marks = [' class="left"' if name in table.left else "" for name in table.head]
        rows = ""
        for tag, cells in (("th", table.head), *(("td", cells) for cells in table.rows)):
            marked = zip(marks, cells, strict=True)
            rows += f"<tr>{''.join(f'<{tag}{mark}>{escape(cell)}</{tag}>' for mark, cell in marked)}</tr>"
        self.html(f'<div class="wide"><table>{rows}</table></div>')

    def axes(self, title: str, width: float = 3.95, height: float = 2.3, panels: int = 1) -> Any:
        """Return the axes of a new figure with a size in inches. For several panels, return an array of axes."""
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

        figure = Figure(figsize=(width, height), layout="constrained")
        found = figure.subplots(1, panels)
        figure.axes[0].set_title(title)
        return found

    def bars(self, title: str, values: Mapping[str, float]) -> str:
        """Draw a bar per value, with the first bar on top."""
        axes = self.axes(title, height=0.7 + 0.19 * len(values))
        axes.barh(range(len(values)), list(values.values()), color=BLUE)
        set_rows(axes, [shorten(name, 30) for name in values])
        axes.set_xlim(0)
        return self.svg(axes, title)

    def svg(self, axes: Any, label: str, legend: int = 0) -> str:
        """Return a figure as HTML, with a label for screen readers, and a legend below if it has any columns."""
        if legend:
            axes.figure.legend(loc="outside lower center", ncols=legend, frameon=False)
        self._drawn += 1
        stream = io.StringIO()
        axes.figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        drawn = stream.getvalue().partition("<svg")[2]
        for before in ('id="', "url(#", 'href="#'):  # ids must be unique in the page
            drawn = drawn.replace(before, f"{before}f{self._drawn}-")
        return f'<figure><svg role="img" aria-label="{escape(label)}"{drawn}</figure>'

    def render(self) -> str:
        """Return the whole page."""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            f'<meta name="viewport" content="width=device-width"/><title>{escape(self._title)}</title>'
            f'<link rel="icon" href="data:,"/><style>{_STYLE}</style></head>\n<body>\n'
            f"{''.join(self._parts)}\n</body></html>\n"
        )


def set_rows(axes: Any, names: Sequence[str]) -> None:
    """Name the rows of a figure, with the first row on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
