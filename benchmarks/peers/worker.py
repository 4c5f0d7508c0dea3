"""One side of one comparison in a process of its own; prints its median seconds as one line of JSON.

python -m benchmarks.peers.worker embedding fbgemm_side WORKLOAD_AS_JSON ids.npy
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.sides import Embedding, Step
from benchmarks.peers.workloads import Workload, dense_inputs, read_ids


def batches_needed(kind: str, workload: Workload) -> int:
    """How many batches a worker uses: each one once."""
    if kind == "step":
        return 2 * (workload.warmup + workload.steps)
    return workload.warmup + workload.steps + 2 * workload.limit


def embedding_seconds(side: Embedding, ids: Tensor, grad: Tensor) -> tuple[float, float, float]:
    """Seconds of one lookup, of its backward and update, and processor seconds of both."""
    batch = side.prepare(ids)
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
    limits: list[tuple[float, float]] = []
    if hasattr(side, "row_limit"):
        limits.append(side.row_limit(batches[steps : steps + workload.limit]))
    times = [embedding_seconds(side, ids, grad) for ids in batches[:steps]][workload.warmup :]
    if hasattr(side, "row_limit"):
        limits.append(side.row_limit(batches[steps + workload.limit :]))
    totals = [lookup + update for lookup, update, _ in times]
    return {
        "lookup_s": statistics.median(lookup for lookup, _, _ in times),
        "update_s": statistics.median(update for _, update, _ in times),
        "total_s": statistics.median(totals),
        "busy_cores": sum(busy for _, _, busy in times) / sum(totals),
        **{
            name: statistics.mean(limit[i] for limit in limits)
            for i, name in enumerate(("gather_s", "scatter_s"))
            if limits
        },
    }


def step_seconds(side: Step, ids: Tensor, dense: Tensor, labels: Tensor, bf16: bool) -> float:
    """Seconds of one training step."""
    batch = side.prepare(ids, dense, labels)
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
    """Medians over steps, in float32 and under bf16 autocast."""
    dense, labels = dense_inputs(workload)
    seconds: dict[str, float] = {}
    remaining = iter(batches)
    for precision in ("fp32", "bf16"):
        times = [
            step_seconds(side, next(remaining), dense, labels, bf16=precision == "bf16")
            for _ in range(workload.warmup + workload.steps)
        ]
        seconds[f"{precision}_s"] = statistics.median(times[workload.warmup :])
    return seconds


def cpu_wait_seconds() -> float:
    """Seconds that the threads of this process were ready to run and had no core, together."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="utf-8").split()[1]) for task in tasks) / 1e9


def huge_page_bytes() -> int:
    """Bytes of this process that lie in transparent huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))


def main() -> None:
    """Build, warm up, measure, print."""
    kind, module, workload_json, ids_path = sys.argv[1:]
    warnings.simplefilter("ignore")  # the peers announce deprecations of their own parts
    workload = Workload(**json.loads(workload_json))
    contender = importlib.import_module(f"benchmarks.peers.{module}")
    torch.manual_seed(0)
    start = time.perf_counter()
    side = contender.Step(workload) if kind == "step" else contender.Embedding(workload)
    build_s = time.perf_counter() - start
    measure = measure_step if kind == "step" else measure_embedding
    batches = read_ids(Path(ids_path))
    start, waited = time.perf_counter(), cpu_wait_seconds()
    seconds = measure(side, workload, batches)
    about = {
        "build_s": build_s,
        "cpu_wait_share": (cpu_wait_seconds() - waited) / (time.perf_counter() - start),
        "huge_page_bytes": huge_page_bytes(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps({**seconds, **about}))


if __name__ == "__main__":
    main()
