"""Measure kernels and training steps against the limits of this machine: ``hotbed bench ops | step``."""

from __future__ import annotations

from functools import partial

from jsonargparse import ArgumentParser, Namespace

from hotbed.commands.arguments import Parser, add_json, console, write_json

COMMANDS = {"ops": "Measure every kernel.", "step": "Measure training steps, part by part."}


def add_arguments(parser: Parser) -> None:
    """Add the commands."""
    parser.usage = "hotbed bench COMMAND …"
    parser.add_commands(
        {
            name: Parser(partial(_add_options, name), description=text, usage=f"hotbed bench {name} [options]")
            for name, text in COMMANDS.items()
        }
    )


def run(parsed: Namespace) -> None:
    """Measure, and print the figures."""
    from hotbed.bench.run import bench

    options = parsed[parsed.command].as_dict()
    write_json(options.pop("json"), bench(parsed.command, options, console(), console(stderr=True)))


def _add_options(command: str, parser: ArgumentParser) -> None:
    from hotbed.bench.options import OPTIONS

    parser.add_class_arguments(OPTIONS[command], instantiate=False)
    add_json(parser)
