"""Count the kernels, copies and waits of a training step on this device, and check that capture changes no bits.

``tests/census`` counts the same without a device. Here, CUDA itself is asked. Without a device, the steps only run.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import hotbed as hb
from benchmarks.gpu import LR, OPTIMIZERS, Record, Sizes, draw_ids
from hotbed.config import Component, ScheduleRecipe, TrainRecipe
from hotbed.train.runs.build import fuse_optimizer
from hotbed.train.trainer import Callback, Trainer

WARM_STEPS, STEPS = 4, 7
TOP = (1024, 1024, 512, 256, 1)
REPLAYED = 16  # steps of the comparison of captured steps with others
DRAWN = 4  # batches that take turns, because drawing one takes longer than its step
CASES: dict[str, dict[str, Any]] = {
    "rowwise_adagrad": {},
    "adam, lr moves": {"rule": "adam", "moving": True},
    "ragged": {"ragged": True},
    "int8": {"dtype": "int8"},
}


class Census(Callback):
    """Notes the kernels of one step after the first few, and waits of the host in the later steps."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU])
        self.kernels: Counter[str] = Counter()

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step == WARM_STEPS:
            self._profile.start()
        elif trainer.step == WARM_STEPS + 1:
            if self._cuda:
                torch.cuda.synchronize()
            self._profile.stop()
            on_device = [e for e in self._profile.events() or () if e.device_type.name != "CPU"]
            self.kernels.update(event.name for event in on_device)
            if self._cuda:
                torch.cuda.set_sync_debug_mode("warn")


class Steps(Callback):
    """Notes losses and their times."""

    def __init__(self) -> None:
        self.losses, self._times = list[float](), list[float]()

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.losses.append(loss)
        self._times.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the mean seconds of the later half of the steps."""
        last = self._times[len(self._times) // 2 :]
        return (last[-1] - last[0]) / (len(last) - 1)


def trainer_of(
    sizes: Sizes, rule: str, dtype: Any, *, moving: bool, cuda_graph: bool = False, precision: Any = "bf16"
) -> Trainer:
    dim = sizes.dims[-1]
    tables = [hb.Table(f"t{i}", rows=rows, dim=dim, dtype=dtype) for i, rows in enumerate(sizes.tables(dim))]
    features = [hb.Feature(f"f{i}", table=table.name) for i, table in enumerate(tables)]
    torch.manual_seed(0)
    with sizes.device:
        model = hb.nn.DLRM(tables, features, bottom=(512, 256, dim), top=TOP, backend="triton")
    sgd = Component(class_path="torch.optim.SGD", init_args={"lr": LR})
    trained = list(model.parameters())
    dense = (fuse_optimizer(sgd, trained) if sizes.device.type == "cuda" else sgd).build(trained)
    device: Any = "cuda" if sizes.device.type == "cuda" else "cpu"
    recipe = TrainRecipe(batch_size=sizes.batch, precision=precision, device=device, cuda_graph=cuda_graph)
    schedule = ScheduleRecipe(warmup_steps=1000) if moving else None
    return Trainer(model, dense, OPTIMIZERS[rule](model), recipe=recipe, schedule=schedule)


def batch_of(sizes: Sizes, number: int, *, ragged: bool) -> hb.Batch:
    """Return a batch of Criteo's shape, in page-locked memory if there is a device."""
    tables, size = sizes.tables(sizes.dims[-1]), sizes.batch
    ids = draw_ids(tables, size, number, torch.device("cpu")).view(len(tables), size)
    columns: dict[str, Any] = {f"f{i}": of_table for i, of_table in enumerate(ids)}
    if ragged:
        offsets = (torch.rand(size + 1, generator=torch.Generator().manual_seed(number)) * 2).long().cumsum(0)
        columns["f0"] = ids[0].repeat(2)[: int(offsets[-1] - offsets[0])], offsets - offsets[0]
    batch = hb.Batch(sparse=hb.Jagged.from_dict(columns), dense=torch.rand(size, 13), labels=torch.zeros(size, 1))
    return batch.pin_memory() if sizes.device.type == "cuda" else batch


def batches_of(sizes: Sizes, count: int, *, ragged: bool) -> list[hb.Batch]:
    """Return batches. Only `DRAWN` of them are different."""
    drawn = [batch_of(sizes, i, ragged=ragged) for i in range(min(count, DRAWN))]
    return [drawn[i % len(drawn)] for i in range(count)]


def captured(trainer: Trainer, batch: hb.Batch) -> str:
    """Capture a step in a CUDA graph, and return ``ok`` or the error."""
    if trainer.device.type != "cuda":
        return "no CUDA device"
    try:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            trainer.training_step.queue([batch], lambda: "a captured step", lambda: (False, False))
    except Exception as error:
        return str(error).splitlines()[0]
    return "ok"


def replayed(sizes: Sizes, *, rule: str, dtype: Any, ragged: bool, moving: bool) -> dict[str, Any]:
    """Train with captured steps and without, and return whether all bits are equal, and seconds of a step."""
    results: list[tuple[list[float], list[torch.Tensor], float]] = []
    batches = batches_of(sizes, REPLAYED, ragged=ragged)
    for cuda_graph in (False, True):
        trainer, steps = trainer_of(sizes, rule, dtype, moving=moving, cuda_graph=cuda_graph), Steps()
        trainer.callbacks.append(steps)
        trainer.fit(batches)
        tables = [trainer.model.embeddings.weight(name) for name in trainer.model.embeddings.tables]
        tensors = [t.detach().cpu() for t in (*tables, *trainer.model.parameters())]
        results.append((steps.losses, tensors, steps.seconds()))
    (losses, tensors, eager_s), (other_losses, other_tensors, replayed_s) = results
    return {
        "same_losses": losses == other_losses,
        "same_values": all(map(torch.equal, tensors, other_tensors)),
        "eager_s": eager_s,
        "replayed_s": replayed_s,
    }


def replay_of(sizes: Sizes, **case: Any) -> dict[str, Any]:
    """Compare captured steps with others, and return errors as text."""
    if sizes.device.type != "cuda":
        return {"left_out": "no CUDA device"}
    try:
        return replayed(sizes, **case)
    except Exception as error:
        return {"error": str(error).splitlines()[0]}


def count(
    sizes: Sizes, *, rule: str = "rowwise_adagrad", dtype: Any = "fp32", ragged: bool = False, moving: bool = False
) -> dict[str, Any]:
    """Train for some steps, and return the kernels, copies and waits of one."""
    trainer, census = trainer_of(sizes, rule, dtype, moving=moving), Census(sizes.device)
    trainer.callbacks.append(census)
    batches = batches_of(sizes, STEPS, ragged=ragged)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        try:
            trainer.fit(batches)
        finally:
            if sizes.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    copies = {name: n for name, n in census.kernels.items() if name.startswith(("Memcpy", "Memset"))}
    return {
        "launches": census.kernels.total() - sum(copies.values()),
        "copies": copies,
        "kernels": dict(census.kernels.most_common()),
        "waits": sorted({f"{w.filename}:{w.lineno}" for w in waits if "called a synchronizing" in str(w.message)}),
        "capture": captured(trainer, batches[0].to(sizes.device)),
        "replay": replay_of(sizes, rule=rule, dtype=dtype, ragged=ragged, moving=moving),
    }


def main(out: Path, budget_s: float) -> int:
    sizes = Sizes.choose()
    record = Record(sizes, out, budget_s)
    for name, case in CASES.items():
        if sizes.tiny or record.has_time(name):
            record.attempt({"case": name}, lambda case=case: count(sizes, **case))
    return record.status
