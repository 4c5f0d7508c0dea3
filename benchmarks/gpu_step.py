"""Measure training steps of DLRM: samples per second, the time of each part, and the distance from the limit.

``benchmarks.kernels step`` with Triton's kernels, of the model that NVIDIA published (bottom 13-512-256-128, 26 tables
of 128 columns, top 1024-1024-512-256-1) on its tables of Criteo 1TB, batch 65,536, Zipf-distributed ids. Batches are on
the device, so loading is not measured. The host queues every kernel, which takes longer than the device needs.
``trained`` are steps of the trainer, captured in CUDA graphs, with batches from page-locked memory. For T15
(`COMPARED`), they take turns with steps that group ids during the update (``grouped_behind``) instead of next to the
forward pass, and the medians are reported.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import Record, Sizes
from benchmarks.gpu_census import Steps, batch_of, trainer_of
from benchmarks.kernels.options import StepOptions
from benchmarks.kernels.step import bench_step
from hotbed.embed import local_tables

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
RULES = {"SGD": "sgd", "RowWiseAdagrad": "rowwise_adagrad"}
COMPARED = CONDITIONS[1]
BATCHES, TRAINED, ROUNDS = 6, 60, 3  # different batches, steps of the trainer, rounds of `COMPARED`


@contextmanager
def float32_products(precision: str) -> Generator[None]:
    """Allow TF32 in matrix products of float32 for the precision "tf32"."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure(sizes: Sizes, precision: str, optimizer: str, dtype: str) -> dict[str, Any]:
    dim = max(sizes.dims)
    small: dict[str, Any] = {"bottom": [32, dim], "top": [32, 1]} if sizes.tiny else {}
    arithmetic = "bf16" if precision == "bf16" else "fp32"
    options = sizes.options(StepOptions, dim, optimizer=optimizer, dtype=dtype, precision=arithmetic, **small)
    with float32_products(precision):
        found = bench_step(options, lambda _: None)
    memory = torch.cuda.max_memory_allocated() if sizes.device.type == "cuda" else None
    about = {"precision": precision, "optimizer": optimizer, "dtype": dtype, "batch": sizes.batch}
    return {**about, "rows": sum(options.rows_per_table), **found, "peak_memory_bytes": memory}


def trained(sizes: Sizes, precision: str, optimizer: str, dtype: str) -> dict[str, Any]:
    """Measure steps of the trainer, captured if there is a device."""
    cuda = sizes.device.type == "cuda"
    precision = precision if cuda or precision == "bf16" else "fp32"  # CPUs have no TF32
    trainer = trainer_of(sizes, RULES[optimizer], dtype, moving=False, cuda_graph=cuda, precision=precision)
    steps = Steps()
    trainer.callbacks.append(steps)
    batches = [batch_of(sizes, i, ragged=False) for i in range(BATCHES)]
    trainer.fit([batches[i % BATCHES] for i in range(12 if sizes.tiny else TRAINED)])
    return {"step_s": steps.seconds(), "samples_per_s": sizes.batch / steps.seconds(), "captured": cuda}


def in_turns(sizes: Sizes, *conditions: str) -> dict[str, Any]:
    """Measure steps with ids grouped next to the forward pass, and after it."""
    runs: dict[str, list[dict[str, Any]]] = {"trained": [], "grouped_behind": []}
    for _ in range(1 if sizes.tiny else ROUNDS):
        for name, of_name in runs.items():
            behind = patch.object(local_tables, "group_on_side_stream", lambda _, bags: bags)
            with behind if name == "grouped_behind" else nullcontext():
                of_name.append(trained(sizes, *conditions))
            emptied(sizes)
    return {name: sorted(of, key=lambda run: run["step_s"])[len(of) // 2] for name, of in runs.items()}


def emptied(sizes: Sizes) -> None:
    if sizes.device.type == "cuda":
        gc.collect()  # optimizers and tables refer to each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(out: Path, budget_s: float) -> int:
    sizes = Sizes.choose().begin()
    record = Record(sizes, out, budget_s)

    def both(conditions: tuple[str, str, str]) -> dict[str, Any]:
        emptied(sizes)
        found = measure(sizes, *conditions)
        emptied(sizes)
        turns = in_turns(sizes, *conditions) if conditions == COMPARED else {"trained": trained(sizes, *conditions)}
        return found | turns

    for conditions in CONDITIONS:
        if record.has_time(" ".join(conditions)):
            about = dict(zip(("precision", "optimizer", "dtype"), conditions, strict=True))
            record.attempt(about, lambda conditions=conditions: both(conditions))
    return record.status
