"""Provide what all commands need: parsers, recipes with options that override them, ``--json``, and a console."""

from __future__ import annotations

import re
import tempfile
from argparse import _SubParsersAction
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jsonargparse import ArgumentParser, Namespace, get_loader, set_parsing_settings
from typing_extensions import override

from hotbed.config import (
    DataRecipe,
    HotRecipe,
    InitRecipe,
    MemoryRecipe,
    ParallelRecipe,
    Recipe,
    ScheduleRecipe,
    TrainRecipe,
    check_keys,
    check_trust,
    import_from,
)
from hotbed.errors import RecipeError, did_you_mean
from hotbed.files import json_text, read_text, read_yaml, yaml_text
from hotbed.locations import location

if TYPE_CHECKING:
    from rich.console import Console

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_NO_WIDTH = 1 << 20
"""Columns of a pipe or file."""
_COMPONENTS = ("model", "dense_optimizer", "sparse_optimizer")
_NAMED = {
    "tasks": "How labels are trained: .LABEL.loss has a loss's class_path, .LABEL.weight its factor.",
    "metrics": "More metrics: .NAME.class_path a class of torchmetrics, torcheval or your own, .NAME.init_args.",
    "callbacks": "What else is to happen: .NAME.class_path a hotbed.Callback, .NAME.init_args.",
    "dense_optimizer_groups": "Optimizers of some parameters: .GROUP.parameters has patterns of names, "
    ".GROUP.optimizer the class.",
    "sparse_optimizer_groups": "Optimizers of some tables: .GROUP.tables has patterns of names, "
    ".GROUP.optimizer the class.",
}
"""Mappings of names that users choose to sections, each with its help."""


class Parser(ArgumentParser):
    """A parser that adds its arguments when it is asked to parse, and whose errors are `RecipeError`."""

    def __init__(self, add_arguments: Callable[[Parser], None] | None = None, **options: Any) -> None:
        # Errors have to be raised, not printed, to be explained; environment variables are no source of settings.
        settings: dict[str, Any] = {"exit_on_error": False, "default_env": False}
        super().__init__(**settings | options)
        self._add_arguments = add_arguments
        self.elsewhere: dict[str, str] = {}
        """What to do in the place of options that people give and the command has not."""

    def fill(self) -> None:
        """Add the arguments, if they are not there yet."""
        add, self._add_arguments = self._add_arguments, None
        if add is not None:
            add(self)

    @override
    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Namespace:
        """Parse arguments; of a command, those after its name."""
        self.fill()
        return super().parse_args(args, *others, **options)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `RecipeError`: what was given, what it must be, and the closest that there is."""
        raise RecipeError(self._explained(message)) from None

    def add_commands(self, parsers: Mapping[str, Parser]) -> None:
        """Add commands by name, whose help is what their parsers are described as."""
        commands = self.add_subcommands(dest="command", title="commands", description="", prog=self.words)
        for name, parser in parsers.items():
            commands.add_subcommand(name, parser, help=parser.description)

    @property
    def words(self) -> str:
        """The program and the command: what is typed before the arguments."""
        return self.prog.replace(" [options]", "")

    @property
    def commands(self) -> dict[str, Parser]:
        """Parsers of its commands."""
        return {
            name: parser
            for action in self._actions
            if isinstance(action, _SubParsersAction)
            for name, parser in action.choices.items()
        }

    def _explained(self, message: str) -> str:
        if unknown := re.match(r"[Uu]nrecognized arguments: ([^\s=]+)", message):
            known = [option for action in self._actions for option in action.option_strings]
            if unknown[1] in self.elsewhere:
                return f"{unknown[1]} is no argument of {self.words}; {self.elsewhere[unknown[1]]}"
            return f"unknown argument {unknown[1]}{did_you_mean(unknown[1], known)}"
        if unknown := re.search(r"invalid choice: '(.*?)' \(choose from", message):
            above = self.words.split()[1:]
            name, *names = (" ".join([*above, name]) for name in (unknown[1], *self.commands))
            return f"there is no command '{name}'; there are {', '.join(names)}{did_you_mean(name, names)}"
        if unread := re.search(r'Parser key "([^"]+)": Unable to load config "(.*?)"', message):
            return f"{self._own_key(unread[1])} is {unread[2]!r}, must be a mapping, or set its keys one by one"
        if missing := re.match("the following arguments are required: (.*)", message):
            return f"these arguments are required: {', '.join(map(self._own_key, missing[1].split(', ')))}"
        key = re.search(r'Parser key "([^"]+)"', message)
        value = re.search(r"(?:Given value|Got value): (.*)", message)
        types = re.findall(r"Expected an? (.+?)(?:\. Got value: .*)?$", message, flags=re.MULTILINE)
        if not (key and value and types):
            return message
        names = [re.sub(r"<class '(?:NoneType|(\w+))'>", lambda m: m[1] or "null", t) for t in types]
        names = [n.removeprefix("typing.Literal").strip("[]") if "Literal" in n else n for n in names]
        names = sorted(dict.fromkeys(names), key=lambda name: name == "null")
        return f"{self._own_key(key[1])} is {value[1]!r}, must be {' or '.join(names)}"

    def _own_key(self, key: str) -> str:
        """A key without the commands that it belongs to."""
        command, _, rest = key.partition(".")
        return self.commands[command]._own_key(rest) if rest and command in self.commands else key


class RecipeParser(Parser):
    """A parser of a recipe's file, the options that override it, and more.

    The recipe is an argument of its own, in any place, and all options override it, in any place: jsonargparse reads a
    file only from an option, and lets it override what stands before it.
    """

    @override
    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Namespace:
        """Parse arguments after the command's name."""
        self.fill()
        rest, deep = split_deep(args or ())
        rest, recipes = split_recipes(rest, [o for a in self._actions if a.nargs == 0 for o in a.option_strings])
        rest = _with_paths(rest)
        with checked_copies(recipes) as files:
            parsed = super().parse_args([f"--recipe={file}" for file in files] + rest, *others, **options)
        for key, text in deep:
            self._set_deep(parsed, key, text)
        if parsed.trust_recipe:
            for recipe in recipes:
                if isinstance(place := location(recipe), Path):
                    import_from(place.parent)
        return parsed

    def _set_deep(self, parsed: Namespace, key: str, text: str) -> None:
        component, _, path = key.partition(".init_args.")
        name = f"{component}.init_args"
        if (group := key.partition("."))[0] in (*_NAMED, "retrieval"):
            name, _, path = group
        if f"--{name}" not in self._option_string_actions:
            self.error(f"unrecognized arguments: --{key}")
        *parents, last = path.split(".")
        values = parsed[name] = deepcopy(parsed[name] or {})  # which may be the default of all parsers
        for parent in parents:
            name = f"{name}.{parent}"
            values = values.setdefault(parent, {})
            if not isinstance(values, dict):
                raise RecipeError(f"--{key}: {name} is {values!r}, which has no '{last}' to set")
        values[last] = get_loader("yaml")(text)


