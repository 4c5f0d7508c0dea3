"""Measure one side in a process of its own, or in one per rank, and print median seconds as a line of JSON.

python -m benchmarks.peers.worker embedding fbgemm_side WORKLOAD_AS_JSON OPTIONS_AS_JSON ids.npy
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.workloads import Workload, dense_inputs, join, read_ids, reduce, wait_for_others
from benchmarks.process_memory import kib_of


def batches_needed(kind: str, workload: Workload) -> int:
    if kind == "step":
        return len(workload.precisions) * (workload.warmup + workload.steps)
    return workload.warmup + workload.steps


def embedding_seconds(side: Any, ids: Tensor, grad: Tensor) -> tuple[float, float, float]:
    """Return seconds of a lookup, of its backward and update, and processor seconds of both."""
    batch = side.prepare(ids)
    wait_for_others()
    busy = time.process_time()
    start = time.perf_counter()
    pooled = side.lookup(batch)
    looked_up = time.perf_counter()
    side.update(pooled, grad)
    del pooled
    end = time.perf_counter()
    return looked_up - start, end - looked_up, time.process_time() - busy


def measure_embedding(side: Any, workload: Workload, batches: list[Tensor]) -> dict[str, float]:
    grad = torch.randn(workload.batch, workload.tables, workload.dim) * 1e-3
    times = [embedding_seconds(side, ids, grad) for ids in batches][workload.warmup :]
    busy = reduce([(busy,) for _, _, busy in times], dist.ReduceOp.SUM)
    largest = reduce([(a, b, a + b) for a, b, _ in times], dist.ReduceOp.MAX)
    lookups, updates, totals = zip(*largest, strict=True)
    return {
        "lookup_s": statistics.median(lookups),
        "update_s": statistics.median(updates),
        "total_s": statistics.median(totals),
        "busy_cores": sum(seconds for (seconds,) in busy) / sum(totals),
    }


def step_seconds(side: Any, ids: Tensor, dense: Tensor, labels: Tensor, bf16: bool) -> float:
    batch = side.prepare(ids, dense, labels)
    wait_for_others()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = side.logits(batch)
    loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
    side.zero_grad()
    loss.backward()
    side.update()
    del logits, loss
    return time.perf_counter() - start


def measure_step(side: Any, workload: Workload, batches: list[Tensor]) -> dict[str, float]:
    dense, labels = dense_inputs(workload)  # ranks have equal ones, because no time depends on them
    seconds: dict[str, float] = {}
    remaining = iter(batches)
    for precision in workload.precisions:
        times = [
            step_seconds(side, next(remaining), dense, labels, bf16=precision == "bf16")
            for _ in range(workload.warmup + workload.steps)
        ]
        slowest = reduce([(taken,) for taken in times[workload.warmup :]], dist.ReduceOp.MAX)
        seconds[f"{precision}_s"] = statistics.median(taken for (taken,) in slowest)
    return seconds


def cpu_wait_seconds() -> float:
    """Return the seconds that the threads of this process were ready to run and had no core."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="utf-8").split()[1]) for task in tasks) / 1e9


def machine_seconds() -> float:
    """Return processor seconds of all processes, and those that other virtual machines took from this one."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)[1:9]
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, fields)
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    kind, module, workload_json, options_json, ids_path = sys.argv[1:]
    warnings.simplefilter("ignore")  # the peers announce deprecations of their own parts
    rank, count = join()
    workload = Workload(**json.loads(workload_json)).of_one_rank
    contender = importlib.import_module(f"benchmarks.peers.{module}")
    torch.manual_seed(0)
    start = time.perf_counter()
    side = (contender.Step if kind == "step" else contender.Embedding)(workload, **json.loads(options_json))
    build_s = time.perf_counter() - start
    measure = measure_step if kind == "step" else measure_embedding
    batches = read_ids(Path(ids_path), rank, count)
    wait_for_others()
    start, waited, own, everyone = time.perf_counter(), cpu_wait_seconds(), time.process_time(), machine_seconds()
    seconds = measure(side, workload, batches)
    measured_s = time.perf_counter() - start
    ((of_ranks,),) = reduce([[time.process_time() - own]], dist.ReduceOp.SUM)
    about = {
        "build_s": build_s,
        "cpu_wait_share": (cpu_wait_seconds() - waited) / measured_s,
        "others_share": max(0.0, machine_seconds() - everyone - of_ranks) / measured_s,
        "huge_page_bytes": 1024 * kib_of(Path("/proc/self/smaps_rollup"))["AnonHugePages"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (most,) = reduce([list(about.values())], dist.ReduceOp.MAX)
    wait_for_others()
    print(json.dumps({**seconds, **dict(zip(about, most, strict=True))}), flush=True)
    os._exit(0)  # threads that TorchRec leaves behind sometimes abort a process that ends in the usual way


if __name__ == "__main__":
    main()
