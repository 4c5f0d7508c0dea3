"""Say how much memory a machine leaves to rows: of the device per rank, of the host and its disks per node.

What is beside rows: activations, dense parameters with their gradients and moments, rows in exchange, what the runtime
takes; on the host batches that are ready and the snapshot of a checkpoint, of all ranks of a node. Formulas:
docs/planning.md.
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
"""Of a device's memory that the runtime and fragmentation take; assumed."""
DENSE_COPIES = 4
"""Weights, gradients and two moments, float32."""
EXCHANGE_OWN, EXCHANGE_OTHERS = 2, 2
"""Arrays of the distinct rows of a rank's batch (rows, sums of gradients), and of those that other ranks ask it for."""
BATCHES = 6
"""Batches that a rank's loader has ready or in use: ``data.prefetch`` and two."""
FILE_SPACE = 1.5
"""Bytes of a large file per byte of its rows, about; see `hotbed.store.segments`."""
SNAPSHOT_BYTES = 128 << 20
"""Upper limit of what a rank takes of the host's memory to write a checkpoint, whatever the number of rows."""


@dataclass(frozen=True)
class Limits:
    """Bytes that rows and moments can take: of the device's memory per rank, of host and disk per node."""

    room: Mapping[Tier, int]
    ranks_on_node: int = 1
    beside: Mapping[str, int] = field(default_factory=dict[str, int])
    """What else is in a rank's device memory."""

    @property
    def device(self) -> int:
        """Bytes per rank."""
        return self.room["device"]

    def per_rank(self, tier: Tier) -> int:
        """A rank's share."""
        return self.room[tier] if tier == "device" else self.room[tier] // self.ranks_on_node

    def over(self, costs: RankCosts) -> dict[Tier, int]:
        """By tier, bytes that the fullest rank or node has too many."""
        found: dict[Tier, int] = {}
        for tier, nbytes in costs.memory.items():
            of_places: Any = nbytes
            if tier != "device":
                nodes = np.arange(len(nbytes)) // self.ranks_on_node
                of_places = np.bincount(nodes, weights=nbytes.astype(float)).astype(np.int64)
            if (missing := int(of_places.max()) - self.room[tier]) > 0:
                found[tier] = missing
        return found


def limits_of(model: CostModel, capacity_bytes: int | None = None, host_bytes: int | None = None) -> Limits:
    """Limits of a model's hardware, or ``capacity_bytes`` of device memory and ``host_bytes`` per rank."""
    unlimited = np.iinfo(np.int64).max // 4
    here, work = model.hardware, model.workload
    if here is None:
        device = unlimited if capacity_bytes is None else capacity_bytes
        return Limits({"device": device, "host": unlimited if host_bytes is None else host_bytes, "disk": unlimited})
    on_node, size, batch = model.ranks_on_node, model.world_size, model.local_batch
    whole = here.device_bytes // (on_node if here.cores_shared else 1)
    exchanged = sum(u.expected.distinct(range(u.table.rows), u.ids * batch) * 4 * u.table.dim for u in work.uses)
    others = EXCHANGE_OTHERS + here.cores_shared  # what ranks of a machine send lies in memory that they share, too
    beside = {
        "activations": int(work.dense.activation_bytes * batch),
        "dense parameters": DENSE_COPIES * 4 * work.dense.parameters,
        "rows in exchange": int((EXCHANGE_OWN + others * (size - 1) / size) * exchanged) if size > 1 else 0,
        "runtime": int(RUNTIME_SHARE * whole),
    }
    left = whole - sum(beside.values())
    if capacity_bytes is not None:
        left = min(left, capacity_bytes)
    if left <= 0:
        most = max(beside, key=lambda what: beside[what])
        raise PlanError(
            f"a rank of {here.name} has {gib(whole)} of device memory, and {gib(sum(beside.values()))} are needed "
            f"beside rows ({most} {gib(beside[most])}), {gib(-left)} more; lower the batch size, or use more ranks"
        )
    host = here.host_bytes - on_node * int(BATCHES * work.dense.input_bytes * batch + SNAPSHOT_BYTES)
    if here.cores_shared:  # the host's memory is the device's, of which a limit leaves the rest
        host -= on_node * (left + sum(beside.values()))
    if host_bytes is not None:
        host = min(host, on_node * host_bytes)
    room = {"device": left, "host": max(host, 0), "disk": int(here.disk_bytes / FILE_SPACE)}
    return Limits({tier: room[tier] for tier in TIERS}, on_node, beside)


def refuse_too_large(
    model: CostModel, limits: Limits, tiers: Sequence[Tier], staying: Mapping[str, Mapping[Tier, int]]
) -> int:
    """Return bytes of rows that the devices cannot hold; raise `PlanError` if no allowed tier holds them either.

    The error says what binds, by how many bytes, and what would help. ``staying``: by table that nothing moves, what it
    takes of each memory on all ranks together.
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
        f"rows and moments take {gib(total)}, and {size} ranks have {held} for them: {gib(missing)} too few; cheapest "
        f"ways out: {'; '.join(_ways_out(model, limits, tiers, missing))}"
    )


def _ways_out(model: CostModel, limits: Limits, tiers: Sequence[Tier], missing: int) -> list[str]:
    """What would make the tables fit, that which costs least first."""
    uses, size = model.workload.uses, model.world_size
    found = [
        f"memory.tier {tier} for the coldest {gib(missing)}"
        for tier in TIERS
        if tier not in tiers and limits.per_rank(tier) * size >= missing
    ]
    wide = sum(table_bytes(u.table) for u in uses if u.table.dtype == "fp32")
    if wide / 2 >= missing:
        found.append(f"bf16 rows, which take {gib(wide / 2)} less")
    if model.workload.replicas > 1:
        found.append("fewer replicas, whose groups have more ranks")
    each = sum(limits.per_rank(tier) for tier in tiers)
    found.append(f"{-(-missing // each):,} more ranks" if each else "ranks with more memory")
    return found
