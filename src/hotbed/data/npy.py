"""Read samples of NumPy arrays, day by day, where they are: the layout of TorchRec's and MLPerf's scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.data.columns import SparseColumn
from hotbed.data.npy_files import Day, find_days
from hotbed.data.schema import Schema
from hotbed.data.source import Source, label_error
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.jagged import Jagged
from hotbed.locations import location

_LABELS_AT_ONCE = 1 << 22
_HELD_OUT = 0.1


@dataclass(frozen=True)
class _Part:
    """Consecutive rows of a day."""

    day: Day
    start: int
    samples: int


class NpySource(Source):
    """Samples of a folder of arrays ``day_0_dense.npy``, ``day_0_sparse.npy`` and so on, see `hotbed.data.npy_files`.

    Numericals and labels come out as float32, ids as they are stored. Ids that are not below the rows of their table
    are left to the embedding's own check.

    Parameters
    ----------
    path
        The folder.
    schema
        What the columns are called, and the rows of their tables; matched with the arrays by position. The format has
        no weight or group. One without labels reads none.
    rows
        In its place, the rows of each feature's table, or one number for all (``num_embeddings_per_feature`` of
        TorchRec's scripts). Columns are then called as there: ``int_0`` …, ``cat_0`` … and ``label``.
    modulo
        Whether ids are taken modulo the rows of their tables, as TorchRec's loader does. Predictions take ids of which
        that was made already.
    splits
        By split, the days in it: ``{train: [day_0, day_1], test: [day_2]}``. By default those of TorchRec's scripts:
        the last day is held out (the last tenth of one day alone), the first half of it is ``valid`` and the rest
        ``test``. ``"none"``: all are ``train``.
    chunk_samples
        Samples per chunk, the unit of reading and shuffling.

    Raises
    ------
    DataError
        If the folder is not in this layout; see `find_days`.
    SpecError
        If an argument does not fit the arrays.
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema | Mapping[str, object] | None = None,
        *,
        rows: int | Sequence[int] | None = None,
        modulo: bool = False,
        splits: Mapping[str, Sequence[str]] | Literal["none"] | None = None,
        chunk_samples: int = 65_536,
    ) -> None:
        if chunk_samples < 1:
            raise SpecError(f"chunk_samples is {chunk_samples:,}, must be at least 1")
        place = location(path) if isinstance(path, str) else path
        if isinstance(place, str):
            raise DataError(f"{path}: arrays of NumPy are read from local disks only; copy them there, or use Parquet")
        self.days = find_days(place.absolute())  # a reader may be in another directory
        if schema is None:
            schema = _named(self.days[0], rows, str(path))
        elif rows is not None:
            raise SpecError("there are both schema and rows, which the schema says too; leave one of them out")
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        _check(self.schema, self.days[0], str(path))
        self.modulo = modulo
        self._position = {column.name: i for i, column in enumerate(self.schema.sparse)}
        if splits == "none":
            splits = {"train": [day.name for day in self.days]}
        parts = _default_splits(self.days) if splits is None else _chosen(self.days, splits, str(path))
        self._parts = {split: [p for part in of for p in _cut(part, chunk_samples)] for split, of in parts.items()}
        self.splits = tuple(self._parts)
        for split, of_split in self._parts.items():
            if not of_split:
                raise DataError(f"{path} has too few samples for a {split} split; say `splits`")

    def files(self) -> list[Path]:
        """All files of the days."""
        return [file for day in self.days for file in day.files]

    def _chunks(self, split: str) -> Sequence[int]:
        return [part.samples for part in self._parts[split]]

    def _read(self, split: str, i: int) -> Batch:
        part = self._parts[split][i]
        dense = self._dense(part)
        labels = self._labels(part) if self.schema.labels else None
        return Batch(
            sparse=self._sparse(part),
            dense=None if dense is None else torch.from_numpy(dense),
            labels=None if labels is None else torch.from_numpy(labels),
        )

    def _read_numericals(self, split: str, i: int) -> torch.Tensor | None:
        dense = self._dense(self._parts[split][i])
        return None if dense is None else torch.from_numpy(dense)

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        names, parts = self.schema.labels, self._parts[split]
        if not names:
            return {}
        low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        for part in (p for whole in parts for p in _cut(whole, _LABELS_AT_ONCE)):
            labels = self._labels(part)
            bad = np.argwhere(~((labels >= 0) & (labels <= 1)))
            if len(bad):
                at, t = bad[0].tolist()
                row = f"row {part.start + at:,}"
                raise label_error(str(part.day.labels), names[t], labels[at, t].item(), row)
            low, high = np.minimum(low, labels.min(0)), np.maximum(high, labels.max(0))
        return dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))

    def _labels(self, part: _Part) -> NDArray[np.float32]:
        assert part.day.labels is not None
        return _native(part.day.labels.read(part.start, part.samples), np.dtype(np.float32))

    def _dense(self, part: _Part) -> NDArray[Any] | None:
        """Numericals, as float64 where the model normalizes them."""
        if part.day.dense is None:
            return None
        kind = np.dtype(np.float64 if self.schema.numericals else np.float32)
        return _native(part.day.dense.read(part.start, part.samples), kind)

    def _sparse(self, part: _Part) -> Jagged:
        columns, n = self.schema.sparse, part.samples
        wide = any(_is_wide(array.dtype) for array in part.day.sparse)
        kind = np.dtype(np.int64 if wide else np.int32)
        values = np.empty(n * sum(column.ids or 1 for column in columns), dtype=kind)
        at = 0
        stored = part.day.read_ids([self._position[column.name] for column in columns], part.start, n)
        for column, ids in zip(columns, stored, strict=True):
            out = values[at : at + ids.size].reshape(ids.shape)
            out[...] = ids
            if self.modulo:
                np.remainder(out, column.rows, out=out)
            at += ids.size
        return Jagged(
            [column.name for column in columns],
            torch.from_numpy(values),
            batch_size=n,
            fixed=[column.ids for column in columns],
        )


