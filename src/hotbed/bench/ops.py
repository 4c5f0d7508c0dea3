"""Kernel by kernel: time, bytes, and the share of what the memory of this machine can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from hotbed import ops
from hotbed.bench.limits import copy_limit, copy_way, gather_limit, row_parts, scatter_limit
from hotbed.bench.memory import check_memory
from hotbed.bench.meter import Limit, Meter
from hotbed.bench.options import OpsOptions
from hotbed.bench.traffic import Traffic, interaction_bytes
from hotbed.bench.workload import Workload
from hotbed.embed import EmbeddingCollection
from hotbed.embed.gradients import TableUpdater
from hotbed.errors import RecipeError
from hotbed.nn import DotInteraction
from hotbed.ops import RuleStep
from hotbed.specs import RowDtype
from hotbed.store import DenseStore, Span

INITIAL_BYTES = 256 << 20
"""How much of a table is drawn to time initial values."""

FILLER = 0x3C
"""Byte that rows are filled with: pages must be real, and four, two or one of it are a number of medium size."""


BY_DTYPE = ("lookup", "update")
"""Kernels that are measured for rows of every dtype, one after the other: what they take depends on it."""


class Job(NamedTuple):
    """A call to time: which kernel, on which ids, how many distinct rows, bytes it must move, its limit."""

    kernel: str
    ids: str | None
    distinct: int | None
    nbytes: int
    limit: Limit
    call: Callable[[], object]


def bench_ops(options: OpsOptions, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure every kernel, and those that read rows for rows of every dtype.

    Parameters
    ----------
    options
        What to measure with.
    progress
        Told what comes next.

    Returns
    -------
    dict
        ``copy_gb_s``, ``kernels``, ``dtypes`` and ``dtypes_left_out``, see `hotbed.bench`.

    Raises
    ------
    RecipeError
        If an option cannot be right, or the tables do not fit into memory.
    """
    device = options.place()
    ops.select(device, options.backend)
    step = rule_step(options, device)
    check_memory(options, step.rule, device, batch_bytes(options))
    meter = Meter(device, options.repeats)
    copy = copy_way(device)
    seconds_per_byte = [meter.limit_seconds(copy_limit(copy, 1)) for _ in range(1 + options.repeats)][1:]
    copy_gb_s = 1e-9 / statistics.median(seconds_per_byte)

    def measure(jobs: Iterable[Job], of: str) -> list[dict[str, Any]]:
        return [_measured(job, meter, copy_gb_s, progress, of) for job in jobs]

    def streamed(nbytes: int) -> Limit:
        return copy_limit(copy, nbytes)

    progress("making tables")
    kernels = measure(_jobs(options, _filled_store(options, step, device), step, streamed), "")
    dtypes: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for dtype in get_args(RowDtype):
        if dtype == options.dtype:
            found = [k for k in kernels if k["kernel"] in BY_DTYPE and k["ids"] == "zipf"]
        else:
            try:
                narrower = replace(options, dtype=dtype)
                check_memory(narrower, step.rule, device, batch_bytes(options))
            except RecipeError as error:
                left_out[dtype] = str(error)
                continue
            progress(f"making tables of {dtype}")
            store = _filled_store(narrower, step, device)
            jobs = _embedding_jobs("zipf", options.zipf, narrower, store, step, streamed)
            found = measure((job for job in jobs if job.kernel in BY_DTYPE), f" of {dtype}")
            del store, jobs
        dtypes += [{"dtype": dtype, **k} for k in found]
    return {"copy_gb_s": copy_gb_s, "kernels": kernels, "dtypes": dtypes, "dtypes_left_out": left_out}


def _measured(job: Job, meter: Meter, copy_gb_s: float, progress: Callable[[str], None], of: str) -> dict[str, Any]:
    progress((job.kernel if job.ids is None else f"{job.kernel}, {job.ids} ids") + of)
    timing = meter.compare(job.call, job.limit)
    gb_s = job.nbytes / timing.median_s / 1e9
    return {
        "kernel": job.kernel,
        "ids": job.ids,
        "distinct_rows": job.distinct,
        "bytes": job.nbytes,
        "gb_s": gb_s,
        "limit": job.limit.name,
        **timing.to_dict(),
        "share_of_copy": gb_s / copy_gb_s,
    }


def rule_step(options: OpsOptions, device: torch.device) -> RuleStep:
    """A step of the optimizer; it does not depend on the number of rows, so it is taken from tables of one row."""
    tables, features = options.specs(rows=1)
    small = EmbeddingCollection(tables, features, device=device)
    optimizer = options.make_optimizer(small)
    (updater,), (arena,) = optimizer._updaters.values(), small._groups[0].arenas
    assert isinstance(updater, TableUpdater)
    one = torch.ones((), dtype=torch.float32, device=device)
    hyper = {t.name: optimizer._hyper(optimizer.param_groups[0]) for t in tables}
    updater._count(hyper, one, device)
    return updater._step(arena, hyper, one, one)


