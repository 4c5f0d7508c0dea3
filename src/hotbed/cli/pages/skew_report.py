"""Measure how unevenly rows are looked up, and how often a row cache would hit: ``hotbed inspect --skew``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hotbed.checkpoint import MANIFEST, directory
from hotbed.checkpoint.storage import read_yaml_uri
from hotbed.cli.drafts.init_stored import open_stored
from hotbed.cli.pages.report_page import Columns, ReportTable, format_cell, print_table, require_matplotlib
from hotbed.config import Recipe, check_trust, import_from
from hotbed.data import ParquetSource, Source, draft_schema
from hotbed.data.skew.hot_cold import write_hot_order
from hotbed.data.skew.row_popularity import SAMPLED_ROWS, SHARES, measure_popularity
from hotbed.errors import DataError
from hotbed.files import new_directory, write_json
from hotbed.locations import is_storage, local
from hotbed.train.runs.build import open_source
from hotbed.train.runs.report import RECIPE, StageProgress

CURVES = ("accesses_of_top_rows", "lru", "static")


def open_data(path: str | Path, *, trust_recipe: bool = False) -> Source:
    """Open a prepared dataset, NumPy arrays, Parquet files, or the data of a recipe or of a run at a path."""
    folder = directory(path) if is_storage(path) else None
    if isinstance(path, Path) and not path.exists():
        raise DataError(f"{path} does not exist")
    if folder is not None and folder.has(MANIFEST):
        raise DataError(f"{path} is a checkpoint, which holds no samples. Pass the data, the recipe or the run")
    if (stored := open_stored(path)) is not None:
        return stored.source
    if folder is not None and ((of_run := folder.has(RECIPE)) or folder.name.endswith((".yaml", ".yml"))):
        recipe = Recipe.from_dict(read_yaml_uri((folder / RECIPE).path if of_run else path))
        if of_run:
            check_trust(recipe, (folder / RECIPE).path, trusted=trust_recipe)
        elif isinstance(path, Path):
            import_from(path.parent)
        source = open_source(replace(recipe.data, valid_split=None, test_split=None))
        source.measure(recipe.data.train_split)
        return source
    try:
        return ParquetSource(path, draft_schema(path))
    except DataError as error:
        known = "a prepared dataset (feature_spec.yaml, source.yaml), arrays (day_0_sparse.npy), a recipe, a run"
        raise DataError(f"{path} is neither {known} (recipe.yaml) nor Parquet: {error}") from None


def inspect_skew(
    path: str | Path,
    console: Console,
    *,
    split: str = "train",
    batch_size: int = 1,
    sampled_rows: int = SAMPLED_ROWS,
    out: str | None = None,
    picture: bool = True,
    overwrite: bool = False,
    trust_recipe: bool = False,
) -> dict[str, Any]:
    """Measure the popularity of rows, and write the results if ``out`` is set.

    Parameters
    ----------
    path
        See `open_data`.
    console
        Console for progress.
    split
        Split of the data.
    batch_size
        Samples per batch. A batch looks up each of its rows once, before any of these rows enters the cache.
    sampled_rows
        Approximate number of a table's rows that are sampled for the LRU curve. For smaller tables, the curve is exact.
    out
        New directory for skew.json, skew.png and hot_order/ (default: no files).
    picture
        Whether to draw skew.png, which needs matplotlib.
    overwrite
        Replace ``out`` if it holds a skew.json.
    trust_recipe
        Whether classes outside hotbed and torch.optim may be imported if a run's recipe names them.
    """
    with ExitStack() as stack:
        target = None
        if out is not None:
            if picture:
                require_matplotlib("skew.png", "add --picture false")
            made = new_directory(local("--out", out), marker="skew.json", overwrite=overwrite)
            target = stack.enter_context(made)
        started = time.perf_counter()
        source = open_data(path, trust_recipe=trust_recipe)
        with StageProgress(console) as progress:
            options: dict[str, Any] = {"batch_size": batch_size, "sampled_rows": sampled_rows}
            tables = measure_popularity(source, split, **options, progress=partial(progress, "accesses"))
        values = [table.to_dict() for table in tables]
        sums = {key: sum(table[key] for table in values) for key in ("rows", "accesses", "touched", "lookups")}
        curves = (("accesses_of_top_rows", "accesses"), ("lru", "lookups"), ("static", "lookups"))
        found = {
            "kind": "skew",
            "path": path,
            "split": split,
            "samples": source.samples(split),
            "batch_size": batch_size,
            "seconds": time.perf_counter() - started,
            "shares": list(SHARES),
            "all": sums | {curve: _mean_curve(values, curve, weight) for curve, weight in curves},
            "tables": values,
        }
        if target is not None:
            write_json(target / "skew.json", found)
            (target / "hot_order").mkdir()
            for table in tables:
                write_hot_order(target / "hot_order", {table.table: table.hot_order})
            if picture:
                _draw(found, target / "skew.png")
        return found


SKEW_DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(inspect_skew).parameters.items()
    if parameter.default is not parameter.empty
}
"""Options of `inspect_skew` and their defaults."""


def _mean_curve(tables: Sequence[Mapping[str, Any]], curve: str, weight: str) -> list[float]:
    """Return the mean of the tables' curves, weighted by the entry ``weight`` of each table.

    Tables without lookups are skipped, because their curves are NaN.
    """
    if not (seen := [table for table in tables if table[weight]]):
        return [float("nan")] * len(SHARES)
    return np.average([table[curve] for table in seen], axis=0, weights=[table[weight] for table in seen]).tolist()


def print_skew(console: Console, found: Mapping[str, Any]) -> None:
    """Print the results of `inspect_skew`: a line per table, and then the mean curves of all tables."""
    counts = f"{found['samples']:,} samples, {found['all']['accesses']:,} accesses, {found['seconds']:.1f} s"
    console.print(f"{found['path']}, split {found['split']}: {counts}", soft_wrap=True)
    shares: list[float] = found["shares"]
    one, ten = shares.index(0.01), shares.index(0.1)
    columns: Columns = {
        "table": lambda t: t["table"],
        "rows": lambda t: f"{t['rows']:,}",
        "accessed": lambda t: f"{t['touched']:,}",
        "top 1 %": lambda t: format_cell(t["accesses_of_top_rows"][one], ".1%"),
        "Zipf": lambda t: format_cell(t["zipf_exponent"], ".2f"),
        "LRU 10 %": lambda t: format_cell(t["lru"][ten], ".1%"),
        "static 10 %": lambda t: format_cell(t["static"][ten], ".1%"),
        "sampled": lambda t: format_cell(t["sample_rate"], ".1%"),
    }
    print_table(console, ReportTable.of("tables", found["tables"], columns))
    rows = [[f"{s:.4g}", *(format_cell(found["all"][of][i], ".1%") for of in CURVES)] for i, s in enumerate(shares)]
    title = f"all tables, batches of {found['batch_size']:,} samples"
    print_table(console, ReportTable(title, ("rows", "their accesses", "LRU hits", "static hits"), rows))


def _draw(found: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    shares = [100 * share for share in found["shares"]]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    accesses, hits = figure.subplots(1, 2, sharey=True)
    panels = ((accesses, "accesses_of_top_rows", "C0", "their accesses"), (hits, "lru", "C0", "LRU"))
    for axes, curve, color, label in (*panels, (hits, "static", "C1", "hottest rows fixed")):
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
