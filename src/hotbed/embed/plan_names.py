"""Name the tables of a model in plans, make plans for them, and ensure that all ranks use the same plan.

Plans name a table ``collection.table`` if several collections have a table of that name (`names_in_plans`).

Ranks with different plans would exchange wrong rows, for some pairs of plans without an error. The result of a search
depends on the machine, e.g. on its memory and on whether scipy is installed. So only the first rank searches, and
`broadcast_plan` sends the result. Plans from schemes and files are made by every rank and compared (`agree_on_plan`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from hotbed.comm import Link
from hotbed.embed.collection import EmbeddingCollection
from hotbed.errors import PlanError
from hotbed.plan import Cut, Plan, make_plan
from hotbed.plan.hardware import hardware_here
from hotbed.plan.schemes import AUTO
from hotbed.plan.tiling import WireFormat
from hotbed.specs import Table

_DIGEST = 32
"""Bytes of a plan's digest. Zeros mean that the rank has no plan."""
_SEED_CHARACTERS = 64
"""Maximum number of characters of a seed in JSON, including separators."""


def broadcast_plan(link: Link, make: Callable[[], Plan]) -> Plan:
    """Call ``make`` on the first rank and return its plan on all ranks. All ranks must call this.

    If ``make`` fails, the first rank raises its error, and all other ranks raise `PlanError`.
    """
    error: Exception | None = None
    text = b""
    if link.rank == 0:
        try:
            text = make().to_json().encode()
        except Exception as raised:
            error = raised
    size = torch.tensor([len(text)], device=link.device)
    count = int(link.broadcast("the size of the plan", size, 0).wait())
    if error is not None:
        raise error
    if not count:
        raise PlanError("rank 0 could not find a plan. See its log for the reason")
    sent = torch.frombuffer(bytearray(text.ljust(count, b"\0")), dtype=torch.uint8).to(link.device)
    return Plan.from_json(bytes(link.broadcast("the plan", sent, 0).wait().cpu().numpy()))


def agree_on_plan(link: Link, make: Callable[[], Plan]) -> Plan:
    """Call ``make`` on every rank, and return the plan if it is the same on all ranks. All ranks must call this.

    If plans differ, all ranks raise `PlanError`. If ``make`` fails on a rank, it raises that error, and all other ranks
    raise `PlanError`.
    """
    error: Exception | None = None
    plan: Plan | None = None
    digest = bytes(_DIGEST)
    try:
        plan = make()
        digest = sha256(plan.to_json().encode()).digest()
    except Exception as raised:
        error = raised
    own = torch.tensor(list(digest), dtype=torch.uint8, device=link.device)
    digests = [bytes(row) for row in link.all_gather("digests of plans", own).wait().tolist()]
    if error is not None:
        raise error
    assert plan is not None
    if without := [rank for rank, found in enumerate(digests) if not any(found)]:
        raise PlanError(f"{_format_ranks(without)} cannot use the plan. See the log of that rank for the reason")
    if others := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise PlanError(
            f"{_format_ranks(others)} of {link.size}: got a different plan than rank 0, expected the same plan. Pass "
            "the same plan to all ranks (hotbed plan --out writes one to a file)"
        )
    return plan


def agree_on_seeds(link: Link, seeds: Sequence[int]) -> list[int] | None:
    """Return the seeds of the first rank if any rank has other seeds, else None. All ranks must call this."""
    text = json.dumps(list(seeds)).encode()
    own = torch.tensor(list(sha256(text).digest()), dtype=torch.uint8, device=link.device)
    digests = link.all_gather("digests of seeds", own).wait()
    if bool((digests == digests[0]).all()):
        return None
    sent = torch.frombuffer(bytearray(text.ljust(len(seeds) * _SEED_CHARACTERS)), dtype=torch.uint8).to(link.device)
    return json.loads(bytes(link.broadcast("seeds", sent, 0).wait().cpu().numpy()))


