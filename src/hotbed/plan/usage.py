"""Count what a step takes of each resource of a rank: bytes, seconds, and the share of the step in which it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

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
from hotbed.plan.links import LinkName
from hotbed.plan.step import all_ranks, products_s


@dataclass(frozen=True)
class Usage:
    """Of one resource, per step and rank."""

    amount: float  # mean over ranks
    unit: Literal["B", "FLOP", ""]  # of cores nothing is counted but time
    most: float  # of the rank with most
    seconds: float  # in which it is used, mean over ranks
    utilisation: float  # share of the step


def link_of(model: CostModel, exchange: str) -> str:
    """Which link an exchange of the simulation waits for: ``"node link"`` or ``"network"``."""
    here = model.hardware
    assert here is not None
    if exchange == "all-reduce":
        everyone = all_ranks(model)
        if everyone.in_two_hops:
            return everyone.slowest("shards")
        return "network" if everyone.size > here.ranks_per_node else "node link"
    assert model.links is not None
    return model.links.slowest("replicas" if exchange == "average" else "shards")


def usage_of(
    busy: Mapping[str, float], step_s: float, costs: RankCosts, model: CostModel, all_reduce_s: float
) -> dict[str, Usage]:
    """By resource; those of which nothing is used are left out.

    Of two links that carry at once the slower is in use for the seconds that an exchange is charged, messages aside.
    """
    here, work = model.hardware, model.workload
    assert here is not None and model.links is not None
    everyone = all_ranks(model)
    ranks = everyone.size
    parts = costs.parts_bytes
    none, exchanged = np.zeros(len(parts)), [IDS, ROWS, GRADIENTS, COPIES, SUMS]
    dense = none + 2 * (ranks - 1) / ranks * 4.0 * work.dense.parameters
    rates = dict(model.links.rates())
    links, on_links = dict.fromkeys(rates, none), dict.fromkeys(rates, 0.0)
    all_near = float(ranks <= here.ranks_per_node)
    over_all: dict[LinkName, float] = {"node link": all_near, "network": 1 - all_near}
    reduced_s = max(share / rates[name] for name, share in over_all.items())
    if everyone.in_two_hops:
        over_all, reduced_s = everyone.shares("shards"), everyone.byte_s("shards")
    exchanges, averages = model.links.shares("shards"), model.links.shares("replicas")
    for nbytes, shares, byte_s, charged in (
        (parts[:, exchanged].sum(1), exchanges, model.links.byte_s("shards"), costs.parts[:, exchanged].sum(1).mean()),
        (parts[:, REPLICAS], averages, model.links.byte_s("replicas"), costs.parts[:, REPLICAS].mean()),
        (dense, over_all, reduced_s, all_reduce_s),
    ):
        for name, rate in rates.items():
            links[name] = links[name] + shares[name] * nbytes
            on_links[name] += float(charged) * shares[name] / rate / byte_s
    amounts = {
        "device memory": parts[:, [LOOKUP, POOLING, UPDATE]].sum(1),
        "arithmetic": none + 3 * work.dense.flops * model.local_batch,
        **links,
        "host link": parts[:, HOST] + work.dense.input_bytes * model.local_batch,
        "disk": parts[:, DISK],
        "cores": none,
    }
    used = {"arithmetic": products_s(model), **busy, **on_links}
    found: dict[str, Usage] = {}
    for name, amount in amounts.items():
        mean = float(amount.mean())
        seconds = used.get(name, 0.0)
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
