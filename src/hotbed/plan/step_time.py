"""Estimate the time of a training step, and list its terms.

``T = max(tables + dense + messages + launches + max(all-reduce − 2/3 dense, 0), input)``. ``tables`` is the load of the
busiest rank. ``dense`` is the time of forward and backward. Backward, two thirds of it, overlaps the all-reduce, as in
Mudigere et al. (2021, arXiv 2104.05158, §5). No other overlap and no stragglers are modelled. Ranks that share cores
have no overlap, because their all-reduce uses the same cores.

If a machine's overheads were measured (`hotbed.measure.step_overheads`), ``messages`` and ``launches`` are the measured
times of interpreter, autograd, optimizers and exchanges. On a CPU they are most of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hotbed.plan.cost import (
    COMBINED_LAUNCHES,
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
"""Size of a bucket of dense gradients, and the messages that it is sized for (`hotbed.embed.dense_parallel`)."""
EXCHANGES = 4
"""Exchanges of every step: numbers of ids, ids, rows, gradients (`hotbed.embed.shard_routing`, `row_exchange`)."""
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
"""Hardware figures that the bytes of each of `hotbed.plan.cost.PARTS` are divided by."""


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step on the busiest rank."""

    tables: float
    """Lookups, exchanges and updates."""
    dense: float
    """Products, moved activations, and launches of kernels that are shorter than their launch."""
    messages: float
    """Fixed costs of messages between ranks. With measured overheads: of optional exchanges."""
    launches: float
    """Fixed costs of kernels. With measured overheads: of the step, its arenas, tables and layers."""
    all_reduce: float
    """All-reduce of dense gradients. It overlaps the backward pass."""
    reduce_messages: float
    """Part of ``all_reduce``: fixed costs of messages and of kernels that add received data."""
    input: float
    """Copy of samples to the device. It overlaps the step."""
    hiding: float = 2 / 3
    """Share of ``dense`` that overlaps the all-reduce."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        fixed = self.tables + self.messages + self.launches + self.dense
        return max(fixed + self.exposed_all_reduce, self.input)

    @property
    def exposed_all_reduce(self) -> float:
        """Seconds of the all-reduce beyond the backward pass."""
        return max(self.all_reduce - self.hiding * self.dense, 0.0)

    def to_dict(self) -> dict[str, float]:
        """Return the terms and the step as a JSON object."""
        return {name: value for name, value in asdict(self).items() if name != "hiding"} | {"step": self.seconds}


def estimate_step(plan: Plan, costs: RankCosts, model: CostModel) -> StepEstimate:
    """Estimate a step of a plan, on the hardware of its cost model."""
    here, work = model.hardware, model.workload
    assert here is not None
    reduce_messages = _reduce_messages(model)
    names = model.pooled_in(plan)
    if "step" in here.overheads:
        messages, launches = _measured_fixed(plan.tiles, model)
    else:
        messages, launches = _fixed(plan.tiles, costs, model, model.dims_of_rows(names))
    pooled = model.pooled_s(names)
    messages, launches = messages + pooled.messages, launches + pooled.launches
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
    """Return the links of the all-reduce of dense gradients."""
    assert model.hardware is not None
    work = model.workload
    size = model.world_size * work.replicas
    return Links(hardware=model.hardware, size=size, ranks_per_node=work.ranks_per_node)


def _fixed(tiles: Sequence[Tile], costs: RankCosts, model: CostModel, dims_of_rows: int) -> tuple[float, float]:
    """Return the seconds of messages and launches from the cost of each. Tables of ``dims_of_rows`` send rows."""
    here, work, links = model.hardware, model.workload, model.links
    assert here is not None and links is not None
    copies, sums = optional_exchanges(tiles, work)
    averages = average_messages(costs.parts, work)
    launches = (EXCHANGES_OF_COPIES * copies + sums) * links.launches
    every = links.messages
    if links.combines_rows and dims_of_rows:
        launches, every = launches + COMBINED_LAUNCHES * dims_of_rows, links.messages_of_rows
    else:
        launches += EXCHANGES * links.launches
    messages = (EXCHANGES * every + averages) * here.message_s + optional_s(tiles, model)
    return messages + launches * here.launch_s, table_launches(tiles, work) * here.launch_s


def _measured_fixed(tiles: Sequence[Tile], model: CostModel) -> tuple[float, float]:
    """Return the measured seconds of optional exchanges, and of the fixed parts of every step."""
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
    """Return whether a plan exchanges copies of rows, and sums over columns."""
    uses, tiles = work.by_table, list(tiles)
    copies = any(tile.readers for tile in tiles)
    return copies, any(len(t.cols) < uses[t.table].table.dim and uses[t.table].row_sums for t in tiles)


def optional_s(tiles: Iterable[Tile], model: CostModel) -> float:
    """Return the fixed seconds of the optional exchanges. Their bytes are in `RankCosts`."""
    copies, sums = optional_exchanges(tiles, model.workload)
    return model.copies_s * copies + model.sums_s * sums


def average_messages(parts: Array, work: Workload) -> float:
    """Return the messages of a step that average replicas. ``parts`` are the ranks' costs ``[N, parts]``."""
    return 2 * (work.replicas - 1) / work.sync_every * bool(parts[:, REPLICAS].any())


def products_s(model: CostModel) -> float:
    """Return the seconds of forward and backward without launches. A measured rate includes the update."""
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
    """Return the seconds of a kernel: the longer of its operations and its bytes."""
    here = model.hardware
    assert here is not None
    computing = kernel.flops * model.local_batch / flops_rate(model)
    return max(computing, kernel.nbytes(model.local_batch) / here.stream) * model.cores_share


