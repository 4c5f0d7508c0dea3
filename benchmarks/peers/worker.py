"""Measure one side of a comparison in a process of its own, or in one per rank; print median seconds as a JSON line.

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

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers import ranks
from benchmarks.peers.sides import Embedding, Step
from benchmarks.peers.workloads import Workload, dense_inputs, read_ids


def batches_needed(kind: str, workload: Workload) -> int:
    """How many batches a worker uses: each one once."""
    if kind == "step":
        return len(workload.precisions) * (workload.warmup + workload.steps)
    return workload.warmup + workload.steps + 2 * workload.limit


def embedding_seconds(side: Embedding, ids: Tensor, grad: Tensor) -> tuple[float, float, float]:
    """Seconds of one lookup, of its backward and update, and processor seconds of both."""
    batch = side.prepare(ids)
    ranks.wait_for_others()
    busy = time.process_time()
    start = time.perf_counter()
    pooled = side.lookup(batch)
    looked_up = time.perf_counter()
    side.update(pooled, grad)
    del pooled
    end = time.perf_counter()
    return looked_up - start, end - looked_up, time.process_time() - busy


def measure_embedding(side: Embedding, workload: Workload, batches: list[Tensor]) -> dict[str, float]:
    """Medians over steps, of the parts and of their sums; and the row limit where the side can measure it."""
    grad = torch.randn(workload.batch, workload.tables, workload.dim) * 1e-3
    steps = workload.warmup + workload.steps
    limits: list[tuple[float, float, float]] = []
    if workload.limit and hasattr(side, "row_limit"):
        limits.append(side.row_limit(batches[steps : steps + workload.limit]))
    times = [embedding_seconds(side, ids, grad) for ids in batches[:steps]][workload.warmup :]
    if workload.limit and hasattr(side, "row_limit"):
        limits.append(side.row_limit(batches[steps + workload.limit :]))
    busy = ranks.total([(busy,) for _, _, busy in times])
    lookups, updates, totals = zip(*ranks.largest([(a, b, a + b) for a, b, _ in times]), strict=True)
    return {
        "lookup_s": statistics.median(lookups),
        "update_s": statistics.median(updates),
        "total_s": statistics.median(totals),
        "busy_cores": sum(seconds for (seconds,) in busy) / sum(totals),
        **{
            name: statistics.mean(limit[i] for limit in limits)
            for i, name in enumerate(("gather_s", "scatter_s", "limit_bytes"))
            if limits
        },
    }


def step_seconds(side: Step, ids: Tensor, dense: Tensor, labels: Tensor, bf16: bool) -> float:
    """Seconds of one training step."""
    batch = side.prepare(ids, dense, labels)
    ranks.wait_for_others()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = side.logits(batch)
    loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
    side.zero_grad()
    loss.backward()
    side.update()
    del logits, loss
    return time.perf_counter() - start


def measure_step(side: Step, workload: Workload, batches: list[Tensor]) -> dict[str, float]:
    """Medians over steps, by precision."""
    dense, labels = dense_inputs(workload)  # those of ranks are alike: nothing depends on them
    seconds: dict[str, float] = {}
    remaining = iter(batches)
    for precision in workload.precisions:
        times = [
            step_seconds(side, next(remaining), dense, labels, bf16=precision == "bf16")
            for _ in range(workload.warmup + workload.steps)
        ]
        slowest = ranks.largest([(taken,) for taken in times[workload.warmup :]])
        seconds[f"{precision}_s"] = statistics.median(taken for (taken,) in slowest)
    return seconds


def cpu_wait_seconds() -> float:
    """Seconds that the threads of this process were ready to run and had no core, together."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="utf-8").split()[1]) for task in tasks) / 1e9


def machine_seconds() -> float:
    """Processor seconds of all processes of this machine, and those that other virtual machines took from it."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)[1:9]
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, fields)
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def huge_page_bytes() -> int:
    """Bytes of this process that lie in transparent huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))


def main() -> None:
    """Build, warm up, measure, print."""
    kind, module, workload_json, options_json, ids_path = sys.argv[1:]
    warnings.simplefilter("ignore")  # the peers announce deprecations of their own parts
    rank, count = ranks.join()
    workload = Workload(**json.loads(workload_json)).of_one_rank
    contender = importlib.import_module(f"benchmarks.peers.{module}")
    torch.manual_seed(0)
    start = time.perf_counter()
    make = contender.Step if kind == "step" else contender.Embedding
    side = make(workload, **json.loads(options_json))
    build_s = time.perf_counter() - start
    measure = measure_step if kind == "step" else measure_embedding
    batches = read_ids(Path(ids_path), rank, count)
    ranks.wait_for_others()
    start, waited, own, everyone = time.perf_counter(), cpu_wait_seconds(), time.process_time(), machine_seconds()
    seconds = measure(side, workload, batches)
    measured_s = time.perf_counter() - start
    ((of_ranks,),) = ranks.total([[time.process_time() - own]])
    about = {
        "build_s": build_s,
        "cpu_wait_share": (cpu_wait_seconds() - waited) / measured_s,
        "others_share": max(0.0, machine_seconds() - everyone - of_ranks) / measured_s,
        "huge_page_bytes": huge_page_bytes(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (most,) = ranks.largest([list(about.values())])
    ranks.leave()
    print(json.dumps({**seconds, **dict(zip(about, most, strict=True))}), flush=True)
    os._exit(0)  # threads that TorchRec leaves behind now and then abort a process that ends in the usual way


if __name__ == "__main__":
    main()
