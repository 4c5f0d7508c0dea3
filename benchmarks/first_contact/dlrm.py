"""Train the second baseline: a DLRM of ``torch.nn`` alone, whose settings are drawn at random and chosen on valid.

It also gets what helps it: embeddings beside their products, dropout, thresholds for rare values, early stopping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.first_contact.encoding import Encoded, Frames, with_vocabulary
from benchmarks.first_contact.logistic import Scores
from benchmarks.first_contact.planted import logloss


@dataclass(frozen=True)
class Settings:
    """What a trial draws."""

    dim: int
    top: tuple[int, ...]
    lr: float
    table_lr: float
    adam_tables: bool
    first: float
    batch: int
    dropout: float
    beside: bool
    threshold: int
    quantiles: bool
    epochs: int
    decay: bool


def draw(rng: np.random.Generator, samples: int) -> Settings:
    """Draw settings; batches and epochs fit the number of samples."""

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    def one(of: Sequence[Any]) -> Any:
        return of[int(rng.integers(len(of)))]

    small, large = samples < 20_000, samples > 1_000_000
    adam = bool(rng.random() < 0.3) and not large  # which updates whole tables in plain PyTorch
    return Settings(
        dim=one((4, 8, 16, 32)),
        top=one(((64,), (256, 128), (512, 256))),
        lr=between(3e-4, 1e-2),
        table_lr=between(3e-4, 3e-2) if adam else between(0.01, 0.3),
        adam_tables=adam,
        first=one((0.0, 1e-8, 1e-6)),
        batch=one((32, 64, 128) if small else (2048, 4096) if large else (128, 256, 512, 1024)),
        dropout=one((0.0, 0.0, 0.1, 0.3)),
        beside=bool(rng.random() < 0.6),
        threshold=one((1, 2, 5)),
        quantiles=bool(rng.random() < 0.5),
        epochs=one((5, 20, 50) if small else (1, 1, 2, 3)),
        decay=bool(rng.random() < 0.5),
    )


class PlainDLRM(nn.Module):
    """Dot products of embeddings and the dense vector, then an MLP."""

    def __init__(self, rows: Sequence[int], lists: int, numbers: int, settings: Settings) -> None:
        super().__init__()
        kinds = [nn.Embedding] * (len(rows) - lists) + [nn.EmbeddingBag] * lists
        self.tables = nn.ModuleList(
            kind(count, settings.dim, sparse=not settings.adam_tables) for kind, count in zip(kinds, rows, strict=True)
        )
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -0.01, 0.01)
        self.bottom = nn.Sequential(nn.Linear(max(numbers, 1), 64), nn.ReLU(), nn.Linear(64, settings.dim), nn.ReLU())
        vectors = len(rows) + 1
        self.pairs = torch.tril_indices(vectors, vectors, -1)
        width = settings.dim * (vectors if settings.beside else 1) + self.pairs.shape[1]
        layers: list[nn.Module] = []
        for out in settings.top:
            layers += [nn.Linear(width, out), nn.ReLU(), nn.Dropout(settings.dropout)]
            width = out
        self.top = nn.Sequential(*layers, nn.Linear(width, 1))
        self.beside = settings.beside

    def forward(self, batch: Encoded) -> Tensor:
        """Logits ``[B]``."""
        size, width = batch.ids.shape
        numbers = torch.from_numpy(batch.numbers) if batch.numbers.shape[1] else torch.ones(size, 1)
        ids = torch.from_numpy(batch.ids)
        vectors = [self.bottom(numbers)] + [self.tables[i](ids[:, i]) for i in range(width)]
        for table, column in zip(list(self.tables)[width:], batch.lists, strict=True):
            vectors.append(table(torch.from_numpy(column.values), torch.from_numpy(column.offsets[:-1])))
        stacked = torch.stack(vectors, 1)
        products = (stacked @ stacked.mT)[:, self.pairs[0], self.pairs[1]]
        beside = stacked.flatten(1) if self.beside else vectors[0]
        return self.top(torch.cat([beside, products], 1))[:, 0]


MOST_SEARCHED = 500_000
"""Rows of train data, the last ones, that a trial sees; where there are more, the best trials are repeated with all."""
FINALISTS = 3


def searched_dlrm(read: Frames, *, trials: int, seed: int = 0, done: Callable[[], None] = lambda: None) -> Scores:
    """Search ``trials`` settings on the validation split, and score the test split by the best."""
    rng = np.random.default_rng([seed, 7])
    samples = len(read.frames["train"])
    drawn = [draw(rng, samples) for _ in range(trials)]
    found = _train_each(read, drawn, min(samples, MOST_SEARCHED), seed, done)
    if samples > MOST_SEARCHED:
        best = sorted(range(trials), key=lambda i: found[i].valid_logloss)[:FINALISTS]
        found = _train_each(read, [drawn[i] for i in best], samples, seed, done)
    return min(found, key=lambda scores: scores.valid_logloss)


def _train_each(
    read: Frames, drawn: Sequence[Settings], samples: int, seed: int, done: Callable[[], None]
) -> list[Scores]:
    """Train by each draw on the last rows; settings with one vocabulary follow each other, which is made once."""
    found: dict[int, Scores] = {}
    for threshold, quantiles in sorted({(s.threshold, s.quantiles) for s in drawn}):
        splits, rows = with_vocabulary(read, threshold, quantiles=quantiles)
        whole = splits["train"]
        splits["train"] = whole.take(np.arange(len(whole) - samples, len(whole)))
        for number, settings in enumerate(drawn):
            if (settings.threshold, settings.quantiles) == (threshold, quantiles):
                found[number] = _trial(splits, rows, settings, seed)
                done()
    return [found[number] for number in range(len(drawn))]


def _trial(splits: dict[str, Encoded], rows: Sequence[int], settings: Settings, seed: int) -> Scores:
    """Train by one draw; its best epoch."""
    best: Scores | None = None
    torch.manual_seed(seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, for torch warns where nobody says
    train, rng = splits["train"], np.random.default_rng(seed)
    model = PlainDLRM(rows, len(train.lists), train.numbers.shape[1], settings)
    tables = list(model.tables.parameters())
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=settings.lr)]
    optimizers.append(
        torch.optim.Adam(tables, lr=settings.table_lr)
        if settings.adam_tables
        else torch.optim.Adagrad(tables, lr=settings.table_lr, initial_accumulator_value=settings.first)
    )
    steps, step, own = math.ceil(len(train) / settings.batch) * settings.epochs, 0, math.inf
    waited = 0
    for epoch in range(settings.epochs):
        model.train()
        order = rng.permutation(len(train))
        for start in range(0, len(train), settings.batch):
            batch = train.take(order[start : start + settings.batch])
            step += 1
            if settings.decay:
                factor = min(1.0, (1 - (step - 1) / steps) / 0.3)
                for optimizer, lr in zip(optimizers, (settings.lr, settings.table_lr), strict=True):
                    optimizer.param_groups[0]["lr"] = lr * factor
            loss = F.binary_cross_entropy_with_logits(model(batch), torch.from_numpy(batch.labels))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        reached = logloss(_predict(model, splits["valid"]), splits["valid"].labels)
        waited = 0 if reached < own else waited + 1
        own = min(own, reached)
        if best is None or reached < best.valid_logloss:
            named = {**asdict(settings), "epoch": epoch + 1}
            best = Scores.of(_predict(model, splits["test"]), splits["test"].labels, reached, named)
        if waited >= 2 or not math.isfinite(reached):
            break
    return best or Scores.of(_predict(model, splits["test"]), splits["test"].labels, math.inf, asdict(settings))


@torch.no_grad()
def _predict(model: nn.Module, split: Encoded) -> Any:
    model.eval()
    parts = [split.take(np.arange(a, min(a + 16_384, len(split)))) for a in range(0, len(split), 16_384)]
    return torch.cat([model(part) for part in parts]).double().sigmoid().numpy()