def flops_rate(model: CostModel) -> float:
    """Return the FLOP/s of the dense part's dtype, or of float32 without a figure for that dtype."""
    here = model.hardware
    assert here is not None
    return here.flops.get(model.workload.dense.dtype) or here.flops.get("fp32") or min(here.flops.values())


def dense_launches_s(model: CostModel) -> float:
    """Return the launch seconds of kernels that are shorter than their launch."""
    return model.workload.dense.launches * (model.hardware.launch_s if model.hardware else 0.0)


def _reduce_messages(model: CostModel) -> float:
    """Estimate the fixed seconds of an all-reduce; 0 if the all-reduce was measured.

    For each bucket and hop, `hotbed.embed.dense_parallel` sends a share to every peer, adds the received shares (in one
    kernel on a GPU, one per addition on cores), and later returns the sum.
    """
    links = all_ranks(model)
    here = links.hardware
    if _measured_all_reduce(links) or links.size == 1:
        return 0.0
    messages = links.messages_of_sums
    launches = messages if here.cores_shared else len(links.hops_of_sums)
    return buckets_of(model) * (2 * messages * here.message_s + launches * here.launch_s)


def buckets_of(model: CostModel) -> int:
    """Return the number of buckets of dense gradients."""
    nbytes = 4.0 * model.workload.dense.parameters
    messages = all_ranks(model).messages_of_sums
    return math.ceil(nbytes / (BUCKET_BYTES * max(math.ceil(messages / BUCKET_MESSAGES), 1)))


def _measured_all_reduce(links: Links) -> Curve | None:
    """Return the measured curve of a one-hop all-reduce, or None."""
    here = links.hardware
    if links.in_two_hops:
        return None
    return here.curve_of(here.all_reduce, links.size, beyond=links.size > here.ranks_per_node)


def _all_reduce(nbytes: float, links: Links) -> float:
    """Return the seconds of an all-reduce in proportion to its bytes."""
    here, ranks = links.hardware, links.size
    curve = _measured_all_reduce(links)
    if curve and ranks > 1:
        seconds = nbytes / interpolated(curve, max(nbytes, 1.0))
        if "step" in here.overheads:  # these include the fixed part
            seconds = max(seconds - min(curve) / curve[min(curve)], 0.0)
        return seconds
    return nbytes * links.byte_s_of_sums()


def arenas_of(tiles: Iterable[Tile], work: Workload) -> int:
    """Return the number of arenas. Tiles of equal width, dtype, memory and readers share an arena and its kernels."""
    return len(_arenas(tiles, work))


def table_launches(tiles: Iterable[Tile], work: Workload) -> int:
    """Return the number of kernels of the arenas of tiles."""
    return sum(work.arena_launches.get(tier, LAUNCHES) for _, _, tier, _ in _arenas(tiles, work))


def _arenas(tiles: Iterable[Tile], work: Workload) -> set[tuple[int, str, Tier, bool]]:
    return {(len(t.cols), work.by_table[t.table].table.dtype, t.tier, bool(t.readers)) for t in tiles}


def parts_of_busiest(costs: RankCosts) -> dict[str, float]:
    """Return the parts of the busiest rank's load, largest first."""
    busiest = costs.parts[int(costs.load.argmax())]
    found = {name: float(value) for name, value in zip(PARTS, busiest, strict=True) if value > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a step on the busiest rank."""

    name: str  # work of the term
    seconds: float  # seconds per step
    amount: float  # counted amount: operations, bytes or seconds
    unit: Literal["FLOP", "B", "s"] = "B"
    kernels: int = 0  # number of kernels, if counted
    figures: tuple[str, ...]  # hardware figures that convert the amount to seconds
    counted: str = FORMULA  # source of the amount
    hidden: bool = False  # whether it overlaps other terms instead of adding to them


def terms_of(plan: Plan, costs: RankCosts, model: CostModel) -> list[Term]:
    """List the terms of `estimate_step`, largest first, hidden terms last.

    Visible terms add up to the step.
    """
    estimate = estimate_step(plan, costs, model)
    found = [*_dense_terms(model, estimate), *_table_terms(costs), *_fixed_terms(plan, model, estimate)]
    return sorted((term for term in found if term.seconds > 0), key=lambda term: (term.hidden, -term.seconds))


def _dense_terms(model: CostModel, estimate: StepEstimate) -> list[Term]:
    """Return terms of the dense part: kernels by group and by their longer time, or one term for all."""
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
    links = ("node_link", "network")[: 1 + (all_ranks(model).size > here.ranks_per_node)]
    pooled = model.pooled_s(model.pooled_in(plan)).launches

    def make_term(name: str, seconds: float, figure: str, **options: object) -> Term:
        found: dict[str, object] = {"amount": seconds, "unit": "s", "figures": (figure,), **options}
        return Term(name=name, seconds=seconds, **found)  # pyright: ignore[reportArgumentType]

    return [
        make_term("fixed costs of the step" if measured else "launches, tables", estimate.launches - pooled,
              "overheads" if measured else "launch_s", kernels=0 if measured else table_launches(plan.tiles, work),
              counted=CENSUS if work.arena_launches and not measured else FORMULA),
        make_term("launches and waits, pooled vectors", pooled, "launch_s", counted=CENSUS),
        make_term("messages", estimate.messages, "overheads" if measured else "message_s"),
        make_term("all-reduce of dense gradients, what backward does not hide", estimate.exposed_all_reduce,
                  "node_link", figures=links),
        make_term("input of the next batch", estimate.input, "host_link", unit="B", hidden=True,
                  amount=work.dense.input_bytes * model.local_batch),
    ]  # fmt: skip
