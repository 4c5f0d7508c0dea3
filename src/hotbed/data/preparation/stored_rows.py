"""Read the rows of any data: in order and bounded memory (`open_rows`), or as files to prepare (`source_files`).

Parquet, CSV, TSV and logs are read without a schema, with all of their columns. For all other formats, the batches of a
`Source` are converted to columns.

`open_described` opens a prepared dataset. This is a folder with a file that describes the columns:
``feature_spec.yaml`` (NVIDIA's split-binary format), or ``source.yaml`` (Parquet; ``data.source`` of a recipe).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
from pyarrow import fs
from torch import Tensor

from hotbed.batch import Batch
from hotbed.checks import check_known
from hotbed.data.files.parquet_files import ParquetFile, RowGroup, TableFile, find_parquet, with_rows
from hotbed.data.files.row_split import SPLITS
from hotbed.data.formats.npy import NpySource, find_days, has_days
from hotbed.data.formats.parquet import ParquetSource
from hotbed.data.formats.split_binary import DESCRIPTION, SplitBinarySource
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Bags, weights_of
from hotbed.locations import location, resolve_uri
from hotbed.parsing import TextError, parse_yaml

Format = Literal["split_binary", "parquet"]
MARKERS: Mapping[Format, str] = {"split_binary": DESCRIPTION, "parquet": "source.yaml"}
"""File that describes a dataset, by format. This file is written last, so it marks a complete dataset."""
_PARQUET = "hotbed.data.ParquetSource"
_SPLIT_BINARY = "hotbed.data.SplitBinarySource"
_MOST_BYTES = 64 << 20
_ANY_ROWS = 1 << 62
_CELLS = 2_000_000
_FEWEST_ROWS, _MOST_ROWS = 1_024, 1 << 16


# -- prepared datasets ---------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A source, and how a recipe opens it."""

    source: Source
    entry: Mapping[str, object]  # `data.source` of the recipe
    notes: Sequence[str] = ()  # comments for the recipe


def open_described(path: str | Path) -> Described | None:
    """Open a prepared dataset by the path of its folder or description. Return None for any other path.

    A dataset at a URI must consist of Parquet files.
    """
    if isinstance(path, Path):
        path = path.parent if path.name in MARKERS.values() else path
        if (path / DESCRIPTION).is_file():
            return Described(SplitBinarySource(path), {"class_path": _SPLIT_BINARY})
        if not path.is_dir():
            return None
    try:
        store, root = (fs.LocalFileSystem(), str(path)) if isinstance(path, Path) else resolve_uri(path)
    except ValueError:  # the caller searches the URI for files, which raises this error
        return None
    file = f"{root.rstrip('/')}/{MARKERS['parquet']}"
    if not store.get_file_info(file).is_file:
        return None
    with store.open_input_stream(file) as stream:
        text: bytes = stream.read(_MOST_BYTES)
    try:
        entry: Any = parse_yaml(text.decode("utf-8"))
    except (UnicodeDecodeError, TextError) as error:
        raise DataError(f"{file}: {' '.join(str(error).split())}. Prepare the data again") from None
    arguments = cast("Mapping[str, Any]", entry).get("init_args") if isinstance(entry, Mapping) else None
    if not isinstance(arguments, Mapping) or cast("Mapping[str, Any]", entry).get("class_path") != _PARQUET:
        raise DataError(f"{file}: expected class_path: {_PARQUET}, and init_args. Prepare the data again")
    arguments = cast("Mapping[str, Any]", arguments)
    try:
        signature(ParquetSource).bind(path, **arguments)
    except TypeError as error:
        raise DataError(f"{file}, init_args: {error}. Prepare the data again") from None
    return Described(ParquetSource(path, **arguments), cast("Mapping[str, object]", entry))


# -- rows of any data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsSlice:
    """Consecutive rows of a dataset."""

    table: pa.Table
    split: str  # "" if the data has no splits
    place: RowLocation


