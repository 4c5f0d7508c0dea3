"""Measure how a day's samples differ from those of the days before: ids never seen, labels, distributions of numbers.

Everything is counted while the samples pass on their way to an evaluation, and counts of ranks and of days add up. Two
days are compared by the population stability index, see `hotbed.data.stability`.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from hotbed.batch import Batch
from hotbed.data import Loader, Source
from hotbed.data.stability import BINS, bins_of, stability_index
from hotbed.errors import DamagedError
from hotbed.files import new_file
from hotbed.train.parallel import Ranks

BINNED = "bins_of_sizes"
"""Key of a record's bins."""
_TABLE = "table "  # NumPy takes some names for its own


class Watched:
    """Batches of a loader, counted as they pass."""

    def __init__(self, loader: Loader, counts: DayCounts) -> None:
        self._loader, self._counts, self.source = loader, counts, loader.source

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._counts.add(batch)
            yield batch


class DayCounts:
    """Count what a day's samples hold."""

    def __init__(self, source: Source, seen: Mapping[str, np.ndarray[Any, Any]]) -> None:
        schema = source.schema
        self._columns, self._labels = tuple(schema.dense), tuple(schema.labels)
        rows = {table.name: table.rows for table in schema.tables(1)}
        self._table = {column.name: column.table_name for column in schema.sparse}
        self._rows = rows
        self._seen = {name: _bits(count, seen.get(name)) for name, count in rows.items()}
        self._new = {name: np.zeros_like(bits) for name, bits in self._seen.items()}
        self._lookups = torch.zeros(2, dtype=torch.float64)  # all, and those of rows never looked up before
        self._positives = torch.zeros(1 + len(self._labels), dtype=torch.float64)  # samples, sums of labels
        self._bins = torch.zeros(len(self._columns), BINS, dtype=torch.float64)

    def add(self, batch: Batch) -> None:
        """Count a batch in the host's memory."""
        self._positives[0] += len(batch)
        if batch.labels is not None:
            self._positives[1:] += batch.labels.double().sum(0)
        if batch.dense is not None:
            bins = bins_of(batch.dense)
            for i in range(len(self._columns)):
                self._bins[i] += torch.bincount(bins[:, i], minlength=BINS)
        for column, table in self._table.items():
            ids = batch.sparse[column].values.numpy()
            distinct, times = np.unique(ids, return_counts=True)
            here = (distinct >= 0) & (distinct < self._rows[table])
            distinct, times = distinct[here], times[here]
            byte, bit = distinct >> 3, (1 << (distinct & 7)).astype(np.uint8)
            unknown = (self._seen[table][byte] & bit) == 0
            self._lookups += torch.tensor([times.sum(), times[unknown].sum()], dtype=torch.float64)
            np.bitwise_or.at(self._new[table], byte[unknown], bit[unknown])

    def gather(self, ranks: Ranks) -> None:
        """Add what the other ranks have; all of them must call this, and end with the same."""
        if ranks.link is None:
            return
        for counts in (self._lookups, self._positives, self._bins):
            counts.copy_(ranks.gather(counts[None]).sum(0))
        for bits in self._new.values():
            every = ranks.gather(torch.from_numpy(bits)[None]).numpy()
            np.bitwise_or.reduce(every, axis=0, out=bits)

    def seen(self) -> dict[str, np.ndarray[Any, Any]]:
        """A bit per row that was looked up on this day or any before."""
        return {name: bits | self._new[name] for name, bits in self._seen.items()}

    def record(self) -> dict[str, Any]:
        """What was counted, as plain values; by numerical column, samples by bin."""
        samples, lookups = float(self._positives[0]), float(self._lookups[0])
        rates = {
            label: float(total) / max(samples, 1)
            for label, total in zip(self._labels, self._positives[1:], strict=True)
        }
        return {
            "samples": int(samples),
            "lookups": int(lookups),
            "unseen_share": float(self._lookups[1]) / max(lookups, 1),
            "new_rows": {name: int(np.unpackbits(bits).sum()) for name, bits in self._new.items()},
            "label_means": rates,
            BINNED: {
                name: {str(i): int(own[i]) for i in own.nonzero()[:, 0].tolist()}
                for name, own in zip(self._columns, self._bins, strict=True)
            },
        }


def stability(bins: Mapping[str, Mapping[str, int]], reference: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Population stability index of each column that two days have, the largest first."""
    found: dict[str, float] = {}
    for column in bins.keys() & reference.keys():
        keys = bins[column].keys() | reference[column].keys()
        found[column] = stability_index(
            *(np.array([of[column].get(key, 0) for key in sorted(keys, key=int)]) for of in (bins, reference))
        )
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def write_seen(path: Path, seen: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write the rows that were ever looked up; the file appears whole or not at all."""
    with new_file(path) as file, file.open("wb") as stream:
        np.savez_compressed(stream, **cast("dict[str, Any]", {f"{_TABLE}{name}": of for name, of in seen.items()}))


def read_seen(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read what `write_seen` wrote; nothing, where there is no such file."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name.removeprefix(_TABLE): stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedError(f"{path} is damaged ({error}); remove it: rows then count as never seen") from error


def _bits(rows: int, earlier: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """A bit per row, those of an earlier day taken over; tables may have grown."""
    bits = np.zeros(-(-rows // 8), np.uint8)
    if earlier is not None:
        known = min(len(earlier), len(bits))
        bits[:known] = earlier[:known]
    return bits
