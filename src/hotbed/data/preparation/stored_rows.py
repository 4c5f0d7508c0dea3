"""Read all columns of any data in slices of rows, in order and bounded memory: `open_rows`, `SourceRows`.

Parquet, CSV, TSV and logs are read as they are stored, with all columns that their files have and no schema. Of other
formats the samples of a `Source` are turned into columns.

`open_described` opens a folder that describes its own columns, as `hotbed.prepare` writes it. NVIDIA's split-binary
format has ``feature_spec.yaml``, Parquet ``source.yaml``, with the entry ``data.source`` of a recipe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
from pyarrow import fs
from torch import Tensor

from hotbed.bags import Bags, weights_of
from hotbed.batch import Batch
from hotbed.data.files.parquet_files import ParquetFile, RowGroup, TableFile, find_parquet, with_rows
from hotbed.data.files.row_split import SPLITS
from hotbed.data.formats.npy import NpySource, find_days, has_days
from hotbed.data.formats.parquet import ParquetSource
from hotbed.data.formats.split_binary import DESCRIPTION, SplitBinarySource
from hotbed.data.preparation.encoded_rows import MARKERS
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.locations import location, opened
from hotbed.parsing import TextError, parse_yaml

_PARQUET = "hotbed.data.ParquetSource"
_SPLIT_BINARY = "hotbed.data.SplitBinarySource"
_MOST_BYTES = 64 << 20


class Described(NamedTuple):
    """A source, and what a recipe says of it."""

    source: Source
    said: Mapping[str, object]


def open_described(path: str | Path) -> Described | None:
    """Open a prepared dataset by its folder or the marker file in it; return None for any other path.

    At a URI (a string) only Parquet is found.
    """
    if isinstance(path, Path):
        path = path.parent if path.name in MARKERS.values() else path
        if (path / MARKERS["split_binary"]).is_file():
            return Described(SplitBinarySource(path), {"class_path": _SPLIT_BINARY})
        if not path.is_dir():
            return None
    return _parquet(path)


def _parquet(path: str | Path) -> Described | None:
    try:
        store, root = (fs.LocalFileSystem(), str(path)) if isinstance(path, Path) else opened(path)
    except ValueError:  # said when files are looked for
        return None
    file = f"{root.rstrip('/')}/{MARKERS['parquet']}"
    if not store.get_file_info(file).is_file:
        return None
    with store.open_input_stream(file) as stream:
        text: bytes = stream.read(_MOST_BYTES)
    try:
        said: Any = parse_yaml(text.decode("utf-8"))
    except (UnicodeDecodeError, TextError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file} cannot be read as YAML: {reason}; prepare the data again") from None
    arguments = cast("Mapping[str, Any]", said).get("init_args") if isinstance(said, Mapping) else None
    if not isinstance(arguments, Mapping) or cast("Mapping[str, Any]", said).get("class_path") != _PARQUET:
        raise DataError(f"{file} must say class_path: {_PARQUET} and its init_args; prepare the data again")
    try:
        signature(ParquetSource).bind(path, **cast("Mapping[str, Any]", arguments))
    except TypeError as error:
        raise DataError(f"{file}: init_args: {error}; prepare the data again") from None
    return Described(ParquetSource(path, **cast("Mapping[str, Any]", arguments)), cast("Mapping[str, object]", said))


_ANY_ROWS = 1 << 62
_CELLS = 2_000_000
_FEWEST_ROWS, _MOST_ROWS = 1_024, 1 << 16
T = TypeVar("T")


@dataclass(frozen=True)
class RowsSlice:
    """Consecutive rows."""

    table: pa.Table
    split: str  # empty if there is none
    place: RowLocation


class StoredRows(ABC):
    """Rows of a dataset with all of their columns."""

    path: str
    kind: str
    """What sort of dataset it is, in words."""

    @property
    @abstractmethod
    def samples(self) -> dict[str, int]:
        """Rows by split; the split of data without any is ""."""

    @property
    @abstractmethod
    def about(self) -> dict[str, int]:
        """Further figures: files, row groups, bytes."""

    @property
    @abstractmethod
    def schemas(self) -> list[tuple[str, pa.Schema]]:
        """Columns of each file, with what messages call it."""

    @abstractmethod
    def read(self, columns: Sequence[str] | None = None) -> Iterator[RowsSlice]:
        """Read all rows in order, with all columns or some; a file that lacks one gives rows without it."""

    @property
    def rows(self) -> int:
        """Rows of all splits."""
        return sum(self.samples.values())

    @property
    def types(self) -> dict[str, list[str]]:
        """By column in the order of the files, its types, of which there is more than one where files differ."""
        found: dict[str, list[str]] = {}
        for _, schema in self.schemas:
            for field in schema:
                types = found.setdefault(field.name, [])
                if str(field.type) not in types:
                    types.append(str(field.type))
        return found


class FileRows(StoredRows):
    """Rows of files of Parquet, or of text that was converted to it, by split."""

    kind = "Parquet"

    def __init__(self, path: str | Path, files: Mapping[str, Sequence[ParquetFile]]) -> None:
        self.path = str(path)
        self.files = {split: list(of_split) for split, of_split in files.items()}

    @property
    def samples(self) -> dict[str, int]:
        """Rows by split, by the footers."""
        return {split: sum(file.metadata.num_rows for file in of) for split, of in self.files.items()}

    @property
    def about(self) -> dict[str, int]:
        """Files and row groups."""
        return {"files": len(self._all), "row_groups": len(self.row_groups)}

    @property
    def schemas(self) -> list[tuple[str, pa.Schema]]:
        """Columns of each file."""
        return [(str(file), file.schema) for file in with_rows(self._all)]

    @property
    def row_groups(self) -> list[RowGroup]:
        """All row groups that have rows, in order."""
        return [group for file in self._all for group in file.row_groups()]

    def read(self, columns: Sequence[str] | None = None) -> Iterator[RowsSlice]:
        """Read row group by row group, large ones in parts."""
        for split, of_split in self.files.items():
            for file in of_split:
                names = [name for name in file.schema.names if columns is None or name in columns]
                for group in file.row_groups():
                    yield from _slices(group, names, split)

    @property
    def _all(self) -> list[ParquetFile]:
        return [file for of_split in self.files.values() for file in of_split]


class SourceRows(StoredRows):
    """Rows of a source, in its splits: as they are stored where it has them, else what its batches have as columns."""

    def __init__(self, path: str | Path, source: Source, kind: str) -> None:
        self.path, self.source, self.kind = str(path), source.streamed(), kind

    @property
    def tables(self) -> dict[str, int]:
        """Rows of its tables; none where the data do not say them."""
        return {name: rows for name, rows in self.source.schema.rows.items() if rows < _ANY_ROWS}

    @property
    def is_stored(self) -> bool:
        """Whether rows are as they are stored, and not what batches have: labels as a schema maps them, ids as rows."""
        return isinstance(self.source, ParquetSource)

    @property
    def samples(self) -> dict[str, int]:
        """Samples by split."""
        return {split: self.source.samples(split) for split in self.source.splits}

    @property
    def about(self) -> dict[str, int]:
        """Nothing that all formats have."""
        return {}

    @property
    def schemas(self) -> list[tuple[str, pa.Schema]]:
        """Columns of the first sample's batch."""
        found = next(self.read(), None)
        return [] if found is None else [(self.path, found.table.schema)]

    def read(self, columns: Sequence[str] | None = None) -> Iterator[RowsSlice]:
        """Read chunk by chunk."""
        for split in self.source.splits:
            start = 0
            for i, samples in enumerate(self.source.chunks(split)):
                if isinstance(self.source, ParquetSource):
                    table = self.source.read_columns(split, i, list(self.source.column_types()))
                else:
                    table = columns_of(self.source.read(split, i), self.source.schema)
                names = [name for name in table.column_names if columns is None or name in columns]
                yield RowsSlice(
                    table.select(names),
                    split,
                    RowLocation(f"split '{split}'", lambda at, start=start: f"sample {start + at:,}"),
                )
                start += samples


