"""Assign parameters and tables to the optimizers of a recipe.

``dense_optimizer`` trains the parameters that no group matches, and ``sparse_optimizer`` trains the tables that no
group matches. A group has patterns of names as in `fnmatch`, where ``*`` also matches dots. A pattern is compared with
the name of a parameter or table in the model, and with the names of the enclosing modules. For tables it is also
compared with the table's name in its collection. For a model with the tables ``embeddings.user``, ``embeddings.item``,
``wide.user`` and ``wide.item``::

    wide, wide.*, *ide.*    match wide.user and wide.item
    user, *.user            match embeddings.user and wide.user

Each parameter and each table has one optimizer. So it is an error if two groups match the same name, or if a pattern
matches nothing.
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
"""Number of names that an error lists."""


def group_parameters(model: nn.Module, recipe: Recipe) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the parameters that ``dense_optimizer`` trains, and the names of the parameters by group."""
    patterns = {name: group.parameters for name, group in recipe.dense_optimizer_groups.items()}
    names = [name for name, _ in model.named_parameters()]
    return _group("dense_optimizer", "parameter", names, patterns, _modules_of)


def group_tables(model: nn.Module, recipe: Recipe) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the tables that ``sparse_optimizer`` trains, and the names of the tables by group.

    A name is ``PATH.TABLE``, where PATH is the path of the table's collection in the model.
    """
    patterns = {name: group.tables for name, group in recipe.sparse_optimizer_groups.items()}

    def names_of(table: str) -> Iterator[str]:
        yield from _modules_of(table)
        yield table.rpartition(".")[2]

    return _group("sparse_optimizer", "table", _tables_of(model), patterns, names_of)


def sparse_components(recipe: Recipe) -> dict[str, Component]:
    """Return the optimizers that the recipe sets for tables; the keys are the keys of the recipe."""
    groups = recipe.sparse_optimizer_groups.items()
    return {
        "sparse_optimizer": recipe.sparse_optimizer,
        **{f"sparse_optimizer_groups.{name}.optimizer": group.optimizer for name, group in groups},
    }


def moments_of(optimizer: Component) -> tuple[Moment, ...]:
    """Return the moments that a sparse optimizer stores for each row."""
    made = optimizer.load()
    if made is SparseOptimizer:
        raise RecipeError(f"{optimizer.class_path} is a base class, expected an optimizer such as hotbed.optim.SGD")
    return made.rule_for(optimizer.init_args).moments if issubclass(made, SparseOptimizer) else ()


def moments_by_table(model: nn.Module, recipe: Recipe) -> dict[str, tuple[Moment, ...]]:
    """Return the moments that the recipe's optimizers store for each table; keys are the names of tables in plans."""
    _, groups = group_tables(model, recipe)
    group_of = {table: group for group, tables in groups.items() for table in tables}
    moments = {name: moments_of(group.optimizer) for name, group in recipe.sparse_optimizer_groups.items()}
    others = moments_of(recipe.sparse_optimizer)
    return {
        table.name: moments[group_of[name]] if name in group_of else others
        for table, name in zip(plan_tables(model), _tables_of(model), strict=True)
    }


def _tables_of(model: nn.Module) -> list[str]:
    """Return the names ``path.table`` of all tables in the order of `plan_tables`."""
    return [f"{path}.{table}".lstrip(".") for path, of in collections_of(model).items() for table in of.tables]


def _modules_of(name: str) -> Iterator[str]:
    """Yield a name and its enclosing modules: ``top.0.bias``, ``top.0``, ``top``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _group(
    key: str,
    noun: str,
    names: Sequence[str],
    patterns: Mapping[str, Sequence[str]],
    names_of: Callable[[str], Iterator[str]],
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names that no group's ``patterns`` match, and the names of each group, in the order of ``names``.

    ``names_of`` yields the names that patterns are compared with. ``key`` and ``noun`` are for error messages.
    """
    group_of: dict[str, str] = {}
    for group, of_group in patterns.items():
        for pattern in of_group:
            found = [name for name in names if any(fnmatchcase(n, pattern) for n in names_of(name))]
            if not found:
                raise RecipeError(
                    f"{key}_groups.{group}: '{pattern}' matches no {noun}. The {noun}s are {', '.join(names[:_SHOWN])}"
                    f"{', …' * (len(names) > _SHOWN)}{did_you_mean(pattern, names)}"
                )
            for name in found:
                if group_of.setdefault(name, group) != group:
                    raise RecipeError(
                        f"{key}_groups.{group_of[name]} and {key}_groups.{group} both match {noun} '{name}', "
                        f"expected one group per {noun}. Narrow the patterns of one group"
                    )
    rest = [name for name in names if name not in group_of]
    if group_of and not rest:
        raise RecipeError(
            f"{key}_groups match all {noun}s, so {key} has no {noun} to train. Remove one group from {key}_groups, and "
            f"set {key} to its optimizer"
        )
    return rest, {group: [name for name in names if group_of.get(name) == group] for group in patterns}
