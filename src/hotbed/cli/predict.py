"""Score new rows with a run's model: ``hotbed predict``."""

from __future__ import annotations

from argparse import Namespace

from hotbed.cli.arguments import Parser, add_json, add_trust, console, write_json
from hotbed.errors import RecipeError
from hotbed.locations import location


def add_arguments(parser: Parser) -> None:
    """Add the model, the data and the file to make."""
    parser.usage = "hotbed predict RUN NEW --out FILE [options]"
    parser.add_argument("run", help="Run, RUNS/NAME (its newest run) or checkpoint; a path or URI.")
    parser.add_argument(
        "data",
        help="New rows, in the format of the data to train on; or raw ones, where hotbed prepare made those.",
    )
    parser.add_argument("--out", required=True, help="File to make, path or URI: .parquet or .csv, one row per row.")
    parser.add_argument("--keep", nargs="+", default=[], help="Columns to copy in front of the scores.")
    parser.add_argument("--split", help="Split to score, where the data have several.")
    parser.add_argument("--batch_size", type=int | None, help="Rows at once; default: train.eval_batch_size.")
    parser.add_argument(
        "--prepared",
        help="For raw rows: the prepared data that the model was trained on, if they have moved.",
    )
    parser.add_argument(
        "--missing",
        nargs="+",
        default=[],
        help="Input columns that the new rows may lack; their values count as missing (e.g. `price`).",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto.")
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Write the scores, with progress, and say what was done."""
    from hotbed.train.runs.report import StageProgress
    from hotbed.train.workflows.prediction import predict

    if parsed.batch_size is not None and parsed.batch_size < 1:
        raise RecipeError(f"--batch_size is {parsed.batch_size:,}, must be at least 1")
    if parsed.device not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"--device is {parsed.device!r}, must be auto, cpu or cuda")
    with StageProgress(console(stderr=True)) as progress:
        made = predict(
            location(parsed.run),
            location(parsed.data),
            location(parsed.out),
            keep=parsed.keep,
            split=parsed.split,
            batch_size=parsed.batch_size,
            device=parsed.device,
            trust_recipe=parsed.trust_recipe,
            prepared=parsed.prepared,
            missing=parsed.missing,
            progress=lambda done, total: progress("predict", done, total),
        )
    rate = made.rows / made.seconds
    console().print(
        f"{made.out}: {made.rows:,} rows of {', '.join(made.columns)}, by {made.checkpoint} ({rate:,.0f} rows/s)",
        soft_wrap=True,
        highlight=False,
    )
    for feature, count in made.ids_out_of_range.items():
        console().print(f"feature {feature}: {count:,} ids were out of range and dropped or hashed (data.on_bad_id)")
    write_json(parsed.json, {**vars(made), "out": str(made.out), "rows_per_s": rate})