def is_searched(plan: Plan | str | Cut | Mapping[str, str | Cut]) -> bool:
    """Return whether any table has the scheme ``"auto"``."""
    return not isinstance(plan, Plan) and "auto" in (plan.values() if isinstance(plan, Mapping) else [plan])


def _format_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def plan_tables(model: nn.Module) -> list[Table]:
    """Return a model's tables with their names in plans: ``collection.table`` if a name occurs twice."""
    names = names_in_plans(model)
    return [
        replace(table, name=names[path, table.name])
        for path, collection in collections_of(model).items()
        for table in collection.tables.values()
    ]


def plan_for(model: nn.Module, world_size: int, scheme: str | Cut | Mapping[str, str | Cut], **options: Any) -> Plan:
    """Make a plan for the tables of a model, see `make_plan`.

    A model may have an attribute ``schemes`` with schemes of its collections by path. For example, the wide part of
    `hotbed.nn.WideDeep` always has ``"dp"``. A mapping ``scheme`` overrides it for the tables that it names. The
    default of the option ``ids`` is one id per sample and feature. The default of ``hardware`` for ``"auto"`` is this
    machine.
    """
    names = names_in_plans(model)
    schemes = schemes_for(model, scheme)
    collections = collections_of(model).items()
    ids = Counter(names[path, f.table] for path, collection in collections for f in collection.features)
    options.setdefault("ids", ids)
    if AUTO in schemes.values():
        bags, wire = pooled_features(model)
        options = {"bags": bags, "wire": wire, **options}
        if "hardware" not in options:
            options["hardware"] = hardware_here(next(iter(collections_of(model).values())).device)
    return make_plan(plan_tables(model), world_size, schemes, **options)


def pooled_features(model: nn.Module) -> tuple[dict[str, float], dict[str, WireFormat]]:
    """Return the number of pooled features of each table, and the wire format ``"rows"`` of tables with sequences."""
    names = names_in_plans(model)
    bags: dict[str, float] = dict.fromkeys(names.values(), 0.0)
    wire: dict[str, WireFormat] = {}
    for path, collection in collections_of(model).items():
        for feature in collection.features:
            if feature.is_pooled:
                bags[names[path, feature.table]] += 1.0
            else:
                wire[names[path, feature.table]] = "rows"
    return bags, wire


def schemes_for(
    model: nn.Module, scheme: str | Cut | Mapping[str, str | Cut], others: str = "table"
) -> dict[str, str | Cut]:
    """Return the scheme of each table: by its name or a pattern, by its collection, or else ``others``."""
    own: Mapping[str, str | Cut] = getattr(model, "schemes", {})
    given, of_others = (scheme, others) if isinstance(scheme, Mapping) else ({}, scheme)
    schemes = {name: own.get(path, of_others) for (path, _), name in names_in_plans(model).items()}
    for name in schemes:
        schemes[name] = next((given[k] for k in (name, *given) if k in given and fnmatchcase(name, k)), schemes[name])
    # Keep entries that match no table, because `make_plan` refuses them.
    return schemes | {key: s for key, s in given.items() if not any(fnmatchcase(n, key) for n in schemes)}


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Return the collections of a model by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def names_in_plans(model: nn.Module) -> dict[tuple[str, str], str]:
    """Return each table's name in plans, by the path of its collection and its name there."""
    tables = [(path, table) for path, collection in collections_of(model).items() for table in collection.tables]
    count = Counter(table for _, table in tables)
    return {(p, t): t if count[t] == 1 else f"{p}.{t}" for p, t in tables}


def local_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the part of a plan for one collection. ``names`` maps its table names to the names in the plan."""
    here = {name: own for own, name in names.items()}
    tiles = tuple(replace(tile, table=here[tile.table]) for tile in plan.tiles if tile.table in here)
    return Plan(plan.world_size, tiles, {here[name]: form for name, form in plan.wire.items() if name in here})
