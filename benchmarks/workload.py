"""The workload of the GPU suite: the 26 tables of Criteo 1TB (15 GiB at 128 columns), one id per sample and table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotbed.ops import BagLayout

ROWS = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968, 15),
    *(8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
"""Rows per table with values seen fewer than 15 times dropped (NVIDIA's DLRM for Criteo 1TB)."""

ZIPF = 1.05

Distribution = Literal["uniform", "zipf"]


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
            return Sizes(True, device, 4, (3, 40, 11), (16,), 2, 1 << 16)
        return Sizes(False, device, 65536, ROWS, (16, 128), 21, 4 << 30)

    def tables(self, dim: int) -> tuple[int, ...]:
        """Rows per table, shrunk in proportion where all of them would take over 40 % of the free memory."""
        if self.device.type == "cpu":
            return self.rows
        free, _ = torch.cuda.mem_get_info()
        share = min(1.0, 0.4 * free / (sum(self.rows) * dim * 4))
        return tuple(max(int(r * share), 1) for r in self.rows)


def draw_ids(tables: tuple[int, ...], batch: int, kind: Distribution, seed: int, device: torch.device) -> Tensor:
    """One id per table and sample, feature-major ``[F · B]`` int32; row 0 of a table is its most frequent."""
    gen = torch.Generator(device=device).manual_seed(seed)
    columns: list[Tensor] = []
    for rows in tables:
        u = torch.rand(batch, generator=gen, device=device, dtype=torch.float64)
        if kind == "uniform":
            ids = (u * rows).long()
        else:
            mass = torch.arange(1, rows + 1, device=device, dtype=torch.float64).pow_(-ZIPF).cumsum_(0)
            ids = torch.searchsorted(mass, u * mass[-1])
        columns.append(ids.clamp_(max=rows - 1).int())
    return torch.cat(columns)


def one_hot(tables: tuple[int, ...], batch: int, ids: Tensor) -> BagLayout:
    """Bags of `draw_ids`: one feature per table, all tables in one arena."""
    rows: list[list[int]] = []
    base = 0
    for f, count in enumerate(tables):
        rows.append([f * batch, 1, 0, base, 0])
        base += count
    return BagLayout(
        ids,
        torch.tensor(rows, device=ids.device),
        torch.empty(0, batch + 1, dtype=torch.int64, device=ids.device),
        None,
        batch,
        len(ids),
        False,
    )


def bases_of(bags: BagLayout) -> Tensor:
    """First slot of each table ``[T]``."""
    return bags.features[:, 3].contiguous()
