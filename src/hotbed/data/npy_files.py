"""Find the days of a folder of NumPy arrays, and read rows of them without loading the files: `find_days`.

The layout is that of TorchRec's scripts for Criteo's logs, and of MLPerf's DLRM v2::

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
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import DataError

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
class Day:
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


def find_days(path: Path) -> list[Day]:
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


def _day(path: Path, name: str, parts: Mapping[str, Path], wanted: Sequence[str]) -> Day:
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
    return Day(name, dense, labels, of_ids, is_multi_hot=sparse.suffix == ".npz")


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
