"""Train the first baseline: logistic regression over hashed values, by AdaGrad, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.first_contact.encoding import Encoded, Frames, hashed
from benchmarks.first_contact.planted import auc, logloss

BITS = 20
_BATCH = 256


@dataclass(frozen=True)
class Scores:
    """What a model reached, with the settings that were best on the validation split."""

    auc: float
    logloss: float
    valid_logloss: float
    settings: dict[str, Any]

    @staticmethod
    def of(probability: Any, labels: Any, valid_logloss: float, settings: dict[str, Any]) -> Scores:
        """Metrics of predictions for the test split."""
        return Scores(auc(probability, labels), logloss(probability, labels), valid_logloss, settings)


def logistic_regression(read: Frames, *, seed: int = 0, epochs: int = 3) -> Scores:
    """Search learning rate, first moment and number of epochs on the validation split; score the test split."""
    splits = hashed(read, BITS)
    best: Scores | None = None
    for lr, first in product((0.02, 0.05, 0.15), (1e-8, 1e-6, 1e-4)):
        weights, moments = torch.zeros(1 << BITS), torch.full((1 << BITS,), first)
        bias = torch.zeros(2)  # and its moment
        rng = np.random.default_rng(seed)
        for epoch in range(epochs):
            _train(splits["train"], weights, moments, bias, lr, rng)
            loss = logloss(_predict(splits["valid"], weights, bias), splits["valid"].labels)
            if best is None or loss < best.valid_logloss:
                settings = {"lr": lr, "initial_accumulator": first, "epochs": epoch + 1}
                best = Scores.of(_predict(splits["test"], weights, bias), splits["test"].labels, loss, settings)
    assert best is not None
    return best


def _bags(batch: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """Values, samples that they belong to, and their weights: a list counts as one value."""
    size, width = batch.ids.shape
    values, owners = [batch.ids.reshape(-1)], [np.repeat(np.arange(size), width)]
    weights = [np.ones(size * width, np.float32)]
    for column in batch.lists:
        lengths = np.diff(column.offsets)
        values.append(column.values)
        owners.append(np.repeat(np.arange(size), lengths))
        weights.append(np.repeat((1 / np.maximum(lengths, 1)).astype(np.float32), lengths))
    joined = (np.concatenate(part) for part in (values, owners, weights))
    values, owners, weights = (torch.from_numpy(part) for part in joined)
    return values, owners, weights


def _logits(bags: tuple[Tensor, Tensor, Tensor], size: int, weights: Tensor, bias: Tensor) -> Tensor:
    values, owners, shares = bags
    return torch.zeros(size).index_add_(0, owners, weights[values] * shares) + bias[0]


def _train(split: Encoded, weights: Tensor, moments: Tensor, bias: Tensor, lr: float, rng: np.random.Generator) -> None:
    order = rng.permutation(len(split))
    for start in range(0, len(split), _BATCH):
        batch = split.take(order[start : start + _BATCH])
        bags = _bags(batch)
        logits = _logits(bags, len(batch), weights, bias)
        error = (logits.sigmoid() - torch.from_numpy(batch.labels)) / len(batch)
        values, owners, shares = bags
        rows, place = values.unique(return_inverse=True)
        gradient = torch.zeros(len(rows)).index_add_(0, place, error[owners] * shares)
        moments[rows] += gradient * gradient
        weights[rows] -= lr * gradient / moments[rows].sqrt().clamp(min=1e-10)
        bias[1] += error.sum() ** 2
        bias[0] -= lr * error.sum() / bias[1].sqrt().clamp(min=1e-10)


def _predict(split: Encoded, weights: Tensor, bias: Tensor) -> Any:
    parts = [split.take(np.arange(a, min(a + 65_536, len(split)))) for a in range(0, len(split), 65_536)]
    logits = [_logits(_bags(part), len(part), weights, bias) for part in parts]
    return F.sigmoid(torch.cat(logits).double()).numpy()
