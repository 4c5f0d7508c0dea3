"""Find the files of a dataset by split, on any filesystem of pyarrow, and read their row groups in parts.

Some writers put a whole file into one row group. `divide_into_slices` bounds the memory for reading such a row group.
Its slices are read in order, from one open file per selection of columns. If a thread requests a later slice first, the
slices before it wait in memory for the threads that will request them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from hotbed.data import arrow_columns as arrow
from hotbed.data.files.criteo import natural_order
from hotbed.data.files.delimited import convert_to_parquet, is_blank, is_delimited
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError
from hotbed.locations import resolve_uri

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid"),
    **dict.fromkeys(("test", "testing", "holdout"), "test"),
}
_PARQUET = (".parquet", ".parq", ".pq")
_FEW_ROWS, _ROWS_PER_BYTE = 1 << 24, 100
"""A row group has at most this many rows, or this many rows per byte. Otherwise its footer is probably wrong."""
_BUFFER_BYTES = 1 << 20
_WAITING = 8
"""Limit of the slices that wait in memory."""

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
Partitions = tuple[tuple[str, pa.Scalar], ...]

_DICTIONARIES = frozenset(("PLAIN_DICTIONARY", "RLE_DICTIONARY"))
"""Encodings that store repeated values once."""


# -- files of row groups -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableFile(ABC):
    """A file of samples that is read in parts as Arrow columns: a Parquet file, or a split of a `Source`."""

    name: str  # path within the dataset, so that moving the whole dataset does not change the name
    shown: str  # name in messages: the path of the file, or of the text file that was converted to this file
    unit: ClassVar[str] = "row group"  # word for a part of the file in messages

    @cached_property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""

    @property
    def may_be_away(self) -> bool:
        """Whether the file is on another machine, which may be unreachable."""
        return False

    @property
    @abstractmethod
    def state(self) -> tuple[object, ...]:
        """Plain values that change when the content of the file changes."""

    @abstractmethod
    def row_groups(self) -> list[RowGroup]:
        """Return the parts with samples."""

    @abstractmethod
    def read(self, row_group: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of a part. Several threads may call this at once."""

    @abstractmethod
    def nbytes(self, row_group: int) -> int:
        """Return the uncompressed size of a part's columns in bytes."""

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read columns of a part in order, at most ``rows`` rows at a time."""
        whole = self.read(row_group, columns)
        for at in range(0, len(whole), rows):
            yield whole.slice(at, rows)

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """For each column of dictionary-encoded texts, return an upper limit of the bytes of its decoded texts."""
        return {}

    def statistics(self, row_group: int, column: str) -> pq.Statistics | None:
        """Return the statistics of a part's column in the file's footer, or None if there are none."""
        return None

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file."""

    file: TableFile
    index: int
    samples: int
    first_row: int  # number of the first row in the file

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read columns. Several threads may call this at once."""
        try:
            return self.file.read(self.index, columns)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error, columns) from error

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read columns in order, at most ``rows`` rows at a time."""
        try:
            yield from self.file.batches(self.index, columns, rows)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error, columns) from error

    def _unreadable(self, error: Exception, columns: Sequence[str]) -> DataError:
        reason = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            return DataError(f"{self}: {self.file.shown} does not exist ({reason})")
        problem = "is damaged or truncated" + ", or its server is unreachable" * self.file.may_be_away
        column = next((name for name in columns if not self._is_readable(name)), None)
        where = str(self) if column is None else f"{self}, column '{column}'"
        return DataError(f"{where}: the file {problem} ({reason}). Write the file again")

    def _is_readable(self, column: str) -> bool:
        try:
            self.file.read(self.index, [column])
        except (pa.ArrowException, OSError):
            return False
        return True

    @property
    def location(self) -> RowLocation:
        """Location of the rows that `read` returns, for messages."""
        return RowLocation(str(self), self.name_row)

    def name_row(self, at: int) -> str:
        """Return the name of row ``at`` of the table that `read` returns."""
        return f"row {at:,} (row {self.first_row + at:,} of the file)"

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Return the smallest and the largest value of a column of integers or booleans.

        Return None if the footer lacks these values, or the column has nulls or floats. Columns of floats must be read,
        because footers do not count NaN.
        """
        found = self.statistics(column)
        return (int(found.min), int(found.max)) if found is not None and isinstance(found.min, int) else None

    def statistics(self, column: str) -> pq.Statistics | None:
        """Return a column's statistics in the footer. Return None if they lack the range, or the column has nulls."""
        found = self.file.statistics(self.index, column)
        complete = found is not None and found.has_min_max and found.has_null_count and found.null_count == 0
        return found if complete else None

    def __str__(self) -> str:
        return f"{self.file.shown}, {self.file.unit} {self.index}"