def draft_names(day: Day) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What TorchRec calls the columns of a day: the sparse ones, the dense ones, the labels."""
    labels = 0 if day.labels is None else day.labels.columns
    return (
        tuple(f"cat_{i}" for i in range(len(day.ids))),
        tuple(f"int_{i}" for i in range(0 if day.dense is None else day.dense.columns)),
        ("label",) if labels == 1 else tuple(f"label_{t}" for t in range(labels)),
    )


def _named(day: Day, rows: int | Sequence[int] | None, path: str) -> Schema:
    names, dense, labels = draft_names(day)
    if rows is None:
        raise SpecError(
            f"{path} does not say how many rows tables have; write `rows`, a number for each of its {len(names)} "
            "features, or let hotbed init draft a recipe, which counts them"
        )
    each = [rows] * len(names) if isinstance(rows, int) else list(rows)
    if len(each) != len(names):
        raise SpecError(f"rows has {len(each)} numbers, and {path} has {len(names)} features; give one for each")
    sparse = tuple(SparseColumn(name=n, rows=r, ids=k) for n, r, k in zip(names, each, day.ids, strict=True))
    return Schema(sparse=sparse, dense=dense, labels=labels)


def _check(schema: Schema, day: Day, path: str) -> None:
    """Raise `SpecError` unless a schema is of as many columns as the arrays have."""
    names, dense, labels = draft_names(day)
    counts = [("sparse columns", len(schema.sparse), len(names)), ("dense columns", len(schema.dense), len(dense))]
    if schema.labels:
        counts.append(("labels", len(schema.labels), len(labels)))
    for what, said, there in counts:
        if said != there:
            raise SpecError(f"the schema has {said} {what}, and the arrays in {path} have {there}; name them all")
    for column, ids in zip(schema.sparse, day.ids, strict=True):
        if column.ids != ids:
            raise SpecError(f"sparse column '{column.name}': ids is {column.ids}, and the arrays in {path} have {ids}")
    if schema.weight_columns or schema.group:
        raise SpecError("arrays of NumPy have no weight or group column; use Parquet for them")
    if schema.id_weights:
        raise SpecError(f"arrays of NumPy have no weights of ids ('{schema.id_weights[0]}'); use Parquet for them")
    if schema.scaling or schema.positives or schema.derived:
        raise SpecError("arrays of NumPy are not scaled, mapped or crossed when they are read; use Parquet for that")


def _default_splits(days: Sequence[Day]) -> dict[str, list[_Part]]:
    """By the days' names if they are splits'; else the last day is held out, half to validate and half to test."""
    if {day.name for day in days} <= {"train", "valid", "test"}:
        named = {day.name: [_Part(day, 0, day.rows)] for day in days}
        return {split: named[split] for split in ("train", "valid", "test") if split in named}
    *before, last = days
    train = [_Part(day, 0, day.rows) for day in before]
    held_out = last.rows
    if not before:
        held_out = round(last.rows * _HELD_OUT)
        train = [_Part(last, 0, last.rows - held_out)]
    valid = held_out // 2 + held_out % 2
    start = last.rows - held_out
    return {
        "train": train,
        "valid": [_Part(last, start, valid)],
        "test": [_Part(last, start + valid, held_out - valid)],
    }


def _chosen(days: Sequence[Day], splits: Mapping[str, Sequence[str]], path: str) -> dict[str, list[_Part]]:
    by_name = {day.name: day for day in days}
    if not isinstance(splits, Mapping):
        raise SpecError(f"splits is {splits!r}, must be none, or days by split: {{train: [{days[0].name}]}}")
    used: dict[str, str] = {}
    for split, names in splits.items():
        if isinstance(names, str):
            raise SpecError(f"splits: {split} is {names!r}, must be a list of days; write [{names}]")
        for name in names:
            if name not in by_name:
                raise SpecError(f"splits: {path} has no day '{name}'{did_you_mean(str(name), by_name)}")
            if (other := used.setdefault(name, split)) != split:
                raise SpecError(f"splits: '{name}' is in {other} and in {split}; leave it in one of them")
    if not used:
        raise SpecError(f"splits is {dict(splits)}, must name days: {{train: [{days[0].name}]}}")
    return {split: [_Part(by_name[n], 0, by_name[n].rows) for n in names] for split, names in splits.items()}


def _cut(part: _Part, samples: int) -> list[_Part]:
    starts = range(0, part.samples, samples)
    return [_Part(part.day, part.start + at, min(samples, part.samples - at)) for at in starts]


def _native(values: NDArray[Any], kind: np.dtype[Any]) -> NDArray[Any]:
    """The same numbers of this type, row after row."""
    return np.ascontiguousarray(values, dtype=kind)


def _is_wide(kind: np.dtype[Any]) -> bool:
    return kind.itemsize == 8 or (kind.itemsize == 4 and kind.kind == "u")
