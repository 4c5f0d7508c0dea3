"""Parse the arguments of commands: annotated options, recipes with overrides such as ``--data.dim 32``, and ``--json``.

The type of an option is an annotation, which `hotbed.checks` checks. The help of an option comes from a docstring.
"""

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


@dataclass(frozen=True)
class Command:
    """A command's help, and the function that adds its arguments to its parser."""

    help: str
    add_arguments: Callable[[Parser], None]
    usage: str | None = None


class Parser(ArgumentParser):
    """A parser that adds its arguments only when it is used, and raises `RecipeError`."""

    def __init__(self, add_arguments: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False, **options)
        self._add_arguments = add_arguments
        self.elsewhere: dict[
            str, str
        ] = {}  # advice by option of a different program, e.g. --nproc_per_node of torchrun
        self.reads_recipe = False  # whether the first argument is a recipe, and options override its keys

    def fill(self) -> None:
        """Add the arguments, on the first call only."""
        add, self._add_arguments = self._add_arguments, None
        if add is not None:
            add(self)

    @override
    def add_argument(self, *names: str, **options: Any) -> Action:
        """Add an argument. Its ``type`` is an annotation that parses and checks the text (default: ``str``)."""
        annotation = options.pop("type", str)
        if options.get("action", "append") == "append":
            options["type"] = partial(_parse_argument, annotation=annotation)
            if get_origin(annotation) is Literal:
                options["choices"] = get_args(annotation)
        action = super().add_argument(*names, **options)
        if action.help and action.default is not False and (default := _format_default(action.default)):
            note = f"(default: {default})".replace("%", "%%")
            # One pair of parentheses: "Rows. (type: an integer; default: 4)"
            is_typed = action.help.endswith(")") and "(type: " in action.help
            action.help = f"{action.help[:-1]}; {note[1:]}" if is_typed else f"{action.help.removesuffix('.')} {note}."
        return action

    def add_commands(self, dest: str, commands: Mapping[str, Command]) -> None:
        """Add commands. The name of the chosen command is parsed as ``dest``."""
        made = self.add_subparsers(dest=dest, title="commands", metavar="COMMAND [options]", prog=self.prog)
        for name, of in commands.items():
            made.add_parser(name, help=of.help, description=of.help, usage=of.usage, add_arguments=of.add_arguments)

    @property
    def commands(self) -> Mapping[str, Parser]:
        """Parsers of the commands."""
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return cast("Mapping[str, Parser]", found[0]) if found else {}

    @override
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse arguments. A command parses the arguments after its name."""
        self.fill()
        given = cast("Sequence[str]", args)
        if self.commands and given and not given[0].startswith("-") and given[0] not in self.commands:
            name, *names = (" ".join([*self.prog.split()[1:], name]) for name in (given[0], *self.commands))
            raise RecipeError(f"unknown command '{name}', expected {', '.join(names)}{did_you_mean(name, names)}")
        if self.reads_recipe:  # sections and entries of mappings are also options, which help does not list
            for option in dict.fromkeys(arg.partition("=")[0] for arg in given if arg.startswith("--")):
                if option not in self._option_string_actions and annotation_at(Recipe, option[2:]) is not None:
                    self.add_argument(option, dest=option[2:], action=Override, help=SUPPRESS)
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
                raise RecipeError(f"{option} is not an option of {self.prog}. {self.elsewhere[option]}")
            known, above = list(self._option_string_actions), option[2:].rpartition(".")[0]
            if self.reads_recipe and above and (section := section_of(annotation_at(Recipe, above))) is not None:
                known += [f"--{above}.{name}" for name in annotations_of(section)]
            raise RecipeError(f"unknown argument {option}{did_you_mean(option, known)}")
        return parsed, rest

    @override
    def error(self, message: str) -> NoReturn:
        """Raise `RecipeError`."""
        raise RecipeError(message)

    @override
    def format_help(self) -> str:
        """Return the help, including the documentation of the recipe's keys."""
        self.document()
        return super().format_help()

    def document(self) -> None:
        """Set the help of options that override keys of the recipe."""
        may_differ = keys_that_may_differ(Recipe)
        for key, annotation, field, of in settings(Recipe) if self.reads_recipe else ():
            action = self._option_string_actions.get(f"--{key}")
            if action is not None and action.help is None:
                default = field.default if field.default_factory is MISSING else field.default_factory()
                shown = "null" if default is None else _format_default(default)
                notes = f"type: {describe(annotation)}{f'; default: {shown}' if shown else ''}"
                notes += "; a resumed run may change it" if is_within(key, may_differ) else ""
                action.help = f"{documentation(of).get(field.name, '')} ({notes})".strip().replace("%", "%%")