@dataclass(frozen=True)
class RowsOfGroup(ABC):
    """Some rows of a row group, with the methods of a `RowGroup`."""

    group: RowGroup
    samples: int

    @property
    def file(self) -> Any:
        """The file of the row group."""
        return self.group.file

    @property
    def location(self) -> RowLocation:
        """Location of the rows that `read` returns, for messages."""
        return RowLocation(str(self), self.name_row)

    @abstractmethod
    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read columns of these rows. Several threads may call this at once."""

    @abstractmethod
    def name_row(self, at: int) -> str:
        """Return the name of row ``at`` of the table that `read` returns."""

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Return (x, x) if the footer shows that all values of the row group are the integer x, else None."""
        found = self.group.integer_range(column)
        return found if found is not None and found[0] == found[1] else None

    def __str__(self) -> str:
        return str(self.group)


@dataclass(frozen=True)
class RowSlice(RowsOfGroup):
    """Consecutive rows of a row group."""

    reader: _SliceReader
    index: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read columns of these rows. Several threads may call this at once."""
        return self.reader.read(tuple(columns), self.index)

    def name_row(self, at: int) -> str:
        """Return the name of row ``at`` of the table that `read` returns."""
        return self.group.name_row(self.index * self.reader.rows + at)


def divide_into_slices(group: RowGroup | RowsOfGroup, rows: int) -> Sequence[RowGroup | RowsOfGroup]:
    """Divide a row group into slices of ``rows`` rows.

    A row group with at most ``rows`` rows is returned unchanged. A `RowsOfGroup` of any size is also not divided.
    """
    if group.samples <= rows or isinstance(group, RowsOfGroup):
        return [group]
    reader = _SliceReader(group, rows)
    starts = range(0, group.samples, rows)
    return [RowSlice(group, min(rows, group.samples - at), reader, i) for i, at in enumerate(starts)]


class _SliceReader:
    """Reads the slices of a row group in order. Each selection of columns has its own position."""

    def __init__(self, group: RowGroup, rows: int) -> None:
        self.group, self.rows = group, rows
        self._lock = Lock()
        self._at: dict[tuple[str, ...], _SlicePosition] = {}

    def read(self, columns: tuple[str, ...], index: int) -> pa.Table:
        with self._lock:
            at = self._at.get(columns)
            if at is None or (index < at.next and index not in at.waiting):
                at = self._at[columns] = _SlicePosition(self._slices(columns), 0, {})
            while at.next <= index:
                at.waiting[at.next] = next(at.slices)
                at.next += 1
                if len(at.waiting) > _WAITING:
                    del at.waiting[min(at.waiting)]
            return at.waiting.pop(index)

    def _slices(self, columns: tuple[str, ...]) -> Iterator[pa.Table]:
        parts: list[pa.Table] = []
        for part in self.group.batches(columns, self.rows):
            while (short := self.rows - sum(map(len, parts))) <= len(part):
                yield pa.concat_tables([*parts, part.slice(0, short)])
                parts, part = [], part.slice(short)
            parts.append(part)
        if sum(map(len, parts)):
            yield pa.concat_tables(parts)


@dataclass
class _SlicePosition:
    slices: Iterator[pa.Table]
    next: int
    waiting: dict[int, pa.Table]


# -- Parquet -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParquetFile(TableFile):
    """A Parquet file. Its footer is read once."""

    filesystem: fs.FileSystem
    path: str
    partitions: Partitions = ()  # columns and values of its folders, e.g. of ``day=2024-01-01/``

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The footer, which describes row groups and column types."""
        try:
            with self.filesystem.open_input_file(self.path) as stream:
                found, size = pq.ParquetFile(stream).metadata, stream.size()
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # an error of the file system
                raise
            raise DataError(
                f"{self} is not a Parquet file, or is truncated: {error}. Write the file again. If it is CSV or TSV, "
                "rename it so that it ends in .csv or .tsv (also with .gz or .zst)"
            ) from None
        most = max(_FEW_ROWS, size * _ROWS_PER_BYTE)
        for i in range(found.num_row_groups):
            if not 0 <= (rows := found.row_group(i).num_rows) <= most:
                raise DataError(
                    f"{self}, row group {i}: got {rows:,} rows in {size:,} bytes, expected 0 to {most:,} rows for a "
                    "file of this size. Write the file again, with smaller row groups"
                )
        return found

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns in the file, and of the columns from its folders."""
        stored = self.metadata.schema.to_arrow_schema()
        for name, count in Counter(stored.names).items():
            if count > 1 and self.metadata.num_rows:
                raise DataError(f"{self}: got column '{name}' {count} times, expected unique names. Rename all but one")
        found = pa.schema([field.with_type(arrow.plain_type(field.type)) for field in stored])
        for name, value in self._folders.items():
            found = found.append(pa.field(name, value.type))
        return found

    @property
    def state(self) -> tuple[object, ...]:
        """Path, size and modification time of the file."""
        # The name of a converted file depends on the state of its text file. Its modification time is its last use.
        if self.path != self.shown:
            return self.shown, self.path
        info = self.filesystem.get_file_info(self.path)
        return self.path, info.size, info.mtime_ns

    @property
    def may_be_away(self) -> bool:
        """Whether the file is not on a local disk."""
        return not isinstance(self.filesystem, fs.LocalFileSystem)

    @cached_property
    def leaves(self) -> dict[str, int]:
        """Position of each column in the metadata of a row group, by name. Nested columns are omitted."""
        paths = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
        counts = Counter(paths)  # a column with a dot in its name and a nested column may have the same path
        return {path: i for i, path in enumerate(paths) if counts[path] == 1}

    def row_groups(self) -> list[RowGroup]:
        """Return the row groups with samples."""
        found: list[RowGroup] = []
        row = 0
        for i in range(self.metadata.num_row_groups):
            count = self.metadata.row_group(i).num_rows
            if count:
                found.append(RowGroup(self, i, count, row))
            row += count
        return found

    def read(self, row_group: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of a row group. Several threads may call this, because each call opens the file."""
        with self.filesystem.open_input_file(self.path) as stream:
            opened = pq.ParquetFile(stream, metadata=self.metadata)
            table = opened.read_row_group(row_group, columns=self._stored(columns), use_threads=False)
        return self._with_folders(table, columns, self.metadata.row_group(row_group).num_rows)

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read columns of a row group in order, at most ``rows`` rows at a time."""
        with self.filesystem.open_input_file(self.path) as stream:
            # Without a buffer, or with a pre-filled one, all columns would be read before the first rows.
            opened = pq.ParquetFile(stream, metadata=self.metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            for batch in opened.iter_batches(rows, [row_group], self._stored(columns), use_threads=False):
                yield self._with_folders(pa.Table.from_batches([batch]), columns, batch.num_rows)

    def nbytes(self, row_group: int) -> int:
        """Return the uncompressed size of a row group's columns in bytes."""
        return self.metadata.row_group(row_group).total_byte_size

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """For each column of dictionary-encoded texts, return an upper limit of the bytes of its decoded texts."""
        stored, found = self.metadata.row_group(row_group), dict[str, int]()
        for leaf in (stored.column(i) for i in range(stored.num_columns)):
            names = [n for n in (leaf.path_in_schema, leaf.path_in_schema.partition(".")[0]) if n in columns]
            if names and leaf.physical_type == "BYTE_ARRAY" and _DICTIONARIES & {*leaf.encodings}:
                # No text is larger than all stored texts together.
                found[names[0]] = found.get(names[0], 0) + leaf.num_values * leaf.total_uncompressed_size
        return found

    def statistics(self, row_group: int, column: str) -> pq.Statistics | None:
        """Return the footer's statistics of a column."""
        leaf = self.leaves.get(column)
        return None if leaf is None else self.metadata.row_group(row_group).column(leaf).statistics

    def with_nulls(self, columns: Collection[str]) -> ParquetFile:
        """Return the file with additional columns of nulls. A column that the file already has is kept."""
        return replace(self, partitions=(*self.partitions, *((name, pa.scalar(None)) for name in columns)))

    def is_missing(self, column: str) -> bool:
        """Return whether a column has no value in any row. The column is read if the footer is not sufficient."""
        if column not in self._missing:
            self._missing[column] = all(self._is_missing_in(group, column) for group in self.row_groups())
        return self._missing[column]

    def known_schema(self, columns: Sequence[str]) -> pa.Schema:
        """Return the schema, in which the named columns have type null if they have no values."""
        known = [f.with_type(pa.null()) if f.name in columns and self.is_missing(f.name) else f for f in self.schema]
        return pa.schema(known)

    def _is_missing_in(self, group: RowGroup, column: str) -> bool:
        found = self.statistics(group.index, column)
        if found is not None and (found.has_min_max or (found.has_null_count and found.null_count == group.samples)):
            return not found.has_min_max
        return arrow.has_no_values(group.read([column])[column])

    @cached_property
    def _missing(self) -> dict[str, bool]:
        """Results of `is_missing` by column."""
        return {}

    def _stored(self, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if name not in self._folders]

    def _with_folders(self, table: pa.Table, columns: Sequence[str], rows: int) -> pa.Table:
        """Convert stored columns to plain types, and add columns from folders."""
        table, folders = arrow.to_plain_types(table, str(self)), self._folders
        if not any(name in folders for name in columns):
            return table
        return pa.table({name: pa.repeat(folders[name], rows) if name in folders else table[name] for name in columns})

    @cached_property
    def _folders(self) -> dict[str, pa.Scalar]:
        """Values of the columns that come from folder names like ``day=1``, except columns that the file has."""
        stored = self.metadata.schema.to_arrow_schema().names if self.partitions else ()
        return {name: value for name, value in self.partitions if name not in stored}

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without the footer, because a process that unpickles the file reads the footer again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


