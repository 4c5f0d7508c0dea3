"""Export a run's model in parts, its changes, or as one program: ``hotbed export``."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from hotbed.cli.arguments import Parser, add_json, add_trust, console, write_json
from hotbed.errors import RecipeError
from hotbed.locations import local, location


def add_arguments(parser: Parser) -> None:
    """Add the run, and what to make of it."""
    parser.usage = "hotbed export RUN DIR [--since EARLIER | --towers] [options], or: RUN --single FILE.pt2"
    parser.add_argument("run", help="Run, RUNS/NAME (its newest run) or checkpoint; a path or URI.")
    parser.add_argument("target", nargs="?", help="Directory to make, path or URI, for servers.")
    parser.add_argument(
        "--since",
        help="Earlier checkpoint, or the step of one beside the exported one: write only what changed since.",
    )
    parser.add_argument("--single", help="File NAME.pt2 to make instead: one program with its tables, for torch alone.")
    parser.add_argument(
        "--towers", action="store_true", help="Of a two-tower model: its towers, and all items' vectors."
    )
    parser.add_argument("--data", help="Data that the model can be built for; default: the recipe's.")
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Write what is asked for, with progress, and say what there is."""
    single, since = parsed.single is not None, parsed.since is not None
    target = local("--single", parsed.single) if single else None
    if single == (parsed.target is not None):
        raise RecipeError("give one of a directory to make, and --single FILE.pt2: hotbed export RUN DIR")
    if parsed.towers and (single or since):
        raise RecipeError("--towers writes both towers and all items; leave --single and --since out")
    if target is not None and target.suffix != ".pt2":
        raise RecipeError(f"--single is {target}, must end in .pt2")
    if single and since:
        raise RecipeError("--since has no effect with --single, which writes all rows; leave one of them out")
    start = time.perf_counter()
    made = _towers(parsed) if parsed.towers else _exported(parsed) if parsed.single is None else _single(parsed)
    seconds = time.perf_counter() - start
    write_json(
        parsed.json, {"source": parsed.run, "target": parsed.target or parsed.single, "seconds": seconds, **made}
    )


def _exported(parsed: Namespace) -> dict[str, Any]:
    from hotbed.train.runs.model_export import describe_export, export_model
    from hotbed.train.runs.report import StageProgress

    since = parsed.since if parsed.since is None or parsed.since.isdecimal() else location(parsed.since)
    target = location(parsed.target)
    with StageProgress(console(stderr=True)) as progress:
        manifest = export_model(
            location(parsed.run),
            target,
            since=since,
            data=parsed.data,
            trust_recipe=parsed.trust_recipe,
            progress=lambda done, total: progress("export", done, total),
        )
    made = describe_export(manifest)
    what = f"the model of step {made['step']:,}" if since is None else _changes(made)
    console().print(f"{target}: {what}, {sum(made['files'].values()):,} bytes", soft_wrap=True, highlight=False)
    return made


def _changes(made: dict[str, Any]) -> str:
    upserts, deletes = (sum(of[kind] for of in made["tables"].values()) for kind in ("upserts", "deletes"))
    return f"{upserts:,} rows and {deletes:,} deleted ids of step {made['sequence']:,} since step {made['base']:,}"


def _towers(parsed: Namespace) -> dict[str, Any]:
    from hotbed.train.workflows.towers import export_towers

    target = local("DIR", parsed.target)
    made = export_towers(location(parsed.run), target, parsed.data, trust_recipe=parsed.trust_recipe)
    console().print(
        f"{target}: both towers of step {made.step:,}, {made.items:,} items, vectors of {made.dim} columns",
        soft_wrap=True,
        highlight=False,
    )
    return vars(made)


def _single(parsed: Namespace) -> dict[str, Any]:
    from hotbed.train.runs.model_export import export_single

    target = local("--single", parsed.single)
    made = export_single(location(parsed.run), target, parsed.data, trust_recipe=parsed.trust_recipe)
    console().print(f"{target}: {len(made['tables']):,} tables, {target.stat().st_size:,} bytes", soft_wrap=True)
    return made
