"""Recipes on the command line: a YAML file and dotted options that override it, as one `Recipe`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace, get_loader

from hotbed.config import (
    DataRecipe,
    HotRecipe,
    InitRecipe,
    MemoryRecipe,
    ParallelRecipe,
    Recipe,
    ScheduleRecipe,
    TrainRecipe,
)
from hotbed.errors import RecipeError
from hotbed.files import local, read_text

_COMPONENTS = ("model", "dense_optimizer", "sparse_optimizer", "wide_optimizer")


def add_recipe(parser: ArgumentParser) -> None:
    """Arguments of ``hotbed train``."""
    parser.add_argument("--recipe", action="config", help="Recipe to start from; or just name it.")
    parser.add_argument("--name", type=str | None, help="Name of the run's directory.")
    _add_component(parser, "data.source", "hotbed.data.SplitBinarySource")
    parser.add_class_arguments(DataRecipe, "data", skip={"source"}, instantiate=False)
    for key in _COMPONENTS:
        _add_component(parser, key)
    parser.add_class_arguments(ScheduleRecipe, "schedule", instantiate=False)
    parser.add_class_arguments(TrainRecipe, "train", instantiate=False)
    parser.add_class_arguments(InitRecipe, "init", instantiate=False)
    parser.add_class_arguments(ParallelRecipe, "parallel", instantiate=False)
    parser.add_class_arguments(MemoryRecipe, "memory", instantiate=False)
    parser.add_class_arguments(HotRecipe, "hot", instantiate=False)
    parser.add_argument("--plan", type=str | None, help="Short for --parallel.plan: a sharding scheme or FILE.")
    parser.add_argument("--out", type=str, default="runs", help="Where runs go: OUT/NAME/TIME.")
    parser.add_argument("--init_from", type=str | None, help="Short for --init.checkpoint: what fits is taken from it.")
    parser.add_argument(
        "--resume",
        type=str | None,
        help="What to go on from: a checkpoint, a run's directory, or the runs of a name; or auto: the newest run in "
        "OUT/NAME (its checkpoints may be in train.checkpoint_dir), if there is one to go on with.",
    )
    parser.add_argument("--dry_run", action="store_true", help="Print the bytes that the run would take, and exit.")
    add_json(parser)


def _add_component(parser: ArgumentParser, key: str, default: str | None = None) -> None:
    parser.add_argument(f"--{key}.class_path", type=str | None, default=default, help="Import path of the class.")
    parser.add_argument(f"--{key}.init_args", type=dict[str, Any], default={}, help="Its arguments; .NAME sets one.")


def recipe_of(parsed: Namespace) -> Recipe:
    """The recipe that was asked for; a `RecipeError` says what cannot be."""
    values: dict[str, Any] = parsed.as_dict()
    for key, text in values.pop("deep", ()):
        _set_deep(values, key, text)
    for key in ("recipe", "out", "resume", "dry_run", "json"):
        values.pop(key, None)
    if (plan := values.pop("plan", None)) is not None:
        values["parallel"]["plan"] = plan
    if (checkpoint := values.pop("init_from", None)) is not None:
        values["init"]["checkpoint"] = checkpoint
    for parent, key in ((values["data"], "source"), *((values, key) for key in _COMPONENTS)):
        if (parent[key] or {}).get("class_path", "") is None:
            del parent[key]["class_path"]
    if values["wide_optimizer"] == {"init_args": {}}:  # nobody has asked for one
        del values["wide_optimizer"]
    if values["name"] is None:
        del values["name"]
    return Recipe.from_dict(values)


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


@contextmanager
def readable_twice(recipes: Sequence[str]) -> Generator[list[str]]:
    """Recipes as files that can be read again; of a pipe, as ``<(…)`` is one, a copy."""
    with tempfile.TemporaryDirectory() as folder:
        copies = list[str]()
        for number, recipe in enumerate(recipes):
            path = local("the recipe", recipe)
            if path.is_fifo() or path.is_char_device():
                path = Path(folder) / f"{number}.yaml"
                path.write_text(read_text(Path(recipe)), encoding="utf-8")
            copies.append(str(path))
        yield copies


def _value_of(option: str, remaining: Iterator[str]) -> str:
    value = next(remaining, None)
    if value is None:
        raise RecipeError(f"argument {option} needs a value")
    return value


# jsonargparse would replace all of `schema` by {group: user}, so what lies within an init_arg is set here.
_DEEP = re.compile(r"--((?:\w+\.)+init_args\.\w+\.[\w.]+)(?:=(.*))?", re.DOTALL)


def split_deep(args: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Arguments without ``--X.init_args.schema.group user``, and those as keys and texts."""
    rest: list[str] = []
    deep: list[tuple[str, str]] = []
    remaining = iter(args)
    for arg in remaining:
        if match := _DEEP.fullmatch(arg):
            deep.append((match[1], _value_of(arg, remaining) if match[2] is None else match[2]))
        else:
            rest.append(arg)
    return rest, deep


def _set_deep(values: dict[str, Any], key: str, text: str) -> None:
    *parents, last = key.split(".")
    for i, parent in enumerate(parents):
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise RecipeError(f"--{key}: {'.'.join(parents[: i + 1])} is {values!r}, which has no '{last}' to set")
    values[last] = get_loader("yaml")(text)


def console(*, stderr: bool = False) -> Any:
    """Make what commands print to; text is shown as it is, also names in brackets."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False)


def write_json(path: str | None, value: Mapping[str, Any]) -> None:
    """Write the figures of a command where ``--json`` says, if it was given."""
    if path is not None:
        from hotbed import files

        files.write_json(local("--json", path), value)


def add_json(parser: ArgumentParser) -> None:
    """The option that every command with figures has."""
    parser.add_argument("--json", type=str | None, help="File to write the figures to, as JSON.")
