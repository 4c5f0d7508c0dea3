# pyright: reportMissingImports=false
"""Measure how unevenly rows are looked up, and what a cache of them would serve: ``hotbed inspect --skew``."""

# matplotlib is an extra, which need not be installed where types are checked.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hotbed.checkpoint import MANIFEST, directory
from hotbed.checkpoint.single_files import read_yaml_uri
from hotbed.cli.drafts.init_stored import open_stored
from hotbed.cli.pages.report_page import Table, print_table, require_matplotlib
from hotbed.config import Recipe, check_trust, import_from
from hotbed.data import ParquetSource, Source, draft_schema
from hotbed.data.skew.hot_cold import write_hot_order
from hotbed.data.skew.row_popularity import SAMPLED_ROWS, SHARES, Popularity, measure_popularity
from hotbed.errors import DataError
from hotbed.files import new_directory, write_json
from hotbed.locations import is_storage, local
from hotbed.train.runs.build import open_source
from hotbed.train.runs.report import RECIPE, StageProgress

CURVES = ("accesses_of_top_rows", "lru", "static")


def open_data(path: str | Path, *, trust_recipe: bool = False) -> Source:
    """The samples that a path stands for.

    A prepared dataset or arrays of NumPy, see `open_stored`; a Parquet file or folder with the schema that
    `draft_schema` proposes; a recipe's file or a run's directory, which name any source.
    """
    place = directory(path) if is_storage(path) else None
    if isinstance(path, Path) and not path.exists():
        raise DataError(f"{path} does not exist")
    if place is not None and place.has(MANIFEST):
        raise DataError(f"{path} is a checkpoint, which holds no samples; give the data, the recipe or the run")
    if (stored := open_stored(path)) is not None:
        return stored.source
    if place is not None and ((of_run := place.has(RECIPE)) or place.name.endswith((".yaml", ".yml"))):
        recipe = Recipe.from_dict(read_yaml_uri((place / RECIPE).path if of_run else path))
        if of_run:
            check_trust(recipe, (place / RECIPE).path, trusted=trust_recipe)
        elif isinstance(path, Path):
            import_from(path.parent)
        source = open_source(replace(recipe.data, valid_split=None, test_split=None))
        source.measure(recipe.data.train_split)
        return source
    try:
        return ParquetSource(path, draft_schema(path))
    except DataError as error:
        raise DataError(
            f"{path} is no prepared dataset (feature_spec.yaml, source.yaml), arrays (day_0_sparse.npy), recipe, run "
            f"(recipe.yaml) or Parquet: {error}"
        ) from None


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
    """Measure the popularity of rows, and write what was found where that is wanted.

    Parameters
    ----------
    path
        See `open_data`.
    console
        Where progress is shown.
    split
        Which split of the data.
    batch_size
        Samples per batch; a batch looks each of its rows up once, all of them before any goes into the cache.
    sampled_rows
        Rows of a table that the LRU curve follows, about; it is exact for a table with no more rows.
    out
        Directory to make, with skew.json, skew.png and hot_order/ (see `hotbed.data.skew.hot_cold`); none by default.
    picture
        Whether to draw skew.png, which needs matplotlib.
    overwrite
        Replace ``out`` if it holds a skew.json.
    trust_recipe
        Import what the recipe of a run's directory names, also if it is of neither hotbed nor torch.optim.

    Returns
    -------
    dict
        Plain values: curves at ``shares`` of the rows, for each of the ``tables``, and for ``all`` of them where each
        table has the same share of its rows in the cache.
    """
    if out is None:
        return _measure(path, console, split, batch_size, sampled_rows, trust_recipe)[0]
    if picture:
        require_matplotlib("skew.png", "pass --picture false")
    with new_directory(local("--out", out), marker="skew.json", overwrite=overwrite) as directory:
        found, tables = _measure(path, console, split, batch_size, sampled_rows, trust_recipe)
        write_json(directory / "skew.json", found)
        (directory / "hot_order").mkdir()
        for table in tables:
            write_hot_order(directory / "hot_order", {table.table: table.hot_order})
        if picture:
            _draw(found, directory / "skew.png")
    return found


SKEW_DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(inspect_skew).parameters.items()
    if parameter.default is not parameter.empty
}
"""The options of `inspect_skew` and what they are where nobody sets them."""


def _measure(
    path: str | Path, console: Console, split: str, batch_size: int, sampled_rows: int, trust_recipe: bool
) -> tuple[dict[str, Any], list[Popularity]]:
    started = time.perf_counter()
    source = open_data(path, trust_recipe=trust_recipe)
    with StageProgress(console) as progress:
        tables = measure_popularity(
            source,
            split,
            batch_size=batch_size,
            sampled_rows=sampled_rows,
            progress=lambda done, total: progress("accesses", done, total),
        )
    values = [table.to_dict() for table in tables]
    found = {
        "kind": "skew",
        "path": path,
        "split": split,
        "samples": source.samples(split),
        "batch_size": batch_size,
        "seconds": time.perf_counter() - started,
        "shares": list(SHARES),
        "all": {
            "rows": sum(table["rows"] for table in values),
            "accesses": sum(table["accesses"] for table in values),
            "touched": sum(table["touched"] for table in values),
            "lookups": sum(table["lookups"] for table in values),
            "accesses_of_top_rows": _mean(values, "accesses_of_top_rows", "accesses"),
            "lru": _mean(values, "lru", "lookups"),
            "static": _mean(values, "static", "lookups"),
        },
        "tables": values,
    }
    return found, tables


def _mean(tables: Sequence[Mapping[str, Any]], curve: str, weight: str) -> list[float]:
    """The curve of all tables together; those that were never looked up, whose curve is NaN, have no weight."""
    seen = [table for table in tables if table[weight]]
    if not seen:
        return [float("nan")] * len(SHARES)
    weights = [table[weight] for table in seen]
    return np.average([table[curve] for table in seen], axis=0, weights=weights).tolist()


def print_skew(console: Console, found: Mapping[str, Any]) -> None:
    """Print what `inspect_skew` found: a line per table, then the curves of all tables together."""
    console.print(
        f"{found['path']}, split {found['split']}: {found['samples']:,} samples, "
        f"{found['all']['accesses']:,} accesses, {found['seconds']:.1f} s",
        soft_wrap=True,
    )
    shares: list[float] = found["shares"]
    one, ten = shares.index(0.01), shares.index(0.1)
    rows: list[list[str]] = []
    for entry in found["tables"]:
        exponent = entry["zipf_exponent"]
        cells = [
            entry["table"],
            *(f"{entry[key]:,}" for key in ("rows", "touched")),
            _percent(entry["accesses_of_top_rows"][one]),
            "–" if exponent is None else f"{exponent:.2f}",
            *(_percent(entry[curve][ten]) for curve in ("lru", "static")),
            _percent(entry["sample_rate"]),
        ]
        rows.append(cells)
    head = ("table", "rows", "touched", "top 1 %", "Zipf", "LRU 10 %", "static 10 %", "sampled")
    print_table(console, Table("tables", head, rows))
    rows = [[f"{share:.4g}", *(_percent(found["all"][of][i]) for of in CURVES)] for i, share in enumerate(shares)]
    title = f"all tables, batches of {found['batch_size']:,} samples"
    print_table(console, Table(title, ("rows", "their accesses", "LRU hits", "static hits"), rows))


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"


def _draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw two panels over the share of rows: accesses, and hit rates; a thin line per table, a bold one for all."""
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
