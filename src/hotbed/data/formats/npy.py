"""Read samples of NumPy arrays, day by day, where they are: the layout of TorchRec's and MLPerf's scripts.

::

    day_0_dense.npy               float32        [N, I]
    day_0_labels.npy              int32          [N, T]
    day_0_sparse.npy              int32, int64   [N, F]         one id per feature, or
    day_0_sparse_multi_hot.npz    int32          [N, ids] each  a member "0", "1", … per feature, not compressed

A day's name may be any. Rows are read where they are, by position: a file that is cut short meanwhile is an error that
names it, where a map into memory would end the process.
"""

from __future__ import annotations

import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.data.columns import SparseColumn
from hotbed.data.row_location import RowLocation, find_label_ranges
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.jagged import Jagged
from hotbed.locations import location

_PART = re.compile(r"(.+)_(dense|labels|sparse|sparse_multi_hot)\.np[yz]")
_KINDS = {"dense": "fiu", "labels": "fiub", "sparse": "iu"}
_WANTED = {"dense": "numbers", "labels": "numbers", "sparse": "integers"}
_MOST_COLUMNS = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class StoredArray:
    """An array ``[rows]`` or ``[rows, columns]`` in a file."""

    path: Path
    member: str  # name of the array in a file of several
    offset: int  # first byte of the values
    rows: int
    columns: int  # 1 for an array ``[N]``
    dtype: np.dtype[Any]
    by_column: bool  # Fortran order

    @property
    def end(self) -> int:
        """Byte after its last value."""
        return self.offset + self.rows * self.columns * self.dtype.itemsize

    def read(self, start: int, n: int) -> NDArray[Any]:
        """Read rows ``[n, K]`` from a position on; safe from several threads."""
        with self.path.open("rb", buffering=0) as stream:
            if not self.by_column:
                out = np.empty((n, self.columns), dtype=self.dtype)
                self._fill(stream, self.offset + start * self.columns * self.dtype.itemsize, out)
                return out
            out = np.empty((self.columns, n), dtype=self.dtype)
            for k, column in enumerate(out):
                self._fill(stream, self.offset + (k * self.rows + start) * self.dtype.itemsize, column)
            return out.T

    def _fill(self, stream: BinaryIO, at: int, out: NDArray[Any]) -> None:
        stream.seek(at)
        view = out.reshape(-1).view(np.uint8).data
        found = 0
        while found < len(view):
            count = stream.readinto(view[found:])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise DataError(
                    f"{self}: expected {len(view):,} bytes from byte {at:,} on, found {found:,}; the file was cut "
                    "short after it was opened"
                )
            found += count

    def __str__(self) -> str:
        return f"{self.path}, array {self.member}" if self.member else str(self.path)


