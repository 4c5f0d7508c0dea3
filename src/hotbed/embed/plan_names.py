"""Say what plans call the tables of a model, and make plans for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hotbed.embed.collection import EmbeddingCollection
from hotbed.plan import Cut, Plan, make_plan
from hotbed.plan.hardware import hardware_here
from hotbed.plan.schemes import AUTO
from hotbed.specs import Table


def plan_tables(model: nn.Module) -> list[Table]:
    """List a model's tables by the names that plans have for them: ``collection.table`` where a name occurs twice."""
    names = names_in_plans(model)
    return [
        replace(table, name=names[path, table.name])
        for path, collection in collections_of(model).items()
        for table in collection.tables.values()
    ]


def plan_for(model: nn.Module, world_size: int, scheme: str | Cut | Mapping[str, str | Cut], **options: Any) -> Plan:
    """Make a plan for the tables of a model, see `make_plan`.

    A model may have an attribute ``schemes`` that gives collections, by path, a scheme of their own: the wide part of
    `hotbed.nn.WideDeep` is ``"dp"`` always. A mapping overrides it, for the tables that it names. The number of ids
    per table, where ``options`` do not give it, is one per sample and feature; ``"auto"`` is for the machine that this
    is, where they do not give ``hardware``.
    """
    names = names_in_plans(model)
    schemes = schemes_for(model, scheme)
    collections = collections_of(model).items()
    ids = Counter(names[path, f.table] for path, collection in collections for f in collection.features)
    options.setdefault("ids", ids)
    if AUTO in schemes.values() and "hardware" not in options:
        options["hardware"] = hardware_here(next(iter(collections_of(model).values())).device)
    return make_plan(plan_tables(model), world_size, schemes, **options)


def schemes_for(
    model: nn.Module, scheme: str | Cut | Mapping[str, str | Cut], others: str = "table"
) -> dict[str, str | Cut]:
    """Give each table its scheme: its own by name or pattern, its collection's, or that of all ``others``."""
    own: Mapping[str, str | Cut] = getattr(model, "schemes", {})
    given, of_others = (scheme, others) if isinstance(scheme, Mapping) else ({}, scheme)
    schemes = {name: own.get(path, of_others) for (path, _), name in names_in_plans(model).items()}
    for name in schemes:
        schemes[name] = next((given[k] for k in (name, *given) if k in given and fnmatchcase(name, k)), schemes[name])
    # Those that no table has stay, to be refused.
    return schemes | {key: s for key, s in given.items() if not any(fnmatchcase(n, key) for n in schemes)}


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Find the collections of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def names_in_plans(model: nn.Module) -> dict[tuple[str, str], str]:
    """Name each table as plans do, by its collection's path and its name there."""
    tables = [(path, table) for path, collection in collections_of(model).items() for table in collection.tables]
    count = Counter(table for _, table in tables)
    return {(p, t): t if count[t] == 1 else f"{p}.{t}" for p, t in tables}


def local_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Select the tiles of these tables from a plan, renamed as in their collection (``names``: own name → plan's)."""
    here = {name: own for own, name in names.items()}
    tiles = tuple(replace(tile, table=here[tile.table]) for tile in plan.tiles if tile.table in here)
    return Plan(plan.world_size, tiles, {here[name]: form for name, form in plan.wire.items() if name in here})