def add_recipe(parser: ArgumentParser) -> None:
    """Add a recipe's file and the options that override it."""
    parser.add_argument("--recipe", action="config", help="Recipe to start from; or just name it.")
    parser.add_argument("--name", type=str | None, help="Name of the run's directory.")
    _add_component(parser, "data.source", "hotbed.data.SplitBinarySource")
    parser.add_class_arguments(DataRecipe, "data", skip={"source", "dynamic"}, instantiate=False)
    parser.add_argument("--data.dynamic", type=dict, default={}, help="By table, rows for ids as they come.")
    for key in _COMPONENTS:
        _add_component(parser, key)
    for key, text in _NAMED.items():
        # Of the type dict[str, Any] jsonargparse would fill in what classes that are named in it take.
        parser.add_argument(f"--{key}", type=dict, default={}, help=text)
    parser.add_argument("--retrieval", type=dict | None, help="Find items among all: .sampled, .k, … (docs/models.md).")
    parser.add_class_arguments(ScheduleRecipe, "schedule", instantiate=False)
    parser.add_class_arguments(TrainRecipe, "train", instantiate=False)
    parser.add_class_arguments(InitRecipe, "init", instantiate=False)
    parser.add_class_arguments(ParallelRecipe, "parallel", instantiate=False)
    parser.add_class_arguments(MemoryRecipe, "memory", instantiate=False)
    parser.add_class_arguments(HotRecipe, "hot", instantiate=False)
    parser.add_argument("--plan", type=str | None, help="Short for --parallel.plan: a sharding scheme or FILE.")
    parser.add_argument("--init_from", type=str | None, help="Short for --init.checkpoint: what fits is taken from it.")
    parser.add_argument(
        "--trust_recipe",
        type=bool,
        default=True,
        help="Whether it may name classes of others than hotbed and torch.optim; importing them runs their code.",
    )


def _add_component(parser: ArgumentParser, key: str, default: str | None = None) -> None:
    parser.add_argument(f"--{key}.class_path", type=str | None, default=default, help="Import path of the class.")
    parser.add_argument(f"--{key}.init_args", type=dict, default={}, help="Its arguments; .NAME sets one.")


