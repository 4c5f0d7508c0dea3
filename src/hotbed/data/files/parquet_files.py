"""Find the files of a dataset by split, on any filesystem of pyarrow, and read their row groups in parts.

Some writers make one row group of a whole file. `in_slices` cuts a row group into slices, so that memory does not grow
with it. A slice is read from the end of the one before it if the same columns are wanted, and otherwise from the start
of the row group. Slices that several threads request out of order wait in memory.
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
from hotbed.data.files.delimited import is_blank, is_delimited, parquet_of
from hotbed.errors import DataError
from hotbed.locations import opened

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid"),
    **dict.fromkeys(("test", "testing", "holdout"), "test"),
}
_PARQUET = (".parquet", ".parq", ".pq")
_FEW_ROWS, _ROWS_PER_BYTE = 1 << 24, 100
"""A row group of more rows than both is no log: its rows are all the same, or its footer lies."""
_BUFFER_BYTES = 1 << 20
_WAITING = 8
"""Slices that are kept for readers that request them later, at most."""

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
Partitions = tuple[tuple[str, pa.Scalar], ...]

_DICTIONARIES = frozenset(("PLAIN_DICTIONARY", "RLE_DICTIONARY"))
"""Encodings that store repeated values once."""


# -- files of row groups -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableFile(ABC):
    """A file of samples that is read as Arrow columns, one part after another: of Parquet, or a split of a `Source`."""

    name: str
    """Its path below the dataset's, which does not change when the whole dataset is moved."""
    shown: str
    """Its name in messages: its path, or that of the text file which it was made from."""
    unit: ClassVar[str] = "row group"
    """Name of a part in messages."""

    @cached_property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""

    @property
    def may_be_away(self) -> bool:
        """Whether it is on another machine, so that it cannot be read while that one does not answer."""
        return False

    @property
    @abstractmethod
    def state(self) -> tuple[object, ...]:
        """Plain values that change when the file does."""

    @abstractmethod
    def row_groups(self) -> list[RowGroup]:
        """List the parts that hold samples."""

    @abstractmethod
    def read(self, row_group: int, columns: Sequence[str]) -> pa.Table:
        """Read some columns of a part; safe from several threads."""

    @abstractmethod
    def nbytes(self, row_group: int) -> int:
        """Return the uncompressed size of a part's columns in bytes."""

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read some columns of a part in order, at most ``rows`` rows at once."""
        whole = self.read(row_group, columns)
        for at in range(0, len(whole), rows):
            yield whole.slice(at, rows)

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """Return columns whose texts are stored once however often they repeat, with the largest size of a text."""
        return {}

    def statistics(self, row_group: int, column: str) -> pq.Statistics | None:
        """Return what the footer contains about a column of a part, if anything."""
        return None

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file, or part of it."""

    file: TableFile
    index: int
    samples: int
    first_row: int
    """Number of its first row in the file."""

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns; safe from several threads."""
        try:
            return self.file.read(self.index, columns)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error, columns) from error

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read some columns in order, at most ``rows`` rows at once."""
        try:
            yield from self.file.batches(self.index, columns, rows)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error, columns) from error

    def _unreadable(self, error: Exception, columns: Sequence[str]) -> DataError:
        said = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            return DataError(f"{self}: {self.file.shown} does not exist, or no longer ({said})")
        damaged = "the file is damaged or cut short"
        if self.file.may_be_away:
            damaged += ", or where it is does not answer"
        column = next((name for name in columns if not self._is_readable(name)), None)
        where = str(self) if column is None else f"{self}, column '{column}'"
        return DataError(f"{where}: cannot be read, {damaged} ({said}); write it again")

    def _is_readable(self, column: str) -> bool:
        try:
            self.file.read(self.index, [column])
        except (pa.ArrowException, OSError):
            return False
        return True

    def place(self, at: int) -> str:
        """Where the row is that `read` gives at this position."""
        return f"row {at:,} (row {self.first_row + at:,} of the file)"

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Smallest and largest value of a column of integers or booleans without nulls, if the footer has them.

        Footers tell nothing of NaN, so a column of floats has to be read.
        """
        found = self.statistics(column)
        return (int(found.min), int(found.max)) if found is not None and isinstance(found.min, int) else None

    def statistics(self, column: str) -> pq.Statistics | None:
        """Return the footer's statistics of a column without nulls; None if they lack the range."""
        found = self.file.statistics(self.index, column)
        complete = found is not None and found.has_min_max and found.has_null_count and found.null_count == 0
        return found if complete else None

    def __str__(self) -> str:
        return f"{self.file.shown}, {self.file.unit} {self.index}"


