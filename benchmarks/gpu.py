"""Choose the sizes of the GPU suite's parts, and write what they measure as it comes.

The workload is that of the 26 tables of Criteo 1TB (15.6 GiB at 128 float32 columns), one id per sample. Kernels and
steps are those of `benchmarks.kernels`, measured as ``benchmarks.kernels`` does.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
"""Every optimizer; the rarest last, because they are what is left out where time runs out."""

Options = TypeVar("Options", bound=OpsOptions)


@dataclass(frozen=True)
class Sizes:
    """How much is done: everything on a GPU, next to nothing under Triton's interpreter."""

    tiny: bool
    device: torch.device
    batch: int
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    repeats: int
    copy_bytes: int

    @staticmethod
    def choose() -> Sizes:
        """Full size on a CUDA device; tiny without one, or where ``HOTBED_TINY=1`` asks for it."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        if not cuda or os.environ.get("HOTBED_TINY") == "1":
            return Sizes(True, device, 4, (3, 40, 11), (16,), 1, 1 << 16)
        return Sizes(False, device, 65536, CRITEO_1TB["criteo_1tb_t15"], (16, 128), 21, 4 << 30)

    def begin(self) -> Sizes:
        """Empty no caches where times mean nothing; the same sizes."""
        if self.tiny:
            machine_profile.EVICT_BYTES = machine_profile.COPY_BYTES = 1 << 16
        return self

    def tables(self, dim: int) -> tuple[int, ...]:
        """Rows per table, shrunk in proportion where they and two moments take over 70 % of the device's memory."""
        if self.device.type == "cpu":
            return self.rows
        _, memory = torch.cuda.mem_get_info()  # not what is free, which differs from one question to the next
        share = min(1.0, 0.7 * memory / (sum(self.rows) * dim * 12))
        return tuple(max(int(r * share), 1) for r in self.rows)

    def options(self, kind: type[Options], dim: int, **more: Any) -> Options:
        """Options of ``benchmarks.kernels``: these tables with so many columns, Triton's kernels."""
        rows = list(self.tables(dim))
        given = {"tables": len(rows), "rows": rows, "dim": dim, "batch_size": self.batch, "repeats": self.repeats}
        return kind(**{**given, "zipf": ZIPF, "ids": "int32", "device": self.device.type, "backend": "triton", **more})


@dataclass
class Record:
    """Measures jobs until a deadline, and writes every result at once."""

    sizes: Sizes
    out: Path
    deadline: float
    results: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = True
    failed: bool = False

    @property
    def status(self) -> int:
        """Exit status of the part."""
        return 1 if self.failed else 0 if self.complete else INCOMPLETE

    def __post_init__(self) -> None:
        self.meter = Meter(self.sizes.device, self.sizes.repeats)
        self._copy = copy_way(self.sizes.device)
        self.copy_gb_s = copy_rate(self.meter, self._copy)
        self.add({"kernel": "copy", "gb_s": self.copy_gb_s}, f"{self.copy_gb_s:.1f} GB/s")

    def streamed(self, nbytes: int) -> Limit:
        """As many bytes by a streaming copy."""
        return copy_limit(self._copy, nbytes)

    def run(self, jobs: Iterable[Job], **about: object) -> None:
        """Measure jobs under conditions that are added to their results."""
        for job in jobs:
            if time.monotonic() > self.deadline:
                print(f"  time is up; left out: {job.kernel} {about} and what follows it")
                self.complete = False
                return
            try:
                found = {**about, **measured(job, self.meter, self.copy_gb_s)}
            except Exception as error:  # the others are measured all the same
                self.fail(job.kernel, error, **about)
                continue
            what = " ".join(str(v) for v in (*about.values(), job.ids) if v is not None)
            limit = f"{found['median_share']:6.1%} of {found['limit']}, {found['share_of_copy']:6.1%} of copy"
            self.add(found, f"{what:28s} {found['median_s'] * 1e6:10.1f} us {found['gb_s']:8.1f} GB/s {limit}")

    def fail(self, what: str, error: Exception, **about: object) -> None:
        """Add what could not be measured, and why."""
        traceback.print_exc()
        self.failed = True
        self.add({"kernel": what, **about, "error": f"{type(error).__name__}: {error}"}, f"FAILED: {error}")

    def add(self, found: dict[str, Any], shown: str) -> None:
        """Add a result, and say so."""
        self.results.append(found)
        self.out.write_text(json.dumps(self.results, indent=1))
        print(f"  {found['kernel']:28s} {shown}", flush=True)


def draw_ids(tables: tuple[int, ...], batch: int, number: int, device: torch.device) -> Tensor:
    """Ids of a batch, one per table and sample, feature-major ``[F · B]``; row 0 of a table is its most frequent."""
    counters = np.arange(number * batch, (number + 1) * batch, dtype=np.uint64)
    drawn = [torch.from_numpy(ZipfLaw(rows, ZIPF).draw((table,), counters)) for table, rows in enumerate(tables)]
    return torch.cat(drawn).int().to(device)
