"""Simulate training steps of a plan on any hardware: operations, their overlap, and the waits of ranks.

`hotbed.plan.cost` and `hotbed.plan.step_time` estimate the seconds of operations. This file defines their order, as in
the trainer. For batch ``b``, the threads of a rank run these operations (at ``│``, ranks wait for each other)::

    prefetch    input b+1 · (ids b+1 │ · read ahead b+1)                                                  over Gloo
    step        (ids b │) · launches · slower memories · lookup · rows │ · pooling · forward · loss │
                  · backward · sums per row · gradients │ · update · sums │ · write back · copies │
    all-reduce                        bucket by bucket, as backward makes them │
    average     every `sync_every` steps, until the next reader of rows │                                 over Gloo

Over NCCL, exchanges never overlap with each other (`hotbed.comm`), so the thread "step" exchanges ids and averages
replicas. An all-to-all ends for all ranks when the rank with most bytes has finished, because all ranks need rows from
that rank. Stragglers are ranks that compute more slowly; they are drawn for each step.

Each thread issues operations in a fixed order (`Timeline`). An operation begins when its thread and its resource are
free. An exchange begins when the last rank is ready. Each resource serves one operation at a time, in the order of the
calls of `Timeline.run`. So a shorter operation never delays a different operation, as it could if resources reordered
their operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from hotbed.checks import Range, Section, Size
from hotbed.errors import PlanError
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
    Array,
    CostModel,
    RankCosts,
)
from hotbed.plan.hardware import Hardware
from hotbed.plan.step_time import (
    EXCHANGES_OF_COPIES,
    StepEstimate,
    all_ranks,
    average_messages,
    buckets_of,
    dense_launches_s,
    estimate_step,
    products_s,
)
from hotbed.plan.tiling import Plan

MOST_BUCKETS = 16
"""Largest number of buckets (parts of the all-reduce) that are simulated; with more buckets, several are merged."""
WARM_UP, MEASURED = 8, 32
"""Number of first steps that are not counted, and smallest number of steps that are counted."""
DRAWN = 3
"""Events are recorded in this many steps."""
Among = Literal["rank", "shards", "replicas", "all"]
"""Ranks that wait for each other in an operation.

``rank`` is one rank, ``shards`` is a group of ranks with one copy of the tables, ``replicas`` are the ranks that have
copies of the same rows, and ``all`` are all ranks."""
_AXES: dict[Among, tuple[int, ...]] = {"rank": (), "shards": (1,), "replicas": (0,), "all": (0, 1)}
THREADS = ("step", "prefetch", "all-reduce", "average")
"""Threads of a rank, as in `hotbed.train.prefetch`, `hotbed.embed.dense_parallel` and `hotbed.embed.replicas`."""


# -- options and results -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stragglers(Section, where="stragglers.", error=PlanError):
    """Ranks that are slow in some steps."""

    share: Annotated[float, Range(least=0, most=1)] = 0.0  # probability that a rank is slow in a step
    slowdown: Annotated[float, Range(least=1)] = 1.5  # factor for the seconds of a slow rank's computation and reads
    seed: Size = 0  # seed of the draws


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Kinds of work that overlap with the computation of a batch."""

    ids: bool  # ids of the next batch are exchanged, and the rows that it needs from files are read
    averages: bool  # replicas are averaged until an operation reads their rows
    buckets: bool = True  # the all-reduce begins after the first bucket of backward; if false, it begins with backward

    @classmethod
    def of(cls, hardware: Hardware) -> Overlap:
        """Return what overlaps on a machine; between GPUs, which use NCCL, exchanges do not overlap."""
        return cls(ids=hardware.cores_shared, averages=hardware.cores_shared)


@dataclass(frozen=True)
class Usage:
    """How much a step uses one resource."""

    amount: float  # bytes or operations of a rank, mean over ranks
    unit: Literal["B", "FLOP", ""]  # unit of amounts; empty for cores, of which only seconds are counted
    most: float  # largest amount of a rank
    seconds: float  # seconds of a rank, mean over ranks
    utilisation: float  # seconds as a share of the step


@dataclass(frozen=True)
class Event:
    """An operation that one rank has run."""

    rank: int
    thread: str
    name: str
    resource: str  # empty for a wait
    start: float  # seconds since the beginning of the simulation
    seconds: float


