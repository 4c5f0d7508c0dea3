"""Estimate the memory available for rows: device memory per rank, host memory and disk per node.

Other users of device memory are activations, dense parameters with gradients and moments, exchanged rows, and the
runtime. Other users of host memory are prefetched batches and the snapshot of a checkpoint, for all ranks of a node.
Formulas: docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotbed.errors import PlanError
from hotbed.plan.cost import TIERS, CostModel, RankCosts, gib, table_bytes
from hotbed.plan.tiling import Tier

RUNTIME_SHARE = 0.05
"""Assumed share of device memory for the runtime and fragmentation."""
DENSE_COPIES = 4
"""Float32 copies of dense parameters: weights, gradients and two moments."""
EXCHANGE_OWN, EXCHANGE_OTHERS = 2, 2
"""Arrays of a rank's distinct rows (rows, gradient sums), and of rows that other ranks request."""
BATCHES = 6
"""Batches in a rank's loader: ``data.prefetch`` plus two."""
FILE_SPACE = 1.5
"""Approximate file bytes per byte of rows; see `hotbed.store.file_records`."""
SNAPSHOT_BYTES = 128 << 20
"""Upper limit of a rank's host memory for writing a checkpoint, independent of the number of rows."""


@dataclass(frozen=True)
class Limits:
    """Bytes available for rows and moments: device memory per rank, host memory and disk per node."""

    room: Mapping[Tier, int]
    ranks_on_node: int = 1
    reserved: Mapping[str, int] = field(default_factory=dict[str, int])
    """Other users of a rank's device memory."""

    @property
    def device(self) -> int:
        """Bytes of device memory per rank."""
        return self.room["device"]

    def per_rank(self, tier: Tier) -> int:
        """Return a rank's share of a tier."""
        return self.room[tier] if tier == "device" else self.room[tier] // self.ranks_on_node

    def over(self, costs: RankCosts) -> dict[Tier, int]:
        """Return the excess bytes of the fullest rank or node by tier."""
        found: dict[Tier, int] = {}
        for tier, nbytes in costs.memory.items():
            of_holders: Any = nbytes
            if tier != "device":
                nodes = np.arange(len(nbytes)) // self.ranks_on_node
                of_holders = np.bincount(nodes, weights=nbytes.astype(float)).astype(np.int64)
            if (missing := int(of_holders.max()) - self.room[tier]) > 0:
                found[tier] = missing
        return found


def limits_of(model: CostModel, capacity_bytes: int | None = None, host_bytes: int | None = None) -> Limits:
    """Return the limits of the hardware, or of ``capacity_bytes`` device memory and ``host_bytes`` per rank."""
    unlimited = np.iinfo(np.int64).max // 4
    here, work = model.hardware, model.workload
    if here is None:
        device = unlimited if capacity_bytes is None else capacity_bytes
        return Limits({"device": device, "host": unlimited if host_bytes is None else host_bytes, "disk": unlimited})
    on_node, size, batch = model.ranks_on_node, model.world_size, model.local_batch
    whole = here.device_bytes // (on_node if here.cores_shared else 1)
    exchanged = sum(u.expected.distinct(range(u.table.rows), u.ids * batch) * 4 * u.table.dim for u in work.uses)
    others = EXCHANGE_OTHERS + here.cores_shared  # sent data is also in memory that ranks share
    reserved = {
        "activations": int(work.dense.activation_bytes * batch),
        "dense parameters": DENSE_COPIES * 4 * work.dense.parameters,
        "rows in exchange": int((EXCHANGE_OWN + others * (size - 1) / size) * exchanged) if size > 1 else 0,
        "runtime": int(RUNTIME_SHARE * whole),
    }
    left = whole - sum(reserved.values())
    if capacity_bytes is not None:
        left = min(left, capacity_bytes)
    if left <= 0:
        most = max(reserved, key=lambda what: reserved[what])
        raise PlanError(
            f"device memory of a rank of {here.name}: got {gib(whole)}, expected {gib(-left)} more, because "
            f"{gib(sum(reserved.values()))} are reserved ({most} {gib(reserved[most])}). Lower the batch size, or use "
            "more ranks"
        )
    host = here.host_bytes - on_node * int(BATCHES * work.dense.input_bytes * batch + SNAPSHOT_BYTES)
    if here.cores_shared:  # host and device memory are the same
        host -= on_node * (left + sum(reserved.values()))
    if host_bytes is not None:
        host = min(host, on_node * host_bytes)
    room = {"device": left, "host": max(host, 0), "disk": int(here.disk_bytes / FILE_SPACE)}
    return Limits({tier: room[tier] for tier in TIERS}, on_node, reserved)


def refuse_too_large(
    model: CostModel, limits: Limits, tiers: Sequence[Tier], staying: Mapping[str, Mapping[Tier, int]]
) -> int:
    """Return the bytes of rows beyond device memory, or raise `PlanError` if no allowed tier has room for them.

    The error names the missing bytes and ways out. ``staying`` has the bytes of immovable tables by memory, summed over
    ranks.
    """
    uses, size = model.workload.uses, model.world_size
    total = sum(table_bytes(u.table, u.moments) for u in uses if u.table.name not in staying)
    taken = {tier: sum(nbytes.get(tier, 0) for nbytes in staying.values()) for tier in tiers}
    room = {tier: max(limits.per_rank(tier) * size - taken[tier], 0) for tier in tiers}
    missing = total - sum(room.values())
    if missing <= 0:
        return max(total - room["device"], 0)
    names = {"device": "of device memory", "host": "of host memory", "disk": "on disk"}
    held = ", ".join(f"{gib(nbytes)} {names[tier]}" for tier, nbytes in room.items())
    raise PlanError(
        f"rows and moments take {gib(total)}, {gib(missing)} more than {size} ranks have: {held}. Cheapest ways out: "
        f"{'; '.join(_ways_out(model, limits, tiers, missing))}"
    )


def _ways_out(model: CostModel, limits: Limits, tiers: Sequence[Tier], missing: int) -> list[str]:
    """List ways to make the tables fit, cheapest first."""
    uses, size = model.workload.uses, model.world_size
    found = [
        f"memory.tier {tier} for the coldest {gib(missing)}"
        for tier in TIERS
        if tier not in tiers and limits.per_rank(tier) * size >= missing
    ]
    wide = sum(table_bytes(u.table) for u in uses if u.table.dtype == "fp32")
    if wide / 2 >= missing:
        found.append(f"bf16 rows, which save {gib(wide / 2)}")
    if model.workload.replicas > 1:
        found.append("fewer replicas, so that groups have more ranks")
    each = sum(limits.per_rank(tier) for tier in tiers)
    found.append(f"{-(-missing // each):,} more ranks" if each else "ranks with more memory")
    return found
