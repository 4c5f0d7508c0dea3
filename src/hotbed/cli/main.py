"""Run the ``hotbed`` program: dispatch to a command and map errors to exit statuses.

A command's file is imported only when the command runs, so help and the version do not wait for torch.
Results go to stdout. Progress and errors go to stderr.
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
from hotbed.machine import fit_threads, keep_heap, release, share_heap

COMMANDS = {
    "demo": "Prepare a raw log, train a small model on it and test it.",
    "init": "Draft a recipe for Parquet, CSV or TSV files.",
    "prepare": "Turn raw logs into a training dataset.",
    "pack": "Choose hot rows, and split a dataset into hot and cold samples.",
    "plan": "Find the fastest sharding plan for this machine or for a hardware profile.",
    "train": "Train and test a model described by a recipe.",
    "daily": "Train a model day by day, and evaluate it on each day first.",
    "eval": "Evaluate a checkpoint.",
    "predict": "Score new rows with a trained model.",
    "export": "Export a trained model for servers, or only its changes.",
    "serve": "Serve exported models over HTTP.",
    "inspect": "Describe data, a run or a checkpoint; compare days, check data against a recipe, measure skew.",
    "checkpoint": "Inspect, verify or convert a checkpoint.",
    "doctor": "Check what hotbed needs on this machine, or measure the machine for the planner.",
    "warm-up": "Compile the CPU kernels before the first step, e.g. in a container image.",
    "completion": "Print a shell completion script.",
}
"""Help by command. Each command is a file of `hotbed.cli`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 0 after success, 2 after an error, and 130 or 143 after a signal. An error is one message on stderr.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    format_before, warnings.formatwarning = warnings.formatwarning, _format_warning
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
        return _print_error(error, f"rank {os.environ.get('RANK', '?')}: " if several else "")
    except (MemoryError, RuntimeError) as error:
        from hotbed.store.memory import why_out_of_memory

        reason = None if debug else why_out_of_memory(error)
        if reason is None:
            raise
        return _print_error(reason, f"rank {os.environ['RANK']}: " if "RANK" in os.environ else "")
    finally:
        warnings.formatwarning = format_before


def _print_error(error: object, rank: str) -> int:
    print(f"hotbed: error: {rank}{error}", file=sys.stderr)
    return 2


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"hotbed: warning: {filename}:{lineno}: {category.__name__}: {message}\n"


def make_parser() -> Parser:
    """Build the program's parser. A command adds its arguments only when it is parsed."""
    epilog = "hotbed COMMAND --help lists a command's arguments; --debug prints tracebacks."
    parser = Parser(prog="hotbed", usage="hotbed COMMAND …", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"hotbed {release()}")
    commands = {name: Command(text, partial(_add_arguments, name)) for name, text in COMMANDS.items()}
    parser.add_commands("command", commands)
    return parser


def _run(args: list[str]) -> int:
    if args in ([], ["checkpoint"]):  # both need the name of a command
        args.append("--help")
    try:
        parsed = make_parser().parse_args(args)
        command = vars(parsed).pop("command")
        if getattr(parsed, "json", None) is not None:
            check_json(parsed.json)
        if command != "doctor":  # `doctor` also works where torch, which this imports, is broken
            fit_threads()
        _import_command(command).run(parsed)
    except SystemExit as done:  # after help, the version or --print_config
        return int(done.code or 0)
    return 0


def _add_arguments(command: str, parser: Parser) -> None:
    _import_command(command).add_arguments(parser)


def _import_command(name: str) -> ModuleType:
    return import_module(f"hotbed.cli.{name.replace('-', '_')}")
