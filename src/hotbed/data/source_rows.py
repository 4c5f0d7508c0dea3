# pyright: reportUnknownParameterType=false
"""Read what a `Source` has as Arrow columns, so that it can be prepared as tables are: `SourceFile`, `source_files`."""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
from torch import Tensor

from hotbed.bags import Bags, weights_of
from hotbed.batch import Batch
from hotbed.data.npy import NpySource, find_days, has_days
from hotbed.data.row_groups import RowGroup
from hotbed.data.row_split import SPLITS
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.data.split_binary import DESCRIPTION, SplitBinarySource
from hotbed.errors import DataError, SpecError
from hotbed.locations import location

_ANY = 1 << 30


@dataclass(frozen=True)
class SourceFile:
    """A split of a source as a `TableFile`; its parts are chunks, ids are int64, and numbers are as they are read."""

    source: Source
    split: str
    name: str  # name of the file that the split stands for
    shown: str  # name in messages
    files: tuple[Path, ...]  # files that the source reads

    @property
    def unit(self) -> str:
        """A chunk."""
        return "chunk"

    @property
    def may_be_away(self) -> bool:
        """Sources say themselves where something cannot be read."""
        return False

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns of the source's schema."""
        s = self.source.schema
        fields = [(c.name, pa.int64() if c.ids == 1 else pa.large_list(pa.int64())) for c in s.sparse]
        fields += [(name, pa.float64() if s.numericals else pa.float32()) for name in s.dense]
        fields += [(name, pa.float32()) for name in dict.fromkeys((*s.labels, *s.weight_columns))]
        weighted = {c.weights: c.ids for c in s.sparse if c.weights is not None}
        fields += [(n, pa.float32() if k == 1 else pa.large_list(pa.float32())) for n, k in weighted.items()]
        fields += [(s.group, pa.int64())] if s.group else []
        return pa.schema(fields)

    @property
    def state(self) -> tuple[object, ...]:
        """Paths, sizes and times of change of the files."""
        found = ((str(file), file.stat()) for file in self.files)
        known = [(path, info.st_size, info.st_mtime_ns) for path, info in found]
        return (self.shown, *(known or [uuid4().hex]))  # of what is not known it may always be another

    def row_groups(self) -> list[RowGroup]:
        """List the chunks."""
        sizes = self.source.chunks(self.split)
        starts = np.cumsum([0, *sizes]).tolist()
        return [RowGroup(self, i, n, start) for i, (n, start) in enumerate(zip(sizes, starts, strict=False)) if n]

    def read(self, row_group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read some columns of a chunk."""
        batch = self.source.read(self.split, row_group)
        schema = self.source.schema
        for column in (c for c in schema.sparse if c.name in columns and c.weights is None):
            weights = batch.sparse[column.name].weights
            if weights is not None and bool((weights != 1).any()):
                raise DataError(
                    f"{self}, column '{column.name}' has a weight for each id, and its schema names no column of them; "
                    "say `weights`, or leave them out"
                )
        found = columns_of(batch, schema)
        return pa.table({name: found[name].cast(self.schema.field(name).type) for name in columns})

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Give some columns of a chunk, which is read whole, at most so many rows at once."""
        whole = self.read(row_group, columns, rows)
        for at in range(0, len(whole), rows):
            yield whole.slice(at, rows)

    def nbytes(self, row_group: int) -> int:
        """Bytes of a chunk, with one id where their number varies."""
        s = self.source.schema
        numbers = len(s.dense) * (8 if s.numericals else 4) + 4 * len(s.labels)
        ids = 8 * sum(column.ids or 1 for column in s.sparse)
        return (numbers + ids) * self.source.chunks(self.split)[row_group]

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """Name none: a batch has no texts."""
        return {}

    def statistics(self, row_group: int, column: str) -> None:
        """Tell nothing: it is not known before it is read."""

    def __str__(self) -> str:
        return self.shown


def source_files(
    raw: Path | Source, schema: Schema | Mapping[str, object] | None
) -> tuple[Schema, dict[str, list[SourceFile]]]:
    """Files of a source, or of a folder of NumPy arrays or of the split-binary format, by split, with their schema."""
    if isinstance(raw, Path) and has_days(raw):
        return _days(raw, schema)
    if schema is not None:
        said = DESCRIPTION if isinstance(raw, Path) else "its schema"
        raise SpecError(f"{_shown(raw)} says itself what its columns are ({said}); leave out the schema")
    source = SplitBinarySource(raw) if isinstance(raw, Path) else raw
    if (other := next((split for split in source.splits if split not in SPLITS), None)) is not None:
        raise DataError(f"{_shown(raw)} has a split '{other}'; only {', '.join(SPLITS)} can be prepared")
    _check_labels(source)
    stored = tuple(source.files())
    return source.schema, {s: [SourceFile(source, s, s, f"{_shown(raw)}/{s}", stored)] for s in source.splits}


def _days(path: Path, schema: Schema | Mapping[str, object] | None) -> tuple[Schema, dict[str, list[SourceFile]]]:
    """Each day is a file."""
    days = find_days(path)
    rows = _ANY if schema is None else None
    source = NpySource(path, schema, rows=rows, splits={day.name: [day.name] for day in days})
    _check_labels(source)
    files = {day.name: SourceFile(source, day.name, day.name, f"{path}/{day.name}", tuple(day.files)) for day in days}
    if files.keys() <= set(SPLITS):
        return source.schema, {split: [file] for split, file in files.items()}
    return source.schema, {"": list(files.values())}


def _check_labels(source: Source) -> None:
    """Raise `DataError` for a label that training would refuse; batches no longer say in which file it is."""
    for split in source.splits:
        source.check_labels(split)


def is_source(raw: str | Path | Source) -> bool:
    """Whether this is something that `source_files` knows."""
    if isinstance(raw, Source):
        return True
    place = location(str(raw))
    return isinstance(place, Path) and ((place / DESCRIPTION).is_file() or has_days(place))


def _shown(raw: Path | Source) -> str:
    return str(raw) if isinstance(raw, Path) else type(raw).__name__


def columns_of(batch: Batch, schema: Schema) -> pa.Table:
    """A batch's samples as columns by name; labels, numericals and weights are floats, ids integers or lists."""
    columns: dict[str, pa.Array] = {}
    for values, names in ((batch.labels, schema.labels), (batch.dense, schema.dense)):
        if values is not None:
            columns |= {name: pa.array(values[:, i].numpy()) for i, name in enumerate(names)}
    for column in schema.sparse:
        bags = batch.sparse[column.name]
        columns[column.name] = _lists(bags, bags.values)
        if column.weights is not None:
            columns.setdefault(column.weights, _lists(bags, weights_of(bags)))
    if batch.weights is not None:
        for name in schema.weight_columns:
            columns.setdefault(name, pa.array(schema.weights_of(batch.weights, name).numpy()))
    for name, values in batch.extra.items():
        columns.setdefault(name, pa.array(values.numpy()))
    return pa.table(columns)


def _lists(bags: Bags, values: Tensor) -> pa.Array:
    """A value for each id of bags, in lists where a sample has not one id."""
    column = pa.array(values.numpy())
    if bags.offsets is not None:
        return pa.LargeListArray.from_arrays(pa.array(bags.offsets.numpy().astype("int64")), column)
    return column if bags.fixed == 1 else pa.FixedSizeListArray.from_arrays(column, bags.fixed)
