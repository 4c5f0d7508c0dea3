"""Estimate the time of a training step from what its ranks have to do.

``T = max(tables + dense + messages + launches + max(all-reduce − 2/3 dense, 0), input)``: ``tables`` is the load of the
busiest rank, ``dense`` forward and backward passes, of which backward, two thirds, hides the all-reduce. The overlap is
that of Mudigere et al. (2021, arXiv 2104.05158, §5). Nothing else is taken to overlap: stragglers, and exchanges that
hide behind computing, are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hotbed.plan.cost import COPIES, EXCHANGES_OF_COPIES, PARTS, REPLICAS, SUMS, CostModel, RankCosts
from hotbed.plan.hardware import interpolated
from hotbed.plan.tiling import Plan, Tile
from hotbed.plan.workload import Workload

EXCHANGES = 4
"""Of every step: numbers of ids, ids, rows, gradients (`hotbed.embed.route`, `row_exchange`)."""
LAUNCHES = 12
"""Kernels of an arena in a step: grouping and looking up, sums per row, update; counted in the code of a GPU's step."""


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step, of the busiest rank."""

    tables: float
    """Lookups, exchanges, updates: the load of the busiest rank."""
    dense: float
    """Products, and activations moved; or launches of kernels, where these take longer."""
    messages: float
    """Fixed costs of messages to each other rank."""
    launches: float
    all_reduce: float
    """Of dense gradients; hidden behind the backward pass as far as that is longer."""
    input: float
    """Copying samples to the device; hidden."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        fixed = self.tables + self.messages + self.launches + self.dense
        return max(fixed + max(self.all_reduce - 2 / 3 * self.dense, 0.0), self.input)

    def to_dict(self) -> dict[str, float]:
        """Parts and whole, as JSON has them."""
        return asdict(self) | {"step": self.seconds}


def estimate_step(plan: Plan, costs: RankCosts, model: CostModel) -> StepEstimate:
    """Estimate a step of a plan, on the hardware of its cost model."""
    here, work, dense = model.hardware, model.workload, model.workload.dense
    assert here is not None
    ranks = plan.world_size * work.replicas
    busiest = costs.parts[int(costs.load.argmax())]
    exchanges = EXCHANGES + EXCHANGES_OF_COPIES * bool(busiest[COPIES]) + bool(busiest[SUMS])
    messages = exchanges * (plan.world_size - 1) + 2 * (work.replicas - 1) / work.sync_every * bool(busiest[REPLICAS])
    rate = here.flops.get(dense.dtype) or here.flops.get("fp32") or min(here.flops.values())
    nbytes = 4.0 * dense.parameters
    if here.all_reduce and ranks > 1:
        near = min(here.all_reduce, key=lambda n: abs(n - ranks))
        all_reduce = nbytes / interpolated(here.all_reduce[near], max(nbytes, 1.0))
    else:
        link = here.node_link
        if ranks > here.ranks_per_node:
            link = min(link, here.network * here.network_efficiency / here.oversubscription)
        all_reduce = 2 * (ranks - 1) / ranks * nbytes / link
    computed = (3 * dense.flops / rate + dense.moved_bytes / here.stream) * model.local_batch * model.cores_share
    return StepEstimate(
        tables=float(costs.load.max()),
        dense=max(computed, dense.launches * here.launch_s),
        messages=messages * here.message_s,
        launches=LAUNCHES * arenas_of(plan.tiles, work) * here.launch_s,
        all_reduce=all_reduce,
        input=dense.input_bytes * model.local_batch / here.host_link,
    )


def arenas_of(tiles: Iterable[Tile], work: Workload) -> int:
    """Count the arenas of these tiles: those alike in width, dtype, memory and readers share kernels."""
    return len({(len(t.cols), work.by_table[t.table].table.dtype, t.tier, bool(t.readers)) for t in tiles})


def parts_of_busiest(costs: RankCosts) -> dict[str, float]:
    """What the busiest rank's load is made of, largest first."""
    busiest = costs.parts[int(costs.load.argmax())]
    found = {name: float(value) for name, value in zip(PARTS, busiest, strict=True) if value > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
