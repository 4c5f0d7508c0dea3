"""Make all ranks train by one plan: that of the first rank where it is searched for, and else by checking.

Ranks whose plans differ would exchange rows of each other's tiles, and some pairs of plans do so without an error. A
search depends on the machine that it runs on (its memory, its processes, whether scipy is installed), so only the first
rank searches. Schemes and files are read by every rank, and what came of them is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import torch

from hotbed.comm import Link
from hotbed.errors import PlanError
from hotbed.plan import Cut, Plan

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