def open_rows(path: str | Path, schema: Schema | None = None) -> StoredRows:
    """Find the rows at a path: a prepared dataset's, those of Parquet, CSV or TSV files and logs, or of NumPy arrays.

    The schema names the columns of arrays, which do not do so themselves; default: as in TorchRec's scripts. Their
    splits are days.
    """
    if isinstance(path, Path) and has_days(path):
        days = {day.name: [day.name] for day in find_days(path)}
        rows = _ANY_ROWS if schema is None else None
        return SourceRows(path, NpySource(path, schema, rows=rows, splits=days), "arrays of NumPy")
    if (described := open_described(path)) is not None:
        return SourceRows(path, described.source, "prepared dataset")
    return FileRows(path, find_parquet(path))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same, each made by another thread while the one before it is used."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, items, end)
        while (item := waiting.result()) is not end:
            waiting = pool.submit(next, items, end)
            yield item  # pyright: ignore[reportReturnType]


def _slices(group: RowGroup, names: Sequence[str], split: str) -> Iterator[RowsSlice]:
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS, _CELLS // max(1, len(names))))
    start = 0
    for table in group.batches(names, rows) if group.samples > rows else iter([group.read(names)]):
        yield RowsSlice(table, split, RowLocation(str(group), lambda at, start=start: group.name_row(start + at)))
        start += len(table)


