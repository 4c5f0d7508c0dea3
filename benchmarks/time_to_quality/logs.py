"""Make the logs that all sides train on: batches in memory, with one id per feature.

*The planted log* is endless, and is made batch by batch from counters. A sample has one id per table and a few
numericals. Ids follow Zipf's law with exponent 1, and id 0 is a table's most frequent. The log-odds of a click are

    bias + Σ_f effect(id_f) + Σ_{f<g} ⟨factor(id_f), factor(id_g)⟩ + a function of the numericals

with an effect and factors of every row, even of rows that occur only a few times.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import hotbed as hb
from hotbed.data import Loader, SplitBinarySource
from hotbed.data.preparation.prepare_dataset import prepare

Split = Literal["train", "test"]

ROWS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 150_000, 200_000, 300_000)
DENSE = 4
PIECE = 65_536  # samples of a piece, which has its own random generator

_SEED = 0
_BIAS = -3.0
_EFFECT_STD = 0.1
_FACTORS = 2
_FACTOR_MEAN, _FACTOR_STD = 0.08, 0.18  # without a mean no model of this size finds the products in 20 M samples
_OF_DENSE = (0.4, -0.3, 0.2, 0.0)
_OF_PRODUCT = 0.2


class EndlessLog:
    """The planted log. Effects and factors have a fixed seed, and samples have seeds of their own."""

    def __init__(self) -> None:
        self.names = tuple(f"t{i}" for i in range(len(ROWS)))
        rng = np.random.default_rng((_SEED, 0))
        effects = torch.from_numpy(rng.normal(0, _EFFECT_STD, sum(ROWS)).astype(np.float32))
        factors = torch.from_numpy(rng.normal(_FACTOR_MEAN, _FACTOR_STD, (sum(ROWS), _FACTORS)).astype(np.float32))
        # Σ_{f<g} ⟨u_f, u_g⟩ = (|Σ u|² − Σ |u|²) / 2, so sums over the features are enough.
        self._sums = torch.cat([(effects - factors.square().sum(1) / 2)[:, None], factors], 1)

    def batches(self, split: Split, samples: int, size: int, *, seed: int = 0) -> Iterator[hb.Batch]:
        """Yield the first samples of a split. Splits have no sample in common, and ``size`` does not change samples.

        Another ``seed`` is another draw from the same truth.
        """
        for piece, start in enumerate(range(0, samples, PIECE)):
            ids, dense, labels = self._piece(split, seed, piece)
            end = min(PIECE, samples - start)
            for at in range(0, end, size):
                part = slice(at, min(at + size, end))
                n = part.stop - at
                yield hb.Batch(
                    sparse=hb.Jagged(self.names, torch.from_numpy(ids[:, part].reshape(-1)), batch_size=n),
                    dense=dense[part],
                    labels=labels[part, None],
                )

    def _piece(self, split: Split, seed: int, piece: int) -> tuple[np.ndarray, Tensor, Tensor]:
        """Return ids ``[F, PIECE]`` int32, numericals and labels of a piece."""
        rng = np.random.default_rng((_SEED, 1 if split == "train" else 2, seed, piece))
        rows = np.asarray(ROWS, dtype=np.int32)[:, None]
        # If ln(rank) is uniform, the chance of rank k is ln((k + 1) / k), nearly proportional to 1 / k.
        ranks = np.exp(rng.random((len(rows), PIECE), dtype=np.float32) * np.log(rows + np.float32(1)))
        ids = np.minimum(ranks.astype(np.int32) - 1, rows - 1)
        dense = torch.from_numpy(rng.standard_normal((PIECE, DENSE), dtype=np.float32))
        first = np.cumsum(rows, dtype=np.int32)[:, None] - rows
        sums = F.embedding_bag(torch.from_numpy(np.ascontiguousarray((ids + first).T)), self._sums, mode="sum")
        truth = _BIAS + sums[:, 0] + (sums[:, 1:] ** 2).sum(1) / 2
        truth += dense @ torch.tensor(_OF_DENSE) + _OF_PRODUCT * dense[:, 2] * dense[:, 3]
        labels = torch.from_numpy(rng.random(PIECE, dtype=np.float32)) < truth.sigmoid()
        return ids, dense, labels.float()


@dataclass(frozen=True)
class Samples:
    """A batch: ids ``[F, B]`` int32, numbers ``[B, K]`` and labels ``[B, 1]``."""

    ids: Tensor
    dense: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Log:
    """Training batches in their order, test batches, and the model of all sides: rows and dim of tables, MLPs."""

    rows: tuple[int, ...]
    dense: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    every: int  # batches between two tests
    train: list[Samples]
    test: list[Samples]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"t{i}" for i in range(len(self.rows)))

    def dlrm(self, seed: int) -> hb.nn.DLRM:
        torch.manual_seed(seed)
        tables = [hb.Table(name, rows, self.dim) for name, rows in zip(self.names, self.rows, strict=True)]
        features = [hb.Feature(name, table=name) for name in self.names]
        return hb.nn.DLRM(tables, features, self.dense, bottom=self.bottom, top=self.top, seed=seed)


def load(path: Path) -> Log:
    return torch.load(path, weights_only=False)


def save(log: Log, path: Path) -> None:
    torch.save(log, path)


def planted(samples: int, test: int, seed: int) -> Log:
    """Draw samples of the planted log in batches of 4,096. A seed is another draw from the same truth."""
    log = EndlessLog()
    return Log(
        rows=ROWS,
        dense=DENSE,
        dim=16,
        bottom=(64, 16),
        top=(64, 1),
        every=64,
        train=_all(log.batches("train", samples, 4_096, seed=seed)),
        test=_all(log.batches("test", test, 16_384)),
    )


def real(path: Path) -> Log:
    """Prepare a raw Criteo log: batches of 256 in the order of time, the last tenth as test, the demo's model."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(path, Path(folder) / "data")
        source = SplitBinarySource(Path(folder) / "data")
        return Log(
            rows=tuple(column.rows for column in source.schema.sparse),
            dense=len(source.schema.dense),
            dim=16,
            bottom=(512, 256, 16),
            top=(1024, 512, 1),
            every=32,
            train=_all(Loader(source, "train", 256, shuffle=False)),
            test=_all(Loader(source, "test", 4_096)),
        )


def _all(batches: Iterable[hb.Batch]) -> list[Samples]:
    return list(map(_samples, batches))


def _samples(batch: hb.Batch) -> Samples:
    assert batch.dense is not None and batch.labels is not None
    ids = batch.sparse.values.view(-1, len(batch)).int().contiguous()
    return Samples(ids, batch.dense.float().contiguous(), batch.labels.float().contiguous())
