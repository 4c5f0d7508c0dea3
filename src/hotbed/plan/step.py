"""Estimate the time of a training step from what its ranks have to do.

``T = max(tables + dense + messages + launches + max(all-reduce − 2/3 dense, 0), input)``: ``tables`` is the load of the
busiest rank, ``dense`` forward and backward passes, of which backward, two thirds, hides the all-reduce. The overlap is
that of Mudigere et al. (2021, arXiv 2104.05158, §5). Nothing else is taken to overlap: stragglers, and exchanges that
hide behind computing, are not in it. Ranks that share cores hide nothing: their all-reduce takes the cores, too.

Where a machine's overheads were measured (`hotbed.measure.step_overheads`), ``messages`` and ``launches`` are these:
what the interpreter, autograd, optimizers and exchanges take beside bytes and products. On a CPU that is most of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hotbed.plan.cost import (
    COPIES,
    EXCHANGES_OF_COPIES,
    LAUNCHES,
    PARTS,
    REPLICAS,
    SUMS,
    Array,
    CostModel,
    RankCosts,
)
from hotbed.plan.hardware import Curve, Hardware, interpolated
from hotbed.plan.links import Links
from hotbed.plan.tiling import Plan, Tier, Tile
from hotbed.plan.workload import Kernel, Workload

BUCKET_BYTES, BUCKET_MESSAGES = 25 << 20, 128
"""Of dense gradients that are averaged at once, and messages for which that is so, as `hotbed.embed.dense` has them."""
EXCHANGES = 4
"""Of every step: numbers of ids, ids, rows, gradients (`hotbed.embed.route`, `row_exchange`)."""


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step, of the busiest rank."""

    tables: float
    """Lookups, exchanges, updates: the load of the busiest rank."""
    dense: float
    """Products, activations moved, and launches of kernels that take less than their launch."""
    messages: float
    """Fixed costs of messages to each other rank; with measured overheads, of exchanges that not every plan has."""
    launches: float
    """Fixed costs of kernels; with measured overheads, of the step, its arenas, tables and layers."""
    all_reduce: float
    """Of dense gradients; hidden behind the backward pass as far as that is longer."""
    reduce_messages: float
    """Of ``all_reduce``, fixed costs of messages, and of kernels that add what arrived."""
    input: float
    """Copying samples to the device; hidden."""
    hiding: float = 2 / 3
    """Share of ``dense`` that hides the all-reduce."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        fixed = self.tables + self.messages + self.launches + self.dense
        return max(fixed + max(self.all_reduce - self.hiding * self.dense, 0.0), self.input)

    def to_dict(self) -> dict[str, float]:
        """Parts and whole, as JSON has them."""
        return {name: value for name, value in asdict(self).items() if name != "hiding"} | {"step": self.seconds}


def estimate_step(plan: Plan, costs: RankCosts, model: CostModel) -> StepEstimate:
    """Estimate a step of a plan, on the hardware of its cost model."""
    here, work = model.hardware, model.workload
    assert here is not None
    busiest = costs.parts[int(costs.load.argmax())]
    reduce_messages = _reduce_messages(model)
    messages, launches = (
        _overheads(plan, model, here) if "step" in here.overheads else _fixed(plan, busiest, model, here)
    )
    return StepEstimate(
        tables=float(costs.load.max()),
        dense=products_s(model) + dense_launches_s(model),
        messages=messages,
        launches=launches,
        all_reduce=_all_reduce(4.0 * work.dense.parameters, all_ranks(model)) + reduce_messages,
        reduce_messages=reduce_messages,
        input=work.dense.input_bytes * model.local_batch / here.host_link,
        hiding=0.0 if here.cores_shared else 2 / 3,
    )


def all_ranks(model: CostModel) -> Links:
    """What dense gradients of all groups are averaged over."""
    assert model.hardware is not None
    work = model.workload
    size = model.world_size * work.replicas
    return Links(hardware=model.hardware, size=size, ranks_per_node=work.ranks_per_node)


def _fixed(plan: Plan, busiest: Array, model: CostModel, here: Hardware) -> tuple[float, float]:
    """Seconds of messages and of launches, by the cost of each."""
    work = model.workload
    exchanges = EXCHANGES + EXCHANGES_OF_COPIES * bool(busiest[COPIES]) + bool(busiest[SUMS])
    links = model.links
    assert links is not None
    copies = exchanges * links.launches * here.launch_s
    messages = exchanges * links.messages + 2 * (work.replicas - 1) / work.sync_every * bool(busiest[REPLICAS])
    return messages * here.message_s + copies, table_launches(plan.tiles, work) * here.launch_s


def _overheads(plan: Plan, model: CostModel, here: Hardware) -> tuple[float, float]:
    """Seconds of exchanges that not every plan has, and of all that every step has, as measured."""
    work, ranks = model.workload, model.ranks_on_node
    tables = work.by_table
    has = {
        "copies": plan.world_size > 1 and any(tile.readers for tile in plan.tiles),
        "sums": any(len(t.cols) < tables[t.table].table.dim and tables[t.table].row_sums for t in plan.tiles),
        "average": (work.replicas > 1) / work.sync_every,
    }
    count = {
        "step": 1,
        "table": len(tables),
        "layer": work.dense.layers,
        **{tier: len({len(t.cols) for t in plan.tiles if t.tier == tier}) for tier in ("host", "disk")},
    }
    some, every = (sum(n * here.overhead(what, ranks) for what, n in of.items()) for of in (has, count))
    return some, every + model.arena_s * arenas_of(plan.tiles, work)


def products_s(model: CostModel) -> float:
    """Seconds of forward and backward pass without launches; with the update where that was measured with them."""
    dense, here = model.workload.dense, model.hardware
    assert here is not None
    operations = dense.flops * model.local_batch
    wide = here.flops.get("fp32") or min(here.flops.values())
    rate = flops_rate(model)
    measured = here.mlp_rate(operations / max(dense.layers, 1), model.ranks_on_node)
    if dense.kernels and measured is None:
        return sum(kernel_s(kernel, model) for kernel in dense.kernels)
    if measured is None:
        products = 3 * operations / rate * model.cores_share
    else:
        products = 3 * operations / (measured * rate / wide)
    moved = dense.moved_bytes * model.local_batch / here.stream * model.cores_share
    return products + moved


def kernel_s(kernel: Kernel, model: CostModel) -> float:
    """Seconds of a kernel of forward or backward pass: of its operations or of its bytes, whichever take longer."""
    here = model.hardware
    assert here is not None
    computing = kernel.flops * model.local_batch / flops_rate(model)
    return max(computing, kernel.nbytes(model.local_batch) / here.stream) * model.cores_share


def flops_rate(model: CostModel) -> float:
    """FLOP/s of the dense part's products; of float32 where there is no figure for their dtype."""
    here = model.hardware
    assert here is not None
    return here.flops.get(model.workload.dense.dtype) or here.flops.get("fp32") or min(here.flops.values())


