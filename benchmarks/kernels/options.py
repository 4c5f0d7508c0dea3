"""Options of ``python -m benchmarks.kernels``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hotbed.config import Component, Device
from hotbed.errors import RecipeError
from hotbed.ops import BackendName
from hotbed.optim import SparseOptimizer
from hotbed.specs import Feature, RowDtype, Table
from hotbed.train.numerics import resolve_device

LEARNING_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class OpsOptions:
    """Measure kernels on tables and batches."""

    tables: int = 26
    """Number of tables, with one feature each."""
    rows: int | list[int] = 1_000_000
    """Rows of every table, or a list with one number per table: ``[1000,50]``."""
    dim: int = 128
    """Columns of every table."""
    batch_size: int = 4096
    """Samples per batch."""
    pooling: int = 1
    """Ids per bag; a bag's rows are summed."""
    zipf: float = 1.05
    """Exponent of the law that ids follow: the k-th most frequent is drawn in proportion to k to the power -ZIPF."""
    ids: Literal["int32", "int64"] = "int64"
    """Dtype of ids."""
    dtype: RowDtype = "fp32"
    """Dtype of rows."""
    fp32_rows: int = 0
    """First rows of every table that are float32. If there are any, ids are ordered by falling frequency, like prepared
    data. Otherwise frequent ids are scattered over the table."""
    optimizer: str = "hotbed.optim.RowWiseAdagrad"
    """Sparse optimizer: a class of hotbed.optim, or an import path."""
    weighted: bool = False
    """Whether ids have weights. Their gradient is also measured."""
    repeats: int = 9
    """Measurements of each call."""
    device: Device = "auto"
    """``auto`` is ``cuda`` if there is one, otherwise ``cpu``."""
    backend: BackendName = "auto"
    """Kernels (``auto``: by device)."""
    seed: int = 0
    """Seed of all random values."""

    def __post_init__(self) -> None:
        if isinstance(self.rows, list) and len(self.rows) != self.tables:
            raise RecipeError(f"rows must match tables: got {len(self.rows)}, expected {self.tables}. List each table.")
        if self.dtype != "fp32" and self.dim % 4:
            raise RecipeError(f"dim must be a multiple of 4 for {self.dtype} rows, whose limit moves 32-bit words.")

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        return tuple(self.rows) if isinstance(self.rows, list) else (self.rows,) * self.tables

    def specs(self, rows: int | None = None) -> tuple[list[Table], list[Feature]]:
        """Return tables ``t0``, ``t1``, … (with ``rows`` if given), and a feature of the same name for each."""
        tables = [
            Table(f"t{i}", rows=r, dim=self.dim, dtype=self.dtype, fp32_rows=min(self.fp32_rows, r))
            for i, r in enumerate((rows,) * self.tables if rows else self.rows_per_table)
        ]
        return tables, [Feature(t.name, table=t.name) for t in tables]

    def torch_device(self) -> torch.device:
        return resolve_device(self.device, "device")

    def make_optimizer(self, model: nn.Module) -> SparseOptimizer:
        path = self.optimizer if "." in self.optimizer else f"hotbed.optim.{self.optimizer}"
        chosen = Component(class_path=path, init_args={"lr": LEARNING_RATE})
        from hotbed.train.runs.build import build_component  # here, because GPU machines may lack data formats

        return build_component("optimizer", chosen, SparseOptimizer, model)

    def settings(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class StepOptions(OpsOptions):
    """Measure training steps of a DLRM."""

    dense_features: int = 13
    """Numerical inputs."""
    bottom: list[int] | None = None
    """Widths of the bottom MLP (default: ``[512,256,DIM]``). The last is DIM."""
    top: list[int] = field(default_factory=lambda: [1024, 1024, 512, 256, 1])
    """Widths of the top MLP."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16`` runs the forward pass under torch.autocast."""

    @property
    def bottom_widths(self) -> list[int]:
        return [512, 256, self.dim] if self.bottom is None else self.bottom


OPTIONS: dict[str, type[OpsOptions]] = {"ops": OpsOptions, "step": StepOptions}
