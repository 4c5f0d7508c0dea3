"""Decide which classes a recipe may name: importing a module runs its code.

What a user names on a command line, as he names a script to Python, is his: its ``class_path`` imports installed
packages, and modules beside the recipe. What is stored in a checkpoint or a run came with it, perhaps from a stranger:
classes of hotbed, optimizers, losses and metrics of torch are taken from it, all others only where the user says so
(``--trust_recipe``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import cast

from hotbed.config.component import Component
from hotbed.config.recipe import Recipe
from hotbed.errors import RecipeError

_TRUSTED = re.compile(
    r"(hotbed\.(data|nn|optim)|torch\.optim)(\.\w+)+|torch\.nn\.\w+Loss|torchmetrics\.classification\.\w+"
)
"""Classes that do what a recipe is for, and no more: of hotbed, optimizers and losses of torch, metrics."""


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


def check_trust(recipe: Recipe, place: str, *, trusted: bool, say_so: str = SAY_SO) -> None:
    """Raise `RecipeError` if a recipe names classes of others than hotbed and torch.optim, unless it is trusted.

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