# -- a source as files of columns -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceFile(TableFile):
    """A split of a source; its parts are chunks, ids are int64, and numbers are as they are read."""

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
        """Paths, sizes and times of change of the files."""
        found = ((str(file), file.stat()) for file in self.files)
        known = [(path, info.st_size, info.st_mtime_ns) for path, info in found]
        return (self.shown, *(known or [uuid4().hex]))  # of what is not known it may always be another

    def row_groups(self) -> list[RowGroup]:
        """List the chunks."""
        sizes = self.source.chunks(self.split)
        starts = np.cumsum([0, *sizes]).tolist()
        return [RowGroup(self, i, n, start) for i, (n, start) in enumerate(zip(sizes, starts, strict=False)) if n]

    def read(self, row_group: int, columns: Sequence[str]) -> pa.Table:
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

    def nbytes(self, row_group: int) -> int:
        """Bytes of a chunk, with one id where their number varies."""
        s = self.source.schema
        numbers = len(s.dense) * (8 if s.numericals else 4) + 4 * len(s.labels)
        ids = 8 * sum(column.ids or 1 for column in s.sparse)
        return (numbers + ids) * self.source.chunks(self.split)[row_group]


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
    stored = source.files()
    return source.schema, {s: [_source_file(source, s, raw, stored)] for s in source.splits}


def _days(path: Path, schema: Schema | Mapping[str, object] | None) -> tuple[Schema, dict[str, list[SourceFile]]]:
    """Each day is a file."""
    days = find_days(path)
    rows = 1 << 30 if schema is None else None
    source = NpySource(path, schema, rows=rows, splits={day.name: [day.name] for day in days})
    _check_labels(source)
    files = {day.name: _source_file(source, day.name, path, day.files) for day in days}
    if files.keys() <= set(SPLITS):
        return source.schema, {split: [file] for split, file in files.items()}
    return source.schema, {"": list(files.values())}


def _source_file(source: Source, split: str, raw: Path | Source, files: Sequence[Path]) -> SourceFile:
    shown = f"{_shown(raw)}/{split}"
    return SourceFile(name=split, shown=shown, source=source, split=split, files=tuple(files))


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