@dataclass(frozen=True)
class Simulation:
    """Results of a simulated run."""

    steps: int  # counted steps
    step_s: float
    samples_per_s: float  # throughput of all ranks together
    critical: Mapping[str, float]  # for the rank that waits least, seconds of a step by operation, longest first
    waiting: float  # share of a step in which a rank waits for other ranks or for a resource, mean over ranks
    binds: str  # the resource that this rank uses longest; ``"messages"`` if the fixed costs of messages are largest
    usage: Mapping[str, Usage]  # by resource
    nodes: int
    price_per_hour: float | None  # price of a node
    closed_form: StepEstimate  # estimate by formulas from the same seconds
    events: tuple[Event, ...]  # operations of a few ranks in `DRAWN` steps

    @property
    def per_billion(self) -> float | None:
        """Price of a billion samples, in the currency of the price per hour; None if that price is unknown."""
        if self.price_per_hour is None:
            return None
        return 1e9 / self.samples_per_s / 3600 * self.nodes * self.price_per_hour

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except events as plain values for JSON."""
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "critical_s": dict(self.critical),
            "waiting": self.waiting,
            "binds": self.binds,
            "usage": {name: asdict(usage) for name, usage in self.usage.items()},
            "nodes": self.nodes,
            "price_per_billion_samples": self.per_billion,
            "closed_form_s": self.closed_form.to_dict(),
        }


# -- simulation ----------------------------------------------------------------------------------------------------


def simulate(
    plan: Plan,
    costs: RankCosts,
    model: CostModel,
    *,
    stragglers: Stragglers | None = None,
    overlap: Overlap | None = None,
) -> Simulation:
    """Simulate training steps of a plan; the first `WARM_UP` steps are not counted.

    Without stragglers, ranks of equal load are simulated as one rank, and all replicas as one replica.
    """
    here, work = model.hardware, model.workload
    if here is None:
        raise PlanError("hardware: got none, expected a hardware profile. Set `hardware` of the CostModel.")
    slow = stragglers if stragglers is not None and stragglers.share > 0 and stragglers.slowdown > 1 else None
    parts, counts, first = costs.parts, np.ones(plan.world_size), np.arange(plan.world_size)
    if slow is None:  # costs are rounded, because ranks of equal load may sum tiles in different orders
        rounded = np.round(parts / max(float(parts.max()), 1e-300), 12)
        _, first, counts = np.unique(rounded, axis=0, return_index=True, return_counts=True)
        parts = parts[first]
    estimate = estimate_step(plan, costs, model)
    does = _Trainer(parts, estimate, model, overlap or Overlap.of(here))
    timeline = Timeline(1 if slow is None else work.replicas, len(parts))
    random = np.random.default_rng(0 if slow is None else slow.seed)
    every = work.sync_every if work.replicas > 1 else 1
    measured = -(-MEASURED // every) * every
    begin = 0.0
    does.prefetch(timeline, np.ones((1, 1)))
    for step in range(WARM_UP + measured):
        factor = np.ones((1, 1))
        if slow is not None:
            factor = np.where(random.random((work.replicas, len(parts))) < slow.share, slow.slowdown, 1.0)
        if step == WARM_UP:
            begin = float(timeline.moment().max())
            timeline.reset_counts()
            timeline.watched = _sample(parts, first)
        if step == WARM_UP + DRAWN:
            timeline.watched = []
        does.step(timeline, factor, averages=(step + 1 - WARM_UP) % every == 0)
    seconds = (float(timeline.moment().max()) - begin) / measured
    most = [float(busy.max()) for busy in timeline.busy.values()]
    # The work that is queued for a resource may take longer than the steps, because a queue may still grow.
    seconds = max(seconds, *(total / measured for total in most))
    return _result(timeline, does, measured, seconds, counts, costs, estimate, model)


class _Trainer:
    """The simulated trainer: the operations of a step, and their order."""

    def __init__(self, parts: Array, estimate: StepEstimate, model: CostModel, overlap: Overlap) -> None:
        work = model.workload
        self._overlap = overlap
        self._ranks = model.world_size * work.replicas
        self._every = work.sync_every
        self.buckets = 1
        if overlap.buckets and not (model.hardware is not None and model.hardware.cores_shared):
            self.buckets = min(max(buckets_of(model), 1), MOST_BUCKETS)
        # The fixed costs of messages are divided among exchanges in proportion to their numbers of messages.
        assert model.links is not None
        peers, peers_of_rows = model.links.messages, model.links.messages_of_rows
        messages = {
            "ids": 2 * peers_of_rows,
            "rows": peers_of_rows,
            "gradients": peers_of_rows,
            "copies": EXCHANGES_OF_COPIES * peers * bool(parts[:, COPIES].any()),
            "sums": peers * bool(parts[:, SUMS].any()),
            "average": average_messages(parts, work),
        }
        every = sum(messages.values())
        fixed = estimate.messages / every if every else 0.0
        extra = 0.0 if every else estimate.messages  # without exchanges, these costs count as launches
        dense = "cores" if dense_launches_s(model) > products_s(model) else "arithmetic"
        known = (LOOKUP, POOLING, IDS, ROWS, GRADIENTS, UPDATE, COPIES, SUMS, HOST, DISK, REPLICAS)
        others = [part for part in range(parts.shape[1]) if part not in known]

        def of(part: int, share: float = 1.0) -> Array:
            return share * parts[None, :, part]

        def exchange(name: str, part: int, among: Among = "shards", times: float = 1.0) -> Operation:
            return Operation(name, "links", times * (of(part) + fixed * messages[name]), among)

        def equal(value: float) -> Array:
            return np.full((1, len(parts)), value)

        memory, whole = "device memory", self._every
        self._input = Operation("input", "host link", equal(estimate.input))
        self._ids = exchange("ids", IDS)
        self._read_ahead = Operation("read from disk", "disk", of(DISK, 1 / 2))
        self._launches = Operation("launches", "cores", equal(estimate.launches + extra))
        self._fetch = Operation("read from host", "host link", of(HOST, 1 / 2))
        self._others = Operation("grouping", memory, parts[None][:, :, others].sum(2))
        self._lookup = Operation("lookup", memory, of(LOOKUP))
        self._rows = exchange("rows", ROWS)
        self._pool = Operation("pooling", memory, of(POOLING, 1 / 2))
        self._forward = Operation("forward", dense, equal(estimate.dense / 3))
        self._backward = Operation("backward", dense, equal(2 / 3 * estimate.dense / self.buckets))
        self._reduce = Operation("all-reduce", "links", equal(estimate.all_reduce / self.buckets), "all")
        self._segment = Operation("sums per row", memory, of(POOLING, 1 / 2))
        self._gradients = exchange("gradients", GRADIENTS)
        self._update = Operation("update", memory, of(UPDATE))
        self._sums = exchange("sums", SUMS)
        self._write_host = Operation("write to host", "host link", of(HOST, 1 / 2))
        self._write_disk = Operation("write to disk", "disk", of(DISK, 1 / 2))
        self._copies = exchange("copies", COPIES)
        self._average = exchange("average", REPLICAS, "replicas", whole)
        ahead = [self._input, *([self._ids, self._read_ahead] if overlap.ids else [])]
        self.resources = {op.name: op.resource for op in vars(self).values() if isinstance(op, Operation)}
        self.resources["prefetch"] = max(ahead, key=lambda op: float(op.seconds.max())).resource

    def prefetch(self, on: Timeline, factor: Array) -> None:
        """Run the operations that prepare the next batch; ``factor`` multiplies the seconds of reads from disk."""
        on.run(self._input, "prefetch")
        if self._overlap.ids:
            on.run(self._ids, "prefetch")
            on.run(self._read_ahead.times(factor), "prefetch")

    def step(self, on: Timeline, factor: Array, *, averages: bool) -> None:
        """Run the operations of a step. Except for exchanges, ``factor`` multiplies their seconds.

        With ``averages``, replicas are averaged in this step.
        """

        def alone(*operations: Operation) -> None:
            for operation in operations:
                on.run(operation.times(factor))

        now = on.moment()
        on.join("step", "prefetch", "prefetch")
        on.join_at("prefetch", now)
        self.prefetch(on, factor)
        if not self._overlap.ids:
            on.run(self._ids)
        alone(self._launches)
        on.join("step", "average", "average")
        if not self._overlap.ids:
            alone(self._read_ahead)
        alone(self._others, self._fetch, self._lookup)
        on.run(self._rows)
        alone(self._pool, self._forward)
        if self._ranks > 1:
            on.meet()  # because all ranks must know whether the loss is finite, and the number of samples
        for _ in range(self.buckets):
            if self._overlap.buckets:
                alone(self._backward)
            on.join("all-reduce", "step")
            on.run(self._reduce, "all-reduce")
            if not self._overlap.buckets:
                alone(self._backward)
        alone(self._segment)
        on.run(self._gradients)
        on.join("step", "all-reduce", "all-reduce")
        alone(self._update)
        on.run(self._sums)
        alone(self._write_host, self._write_disk)
        on.run(self._copies)
        if averages and self._overlap.averages:
            on.join("average", "step")
            on.run(self._average, "average")
        elif averages:
            on.run(self._average)


def _sample(parts: Array, first: Array) -> list[tuple[int, int, int]]:
    """Return the busiest, the median and the idlest rank of the first replica as tuples (rank, 0, column).

    ``first`` has the number of the first rank of each column. A rank that would occur twice is returned once.
    """
    order = parts.sum(1).argsort(kind="stable")[::-1].tolist()
    columns = dict.fromkeys([order[0], order[len(order) // 2], order[-1]])
    return [(int(first[column]), 0, column) for column in columns]


def _result(
    timeline: Timeline,
    does: _Trainer,
    steps: int,
    seconds: float,
    counts: Array,
    costs: RankCosts,
    estimate: StepEstimate,
    model: CostModel,
) -> Simulation:
    here, work = model.hardware, model.workload
    assert here is not None
    least = np.unravel_index(int(timeline.waited.argmin()), timeline.waited.shape)
    spent = {name: float(values[least]) / steps for name, values in timeline.spent.items()}
    by_resource: dict[str, float] = {}
    for name, value in spent.items():
        resource = does.resources.get(name) or "links"
        by_resource[resource] = by_resource.get(resource, 0.0) + value
    binds = max(by_resource, key=lambda name: by_resource[name], default="cores")
    if binds == "links":  # replaced by the link of the longest exchange, or by the fixed costs of messages
        exchanges = [name for name in spent if does.resources.get(name) == "links"]
        longest = max(exchanges, key=lambda name: spent[name], default="")
        fixed = estimate.reduce_messages if longest == "all-reduce" else estimate.messages
        binds = "messages" if fixed > by_resource["links"] / 2 else link_of_exchange(model, longest)
    busy = {name: float((values @ counts).mean() / counts.sum()) / steps for name, values in timeline.busy.items()}
    ranks = model.world_size * work.replicas
    return Simulation(
        steps=steps,
        step_s=seconds,
        samples_per_s=work.batch_size / seconds,
        critical=dict(sorted(((n, s) for n, s in spent.items() if s > 0), key=lambda item: -item[1])),
        waiting=float((timeline.waited @ counts).mean() / counts.sum()) / steps / seconds,
        binds=binds,
        usage=usage_of(busy, seconds, costs, model, estimate.all_reduce - estimate.reduce_messages),
        nodes=-(-ranks // here.ranks_per_node),
        price_per_hour=here.price_per_hour,
        closed_form=estimate,
        events=tuple(timeline.events),
    )


def link_of_exchange(model: CostModel, exchange: str) -> str:
    """Return the slowest link that an exchange uses: ``"node link"`` or ``"network"``."""
    if exchange == "all-reduce":
        return all_ranks(model).slowest_of_sums()
    assert model.links is not None
    return model.links.slowest("replicas" if exchange == "average" else "shards")


def usage_of(
    busy: Mapping[str, float], step_s: float, costs: RankCosts, model: CostModel, all_reduce_s: float
) -> dict[str, Usage]:
    """Return the usage of each resource that is used.

    If an exchange uses two links at once, the slower link counts as used during the whole exchange, except for the
    fixed costs of messages.
    """
    work, here = model.workload, model.links
    assert here is not None
    everyone = all_ranks(model)
    parts = costs.parts_bytes
    none, combined = np.zeros(len(parts)), model.combined_share(model.pooled_in(()))
    dense = none + 4.0 * work.dense.parameters
    rates = dict(here.rates())
    links, on_links = dict.fromkeys(rates, none), dict.fromkeys(rates, 0.0)
    of_rows, others, averages = [IDS, ROWS, GRADIENTS], [COPIES, SUMS], [REPLICAS]
    for nbytes, shares, byte_s, charged in (
        (parts[:, of_rows].sum(1), here.shares("shards", combined), here.byte_s("shards", combined), of_rows),
        (parts[:, others].sum(1), here.shares("shards"), here.byte_s("shards"), others),
        (parts[:, averages].sum(1), here.shares("replicas"), here.byte_s("replicas"), averages),
        (dense, everyone.shares_of_sums(), everyone.byte_s_of_sums() or 1.0, None),
    ):
        seconds = all_reduce_s if charged is None else float(costs.parts[:, charged].sum(1).mean())
        for name, rate in rates.items():
            links[name] = links[name] + shares[name] * nbytes
            on_links[name] += seconds * shares[name] / rate / byte_s
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


def format_amount(value: float, unit: str) -> str:
    """Format an amount with a decimal prefix, e.g. ``1.5 GB``; return an empty text if the unit is empty."""
    if not unit:
        return ""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:,.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}"


# -- timeline -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation that all ranks run. There are ``M`` replicas with ``N`` ranks each."""

    name: str
    resource: str | None  # resource that the operation occupies; None for a wait
    seconds: Array  # seconds of each rank [M or 1, N or 1]
    among: Among = "rank"

    def times(self, factor: Array) -> Operation:
        """Return the operation with its seconds multiplied by a factor for each rank. A single factor has no effect."""
        return self if factor.size == 1 else replace(self, seconds=self.seconds * factor)


