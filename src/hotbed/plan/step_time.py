"""Estimate the time of a training step from what its ranks have to do, and list its terms.

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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hotbed.plan.cost import (
    COPIES,
    DISK,
    EXCHANGES_OF_COPIES,
    GRADIENTS,
    GROUPING,
    HOST,
    IDS,
    LAUNCHES,
    LOOKUP,
    PARTS,
    POOLING,
    REPLICAS,
    ROWS,
    SUMS,
    UPDATE,
    Array,
    CostModel,
    RankCosts,
)
from hotbed.plan.hardware import Curve, interpolated
from hotbed.plan.links import Links
from hotbed.plan.tiling import Plan, Tier, Tile
from hotbed.plan.workload import Kernel, Workload

BUCKET_BYTES, BUCKET_MESSAGES = 25 << 20, 128
"""Of dense gradients that are averaged at once, and messages for which that is so, as `hotbed.embed.dense_parallel`
has them."""
EXCHANGES = 4
"""Of every step: numbers of ids, ids, rows, gradients (`hotbed.embed.route`, `row_exchange`)."""
CENSUS = "kernels of the step: tests/census"
FORMULA = "formula: docs/planning.md"
_FIGURES = {
    LOOKUP: ("gather",),
    POOLING: ("gather",),
    UPDATE: ("scatter",),
    HOST: ("host_link", "host_stream"),
    DISK: ("disk_read",),
    GROUPING: ("overheads",),
    **dict.fromkeys((IDS, ROWS, GRADIENTS, COPIES, SUMS, REPLICAS), ("node_link", "network")),
}
"""By part of `hotbed.plan.cost`, the figures of the machine that its bytes are divided by."""


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
        return max(fixed + self.exposed_all_reduce, self.input)

    @property
    def exposed_all_reduce(self) -> float:
        """Seconds of the all-reduce that the backward pass does not hide."""
        return max(self.all_reduce - self.hiding * self.dense, 0.0)

    def to_dict(self) -> dict[str, float]:
        """Parts and whole, as JSON has them."""
        return {name: value for name, value in asdict(self).items() if name != "hiding"} | {"step": self.seconds}


def estimate_step(plan: Plan, costs: RankCosts, model: CostModel) -> StepEstimate:
    """Estimate a step of a plan, on the hardware of its cost model."""
    here, work = model.hardware, model.workload
    assert here is not None
    reduce_messages = _reduce_messages(model)
    messages, launches = (_measured_fixed if "step" in here.overheads else _fixed)(plan.tiles, costs, model)
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


def _fixed(tiles: Sequence[Tile], costs: RankCosts, model: CostModel) -> tuple[float, float]:
    """Seconds of messages and of launches, by the cost of each."""
    here, work, links = model.hardware, model.workload, model.links
    assert here is not None and links is not None
    copies, sums = optional_exchanges(tiles, work)
    exchanges = EXCHANGES + EXCHANGES_OF_COPIES * copies + sums
    averages = average_messages(costs.parts, work)
    messages = (EXCHANGES * links.messages + averages) * here.message_s + optional_s(tiles, model)
    return messages + exchanges * links.launches * here.launch_s, table_launches(tiles, work) * here.launch_s


def _measured_fixed(tiles: Sequence[Tile], _: RankCosts, model: CostModel) -> tuple[float, float]:
    """Seconds of exchanges that not every plan has, and of all that every step has, as measured."""
    here, work, ranks = model.hardware, model.workload, model.ranks_on_node
    assert here is not None
    average = (work.replicas > 1) / work.sync_every * here.overhead("average", ranks)
    count = {
        "step": 1,
        "table": len(work.uses),
        "layer": work.dense.layers,
        **{tier: len({len(t.cols) for t in tiles if t.tier == tier}) for tier in ("host", "disk")},
    }
    every = sum(n * here.overhead(what, ranks) for what, n in count.items())
    return optional_s(tiles, model) + average, every + model.arena_s * arenas_of(tiles, work)


def optional_exchanges(tiles: Iterable[Tile], work: Workload) -> tuple[bool, bool]:
    """Return whether a plan exchanges copies of rows, and sums over columns, which not every plan does."""
    uses, tiles = work.by_table, list(tiles)
    copies = any(tile.readers for tile in tiles)
    return copies, any(len(t.cols) < uses[t.table].table.dim and uses[t.table].row_sums for t in tiles)


def optional_s(tiles: Iterable[Tile], model: CostModel) -> float:
    """Fixed seconds of these exchanges; their bytes are in `RankCosts`."""
    copies, sums = optional_exchanges(tiles, model.workload)
    return model.copies_s * copies + model.sums_s * sums


def average_messages(parts: Array, work: Workload) -> float:
    """Messages of a step that average replicas, by ranks' costs ``[N, parts]``."""
    return 2 * (work.replicas - 1) / work.sync_every * bool(parts[:, REPLICAS].any())


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
    """Estimate the seconds of an all-reduce that are not bytes; 0 where it was measured.

    `hotbed.embed.dense_parallel` sums in rank order.
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


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a step of the busiest rank."""

    name: str  # what is done
    seconds: float  # of a step
    amount: float  # what is counted: operations, bytes, or things that each take as long
    unit: Literal["FLOP", "B", "s"] = "B"
    kernels: int = 0  # of how many, where that is counted
    figures: tuple[str, ...]  # of the machine, by which the amount becomes seconds
    counted: str = FORMULA  # where the amount is from
    hidden: bool = False  # whether it is beside the others, and not added to them