@dataclass(frozen=True)
class RowsOfGroup:
    """Some rows of a row group, which are read like a `RowGroup`."""

    group: RowGroup

    @property
    def file(self) -> Any:
        """The file of the row group."""
        return self.group.file

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Return the only value of a column of integers without nulls, if the footer proves that there is one."""
        found = self.group.integer_range(column)
        return found if found is not None and found[0] == found[1] else None

    def __str__(self) -> str:
        return str(self.group)


@dataclass(frozen=True)
class RowSlice(RowsOfGroup):
    """Consecutive rows of a row group."""

    reader: _Reader
    index: int
    samples: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns of these rows; safe from several threads."""
        return self.reader.read(tuple(columns), self.index)

    def place(self, at: int) -> str:
        """Where the row is that `read` gives at this position."""
        return self.group.place(self.index * self.reader.rows + at)


def in_slices(group: RowGroup, rows: int) -> list[RowGroup | RowSlice]:
    """Cut a row group into slices of ``rows`` rows; a smaller row group remains as it is."""
    if group.samples <= rows:
        return [group]
    reader = _Reader(group, rows)
    starts = range(0, group.samples, rows)
    return [RowSlice(group, reader, i, min(rows, group.samples - at)) for i, at in enumerate(starts)]


class _Reader:
    """Reads the slices of a row group, and keeps a position for each selection of columns."""

    def __init__(self, group: RowGroup, rows: int) -> None:
        self.group, self.rows = group, rows
        self._lock = Lock()
        self._at: dict[tuple[str, ...], _Position] = {}

    def read(self, columns: tuple[str, ...], index: int) -> pa.Table:
        """Read a slice."""
        with self._lock:
            at = self._at.get(columns)
            if at is None or (index < at.next and index not in at.waiting):
                at = self._at[columns] = _Position(self._slices(columns), 0, {})
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
class _Position:
    slices: Iterator[pa.Table]
    next: int
    waiting: dict[int, pa.Table]


