"""Time every kernel, and compare it with the memory of this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from benchmarks.kernels.limits import check_memory, copy_limit, copy_way, gather_limit, rows_by_matrix, scatter_limit
from benchmarks.kernels.meter import Limit, Meter, Way
from benchmarks.kernels.options import OpsOptions
from benchmarks.kernels.workload import KernelBytes, Workload, interaction_bytes
from hotbed import ops
from hotbed.errors import RecipeError
from hotbed.jagged import Jagged
from hotbed.measure import machine_profile
from hotbed.nn import DotInteraction
from hotbed.ops import RuleStep
from hotbed.optim import SparseOptimizer
from hotbed.specs import RowDtype
from hotbed.store import DenseStore

INITIAL_BYTES = 256 << 20  # of the initial values that are timed
BY_DTYPE = ("lookup", "update")  # kernels that are measured for rows of every dtype


class Job(NamedTuple):
    """A call to time with its kernel, kind of ids, distinct rows, bytes that must move, and limit."""

    kernel: str
    ids: str | None
    distinct: int | None
    nbytes: int
    limit: Limit
    call: Callable[[], object]


def bench_ops(options: OpsOptions, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure every kernel, and lookups and updates for rows of every dtype."""
    device = options.torch_device()
    ops.select(device, options.backend)
    step = rule_step(options, device)
    check_memory(options, step.rule, device, batch_bytes(options))
    meter = Meter(device, options.repeats)
    copy = copy_way(device)
    copy_gb_s = copy_rate(meter, copy)

    def measure(jobs: Iterable[Job], of: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for job in jobs:
            progress((job.kernel if job.ids is None else f"{job.kernel}, {job.ids} ids") + of)
            found.append(measured(job, meter, copy_gb_s))
        return found

    def streamed(nbytes: int) -> Limit:
        return copy_limit(copy, nbytes)

    progress("making tables")
    kernels = measure(_jobs(options, filled_store(options, step, device), step, streamed), "")
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
            store = filled_store(narrower, step, device)
            ids = Workload(narrower).draw(options.zipf)[0]
            jobs = embedding_jobs("zipf", ids, narrower, store, step, streamed)
            found = measure((job for job in jobs if job.kernel in BY_DTYPE), f" of {dtype}")
            del store, jobs
        dtypes += [{"dtype": dtype, **k} for k in found]
    return {"copy_gb_s": copy_gb_s, "kernels": kernels, "dtypes": dtypes, "dtypes_left_out": left_out}


def copy_rate(meter: Meter, copy: Way) -> float:
    """Return GB/s of a streaming copy, bytes read and written."""
    return 1e-9 / statistics.median([meter.limit_seconds(copy_limit(copy, 1)) for _ in range(1 + meter.repeats)][1:])


def measured(job: Job, meter: Meter, copy_gb_s: float) -> dict[str, Any]:
    """Measure a job in turn with its limit, and return an entry of ``kernels``."""
    timing = meter.compare(job.call, job.limit)
    gb_s = job.nbytes / timing["median_s"] / 1e9
    return {
        "kernel": job.kernel,
        "ids": job.ids,
        "distinct_rows": job.distinct,
        "bytes": job.nbytes,
        "gb_s": gb_s,
        "limit": job.limit.name,
        **timing,
        "share_of_copy": gb_s / copy_gb_s,
    }


def rule_step(
    options: OpsOptions, device: torch.device, make: Callable[[nn.Module], SparseOptimizer] | None = None
) -> RuleStep:
    return machine_profile.rule_step(options.specs()[0], make or options.make_optimizer, device, options.backend)


def batch_bytes(options: OpsOptions) -> int:
    """Return about the bytes of a batch: ids, slots and groups, gradients, vectors and results."""
    bags = options.batch_size * options.tables
    return 128 * bags * options.pooling + 8 * 4 * bags * options.dim


def filled_store(options: OpsOptions, step: RuleStep, device: torch.device) -> DenseStore:
    """Return the tables in one arena, in real pages, with the moments of a step's rule."""
    return machine_profile.filled_store(options.specs()[0], step.rule.moments, device, options.backend)


def _jobs(options: OpsOptions, store: DenseStore, step: RuleStep, streamed: Callable[[int], Limit]) -> Iterator[Job]:
    """Yield all jobs. The tensors of a job are made when its turn comes."""
    yield initial_job(options, store, streamed)
    for kind, exponent in (("uniform", 0.0), ("zipf", options.zipf)):
        yield from embedding_jobs(kind, Workload(options).draw(exponent)[0], options, store, step, streamed)
    yield from interaction_jobs(options, store, streamed)


def initial_job(options: OpsOptions, store: DenseStore, streamed: Callable[[int], Limit]) -> Job:
    rows = range(min(max(INITIAL_BYTES // (4 * options.dim), 1), max(options.rows_per_table)))
    cols = range(options.dim)
    out = store.empty((len(rows), options.dim), torch.float32)
    nbytes = out.numel() * 4

    def call() -> None:
        store.ops.initial_values_(out, seed=options.seed, rows=rows, cols=cols, bound=0.01)

    return Job("initial_values", None, None, nbytes, streamed(nbytes), call)


def embedding_jobs(
    kind: str,
    ids: Jagged,
    options: OpsOptions,
    store: DenseStore,
    step: RuleStep,
    streamed: Callable[[int], Limit],
    vectors: torch.dtype = torch.float32,
) -> Iterator[Job]:
    """Yield the jobs of a batch of ids: lookup, grouping, update, and the gradient of weights."""
    workload, ids = Workload(options), ids.to(store.device)
    bags, slots = workload.layout(ids), workload.slots(ids)
    found = store.occurrences(bags)
    groups = store.ops.group(found)
    moved = KernelBytes.of(store.rows, store.moments, bags, groups, vectors)
    out = store.empty((options.batch_size, options.tables, options.dim), vectors)
    grad = torch.randn(options.batch_size * options.tables, options.dim, device=store.device).mul_(1e-3).to(vectors)

    def job(kernel: str, nbytes: int, limit: Limit, call: Callable[[], object]) -> Job:
        return Job(kernel, kind, moved.distinct, nbytes, limit, call)

    read = rows_by_matrix(store.rows, slots, options.pooling, vectors)
    gather = gather_limit(read, options.pooling, moved.lookup)
    yield job("lookup", moved.lookup, gather, lambda: store.lookup(bags, out))
    yield job("occurrences", moved.occurrences, streamed(moved.occurrences), lambda: store.occurrences(bags))
    yield job("group", moved.group, streamed(moved.group), lambda: store.ops.group(found))
    scatter = scatter_limit(read, store.moments, moved.update)
    rows, moments = store.rows, store.moments
    yield job("update", moved.update, scatter, lambda: store.ops.update(step, rows, moments, found, groups, grad))
    if options.weighted:
        of_weights = torch.empty(len(slots), device=store.device)
        nbytes = moved.weight_gradient
        gather = gather_limit(read, options.pooling, nbytes)
        yield job("weight_gradient", nbytes, gather, lambda: store.weight_gradient(bags, grad, of_weights))


def interaction_jobs(
    options: OpsOptions, store: DenseStore, streamed: Callable[[int], Limit], dtype: torch.dtype = torch.float32
) -> Iterator[Job]:
    count, dim = options.tables + 1, options.dim
    width = DotInteraction(count, dim).width
    vectors = torch.randn(options.batch_size, count, dim, device=store.device).to(dtype)
    grad = torch.randn(options.batch_size, width, device=store.device).to(dtype)
    forward, backward = interaction_bytes(options.batch_size, count, dim, width, dtype)
    ops = store.ops
    yield Job("interaction", None, None, forward, streamed(forward), lambda: ops.interaction(vectors, width))
    name = "interaction_backward"
    yield Job(name, None, None, backward, streamed(backward), lambda: ops.interaction_backward(grad, vectors))
