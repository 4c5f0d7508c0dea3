"""Print a shell completion script for commands, options and their values: ``hotbed completion``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Literal

from hotbed.checks import annotation_at, choices_of
from hotbed.cli.arguments import Override, Parser
from hotbed.config import Recipe
from hotbed.errors import RecipeError

_PATHS = {
    *("checkpoint", "data", "init_from", "json", "out", "path", "raw", "recipe", "resume", "source", "target"),
    *("vocabulary", "data.path", "hot.rows", "init.checkpoint", "memory.directory", "memory.skew", "parallel.plan"),
    *("plan", "train.checkpoint_dir"),
}
"""Arguments that complete to file names. Their types do not show this, because most of them may also be URIs."""


def add_arguments(parser: Parser) -> None:
    """Add the argument SHELL."""
    parser.usage = "hotbed completion SHELL"
    parser.add_argument("shell", type=Literal["bash", "zsh", "tcsh"], help="Shell that reads the script, e.g. bash.")


def run(parsed: Namespace) -> None:
    """Print the script. Completing a command line with it does not start Python."""
    from hotbed.cli.main import make_parser

    try:
        import shtab  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        fix = "Run pip install 'hotbed[completion]'"
        raise RecipeError(f"hotbed completion needs shtab, which cannot be imported ({error}). {fix}") from None
    parser = make_parser()
    _complete_paths(parser, shtab.FILE)
    print(shtab.complete(parser, parsed.shell))


def _complete_paths(parser: Parser, file: Mapping[Any, Any]) -> None:
    """Add all arguments of a parser and of its commands, and let paths complete to file names."""
    parser.fill()
    parser.document()
    if parser.reads_recipe:
        parser.add_argument("RECIPE")  # `Parser` has no such argument: it takes the recipe from unknown arguments
    for action in parser._actions:
        if isinstance(action, Override):
            action.choices = choices_of(annotation_at(Recipe, action.dest)) or None
        if action.dest.lower() in _PATHS and action.nargs != 0:
            action.complete = file  # pyright: ignore[reportAttributeAccessIssue]
    for command in parser.commands.values():
        _complete_paths(command, file)