@dataclass(frozen=True)
class DayArrays:
    """The arrays of one day, with as many rows each."""

    name: str  # prefix of its files
    dense: StoredArray | None  # numericals ``[N, I]``
    labels: StoredArray | None  # ``[N, T]``
    sparse: tuple[StoredArray, ...]  # ids: one array ``[N, F]``, or one ``[N, ids]`` per feature if `is_multi_hot`
    is_multi_hot: bool

    @property
    def rows(self) -> int:
        """Samples."""
        return self.sparse[0].rows

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids per sample, by feature."""
        return tuple(a.columns for a in self.sparse) if self.is_multi_hot else (1,) * self.sparse[0].columns

    @property
    def files(self) -> list[Path]:
        """Its files."""
        arrays = [array for array in (self.labels, self.dense, *self.sparse) if array is not None]
        return list(dict.fromkeys(array.path for array in arrays))

    def read_ids(self, features: Sequence[int], start: int, n: int) -> list[NDArray[Any]]:
        """Read the ids of some features, by position: ``[n, ids]`` each."""
        if self.is_multi_hot:
            return [self.sparse[i].read(start, n) for i in features]
        whole = self.sparse[0].read(start, n)
        return [whole[:, i : i + 1] for i in features]


def has_days(path: Path) -> bool:
    """Whether a folder has arrays in this layout."""
    return path.is_dir() and any(_PART.fullmatch(file.name) for file in path.iterdir())


def find_days(path: Path) -> list[DayArrays]:
    """Find the days of a folder, in the order of the numbers in their names."""
    if not path.is_dir():
        raise DataError(f"{path} is no folder; give the one that has day_0_dense.npy, day_0_sparse.npy and so on")
    parts: dict[str, dict[str, Path]] = {}
    for file in sorted(path.iterdir(), key=_in_number_order):
        if found := _PART.fullmatch(file.name):
            parts.setdefault(found[1], {})[found[2]] = file
    if not parts:
        raise DataError(f"{path} has no arrays such as day_0_sparse.npy or day_0_sparse_multi_hot.npz")
    wanted = [part for part in ("labels", "dense") if any(part in of_day for of_day in parts.values())]
    days = [_day(path, name, of_day, wanted) for name, of_day in parts.items()]
    first = days[0]
    for day in days:
        for what, here, there in (
            ("ids per sample, by feature", day.ids, first.ids),
            ("numericals", day.dense and day.dense.columns, first.dense and first.dense.columns),
            ("labels", day.labels and day.labels.columns, first.labels and first.labels.columns),
        ):
            if here != there:
                raise DataError(
                    f"{path}: {day.name} has {_shown(here)} {what}, and {first.name} has {_shown(there)}; they must be "
                    "of one data set, so write one of them anew"
                )
    return days


def _in_number_order(file: Path) -> list[int | str]:
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", file.name)]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _day(path: Path, name: str, parts: Mapping[str, Path], wanted: Sequence[str]) -> DayArrays:
    if "sparse" in parts and "sparse_multi_hot" in parts:
        raise DataError(
            f"{path} has {parts['sparse'].name} and {parts['sparse_multi_hot'].name}, which are one or several ids of "
            "the same samples; move one of them elsewhere"
        )
    sparse = parts.get("sparse_multi_hot", parts.get("sparse"))
    missing = [f"{name}_{part}.npy" for part in wanted if part not in parts]
    missing += [] if sparse else [f"{name}_sparse.npy"]
    if sparse is None or missing:
        there = ", ".join(file.name for file in parts.values())
        raise DataError(
            f"{path} has {there}, but not {' and '.join(missing)}; copy what is missing there (scripts that write "
            "arrays of several ids leave dense and labels where they were)"
        )
    labels, dense = (open_npy(parts[part], part) if part in wanted else None for part in ("labels", "dense"))
    of_ids = open_npz(sparse) if sparse.suffix == ".npz" else (open_npy(sparse, "sparse"),)
    first = of_ids[0]
    for array in (*of_ids, labels, dense):
        if array is not None and array.rows != first.rows:
            raise DataError(
                f"{array} has {array.rows:,} rows, and {first} has {first.rows:,}; they must be of the same samples, "
                "so write both anew"
            )
    return DayArrays(name, dense, labels, of_ids, is_multi_hot=sparse.suffix == ".npz")


def open_npy(path: Path, part: str) -> StoredArray:
    """Read the header of a file of one array; a `DataError` says what is wrong with it."""
    with path.open("rb") as stream:
        array = _header(stream, path, "", part)
    return _whole(array, path.stat().st_size)


def open_npz(path: Path) -> tuple[StoredArray, ...]:
    """Read the headers of a file's arrays of ids, in the order of their numbers."""
    found: dict[int, StoredArray] = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            for info in archive.infolist():
                number = re.fullmatch(r"(\d{1,6})\.npy", info.filename)
                if number is None:
                    raise DataError(f"{path} has an array {info.filename!r}; its arrays must be named 0, 1, 2, …")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise DataError(
                        f"{path} is compressed, so rows cannot be read where they are; write it with numpy.savez"
                    )
                stream.seek(info.header_offset)
                _, name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                begin = info.header_offset + _LOCAL_HEADER.size + name + extra
                stream.seek(begin)
                array = _header(stream, path, number[1], "sparse")
                found[int(number[1])] = _whole(array, begin + info.file_size)
    except DataError:
        raise
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); copy or write it again") from None
    if not found or sorted(found) != list(range(len(found))):
        raise DataError(f"{path} has the arrays {', '.join(map(str, sorted(found)))}; there must be all from 0 on")
    return tuple(found[i] for i in sorted(found))