# -- Parquet -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParquetFile(TableFile):
    """One file with its footer, which is read once."""

    filesystem: fs.FileSystem
    path: str
    partitions: Partitions = ()
    """Columns that its folders stand for (``day=2024-01-01/``), with the value in all of its rows."""

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """Row groups and column types; raises `DataError` if the file is not Parquet."""
        try:
            with self.filesystem.open_input_file(self.path) as stream:
                found, size = pq.ParquetFile(stream).metadata, stream.size()
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the file system
                raise
            raise DataError(
                f"{self} is not a Parquet file, or is cut short: {error} (CSV and TSV files end in .csv or .tsv, also "
                "with .gz or .zst)"
            ) from None
        most = max(_FEW_ROWS, size * _ROWS_PER_BYTE)
        for i in range(found.num_row_groups):
            if not 0 <= (rows := found.row_group(i).num_rows) <= most:
                raise DataError(
                    f"{self}, row group {i}: its footer says {rows:,} rows in {size:,} bytes; at most {most:,} are "
                    "read at once, so write it again with smaller row groups"
                )
        return found

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, then of the folders; raises `DataError` if two columns have one name."""
        stored = self.metadata.schema.to_arrow_schema()
        for name, count in Counter(stored.names).items():
            if count > 1 and self.metadata.num_rows:
                raise DataError(f"{self} has several columns named '{name}'; rename all but one")
        found = pa.schema([field.with_type(arrow.plain_type(field.type)) for field in stored])
        for name, value in self._of_folders().items():
            found = found.append(pa.field(name, value.type))
        return found

    @property
    def state(self) -> tuple[object, ...]:
        """Path, size and time of change. The name of a converted file contains the state of its text file."""
        if self.path != self.shown:  # its time says when it was used last
            return self.shown, self.path
        info = self.filesystem.get_file_info(self.path)
        return self.path, info.size, info.mtime_ns

    @property
    def may_be_away(self) -> bool:
        """Whether it is not on a local disk."""
        return not isinstance(self.filesystem, fs.LocalFileSystem)

    @cached_property
    def leaves(self) -> dict[str, int]:
        """Position of the column of each name in the row groups' descriptions; a nested one has none."""
        paths = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
        counts = Counter(paths)  # a name with a dot and a nested column may have one path
        return {path: i for i, path in enumerate(paths) if counts[path] == 1}

    def row_groups(self) -> list[RowGroup]:
        """List the row groups that hold samples."""
        found: list[RowGroup] = []
        row = 0
        for i in range(self.metadata.num_row_groups):
            count = self.metadata.row_group(i).num_rows
            if count:
                found.append(RowGroup(self, i, count, row))
            row += count
        return found

    def read(self, row_group: int, columns: Sequence[str]) -> pa.Table:
        """Read some columns of a row group; safe from several threads, each call opens the file for itself."""
        with self.filesystem.open_input_file(self.path) as stream:
            opened = pq.ParquetFile(stream, metadata=self.metadata)
            table = opened.read_row_group(row_group, columns=self._stored(columns), use_threads=False)
        rows = self.metadata.row_group(row_group).num_rows
        return self._with_folders(arrow.to_plain_types(table, str(self)), columns, rows)

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read some columns of a row group in order, at most ``rows`` rows at once."""
        with self.filesystem.open_input_file(self.path) as stream:
            # Without a buffer, or with one that is filled beforehand, all columns would be read before the first rows.
            opened = pq.ParquetFile(stream, metadata=self.metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            for batch in opened.iter_batches(rows, [row_group], self._stored(columns), use_threads=False):
                table = arrow.to_plain_types(pa.Table.from_batches([batch]), str(self))
                yield self._with_folders(table, columns, batch.num_rows)

    def nbytes(self, row_group: int) -> int:
        """Bytes of a row group's columns when they are not compressed."""
        return self.metadata.row_group(row_group).total_byte_size

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """Return columns with dictionary-encoded texts, with an upper limit of the bytes of a text."""
        stored, found = self.metadata.row_group(row_group), dict[str, int]()
        for leaf in (stored.column(i) for i in range(stored.num_columns)):
            names = [n for n in (leaf.path_in_schema, leaf.path_in_schema.partition(".")[0]) if n in columns]
            if names and leaf.physical_type == "BYTE_ARRAY" and _DICTIONARIES & {*leaf.encodings}:
                # No value is longer than all that is stored.
                found[names[0]] = found.get(names[0], 0) + leaf.num_values * leaf.total_uncompressed_size
        return found

    def statistics(self, row_group: int, column: str) -> pq.Statistics | None:
        """Return the footer's statistics of a column."""
        leaf = self.leaves.get(column)
        return None if leaf is None else self.metadata.row_group(row_group).column(leaf).statistics

    def with_nulls(self, columns: Collection[str]) -> ParquetFile:
        """Return the file with columns of these names that are null in all rows, unless it has them itself."""
        return replace(self, partitions=(*self.partitions, *((name, pa.scalar(None)) for name in columns)))

    def is_missing(self, column: str) -> bool:
        """Return whether no row has a value of a column. The column is read if the footer does not contain that."""
        if column not in self._missing:
            self._missing[column] = all(self._is_missing_in(group, column) for group in self.row_groups())
        return self._missing[column]

    def known_schema(self, columns: Sequence[str]) -> pa.Schema:
        """Return the schema, with the type null for those of ``columns`` that have no values."""
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
        folders = self._of_folders()
        return [name for name in columns if name not in folders]

    def _with_folders(self, table: pa.Table, columns: Sequence[str], rows: int) -> pa.Table:
        folders = self._of_folders()
        if not any(name in folders for name in columns):
            return table
        return pa.table({name: pa.repeat(folders[name], rows) if name in folders else table[name] for name in columns})

    def _of_folders(self) -> dict[str, pa.Scalar]:
        """Columns of the folders that the file itself does not have."""
        stored = self.metadata.schema.to_arrow_schema().names if self.partitions else ()
        return {name: value for name, value in self.partitions if name not in stored}

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without the footer, which other processes read themselves."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


