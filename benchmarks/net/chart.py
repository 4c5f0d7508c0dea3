"""A picture of what `benchmarks.net` measured: step time by number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> bool:
    """A panel per limit and codec, a line per plan; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    limits, codecs, ranks = (
        list(dict.fromkeys(result[key] for result in results)) for key in ("limit_mbit", "codec", "ranks")
    )
    plans = list(dict.fromkeys(key(result)[2] for result in results))
    figure = Figure(figsize=(3.2 * len(codecs) + 1, 2.6 * len(limits) + 0.8), layout="constrained")
    panels = figure.subplots(len(limits), len(codecs), sharex=True, sharey="row", squeeze=False)
    for row, limit in zip(panels, limits, strict=True):
        for axes, codec in zip(row, codecs, strict=True):
            for plan in plans:
                line = {r["ranks"]: r["step_ms"] for r in results if key(r) == (limit, codec, plan)}
                axes.plot(list(line), list(line.values()), marker="o", markersize=3, label=plan)
            axes.set_title(f"{limit} Mbit/s, {codec}", loc="left", fontsize="medium")
            axes.set_xticks(ranks)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize="small")
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("ranks, each a host of its own", fontsize=10)
    figure.supylabel("step, ms", fontsize=10)
    figure.savefig(path, dpi=120)
    return True


def key(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """Panel and line of a result."""
    groups = result["groups"]
    return result["limit_mbit"], result["codec"], result["plan"] + (f", {groups} groups" if groups != "1" else "")