def dense_launches_s(model: CostModel) -> float:
    """Seconds of the kernels of forward and backward pass that take less than their launch, one after the other."""
    return model.workload.dense.launches * (model.hardware.launch_s if model.hardware else 0.0)


def _reduce_messages(model: CostModel) -> float:
    """Seconds of an all-reduce that are not bytes, as `hotbed.embed.dense` sums in rank order; 0 where it was measured.

    Of each bucket every rank sends a share to every other one, adds theirs in order (in one kernel on a GPU, in one for
    each rank on cores), and sends the sum.
    """
    links = all_ranks(model)
    here = links.hardware
    if _measured_all_reduce(links) or links.size == 1:
        return 0.0
    launches = 2 * links.launches + (links.size - 1 if here.cores_shared else 1)
    messages = 2 * links.messages_of_known_sizes
    return buckets_of(model) * (messages * here.message_s + launches * here.launch_s)


def buckets_of(model: CostModel) -> int:
    """Count the buckets that dense gradients are averaged in."""
    nbytes = 4.0 * model.workload.dense.parameters
    messages = all_ranks(model).messages_of_known_sizes
    return math.ceil(nbytes / (BUCKET_BYTES * max(math.ceil(messages / BUCKET_MESSAGES), 1)))


def _measured_all_reduce(links: Links) -> Curve | None:
    """What was measured, of one hop."""
    here = links.hardware
    if links.in_two_hops:
        return None
    return here.curve_of(here.all_reduce, links.size, beyond=links.size > here.ranks_per_node)


def _all_reduce(nbytes: float, links: Links) -> float:
    """Seconds of the bytes of an all-reduce."""
    here, ranks = links.hardware, links.size
    curve = _measured_all_reduce(links)
    if curve and ranks > 1:
        seconds = nbytes / interpolated(curve, max(nbytes, 1.0))
        if "step" in here.overheads:  # which has the smallest
            seconds = max(seconds - min(curve) / curve[min(curve)], 0.0)
        return seconds
    if links.in_two_hops:
        return 2 * (ranks - 1) / ranks * nbytes * links.byte_s("shards")
    link = here.node_link
    if ranks > here.ranks_per_node:
        link = min(link, here.network * here.network_efficiency / here.oversubscription)
    return 2 * (ranks - 1) / ranks * nbytes / link


def arenas_of(tiles: Iterable[Tile], work: Workload) -> int:
    """Count the arenas of these tiles: those alike in width, dtype, memory and readers share kernels."""
    return len(_arenas(tiles, work))


def table_launches(tiles: Iterable[Tile], work: Workload) -> int:
    """Count the kernels of the arenas of these tiles."""
    return sum(work.arena_launches.get(tier, LAUNCHES) for _, _, tier, _ in _arenas(tiles, work))


def _arenas(tiles: Iterable[Tile], work: Workload) -> set[tuple[int, str, Tier, bool]]:
    return {(len(t.cols), work.by_table[t.table].table.dtype, t.tier, bool(t.readers)) for t in tiles}


def parts_of_busiest(costs: RankCosts) -> dict[str, float]:
    """What the busiest rank's load is made of, largest first."""
    busiest = costs.parts[int(costs.load.argmax())]
    found = {name: float(value) for name, value in zip(PARTS, busiest, strict=True) if value > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
