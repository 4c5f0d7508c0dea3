"""A picture of what ``hotbed inspect --skew`` found."""

# matplotlib is an extra, which need not be installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotbed.errors import RecipeError


def need_matplotlib() -> None:
    """Raise `RecipeError` if matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise RecipeError(
            f"skew.png needs matplotlib, which cannot be imported ({error}); pip install 'hotbed[plot]', or pass "
            f"--picture false"
        ) from None


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Two panels over the share of rows: accesses, and hit rates; a thin line per table, a bold one for all."""
    from matplotlib.figure import Figure

    shares = [100 * share for share in found["shares"]]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    accesses, hits = figure.subplots(1, 2, sharey=True)
    panels = ((accesses, "accesses_of_top_rows", "C0", "their accesses"), (hits, "lru", "C0", "LRU"))
    for axes, curve, color, label in (*panels, (hits, "static", "C1", "hottest rows placed")):
        for table in found["tables"]:
            axes.plot(shares, table[curve], color=color, linewidth=0.6, alpha=0.3)
        axes.plot(shares, found["all"][curve], color=color, linewidth=2, label=f"{label}, all tables")
    accesses.set_title("accesses of the most accessed rows", loc="left", fontsize="medium")
    hits.set_title(f"hit rate, batches of {found['batch_size']:,} samples", loc="left", fontsize="medium")
    for axes in (accesses, hits):
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.set_xlabel("% of the rows of each table")
        axes.legend(frameon=False, fontsize="small", loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found['path']}, split {found['split']}, {found['samples']:,} samples", fontsize=10)
    figure.savefig(path, dpi=120)
