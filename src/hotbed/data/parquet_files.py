"""Finding Parquet files and their row groups, on any filesystem that pyarrow knows."""

# pyarrow ships no types.
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from hotbed.errors import DataError
from hotbed.files import opened

_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}
_SPLIT_OF_FILE = re.compile(rf"({'|'.join(_SPLITS)})(?:[-_.].*|\d.*)?\.\w+", re.IGNORECASE)


@dataclass(frozen=True)
class ParquetFile:
    """One file with its footer, which is read once."""

    filesystem: fs.FileSystem
    path: str

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """Row groups and column types; raises `DataError` if the file is not Parquet."""
        try:
            with self.filesystem.open_input_file(self.path) as stream:
                return pq.ParquetFile(stream).metadata
        except pa.ArrowInvalid as error:
            raise DataError(f"{self.path} is not a Parquet file, or is cut short: {error}") from None

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        return self.metadata.schema.to_arrow_schema()

    @cached_property
    def leaves(self) -> dict[str, int]:
        """Position of the column of each name in the row groups' descriptions; a nested one has none."""
        paths = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
        counts = Counter(paths)  # a name with a dot and a nested column may have one path
        return {path: i for i, path in enumerate(paths) if counts[path] == 1}

    def row_groups(self) -> list[RowGroup]:
        """List the row groups that hold samples."""
        counts = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
        return [RowGroup(self, i, n) for i, n in enumerate(counts) if n]


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file."""

    file: ParquetFile
    index: int
    samples: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns; safe from several threads, each call opens the file for itself."""
        try:
            with self.file.filesystem.open_input_file(self.file.path) as stream:
                opened = pq.ParquetFile(stream, metadata=self.file.metadata)
                return opened.read_row_group(self.index, columns=list(columns), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{self}: cannot be read, the file is damaged or cut short ({error})") from None

    @property
    def first_row(self) -> int:
        """Number of its first row in the file."""
        return sum(self.file.metadata.row_group(i).num_rows for i in range(self.index))

    def integer_range(self, column: str) -> tuple[int, int] | None:
        """Smallest and largest value of a column of integers or booleans without nulls, if the footer has them.

        Footers tell nothing of NaN, so a column of floats has to be read.
        """
        leaf = self.file.leaves.get(column)
        found = None if leaf is None else self.file.metadata.row_group(self.index).column(leaf).statistics
        if found is None or not (found.has_min_max and found.has_null_count and found.null_count == 0):
            return None
        return (int(found.min), int(found.max)) if isinstance(found.min, int) else None

    def __str__(self) -> str:
        return f"{self.file.path}, row group {self.index}"


def find_parquet(path: str | Path, filesystem: fs.FileSystem | None = None) -> dict[str, list[ParquetFile]]:
    """List Parquet files by split; where a folder has no splits, all files are under ``""``.

    Parameters
    ----------
    path
        A file, a folder (searched with its subfolders), or a URI such as ``s3://bucket/folder``. Subfolders ``train``,
        ``valid`` (or ``validation``, ``val``) and ``test`` are splits, and so are files of such names, also with a
        number (``train-00000-of-00002.parquet``), where there are files of more than one split.
    filesystem
        Where the path is; default: local, or what the URI says.

    Raises
    ------
    DataError
        If there is no such path, or no Parquet file in it.
    """
    root = str(path)
    store = filesystem
    if store is None and "://" in root:
        try:
            store, root = opened(root)
        except ValueError as error:
            raise DataError(str(error)) from None
    elif store is None:
        store, root = fs.LocalFileSystem(), str(Path(path).absolute())
    info = store.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise DataError(f"{path} does not exist; give a Parquet file or a folder of them")
    if info.is_file:
        return {"": [ParquetFile(store, root)]}
    folders: dict[str, list[ParquetFile]] = {}
    files: dict[str, list[ParquetFile]] = {}
    entries = store.get_file_info(fs.FileSelector(root, recursive=True))
    for entry in sorted(entries, key=lambda e: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", e.path)]):
        parts = entry.path[len(root) :].strip("/").split("/")
        hidden = any(p.startswith((".", "_")) for p in parts)
        if entry.is_file and not hidden and entry.path.endswith((".parquet", ".parq", ".pq")):
            file = ParquetFile(store, entry.path)
            if len(parts) > 1:
                folders.setdefault(_SPLITS.get(parts[0].lower(), ""), []).append(file)
            else:
                named = _SPLIT_OF_FILE.fullmatch(parts[0])
                files.setdefault(_SPLITS[named[1].lower()] if named else "", []).append(file)
    if len(files) == 1 and not folders:  # files whose names are alike are no splits
        files = {"": files.popitem()[1]}
    found = {
        split: folders.get(split, []) + files.get(split, [])
        for split in ("", "train", "valid", "test")
        if split in folders or split in files
    }
    if not found:
        raise DataError(f"{path} has no file that ends in .parquet, .parq or .pq")
    if "" in found and len(found) > 1:
        raise DataError(
            f"{path} has splits ({', '.join(s for s in found if s)}) and also {found[''][0].path}, which is of none; "
            f"move it into the folder of one, or give the path of one split"
        )
    return found
