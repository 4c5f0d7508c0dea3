"""Run training steps of small models on the pretended device, and list what each step asked of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import hotbed as hb
from hotbed.config import TrainRecipe
from hotbed.train.trainer import Trainer
from tests.census.device import CUDA, RECORD, Event, OnDevice, recorded

BATCH = 96
ROWS = (500, 60, 3, 40)


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes
    ----------
    optimizer
        Of the tables.
    dtype
        Of their rows.
    fp32_rows
        First rows that are float32 whatever the dtype.
    ragged
        Whether a feature has bags of different lengths.
    moving
        Whether learning rates change in every step.
    """

    optimizer: str = "RowWiseAdagrad"
    dtype: str = "fp32"
    fp32_rows: int = 0
    ragged: bool = False
    moving: bool = False

    @property
    def name(self) -> str:
        options = [self.optimizer, self.dtype]
        options += [f"{self.fp32_rows} fp32 rows"] if self.fp32_rows else []
        options += ["ragged"] if self.ragged else ["one-hot"]
        return ", ".join(options + (["lr moves"] if self.moving else []))


def model_of(case: Case) -> nn.Module:
    tables = [hb.Table(f"t{i}", rows=r, dim=16, dtype=case.dtype, fp32_rows=min(case.fp32_rows, r) if case.dtype != "fp32" else 0) for i, r in enumerate(ROWS)]
    features = [hb.Feature(f"f{i}", table=t.name) for i, t in enumerate(tables)]
    torch.manual_seed(0)
    with CUDA:
        return hb.nn.DLRM(tables, features, dense_features=13, bottom=(32, 16), top=(32, 32, 1), backend="triton")


def batch_of(case: Case, step: int) -> hb.Batch:
    """A batch in page-locked memory, as a loader gives it."""
    draw = torch.Generator().manual_seed(step)
    ids = {f"f{i}": torch.randint(0, rows, (BATCH,), generator=draw, dtype=torch.int32) for i, rows in enumerate(ROWS)}
    if case.ragged:
        lengths = torch.randint(0, 4, (BATCH,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids["f0"] = (torch.randint(0, ROWS[0], (int(offsets[-1]),), generator=draw, dtype=torch.int32), offsets)
    return hb.Batch(
        sparse=hb.Jagged.from_dict(ids),
        dense=torch.rand(BATCH, 13, generator=draw),
        labels=torch.randint(0, 2, (BATCH, 1), generator=draw).float(),
    ).pin_memory()


def steps_of(case: Case, steps: int = 4) -> list[list[Event]]:
    """Train for some steps; return what each asked of the device."""
    model = model_of(case)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    sparse = getattr(hb.optim, case.optimizer)(model, lr=0.01)
    trainer = Trainer(model, dense, sparse, recipe=TrainRecipe(batch_size=BATCH, precision="bf16", device="cuda", log_every=1000),
        schedule=hb.config.ScheduleRecipe(warmup_steps=100) if case.moving else None)
    found: list[list[Event]] = []
    losses: list[float] = []

    class Steps(hb.Callback):
        def on_step(self, trainer: Any, loss: float) -> None:
            losses.append(loss)
            found.append(RECORD.events)
            RECORD.events = []

    trainer.callbacks.append(Steps())
    with recorded("step"):
        trainer.fit([batch_of(case, i) for i in range(steps)])
    return found