class Timeline:
    """The times when threads and resources become free: arrays ``[M, N]`` for M replicas of N ranks.

    Without stragglers, M is 1, and ranks of equal load share a column.
    """

    def __init__(self, replicas: int, shards: int) -> None:
        self._shape = replicas, shards
        self._threads = {name: np.zeros(self._shape) for name in THREADS}
        self._free: dict[str, Array] = {}
        self.busy: dict[str, Array] = {}  # seconds in which each resource was used [M, N]
        self.spent: dict[str, Array] = {}  # seconds of the thread "step" by operation, including waits
        self.waited = np.zeros(self._shape)  # seconds in which the thread "step" waited for ranks or a resource
        self.watched: list[tuple[int, int, int]] = []  # ranks (number, replica, column) whose events are recorded
        self.events: list[Event] = []

    def run(self, operation: Operation, thread: str = "step") -> None:
        """Run the next operation of a thread on all ranks."""
        if not operation.seconds.any():
            return
        own = np.broadcast_to(operation.seconds, self._shape)
        ready = self._threads[thread]
        start = ready
        if operation.resource is not None:
            start = np.maximum(start, self._free.setdefault(operation.resource, np.zeros(self._shape)))
        axes = _AXES[operation.among]
        end, others = start + own, np.zeros(1)
        if axes:
            start = np.broadcast_to(start.max(axes, keepdims=True), self._shape)
            others = own.max(axes, keepdims=True) - own  # seconds of waiting for the slowest rank
            end = start + own.max(axes, keepdims=True)
        if operation.resource is not None:
            self._free[operation.resource] = end
            self.busy[operation.resource] = self.busy.get(operation.resource, 0.0) + own
        if thread == "step":
            self._add(operation.name, own)
            self.waited = self.waited + (start - ready) + others
        self._threads[thread] = end
        for rank, replica, shard in self.watched:
            begin, seconds = float(start[replica, shard]), float(own[replica, shard])
            if seconds:
                self.events.append(Event(rank, thread, operation.name, operation.resource or "", begin, seconds))

    def join(self, thread: str, other: str, name: str = "") -> None:
        """Make ``thread`` wait until ``other`` has finished; the wait counts as operation ``name``."""
        self.join_at(thread, self._threads[other], name)

    def join_at(self, thread: str, moment: Array, name: str = "") -> None:
        """Make a thread of each rank wait until a time ``moment`` [M, N]."""
        ready = self._threads[thread]
        self._threads[thread] = np.maximum(ready, moment)
        if thread == "step" and name:
            self._add(name, self._threads[thread] - ready)

    def meet(self) -> None:
        """Make the step threads of all ranks wait for the last rank."""
        ready = self._threads["step"]
        self._threads["step"] = np.full(self._shape, ready.max())
        self.waited = self.waited + (ready.max() - ready)

    def moment(self, thread: str = "step") -> Array:
        """Return the time when a thread of each rank becomes free [M, N]."""
        return self._threads[thread]

    def reset_counts(self) -> None:
        """Set `busy`, `spent` and `waited` to 0."""
        self.busy, self.spent, self.waited = {}, {}, np.zeros(self._shape)

    def _add(self, name: str, seconds: Array) -> None:
        self.spent[name] = self.spent.get(name, 0.0) + seconds


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return events in the trace format of Chrome and Perfetto, which shows each rank as a process."""
    found: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for number, thread in enumerate(THREADS):
            about = {"name": thread}
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": about})
    found += [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.resource,
            "pid": event.rank,
            "tid": THREADS.index(event.thread),
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
        }
        for event in events
    ]
    return {"traceEvents": found, "displayTimeUnit": "ms"}