def terms_of(plan: Plan, costs: RankCosts, model: CostModel) -> list[Term]:
    """List the terms of `estimate_step`, largest first, those that are hidden last.

    Those that are not hidden add up to the step, but for what of an all-reduce the backward pass hides.
    """
    estimate = estimate_step(plan, costs, model)
    found = [*_dense_terms(model, estimate), *_table_terms(costs), *_fixed_terms(plan, model, estimate)]
    return sorted((term for term in found if term.seconds > 0), key=lambda term: (term.hidden, -term.seconds))


def _dense_terms(model: CostModel, estimate: StepEstimate) -> list[Term]:
    """Kernels of the dense part by what they belong to and which of their two times is longer; else all as one."""
    work, here = model.workload, model.hardware
    assert here is not None
    dense, samples = work.dense, model.local_batch
    launches = dense.launches * here.launch_s
    fixed = Term(name="launches, dense part", seconds=launches, amount=launches, unit="s", kernels=dense.launches,
                 figures=("launch_s",), counted=CENSUS)  # fmt: skip
    if not dense.kernels or here.mlp:
        figures = ("mlp",) if here.mlp else ("flops", "stream")
        rest = estimate.dense - launches
        return [Term(name="dense part", seconds=rest, amount=3 * dense.flops * samples, unit="FLOP", figures=figures),
                fixed]  # fmt: skip
    grouped: dict[tuple[str, bool], list[float]] = {}
    for kernel in dense.kernels:
        computes = kernel.flops * samples / flops_rate(model) > kernel.nbytes(samples) / here.stream
        sums = grouped.setdefault((kernel.part, computes), [0.0, 0.0, 0.0])
        sums[0] += kernel_s(kernel, model)
        sums[1] += kernel.flops * samples if computes else kernel.nbytes(samples)
        sums[2] += 1
    both = {part for part, computes in grouped if (part, not computes) in grouped}
    return [
        Term(
            name=part + (" (bound by bytes)" if part in both and not computes else ""),
            seconds=seconds,
            amount=amount,
            unit="FLOP" if computes else "B",
            kernels=int(count),
            figures=("flops" if computes else "stream",),
            counted=CENSUS,
        )
        for (part, computes), (seconds, amount, count) in grouped.items()
    ] + [fixed]


def _table_terms(costs: RankCosts) -> list[Term]:
    busiest = int(costs.load.argmax())
    return [
        Term(
            name={LOOKUP: "lookup", HOST: "rows from and to the host", DISK: "rows from and to disks"}.get(part, name),
            seconds=float(costs.parts[busiest, part]),
            amount=float(costs.parts_bytes[busiest, part]),
            figures=_FIGURES[part],
        )
        for part, name in enumerate(PARTS)
    ]


def _fixed_terms(plan: Plan, model: CostModel, estimate: StepEstimate) -> list[Term]:
    here, work = model.hardware, model.workload
    assert here is not None
    measured = "step" in here.overheads

    def alike(name: str, seconds: float, figure: str, **options: object) -> Term:
        found: dict[str, object] = {"amount": seconds, "unit": "s", "figures": (figure,), **options}
        return Term(name=name, seconds=seconds, **found)  # pyright: ignore[reportArgumentType]

    return [
        alike("fixed costs of the step" if measured else "launches, tables", estimate.launches,
              "overheads" if measured else "launch_s", kernels=0 if measured else table_launches(plan.tiles, work),
              counted=CENSUS if work.arena_launches and not measured else FORMULA),
        alike("messages", estimate.messages, "overheads" if measured else "message_s"),
        alike("all-reduce of dense gradients, what backward does not hide", estimate.exposed_all_reduce, "node_link"),
        alike("input of the next batch", estimate.input, "host_link", unit="B", hidden=True,
              amount=work.dense.input_bytes * model.local_batch),
    ]  # fmt: skip
