"""Draft a first recipe for a table of samples: ``hotbed init``."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hotbed.cli.arguments import Parser
from hotbed.errors import RecipeError, SpecError, did_you_mean
from hotbed.locations import location

_LONGEST_NAME = 100


def add_arguments(parser: Parser) -> None:
    """Add the data, what its columns are where that cannot be seen, and the recipe's file."""
    parser.usage = "hotbed init PATH [options]"
    parser.add_argument(
        "path",
        help="Path or URI of Parquet, CSV or TSV, of a folder of them, or of a prepared dataset.",
    )
    parser.add_argument(
        "--label",
        nargs="+",
        default=[],
        metavar="COL",
        help="Label column (default: guessed, e.g. label, click); several for a multi-task model.",
    )
    parser.add_argument(
        "--positive", help="Condition of a positive label, e.g. '>= 4', '== yes', 'in [a, b]' (default: guessed)."
    )
    parser.add_argument("--drop", nargs="+", default=[], metavar="COL", help="Columns to leave out.")
    parser.add_argument("--time", help="Column of times for the splits (default: guessed).")
    parser.add_argument("--test", help="File or folder of a separate test split.")
    parser.add_argument("--valid", action="store_true", help="Add a validation split, which tuning needs.")
    parser.add_argument(
        "--model",
        help="Model class, e.g. DIN (default: chosen from the columns).",
    )
    parser.add_argument(
        "--history",
        nargs="+",
        default=[],
        metavar="COL=COL",
        help="History and candidate column, e.g. watched=movie (default: guessed from names).",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="COL=COL",
        help="Column of ids and column of their weights, e.g. tags=tag_scores.",
    )
    parser.add_argument(
        "--item", nargs="+", default=[], metavar="COL", help="Item columns of TwoTower; all others describe the user."
    )
    parser.add_argument(
        "--retrieval",
        action="store_true",
        help="Train TwoTower to retrieve items instead of predicting a label (default without a label).",
    )
    parser.add_argument("--out", help="Recipe file to write, which must not exist (default: stdout).")


def run(parsed: Namespace) -> None:
    """Draft a recipe, and write or print it."""
    from hotbed.checkpoint.single_files import exists, write_text_uri

    out = None if parsed.out is None else location(parsed.out)
    if out is not None and exists(out):
        raise RecipeError(f"{out} exists already and is not overwritten; choose another --out")
    text = draft_recipe(
        location(parsed.path),
        parsed.label,
        positive=parsed.positive,
        drop=parsed.drop,
        time=parsed.time,
        test=None if parsed.test is None else location(parsed.test),
        valid=parsed.valid,
        model=parsed.model,
        history=parsed.history,
        weights=parsed.weights,
        item=parsed.item,
        retrieval=parsed.retrieval,
    )
    if out is None:
        print(text, end="")
    else:
        write_text_uri(out, text)


def draft_recipe(
    path: str | Path,
    label: str | Sequence[str] = (),
    *,
    positive: str | None = None,
    drop: Sequence[str] = (),
    time: str | None = None,
    test: str | Path | None = None,
    valid: bool = False,
    model: str | None = None,
    history: Sequence[str] = (),
    weights: Sequence[str] = (),
    item: Sequence[str] = (),
    retrieval: bool = False,
) -> str:
    """Write a commented recipe for Parquet, CSV or TSV files, or a prepared dataset, as YAML.

    Parameters
    ----------
    path
        File, folder or URI, as for `ParquetSource`; or a folder of `hotbed.prepare`, in NVIDIA's split-binary format,
        or of NumPy arrays as TorchRec's and MLPerf's scripts write them.
    """
    from hotbed.cli.drafts.init_models import MODELS, draft_for, pairs_of
    from hotbed.cli.drafts.init_recipe import recipe_text
    from hotbed.cli.drafts.init_stored import draft_stored
    from hotbed.data import ParquetSource
    from hotbed.data.drafting.draft import draft
    from hotbed.train.runs.build import refuse_one_class

    if model is not None and model not in MODELS:  # before all of the data are looked at
        raise SpecError(f"--model: got {model!r}, expected one of {', '.join(MODELS)}{did_you_mean(model, MODELS)}")
    if (item or retrieval) and model != "TwoTower":
        option = "--item" if item else "--retrieval"
        got, fix = (
            ("no --model", "Add --model TwoTower") if model is None else (f"--model {model}", f"Leave {option} out")
        )
        raise SpecError(f"{option} works with one model only: got {got}, expected TwoTower. {fix}")
    histories, of_ids = pairs_of(history), pairs_of(weights, "--weights", "IDS=WEIGHTS, such as tags=tag_scores")
    options = {
        "--label": label,
        "--positive": positive,
        "--drop": drop,
        "--time": time,
        "--test": test,
        "--valid": valid,
        "--history": history,
        "--weights": weights,
    }
    stored = draft_stored(path, [option for option, given in options.items() if given])
    if stored is not None:
        found, source = stored.draft, stored.source
    else:
        found = draft(
            path,
            label=label,
            positive=positive,
            drop=drop,
            time=time,
            test=test,
            valid=valid,
            histories=histories,
            needs_label=model != "TwoTower",
            weights=of_ids,
        )
        source = ParquetSource(path, found.schema, **found.splits.init_args)
    if model is not None:
        found = draft_for(found, model, str(path), histories=histories, item=item)
    labels = {split: source.check_labels(split) for split in source.splits}
    only_positives = all(span == (1, 1) for span in labels["train"].values())  # or no label
    retrieval = retrieval or (model == "TwoTower" and only_positives)
    if not retrieval:
        refuse_one_class(source, [labels["train"]])
    counts = {split: source.samples(split) for split in source.splits}
    return recipe_text(
        found, name=run_name(path), path=str(path), counts=counts, model=model, item=item, retrieval=retrieval
    )


def run_name(path: str | Path) -> str:
    """Name of the data, as far as directories can have it on any system."""
    plain = str(path).partition("?")[0] if "://" in str(path) else str(path)
    last = re.split(r"[/\\]", plain.rstrip("/\\"))[-1]
    if last in ("", ".", ".."):
        last = Path(path).resolve().name
    name = re.sub(r"\.(parquet|parq|pq|(csv|tsv)(\.gz|\.zst)?)$", "", last)
    name = "".join(c if c.isprintable() and c not in '<>:"|?*' else "_" for c in name)
    name = name.encode()[:_LONGEST_NAME].decode(errors="ignore").strip(" .") or "run"
    return f"run-{name}" if name.lower() in ("null", "~") else name  # which stand for no name on the command line