class StoredRows(ABC):
    """Rows of a dataset with all of their columns."""

    path: str
    kind: str  # kind of the dataset, for reports
    samples: dict[str, int]  # rows by split ("" for data without splits)
    about: dict[str, int]  # further figures, e.g. files and row groups

    @cached_property
    @abstractmethod
    def schemas(self) -> list[tuple[str, pa.Schema]]:
        """Name (for messages) and columns of each file."""

    @abstractmethod
    def read(self) -> Iterator[RowsSlice]:
        """Yield all rows in order. A slice has only the columns of its file."""

    @property
    def rows(self) -> int:
        """Number of rows of all splits."""
        return sum(self.samples.values())

    @property
    def names(self) -> list[str]:
        """All columns, in order of first occurrence in the files."""
        return list(dict.fromkeys(name for _, schema in self.schemas for name in schema.names))


class ParquetRows(StoredRows):
    """Rows of Parquet files, or of text files that were converted to Parquet."""

    kind = "Parquet"

    def __init__(self, path: str | Path, files: Mapping[str, Sequence[ParquetFile]]) -> None:
        self.path, self._files = str(path), files
        self.samples = {split: sum(file.metadata.num_rows for file in of) for split, of in files.items()}
        self._all = list(chain(*files.values()))
        self.row_groups = [group for file in self._all for group in file.row_groups()]
        self.about = {"files": len(self._all), "row_groups": len(self.row_groups)}

    @cached_property
    def schemas(self) -> list[tuple[str, pa.Schema]]:
        """Columns of each file."""
        return [(str(file), file.schema) for file in with_rows(self._all)]

    def read(self) -> Iterator[RowsSlice]:
        """Yield each row group. Large row groups are divided into slices."""
        for split, of_split in self._files.items():
            for file in of_split:
                names = file.schema.names
                rows = max(_FEWEST_ROWS, min(_MOST_ROWS, _CELLS // max(1, len(names))))
                for group in file.row_groups():
                    start = 0
                    for table in group.batches(names, rows) if group.samples > rows else [group.read(names)]:
                        location = RowLocation(str(group), lambda at, of=group, first=start: of.name_row(first + at))
                        yield RowsSlice(table, split, location)
                        start += len(table)


class SourceRows(StoredRows):
    """Rows of a source: the stored columns of Parquet files, or columns that are made of the source's batches."""

    def __init__(self, path: str | Path, source: Source, kind: str) -> None:
        self.path, self.source, self.kind, self.about = str(path), source.streamed(), kind, {}
        self.samples = {split: self.source.samples(split) for split in self.source.splits}

    @property
    def tables(self) -> dict[str, int]:
        """Number of rows by table, without tables of unknown size."""
        return {name: rows for name, rows in self.source.schema.rows.items() if rows < _ANY_ROWS}

    @property
    def is_stored(self) -> bool:
        """Whether columns are returned as stored, i.e. labels and ids are not converted."""
        return isinstance(self.source, ParquetSource)

    @cached_property
    def schemas(self) -> list[tuple[str, pa.Schema]]:
        """Path of the source, and its columns, which are the columns of the first chunk."""
        found = next(self.read(), None)
        return [] if found is None else [(self.path, found.table.schema)]

    def read(self) -> Iterator[RowsSlice]:
        """Yield the rows of each chunk."""
        for split in self.source.splits:
            start = 0
            for i, samples in enumerate(self.source.chunks(split)):
                if isinstance(self.source, ParquetSource):
                    table = self.source.read_columns(split, i, list(self.source.column_types()))
                else:
                    table = columns_of(self.source.read(split, i), self.source.schema)
                yield RowsSlice(table, split, RowLocation(f"split '{split}'", lambda i, at=start: f"sample {at + i:,}"))
                start += samples


def open_rows(path: str | Path, schema: Schema | None = None) -> StoredRows:
    """Open a prepared dataset, NumPy arrays (with days as splits), Parquet, CSV or TSV files, or logs at a path.

    ``schema`` has the names of the columns of NumPy arrays (default: the names in TorchRec's scripts).
    """
    if isinstance(path, Path) and has_days(path):
        days = {day.name: [day.name] for day in find_days(path)}
        rows = _ANY_ROWS if schema is None else None
        return SourceRows(path, NpySource(path, schema, rows=rows, splits=days), "arrays of NumPy")
    if (described := open_described(path)) is not None:
        return SourceRows(path, described.source, "prepared dataset")
    return ParquetRows(path, find_parquet(path))


# -- sources as files of columns -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceFile(TableFile):
    """A `TableFile` of one split of a source. Row groups are chunks, ids are int64, and numbers are not normalized."""

    unit = "chunk"
    source: Source
    split: str
    files: tuple[Path, ...]  # files that the source reads

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
        """Paths, sizes and modification times of the files."""
        found = ((str(file), file.stat()) for file in self.files)
        known = [(path, info.st_size, info.st_mtime_ns) for path, info in found]
        return (self.shown, *(known or [uuid4().hex]))  # a source without files may change at any time

    def row_groups(self) -> list[RowGroup]:
        """Return the chunks with samples as row groups."""
        sizes = self.source.chunks(self.split)
        starts = np.cumsum([0, *sizes]).tolist()
        return [RowGroup(self, i, n, start) for i, (n, start) in enumerate(zip(sizes, starts, strict=False)) if n]

    def read(self, row_group: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of a chunk."""
        batch = self.source.read(self.split, row_group)
        schema = self.source.schema
        for column in (c for c in schema.sparse if c.name in columns and c.weights is None):
            weights = batch.sparse[column.name].weights
            if weights is not None and bool((weights != 1).any()):
                raise DataError(
                    f"{self}, column '{column.name}': got weights of ids, but the schema has no column for them. Set "
                    "`weights` of the column in the schema, or remove the weights from the data"
                )
        found = columns_of(batch, schema)
        return pa.table({name: found[name].cast(self.schema.field(name).type) for name in columns})

    def nbytes(self, row_group: int) -> int:
        """Return the estimated bytes of a chunk, where a ragged feature counts as one id per sample."""
        s = self.source.schema
        numbers = len(s.dense) * (8 if s.numericals else 4) + 4 * len(s.labels)
        ids = 8 * sum(column.ids or 1 for column in s.sparse)
        return (numbers + ids) * self.source.chunks(self.split)[row_group]


def is_source(raw: str | Path | Source) -> bool:
    """Return whether `source_files` can read an input."""
    if isinstance(raw, Source):
        return True
    path = location(str(raw))
    return isinstance(path, Path) and ((path / DESCRIPTION).is_file() or has_days(path))


def source_files(
    raw: Path | Source, schema: Schema | Mapping[str, object] | None
) -> tuple[Schema, dict[str, list[SourceFile]]]:
    """Return the schema and the files by split of a source, NumPy arrays or split-binary data."""
    shown = str(raw) if isinstance(raw, Path) else type(raw).__name__
    days_of = raw if isinstance(raw, Path) and has_days(raw) else None
    files: dict[str, Sequence[Path]]
    if days_of is not None:
        days = find_days(days_of)
        rows = 1 << 30 if schema is None else None
        source = NpySource(days_of, schema, rows=rows, splits={day.name: [day.name] for day in days})
        files = {day.name: day.files for day in days}
    else:
        if schema is not None:
            raise SpecError(f"schema: got one for {shown}, which defines its own columns. Remove the schema")
        source = SplitBinarySource(raw) if isinstance(raw, Path) else raw
        for split in source.splits:
            check_known(f"{shown}, split", split, SPLITS, DataError)
        files = dict.fromkeys(source.splits, source.files())
    for split in source.splits:
        source.check_labels(split)  # a later error could not name the file
    found = {
        split: SourceFile(name=split, shown=f"{shown}/{split}", source=source, split=split, files=tuple(of_split))
        for split, of_split in files.items()
    }
    if days_of is not None and not files.keys() <= set(SPLITS):
        return source.schema, {"": list(found.values())}
    return source.schema, {split: [file] for split, file in found.items()}


def columns_of(batch: Batch, schema: Schema) -> pa.Table:
    """Convert a batch to a table. Labels, numericals and weights become floats; ids become integers or lists."""
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
    """Convert values of ids to a column: a list per bag, or a plain value if all bags have one id."""
    column = pa.array(values.numpy())
    if bags.offsets is not None:
        return pa.LargeListArray.from_arrays(pa.array(bags.offsets.numpy().astype("int64")), column)
    return column if bags.fixed == 1 else pa.FixedSizeListArray.from_arrays(column, bags.fixed)
