"""Divide batches into hot and cold samples (`HotSplit`), or alternate hot and cold batches (`HotSchedule`).

A hot sample needs only hot rows, which every rank has in device memory.

`HotSplit` follows Hotline (Adnan et al. 2022, arXiv 2204.05436): the hot samples of a batch are computed while the cold
rows are fetched. The gradients of both parts are added before the update. So the result differs from training without
`HotSplit` only by the order of sums. For example, if samples 1 and 3 of the samples 0 … 3 are hot, the parts are [1, 3]
and [0, 2].

`HotSchedule` follows Adnan et al. 2021 (arXiv 2103.00686). With the rate r, a round is r % of an epoch's cold batches
and then r % of its hot batches. The loss is evaluated after each round. If the loss has risen, `HotSchedule` halves the
rate, because long runs of hot batches raise the loss. If the loss has fallen u times in a row, it doubles the rate,
because frequent changes cost time. For example, with u = 2 and a rate of 10, the losses 0.50, 0.49, 0.48 and 0.52 set
the rates 10, 10, 20 and 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotbed.batch import Batch
from hotbed.config import HotRecipe
from hotbed.data.skew.hot_cold import HotColdLoader, hot_inputs
from hotbed.train.metrics import Metrics
from hotbed.train.trainer import Callback, Trainer


class HotSplit:
    """Divide batches into hot and cold samples; ``hot_rows`` has the number of hot rows of each feature's table.

    With several virtual ``ranks``, all batches have two parts, because all ranks must have equally many.
    """

    def __init__(self, hot_rows: Mapping[str, int], ranks: int = 1) -> None:
        self._hot_rows, self._ranks = hot_rows, ranks

    def __call__(self, batch: Batch) -> Sequence[Batch]:
        """Return the hot part and then the cold part of a batch, both in the batch's order of samples."""
        hot = torch.from_numpy(hot_inputs(batch.sparse, self._hot_rows))
        if self._ranks == 1 and bool(hot.all() | ~hot.any()):
            return [batch]
        parts = [_take(batch, which) for which in (hot, ~hot)]
        # Parts are pinned if the batch is pinned, so that copies to the device are asynchronous.
        return [part.pin_memory() for part in parts] if batch.sparse.values.is_pinned() else parts


def _take(batch: Batch, chosen: torch.Tensor) -> Batch:
    """Select the samples of a mask ``[B]``, also within each virtual rank."""
    part = batch.take(chosen.nonzero()[:, 0])
    if batch.slices is None:
        return part
    return replace(part, slices=tuple(int(own.sum()) for own in chosen.split(batch.slices)))


class HotSchedule(Callback):
    """Evaluate after every round of hot and cold batches, and set the length of the next round (its rate)."""

    def __init__(self, loader: HotColdLoader, recipe: HotRecipe) -> None:
        self._loader, self._recipe = loader, recipe
        self._loss: float | None = None
        self._improved = 0  # consecutive falls of the loss

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Request an evaluation at the end of a round. The end of an epoch needs no request."""
        trainer.evaluate_now = trainer.position > 0 and self._loader.round_is_over(trainer.position)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Set the rate of the next round, and report it to callbacks."""
        before, self._loss, rate = self._loss, metrics.logloss, self._loader.rate
        change = 0.0 if before is None else metrics.logloss - before
        self._improved = self._improved + 1 if change < 0 else 0
        if change > 0:
            self._loader.rate = max(rate / 2, self._recipe.floor)
        elif self._improved == self._recipe.patience:
            self._loader.rate, self._improved = min(rate * 2, self._recipe.cap), 0
        trainer.report_schedule({"logloss": metrics.logloss, "rate_before": rate, "rate": self._loader.rate})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the rate, the last loss, and how many times in a row the loss has fallen."""
        return {"rate": self._loader.rate, "loss": self._loss, "improved": self._improved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values that `state_dict` returned."""
        self._loader.rate, self._loss, self._improved = state["rate"], state["loss"], state["improved"]
