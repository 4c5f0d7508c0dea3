"""Sizes, records and loops of the parts of the GPU suite.

The workload has the 26 tables of Criteo 1TB (15.6 GiB at 128 float32 columns), and one id per sample. Kernels and steps
come from `benchmarks.kernels`.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu_suite import INCOMPLETE
from benchmarks.kernels.limits import copy_limit, copy_way
from benchmarks.kernels.meter import Limit, Meter
from benchmarks.kernels.ops import Job, copy_rate, measured
from benchmarks.kernels.options import OpsOptions
from hotbed import optim
from hotbed.data.formats.zipf_source import CRITEO_1TB, ZipfLaw
from hotbed.measure import machine_profile

ZIPF = 1.05
LR = 1e-4
OPTIMIZERS: dict[str, Callable[[nn.Module], optim.SparseOptimizer]] = {
    "sgd": partial(optim.SGD, lr=LR),
    "rowwise_adagrad": partial(optim.RowWiseAdagrad, lr=LR),
    "adam": partial(optim.Adam, lr=LR),
    "adamw": partial(optim.AdamW, lr=LR),
    "momentum": partial(optim.SGD, lr=LR, momentum=0.9),
    "adagrad": partial(optim.Adagrad, lr=LR),
    "partial_rowwise_adam": partial(optim.PartialRowWiseAdam, lr=LR, weight_decay=0.01),
    "lamb": partial(optim.LAMB, lr=LR, weight_decay=0.01),
    "ftrl": partial(optim.FTRL, lr=LR),
    "rowwise_adagrad_limited": partial(
        optim.RowWiseAdagrad, lr=LR, max_grad_norm=1.0, max_norm=10.0, weight_decay=1e-6
    ),
}
"""Every optimizer. The rarest are last, because they are left out when time runs out."""

Options = TypeVar("Options", bound=OpsOptions)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements: full on a GPU, tiny under Triton's interpreter."""

    tiny: bool
    device: torch.device
    batch: int
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    repeats: int
    copy_bytes: int

    @staticmethod
    def choose() -> Sizes:
        """Return full sizes on a CUDA device, and tiny ones without it or with ``HOTBED_TINY=1``."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        if not cuda or os.environ.get("HOTBED_TINY") == "1":
            return Sizes(True, device, 4, (3, 40, 11), (16,), 1, 1 << 16)
        return Sizes(False, device, 65536, CRITEO_1TB["criteo_1tb_t15"], (16, 128), 21, 4 << 30)

    def begin(self) -> Sizes:
        """Empty no caches if sizes are tiny. Return the same sizes."""
        if self.tiny:
            machine_profile.EVICT_BYTES = machine_profile.COPY_BYTES = 1 << 16
        return self

    def tables(self, dim: int) -> tuple[int, ...]:
        """Return rows per table, scaled down if rows and two moments take over 70 % of the device's memory."""
        if self.device.type == "cpu":
            return self.rows
        _, memory = torch.cuda.mem_get_info()  # not the free memory, which differs from call to call
        share = min(1.0, 0.7 * memory / (sum(self.rows) * dim * 12))
        return tuple(max(int(r * share), 1) for r in self.rows)

    def options(self, kind: type[Options], dim: int, **more: Any) -> Options:
        """Return options of ``benchmarks.kernels`` for these tables and Triton's kernels."""
        rows = list(self.tables(dim))
        sizes = {"tables": len(rows), "rows": rows, "dim": dim, "batch_size": self.batch, "repeats": self.repeats}
        given: dict[str, Any] = {**sizes, "zipf": ZIPF, "ids": "int32", "device": self.device.type, "backend": "triton"}
        return kind(**(given | more))


class Record:
    """Results of a part, which are written after each measurement until a deadline."""

    def __init__(self, sizes: Sizes, out: Path, budget_s: float) -> None:
        self.sizes, self.out, self.deadline = sizes, out, time.monotonic() + budget_s
        self.results: list[dict[str, Any]] = []
        self.complete, self.failed = True, False

    @property
    def status(self) -> int:
        return 1 if self.failed else 0 if self.complete else INCOMPLETE

    def has_time(self, what: object) -> bool:
        """Return whether there is time left, and note otherwise that a measurement is left out."""
        if time.monotonic() <= self.deadline:
            return True
        print(f"  time is up; left out: {what} and everything after it")
        self.complete = False
        return False

    def add(self, found: dict[str, Any], text: str) -> None:
        self.results.append(found)
        self.out.write_text(json.dumps(self.results, indent=1))
        print(f"  {text}", flush=True)

    def attempt(self, about: Mapping[Any, Any], measure: Callable[[], dict[str, Any] | None]) -> None:
        """Measure, and add the result or the error to what it is about. Later measurements run in any case."""
        try:
            found = measure()
            if found is not None:
                skipped = ("kernels", "parts", "sha256")
                self.add({**about, **found}, str({k: v for k, v in {**about, **found}.items() if k not in skipped}))
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            self.add({**about, "error": f"{type(error).__name__}: {error}"}, f"FAILED: {error}")


class KernelRecord(Record):
    """A record of kernels that are compared with their limits."""

    def __init__(self, sizes: Sizes, out: Path, budget_s: float) -> None:
        super().__init__(sizes, out, budget_s)
        self.meter = Meter(sizes.device, sizes.repeats)
        self._copy = copy_way(sizes.device)
        self.copy_gb_s = copy_rate(self.meter, self._copy)
        self.add({"kernel": "copy", "gb_s": self.copy_gb_s}, f"copy: {self.copy_gb_s:.1f} GB/s")

    def streamed(self, nbytes: int) -> Limit:
        return copy_limit(self._copy, nbytes)

    def run(self, jobs: Iterable[Job], **about: object) -> None:
        for job in jobs:
            if not self.has_time(f"{job.kernel} {about}"):
                return
            self.attempt({"kernel": job.kernel, **about}, lambda job=job: measured(job, self.meter, self.copy_gb_s))


def draw_ids(tables: tuple[int, ...], batch: int, number: int, device: torch.device) -> Tensor:
    """Return ids of a batch, one per table and sample, feature-major ``[F · B]``. Row 0 is the most frequent."""
    counters = np.arange(number * batch, (number + 1) * batch, dtype=np.uint64)
    drawn = [torch.from_numpy(ZipfLaw(rows, ZIPF).draw((table,), counters)) for table, rows in enumerate(tables)]
    return torch.cat(drawn).int().to(device)
