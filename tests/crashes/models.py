"""Models for recipes to name: one whose tables evict rows, and some under which data or memory is lost."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.nn import DLRM
from hotbed.specs import Dynamic, Feature, Table


class DynamicDLRM(DLRM):
    """`hotbed.nn.DLRM` with room for few rows of every table."""

    def __init__(
        self, tables: Sequence[Table], features: Sequence[Feature], dense_features: int, **options: Any
    ) -> None:
        few = Dynamic(capacity_bytes=128 * 4 * tables[0].dim)
        dynamic = [Table(t.name, rows="dynamic", dim=t.dim, dynamic=few, init_bound=0.1) for t in tables]
        super().__init__(dynamic, features, dense_features, **options)


class LosesData(DLRM):
    """In its third batch all files of the dataset in ``HOTBED_LOSES`` are removed, or cut to half their size."""

    def forward(self, batch: Batch) -> Tensor:
        self.batches = getattr(self, "batches", 0) + 1
        if self.training and self.batches == 3:
            how, folder = os.environ["HOTBED_LOSES"].split(":")
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file() and how == "remove":
                    file.unlink()
                elif file.is_file():
                    os.truncate(file, file.stat().st_size // 2)
        return super().forward(batch)


class LosesMemory(DLRM):
    """From when ``HOTBED_LOSES`` says (``init`` or ``step``) there are 4 MiB of address space left."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lose("init")
        super().__init__(*args, **options)
        self.batches = 0

    def forward(self, batch: Batch) -> Tensor:
        self.batches += self.training
        if self.batches == 4:
            self._lose("step")
            torch.empty(1 << 28).fill_(0)  # as a larger batch would need
        return super().forward(batch)

    def _lose(self, when: str) -> None:
        if os.environ["HOTBED_LOSES"] == when:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), most))
