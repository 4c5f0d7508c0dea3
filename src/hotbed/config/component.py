"""Define `Component`, a class that a recipe names by its import path, and decide which classes a recipe may name.

Importing a module runs its code. A recipe that a user passes on the command line is trusted, like a script that is
passed to Python: its ``class_path`` may import installed packages and modules in the recipe's directory. A recipe that
is stored in a checkpoint or a run may come from a stranger. By default, it may name only classes of hotbed, and
optimizers, losses and metrics of torch. With ``--trust_recipe`` it may name any class.
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
    """A class by import path, and the arguments of its constructor."""

    class_path: str
    """Import path of the class, e.g. ``torch.optim.Adam``."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, in addition to the arguments that hotbed passes."""

    @override
    def contradictions(self) -> Iterator[str]:
        parts = self.class_path.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            yield f"class_path: got '{self.class_path}', expected an import path like torch.optim.Adam"
        elif parts[0] in sys.stdlib_module_names or "__main__" in parts:
            yield (
                f"class_path: got '{self.class_path}', expected a class of hotbed, torch.optim, an installed package, "
                "or a module in the recipe's directory"
            )

    def load(self) -> type[Any]:
        """Import the class. Raise `RecipeError` if the module or the class does not exist."""
        module_name, name = self.class_path.rsplit(".", 1)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise  # the module exists, but one of its own imports does not
            raise RecipeError(
                f"class_path: got '{self.class_path}', but module '{error.name}' does not exist. Install it, put it "
                f"into the recipe's directory, or add its directory to PYTHONPATH{_suggest_modules(error.name)}"
            ) from None
        found = getattr(module, name, None)
        if not isinstance(found, type):
            offered = {*vars(module), *dir(module)}  # dir includes names that are loaded lazily
            classes = [n for n in offered if isinstance(getattr(module, n, None), type)]
            file = getattr(module, "__file__", None)
            raise RecipeError(
                f"module '{module_name}' has no class '{name}'{did_you_mean(name, classes)} (the module is {file})"
            )
        return found

    def build(self, *args: Any, **given: Any) -> Any:
        """Create the object with the arguments of this call and ``init_args``.

        Raise `RecipeError` if an argument is unknown, missing, passed by hotbed already, or rejected by the class.
        """
        cls = self.load()
        try:
            signature = inspect.signature(cls)
        except ValueError:  # some classes that are written in C have no signature
            return self._create(cls, args, given)
        known = signature.parameters
        taken = {*list(known)[: len(args)], *given}
        any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
        for name in self.init_args:
            if name in taken:
                raise RecipeError(f"{self.class_path}: hotbed passes '{name}' itself. Remove it from init_args")
            if name not in known and not any_name:
                free = [n for n in known if n not in taken]
                raise RecipeError(
                    f"{self.class_path}: init_args: got '{name}', expected one of {', '.join(free) or 'none'}"
                    f"{did_you_mean(name, free)}"
                )
        for name, parameter in known.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if not variadic and parameter.default is parameter.empty and name not in (taken | self.init_args.keys()):
                raise RecipeError(f"{self.class_path} requires '{name}'. Set it in init_args")
        try:
            signature.bind(*args, **given, **self.init_args)
        except TypeError as error:
            raise RecipeError(f"{self.class_path} does not accept the arguments that hotbed passes: {error}") from None
        return self._create(cls, args, given)

    def _create(self, cls: type[Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        try:
            return cls(*args, **given, **self.init_args)
        except HotbedError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RecipeError(f"{self.class_path} rejected init_args {self.init_args}: {error}") from error


def _suggest_modules(name: str) -> str:
    """Suggest a module of the same package with a name similar to a missing one."""
    parent, _, last = name.rpartition(".")
    path = getattr(importlib.import_module(parent), "__path__", []) if parent else None
    return did_you_mean(last, [module.name for module in pkgutil.iter_modules(path)])


_TRUSTED = re.compile(
    r"(hotbed\.(data|nn|optim)|torch\.optim)(\.\w+)+|torch\.nn\.\w+Loss|torchmetrics\.classification\.\w+"
)
"""Classes that a stored recipe may name without ``--trust_recipe``. Add packages of harmless classes here."""


def components(value: object, key: str = "") -> Iterator[tuple[str, Component]]:
    """Yield each component of a recipe or of a part of a recipe, with its dotted key."""
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
"""The fix in messages: how a user allows a stored recipe to run code."""


def check_trust(recipe: object, place: str, *, trusted: bool, say_so: str = SAY_SO) -> None:
    """Raise `RecipeError` if an untrusted `Recipe` names classes that `_TRUSTED` does not match.

    This function imports nothing. If the recipe is trusted, modules in the current directory become importable. The
    error names the ``place`` of the recipe, and ends with the fix ``say_so``.
    """
    if trusted:
        import_from(Path.cwd())
        return
    for key, component in components(recipe):
        if not _TRUSTED.fullmatch(component.class_path):
            raise RecipeError(
                f"{key} of the recipe in {place}: got {component.class_path}, expected a class of hotbed or "
                f"torch.optim. Importing it would run its code with your rights. If you trust its author, {say_so}"
            )


def import_from(folder: Path) -> None:
    """Make the modules in a folder importable. Installed packages of the same name take precedence."""
    if (path := str(folder.absolute())) not in sys.path:
        sys.path.append(path)