# -- finding files -------------------------------------------------------------------------------------------------


def find_parquet(
    path: str | Path, filesystem: fs.FileSystem | None = None, text: Collection[str] = ()
) -> dict[str, list[ParquetFile]]:
    """Return files by split. The key is ``""`` for all files of a folder without splits.

    The path is a file, a folder (searched with its subfolders), or a URI, e.g. ``s3://bucket/folder``. Subfolders
    ``train``, ``valid`` (or ``validation``, ``val``, ``dev``, ``eval``) and ``test`` (or ``holdout``) are splits. If
    files have these words in their names (``train-00000-of-00002.parquet``, ``ratings_test.csv``), each word is a
    split, unless all files have the same word. Folders like ``day=2024-01-01`` are columns, as in Hive.

    Text files with a header (``.csv``, ``.tsv``, also ``.gz`` and ``.zst``) are converted to Parquet once, see
    `hotbed.data.files.delimited`. A column that has integers in one file and text in another file is text in all files.
    Columns named in ``text`` are always text.
    """
    store, root = _resolve(path, filesystem)
    info = store.get_file_info(root)
    if info.is_file:
        return {"": [_file(store, root, root.rstrip("/").split("/")[-1], text=text)]}
    if info.type != fs.FileType.Directory:
        problem = "does not exist" if info.type == fs.FileType.NotFound else "is neither a file nor a folder"
        raise DataError(f"{path} {problem}, expected a Parquet, CSV or TSV file, or a folder of them")
    entries = store.get_file_info(fs.FileSelector(root, recursive=True))
    found = [e.path[len(root) :].strip("/") for e in sorted(entries, key=lambda e: natural_order(e.path)) if e.is_file]
    others = "vocabulary/" if "source.yaml" in found else "\0"  # in a dataset written by `hotbed prepare`
    names = _by_split([name for name in found if is_table(name) and not name.startswith(others)])
    if not names:
        raise DataError(f"{path}: got no files, expected {', '.join(_PARQUET)}, .csv or .tsv (also .gz, .zst)")
    if "" in names and len(names) > 1:
        raise DataError(
            f"{path} has the splits {', '.join(s for s in names if s)}, but file {names[''][0]} is in none of these "
            "splits. Move the file into the folder of a split or out of the dataset, or pass the paths of training and "
            "test data separately (hotbed init PATH --test PATH)"
        )
    blank = {
        e.path[len(root) :].strip("/") for e in entries if e.is_file and is_delimited(e.path) and is_blank(store, e)
    }
    # A split that has only blank files keeps them. It is refused when the first file is read.
    names = {split: [name for name in of if name not in blank] or of for split, of in names.items()}
    partitions, base = _partitions([name for of_split in names.values() for name in of_split]), root.rstrip("/")

    def files(text: Collection[str]) -> dict[str, list[ParquetFile]]:
        return {
            split: [_file(store, f"{base}/{name}", name, partitions[name], text) for name in of_split]
            for split, of_split in names.items()
        }

    found = files(text)
    codes = _text_somewhere(with_rows(file for of_split in found.values() for file in of_split))
    return files({*text, *codes}) if codes else found