def _header(stream: BinaryIO, path: Path, member: str, part: str) -> StoredArray:
    where = f"{path}, array {member}" if member else str(path)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of headers that Python 2 wrote
            shape, by_column, dtype = read(stream)
    except (ValueError, EOFError, TypeError, OverflowError, SyntaxError, TokenError) as error:
        raise DataError(f"{where} is no array of NumPy, or is cut short ({error}); write it with numpy.save") from None
    if dtype.kind not in _KINDS[part]:
        raise DataError(f"{where} has values of type {dtype}, must be {_WANTED[part]}; write it anew")
    dimensions = (1, 2) if part == "labels" else (2,)
    if len(shape) not in dimensions or shape[0] < 0 or not 1 <= prod(shape[1:]) <= _MOST_COLUMNS:
        columns = {"dense": "numericals", "labels": "labels", "sparse": "ids"}[part]
        raise DataError(f"{where} has the shape {list(shape)}, must be [samples, {columns}]; write it anew")
    return StoredArray(path, member, stream.tell(), shape[0], prod(shape[1:]), dtype, by_column)


def _whole(array: StoredArray, end: int) -> StoredArray:
    """The array, if its values end where they should."""
    if end != array.end:
        raise DataError(
            f"{array}: expected {array.end - array.offset:,} bytes ({array.rows:,} rows × {array.columns} of "
            f"{array.dtype}), found {max(0, end - array.offset):,}; the file is truncated: copy or write it again"
        )
    return array


_LABELS_AT_ONCE = 1 << 22
_HELD_OUT = 0.1


@dataclass(frozen=True)
class _Part:
    """Consecutive rows of a day."""

    day: DayArrays
    start: int
    samples: int


class NpySource(Source):
    """Samples of a folder of arrays ``day_0_dense.npy``, ``day_0_sparse.npy`` and so on, see above.

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
        return find_label_ranges(
            (RowLocation(str(part.day.labels), lambda at, start=part.start: f"row {start + at:,}"), name, labels)
            for whole in (self._parts[split] if self.schema.labels else ())
            for part in _cut(whole, _LABELS_AT_ONCE)
            for name, labels in zip(self.schema.labels, self._labels(part).T, strict=True)
        )

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


def draft_names(day: DayArrays) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What TorchRec calls the columns of a day: the sparse ones, the dense ones, the labels."""
    labels = 0 if day.labels is None else day.labels.columns
    return (
        tuple(f"cat_{i}" for i in range(len(day.ids))),
        tuple(f"int_{i}" for i in range(0 if day.dense is None else day.dense.columns)),
        ("label",) if labels == 1 else tuple(f"label_{t}" for t in range(labels)),
    )


def _named(day: DayArrays, rows: int | Sequence[int] | None, path: str) -> Schema:
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


def _check(schema: Schema, day: DayArrays, path: str) -> None:
    """Raise `SpecError` unless a schema is of as many columns as the arrays have."""
    names, dense, labels = draft_names(day)
    counts = [("sparse columns", len(schema.sparse), len(names)), ("dense columns", len(schema.dense), len(dense))]
    counts += [("labels", len(schema.labels), len(labels))] * bool(schema.labels)
    for what, said, there in counts:
        if said != there:
            raise SpecError(f"the schema has {said} {what}, and the arrays in {path} have {there}; name them all")
    for column, ids in zip(schema.sparse, day.ids, strict=True):
        if column.ids != ids:
            raise SpecError(f"sparse column '{column.name}': ids is {column.ids}, and the arrays in {path} have {ids}")
    for found, problem in (
        (schema.weight_columns or schema.group, "have no weight or group column"),
        (schema.id_weights, f"have no weights of ids ('{', '.join(schema.id_weights)}')"),
        (schema.scaling or schema.positives or schema.derived, "are not scaled, mapped or crossed when they are read"),
    ):
        if found:
            raise SpecError(f"arrays of NumPy {problem}; use Parquet for them")


def _default_splits(days: Sequence[DayArrays]) -> dict[str, list[_Part]]:
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


def _chosen(days: Sequence[DayArrays], splits: Mapping[str, Sequence[str]], path: str) -> dict[str, list[_Part]]:
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