# -- finding files -------------------------------------------------------------------------------------------------


def find_parquet(
    path: str | Path, filesystem: fs.FileSystem | None = None, text: Collection[str] = ()
) -> dict[str, list[ParquetFile]]:
    """List files by split; where a folder has no splits, all files are under ``""``.

    The path is a file, a folder (searched with its subfolders), or a URI such as ``s3://bucket/folder``. Subfolders
    ``train``, ``valid`` (or ``validation``, ``val``, ``dev``, ``eval``) and ``test`` (or ``holdout``) are splits, and
    so are files with such a word in their names (``train-00000-of-00002.parquet``, ``ratings_test.csv``), where there
    are files of more than one split. Folders like ``day=2024-01-01`` are columns, as in Hive.

    Files of text with a header (``.csv``, ``.tsv``, also ``.gz`` and ``.zst``) are converted to Parquet, once, see
    `hotbed.data.files.delimited`. A column that is integers in one of them and text in another file is text in all,
    and so
    are the columns ``text``.
    """
    store, root = _located(path, filesystem)
    info = store.get_file_info(root)
    if info.is_file:
        return {"": [_file(store, root, root.rstrip("/").split("/")[-1], text=text)]}
    if info.type != fs.FileType.Directory:
        problem = "does not exist" if info.type == fs.FileType.NotFound else "is neither a file nor a folder"
        raise DataError(f"{path} {problem}; give a Parquet, CSV or TSV file, or a folder of them")
    entries = store.get_file_info(fs.FileSelector(root, recursive=True))
    found = [e.path[len(root) :].strip("/") for e in sorted(entries, key=_in_number_order) if e.is_file]
    others = "vocabulary/" if "source.yaml" in found else "\0"  # of a dataset that `hotbed prepare` made
    names = _by_split([name for name in found if is_table(name) and not name.startswith(others)])
    if not names:
        raise DataError(f"{path} has no file that ends in {', '.join(_PARQUET)}, .csv or .tsv (also .gz, .zst)")
    if "" in names and len(names) > 1:
        raise DataError(
            f"{path} has splits ({', '.join(s for s in names if s)}) and also {names[''][0]}, which is of none; move "
            "it into the folder of one or elsewhere, or give the path of the file to train on, and that of the test "
            "data by itself (hotbed init PATH --test PATH)"
        )
    blank = {
        e.path[len(root) :].strip("/") for e in entries if e.is_file and is_delimited(e.path) and is_blank(store, e)
    }
    # A split of nothing but blank files is refused when the first one is read.
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


def _located(path: str | Path, filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, str]:
    root = str(path)
    if filesystem is not None:
        return filesystem, root
    if "://" not in root:
        return fs.LocalFileSystem(), str(Path(path).absolute())
    try:
        return opened(root)
    except ValueError as error:
        raise DataError(str(error)) from None


def _file(
    store: fs.FileSystem, path: str, name: str, partitions: Partitions = (), text: Collection[str] = ()
) -> ParquetFile:
    file = ParquetFile(filesystem=store, path=path, name=name, shown=path, partitions=partitions)
    if is_delimited(name):
        file = replace(file, filesystem=fs.LocalFileSystem(), path=str(parquet_of(store, path, text)))
    return file