def _resolve(path: str | Path, filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, str]:
    root = str(path)
    if filesystem is not None:
        return filesystem, root
    if "://" not in root:
        return fs.LocalFileSystem(), str(Path(path).absolute())
    try:
        return resolve_uri(root)
    except ValueError as error:
        raise DataError(str(error)) from None


def _file(
    store: fs.FileSystem, path: str, name: str, partitions: Partitions = (), text: Collection[str] = ()
) -> ParquetFile:
    file = ParquetFile(filesystem=store, path=path, name=name, shown=path, partitions=partitions)
    if is_delimited(name):
        file = replace(file, filesystem=fs.LocalFileSystem(), path=str(convert_to_parquet(store, path, text)))
    return file


def _text_somewhere(files: Sequence[ParquetFile]) -> set[str]:
    """Return the columns that are integers in a CSV file (e.g. ``12``) and text in a different file (e.g. ``A1``)."""
    fields = (field for file in files if is_delimited(file.shown) for field in file.schema)
    integers = {field.name for field in fields if pa.types.is_integer(field.type)}
    return text_columns(files) & integers if integers else set()


def with_rows(files: Iterable[ParquetFile]) -> list[ParquetFile]:
    """Return the files with rows, because column types of empty files have no meaning. If all are empty, return all."""
    every = list(files)
    return [file for file in every if file.metadata.num_rows] or every


