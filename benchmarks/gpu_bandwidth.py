"""How close does each kernel come to the memory's own speed?

Two limits are measured in the same run: a streaming copy, and a gather of random rows by ``torch.index_select``. Each
kernel is then given as bytes that must move ÷ median time. These bytes are what an ideal kernel with an endless cache
would move, so no kernel is flattered by reading something twice:

==================== ==================================================================================================
lookup               ids; each distinct row once; the output
weight gradient      ids; each distinct row once; the gradient; one number per id
occurrences          ids; slots and bags
group                slots; order, distinct rows, starts of runs and of groups
update               order, bags, slots; each occurrence's gradient; each distinct row and its moments, twice
interaction          vectors; output
interaction backward output's gradient, vectors; the vectors' gradients
initial values       the table
==================== ==================================================================================================

Times are medians over CUDA events; between two calls 1 GiB is written, so nothing is left in the L2 cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from benchmarks.workload import (
    DTYPES,
    INCOMPLETE,
    UPDATES,
    Distribution,
    Sizes,
    draw_ids,
    make_moments,
    make_rows,
    make_step,
    one_hot,
    row_bytes,
)
from hotbed.ops import BagLayout, Groups, Occurrences, Rows, select

Job = tuple[str, dict[str, object], int, Callable[[], object]]
"""Name, conditions, bytes that must move, what to time."""


@dataclass(frozen=True)
class Batch:
    """Ids, and what the operations before an update make of them."""

    bags: BagLayout
    found: Occurrences
    groups: Groups

    @property
    def distinct(self) -> int:
        return int(self.groups.counts[0])

    @property
    def runs(self) -> int:
        return int(self.groups.counts[1])


@dataclass
class Meter:
    """Times jobs and writes every result at once."""

    sizes: Sizes
    out: Path
    deadline: float
    results: list[dict[str, object]] = field(default_factory=list)
    copy_gb_s: float | None = None
    complete: bool = True

    def __post_init__(self) -> None:
        self.flush = torch.empty(1 << (20 if self.sizes.tiny else 30), dtype=torch.uint8, device=self.sizes.device)

    def seconds(self, call: Callable[[], object]) -> list[float]:
        """Time of each repetition after three that warm up (and compile)."""
        for _ in range(0 if self.sizes.tiny else 3):
            call()
        if self.sizes.device.type == "cpu":
            return [self._host_seconds(call) for _ in range(self.sizes.repeats)]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.sizes.repeats)]
        for start, stop in pairs:
            self.flush.fill_(1)
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]

    @staticmethod
    def _host_seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def run(self, jobs: Iterator[Job]) -> None:
        for name, conditions, size, call in jobs:
            if time.monotonic() > self.deadline:
                print(f"  time is up; left out: {name} {conditions} and what follows it")
                self.complete = False
                return
            times = sorted(self.seconds(call))
            median = statistics.median(times)
            rate = size / median / 1e9
            if name.startswith("copy"):  # the limit of what follows
                self.copy_gb_s = rate
            self.results.append(
                {
                    "kernel": name,
                    **conditions,
                    "bytes": size,
                    "median_s": median,
                    "min_s": times[0],
                    "max_s": times[-1],
                    "gb_per_s": rate,
                    "share_of_copy": rate / self.copy_gb_s if self.copy_gb_s else None,
                }
            )
            self.out.write_text(json.dumps(self.results, indent=1))
            what = " ".join(f"{v}" for v in conditions.values())
            share = f"{rate / self.copy_gb_s:6.1%} of copy" if self.copy_gb_s else ""
            print(f"  {name:28s} {what:28s} {median * 1e6:10.1f} us {rate:8.1f} GB/s {share}", flush=True)


def limits(sizes: Sizes) -> Iterator[Job]:
    """What the memory can do: streaming, and random rows."""
    source = torch.ones(sizes.copy_bytes // 4, device=sizes.device)
    target = torch.empty_like(source)
    yield "copy", {}, 2 * sizes.copy_bytes, lambda: target.copy_(source)
    for dim in sizes.dims:
        table = source.view(-1, dim)
        rows = torch.randint(0, len(table), (sizes.batch * len(sizes.rows),), device=sizes.device)
        out = torch.empty(len(rows), dim, device=sizes.device)
        size = len(rows) * (8 * dim + 8)
        yield "gather", {"dim": dim}, size, lambda t=table, r=rows, o=out: torch.index_select(t, 0, r, out=o)


def initial_jobs(sizes: Sizes, dim: int) -> Iterator[Job]:
    """Initial values of all tables as if they were one."""
    ops = select(sizes.device, "triton")
    weight = torch.empty(sum(sizes.tables(dim)), dim, device=sizes.device)

    def fill() -> None:
        ops.initial_values_(weight, seed=3, rows=range(len(weight)), cols=range(dim), bound=0.05)

    yield "initial_values", {"dim": dim}, weight.numel() * 4, fill


def embedding_jobs(sizes: Sizes, dim: int) -> Iterator[Job]:
    """All tables in one arena: grouping of ids, then lookups and updates of every dtype and rule."""
    ops = select(sizes.device, "triton")
    tables = sizes.tables(dim)
    slots = sum(tables)
    batches: dict[Distribution, Batch] = {}
    for kind in get_args(Distribution):
        bags = one_hot(tables, sizes.batch, draw_ids(tables, sizes.batch, kind, 0, sizes.device))
        found = ops.occurrences(bags)
        batches[kind] = batch = Batch(bags, found, ops.group(found))
        n, about = bags.total, {"dim": dim, "rows": slots, "ids": kind, "distinct": batch.distinct}
        yield "occurrences", about, (4 + 16) * n, lambda b=bags: ops.occurrences(b)
        size = 16 * n + 16 * batch.distinct + 8 * batch.runs
        yield "group", about, size, lambda o=found: ops.group(o)
    for dtype, hot in [*((name, 0.0) for name in DTYPES), ("int8", 0.01)]:
        rows = make_rows(tables, dim, DTYPES[dtype], sizes.device, hot)
        yield from lookup_jobs(sizes, rows, batches, dtype if hot == 0 else f"{dtype}+{hot:.0%} fp32")
    # The rarest last: where time runs out, they are what is left out.
    for name, update in UPDATES.items():
        moments = make_moments(update.rule, slots, dim, sizes.device)
        for dtype in DTYPES if dim == max(sizes.dims) or name == "rowwise_adagrad" else ("fp32",):
            rows = make_rows(tables, dim, DTYPES[dtype], sizes.device)
            kinds: tuple[Distribution, ...] = ("zipf", "uniform") if name in ("sgd", "rowwise_adagrad") else ("zipf",)
            for kind in kinds:
                about = {"dim": dim, "ids": kind, "dtype": dtype}
                yield update_job(sizes, name, rows, moments, batches[kind], about)


def lookup_jobs(sizes: Sizes, rows: Rows, batches: dict[Distribution, Batch], dtype: str) -> Iterator[Job]:
    """Lookup into float32 and bfloat16, and the gradient of per-id weights."""
    ops = select(sizes.device, "triton")
    for kind, batch in batches.items():
        bags = batch.bags
        n, read = bags.total, 4 * bags.total + round(row_bytes(rows) * batch.distinct)
        about: dict[str, object] = {"dim": rows.dim, "ids": kind, "dtype": dtype}
        for out_dtype in (torch.float32, torch.bfloat16):
            out = torch.zeros(sizes.batch, bags.width, rows.dim, dtype=out_dtype, device=sizes.device)
            name = "lookup" if out_dtype == torch.float32 else "lookup_to_bf16"
            size = read + n * rows.dim * out_dtype.itemsize
            yield name, about, size, lambda b=bags, o=out: ops.lookup(rows, b, o)
        grad, of_weights = out.view(-1, rows.dim), torch.zeros(n, device=sizes.device)
        size = read + n * (rows.dim * grad.element_size() + 4)
        yield "weight_gradient", about, size, lambda b=bags, g=grad, o=of_weights: ops.weight_gradient(rows, b, g, o)


def update_job(
    sizes: Sizes, name: str, rows: Rows, moments: dict[str, Tensor], batch: Batch, about: dict[str, object]
) -> Job:
    """One step of one of `UPDATES`."""
    ops = select(sizes.device, "triton")
    n, dim = batch.bags.total, rows.dim
    step = make_step(UPDATES[name], len(rows.tables), sizes.device)
    grad = torch.randn(sizes.batch * batch.bags.width, dim, device=sizes.device)
    of_moments = sum(4 * dim if m.per == "element" else 4 for m in step.rule.moments)
    size = 24 * n + 8 * batch.runs + 4 * dim * n + round(2 * (row_bytes(rows) + of_moments) * batch.distinct)

    def call() -> None:
        ops.update(step, rows, moments, batch.found, batch.groups, grad)

    return f"update_{name}", {**about, "rows": len(rows.wide) + len(rows.narrow)}, size, call


def interaction_jobs(sizes: Sizes, dim: int) -> Iterator[Job]:
    """Dot interaction of 26 embeddings and the dense vector."""
    ops = select(sizes.device, "triton")
    n = len(sizes.rows) + 1
    width = -(-(dim + n * (n - 1) // 2) // 8) * 8
    for dtype in (torch.float32, torch.bfloat16):
        vectors = torch.randn(sizes.batch, n, dim, device=sizes.device).to(dtype)
        grad = torch.randn(sizes.batch, width, device=sizes.device).to(dtype)
        about: dict[str, object] = {"dim": dim, "dtype": str(dtype).removeprefix("torch.")}
        own, rest = (sizes.batch * k * dtype.itemsize for k in (n * dim, width))
        yield "interaction", about, own + rest, lambda v=vectors: ops.interaction(v, width)
        yield "interaction_backward", about, 2 * own + rest, lambda g=grad, v=vectors: ops.interaction_backward(g, v)


def main(out: Path, budget_s: float) -> None:
    sizes = Sizes.choose()
    meter = Meter(sizes, out, time.monotonic() + budget_s)
    meter.run(limits(sizes))
    for jobs in (interaction_jobs, initial_jobs, embedding_jobs):
        for dim in reversed(sizes.dims):
            meter.run(jobs(sizes, dim))
    if not meter.complete:
        sys.exit(INCOMPLETE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
