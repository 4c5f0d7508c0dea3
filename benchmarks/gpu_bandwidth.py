"""How close does each kernel come to the memory's own speed?

Two limits are measured in the same run: a streaming copy, and a gather of random rows by ``torch.index_select``. Each
kernel is then given as bytes that must move ÷ median time. These bytes are what an ideal kernel with an endless cache
would move, so no kernel is flattered by reading something twice:

==================== ==================================================================================================
lookup               ids; each distinct row once; the output
occurrences          ids; slots and bags
group                slots; order, distinct rows, starts of runs and of groups
update               order, bags, slots; each occurrence's gradient; each distinct row read and written (and its moment)
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

from benchmarks.workload import Distribution, Sizes, bases_of, draw_ids, one_hot
from hotbed.ops import RuleStep, select
from hotbed.optim import SGD, RowWiseAdagrad

Job = tuple[str, dict[str, object], int, Callable[[], object]]
"""Name, conditions, bytes that must move, what to time."""


@dataclass
class Meter:
    """Times jobs and writes every result at once."""

    sizes: Sizes
    out: Path
    deadline: float
    results: list[dict[str, object]] = field(default_factory=list)
    copy_gb_s: float | None = None

    def __post_init__(self) -> None:
        self.flush = torch.empty(1 << (20 if self.sizes.tiny else 30), dtype=torch.uint8, device=self.sizes.device)

    def seconds(self, call: Callable[[], object]) -> list[float]:
        """Time of each repetition after three that warm up (and compile)."""
        for _ in range(1 if self.sizes.tiny else 3):
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
                print("  time is up; the rest is left out")
                return
            times = sorted(self.seconds(call))
            median = statistics.median(times)
            rate = size / median / 1e9
            if name == "copy":
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
            print(f"  {name:22s} {what:28s} {median * 1e6:10.1f} us {rate:8.1f} GB/s {share}", flush=True)


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


def embedding_jobs(sizes: Sizes, dim: int) -> Iterator[Job]:
    """Initial values, lookup, grouping, updates of all tables in one arena."""
    ops = select(sizes.device, "triton")
    device, batch, tables = sizes.device, sizes.batch, sizes.tables(dim)
    slots = sum(tables)
    weight = torch.empty(slots, dim, device=device)
    moments = {"sum_of_squares": torch.zeros(slots, device=device)}

    def fill() -> None:
        ops.initial_values_(weight, seed=3, rows=range(slots), cols=range(dim), bound=0.05)

    yield "initial_values", {"dim": dim}, slots * dim * 4, fill
    inv_scale, gate = torch.tensor(1.0, device=device), torch.tensor(True, device=device)
    grad = torch.randn(batch * len(tables), dim, device=device)
    for kind in get_args(Distribution):
        bags = one_hot(tables, batch, draw_ids(tables, batch, kind, 0, device))
        found = ops.occurrences(bags)
        groups = ops.group(found.slots)
        n, (distinct, runs) = bags.total, groups.counts.tolist()
        about: dict[str, object] = {"dim": dim, "ids": kind, "distinct": distinct}
        yield "lookup", about, 4 * n + 4 * dim * (distinct + n), lambda b=bags: ops.lookup(weight, b)
        yield "occurrences", about, (4 + 16) * n, lambda b=bags: ops.occurrences(b)
        yield "group", about, 16 * n + 16 * distinct + 8 * runs, lambda o=found: ops.group(o.slots)
        for rule in (SGD.rule, RowWiseAdagrad.rule):
            hyper = torch.tensor([[1.0, 1e-4, 1e-8]], device=device)[:, : 1 + len(rule.hyper)]
            hyper = hyper.repeat(len(tables), 1)
            size = 24 * n + 8 * runs + 4 * dim * n + distinct * (8 * dim + 8 * len(rule.moments))

            def step(rule=rule, hyper=hyper, found=found, groups=groups, bags=bags) -> None:
                rule_step = RuleStep(rule=rule, bases=bases_of(bags), hyper=hyper, inv_scale=inv_scale, gate=gate)
                ops.update(rule_step, weight, moments, found, groups, grad)

            yield f"update_{rule.name}", about, size, step


def interaction_jobs(sizes: Sizes, dim: int) -> Iterator[Job]:
    """Dot interaction of 26 embeddings and the dense vector."""
    ops = select(sizes.device, "triton")
    n = len(sizes.rows) + 1
    width = -(-(dim + n * (n - 1) // 2) // 8) * 8
    for dtype in (torch.float32, torch.bfloat16):
        dense = torch.randn(sizes.batch, dim, device=sizes.device).to(dtype)
        embeddings = torch.randn(sizes.batch, n - 1, dim, device=sizes.device).to(dtype)
        grad = torch.randn(sizes.batch, width, device=sizes.device).to(dtype)
        about: dict[str, object] = {"dim": dim, "dtype": str(dtype).removeprefix("torch.")}
        vectors, rest = (sizes.batch * k * dtype.itemsize for k in (n * dim, width))
        yield "interaction", about, vectors + rest, lambda d=dense, e=embeddings: ops.interaction(d, e, width)

        def backward(g=grad, d=dense, e=embeddings) -> object:
            return ops.interaction_backward(g, d, e)

        yield "interaction_backward", about, 2 * vectors + rest, backward


def main(out: Path, budget_s: float) -> None:
    sizes = Sizes.choose()
    meter = Meter(sizes, out, time.monotonic() + budget_s)
    meter.run(limits(sizes))
    for dim in reversed(sizes.dims):
        meter.run(interaction_jobs(sizes, dim))
        meter.run(embedding_jobs(sizes, dim))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
