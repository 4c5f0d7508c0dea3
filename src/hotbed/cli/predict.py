"""Score new rows with a trained model: ``hotbed predict``."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Literal

from hotbed.checks import Count
from hotbed.cli.arguments import Parser, add_json, add_trust, console, save_json
from hotbed.locations import location


def add_arguments(parser: Parser) -> None:
    """Add the model, the data and the output file."""
    parser.usage = "hotbed predict RUN NEW --out FILE [options]"
    parser.add_argument("run", help="Path or URI of a run or checkpoint. RUNS/NAME is the newest run of a name.")
    parser.add_argument("data", help="New rows in the format of the training data, or raw rows as before preparation.")
    parser.add_argument(
        "--out", required=True, help="Output file or URI, .parquet or .csv, with one row per input row."
    )
    parser.add_argument("--keep", nargs="+", default=[], help="Columns to copy before the scores, e.g. `user item`.")
    parser.add_argument("--split", help="Split to score, if the data has several, e.g. test.")
    parser.add_argument("--batch_size", type=Count | None, help="Rows per batch (default: train.eval_batch_size).")
    parser.add_argument("--prepared", help="Prepared training data for raw rows (default: the recipe's data.path).")
    text = "Input columns that the new rows may lack, e.g. `price`. In such a column, all values count as missing."
    parser.add_argument("--missing", nargs="+", default=[], help=text)
    parser.add_argument("--device", type=Literal["auto", "cpu", "cuda"], default="auto", help="Device.")
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Write the scores, and print a summary."""
    from hotbed.train.runs.report import StageProgress
    from hotbed.train.workflows.prediction import predict

    options = dict(vars(parsed))
    *paths, json = (options.pop(name) for name in ("run", "data", "out", "json"))
    with StageProgress(console(stderr=True)) as progress:
        made = predict(*map(location, paths), **options, progress=partial(progress, "predict"))
    to, rate = console(), made.rows / made.seconds
    what = f"{made.rows:,} rows with {', '.join(made.columns)}, scored by {made.checkpoint} ({rate:,.0f} rows/s)"
    to.print(f"{made.out}: {what}", soft_wrap=True, highlight=False)
    for feature, count in made.ids_out_of_range.items():
        to.print(f"feature {feature}: {count:,} ids were out of range and dropped or hashed (data.on_bad_id)")
    save_json(json, {**vars(made), "out": str(made.out), "rows_per_s": rate})
