# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false
"""Read samples from any Parquet file or folder, without a preparation step.

First files and their row groups are found, on any filesystem that pyarrow knows (`find_parquet`); then `ParquetSource`
serves each row group as a chunk of a split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch import Tensor

from hotbed.batch import Batch
from hotbed.data import arrow
from hotbed.data.arrow import Ids
from hotbed.data.columns import Label
from hotbed.data.labels import check_label, read_labels, read_weights, refuse_null
from hotbed.data.numericals import read_numericals
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.files import opened
from hotbed.jagged import Jagged

# pyarrow ships no types.


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


# pyarrow ships no types.


_LABEL_READERS = 4


class ParquetSource(Source):
    """Samples of a Parquet file or folder; a chunk is a row group.

    Sparse columns are integers, booleans, strings, or lists of these (multi-hot). By default a value is hashed to one
    of the rows 1 … rows − 1 (see `hotbed.data.hashing` for the function, which never changes), and null is row 0. A
    null list is an empty bag, a null numerical is 0 (if it is scaled, after that; what `Numerical.missing` says, if the
    model normalizes it), a null label, weight or group is an error.

    Parameters
    ----------
    path
        File, folder or URI. A folder with subfolders or files ``train``, ``valid``, ``test`` has these splits (see
        `find_parquet`).
    schema
        Which columns are what, as a `Schema` or its dict form. See `draft_schema` for a first draft.
    ids
        ``"hash"`` hashes values to rows; ``"raw"`` takes integers as rows, and leaves the check that they are below
        ``rows`` to the embedding.
    valid_fraction, test_fraction
        Where there are no such splits: share of the samples in these splits, the last ones, cut between row groups.
    filesystem
        A `pyarrow.fs.FileSystem` that has the path; default: local, or what the URI says.

    Raises
    ------
    DataError
        If there is no such path, a file is not Parquet, or a column is missing.
    SpecError
        If a column has a type that does not fit its role, or the fractions leave a split without a row group.
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema | Mapping[str, object],
        *,
        ids: Ids = "hash",
        valid_fraction: float = 0.0,
        test_fraction: float = 0.0,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        if ids not in get_args(Ids):
            raise SpecError(f"ids is {ids!r}, must be one of {', '.join(get_args(Ids))}")
        self.ids: Ids = ids
        files = find_parquet(path, filesystem)
        for file in (f for of_split in files.values() for f in of_split):
            self._check_file(file)
        groups = {split: [g for f in of_split for g in f.row_groups()] for split, of_split in files.items()}
        if "" in groups:
            groups = _by_fractions(str(path), groups[""], valid_fraction, test_fraction)
        elif valid_fraction or test_fraction:
            raise SpecError(f"{path} has the splits {', '.join(groups)}; leave valid and test_fraction at 0")
        self._groups = groups
        self.splits = tuple(groups)

    def column_types(self) -> dict[str, str]:
        """Type of every column of the files, also of those that the schema does not name."""
        fields = next(iter(self._groups.values()))[0].file.schema
        return {field.name: str(field.type) for field in fields}

    def id_kinds(self) -> dict[str, str]:
        """By sparse column whether its values are integers or text; empty where integers are rows."""
        if self.ids == "raw":
            return {}
        files = [group.file for groups in self._groups.values() for group in groups]
        if not files:
            return {}
        return {c.name: arrow.kind_of_ids(files[0].schema.field(c.name).type) for c in self.schema.sparse}

    def _chunks(self, split: str) -> Sequence[int]:
        return [g.samples for g in self._groups[split]]

    def _read_numericals(self, split: str, i: int) -> Tensor | None:
        group = self._groups[split][i]
        return _dense(group.read(list(self.schema.dense)), self.schema, group)

    def _read_columns(self, split: str, i: int, names: Sequence[str]) -> pa.Table:
        return self._groups[split][i].read(names)

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        mapped = {label.column: label for label in self.schema.positives}

        def ranges(group: RowGroup) -> list[tuple[float, float]]:
            return [_label_range(group, name, mapped.get(name)) for name in self.schema.labels]

        with ThreadPoolExecutor(_LABEL_READERS) as pool:
            by_column = zip(*pool.map(ranges, self._groups[split]), strict=True)
            spans = [(min(low for low, _ in column), max(high for _, high in column)) for column in by_column]
        return dict(zip(self.schema.labels, spans, strict=False))

    def _read(self, split: str, i: int) -> Batch:
        group = self._groups[split][i]
        s, where = self.schema, str(group)
        names = [c.name for c in s.sparse] + [*s.dense, *s.labels, *(name for name in (s.weight, s.group) if name)]
        table = group.read(list(dict.fromkeys(names)))
        values: list[arrow.Array] = []
        offsets: list[arrow.Array] = []
        for column in s.sparse:
            rows, lengths = arrow.bags(table[column.name].combine_chunks(), column, self.ids, where)
            values.append(rows)
            if lengths is not None:
                offsets.append(np.concatenate([[0], np.cumsum(lengths)]))
        # Joined by NumPy: torch.cat starts threads, which fight with those of the training step.
        sparse = Jagged(
            [c.name for c in s.sparse],
            torch.from_numpy(np.concatenate(values)),
            batch_size=group.samples,
            fixed=[c.ids for c in s.sparse],
            offsets=torch.from_numpy(np.stack(offsets)) if offsets else None,
        )
        mapped = {label.column: label for label in s.positives}
        labels = [read_labels(table[name], name, mapped.get(name), where, group.first_row) for name in s.labels]
        return Batch(
            sparse=sparse,
            dense=_dense(table, s, group),
            labels=torch.from_numpy(np.stack(labels, axis=1)) if labels else None,
            weights=torch.from_numpy(read_weights(table[s.weight], s.weight, where)) if s.weight else None,
            extra={s.group: _groups_of(table, s.group, where)} if s.group else {},
        )

    def _check_file(self, file: ParquetFile) -> None:
        s = self.schema
        numeric = [*s.dense, *([s.weight] if s.weight else [])]
        for name in [*(c.name for c in s.sparse), *numeric, *s.labels, *([s.group] if s.group else [])]:
            if name not in file.schema.names:
                known = file.schema.names
                raise DataError(
                    f"{file.path} has no column '{name}'; it has {', '.join(known)}{did_you_mean(name, known)}"
                )
        for column in s.sparse:
            arrow.check_sparse(column, file.schema.field(column.name).type, self.ids)
        for name in numeric:
            kind = file.schema.field(name).type
            if not arrow.is_number(kind):
                raise SpecError(f"column '{name}' is {kind}, must be numbers to be a numerical or weight")
        mapped = {label.column: label for label in s.positives}
        for name in s.labels:
            check_label(name, file.schema.field(name).type, mapped.get(name))
        if s.group and not (arrow.is_whole(kind := file.schema.field(s.group).type) or arrow.is_text(kind)):
            raise SpecError(f"group column '{s.group}' is {kind}, must be integers or strings")


