"""Divide batches into hot and cold samples (`HotSplit`), or schedule hot and cold batches by turns (`HotSchedule`).

A hot sample needs hot rows only, which every rank has in its device's memory.

`HotSplit` is Hotline's idea (Adnan et al. 2022, arXiv 2204.05436): the hot samples of a mini-batch are computed while
the rows of the cold ones are fetched. The gradients of both are added before the one update, so what is trained is the
same model on the same batches; sums over samples are taken in another order. Of a batch whose samples 1 and 3 of 0 … 3
are hot, it makes the parts [1, 3] and [0, 2].

`HotSchedule` is the rule of Adnan et al. 2021 (arXiv 2103.00686): evaluate after every round of cold and hot batches;
if the loss went up, halve the rate, as long runs of one kind hurt; if it went down u times in a row, double it, as
turning costs time. With u = 2 and the losses 0.50, 0.49, 0.48, 0.52 a rate of 10 is 10, 10, 20, 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotbed.batch import Batch
from hotbed.config import HotRecipe
from hotbed.data import Schema
from hotbed.data.skew.hot_cold import HotColdLoader
from hotbed.data.skew.hot_cold import by_feature, hot_inputs
from hotbed.train.metrics import Metrics
from hotbed.train.runs.plan_search import read_hot_rows
from hotbed.train.trainer import Callback, Trainer


class HotSplit:
    """Divide batches into hot and cold samples."""

    def __init__(self, hot_rows: Mapping[str, int], ranks: int = 1) -> None:
        self._hot_rows, self._ranks = hot_rows, ranks

    @staticmethod
    def of_file(file: str, schema: Schema, ranks: int) -> HotSplit:
        """By the hot rows that hotbed pack has written."""
        return HotSplit(by_feature(schema, read_hot_rows(file, schema.rows)), ranks)

    def __call__(self, batch: Batch) -> Sequence[Batch]:
        """The hot part, then the cold one; samples in the order they had."""
        hot = torch.from_numpy(hot_inputs(batch.sparse, self._hot_rows))
        if self._ranks == 1 and bool(hot.all() | ~hot.any()):
            return [batch]
        parts = [batch.take(which.nonzero()[:, 0]) for which in (hot, ~hot)]
        # As the batch was, so that they move to the device while others are computed.
        return [part.pin_memory() for part in parts] if batch.sparse.values.is_pinned() else parts


class HotSchedule(Callback):
    """Evaluate after every round of hot and cold batches, and set the rate of the next."""

    def __init__(self, loader: HotColdLoader, recipe: HotRecipe) -> None:
        self._loader, self._recipe = loader, recipe
        self._loss: float | None = None
        self._improved = 0  # times in a row

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Request an evaluation where a round is over; at the end of an epoch there is one anyway."""
        trainer.evaluate_now = trainer.position > 0 and self._loader.round_is_over(trainer.position)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Set the rate, and report it."""
        before, self._loss, rate = self._loss, metrics.logloss, self._loader.rate
        change = 0.0 if before is None else metrics.logloss - before
        self._improved = self._improved + 1 if change < 0 else 0
        if change > 0:
            self._loader.rate = max(rate / 2, self._recipe.floor)
        elif self._improved == self._recipe.patience:
            self._loader.rate, self._improved = min(rate * 2, self._recipe.cap), 0
        trainer.report_schedule({"logloss": metrics.logloss, "rate_before": rate, "rate": self._loader.rate})

    def state_dict(self) -> Mapping[str, Any]:
        """The rate, the last loss, and for how long it has been falling."""
        return {"rate": self._loader.rate, "loss": self._loss, "improved": self._improved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self._loader.rate, self._loss, self._improved = state["rate"], state["loss"], state["improved"]
