"""Whole training steps of DLRM: samples per second, and where the time goes.

The model that NVIDIA published (bottom 13-512-256-128, 26 tables of 128 columns, top 1024-1024-512-256-1) on its tables
of Criteo 1TB, batch 65,536, Zipf-distributed ids. Batches lie on the device, so that loading is not measured. Parts are
medians over CUDA events:

=========== ================================================
lookup      all embeddings
forward     the rest of the model, and the loss
backward    of the model, to the gradient of the embeddings
dense step  SGD of the MLPs
update      grouping of ids, and the rule once per row
=========== ================================================
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional as F

import hotbed as hb
from benchmarks.workload import INCOMPLETE, Sizes, draw_ids

CONDITIONS = (
    ("bf16", "SGD", "fp32"),
    ("bf16", "RowWiseAdagrad", "fp32"),
    ("fp32", "SGD", "fp32"),
    ("fp32", "RowWiseAdagrad", "fp32"),
    ("tf32", "RowWiseAdagrad", "fp32"),
    ("bf16", "RowWiseAdagrad", "bf16"),
    ("bf16", "RowWiseAdagrad", "int8"),
)
"""Arithmetic of the MLPs (bf16: autocast), sparse optimizer, dtype of the rows."""

BATCHES = 4


class Watch:
    """When a step passed each of its marks."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.steps: list[dict[str, object]] = []

    def start(self) -> None:
        self.steps.append({})
        self.mark("start")

    def mark(self, name: str) -> None:
        at: object = time.perf_counter()
        if self.on_gpu:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        self.steps[-1][name] = at

    def seconds(self, start: str, end: str) -> list[float]:
        """Time from one mark to another, by step."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [step[start].elapsed_time(step[end]) / 1e3 for step in self.steps]
        return [step[end] - step[start] for step in self.steps]


@contextmanager
def arithmetic(precision: str, device: torch.device):
    """Precision of the matrix products of the forward pass, and of what follows from it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    finally:
        torch.set_float32_matmul_precision(before)


def make_model(sizes: Sizes, dtype: str) -> hb.nn.DLRM:
    dim = max(sizes.dims)
    tables = [hb.Table(f"C{i}", rows=rows, dim=dim, dtype=dtype) for i, rows in enumerate(sizes.tables(dim))]
    features = [hb.Feature(f"f{i}", table=table.name) for i, table in enumerate(tables)]
    bottom, top = ((32, dim), (32, 1)) if sizes.tiny else ((512, 256, dim), (1024, 1024, 512, 256, 1))
    with torch.device(sizes.device):
        return hb.nn.DLRM(tables, features, dense_features=13, bottom=bottom, top=top, backend="triton")


def make_batches(model: hb.nn.DLRM, sizes: Sizes) -> list[hb.Batch]:
    names, device = [f.name for f in model.embeddings.features], sizes.device
    rows = tuple(table.rows for table in model.embeddings.tables.values())
    batches: list[hb.Batch] = []
    for seed in range(BATCHES):
        ids = hb.Jagged(names, draw_ids(rows, sizes.batch, "zipf", seed, device), batch_size=sizes.batch)
        model.embeddings.verify(ids)
        dense = torch.randn(sizes.batch, 13, device=device)
        labels = torch.randint(0, 2, (sizes.batch, 1), device=device).float()
        batches.append(hb.Batch(sparse=ids, dense=dense, labels=labels))
    return batches


def measure(sizes: Sizes, precision: str, optimizer: str, dtype: str) -> dict[str, object]:
    """Steps of one configuration."""
    model = make_model(sizes, dtype)
    batches, watch = make_batches(model, sizes), Watch(sizes.device)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    sparse = getattr(hb.optim, optimizer)(model, lr=0.01)
    model.embeddings.register_forward_pre_hook(lambda *_: watch.mark("lookup"))
    model.embeddings.register_forward_hook(lambda *_: watch.mark("looked_up"))
    warm = 1 if sizes.tiny else 5
    with arithmetic(precision, sizes.device) as autocast:
        for i in range(warm + sizes.repeats):
            batch = batches[i % BATCHES]
            watch.start()
            with autocast:
                logits = model(batch)
            loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
            watch.mark("forward")
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()
            watch.mark("backward")
            dense.step()
            watch.mark("dense_step")
            sparse.step()
            watch.mark("update")
    del watch.steps[:warm]
    step_s = statistics.median(watch.seconds("start", "update"))
    lookup = watch.seconds("lookup", "looked_up")
    parts = {
        "lookup": lookup,
        "forward": [f - x for f, x in zip(watch.seconds("start", "forward"), lookup, strict=True)],
        "backward": watch.seconds("forward", "backward"),
        "dense_step": watch.seconds("backward", "dense_step"),
        "update": watch.seconds("dense_step", "update"),
    }
    memory = torch.cuda.max_memory_allocated() if watch.on_gpu else None
    return {
        "precision": precision,
        "optimizer": optimizer,
        "dtype": dtype,
        "batch": sizes.batch,
        "rows": sum(table.rows for table in model.embeddings.tables.values()),
        "samples_per_s": sizes.batch / step_s,
        "step_s": step_s,
        "parts_s": {name: statistics.median(times) for name, times in parts.items()},
        "loss": loss.item(),
        "peak_memory_bytes": memory,
    }


def main(out: Path, budget_s: float) -> None:
    sizes = Sizes.choose()
    deadline = time.monotonic() + budget_s
    results: list[dict[str, object]] = []
    for conditions in CONDITIONS:
        if time.monotonic() > deadline:
            print(f"  time is up; left out: {' '.join(conditions)} and what follows it")
            sys.exit(INCOMPLETE)
        if sizes.device.type == "cuda":
            gc.collect()  # optimizers and tables refer to each other
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        results.append(found := measure(sizes, *conditions))
        out.write_text(json.dumps(results, indent=1))
        parts = ", ".join(f"{name} {s * 1e3:.2f}" for name, s in found["parts_s"].items())
        print(f"  {' '.join(conditions):28s} {found['samples_per_s']:12,.0f} samples/s   ms: {parts}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
