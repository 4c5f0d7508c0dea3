"""Draft a first recipe for a table of samples: ``hotbed init``."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotbed.cli.arguments import Parser
from hotbed.errors import RecipeError, SpecError, did_you_mean
from hotbed.locations import location

_LONGEST_NAME = 100
_OPTIONS: dict[str, tuple[str, str]] = {
    "label": ("COL", "Label column (default: guessed, e.g. label, click). Pass several for a multi-task model."),
    "positive": ("", "Condition of a positive label, e.g. '>= 4', '== yes', 'in [a, b]' (default: guessed)."),
    "drop": ("COL", "Columns to leave out."),
    "time": ("", "Column of times for the splits (default: guessed)."),
    "test": ("", "File or folder of a separate test split."),
    "valid": ("flag", "Draft a validation split in any case, e.g. for tuning."),
    "model": ("", "Model class, e.g. DIN (default: chosen from the columns)."),
    "history": ("COL=COL", "History column and its candidate column, e.g. watched=movie (default: guessed by name)."),
    "weights": ("COL=COL", "Column of ids and column of their weights, e.g. tags=tag_scores."),
    "item": ("COL", "Item columns of TwoTower (default: guessed by name). All other columns describe the user."),
    "retrieval": ("flag", "Train TwoTower to retrieve items instead of predicting a label (default without a label)."),
}
"""Name of a parameter of `draft_recipe`: the metavar of a list, ``flag``, or "" for a single value; and the help."""


def add_arguments(parser: Parser) -> None:
    """Add the data, the options of `draft_recipe`, and the recipe's file."""
    parser.usage = "hotbed init PATH [options]"
    parser.add_argument("path", help="Parquet, CSV or TSV file, folder or URI, or a prepared dataset.")
    for name, (form, text) in _OPTIONS.items():
        options: dict[str, Any] = {"nargs": "+", "default": [], "metavar": form} if form else {}
        parser.add_argument(f"--{name}", help=text, **({"action": "store_true"} if form == "flag" else options))
    parser.add_argument("--out", help="Recipe file to write. It must not exist (default: stdout).")


def run(parsed: Namespace) -> None:
    """Draft a recipe, and write or print it."""
    from hotbed.checkpoint.storage import exists, write_text_uri

    out, test = (None if path is None else location(path) for path in (parsed.out, parsed.test))
    if out is not None and exists(out):
        raise RecipeError(f"--out: {out} exists and is not overwritten. Pass a different file")
    options: dict[str, Any] = {name: getattr(parsed, name) for name in _OPTIONS} | {"test": test}
    text = draft_recipe(location(parsed.path), **options)
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
    """Return a commented recipe for files of samples or a prepared dataset, as YAML."""
    from hotbed.cli.drafts.init_recipe import MODELS, draft_for, parse_pairs, recipe_text
    from hotbed.cli.drafts.init_stored import draft_stored
    from hotbed.data import ParquetSource
    from hotbed.data.drafting.draft import draft
    from hotbed.train.runs.build import refuse_one_class

    if model is not None and model not in MODELS:  # before the data is read
        raise SpecError(f"--model: got {model!r}, expected one of {', '.join(MODELS)}{did_you_mean(model, MODELS)}")
    if (item or retrieval) and model != "TwoTower":
        option, got = "--item" if item else "--retrieval", f"--model {model}" if model else "no --model"
        fix = f"Remove {option}" if model else "Add --model TwoTower"
        raise SpecError(f"{option} works only with --model TwoTower: got {got}. {fix}")
    histories = parse_pairs("--history", history, "HISTORY=CANDIDATE, e.g. watched=movie")
    of_ids = parse_pairs("--weights", weights, "IDS=WEIGHTS, e.g. tags=tag_scores")
    options: dict[str, Any] = {"label": label, "positive": positive, "drop": drop, "time": time, "test": test}
    options["valid"] = valid
    fixed = options | {"history": history, "weights": weights}
    stored = draft_stored(path, [f"--{option}" for option, value in fixed.items() if value])
    if stored is not None:
        found, source = stored
    else:
        found = draft(path, **options, histories=histories, needs_label=model != "TwoTower", weights=of_ids)
        source = ParquetSource(path, found.schema, **found.splits.init_args)
    if model is not None:
        found = draft_for(found, model, str(path), histories=histories, item=item)
    labels = {split: source.check_labels(split) for split in source.splits}
    only_positives = all(span == (1, 1) for span in labels["train"].values())  # also true without a label
    retrieval = retrieval or (model == "TwoTower" and only_positives)
    if not retrieval:
        refuse_one_class(source, [labels["train"]])
    counts = {split: source.samples(split) for split in source.splits}
    return recipe_text(
        found, name=run_name(path), path=str(path), counts=counts, model=model, item=item, retrieval=retrieval
    )


def run_name(path: str | Path) -> str:
    """Return a name for runs: the name of the data, without characters that some systems refuse in directory names."""
    plain = str(path).partition("?")[0] if "://" in str(path) else str(path)
    last = re.split(r"[/\\]", plain.rstrip("/\\"))[-1]
    if last in ("", ".", ".."):
        last = Path(path).resolve().name
    name = re.sub(r"\.(parquet|parq|pq|(csv|tsv)(\.gz|\.zst)?)$", "", last)
    name = "".join(c if c.isprintable() and c not in '<>:"|?*' else "_" for c in name)
    name = name.encode()[:_LONGEST_NAME].decode(errors="ignore").strip(" .") or "run"
    return f"run-{name}" if name.lower() in ("null", "~") else name  # as values of options, these mean no name
