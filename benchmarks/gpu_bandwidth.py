"""Compare each Triton kernel with the speed of the memory.

Tables like in Criteo 1TB have every dtype, every optimizer, and uniform and Zipf-distributed ids. Lookups return
float32 and bfloat16. Each kernel is measured in turn with its limit and with cold caches (see `benchmarks.kernels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks.gpu import OPTIMIZERS, ZIPF, KernelRecord, Sizes
from benchmarks.kernels.ops import Job, embedding_jobs, filled_store, initial_job, interaction_jobs, rule_step
from benchmarks.kernels.options import OpsOptions
from benchmarks.kernels.workload import Workload
from hotbed.specs import RowDtype

DTYPES: tuple[RowDtype, ...] = get_args(RowDtype)
KINDS = {"zipf": ZIPF, "uniform": 0.0}
BY_IDS = ("lookup", "occurrences", "group")


def only(jobs: Iterable[Job], *kernels: str) -> Iterator[Job]:
    return (job for job in jobs if job.kernel in kernels)


def other_kernels(record: KernelRecord, dim: int) -> None:
    options = record.sizes.options(OpsOptions, dim)
    step = rule_step(options, record.sizes.device, OPTIMIZERS["sgd"])
    store = filled_store(options, step, record.sizes.device)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        record.run(interaction_jobs(options, store, record.streamed, dtype), dim=dim, dtype=name)
    record.run([initial_job(options, store, record.streamed)], dim=dim)


def lookups(record: KernelRecord, dim: int) -> None:
    """Measure lookups of rows of every dtype, and of int8 rows behind float32 ones, and grouping of ids."""
    sizes = record.sizes
    for dtype, hot in [*((dtype, 0) for dtype in DTYPES), ("int8", max(max(sizes.rows) // 100, 1))]:
        options = sizes.options(OpsOptions, dim, dtype=dtype, fp32_rows=hot)
        weighted = replace(options, weighted=True)
        step = rule_step(options, sizes.device, OPTIMIZERS["sgd"])
        store = filled_store(options, step, sizes.device)
        about = {"dim": dim, "dtype": f"{dtype}+{hot:,} fp32" if hot else dtype}
        for kind, exponent in KINDS.items():
            ids, with_weights = (Workload(o).draw(exponent)[0] for o in (options, weighted))
            jobs = embedding_jobs(kind, ids, options, store, step, record.streamed)
            record.run(only(jobs, *(BY_IDS if about["dtype"] == "fp32" else BY_IDS[:1])), **about)
            jobs = embedding_jobs(kind, ids, options, store, step, record.streamed, torch.bfloat16)
            record.run((job._replace(kernel="lookup_to_bf16") for job in only(jobs, "lookup")), **about)
            jobs = embedding_jobs(kind, with_weights, weighted, store, step, record.streamed)
            record.run(only(jobs, "weight_gradient"), **about)


def updates(record: KernelRecord, dim: int) -> None:
    """Measure updates by every optimizer of rows of every dtype."""
    sizes = record.sizes
    drawn = {kind: Workload(sizes.options(OpsOptions, dim)).draw(exponent)[0] for kind, exponent in KINDS.items()}
    for name, make in OPTIMIZERS.items():
        for dtype in DTYPES if dim == max(sizes.dims) or name == "rowwise_adagrad" else ("fp32",):
            if not record.complete:
                return
            options = sizes.options(OpsOptions, dim, dtype=dtype)
            step = rule_step(options, sizes.device, make)
            store = filled_store(options, step, sizes.device)
            for kind in KINDS if name in ("sgd", "rowwise_adagrad") else ("zipf",):
                jobs = embedding_jobs(kind, drawn[kind], options, store, step, record.streamed)
                jobs = (job._replace(kernel=f"update_{name}") for job in only(jobs, "update"))
                record.run(jobs, dim=dim, dtype=dtype)


def main(out: Path, budget_s: float) -> int:
    sizes = Sizes.choose().begin()
    record = KernelRecord(sizes, out, budget_s)
    for measure in (other_kernels, lookups, updates):
        for dim in reversed(sizes.dims):
            record.attempt({"kernel": measure.__name__, "dim": dim}, lambda m=measure, dim=dim: m(record, dim))
    return record.status
