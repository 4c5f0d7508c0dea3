"""Choose how many ranks train a model, and in how many replicas: `search_ranks` tries each with the plan it finds.

The batch is the global one, so more ranks have fewer samples each. Without a list of numbers of ranks, these are powers
of two up to a node and doublings of nodes from there; of replicas, powers of two that divide the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hotbed.checks import Count, check
from hotbed.errors import PlanError
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.step_time import estimate_step
from hotbed.plan.workload import Workload

MOST_RANKS = 1024
"""That are tried where nobody lists them."""
ALIKE = 1.005
"""Choices whose samples/s or cost differ by less count as equal: then fewer ranks, and fewer replicas, are better."""
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Tried:
    """A number of ranks and of replicas, and what the search found for it; or why nothing."""

    ranks: int
    """Of all replicas together."""
    replicas: int
    found: Found | None
    samples_per_s: float = 0.0
    cost: float | None = None
    """Of a billion samples, in the currency of the price; None where no price is known."""
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A row of the table of what was tried, as JSON has it."""
        return {
            "ranks": self.ranks,
            "replicas": self.replicas,
            "samples_per_s": self.samples_per_s if self.found else None,
            "cost_per_billion_samples": self.cost,
            "gap": self.found.gap if self.found else None,
            "refused": self.refused or None,
        }


@dataclass(frozen=True)
class Chosen:
    """The choice, and everything that was tried, in the order of ranks and replicas."""

    best: Tried
    tried: tuple[Tried, ...]
    goal: Literal["samples", "cost"]
    """Most samples/s; or, where a price is known, least cost per sample."""


def search_ranks(
    workload: Workload | Callable[[int], Workload],
    hardware: Hardware,
    *,
    ranks: Sequence[int] | Literal["auto"] = "auto",  # auto: powers of two, and from a node on nodes
    replicas: int | Literal["auto"] = "auto",  # auto: 1, 2, 4, …, while they divide the ranks and tables fit a group
    **options: Any,
) -> Chosen:
    """Search for the number of ranks and of replicas, with a plan for each.

    All are tried by heuristics, and the choice once more with the mixed integer program, which takes longer.

    ``workload`` is what a step does: ``batch_size`` is that of all ranks, ``sync_every`` the steps between averages of
    replicas. It may be a function of the number of ranks, because several ranks launch other kernels than one. Choices
    within half a percent count as equal; of these the one with the fewest ranks and replicas is taken.
    """

    def of_ranks(count: int) -> Workload:
        return workload(count) if callable(workload) else workload

    allowed = _allowed(of_ranks(1), hardware, ranks)
    check("replicas", replicas, Count | Literal["auto"], PlanError)
    goal = "samples" if hardware.price_per_hour is None else "cost"
    heuristics = {**options, "integer_program": False}
    tried: list[Tried] = []
    for count in allowed:
        for groups in _replicas(count, replicas):
            tried.append(_try(replace(of_ranks(count), replicas=groups), count, hardware, heuristics))
            if tried[-1].found is None:
                break  # groups of fewer ranks have less memory
    fitting = [t for t in tried if t.found is not None]
    if not fitting:
        last = next((t for t in tried if t.ranks == tried[-1].ranks), None)
        why = f"{replicas} replicas divide none of them" if last is None else f"with {last.ranks}: {last.refused}"
        raise PlanError(f"the tables fit none of {', '.join(map(str, allowed))} ranks; {why}")
    if goal == "cost":
        fitting = [t for t in fitting if (t.cost or 0.0) <= ALIKE * min(other.cost or 0.0 for other in fitting)]
    else:
        fitting = [t for t in fitting if ALIKE * t.samples_per_s >= max(other.samples_per_s for other in fitting)]
    best = min(fitting, key=lambda t: (t.ranks, t.replicas))
    if options.get("integer_program", True):
        at = tried.index(best)
        again = _try(replace(of_ranks(best.ranks), replicas=best.replicas), best.ranks, hardware, options)
        best = tried[at] = again if again.samples_per_s > best.samples_per_s else best
    return Chosen(best, tuple(tried), goal)


def _allowed(workload: Workload, hardware: Hardware, ranks: Sequence[int] | Literal["auto"]) -> list[int]:
    if ranks == "auto":
        node, most = hardware.ranks_per_node, min(MOST_RANKS, workload.batch_size)
        inside = [2**i for i in range(node.bit_length()) if 2**i < node]
        nodes = [node * 2**i for i in range(max(most // node, 1).bit_length())]
        return [count for count in (*inside, *nodes) if count <= most]
    for count in ranks or ((),):
        check("ranks", count, Count, PlanError, "Give 'auto', or a list of numbers.")
    return sorted(set(ranks))


def _replicas(ranks: int, replicas: int | Literal["auto"]) -> list[int]:
    if replicas != "auto":
        return [replicas] if ranks % replicas == 0 else []
    return [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0]


def _try(workload: Workload, ranks: int, hardware: Hardware, options: Mapping[str, Any]) -> Tried:
    try:
        found = search(workload, ranks // workload.replicas, hardware, **options)
    except PlanError as error:
        return Tried(ranks, workload.replicas, None, refused=str(error))
    rate = workload.batch_size / estimate_step(found.plan, found.costs, found.model).seconds
    cost = None
    if hardware.price_per_hour is not None:
        nodes = math.ceil(ranks / hardware.ranks_per_node)
        cost = nodes * hardware.price_per_hour / SECONDS_PER_HOUR / rate * 1e9
    return Tried(ranks, workload.replicas, found, rate, cost)
