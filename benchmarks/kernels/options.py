"""State the options of ``python -m benchmarks.kernels``, each once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hotbed import optim
from hotbed.config import Component, Device
from hotbed.data.formats.zipf_source import MAX_EXPONENT
from hotbed.errors import RecipeError, did_you_mean
from hotbed.ops import BackendName
from hotbed.optim import SparseOptimizer
from hotbed.specs import Feature, RowDtype, Table
from hotbed.train.numerics import resolve_device

LEARNING_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class OpsOptions:
    """Tables, batches, and what is measured on them."""

    tables: int = 26
    """Number of tables, with one feature each."""
    rows: int | list[int] = 1_000_000
    """Rows of every table, or a list with those of each: ``[1000,50]``."""
    dim: int = 128
    """Columns of every table."""
    batch_size: int = 4096
    """Samples per batch."""
    pooling: int = 1
    """Ids per bag; a bag's rows are summed."""
    zipf: float = 1.05
    """Exponent of the law that ids follow: the k-th most frequent is drawn in proportion to k to the power -ZIPF."""
    ids: Literal["int32", "int64"] = "int64"
    """What ids are stored as."""
    dtype: RowDtype = "fp32"
    """What rows are stored as."""
    fp32_rows: int = 0
    """First rows of every table that are float32 whatever the dtype. With any, ids are in order of falling frequency,
    as prepared data has them; without, frequent ids are scattered over the table."""
    optimizer: str = "hotbed.optim.RowWiseAdagrad"
    """Sparse optimizer: a name of hotbed.optim, or the import path of a class."""
    weighted: bool = False
    """Whether ids have weights; their gradient is measured, too."""
    repeats: int = 9
    """Measurements of each; medians are reported."""
    device: Device = "auto"
    """``auto`` is ``cuda`` where there is one, else ``cpu``."""
    backend: BackendName = "auto"
    """Kernels; ``auto`` goes by device."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        for name in ("tables", "dim", "batch_size", "pooling", "repeats"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} is {getattr(self, name):,}, must be at least 1")
        for name in ("fp32_rows", "zipf", "seed"):
            if not getattr(self, name) >= 0:
                raise RecipeError(f"{name} is {getattr(self, name)}, must not be negative")
        if self.zipf > MAX_EXPONENT:
            raise RecipeError(f"zipf is {self.zipf}, must be at most {MAX_EXPONENT}, where all ids are the same row")
        if isinstance(self.rows, list) and len(self.rows) != self.tables:
            raise RecipeError(
                f"rows has {len(self.rows)} entries, but there are {self.tables} tables; give one number per table, or "
                "one for all"
            )
        if min(self.rows_per_table) < 1:
            raise RecipeError(f"rows is {min(self.rows_per_table):,}, must be at least 1")
        if self.ids == "int32" and max(self.rows_per_table) > 1 << 31:
            raise RecipeError(f"rows is {max(self.rows_per_table):,}, more than int32 ids can count; use --ids int64")
        if self.dtype != "fp32" and self.dim % 4:
            raise RecipeError(
                f"dim is {self.dim}, must be a multiple of 4 for {self.dtype} rows: what they are measured against "
                "moves whole 32-bit words"
            )

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(self.rows) if isinstance(self.rows, list) else (self.rows,) * self.tables

    def specs(self, rows: int | None = None) -> tuple[list[Table], list[Feature]]:
        """Tables ``t0``, ``t1``, … (with ``rows``, of so many rows), and a feature of the same name for each."""
        tables = [
            Table(f"t{i}", rows=r, dim=self.dim, dtype=self.dtype, fp32_rows=min(self.fp32_rows, r))
            for i, r in enumerate((rows,) * self.tables if rows else self.rows_per_table)
        ]
        return tables, [Feature(t.name, table=t.name) for t in tables]

    def place(self) -> torch.device:
        """The device."""
        return resolve_device(self.device, "device")

    def make_optimizer(self, model: nn.Module) -> SparseOptimizer:
        """The sparse optimizer of a model."""
        path = self.optimizer
        if "." not in path:
            if path not in sparse_optimizers():
                raise RecipeError(
                    f"optimizer is '{path}', must be one of {', '.join(sparse_optimizers())}, or an import path"
                    f"{did_you_mean(path, sparse_optimizers())}"
                )
            path = f"hotbed.optim.{path}"
        chosen = Component(class_path=path, init_args={"lr": LEARNING_RATE})
        from hotbed.train.runs.build import (
            build_component,  # here, because GPU machines may lack what data formats need
        )

        return build_component("optimizer", chosen, SparseOptimizer, model)

    def settings(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class StepOptions(OpsOptions):
    """Tables, batches, a DLRM around the tables, and what is measured on it."""

    dense_features: int = 13
    """Numerical inputs."""
    bottom: list[int] | None = None
    """Widths of the bottom MLP, of which the last is DIM; by default ``[512,256,DIM]``."""
    top: list[int] = field(default_factory=lambda: [1024, 1024, 512, 256, 1])
    """Widths of the top MLP."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16`` runs the forward pass under torch.autocast."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_features < 0:
            raise RecipeError(f"dense_features is {self.dense_features}, must not be negative")

    @property
    def bottom_widths(self) -> list[int]:
        """Widths of the bottom MLP."""
        return [512, 256, self.dim] if self.bottom is None else self.bottom


def sparse_optimizers() -> list[str]:
    """Names of the sparse optimizers of `hotbed.optim`."""
    named = {name: getattr(optim, name) for name in optim.__all__}
    return [
        name
        for name, value in named.items()
        if isinstance(value, type) and issubclass(value, SparseOptimizer) and value is not SparseOptimizer
    ]


OPTIONS: dict[str, type[OpsOptions]] = {"ops": OpsOptions, "step": StepOptions}
"""Options of each command."""
