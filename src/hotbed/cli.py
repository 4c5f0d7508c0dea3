"""The command line: ``hotbed demo | init | prepare | pack | train | eval | inspect | checkpoint … | bench …``.

Each command is a parser and a function below; what they do is in `hotbed.train`, `hotbed.data` and `hotbed.bench`,
imported when the command runs, so that help is quick. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from hotbed import cli_checkpoint
from hotbed.cli_recipe import (
    add_json,
    add_recipe,
    console,
    readable_twice,
    recipe_of,
    split_deep,
    split_recipes,
    write_json,
)
from hotbed.config import check_keys
from hotbed.errors import CommError, HotbedError, RecipeError, StoppedError, did_you_mean
from hotbed.files import local, location, read_yaml
from hotbed.machine import fit_threads

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Command(NamedTuple):
    """One command: what it is for, its arguments, and what it does with them."""

    help: str
    usage: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv
        Arguments after the program's name; default: those of the process.

    Returns
    -------
    int
        0; 2 after an error, which is one message on stderr (``--debug`` shows the traceback); 130 or 143 if a signal
        stopped it.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    try:
        _run(args)
    except KeyboardInterrupt:
        print("hotbed: interrupted", file=sys.stderr)
        return 130
    except StoppedError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"hotbed: {error}", file=sys.stderr)
        return 128 + error.signal
    except (HotbedError, OSError) as error:
        if debug:
            raise
        several = os.environ.get("WORLD_SIZE", "1") != "1" and not isinstance(error, CommError)
        rank = f"rank {os.environ.get('RANK', '?')}: " if several else ""
        print(f"hotbed: error: {rank}{error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        from hotbed.store.memory import why_out_of_memory

        reason = None if debug else why_out_of_memory(error)
        if reason is None:
            raise
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"hotbed: error: {rank}{reason}", file=sys.stderr)
        return 2
    return 0


def _run(args: list[str]) -> None:
    words = 2 if any(name.startswith(" ".join(args[:1]) + " ") for name in COMMANDS) else 1
    if len(args) < words or args[words - 1] in ("-h", "--help"):
        print(_help())
        return
    name, rest = " ".join(args[:words]), args[words:]
    if name not in COMMANDS:
        raise RecipeError(
            f"there is no command '{name}'; there are {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
        )
    command = COMMANDS[name]
    # Errors have to be raised, not printed, to be explained in main; env variables are no source of settings.
    parser = ArgumentParser(
        prog=f"hotbed {name}", description=command.help, usage=command.usage, exit_on_error=False, default_env=False
    )
    command.add_arguments(parser)
    deep: list[tuple[str, str]] = []
    recipes: list[str] = []
    if command.add_arguments is add_recipe:
        rest, deep = split_deep(rest)
        rest, recipes = split_recipes(rest, [o for a in parser._actions if a.nargs == 0 for o in a.option_strings])
    try:
        with readable_twice(recipes) as files:
            for file in files:
                check_keys(read_yaml(Path(file)), complete=False)
            # jsonargparse reads a file of settings only from an option. First, so that all other options override it.
            parsed = parser.parse_args([f"--recipe={file}" for file in files] + rest)
    except ArgumentError as error:
        known = [option for action in parser._actions for option in action.option_strings]
        raise RecipeError(_explained(str(error), known)) from None
    if deep:
        parsed.update(deep, "deep")
    fit_threads()
    command.run(parsed)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: hotbed COMMAND …", "", *lines, "", "hotbed COMMAND --help shows arguments; --debug shows tracebacks."]
    )


def _explained(message: str, known: Sequence[str]) -> str:
    """Jsonargparse's message in hotbed's words: the key, the value, what it must be, and the closest known key."""
    if unknown := re.match(r"[Uu]nrecognized arguments: ([^\s=]+)", message):
        return f"unknown argument {unknown[1]}{did_you_mean(unknown[1], known)}"
    key = re.search(r'Parser key "([^"]+)"', message)
    value = re.search(r"(?:Given value|Got value): (.*)", message)
    types = re.findall(r"Expected an? (.+?)(?:\. Got value: .*)?$", message, flags=re.MULTILINE)
    if not (key and value and types):
        return message
    names = [re.sub(r"<class '(?:NoneType|(\w+))'>", lambda m: m[1] or "null", t) for t in types]
    names = [n.removeprefix("typing.Literal").strip("[]") if "Literal" in n else n for n in names]
    names = sorted(dict.fromkeys(names), key=lambda name: name == "null")
    return f"{key[1]} is {value[1]!r}, must be {' or '.join(names)}"


# -- training ------------------------------------------------------------------------------------------------------


def _train(parsed: Namespace) -> None:
    from hotbed.train.process_group import process_group, started
    from hotbed.train.report import RunDirectory, print_summary
    from hotbed.train.run import train

    recipe = recipe_of(parsed)
    if parsed.dry_run:
        from hotbed.train.dry_run import memory_plan, print_memory_plan

        plan = memory_plan(recipe)
        if started().rank == 0:
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


# -- the other commands --------------------------------------------------------------------------------------------


def _add_demo(parser: ArgumentParser) -> None:
    parser.add_argument("data", type=str | None, nargs="?", help="Raw Criteo log (.tsv, .tsv.gz); none makes one.")
    parser.add_argument("--samples", type=int, default=200_000, help="Lines of the log that is made.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of that log and of the training.")
    parser.add_argument("--promise", action="store_true", help="One model under every plan, and what came out.")
    parser.add_argument("--ranks", type=int, default=3, help="Processes of the promise.")
    parser.add_argument("--steps", type=int, default=100, help="Steps of the promise.")
    parser.add_argument(
        "--out",
        type=str,
        default="runs",
        help="Everything goes into a new directory OUT/demo/TIME, or OUT/promise/TIME.",
    )
    add_json(parser)


def _demo(parsed: Namespace) -> None:
    from hotbed.train.demo import run_demo
    from hotbed.train.report import print_summary

    data, root = None if parsed.data is None else local("DATA", parsed.data), local("--out", parsed.out)
    if parsed.promise:
        from hotbed.train.promise import print_promise, run_promise

        options = {"ranks": parsed.ranks, "steps": parsed.steps, "seed": parsed.seed}
        result = run_promise(data, root, console(stderr=True), **options)
        print_promise(console(), result)
        write_json(parsed.json, result)
        if not result["equal"]:
            raise CommError("a plan changed the model; please report this with the run's directory")
        return
    summary = run_demo(data, root, console(stderr=True), samples=parsed.samples, seed=parsed.seed)
    print_summary(console(), summary)
    write_json(parsed.json, summary)


def _add_init(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=str, help="Parquet file or folder; a path or a URI.")
    parser.add_argument("--label", type=str | None, help="Label column, where its name is not a usual one.")
    parser.add_argument("--out", type=str | None, help="Recipe to write; it must not exist. Default: stdout.")


def _init(parsed: Namespace) -> None:
    from hotbed.files import write_text
    from hotbed.train.draft import draft_recipe

    out = None if parsed.out is None else local("--out", parsed.out)
    if out is not None and out.exists():
        raise RecipeError(f"{out} exists already and is not overwritten; choose another --out")
    text = draft_recipe(location(parsed.path), parsed.label)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)


def _add_prepare(parser: ArgumentParser) -> None:
    from hotbed.data.prepare import prepare

    parser.add_argument("raw", type=str, nargs="+", help="Raw Criteo logs in time order, or a directory of them.")
    parser.add_argument("out", type=str, help="Dataset directory to make.")
    parser.add_function_arguments(prepare, skip={"raw", "out", "progress", "vocabulary"})
    parser.add_argument("--vocabulary", type=str | None, help="vocabulary/ of an earlier dataset, whose ids are kept.")
    add_json(parser)


def _prepare(parsed: Namespace) -> None:
    from hotbed.data.prepare import prepare
    from hotbed.train.progress import StageProgress
    from hotbed.train.report import print_prepared

    options = parsed.as_dict()
    raw, out, json = options.pop("raw"), options.pop("out"), options.pop("json")
    raw, out = [local("RAW", path) for path in raw], local("OUT", out)
    with StageProgress(console(stderr=True)) as progress:
        report = prepare(raw, out, progress=progress, **options)
    print_prepared(console(), report)
    write_json(json, vars(report))


def _add_pack(parser: ArgumentParser) -> None:
    from hotbed.train.hot_rows import pack_by_popularity

    parser.add_argument("recipe", type=str, help="Recipe: names the data, and says what a row of each table takes.")
    parser.add_argument("out", type=str, help="Dataset directory to make.")
    parser.add_argument("--data", type=str | None, help="Another dataset than the recipe's.")
    parser.add_function_arguments(pack_by_popularity, skip={"recipe", "out", "console"})
    add_json(parser)


def _pack(parsed: Namespace) -> None:
    from hotbed.train.hot_rows import pack_by_popularity, print_packed, recipe_in

    options = parsed.as_dict()
    file, data, out, json = (options.pop(name) for name in ("recipe", "data", "out", "json"))
    found = pack_by_popularity(
        recipe_in(local("RECIPE", file), data), local("OUT", out), console(stderr=True), **options
    )
    print_packed(console(), found)
    write_json(json, found)


def _add_eval(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=str, required=True, help="Checkpoint directory, or a run's directory.")
    parser.add_argument("--split", type=str, default="test", help="Split of the data.")
    parser.add_argument("--data", type=str | None, help="Other data of the same source; default: that of the recipe.")
    add_json(parser)


def _eval(parsed: Namespace) -> None:
    from hotbed.train.report import print_metrics
    from hotbed.train.run import evaluate_checkpoint

    checkpoint, metrics = evaluate_checkpoint(location(parsed.checkpoint), parsed.split, parsed.data)
    values = metrics.to_dict()
    print_metrics(console(), f"{checkpoint}: {parsed.split}, {metrics.samples:,} samples", values)
    write_json(parsed.json, {"checkpoint": str(checkpoint), parsed.split: values})


def _add_inspect(parser: ArgumentParser) -> None:
    from hotbed.train.skew import inspect_skew

    parser.add_argument(
        "path", type=str, help="Dataset, Parquet file or folder, run, checkpoint; or --skew of a recipe."
    )
    parser.add_argument("--skew", action="store_true", help="Count how often each row is looked up.")
    parser.add_function_arguments(inspect_skew, skip={"path", "console"})
    add_json(parser)


def _inspect(parsed: Namespace) -> None:
    options = parsed.as_dict()
    path, skew, json = location(options.pop("path")), options.pop("skew"), options.pop("json")
    if skew:
        from hotbed.train.skew import inspect_skew, print_skew

        found = inspect_skew(path, console(stderr=True), **options)
        print_skew(console(), found)
    else:
        from hotbed.train.describe import describe, print_description
        from hotbed.train.skew import SKEW_DEFAULTS

        for name, default in SKEW_DEFAULTS.items():
            if options[name] != default:
                raise RecipeError(f"--{name} goes with --skew; add --skew, or leave --{name} out")
        found = describe(path)
        print_description(console(), found)
    write_json(json, found)


def _add_bench(what: str, parser: ArgumentParser) -> None:
    from hotbed.bench.options import OPTIONS

    parser.add_class_arguments(OPTIONS[what], instantiate=False)
    add_json(parser)


def _bench(what: str, parsed: Namespace) -> None:
    from hotbed.bench.run import bench

    options = parsed.as_dict()
    write_json(options.pop("json"), bench(what, options, console(), console(stderr=True)))


COMMANDS: Mapping[str, Command] = {
    "demo": Command("Raw log to tested model: prepare, train, test.", "hotbed demo [DATA] [options]", _add_demo, _demo),
    "init": Command("Draft a recipe for a Parquet dataset.", "hotbed init PATH [options]", _add_init, _init),
    "prepare": Command(
        "Turn raw Criteo logs into a dataset.", "hotbed prepare RAW … OUT [options]", _add_prepare, _prepare
    ),
    "pack": Command(
        "Choose hot rows, and split a dataset into hot and cold samples.",
        "hotbed pack RECIPE.yaml OUT --budget BYTES [options]",
        _add_pack,
        _pack,
    ),
    "train": Command("Train and test by a recipe.", "hotbed train RECIPE.yaml [--key value …]", add_recipe, _train),
    "eval": Command("Evaluate a checkpoint.", "hotbed eval --checkpoint DIR [options]", _add_eval, _eval),
    "inspect": Command(
        "Show what a dataset, run or checkpoint holds.", "hotbed inspect PATH [options]", _add_inspect, _inspect
    ),
    "checkpoint inspect": Command(
        "Show what a checkpoint holds.",
        "hotbed checkpoint inspect PATH [options]",
        cli_checkpoint.add_inspect,
        cli_checkpoint.inspect_checkpoint,
    ),
    "checkpoint verify": Command(
        "Compare all of a checkpoint with its hashes.",
        "hotbed checkpoint verify PATH [options]",
        cli_checkpoint.add_verify,
        cli_checkpoint.verify,
    ),
    "checkpoint convert": Command(
        "Convert from and to other libraries, dtypes and forms.",
        "hotbed checkpoint convert SOURCE TARGET [options]",
        cli_checkpoint.add_convert,
        cli_checkpoint.convert,
    ),
    **{
        f"bench {what}": Command(
            text, f"hotbed bench {what} [options]", partial(_add_bench, what), partial(_bench, what)
        )
        for what, text in {"ops": "Measure every kernel.", "step": "Measure training steps, part by part."}.items()
    },
}