def text_columns(files: Iterable[ParquetFile]) -> set[str]:
    """Return the columns that are text in any of these files."""
    return {field.name for file in files for field in file.schema if arrow.is_text(field.type)}


def refuse_same_files(split: str, of_split: Sequence[ParquetFile], others: Mapping[str, Sequence[ParquetFile]]) -> None:
    """Raise `DataError` if a file is in two splits, because a model would be tested on its training data."""
    splits = {file.shown: name or "train" for name, of_other in others.items() for file in of_other}
    for file in of_split:
        if (other := splits.get(file.shown)) is not None:
            raise DataError(
                f"{file}: got splits '{split}' and '{other}', expected one split. Move the file out of one of them, or "
                f"use different data for {split}"
            )


def is_table(name: str) -> bool:
    """Return whether a file with this name has samples. Hidden files (``.x``, ``_x``) have no samples."""
    hidden = any(part.startswith((".", "_")) for part in name.split("/"))
    return not hidden and (name.lower().endswith(_PARQUET) or is_delimited(name))


def _by_split(names: Sequence[str]) -> dict[str, list[str]]:
    """Group names by split, train first. If no file is in a folder and all have the same split, the split is ``""``."""
    top = [name for name in names if "/" not in name]
    by_first, by_any = ({name: _split_of_file(name, words) for name in top} for words in (1, None))
    # A word within a name is ambiguous, so it counts only if training data have such names (``ratings_train.csv``).
    of_file = by_any if "train" in {*by_any.values()} - {*by_first.values()} else by_first
    if len(top) == len(names) and len({*of_file.values()}) == 1:
        return {"": list(top)}
    by: dict[str, list[str]] = {split: [] for split in ("", "train", "valid", "test")}
    for name in sorted(names, key=lambda n: "/" not in n):  # folders first
        folder = name.partition("/")[0].lower().removeprefix("split=")
        by[of_file[name] if name in of_file else _SPLITS.get(folder, "")].append(name)
    return {split: of_split for split, of_split in by.items() if of_split}


def _split_of_file(name: str, words: int | None) -> str:
    """Return the split that the first ``words`` words of a file name contain, or "" for no or several splits."""
    stem = re.sub(r"(\.(parquet|parq|pq|csv|tsv|gz|zst))+$", "", name.lower())
    found = {_SPLITS[word] for word in [word for word in re.split(r"[^a-z]+", stem) if word][:words] if word in _SPLITS}
    return found.pop() if len(found) == 1 else ""


def _partitions(names: Sequence[str]) -> dict[str, Partitions]:
    """Return the columns from each file's folders, as in Hive. A column of integers without leading zeros is int64."""
    values = {name: _folders(name) for name in names}
    kinds: dict[str, pa.DataType] = {}
    for field in {field for of in values.values() for field in of}:
        known = {value for of in values.values() if (value := of.get(field)) is not None}
        is_number = known and all(re.fullmatch(r"0|-?[1-9]\d{0,17}", value) for value in known)
        kinds[field] = pa.int64() if is_number else pa.string()
    return {
        name: tuple((field, pa.scalar(value).cast(kinds[field])) for field, value in of.items())
        for name, of in values.items()
    }


def _folders(name: str) -> dict[str, str | None]:
    """Return the columns from a file's folders. Column names are not decoded (e.g. ``%20``), unlike in Arrow."""
    pairs = [folder.partition("=") for folder in name.split("/")[:-1]]
    values = {column: unquote(value) for column, equals, value in pairs if equals and column}
    return {column: None if value == _NO_VALUE else value for column, value in values.items()}