def _dense(table: pa.Table, schema: Schema, group: RowGroup) -> Tensor | None:
    if not schema.dense:
        return None
    return torch.from_numpy(read_numericals(table, schema, str(group), group.first_row))


def _label_range(group: RowGroup, name: str, label: Label | None) -> tuple[float, float]:
    """Smallest and largest label of a row group; a `DataError` names the first that is not from 0 to 1."""
    found = None if label else group.integer_range(name)
    if found is not None and found[0] >= 0 and found[1] <= 1:
        return found
    labels = read_labels(group.read([name])[name], name, label, str(group), group.first_row, check=True)
    return float(labels.min()), float(labels.max())


def _groups_of(table: pa.Table, name: str, where: str) -> Tensor:
    """Group keys ``[n]`` int64: integers as they are, strings hashed."""
    refuse_null(table[name], name, where)
    values = table[name].combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if arrow.is_text(values.type):
        return torch.from_numpy(arrow.hashes(values).view(np.int64))
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).astype(np.int64))


def _by_fractions(path: str, groups: list[RowGroup], valid: float, test: float) -> dict[str, list[RowGroup]]:
    """Cut row groups in order into train, valid and test, at the boundaries nearest to the fractions."""
    if not (0 <= valid < 1 and 0 <= test < 1 and valid + test < 1):
        raise SpecError(f"valid_fraction {valid} and test_fraction {test} must be at least 0 and below 1 together")
    if not groups:
        raise DataError(f"{path} has no rows")
    ends = np.cumsum([0, *(g.samples for g in groups)])
    total = int(ends[-1])
    cuts = [0, *(int(np.abs(ends - total * (1 - f)).argmin()) for f in (valid + test, test)), len(groups)]
    splits: dict[str, list[RowGroup]] = {}
    for split, fraction, start, stop in zip(("train", "valid", "test"), (1, valid, test), cuts, cuts[1:], strict=False):
        if fraction:
            splits[split] = groups[start:stop]
            if start >= stop:
                raise SpecError(
                    f"{path} has {len(groups):,} row groups, too few for a {split} split with valid_fraction {valid} "
                    f"and test_fraction {test}; write it with a smaller row_group_size, or use split folders"
                )
    return splits
