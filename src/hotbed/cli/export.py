"""Export a model, its changes or its towers for servers, or the model as one torch program: ``hotbed export``."""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial
from typing import Any

from hotbed.cli.arguments import Parser, add_json, add_trust, console, save_json
from hotbed.errors import RecipeError
from hotbed.locations import local, location


def add_arguments(parser: Parser) -> None:
    """Add the run, and the form of the export."""
    parser.usage = "hotbed export RUN DIR [--since EARLIER | --towers] [options], or: RUN --single FILE.pt2"
    parser.add_argument("run", help="Path or URI of a run or checkpoint. RUNS/NAME is the newest run of a name.")
    parser.add_argument("target", nargs="?", help="New directory or URI for servers.")
    text = "Earlier checkpoint, or its step in the same run. Only rows that changed since this checkpoint are written."
    parser.add_argument("--since", help=text)
    parser.add_argument("--single", help="File NAME.pt2 to write instead of DIR: a program with its tables, for torch.")
    parser.add_argument("--towers", action="store_true", help="Export a two-tower model's towers and all item vectors.")
    parser.add_argument("--data", help="Data that the model is built for (default: the recipe's data).")
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Export the model, and print a summary."""
    single, since = parsed.single is not None, parsed.since is not None
    if single == (parsed.target is not None):
        got = "both DIR and --single" if single else "none"
        raise RecipeError(f"target: got {got}, expected one target. Pass either DIR or --single FILE.pt2")
    if parsed.towers and (single or since):
        raise RecipeError("--towers always exports both towers and all items. Remove --single and --since")
    if single and since:
        raise RecipeError("--since has no effect with --single, which writes all rows. Remove one of these options")
    start = time.perf_counter()
    made = (_export_towers if parsed.towers else _export_single if single else _export_model)(parsed)
    seconds = time.perf_counter() - start
    save_json(parsed.json, {"source": parsed.run, "target": parsed.target or parsed.single, "seconds": seconds, **made})


def _export_model(parsed: Namespace) -> dict[str, Any]:
    from hotbed.train.runs.model_export import describe_export, export_model
    from hotbed.train.runs.report import StageProgress

    since = parsed.since if parsed.since is None or parsed.since.isdecimal() else location(parsed.since)
    source, target = location(parsed.run), location(parsed.target)
    options: dict[str, Any] = {"since": since, "data": parsed.data, "trust_recipe": parsed.trust_recipe}
    with StageProgress(console(stderr=True)) as progress:
        manifest = export_model(source, target, **options, progress=partial(progress, "export"))
    made = describe_export(manifest)
    what = f"the model of step {made['step']:,}" if since is None else format_changes(made)
    console().print(f"{target}: {what}, {sum(made['files'].values()):,} bytes", soft_wrap=True, highlight=False)
    return made


def format_changes(made: dict[str, Any]) -> str:
    """Return a text with the number of changed rows, the number of deleted ids, and the step of each checkpoint."""
    upserts, deletes = (sum(of[key] for of in made["tables"].values()) for key in ("upserts", "deletes"))
    base = "" if made.get("base") is None else f" since step {made['base']:,}"
    return f"{upserts:,} rows and {deletes:,} deleted ids of step {made['sequence']:,}{base}"


def _export_towers(parsed: Namespace) -> dict[str, Any]:
    from hotbed.train.workflows.towers import export_towers

    target = local("DIR", parsed.target)
    made = export_towers(location(parsed.run), target, parsed.data, trust_recipe=parsed.trust_recipe)
    what = f"both towers of step {made.step:,}, {made.items:,} items, vectors of {made.dim} columns"
    console().print(f"{target}: {what}", soft_wrap=True, highlight=False)
    return vars(made)


def _export_single(parsed: Namespace) -> dict[str, Any]:
    from hotbed.train.runs.model_export import export_single

    target = local("--single", parsed.single)
    if target.suffix != ".pt2":
        raise RecipeError(f"--single: got {target}, expected a name that ends in .pt2")
    made = export_single(location(parsed.run), target, parsed.data, trust_recipe=parsed.trust_recipe)
    console().print(f"{target}: {len(made['tables']):,} tables, {target.stat().st_size:,} bytes", soft_wrap=True)
    return made
