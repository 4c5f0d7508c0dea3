"""Decide which classes a recipe may name: importing a module runs its code.

What a user names on a command line, as he names a script to Python, is his: its ``class_path`` imports installed
packages, and modules beside the recipe. What is stored in a checkpoint or a run came with it, perhaps from a stranger:
classes of hotbed, optimizers, losses and metrics of torch are taken from it, all others only where the user says so
(``--trust_recipe``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hotbed.config.component import Component
from hotbed.config.recipe import Recipe
from hotbed.errors import RecipeError

_TRUSTED = re.compile(
    r"(hotbed\.(data|nn|optim)|torch\.optim)(\.\w+)+|torch\.nn\.\w+Loss|torchmetrics\.classification\.\w+"
)
"""Classes that do what a recipe is for, and no more: of hotbed, optimizers and losses of torch, metrics."""


def components(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    """Give all classes that a recipe names, by their keys."""
    yield "data.source", recipe.data.source
    yield "model", recipe.model
    yield "dense_optimizer", recipe.dense_optimizer
    yield "sparse_optimizer", recipe.sparse_optimizer
    for label, task in recipe.tasks.items():
        yield f"tasks.{label}.loss", task.loss
    if recipe.retrieval is not None:
        yield "retrieval.loss", recipe.retrieval.loss
        if recipe.retrieval.correction is not None:
            yield "retrieval.correction", recipe.retrieval.correction
    of_tasks = ((f"tasks.{label}.metrics", task.metrics) for label, task in recipe.tasks.items())
    for key, others in (("metrics", recipe.metrics), *of_tasks, ("callbacks", recipe.callbacks)):
        yield from ((f"{key}.{name}", other) for name, other in others.items())
    for name, dense in recipe.dense_optimizer_groups.items():
        yield f"dense_optimizer_groups.{name}.optimizer", dense.optimizer
    for name, sparse in recipe.sparse_optimizer_groups.items():
        yield f"sparse_optimizer_groups.{name}.optimizer", sparse.optimizer


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
