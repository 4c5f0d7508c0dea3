"""Train and test by a recipe: ``hotbed train``."""

from __future__ import annotations

from argparse import Namespace

from hotbed.cli.arguments import Parser, add_json, add_recipe, console, recipe_of, write_json
from hotbed.locations import local

_OF_TORCHRUN = [
    f"--{word}"
    for word in ("ranks", "nproc", "nproc_per_node", "nproc-per-node", "nnodes", "world_size", "gpus", "devices")
]
_TORCHRUN = "torchrun starts several processes: torchrun --nproc_per_node 2 -m hotbed train … (docs/many_processes.md)"


def add_arguments(parser: Parser) -> None:
    """Add the recipe's options, and those of the run."""
    parser.usage = "hotbed train RECIPE.yaml [--key value …]"
    add_recipe(parser)
    parser.add_argument("--out", default="runs", help="Where runs go: OUT/NAME/TIME.")
    parser.add_argument(
        "--resume",
        help="What to go on from: a checkpoint, a run's directory, or the runs of a name; or auto: the newest run in "
        "OUT/NAME (its checkpoints may be in train.checkpoint_dir), if there is one to go on with; or none. Default: "
        "none; under torchrun, auto among the runs of the same recipe.",
    )
    parser.add_argument("--dry_run", action="store_true", help="Print the bytes that the run would take, and exit.")
    add_json(parser)
    parser.elsewhere |= dict.fromkeys(_OF_TORCHRUN, _TORCHRUN)


def run(parsed: Namespace) -> None:
    """Train, or say what that would take."""
    from hotbed.train.ranks.process_group import process_group, read_world
    from hotbed.train.runs.report import RunDirectory, print_summary
    from hotbed.train.runs.run import train

    recipe = recipe_of(parsed)
    if parsed.dry_run:
        from hotbed.cli.dry_run import memory_plan, print_memory_plan

        plan = memory_plan(recipe)
        if read_world().rank == 0:
            print_memory_plan(console(), plan)
            write_json(parsed.json, plan)
        return
    with process_group(recipe.parallel, recipe.train.device) as here:
        summary = train(
            recipe, RunDirectory(local("--out", parsed.out), recipe.name), console(stderr=True), resume=parsed.resume
        )
    if here.rank == 0:
        print_summary(console(), summary)
        write_json(parsed.json, summary)
