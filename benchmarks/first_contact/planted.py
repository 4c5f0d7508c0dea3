"""Draw and write planted logs: labels of click probabilities that are known, so that the attainable AUC is.

A `Planted` log draws its columns chunk by chunk, each from a generator of its own, so that memory does not grow with
the log. Nothing here knows hotbed: files are written as pandas or polars users write them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Array = NDArray[Any]
Layout = Literal["file", "files", "train and test"]
_CHUNK = 250_000
_FACTS = "planted.json"


@dataclass(frozen=True)
class Roles:
    """Which columns are what; the baselines are told, hotbed has to find out."""

    label: str
    ids: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attainable:
    """What the true probabilities score on a split."""

    auc: float
    logloss: float


@dataclass(frozen=True)
class Dataset:
    """A dataset on disk.

    Attributes
    ----------
    path
        What ``hotbed init`` gets.
    options
        Its options.
    roles
        Which columns are what.
    splits
        Files and rows of train, valid and test, in this order; the baselines read these.
    attainable
        What the true probabilities score on the test split; None where they are not known.
    """

    path: Path
    options: tuple[str, ...]
    roles: Roles
    splits: dict[str, tuple[Path, int, int]]
    attainable: Attainable | None


class Planted(ABC):
    """A planted log.

    Parameters
    ----------
    train, valid, test
        Samples of each split, in the order of time.
    seed
        Of everything that is drawn.
    """

    name: ClassVar[str]
    roles: ClassVar[Roles]
    layout: ClassVar[Layout]
    rate: ClassVar[float] = 0.2
    """Share of positives, nearly."""
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, train: int, valid: int, test: int, *, seed: int = 0) -> None:
        self.sizes = {"train": train, "valid": valid, "test": test}
        self.total = train + valid + test
        self.seed = seed
        self.prepare(np.random.default_rng([seed, 1]))
        logits = self.draw(np.random.default_rng([seed, 2]), np.linspace(0, 1, 50_000, endpoint=False))[1]
        self.intercept = intercept_of(logits, self.rate)

    @abstractmethod
    def prepare(self, rng: np.random.Generator) -> None:
        """Draw the effects."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        """Columns and logits (up to a constant) of samples at these times, from 0 to 1 over the whole log."""

    @abstractmethod
    def label(self, clicked: Array) -> Any:
        """The label column."""

    def chunks(self, split: str) -> Iterator[tuple[Any, Array, Array]]:
        """Tables, true probabilities and labels of a split."""
        before = list(self.sizes).index(split)
        start = sum(list(self.sizes.values())[:before])
        for first in range(start, start + self.sizes[split], _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, start + self.sizes[split]))
            rng = np.random.default_rng([self.seed, 3, before, first])
            columns, logits = self.draw(rng, (rows + 0.5) / self.total)
            probability = 1 / (1 + np.exp(-(logits + self.intercept)))
            clicked = rng.random(len(rows)) < probability
            yield pa.table({self.roles.label: self.label(clicked), **columns}), probability, clicked

    def write(self, folder: Path) -> Dataset:
        """Write the log into a new folder, or take what is there of the same sizes and seed."""
        facts_file = folder / _FACTS
        facts = {"sizes": self.sizes, "seed": self.seed, "layout": self.layout}
        data = folder / "data"
        known = json.loads(facts_file.read_text()) if facts_file.exists() else {}
        if {key: known.get(key) for key in facts} != facts:
            attainable = self._write(data)
            facts_file.write_text(json.dumps({**facts, "attainable": asdict(attainable)}))
        else:
            attainable = Attainable(**known["attainable"])
        return Dataset(self._path(data), self.options, self.roles, self._splits(data), attainable)

    def _files(self, data: Path) -> dict[str, Path]:
        if self.layout == "file":
            return dict.fromkeys(self.sizes, data / "events.parquet")
        if self.layout == "train and test":
            train = data / "train.parquet"
            return {"train": train, "valid": train, "test": data / "test.parquet"}
        return {split: data / f"{split}.parquet" for split in self.sizes}

    def _path(self, data: Path) -> Path:
        return data / "events.parquet" if self.layout == "file" else data

    def _splits(self, data: Path) -> dict[str, tuple[Path, int, int]]:
        ends: dict[Path, int] = {}
        found: dict[str, tuple[Path, int, int]] = {}
        for split, file in self._files(data).items():
            start = ends.get(file, 0)
            ends[file] = start + self.sizes[split]
            found[split] = (file, start, self.sizes[split])
        return found

    def _write(self, data: Path) -> Attainable:
        data.mkdir(parents=True, exist_ok=True)
        writers: dict[Path, pq.ParquetWriter] = {}
        tested: list[tuple[Array, Array]] = []
        try:
            for split, file in self._files(data).items():
                for table, probability, clicked in self.chunks(split):
                    if file not in writers:
                        writers[file] = pq.ParquetWriter(file, table.schema)
                    writers[file].write_table(table)
                    if split == "test":
                        tested.append((probability, clicked))
        finally:
            for writer in writers.values():
                writer.close()
        probability, clicked = (np.concatenate([part[i] for part in tested]) for i in range(2))
        return Attainable(auc(probability, clicked), logloss(probability, clicked))


def auc(scores: Array, labels: Array) -> float:
    """Area under the ROC curve; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = np.asarray(labels, dtype=bool)
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(positive) - ones)))


def logloss(probability: Array, labels: Array) -> float:
    """Mean binary cross-entropy."""
    p = np.clip(np.asarray(probability, dtype=np.float64), 1e-12, 1 - 1e-12)
    return float(-np.where(np.asarray(labels, dtype=bool), np.log(p), np.log1p(-p)).mean())


def zipf(rng: np.random.Generator, count: int, size: int) -> Array:
    """Ids below ``count`` whose frequency falls as one over their number."""
    return np.minimum(np.floor(np.exp(rng.random(size) * np.log(count + 1))) - 1, count - 1).astype(np.int64)


def effects(rng: np.random.Generator, counts: Mapping[str, int]) -> dict[str, Array]:
    """A standard normal number per id of each column."""
    return {name: rng.normal(size=count) for name, count in counts.items()}


def intercept_of(logits: Array, rate: float) -> float:
    """The constant with which the mean probability is the rate, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-(logits + middle)))).mean() < rate else (low, middle)
    return (low + high) / 2