def _format_default(value: object) -> str:
    """Return a default as a user would type it, or nothing if it is empty."""
    if value is None or value is MISSING or value is SUPPRESS or is_dataclass(value):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, cast("Sequence[object]", value)))
    return str(value) if value != {} else ""


def _parse_value(text: str, annotation: Any) -> Any:
    """Parse an option's value as YAML, or keep the text if the annotation allows text."""
    if annotation is str:
        return text
    is_text = get_origin(annotation) in (Union, UnionType) and str in get_args(annotation)
    if not text.strip() and not is_text and annotation is not Any:
        raise TextError("is empty. Write null for no value")
    try:
        value = parse_yaml(text)
    except TextError:
        if is_text:
            return text
        raise
    is_plain = is_text and (not text or isinstance(value, str) or problem("", value, annotation) is not None)
    return text if is_plain else as_declared(value, annotation)


def _parse_argument(text: str, annotation: Any) -> Any:
    try:
        value = _parse_value(text, annotation)
    except TextError as error:
        raise ArgumentTypeError(f"{text[:100]!r} {error}") from None
    if found := problem("", value, annotation):
        raise ArgumentTypeError(found)
    return value


def add_parameters(parser: Parser, of: Callable[..., Any], prefix: str = "", skip: Collection[str] = ()) -> None:
    """Add an option for each parameter of a function or dataclass, with its documentation as help."""
    docs, hints = documentation(of), get_type_hints(of, include_extras=True)
    factories = {field.name: field.default_factory for field in fields(of)} if is_dataclass(of) else {}
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
    """Return the documentation by parameter, from numpydoc sections and from docstrings of dataclass fields."""
    found: dict[str, str] = {}
    for cls in reversed(of.__mro__ if inspect.isclass(of) else ()):
        for node, after in pairwise(_read_classes(cls.__module__).get(cls.__name__, [])):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(node.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    for names, text in re.findall(r"^(\w[\w, ]*)\n((?:    .*\n?)+)", inspect.getdoc(of) or "", re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


@cache
def _read_classes(module: str) -> dict[str, list[ast.stmt]]:
    if not module.startswith(("hotbed.", "benchmarks.")):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


class Override(Action):
    """Record an option that sets a key of the recipe. Of two options for one key, the later option applies."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        options["default"] = SUPPRESS
        super().__init__(option_strings, dest, **options)

    @override
    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.overrides = [*namespace.overrides, (self.dest, values)]


def add_recipe(parser: Parser) -> None:
    """Add the recipe file, and an option for each key of the recipe."""
    parser.reads_recipe = True
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "--recipe", action="append", default=[], help="Recipe file. It can also be passed as the first argument."
    )
    parser.add_argument("--print_config", action="store_true", help="Print the recipe with all overrides, and exit.")
    for key, annotation, field, _ in settings(Recipe):
        if section_of(annotation) is None or get_origin(annotation) is dict:
            parser.add_argument(f"--{key}", dest=key, action=Override, metavar=field.name.upper())
    for option, key, text in (
        ("data", "data", "Short for --data.path."),
        ("plan", "parallel.plan", "Short for --parallel.plan: a sharding scheme or FILE."),
        ("init_from", "init.checkpoint", "Short for --init.checkpoint: a checkpoint to initialize the model from."),
    ):
        parser.add_argument(f"--{option}", dest=key, action=Override, metavar=option.upper(), help=text)
    text = "Whether the recipe may name classes outside hotbed and torch.optim, and so run code."
    parser.add_argument("--trust_recipe", type=bool, default=True, help=text)


def read_recipe_values(path: str | Path) -> Any:
    """Read a recipe's file, which may be a pipe or at a URI, and return its values unchecked."""
    if isinstance(at := location(str(path)), Path):
        return read_yaml(at)
    from hotbed.checkpoint import storage  # imports torch, which parsing does not need

    return storage.read_yaml_uri(at)


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe's file, and make modules in its directory importable."""
    if isinstance(at := location(str(path)), Path):
        import_from(at.parent)
    return Recipe.from_dict(read_recipe_values(path))


def set_key(values: dict[str, Any], key: str, text: str) -> None:
    """Set a dotted key, e.g. ``train.epochs``, in a recipe's values to the text of an option."""
    if key == "data" and not (text.startswith("{") and text.endswith("}")):
        key = "data.path"
    annotation = annotation_at(Recipe, key)
    try:
        value = _parse_value(text, annotation)
    except TextError as error:
        raise RecipeError(f"--{key}: got {text[:100]!r}, which {str(error).splitlines()[0]}") from None
    *parents, last = key.split(".")
    at = values
    for i, parent in enumerate(parents):
        inner = at.get(parent)
        if not isinstance(inner, dict | None):
            above = ".".join(parents[: i + 1])
            raise RecipeError(f"--{key}: got {inner!r} for {above}, expected a mapping that can have '{last}'")
        at[parent] = at = dict(inner or {})  # copied, because an alias in the file may share the mapping
    is_section = is_dataclass(annotation) and isinstance(at.get(last), dict)
    at[last] = at[last] | value if is_section and isinstance(value, dict) else value


def parse_recipe(parsed: Namespace) -> Recipe:
    """Read the recipe file, override keys by options, and return the recipe."""
    if len(parsed.recipe) > 1:
        raise RecipeError(
            f"unknown argument {parsed.recipe[1]}, after the recipe {parsed.recipe[0]}. Remove one of them"
        )
    if not parsed.recipe and not parsed.overrides:
        raise RecipeError("no recipe: got neither a file nor options. Pass a file, or draft one: hotbed init DATA")
    values = read_recipe_values(parsed.recipe[0]) if parsed.recipe else {}
    if isinstance(values, dict):
        for key, text in parsed.overrides:
            set_key(values, key, text)
    recipe = Recipe.from_dict(values)
    if not parsed.trust_recipe:
        check_trust(recipe, "the given file", trusted=False, say_so="leave out --trust_recipe false")
    elif parsed.recipe and isinstance(path := location(parsed.recipe[0]), Path):
        import_from(path.parent)
    if parsed.print_config:
        print(yaml_text(recipe.to_dict()))
        sys.exit()
    return recipe


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text literally. Lines are only wrapped on a terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, markup=False, emoji=False)
    made.width = made.width if made.is_terminal else 1 << 20
    return made


def save_json(path: str | None, value: Mapping[str, Any]) -> None:
    """Write a command's results to the file of ``--json``, or do nothing if ``path`` is None."""
    if path is not None:
        from hotbed.checkpoint.storage import write_text_uri

        write_text_uri(path, json_text(value))


def check_json(path: str, option: str = "--json") -> None:
    """Raise `RecipeError` if an option's file cannot be written. Commands call this before they start their work."""
    file = location(path)
    if isinstance(file, str):
        from hotbed.checkpoint.storage import exists

        exists(file)  # raises unless the storage can be reached
        return
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not path or file.is_dir():
        raise RecipeError(f"{option}: got {path!r}, which is a directory, expected a file")
    if reason := why_not_writable(folder):
        raise RecipeError(f"{option}: got {path!r}, but {folder} is not writable ({reason}). Pass a different file")


def why_not_writable(folder: Path) -> str | None:
    """Return the reason why no file can be created in a directory; None if files can be created."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror
    return None


def add_trust(parser: Parser) -> None:
    """Add ``--trust_recipe`` to a command that builds classes named in a stored recipe."""
    text = "Import classes outside hotbed and torch.optim that the stored recipe names, from installed packages and "
    text += "the current directory. Importing a class runs the code of its file."
    parser.add_argument("--trust_recipe", action="store_true", help=text)


def add_json(parser: Parser) -> None:
    """Add ``--json`` to a command that has results."""
    parser.add_argument("--json", type=str | None, help="JSON file for the results, e.g. out.json.")
