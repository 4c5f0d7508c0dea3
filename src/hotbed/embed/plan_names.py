"""Make all ranks train by one plan: that of the first rank where it is searched for, and else by checking.

Ranks whose plans differ would exchange rows of each other's tiles, and some pairs of plans do so without an error. A
search depends on the machine that it runs on (its memory, its processes, whether scipy is installed), so only the first
rank searches. Schemes and files are read by every rank, and what came of them is compared.

Say what plans call the tables of a model, and make plans for them.
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
from hotbed.specs import Table

_DIGEST = 32
"""Bytes of a plan's digest; zeros: the rank has no plan."""
_SEED_CHARACTERS = 64
"""Largest number of characters of a seed in JSON, with the separators around it."""


def plan_of_first(link: Link, make: Callable[[], Plan]) -> Plan:
    """Call ``make`` on the first rank and return its plan on all ranks, which must all call this.

    If the first rank cannot make the plan, what it raised is raised there, and a `PlanError` on the others.
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
        raise PlanError("rank 0 could not find a plan; its own output says why")
    sent = torch.frombuffer(bytearray(text.ljust(count, b"\0")), dtype=torch.uint8).to(link.device)
    return Plan.from_json(bytes(link.broadcast("the plan", sent, 0).wait().cpu().numpy()))


def agreed(link: Link, make: Callable[[], Plan]) -> Plan:
    """Call ``make`` on every rank, and return its plan if that is the same on all.

    If plans differ, or a rank cannot make its own, all ranks raise a `PlanError`; that rank what ``make`` raised.
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
        raise PlanError(f"{_named(without)} cannot use the plan; its own output says why")
    if others := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise PlanError(
            f"{_named(others)} of {link.size} would train by another plan than rank 0; give all ranks the same plan "
            "(hotbed plan --out writes one to a file)"
        )
    return plan


def agreed_seeds(link: Link, seeds: Sequence[int]) -> list[int] | None:
    """Return the seeds of the first rank if another rank has others, else None; all ranks must call this."""
    text = json.dumps(list(seeds)).encode()
    own = torch.tensor(list(sha256(text).digest()), dtype=torch.uint8, device=link.device)
    digests = link.all_gather("digests of seeds", own).wait()
    if bool((digests == digests[0]).all()):
        return None
    sent = torch.frombuffer(bytearray(text.ljust(len(seeds) * _SEED_CHARACTERS)), dtype=torch.uint8).to(link.device)
    return json.loads(bytes(link.broadcast("seeds", sent, 0).wait().cpu().numpy()))


def is_searched(plan: Plan | str | Cut | Mapping[str, str | Cut]) -> bool:
    """Whether any table has the scheme ``"auto"``."""
    return not isinstance(plan, Plan) and "auto" in (plan.values() if isinstance(plan, Mapping) else [plan])


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


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
