"""Train a model of ``hotbed.nn`` on a planted log, and search its settings; DLRM and the others go the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.first_contact.planted import Array, auc, logloss
from benchmarks.models.logs import Log

BATCH = 256


@dataclass(frozen=True)
class Settings:
    """What a trial draws; trial i of every model draws the same."""

    dim: int
    widths: tuple[int, ...]
    lr: float
    table_lr: float
    init_bound: float
    epochs: int


def draw(trial: int) -> Settings:
    """Draw the settings of a trial: Adam's rate for the layers, that of row-wise AdaGrad for the tables, and sizes."""
    rng = np.random.default_rng([trial, 11])

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    def one(of: Sequence[Any]) -> Any:
        return of[int(rng.integers(len(of)))]

    return Settings(
        dim=one((16, 32)),
        widths=one(((64,), (128, 64), (256, 128))),
        lr=between(5e-4, 1e-2),
        table_lr=between(0.005, 0.5),
        init_bound=one((0.05, 0.2)),
        epochs=one((1, 2, 4, 8)),
    )


@dataclass(frozen=True)
class Split:
    """Samples of a split, and for each label the probabilities that they were drawn from."""

    batch: hb.Batch
    probability: Array

    @property
    def labels(self) -> Array:
        """``[N, T]``."""
        assert self.batch.labels is not None
        return self.batch.labels.numpy()


def _read(log: Log, split: str) -> Split:
    parts: list[hb.Batch] = []
    probabilities: list[Array] = []
    names = [log.roles.label] + ([log.second] if log.second else [])
    for table, probability, _ in log.chunks(split):
        ids: dict[str, Any] = {name: torch.tensor(table[name].to_numpy()) for name in log.roles.ids}
        for name in log.roles.lists:
            lists = table[name].combine_chunks()
            ids[name] = torch.tensor(lists.flatten().to_numpy()), torch.tensor(lists.offsets.to_numpy()).long()
        numbers = [torch.tensor(table[name].to_numpy()).float() for name in log.roles.numbers]
        labels = np.stack([table[name].to_numpy() for name in names], axis=1)
        parts.append(
            hb.Batch(
                sparse=hb.Jagged.from_dict(ids),
                dense=torch.stack(numbers, dim=1) if numbers else None,
                labels=torch.from_numpy(labels.astype(np.float32)),
            )
        )
        of_second = [table["p"].to_numpy()] if log.second else []
        probabilities.append(np.stack([probability, *of_second], axis=1))
    return Split(hb.Batch.concatenate(parts) if len(parts) > 1 else parts[0], np.concatenate(probabilities))


Tables, Features = list[hb.Table], list[hb.Feature]
Build = Callable[[Log, Settings, int, int, Tables, Features], nn.Module]


