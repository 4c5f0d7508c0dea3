"""Train and test a model described by a recipe: ``hotbed train``."""

from __future__ import annotations

from argparse import Namespace

from hotbed.cli.arguments import Parser, add_json, add_recipe, console, parse_recipe, save_json
from hotbed.locations import local

_TORCHRUN_OPTIONS = ("ranks", "nproc", "nproc_per_node", "nproc-per-node", "nnodes", "world_size", "gpus", "devices")
_TORCHRUN = "torchrun starts several processes: torchrun --nproc_per_node 2 -m hotbed train … (docs/many_processes.md)"


def add_arguments(parser: Parser) -> None:
    """Add the recipe's options, and the options of the run."""
    parser.usage = "hotbed train RECIPE.yaml [--key value …]"
    add_recipe(parser)
    parser.add_argument("--out", default="runs", help="Parent directory of runs. A run is in OUT/NAME/TIME.")
    text = (
        "Checkpoint, run or directory of runs to resume from; auto: the newest run in OUT/NAME, or a new run if none "
    )
    text += "can be resumed; none: a new run (default: none; under torchrun, auto among the runs of the same recipe)."
    parser.add_argument("--resume", help=text)
    parser.add_argument("--dry_run", action="store_true", help="Print the estimated memory, and exit.")
    add_json(parser)
    parser.elsewhere |= {f"--{name}": _TORCHRUN for name in _TORCHRUN_OPTIONS}


def run(parsed: Namespace) -> None:
    """Train, or estimate the memory of training."""
    from hotbed.train.ranks.process_group import process_group, read_world
    from hotbed.train.runs.report import RunDirectory, print_summary
    from hotbed.train.runs.run import train

    recipe = parse_recipe(parsed)
    if parsed.dry_run:
        from hotbed.cli.dry_run import memory_plan, print_memory_plan

        plan = memory_plan(recipe)
        if read_world().rank == 0:
            print_memory_plan(console(), plan)
            save_json(parsed.json, plan)
        return
    with process_group(recipe.parallel, recipe.train.device) as ranks:
        folder = RunDirectory(local("--out", parsed.out), recipe.name)
        summary = train(recipe, folder, console(stderr=True), resume=parsed.resume)
    if ranks.rank == 0:
        print_summary(console(), summary)
        save_json(parsed.json, summary)
