"""Plans of a model: its collections, and what plans call their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hotbed.embed.collection import EmbeddingCollection
from hotbed.plan import Cut, Plan, make_plan
from hotbed.specs import Table


def plan_tables(model: nn.Module) -> list[Table]:
    """Tables of a model by the names that plans have for them: ``collection.table`` where a name occurs twice."""
    names = names_in_plans(model)
    return [
        replace(table, name=names[path, table.name])
        for path, collection in collections_of(model).items()
        for table in collection.tables.values()
    ]


def plan_for(model: nn.Module, world_size: int, scheme: str | Cut | Mapping[str, str | Cut], **options: Any) -> Plan:
    """`make_plan` for the tables of a model.

    A model may have an attribute ``schemes`` that gives collections, by path, a scheme of their own: the wide part of
    `hotbed.nn.WideDeep` is ``"dp"`` always. A mapping overrides it, for the tables that it names. What ``make_plan``
    is not told of ids is taken from the features: one id per sample and feature.
    """
    names = names_in_plans(model)
    own: Mapping[str, str | Cut] = getattr(model, "schemes", {})
    given, of_others = (scheme, "table") if isinstance(scheme, Mapping) else ({}, scheme)
    schemes = {name: own.get(path, of_others) for (path, _), name in names.items()} | dict(given)
    collections = collections_of(model).items()
    ids = Counter(names[path, f.table] for path, collection in collections for f in collection.features)
    options.setdefault("ids", ids)
    return make_plan(plan_tables(model), world_size, schemes, **options)


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Collections of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def names_in_plans(model: nn.Module) -> dict[tuple[str, str], str]:
    """Name of each table in plans, by its collection's path and its name there."""
    tables = [(path, table) for path, collection in collections_of(model).items() for table in collection.tables]
    count = Counter(table for _, table in tables)
    return {(p, t): t if count[t] == 1 else f"{p}.{t}" for p, t in tables}


def local_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The part of a plan that is about these tables, by their names in the collection."""
    here = {name: own for own, name in names.items()}
    tiles = tuple(replace(tile, table=here[tile.table]) for tile in plan.tiles if tile.table in here)
    return Plan(plan.world_size, tiles, {here[name]: form for name, form in plan.wire.items() if name in here})
