"""Define `Component`, a class that a recipe names by its import path, and decide which classes a recipe may name.

Importing a module runs its code. What a user names on a command line, as he names a script to Python, is his: its
``class_path`` imports installed packages, and modules beside the recipe. What is stored in a checkpoint or a run came
with it, perhaps from a stranger: classes of hotbed, optimizers, losses and metrics of torch are taken from it, all
others only where the user says so (``--trust_recipe``).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from hotbed.checks import Section
from hotbed.errors import HotbedError, RecipeError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Component(Section):
    """A class by import path, and the arguments it is made with."""

    class_path: str
    """Import path of the class, for example ``torch.optim.Adam``."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, besides those that hotbed gives."""

    @override
    def contradictions(self) -> Iterator[str]:
        parts = self.class_path.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            yield f"class_path: got '{self.class_path}', expected an import path like torch.optim.Adam"
        elif parts[0] in sys.stdlib_module_names or "__main__" in parts:
            yield (
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


_TRUSTED = re.compile(
    r"(hotbed\.(data|nn|optim)|torch\.optim)(\.\w+)+|torch\.nn\.\w+Loss|torchmetrics\.classification\.\w+"
)
"""Classes that a stored recipe may name without ``--trust_recipe``. Add packages of harmless classes here."""


def components(value: object, key: str = "") -> Iterator[tuple[str, Component]]:
    """Yield all classes that a recipe, or a part of it, names, by their keys."""
    if isinstance(value, Component):
        yield key, value
        return
    parts: Mapping[str, object] = {}
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        parts = cast("Mapping[str, object]", value)
    for name, part in parts.items():
        yield from components(part, f"{key}.{name}".lstrip("."))


SAY_SO = "add --trust_recipe (in Python: trust_recipe=True)"
"""How a user says that a stored recipe may run code."""


def check_trust(recipe: object, place: str, *, trusted: bool, say_so: str = SAY_SO) -> None:
    """Raise `RecipeError` if an untrusted `Recipe` names classes that `_TRUSTED` does not match.

    Nothing is imported. Where it is trusted, modules in the current directory can be imported from now on. The error
    names the ``place`` that the recipe is in, and how the user can say that it may run code.
    """
    if trusted:
        import_from(Path.cwd())
        return
    for key, component in components(recipe):
        if not _TRUSTED.fullmatch(component.class_path):
            raise RecipeError(
                f"{key} of the recipe in {place} is {component.class_path}, which is of neither hotbed nor "
                f"torch.optim; importing it runs its code with your rights: if you trust who made this, {say_so}"
            )


def import_from(folder: Path) -> None:
    """Let modules in a folder be imported, where no installed package has their name."""
    if (path := str(folder.absolute())) not in sys.path:
        sys.path.append(path)
