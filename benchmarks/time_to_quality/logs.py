"""Make the logs that all sides train on: batches in memory, of one id per feature."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import hotbed as hb
from benchmarks.quality_training import DENSE, PlantedLog
from hotbed.data import Loader, SplitBinarySource
from hotbed.data.prepare import prepare


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
    """Training batches in their order, test batches, and the model that all sides train.

    Attributes
    ----------
    rows
        Rows of each feature's table.
    dim, bottom, top
        Sizes of the DLRM.
    every
        Batches between two tests.
    """

    rows: tuple[int, ...]
    dense: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    every: int
    train: list[Samples]
    test: list[Samples]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tables, which are those of the features."""
        return tuple(f"t{i}" for i in range(len(self.rows)))

    def dlrm(self, seed: int) -> hb.nn.DLRM:
        """The model, with initial values of a seed."""
        torch.manual_seed(seed)
        tables = [hb.Table(name, rows, self.dim) for name, rows in zip(self.names, self.rows, strict=True)]
        features = [hb.Feature(name, table=name) for name in self.names]
        return hb.nn.DLRM(tables, features, self.dense, bottom=self.bottom, top=self.top, seed=seed)


def load(path: Path) -> Log:
    """Read a log that `save` wrote."""
    return torch.load(path, weights_only=False)


def save(log: Log, path: Path) -> None:
    """Write a log, for processes to read."""
    torch.save(log, path)


def planted(samples: int, test: int, seed: int) -> Log:
    """Draw samples of the log of ``benchmarks.quality``: a batch has 4,096; a seed is another draw from one truth."""
    log = PlantedLog()

    return Log(
        rows=log.rows,
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
    with tempfile.TemporaryDirectory() as place:
        prepare(path, Path(place) / "data")
        source = SplitBinarySource(Path(place) / "data")
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
    return [_samples(batch) for batch in batches]


def _samples(batch: hb.Batch) -> Samples:
    assert batch.dense is not None and batch.labels is not None
    ids = batch.sparse.values.view(-1, len(batch)).int().contiguous()
    return Samples(ids, batch.dense.float().contiguous(), batch.labels.float().contiguous())
