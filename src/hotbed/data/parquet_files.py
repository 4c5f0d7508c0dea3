"""Find the files of a dataset by split, on any filesystem that pyarrow knows, and read their row groups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from hotbed.data import arrow
from hotbed.data.delimited import is_blank, is_delimited, parquet_of
from hotbed.data.row_groups import RowGroup
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
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

Partitions = tuple[tuple[str, pa.Scalar], ...]

_DICTIONARIES = frozenset(("PLAIN_DICTIONARY", "RLE_DICTIONARY"))
"""Encodings by which repeated values are stored once."""


@dataclass(frozen=True)
class ParquetFile:
    """One file with its footer, which is read once; a `TableFile`."""

    filesystem: fs.FileSystem
    path: str
    name: str
    """Its path below the dataset's, which does not change when all of it is moved."""
    shown: str
    """What messages call it: its path, or that of the text file which it was made from."""
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
        """Names and types of the columns, those of the folders last; raises `DataError` if two have one name."""
        stored = self.metadata.schema.to_arrow_schema()
        for name, count in Counter(stored.names).items():
            if count > 1 and self.metadata.num_rows:
                raise DataError(f"{self} has several columns named '{name}'; rename all but one")
        found = pa.schema([field.with_type(arrow.plain_type(field.type)) for field in stored])
        for name, value in self._of_folders().items():
            found = found.append(pa.field(name, value.type))
        return found

    @property
    def unit(self) -> str:
        """A row group."""
        return "row group"

    @property
    def state(self) -> tuple[object, ...]:
        """Path, size and time of change; of one that was converted its name says the state of the text."""
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

    def read(self, row_group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read some columns of a row group; safe from several threads, each call opens the file for itself."""
        with self.filesystem.open_input_file(self.path) as stream:
            opened = pq.ParquetFile(stream, metadata=self.metadata)
            table = opened.read_row_group(row_group, columns=self._stored(columns), use_threads=False)
        return self._with_folders(arrow.plain(table, str(self)), columns, rows)

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Read some columns of a row group in order, at most so many rows at once."""
        with self.filesystem.open_input_file(self.path) as stream:
            # Without a buffer, or with one that is filled beforehand, all columns would be read before the first rows.
            opened = pq.ParquetFile(stream, metadata=self.metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            for batch in opened.iter_batches(rows, [row_group], self._stored(columns), use_threads=False):
                table = arrow.plain(pa.Table.from_batches([batch]), str(self))
                yield self._with_folders(table, columns, batch.num_rows)

    def nbytes(self, row_group: int) -> int:
        """Bytes of a row group's columns when they are not compressed."""
        return self.metadata.row_group(row_group).total_byte_size

    def repeated_texts(self, row_group: int, columns: Sequence[str]) -> dict[str, int]:
        """Name those of the columns whose texts are stored once however often they repeat, with their bytes at most."""
        stored, found = self.metadata.row_group(row_group), dict[str, int]()
        for leaf in (stored.column(i) for i in range(stored.num_columns)):
            names = [n for n in (leaf.path_in_schema, leaf.path_in_schema.partition(".")[0]) if n in columns]
            if names and leaf.physical_type == "BYTE_ARRAY" and _DICTIONARIES & {*leaf.encodings}:
                # No value is longer than all that is stored.
                found[names[0]] = found.get(names[0], 0) + leaf.num_values * leaf.total_uncompressed_size
        return found

    def statistics(self, row_group: int, column: str) -> pq.Statistics | None:
        """What the footer says of a column."""
        leaf = self.leaves.get(column)
        return None if leaf is None else self.metadata.row_group(row_group).column(leaf).statistics

    def with_nulls(self, columns: Collection[str]) -> ParquetFile:
        """Return the file with columns of these names that are null in all rows, unless it has them itself."""
        return replace(self, partitions=(*self.partitions, *((name, pa.scalar(None)) for name in columns)))

    def is_missing(self, column: str) -> bool:
        """Whether no row has a value of a column; it is read where the footer does not say so."""
        if column not in self._missing:
            self._missing[column] = all(self._is_missing_in(group, column) for group in self.row_groups())
        return self._missing[column]

    def known_schema(self, columns: Sequence[str]) -> pa.Schema:
        """The schema, in which those of these columns have the type null that have no values."""
        known = [f.with_type(pa.null()) if f.name in columns and self.is_missing(f.name) else f for f in self.schema]
        return pa.schema(known)

    def _is_missing_in(self, group: RowGroup, column: str) -> bool:
        found = self.statistics(group.index, column)
        if found is not None and (found.has_min_max or (found.has_null_count and found.null_count == group.samples)):
            return not found.has_min_max
        return arrow.has_no_values(group.read([column])[column])

    @cached_property
    def _missing(self) -> dict[str, bool]:
        """What `is_missing` has found."""
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
        """What is sent to other processes, which read the footer themselves."""
        return {name: getattr(self, name) for name in ("filesystem", "path", "name", "shown", "partitions")}

    def __str__(self) -> str:
        return self.shown


def find_parquet(
    path: str | Path, filesystem: fs.FileSystem | None = None, text: Collection[str] = ()
) -> dict[str, list[ParquetFile]]:
    """List files by split; where a folder has no splits, all files are under ``""``.

    The path is a file, a folder (searched with its subfolders), or a URI such as ``s3://bucket/folder``. Subfolders
    ``train``, ``valid`` (or ``validation``, ``val``, ``dev``, ``eval``) and ``test`` (or ``holdout``) are splits, and
    so are files with such a word in their names (``train-00000-of-00002.parquet``, ``ratings_test.csv``), where there
    are files of more than one split. Folders like ``day=2024-01-01`` are columns, as in Hive.

    Files of text with a header (``.csv``, ``.tsv``, also ``.gz`` and ``.zst``) are converted to Parquet, once, see
    `hotbed.data.delimited`. A column that is integers in one of them and text in another file is text in all, and so
    are the columns ``text``.
    """
    store, root = _located(path, filesystem)
    info = store.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise DataError(f"{path} does not exist; give a Parquet, CSV or TSV file, or a folder of them")
    if info.is_file:
        return {"": [_file(store, root, root.rstrip("/").split("/")[-1], text=text)]}
    if info.type != fs.FileType.Directory:
        raise DataError(f"{path} is neither a file nor a folder; give a Parquet, CSV or TSV file, or a folder of them")
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
    numbers = _numbers([name for of_split in names.values() for name in of_split])
    base = root.rstrip("/")

    def files(text: Collection[str]) -> dict[str, list[ParquetFile]]:
        return {
            split: [_file(store, f"{base}/{name}", name, _partitions(name, numbers), text) for name in of_split]
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
    file = ParquetFile(store, path, name, path, partitions)
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
    """Names by split, train first; all are under ``""`` where those of no folder are of one split."""
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


def _partitions(name: str, numbers: Collection[str]) -> Partitions:
    """Columns that the folders of a file stand for; of ``numbers`` all values are integers."""
    kinds = {column: pa.int64() if column in numbers else pa.string() for column in _folders(name)}
    return tuple((column, pa.scalar(value).cast(kinds[column])) for column, value in _folders(name).items())


def _folders(name: str) -> dict[str, str | None]:
    pairs = [folder.partition("=") for folder in name.split("/")[:-1]]
    values = {column: unquote(value) for column, equals, value in pairs if equals and column}
    return {column: None if value == _NO_VALUE else value for column, value in values.items()}


def _numbers(names: Sequence[str]) -> set[str]:
    """Columns of folders whose values are all integers that are written as such (``2``, not ``02``)."""
    values: dict[str, set[str]] = {}
    for column, value in (pair for name in names for pair in _folders(name).items()):
        values.setdefault(column, set()).update([] if value is None else [value])
    integer = re.compile(r"0|-?[1-9]\d{0,17}")
    return {column for column, of in values.items() if of and all(integer.fullmatch(value) for value in of)}