def recipe_of(values: dict[str, Any]) -> Recipe:
    """The recipe that parsed options ask for; a `RecipeError` says what cannot be."""
    values.pop("recipe")
    if (plan := values.pop("plan", None)) is not None:
        values["parallel"]["plan"] = plan
    if (checkpoint := values.pop("init_from", None)) is not None:
        values["init"]["checkpoint"] = checkpoint
    for parent, key in ((values["data"], "source"), *((values, key) for key in _COMPONENTS)):
        if (parent[key] or {}).get("class_path", "") is None:
            del parent[key]["class_path"]
    if values["name"] is None:
        del values["name"]
    trusted = values.pop("trust_recipe")
    recipe = Recipe.from_dict(values)
    if not trusted:
        check_trust(recipe, "the given file", trusted=False, say_so="leave out --trust_recipe false")
    return recipe


def split_recipes(args: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments without recipes, and the recipes: ``--recipe FILE``, and the first argument that is no option's value.

    ``flags`` are the options that take no value.
    """
    rest: list[str] = []
    recipes: list[str] = []
    positional = False
    remaining = iter(args)
    for arg in remaining:
        if not arg.startswith("-"):
            (rest if positional else recipes).append(arg)
            positional = True
        elif arg == "--recipe":
            recipes.append(_value_of(arg, remaining))
        elif arg.startswith("--recipe="):
            recipes.append(arg.removeprefix("--recipe="))
        else:
            rest.append(arg)
            if "=" not in arg and arg not in flags:
                rest += [value] if (value := next(remaining, None)) is not None else []
    return rest, recipes


def _with_paths(args: Sequence[str]) -> list[str]:
    """Take ``--data PATH`` for ``--data.path PATH``; mappings stay what they are."""
    full = list(args)
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        value = value if equals else "".join(args[i + 1 : i + 2])
        if name == "--data" and not (value.startswith("{") and value.endswith("}")):
            full[i] = f"--data.path{equals}{value if equals else ''}"
    return full


@contextmanager
def checked_copies(recipes: Sequence[str]) -> Generator[list[str]]:
    """Check keys of recipes, and give them as files to be read once more.

    Of a pipe, as ``<(…)`` is one, and of a URI that is a copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = list[str]()
        for number, recipe in enumerate(recipes):
            path, copy = location(recipe), Path(folder) / f"{number}.yaml"
            if isinstance(path, Path) and (path.is_fifo() or path.is_char_device()):
                copy.write_text(read_text(path), encoding="utf-8")
                path = copy
            values = read_yaml(path) if isinstance(path, Path) else _remote_yaml(path)
            check_keys(values, complete=False)
            if isinstance(path, str):
                copy.write_text(yaml_text(values), encoding="utf-8")
                path = copy
            files.append(str(path))
        yield files


def _remote_yaml(uri: str) -> Any:
    from hotbed.checkpoint.single_files import read_yaml  # with torch, which parsing alone does not need

    return read_yaml(uri)


def _value_of(option: str, remaining: Iterator[str]) -> str:
    value = next(remaining, None)
    if value is None:
        raise RecipeError(f"argument {option} needs a value")
    return value


# What lies within init_args is set here: jsonargparse would replace all of `schema` by {group: user}, and of the type
# dict[str, Any] it would import every class that a recipe's init_args name, before anybody has checked them.
_DEEP = re.compile(
    rf"--((?:\w+\.)+init_args\.[\w.]+|(?:{'|'.join(_NAMED)})\.\w+\.[\w.]+|retrieval\.[\w.]+)(?:=(.*))?", re.DOTALL
)


def split_deep(args: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Arguments without ``--X.init_args.lr 0.1`` and the like, and those as keys and texts."""
    rest: list[str] = []
    deep: list[tuple[str, str]] = []
    remaining = iter(args)
    for arg in remaining:
        if match := _DEEP.fullmatch(arg):
            deep.append((match[1], _value_of(arg, remaining) if match[2] is None else match[2]))
        else:
            rest.append(arg)
    return rest, deep


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
        from hotbed.checkpoint.single_files import write_text

        write_text(path, json_text(value))


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


def add_trust(parser: ArgumentParser) -> None:
    """The option of commands that build what the recipe in a checkpoint or a run names."""
    parser.add_argument(
        "--trust_recipe",
        action="store_true",
        help="Import what the stored recipe names beside hotbed and torch.optim, which runs its code: installed "
        "packages, and modules in the current directory.",
    )


def add_json(parser: ArgumentParser) -> None:
    """The option that every command with figures has."""
    parser.add_argument("--json", type=str | None, help="File to write the figures to, as JSON.")
