"""Count what a step takes of each resource of a rank: bytes, seconds, and the share of the step in which it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hotbed.plan.cost import (
    COPIES,
    DISK,
    GRADIENTS,
    HOST,
    IDS,
    LOOKUP,
    POOLING,
    REPLICAS,
    ROWS,
    SUMS,
    UPDATE,
    CostModel,
    RankCosts,
)


@dataclass(frozen=True)
class Usage:
    """Of one resource, per step and rank.

    Attributes
    ----------
    amount, unit
        Mean over ranks; bytes, or floating-point operations. Of cores nothing is counted but time.
    most
        Of the rank with most.
    seconds
        In which it is used, mean over ranks.
    utilisation
        Share of the step.
    """

    amount: float
    unit: Literal["B", "FLOP", ""]
    most: float
    seconds: float
    utilisation: float


def link_of(model: CostModel) -> str:
    """Which link an exchange in a group waits for: ``"node link"`` or ``"network"``."""
    here = model.hardware
    assert here is not None
    near = model.near_share("shards")
    across = here.oversubscription / (here.network * here.network_efficiency)
    return "network" if (1 - near) * across > near / here.node_link else "node link"


def usage_of(busy: Mapping[str, float], step_s: float, costs: RankCosts, model: CostModel) -> dict[str, Usage]:
    """By resource; those of which nothing is used are left out.

    Parameters
    ----------
    busy
        By resource of the simulation, mean seconds of a step.
    step_s
        Seconds of a step.
    costs, model
        Bytes by part of a step, and what they go over.
    """
    here, work = model.hardware, model.workload
    assert here is not None
    ranks = model.world_size * work.replicas
    parts = costs.parts_bytes
    shards = parts[:, [IDS, ROWS, GRADIENTS, COPIES, SUMS]].sum(1)
    average, dense = parts[:, REPLICAS], 2 * (ranks - 1) / ranks * 4.0 * work.dense.parameters
    near, near_replicas = model.near_share("shards"), model.near_share("replicas")
    far_dense = ranks > here.ranks_per_node
    inside = near * shards + near_replicas * average + (0.0 if far_dense else dense)
    across = (1 - near) * shards + (1 - near_replicas) * average + (dense if far_dense else 0.0)
    network = here.network * here.network_efficiency / here.oversubscription
    links = {"node link": (inside, here.node_link), "network": (across, network)}
    amounts = {
        "device memory": parts[:, [LOOKUP, POOLING, UPDATE]].sum(1),
        "arithmetic": 0 * average + 3 * work.dense.flops * model.local_batch,
        **{name: amount for name, (amount, _) in links.items()},
        "host link": parts[:, HOST] + work.dense.input_bytes * model.local_batch,
        "disk": parts[:, DISK],
        "cores": 0 * average,
    }
    found: dict[str, Usage] = {}
    for name, amount in amounts.items():
        mean = float(amount.mean())
        seconds = mean / links[name][1] if name in links else busy.get(name, 0.0)
        if seconds > 0:
            unit = "FLOP" if name == "arithmetic" else "" if name == "cores" else "B"
            found[name] = Usage(mean, unit, float(amount.max()), seconds, seconds / step_s)
    return found


def amount_text(value: float, unit: str) -> str:
    """An amount with a decimal prefix; nothing where nothing is counted."""
    if not unit:
        return ""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:,.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}"
