"""Choose the numbers of ranks and replicas by searching for a plan for each choice.

The global batch size is fixed, so more ranks have fewer samples each. By default, powers of two of ranks are tried up
to a node, then doubled numbers of nodes. Numbers of replicas are powers of two that divide the ranks.
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
"""Largest number of ranks that is tried by default."""
TOLERANCE = 1.005
"""Choices within this factor in samples/s or cost count as equal. Then fewer ranks and replicas are better."""
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class RankTrial:
    """Numbers of ranks and replicas, with the plan that was found, or the reason for none."""

    ranks: int
    """Ranks of all replicas together."""
    replicas: int
    found: Found | None
    samples_per_s: float = 0.0
    cost: float | None = None
    """Cost of a billion samples in the currency of the price; None without a price."""
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as a JSON object."""
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
    """The best trial, and all trials in the order of ranks and replicas."""

    best: RankTrial
    tried: tuple[RankTrial, ...]
    goal: Literal["samples", "cost"]
    """Goal: most samples/s, or with a price the least cost per sample."""


def search_ranks(
    workload: Workload | Callable[[int], Workload],
    hardware: Hardware,
    *,
    ranks: Sequence[int] | Literal["auto"] = "auto",  # auto: powers of two up to a node, then doubled nodes
    replicas: int | Literal["auto"] = "auto",  # auto: 1, 2, 4, … while they divide the ranks and tables fit
    **options: Any,
) -> Chosen:
    """Search for the best numbers of ranks and replicas, with a plan for each.

    Heuristics search all choices. The best choice is searched again with the slower mixed integer program. Choices
    within half a percent count as equal, and the fewest ranks and replicas win.

    ``workload`` has the global ``batch_size``. It may be a function of the number of ranks, because one rank and
    several ranks launch different kernels.
    """

    def of_ranks(count: int) -> Workload:
        return workload(count) if callable(workload) else workload

    allowed = _allowed(of_ranks(1), hardware, ranks)
    check("replicas", replicas, Count | Literal["auto"], PlanError)
    goal = "samples" if hardware.price_per_hour is None else "cost"
    heuristics = {**options, "integer_program": False}
    tried: list[RankTrial] = []
    for count in allowed:
        for groups in _replicas(count, replicas):
            tried.append(_try(replace(of_ranks(count), replicas=groups), count, hardware, heuristics))
            if tried[-1].found is None:
                break  # groups of fewer ranks have less memory
    fitting = [t for t in tried if t.found is not None]
    if not fitting:
        last = next((t for t in tried if t.ranks == tried[-1].ranks), None)
        why = f"{replicas} replicas divide none of them" if last is None else f"with {last.ranks}: {last.refused}"
        raise PlanError(f"ranks: got {', '.join(map(str, allowed))}, expected one on which the tables fit; {why}")
    if goal == "cost":
        fitting = [t for t in fitting if (t.cost or 0.0) <= TOLERANCE * min(other.cost or 0.0 for other in fitting)]
    else:
        fitting = [t for t in fitting if TOLERANCE * t.samples_per_s >= max(other.samples_per_s for other in fitting)]
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
        check("ranks", count, Count, PlanError, "Pass 'auto', or a list of numbers.")
    return sorted(set(ranks))


def _replicas(ranks: int, replicas: int | Literal["auto"]) -> list[int]:
    if replicas != "auto":
        return [replicas] if ranks % replicas == 0 else []
    return [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0]


def _try(workload: Workload, ranks: int, hardware: Hardware, options: Mapping[str, Any]) -> RankTrial:
    try:
        found = search(workload, ranks // workload.replicas, hardware, **options)
    except PlanError as error:
        return RankTrial(ranks, workload.replicas, None, refused=str(error))
    rate = workload.batch_size / estimate_step(found.plan, found.costs, found.model).seconds
    cost = None
    if hardware.price_per_hour is not None:
        nodes = math.ceil(ranks / hardware.ranks_per_node)
        cost = nodes * hardware.price_per_hour / SECONDS_PER_HOUR / rate * 1e9
    return RankTrial(ranks, workload.replicas, found, rate, cost)
