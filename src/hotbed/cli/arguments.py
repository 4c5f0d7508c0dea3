"""Provide what all commands need: parsers, recipes with options that override them, ``--json``, and a console."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tempfile
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import override

from hotbed.checks import (
    annotation_at,
    annotations_of,
    as_declared,
    describe,
    is_within,
    keys_that_may_differ,
    problem,
    section_of,
    settings,
)
from hotbed.config import Recipe, check_trust, import_from
from hotbed.errors import RecipeError, did_you_mean
from hotbed.files import json_text, read_yaml
from hotbed.locations import location
from hotbed.parsing import TextError, parse_yaml, yaml_text

if TYPE_CHECKING:
    from rich.console import Console

_NO_WIDTH = 1 << 20
"""Columns of a pipe or file."""


@dataclass(frozen=True)
class Command:
    """A command: what it is for, and what adds its arguments when they are parsed."""

    help: str
    add_arguments: Callable[[Parser], None]
    usage: str | None = None


class Parser(ArgumentParser):
    """A parser that adds its arguments when it is asked to parse, and whose errors are `RecipeError`."""

    def __init__(self, add_arguments: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False, **options)
        self._add_arguments = add_arguments
        self.elsewhere: dict[str, str] = {}
        """Advice by option that people give and the command does not have."""
        self.reads_recipe = False
        """Whether the first argument is a recipe, and options override its keys."""

    def fill(self) -> None:
        """Add the arguments, if they are not there yet."""
        add, self._add_arguments = self._add_arguments, None
        if add is not None:
            add(self)

    @override
    def add_argument(self, *names: str, **options: Any) -> Action:
        """Add an argument; its ``type`` is an annotation, by which its text is read and checked (default: text)."""
        annotation = options.pop("type", str)
        if options.get("action", "append") == "append":
            options["type"] = partial(_checked, annotation=annotation)
            if get_origin(annotation) is Literal:
                options["choices"] = get_args(annotation)
        action = super().add_argument(*names, **options)
        if action.help and action.default is not False and action.default not in (None, SUPPRESS, [], ""):
            action.help += f" (default: {action.default})".replace("%", "%%")
        return action

    def add_commands(self, dest: str, commands: Mapping[str, Command]) -> None:
        """Add commands; the name of the given one is parsed as ``dest``."""
        made = self.add_subparsers(dest=dest, title="commands", metavar="COMMAND [options]", prog=self.prog)
        for name, of in commands.items():
            made.add_parser(name, help=of.help, description=of.help, usage=of.usage, add_arguments=of.add_arguments)

    @property
    def commands(self) -> Mapping[str, Parser]:
        """Parsers of its commands."""
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return cast("Mapping[str, Parser]", found[0]) if found else {}

    @override
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; of a command, those after its name."""
        self.fill()
        given = cast("Sequence[str]", args)
        if self.commands and given and not given[0].startswith("-") and given[0] not in self.commands:
            name, *names = (" ".join([*self.prog.split()[1:], name]) for name in (given[0], *self.commands))
            raise RecipeError(f"there is no command '{name}'; there are {', '.join(names)}{did_you_mean(name, names)}")
        if self.reads_recipe:
            self._add_keys(given)
        try:
            parsed, rest = super().parse_known_args(given, namespace)
        except ArgumentError as error:
            is_value = isinstance(error.__context__, ArgumentTypeError)
            raise RecipeError(f"{error.argument_name}: {error.message}" if is_value else str(error)) from None
        if self.reads_recipe and rest and not rest[0].startswith("-") and not parsed.recipe:
            parsed.recipe = [rest.pop(0)]
        if rest:
            option = rest[0].partition("=")[0]
            if option in self.elsewhere:
                raise RecipeError(f"{option} is no argument of {self.prog}; {self.elsewhere[option]}")
            known, above = list(self._option_string_actions), option[2:].rpartition(".")[0]
            if self.reads_recipe and above and (section := section_of(annotation_at(Recipe, above))) is not None:
                known += [f"--{above}.{name}" for name in annotations_of(section)]
            raise RecipeError(f"unknown argument {option}{did_you_mean(option, known)}")
        return parsed, rest

    def _add_keys(self, args: Sequence[str]) -> None:
        """Add options for keys that help does not list: whole sections, and entries of mappings."""
        for option in dict.fromkeys(arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if option not in self._option_string_actions and annotation_at(Recipe, option[2:]) is not None:
                self.add_argument(option, dest=option[2:], action=Override, help=SUPPRESS)

    @override
    def error(self, message: str) -> NoReturn:
        """Raise `RecipeError`."""
        raise RecipeError(message)

    @override
    def format_help(self) -> str:
        """Return the help, for which keys of the recipe are documented now."""
        self.document()
        return super().format_help()

    def document(self) -> None:
        """Set the help of options that override keys of the recipe."""
        may_differ = keys_that_may_differ(Recipe)
        for key, annotation, field, of in settings(Recipe) if self.reads_recipe else ():
            action = self._option_string_actions.get(f"--{key}")
            if action is not None and action.help is None:
                default = field.default if field.default_factory is MISSING else field.default_factory()
                notes = [f"type: {describe(annotation)}"]
                notes += [] if default in (MISSING, {}, []) else [f"default: {default}"]
                notes += ["a resumed run may change it"] if is_within(key, may_differ) else []
                text = f"{documentation(of).get(field.name, '')} ({'; '.join(notes)})"
                action.help = text.strip().replace("%", "%%")


def _read(text: str, annotation: Any) -> Any:
    """Read the value of an option as in a recipe's file; text stays as it is where the annotation is of text."""
    if annotation is str:
        return text
    is_text = get_origin(annotation) in (Union, UnionType) and str in get_args(annotation)
    if not text.strip() and not is_text and annotation is not Any:
        raise TextError("is empty; write null for no value")
    try:
        value = parse_yaml(text)
    except TextError:
        if is_text:
            return text
        raise
    is_plain = is_text and (not text or isinstance(value, str) or problem("", value, annotation) is not None)
    return text if is_plain else as_declared(value, annotation)


def _checked(text: str, annotation: Any) -> Any:
    try:
        value = _read(text, annotation)
    except TextError as error:
        raise ArgumentTypeError(f"{text[:100]!r} {error}") from None
    if found := problem("", value, annotation):
        raise ArgumentTypeError(found)
    return value


def add_parameters(parser: Parser, of: Callable[..., Any], prefix: str = "", skip: Collection[str] = ()) -> None:
    """Add an option for each parameter of a function or dataclass, with its documentation as help."""
    docs, hints = documentation(of), get_type_hints(of)
    factories = {f.name: f.default_factory for f in (fields(of) if is_dataclass(of) else ())}
    for name, parameter in inspect.signature(cast("Callable[..., Any]", of)).parameters.items():
        if name not in skip:
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            if (factory := factories.get(name, MISSING)) is not MISSING:
                default = factory()
            text = f"{docs.get(name, '')} (type: {describe(hints[name])})".replace("%", "%%")
            parser.add_argument(f"--{prefix}{name}", type=hints[name], default=default, required=required, help=text)


@cache
def documentation(of: Any) -> dict[str, str]:
    """Return the documentation of parameters: from sections of numpydoc, and docstrings of a dataclass's fields."""
    found: dict[str, str] = {}
    for cls in reversed(of.__mro__ if inspect.isclass(of) else ()):
        body = _classes_of(cls.__module__).get(cls.__name__, [])
        for node, after in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(node.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    for names, text in re.findall(r"^(\w[\w, ]*)\n((?:    .*\n?)+)", inspect.getdoc(of) or "", re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


@cache
def _classes_of(module: str) -> dict[str, list[ast.stmt]]:
    if not module.startswith(("hotbed.", "benchmarks.")):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


# -- recipes -------------------------------------------------------------------------------------------------------


class Override(Action):
    """Note that an option sets a key of the recipe, in the order of the options."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        options["default"] = SUPPRESS
        super().__init__(option_strings, dest, **options)

    @override
    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.overrides = [*namespace.overrides, (self.dest, values)]


def add_recipe(parser: Parser) -> None:
    """Add a recipe's file and the options that override it."""
    parser.reads_recipe = True
    parser.set_defaults(overrides=[])
    parser.add_argument("--recipe", action="append", default=[], help="Recipe to start from; or just name it.")
    parser.add_argument("--print_config", action="store_true", help="Print the recipe with all overrides, and exit.")
    for key, annotation, field, _ in settings(Recipe):
        if section_of(annotation) is None or get_origin(annotation) is dict:
            parser.add_argument(f"--{key}", dest=key, action=Override, metavar=field.name.upper())
    for option, key, text in (
        ("data", "data", "Short for --data.path."),
        ("plan", "parallel.plan", "Short for --parallel.plan: a sharding scheme or FILE."),
        ("init_from", "init.checkpoint", "Short for --init.checkpoint: what fits is taken from it."),
    ):
        parser.add_argument(f"--{option}", dest=key, action=Override, metavar=option.upper(), help=text)
    parser.add_argument(
        "--trust_recipe",
        type=bool,
        default=True,
        help="Whether it may name classes of others than hotbed and torch.optim; importing them runs their code.",
    )


def load(path: str) -> Any:
    """Return the plain values of a recipe's file, which may be a pipe or at a URI."""
    at = location(path)
    if isinstance(at, Path):
        return read_yaml(at)
    from hotbed.checkpoint.single_files import (
        read_yaml_uri as read_remote,  # with torch, which parsing alone does not need
    )

    return read_remote(at)


def set_key(values: dict[str, Any], key: str, text: str) -> None:
    """Set a dotted key of a recipe's plain values to what the text of an option says."""
    if key == "data" and not (text.startswith("{") and text.endswith("}")):
        key = "data.path"
    annotation = annotation_at(Recipe, key)
    try:
        value = _read(text, annotation)
    except TextError as error:
        raise RecipeError(f"--{key}: got {text[:100]!r}, which {str(error).splitlines()[0]}") from None
    *parents, last = key.split(".")
    at = values
    for i, parent in enumerate(parents):
        inner = at.get(parent)
        if not isinstance(inner, dict | None):
            raise RecipeError(f"--{key}: {'.'.join(parents[: i + 1])} is {inner!r}, which has no '{last}' to set")
        at[parent] = at = dict(inner or {})  # a copy, because an alias in the file may be the same mapping
    is_section = is_dataclass(annotation) and isinstance(at.get(last), dict)
    at[last] = at[last] | value if is_section and isinstance(value, dict) else value


def recipe_of(parsed: Namespace) -> Recipe:
    """Return the recipe that parsed options ask for: its file, overridden by options, checked once."""
    if len(parsed.recipe) > 1:
        raise RecipeError(f"unknown argument {parsed.recipe[1]}; the recipe is {parsed.recipe[0]} already")
    if not parsed.recipe and not parsed.overrides:
        raise RecipeError("no recipe: got neither a file nor options. Name one, or draft one with `hotbed init DATA`")
    values = load(parsed.recipe[0]) if parsed.recipe else {}
    if isinstance(values, dict):
        for key, text in parsed.overrides:
            set_key(values, key, text)
    recipe = Recipe.from_dict(values)
    if not parsed.trust_recipe:
        check_trust(recipe, "the given file", trusted=False, say_so="leave out --trust_recipe false")
    elif parsed.recipe and isinstance(place := location(parsed.recipe[0]), Path):
        import_from(place.parent)
    if parsed.print_config:
        print(yaml_text(recipe.to_dict()))
        sys.exit()
    return recipe


# -- output --------------------------------------------------------------------------------------------------------


def console(*, stderr: bool = False) -> Console:
    """Make what commands print to; text is shown as it is, also names in brackets.

    Where this is no terminal, a line is a line, however long: other programs read paths and tables there.
    """
    from rich.console import Console

    made = Console(stderr=stderr, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = _NO_WIDTH
    return made


def write_json(path: str | None, value: Mapping[str, Any]) -> None:
    """Write the figures of a command where ``--json`` says, if it was given."""
    if path is not None:
        from hotbed.checkpoint.single_files import write_text_uri

        write_text_uri(path, json_text(value))


def check_json(path: str, option: str = "--json") -> None:
    """Raise if an option names no file that could be written, before a command does its work."""
    file = location(path)
    if isinstance(file, str):
        from hotbed.checkpoint.single_files import exists

        exists(file)  # the place can be opened, and answers
        return
    there = next(parent for parent in file.absolute().parents if parent.exists())
    if not path or file.is_dir():
        raise RecipeError(f"{option} is {path!r}, which is a directory; give a file")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise RecipeError(f"{option} is {path!r}, but no file can be written into {there} ({error.strerror})") from None


def add_trust(parser: Parser) -> None:
    """The option of commands that build what the recipe in a checkpoint or a run names."""
    parser.add_argument(
        "--trust_recipe",
        action="store_true",
        help="Import what the stored recipe names beside hotbed and torch.optim, which runs its code: installed "
        "packages, and modules in the current directory.",
    )


def add_json(parser: Parser) -> None:
    """The option that every command with figures has."""
    parser.add_argument("--json", type=str | None, help="File to write the figures to, as JSON.")
