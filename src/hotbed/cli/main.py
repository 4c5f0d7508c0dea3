"""Run the ``hotbed`` program: its commands, and which exit status an error has.

A command's file is imported when the command is called: help and the version are there before torch could be loaded.
Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from hotbed.cli.arguments import Command, Parser, check_json
from hotbed.errors import CommError, HotbedError, StoppedError
from hotbed.heap import keep_heap, share_heap
from hotbed.machine import fit_threads, release

COMMANDS = {
    "demo": "Raw log to tested model: prepare, train, test.",
    "init": "Draft a recipe for Parquet, CSV or TSV files.",
    "prepare": "Turn raw Criteo logs into a dataset.",
    "pack": "Choose hot rows, and split a dataset into hot and cold samples.",
    "plan": "Search for the fastest plan of a recipe's tables, on hardware that need not be here.",
    "train": "Train and test by a recipe.",
    "daily": "Train a model every day, after evaluating it on the day.",
    "eval": "Evaluate a checkpoint.",
    "predict": "Score new rows with a run's model.",
    "export": "Export a run's model for servers, or what has changed in it.",
    "serve": "Answer requests with exported models, over HTTP.",
    "inspect": "Show what data, a run or a checkpoint hold; drift between days, what training would refuse, skew.",
    "checkpoint": "Inspect, verify or convert a checkpoint.",
    "doctor": "Say what hotbed finds on this machine and what is missing; measure it for the planner.",
    "warm-up": "Compile the CPU kernels ahead of the first step, as for an image.",
    "completion": "Print a script by which a shell completes all this.",
}
"""What each command is for; `hotbed.cli` has a file of its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 2 after an error, one message on stderr, 130 or 143 after a signal."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    formatted, warnings.formatwarning = warnings.formatwarning, _format_warning
    share_heap(os.environ)
    keep_heap(os.environ)
    try:
        return _run(args)
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
    finally:
        warnings.formatwarning = formatted


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"hotbed: warning: {filename}:{lineno}: {category.__name__}: {message}\n"


def make_parser() -> Parser:
    """Make the parser of the program, whose commands add their arguments when they are called."""
    parser = Parser(
        prog="hotbed",
        usage="hotbed COMMAND …",
        epilog="hotbed COMMAND --help shows arguments; --debug shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"hotbed {release()}")
    commands = {name: Command(text, partial(_add_arguments, name)) for name, text in COMMANDS.items()}
    parser.add_commands("command", commands)
    return parser


def _run(args: list[str]) -> int:
    if args in ([], ["checkpoint"]):  # the commands that have commands of their own
        args.append("--help")
    try:
        parsed = make_parser().parse_args(args)
        command = vars(parsed).pop("command")
        if getattr(parsed, "json", None) is not None:
            check_json(parsed.json)
        if command != "doctor":  # which says what is wrong where torch cannot be imported
            fit_threads()
        _module(command).run(parsed)
    except SystemExit as done:  # it has printed help, the version or the recipe
        return int(done.code or 0)
    return 0


def _add_arguments(command: str, parser: Parser) -> None:
    _module(command).add_arguments(parser)


def _module(command: str) -> ModuleType:
    return import_module(f"hotbed.cli.{command.replace('-', '_')}")