def _dlrm(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.DLRM(
        tables,
        features,
        len(log.roles.numbers),
        bottom=(64, settings.dim),
        top=(*settings.widths, labels),
        embeddings_to_top=True,
        seed=seed,
    )


def _dcn(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.DCNv2(tables, features, len(log.roles.numbers), layers=2, top=(*settings.widths, labels), seed=seed)


def _deepfm(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.DeepFM(tables, features, len(log.roles.numbers), top=(*settings.widths, labels), seed=seed)


def _din(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.DIN(
        tables,
        features,
        len(log.roles.numbers),
        histories=log.tables,
        attention=(32, 16),
        top=(*settings.widths, labels),
        seed=seed,
    )


def _sasrec(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.SASRec(tables, features, history="history", item="item", max_len=log.longest, dropout=0.0, seed=seed)


def _hstu(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.HSTU(tables, features, history="history", item="item", max_len=log.longest, dropout=0.0, seed=seed)


def _mmoe(log: Log, settings: Settings, labels: int, seed: int, tables: Tables, features: Features) -> nn.Module:
    return hb.nn.MMoE(
        tables, features, len(log.roles.numbers), tasks=labels, expert=settings.widths, tower=(32,), seed=seed
    )


BY_TASK = "DLRM, one a task"
MODELS: Mapping[str, Build] = {
    "DLRM": _dlrm,
    BY_TASK: _dlrm,
    "DCNv2": _dcn,
    "DeepFM": _deepfm,
    "DIN": _din,
    "SASRec": _sasrec,
    "HSTU": _hstu,
    "MMoE": _mmoe,
}
"""How each model is made for a log; sizes that the settings do not name are the model's defaults."""


def new_model(name: str, log: Log, settings: Settings, labels: int, seed: int) -> nn.Module:
    """Make a model for a log's columns; lists are pooled by their mean, unless it takes them as histories."""
    torch.manual_seed(seed)
    tables = [
        hb.Table(column, rows, settings.dim, init_bound=settings.init_bound) for column, rows in log.counts.items()
    ]
    features = [hb.Feature(column, column) for column in log.roles.ids]
    features += [hb.Feature(column, log.tables[column], pooling="mean") for column in log.roles.lists]
    return MODELS[name](log, settings, labels, seed, tables, features)


class Clicks:
    """A log of labels, and what models reach on it.

    Parameters
    ----------
    log
        The planted log.
    models
        Those to train, DLRM first.
    """

    def __init__(self, log: Log, models: Sequence[str]) -> None:
        self.log, self.models = log, models
        self.splits = {split: _read(log, split) for split in log.sizes}

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes, with which results can be compared."""
        return {"samples": self.log.sizes["train"], "test samples": self.log.sizes["test"]}

    def attainable(self) -> dict[str, float]:
        """What the true probabilities score on test."""
        test = self.splits["test"]
        return self._scores(test.probability, test.labels)

    def run(self, name: str, settings: Settings, seed: int) -> dict[str, Any]:
        """Train a model, and score it on valid and test."""
        start = time.perf_counter()
        train = self.splits["train"].batch
        assert train.labels is not None
        columns = train.labels.split(1, dim=1) if name == BY_TASK else [train.labels]
        trained: list[nn.Module] = []
        for labels in columns:
            model = new_model(name, self.log, settings, labels.shape[1], seed)
            fit(model, replace(train, labels=labels), settings, seed, _cross_entropy)
            trained.append(model)
        found = {
            split: self._scores(np.concatenate([predicted(m, of.batch) for m in trained], axis=1), of.labels)
            for split, of in self.splits.items()
            if split != "train"
        }
        seconds = round(time.perf_counter() - start, 1)
        return {"valid": found["valid"]["score"], "test": found["test"], "seconds": seconds}

    def _scores(self, probability: Array, labels: Array) -> dict[str, float]:
        """The mean AUC over labels, and AUC and logloss of each."""
        names = [self.log.roles.label] + ([self.log.second] if self.log.second else [])
        found: dict[str, float] = {}
        for name, p, y in zip(names, probability.T, labels.T, strict=True):
            found |= {f"AUC of {name}": auc(p, y), f"logloss of {name}": logloss(p, y)}
        return {"score": float(np.mean([found[f"AUC of {name}"] for name in names])), **found}


def fit(
    model: nn.Module,
    samples: hb.Batch,
    settings: Settings,
    seed: int,
    loss_of: Callable[[nn.Module, hb.Batch], Tensor],
) -> None:
    """Train over a shuffled log; the last third of the steps with rates that fall to 0 linearly."""
    rng = np.random.default_rng(seed)
    model.train()
    sparse = hb.optim.RowWiseAdagrad(model, lr=settings.table_lr)
    dense = torch.optim.Adam(model.parameters(), lr=settings.lr)
    rates = ((dense, settings.lr), (sparse, settings.table_lr))
    size, step = len(samples), 0
    steps = settings.epochs * -(-size // BATCH)
    for _ in range(settings.epochs):
        order = torch.from_numpy(rng.permutation(size))
        for chosen in order.split(BATCH):
            factor = min(1.0, 3 * (1 - step / steps))
            for optimizer, rate in rates:
                optimizer.param_groups[0]["lr"] = rate * factor
            loss_of(model, samples.take(chosen)).backward()
            for optimizer, _ in rates:
                optimizer.step()
                optimizer.zero_grad()
            step += 1


def _cross_entropy(model: nn.Module, batch: hb.Batch) -> Tensor:
    assert batch.labels is not None
    return F.binary_cross_entropy_with_logits(model(batch), batch.labels)


@torch.no_grad()
def predicted(model: nn.Module, samples: hb.Batch) -> Array:
    """Probabilities ``[N, T]``."""
    model.eval()
    parts = torch.arange(len(samples)).split(8_192)
    return torch.cat([model(samples.take(part)) for part in parts]).double().sigmoid().numpy()
