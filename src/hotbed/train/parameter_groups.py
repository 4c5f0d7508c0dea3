"""Assign parameters and tables to the optimizers of a recipe.

``dense_optimizer`` trains all parameters, and ``sparse_optimizer`` all tables, that no group matches. A group has
patterns of names, as in `fnmatch`: ``*`` stands for any characters, also dots. A pattern matches a parameter by its
name in the model or by that of a module that it is in; a table also by its name in the collection. For a model with the
tables ``embeddings.user``, ``embeddings.item``, ``wide.user`` and ``wide.item``::

    wide, wide.*, *ide.*    match wide.user and wide.item
    user, *.user            match embeddings.user and wide.user

Each parameter and each table has one optimizer: a pattern that matches nothing, and two groups that match the same, are
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hotbed.config import Component, Recipe
from hotbed.embed import collections_of, plan_tables
from hotbed.errors import RecipeError, did_you_mean
from hotbed.optim import Moment, SparseOptimizer

_SHOWN = 12
"""Names that an error lists."""


def group_parameters(model: nn.Module, recipe: Recipe) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the parameters of ``dense_optimizer``, and of each of ``dense_optimizer_groups``."""
    patterns = {name: group.parameters for name, group in recipe.dense_optimizer_groups.items()}
    names = [name for name, _ in model.named_parameters()]
    return _grouped("dense_optimizer", "parameter", names, patterns, _modules_of)


def group_tables(model: nn.Module, recipe: Recipe) -> tuple[list[str], dict[str, list[str]]]:
    """Names ``path.table`` of the tables of ``sparse_optimizer``, and of each of ``sparse_optimizer_groups``."""
    patterns = {name: group.tables for name, group in recipe.sparse_optimizer_groups.items()}

    def names_of(table: str) -> Iterator[str]:
        yield from _modules_of(table)
        yield table.rpartition(".")[2]

    return _grouped("sparse_optimizer", "table", _tables_of(model), patterns, names_of)


def sparse_components(recipe: Recipe) -> dict[str, Component]:
    """Optimizers of tables, by their keys in the recipe."""
    groups = recipe.sparse_optimizer_groups.items()
    return {
        "sparse_optimizer": recipe.sparse_optimizer,
        **{f"sparse_optimizer_groups.{name}.optimizer": group.optimizer for name, group in groups},
    }


def moments_of(optimizer: Component) -> tuple[Moment, ...]:
    """Moments that a sparse optimizer keeps beside the rows."""
    made = optimizer.load()
    if made is SparseOptimizer:
        raise RecipeError(f"{optimizer.class_path} is what optimizers of tables are made of; use hotbed.optim.SGD, say")
    return made.rule_for(optimizer.init_args).moments if issubclass(made, SparseOptimizer) else ()


def moments_by_table(model: nn.Module, recipe: Recipe) -> dict[str, tuple[Moment, ...]]:
    """Moments that the recipe's optimizers keep beside the rows of a model's tables, by their names in plans."""
    _, groups = group_tables(model, recipe)
    group_of = {table: group for group, tables in groups.items() for table in tables}
    moments = {name: moments_of(group.optimizer) for name, group in recipe.sparse_optimizer_groups.items()}
    others = moments_of(recipe.sparse_optimizer)
    return {
        table.name: moments[group_of[name]] if name in group_of else others
        for table, name in zip(plan_tables(model), _tables_of(model), strict=True)
    }


def _tables_of(model: nn.Module) -> list[str]:
    """Names of all tables, in the order of `plan_tables`."""
    return [f"{path}.{table}".lstrip(".") for path, of in collections_of(model).items() for table in of.tables]


def _modules_of(name: str) -> Iterator[str]:
    """A name, and those of the modules that it is in: ``top.0.bias``, ``top.0``, ``top``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _grouped(
    key: str,
    kind: str,
    names: Sequence[str],
    patterns: Mapping[str, Sequence[str]],
    names_of: Callable[[str], Iterator[str]],
) -> tuple[list[str], dict[str, list[str]]]:
    """Split names into those that no group matches, and those of each group, in their order."""
    group_of: dict[str, str] = {}
    for group, of_group in patterns.items():
        for pattern in of_group:
            found = [name for name in names if any(fnmatchcase(n, pattern) for n in names_of(name))]
            if not found:
                raise RecipeError(
                    f"{key}_groups.{group}: '{pattern}' matches no {kind}; {kind}s are {', '.join(names[:_SHOWN])}"
                    f"{', …' * (len(names) > _SHOWN)}{did_you_mean(pattern, names)}"
                )
            for name in found:
                if group_of.setdefault(name, group) != group:
                    raise RecipeError(
                        f"{key}_groups.{group_of[name]} and {key}_groups.{group} both match {kind} '{name}', which can "
                        f"have one optimizer; narrow the patterns of one of them"
                    )
    rest = [name for name in names if name not in group_of]
    if group_of and not rest:
        raise RecipeError(
            f"{key}_groups match all {kind}s, so {key} has none to train; make the optimizer of one group "
            f"{key} and remove that group"
        )
    return rest, {group: [name for name in names if group_of.get(name) == group] for group in patterns}