def batch_bytes(options: OpsOptions) -> int:
    """Roughly what a batch takes: ids, slots and groups; gradients, vectors and results."""
    bags = options.batch_size * options.tables
    return 128 * bags * options.pooling + 8 * 4 * bags * options.dim


def _filled_store(options: OpsOptions, step: RuleStep, device: torch.device) -> DenseStore:
    tables, _ = options.specs()
    spans = [Span(t.rows, t.fp32_rows) for t in tables]
    store = DenseStore(spans, options.dim, dtype=options.dtype, device=device, backend=options.backend)
    for rows in (store.rows.wide, store.rows.narrow):
        rows.view(torch.uint8).fill_(FILLER)
    store.rows.exponents.fill_(-12)
    for moment in step.rule.moments:
        store.add_moment(moment)
        store.moments[moment.name].zero_()
    return store


def _jobs(options: OpsOptions, store: DenseStore, step: RuleStep, streamed: Callable[[int], Limit]) -> Iterator[Job]:
    """Everything to measure; what a job works on is made when its turn comes."""
    yield _initial_values(options, store, streamed)
    for kind, exponent in (("uniform", 0.0), ("zipf", options.zipf)):
        yield from _embedding_jobs(kind, exponent, options, store, step, streamed)
    yield from _interaction_jobs(options, store, streamed)


def _initial_values(options: OpsOptions, store: DenseStore, streamed: Callable[[int], Limit]) -> Job:
    rows = range(min(max(INITIAL_BYTES // (4 * options.dim), 1), max(options.rows_per_table)))
    cols = range(options.dim)
    out = store.empty((len(rows), options.dim), torch.float32)
    nbytes = out.numel() * 4

    def call() -> None:
        store.ops.initial_values_(out, seed=options.seed, rows=rows, cols=cols, bound=0.01)

    return Job("initial_values", None, None, nbytes, streamed(nbytes), call)


def _embedding_jobs(
    kind: str,
    exponent: float,
    options: OpsOptions,
    store: DenseStore,
    step: RuleStep,
    streamed: Callable[[int], Limit],
) -> Iterator[Job]:
    workload = Workload(options)
    ids = workload.draw(exponent)[0].to(store.device)
    bags, slots = workload.layout(ids), workload.slots(ids)
    found = store.occurrences(bags)
    groups = store.ops.group(found)
    traffic = Traffic.of(store.rows, store.moments, bags, groups)
    out = store.empty((options.batch_size, options.tables, options.dim), torch.float32)
    grad = torch.randn(options.batch_size * options.tables, options.dim, device=store.device).mul_(1e-3)

    def job(kernel: str, nbytes: int, limit: Limit, call: Callable[[], object]) -> Job:
        return Job(kernel, kind, traffic.distinct, nbytes, limit, call)

    read = row_parts(store.rows, slots, options.pooling)
    gather = gather_limit(read, options.pooling, traffic.lookup)
    yield job("lookup", traffic.lookup, gather, lambda: store.lookup(bags, out))
    yield job("occurrences", traffic.occurrences, streamed(traffic.occurrences), lambda: store.occurrences(bags))
    yield job("group", traffic.group, streamed(traffic.group), lambda: store.ops.group(found))
    scatter = scatter_limit(read, store.moments, traffic.update)
    yield job(
        "update",
        traffic.update,
        scatter,
        lambda: store.ops.update(step, store.rows, store.moments, found, groups, grad),
    )
    if options.weighted:
        of_weights = torch.empty(len(slots), device=store.device)
        gather = gather_limit(read, options.pooling, traffic.weight_gradient)
        yield job(
            "weight_gradient", traffic.weight_gradient, gather, lambda: store.weight_gradient(bags, grad, of_weights)
        )


def _interaction_jobs(options: OpsOptions, store: DenseStore, streamed: Callable[[int], Limit]) -> Iterator[Job]:
    count, dim = options.tables + 1, options.dim
    width = DotInteraction(count, dim).width
    vectors = torch.randn(options.batch_size, count, dim, device=store.device)
    grad = torch.randn(options.batch_size, width, device=store.device)
    forward, backward = interaction_bytes(options.batch_size, count, dim, width)
    kernels: tuple[tuple[str, int, Callable[[], Tensor]], ...] = (
        ("interaction", forward, lambda: store.ops.interaction(vectors, width)),
        ("interaction_backward", backward, lambda: store.ops.interaction_backward(grad, vectors)),
    )
    for kernel, nbytes, call in kernels:
        yield Job(kernel, None, None, nbytes, streamed(nbytes), call)