def _text_somewhere(files: Sequence[ParquetFile]) -> set[str]:
    """Columns that are integers in a file of CSV by its own rows (``12``), and text in another file (``A1``)."""
    delimited = [file.schema for file in files if is_delimited(file.shown)]
    if not delimited:
        return set()
    integers = {field.name for schema in delimited for field in schema if pa.types.is_integer(field.type)}
    return text_columns(files) & integers


def with_rows(files: Iterable[ParquetFile]) -> list[ParquetFile]:
    """Return the files that have rows, or all files if none has; columns and types of empty files mean nothing."""
    every = list(files)
    return [file for file in every if file.metadata.num_rows] or every


def text_columns(files: Iterable[ParquetFile]) -> set[str]:
    """Columns that are text in one of these files."""
    return {field.name for file in files for field in file.schema if arrow.is_text(field.type)}


def refuse_same_files(split: str, of_split: Sequence[ParquetFile], others: Mapping[str, Sequence[ParquetFile]]) -> None:
    """Raise `DataError` if a file of a split is one of another split, too: a model would be tested on what it saw."""
    splits = {file.shown: name or "train" for name, of_other in others.items() for file in of_other}
    for file in of_split:
        if (other := splits.get(file.shown)) is not None:
            raise DataError(
                f"{file} would be in the splits '{split}' and '{other}'; move it elsewhere, or name "
                f"other data for '{split}'"
            )


def _in_number_order(entry: fs.FileInfo) -> list[int | str]:
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", entry.path)]


def is_table(name: str) -> bool:
    """Whether a file of this name is one of samples, unless it is hidden."""
    hidden = any(part.startswith((".", "_")) for part in name.split("/"))
    return not hidden and (name.lower().endswith(_PARQUET) or is_delimited(name))


def _by_split(names: Sequence[str]) -> dict[str, list[str]]:
    """Group names by split, train first. All are under ``""`` if files outside of folders are of one split."""
    top = [name for name in names if "/" not in name]
    ways = {name: (_split_of_file(name, 1), _split_of_file(name, None)) for name in top}
    # A word inside a name says little by itself, but beside train data that is called so, too, it does.
    firsts, anywhere = ({way[i] for way in ways.values()} for i in (0, 1))
    anywhere = "train" in anywhere and "train" not in firsts
    of_file = {name: way[anywhere] for name, way in ways.items()}
    if len(top) == len(names) and len({*of_file.values()}) == 1:
        return {"": list(top)}
    by: dict[str, list[str]] = {split: [] for split in ("", "train", "valid", "test")}
    for name in sorted(names, key=lambda n: "/" not in n):  # folders first
        folder = name.partition("/")[0].lower().removeprefix("split=")
        by[of_file[name] if name in of_file else _SPLITS.get(folder, "")].append(name)
    return {split: of_split for split, of_split in by.items() if of_split}


def _split_of_file(name: str, words: int | None) -> str:
    """The split that one of the first words of a file's name stands for; none where they stand for several."""
    stem = re.sub(r"(\.(parquet|parq|pq|csv|tsv|gz|zst))+$", "", name.lower())
    found = {_SPLITS[word] for word in [word for word in re.split(r"[^a-z]+", stem) if word][:words] if word in _SPLITS}
    return found.pop() if len(found) == 1 else ""


def _partitions(names: Sequence[str]) -> dict[str, Partitions]:
    """Return the columns that the folders of each file stand for, as in Hive.

    They are integers if all values are integers that are written as such (``2``, not ``02``), else text.
    """
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
    """Return the columns that the folders of a file stand for; Arrow would decode ``%20`` in their names, too."""
    pairs = [folder.partition("=") for folder in name.split("/")[:-1]]
    values = {column: unquote(value) for column, equals, value in pairs if equals and column}
    return {column: None if value == _NO_VALUE else value for column, value in values.items()}
