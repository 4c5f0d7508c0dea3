"""Define `Component`, a class that a recipe names by its import path, and the checks that sections share."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import sys
from dataclasses import dataclass, field
from typing import Any

from hotbed.errors import HotbedError, RecipeError, did_you_mean
from hotbed.specs import is_int


@dataclass(frozen=True, kw_only=True)
class Component:
    """A class by import path, and the arguments it is made with."""

    class_path: str
    """Import path of the class, for example ``torch.optim.Adam``."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, besides those that hotbed gives."""

    def __post_init__(self) -> None:
        parts = self.class_path.split(".") if isinstance(self.class_path, str) else []
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise RecipeError(f"class_path is '{self.class_path}', must be an import path like torch.optim.Adam")
        if parts[0] in sys.stdlib_module_names or "__main__" in parts:
            raise RecipeError(
                f"class_path is '{self.class_path}', which no recipe needs; name a class of hotbed, torch.optim, an "
                "installed package or a module beside the recipe"
            )

    def load(self) -> type[Any]:
        """Import the class; `RecipeError` if there is no such module or class."""
        module_name, name = self.class_path.rsplit(".", 1)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise  # the module is there and what it imports is not
            raise RecipeError(
                f"class_path is '{self.class_path}', but there is no module '{error.name}'; install it, put it "
                f"beside the recipe, or add its directory to PYTHONPATH{_modules_like(error.name)}"
            ) from None
        found = getattr(module, name, None)
        if not isinstance(found, type):
            offered = {*vars(module), *dir(module)}  # some are loaded when they are asked for
            classes = [n for n in offered if isinstance(getattr(module, n, None), type)]
            file = getattr(module, "__file__", None)
            raise RecipeError(
                f"module '{module_name}' has no class '{name}'{did_you_mean(name, classes)} (the module is {file})"
            )
        return found

    def build(self, *args: Any, **given: Any) -> Any:
        """Make the object from what hotbed gives and ``init_args``.

        An argument that is unknown, missing, given by hotbed already, or refused by the class raises `RecipeError`.
        """
        cls = self.load()
        try:
            signature = inspect.signature(cls)
        except ValueError:  # of some classes that are written in C nothing is known before they are called
            return self._made(cls, args, given)
        known = signature.parameters
        taken = {*list(known)[: len(args)], *given}
        any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
        for name in self.init_args:
            if name in taken:
                raise RecipeError(f"{self.class_path}: '{name}' is given by hotbed; remove it from init_args")
            if name not in known and not any_name:
                free = [n for n in known if n not in taken]
                raise RecipeError(
                    f"{self.class_path} takes no '{name}'; init_args may be {', '.join(free) or 'nothing'}"
                    f"{did_you_mean(name, free)}"
                )
        for name, parameter in known.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if not variadic and parameter.default is parameter.empty and name not in (taken | self.init_args.keys()):
                raise RecipeError(f"{self.class_path} needs '{name}'; set it in init_args")
        try:
            signature.bind(*args, **given, **self.init_args)
        except TypeError as error:
            raise RecipeError(f"{self.class_path} does not take the arguments that hotbed gives: {error}") from None
        return self._made(cls, args, given)

    def _made(self, cls: type[Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        try:
            return cls(*args, **given, **self.init_args)
        except HotbedError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RecipeError(f"{self.class_path} refused init_args {self.init_args}: {error}") from error


def _modules_like(name: str) -> str:
    """Ask for the module whose name is nearly that of one which does not exist, if there is one beside it."""
    parent, _, last = name.rpartition(".")
    path = getattr(importlib.import_module(parent), "__path__", []) if parent else None
    return did_you_mean(last, [module.name for module in pkgutil.iter_modules(path)])


def by_table(key: str, value: Any) -> list[tuple[str, Any]]:
    """Dotted keys and values of an option that may be given by table."""
    return [(f"{key}.{table}", v) for table, v in value.items()] if isinstance(value, dict) else [(key, value)]


def at_least(key: str, value: object, limit: int, what: str = "") -> None:
    """Raise `RecipeError` unless a value is an integer of at least ``limit``, which is ``what``."""
    if not is_int(value):
        raise RecipeError(f"{key} is {value!r}, must be an integer")
    if value >= 2**64:
        raise RecipeError(f"{key} is {value:,}, must be below 2**64")
    if not value >= limit:
        raise RecipeError(f"{key} is {value:,}, must be at least {limit:,}{f' ({what})' if what else ''}")


def above_zero(key: str, value: float, note: str = "") -> None:
    """Raise `RecipeError` unless a number is finite and above 0."""
    if not 0 < value < math.inf:
        raise RecipeError(f"{key} is {value}, must be a finite number above 0{note}")


def one_of(key: str, value: str, choices: tuple[str, ...], error: type[HotbedError] = RecipeError) -> None:
    """Raise an error unless a value is one of these."""
    if value not in choices:
        raise error(f"{key} is '{value}', must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def seed(key: str, value: object) -> None:
    """Raise `RecipeError` unless a value is a seed: an integer of at most 64 bits."""
    at_least(key, value, 0)
