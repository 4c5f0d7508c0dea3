"""Read a dataset as the baselines see it: columns by their roles, vocabularies and scales of the train split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.first_contact.planted import Dataset

Array = NDArray[Any]
BUCKETS = 32


@dataclass(frozen=True)
class Ragged:
    """Ids of a list column."""

    values: Array
    offsets: Array

    def take(self, samples: Array) -> Ragged:
        """Lists of some samples."""
        lengths = np.diff(self.offsets)[samples]
        ends = np.cumsum(lengths)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.offsets[samples] - ends + lengths, lengths)
        return Ragged(self.values[at], np.concatenate([[0], ends]))


@dataclass(frozen=True)
class Encoded:
    """A split as arrays: ids ``[N, F]``, lists, numbers ``[N, I]``, labels ``[N]``."""

    ids: Array
    lists: tuple[Ragged, ...]
    numbers: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, samples: Array) -> Encoded:
        """Some samples."""
        lists = tuple(column.take(samples) for column in self.lists)
        return Encoded(self.ids[samples], lists, self.numbers[samples], self.labels[samples])


@dataclass(frozen=True)
class Frames:
    """The splits of a dataset as they are on disk."""

    dataset: Dataset
    frames: dict[str, pl.DataFrame]


def read(dataset: Dataset) -> Frames:
    """Read the columns that have a role."""
    roles = dataset.roles
    names = [roles.label, *roles.ids, *roles.lists, *roles.numbers]
    frames = {
        split: pl.scan_parquet(file).select(names).slice(start, rows).collect()
        for split, (file, start, rows) in dataset.splits.items()
    }
    return Frames(dataset, frames)


def with_vocabulary(read: Frames, threshold: int, *, quantiles: bool) -> tuple[dict[str, Encoded], list[int]]:
    """Encode for embeddings: values seen at least ``threshold`` times in training get rows, all others are row 0.

    Numbers become standardised ranks (``quantiles``) or asinh of the distance from the median, and an indicator of
    missing ones.

    Returns
    -------
    tuple
        The splits, and the rows of each table: those of ids, then those of lists.
    """
    roles, train = read.dataset.roles, read.frames["train"]
    rows: list[int] = []
    columns: dict[str, dict[str, Any]] = {split: {} for split in read.frames}
    for name in (*roles.ids, *roles.lists):
        values = train[name].explode() if name in roles.lists else train[name]
        counts = values.drop_nulls().value_counts(name="times")
        kept = counts.filter(pl.col("times") >= threshold)[name].sort()
        known = pl.DataFrame({name: kept, "row": np.arange(1, len(kept) + 1)})
        rows.append(len(kept) + 1)
        for split, frame in read.frames.items():
            flat = frame[name].explode(empty_as_null=False) if name in roles.lists else frame[name]
            found = flat.to_frame().join(known, on=name, how="left", maintain_order="left")["row"]
            ids = found.fill_null(0).to_numpy().astype(np.int64)
            columns[split][name] = Ragged(ids, _offsets(frame[name])) if name in roles.lists else ids
    numbers = _numbers(read, quantiles=quantiles)
    return {split: _encoded(read, split, columns[split], numbers[split]) for split in read.frames}, rows


def hashed(read: Frames, bits: int) -> dict[str, Encoded]:
    """Encode for a linear model: all values, and the bucket of each number among quantiles, hashed into one space."""
    roles, splits = read.dataset.roles, dict[str, Encoded]()
    mask = np.uint64((1 << bits) - 1)
    edges = {name: _edges(_as_numbers(read.frames["train"][name]), BUCKETS) for name in roles.numbers}
    for split, frame in read.frames.items():
        columns: dict[str, Any] = {}
        for seed, name in enumerate(roles.ids):
            columns[name] = (frame[name].cast(pl.String).hash(seed).to_numpy() & mask).astype(np.int64)
        for seed, name in enumerate(roles.lists, 100):
            flat = frame[name].explode(empty_as_null=False).cast(pl.String)
            values = (flat.hash(seed).to_numpy() & mask).astype(np.int64)
            columns[name] = Ragged(values, _offsets(frame[name]))
        buckets: list[Array] = []
        for seed, name in enumerate(roles.numbers, 200):
            values = _as_numbers(frame[name])
            bucket = np.where(np.isfinite(values), np.searchsorted(edges[name], values), -1)
            buckets.append((pl.Series(bucket).hash(seed).to_numpy() & mask).astype(np.int64))
        encoded = _encoded(read, split, columns, np.zeros((len(frame), 0), np.float32))
        ids = np.concatenate([encoded.ids, *(b[:, None] for b in buckets)], axis=1)
        splits[split] = Encoded(ids, encoded.lists, encoded.numbers, encoded.labels)
    return splits


def _encoded(read: Frames, split: str, columns: dict[str, Any], numbers: Array) -> Encoded:
    roles, frame = read.dataset.roles, read.frames[split]
    ids = [columns[name] for name in roles.ids]
    labels = frame[roles.label].cast(pl.Float32).to_numpy()
    stacked = np.stack(ids, axis=1) if ids else np.zeros((len(frame), 0), np.int64)
    return Encoded(stacked, tuple(columns[name] for name in roles.lists), numbers, labels)


def _offsets(column: pl.Series) -> Array:
    return np.concatenate([[0], np.cumsum(column.list.len().fill_null(0).to_numpy())]).astype(np.int64)


def _as_numbers(column: pl.Series) -> Array:
    if column.dtype.is_temporal():
        column = column.cast(pl.Date).cast(pl.Int32) if column.dtype == pl.Date else column.cast(pl.Int64)
    return column.cast(pl.Float64).fill_null(float("nan")).to_numpy()


def _edges(values: Array, count: int) -> Array:
    values = values[np.isfinite(values)]
    return np.unique(np.quantile(values, np.linspace(0, 1, count + 1)[1:-1])) if len(values) else np.zeros(0)


def _numbers(read: Frames, *, quantiles: bool) -> dict[str, Array]:
    found: dict[str, list[Array]] = {split: [] for split in read.frames}
    for name in read.dataset.roles.numbers:
        train = _as_numbers(read.frames["train"][name])
        present = train[np.isfinite(train)]
        edges = _edges(train, 256)
        low, middle, high = np.quantile(present, (0.25, 0.5, 0.75)) if len(present) else (0.0, 0.0, 1.0)
        scale = (high - low) or 1.0
        for split, frame in read.frames.items():
            values = _as_numbers(frame[name])
            missing = ~np.isfinite(values)
            filled = np.where(missing, middle, values)
            if quantiles:
                shown = (np.interp(filled, edges, np.linspace(-1.7, 1.7, len(edges)))) if len(edges) > 1 else 0 * filled
            else:
                shown = np.arcsinh((filled - middle) / scale)
            found[split] += [np.where(missing, 0, shown)] + ([missing] if np.isnan(train).any() else [])
    empty = {split: np.zeros((len(frame), 0), np.float32) for split, frame in read.frames.items()}
    return {s: np.stack(columns, axis=1).astype(np.float32) if columns else empty[s] for s, columns in found.items()}
