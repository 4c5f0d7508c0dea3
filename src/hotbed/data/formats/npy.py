"""Read samples from NumPy arrays of several days, in the layout of the scripts of TorchRec and MLPerf.

::

    day_0_dense.npy               float32        [N, I]
    day_0_labels.npy              int32          [N, T]
    day_0_sparse.npy              int32, int64   [N, F]         one id per feature, or
    day_0_sparse_multi_hot.npz    int32          [N, ids] each  a member "0", "1", … per feature, not compressed

Days may have names other than ``day_0``. Rows are read by position and not from a memory map: if a file is truncated
after it was opened, reading raises an error, but a memory map would kill the process.
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
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.checks import Count, check, check_known
from hotbed.data.columns import SparseColumn
from hotbed.data.files.criteo import natural_order
from hotbed.data.row_location import RowLocation, find_label_ranges
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.locations import location

_PART = re.compile(r"(.+)_(dense|labels|sparse|sparse_multi_hot)\.np[yz]")
_CONTENTS = {
    "dense": ("fiu", "numbers", "numericals"),
    "labels": ("fiub", "numbers", "labels"),
    "sparse": ("iu", "integers", "ids"),
}
"""By part of a day: the kinds of dtypes, and the names of values and of columns in messages."""
_MOST_COLUMNS = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class StoredArray:
    """An array ``[rows]`` or ``[rows, columns]`` in a file."""

    path: Path
    member: str  # name of the array in an ``.npz`` file
    offset: int  # first byte of the values
    rows: int
    columns: int  # 1 for an array ``[N]``
    dtype: np.dtype[Any]
    by_column: bool  # Fortran order

    def read(self, start: int, n: int) -> NDArray[Any]:
        """Read ``n`` rows ``[n, columns]`` from row ``start``. Several threads may call this at once."""
        if not self.by_column:
            return self._values(start * self.columns, n * self.columns).reshape(n, self.columns)
        return np.stack([self._values(k * self.rows + start, n) for k in range(self.columns)]).T

    def _values(self, first: int, count: int) -> NDArray[Any]:
        at = self.offset + first * self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, count, offset=at)
        if len(found) < count:
            raise DataError(
                f"{self}: got {found.nbytes:,} bytes from byte {at:,}, expected {count * self.dtype.itemsize:,}. The "
                "file was truncated after it was opened. Copy the file again"
            )
        return found

    def __str__(self) -> str:
        return f"{self.path}, array {self.member}" if self.member else str(self.path)


@dataclass(frozen=True)
class DayArrays:
    """The arrays of one day, with equal numbers of rows."""

    name: str  # prefix of the names of its files
    dense: StoredArray | None  # numericals ``[N, I]``
    labels: StoredArray | None  # ``[N, T]``
    sparse: tuple[
        StoredArray, ...
    ]  # ids: one array ``[N, F]``, or one array ``[N, ids]`` per feature if `is_multi_hot`
    is_multi_hot: bool

    @property
    def rows(self) -> int:
        """Number of samples."""
        return self.sparse[0].rows

    @property
    def ids(self) -> tuple[int, ...]:
        """Number of ids per sample, by feature."""
        return tuple(a.columns for a in self.sparse) if self.is_multi_hot else (1,) * self.sparse[0].columns

    @property
    def files(self) -> list[Path]:
        """Files of the day."""
        arrays = [array for array in (self.labels, self.dense, *self.sparse) if array is not None]
        return list(dict.fromkeys(array.path for array in arrays))

    def read_ids(self, features: Sequence[int], start: int, n: int) -> list[NDArray[Any]]:
        """Return one array of ids ``[n, ids]`` per feature, for ``n`` samples from row ``start``."""
        if self.is_multi_hot:
            return [self.sparse[i].read(start, n) for i in features]
        whole = self.sparse[0].read(start, n)
        return [whole[:, i : i + 1] for i in features]


def has_days(path: Path) -> bool:
    """Return whether a folder has arrays in this layout."""
    return path.is_dir() and any(_PART.fullmatch(file.name) for file in path.iterdir())


def find_days(path: Path) -> list[DayArrays]:
    """Return the days of a folder, sorted by the numbers in their names."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder, expected one with day_0_dense.npy, day_0_sparse.npy etc.")
    parts: dict[str, dict[str, Path]] = {}
    for file in sorted(path.iterdir(), key=lambda file: natural_order(file.name)):
        if found := _PART.fullmatch(file.name):
            parts.setdefault(found[1], {})[found[2]] = file
    if not parts:
        raise DataError(f"{path}: got no arrays, expected e.g. day_0_sparse.npy or day_0_sparse_multi_hot.npz")
    wanted = [part for part in ("labels", "dense") if any(part in of_day for of_day in parts.values())]
    days = [_open_day(path, name, of_day, wanted) for name, of_day in parts.items()]
    first = days[0]
    for day in days:
        for what, here, there in (
            ("ids per sample", day.ids, first.ids),
            ("numericals", day.dense and day.dense.columns, first.dense and first.dense.columns),
            ("labels", day.labels and day.labels.columns, first.labels and first.labels.columns),
        ):
            if here != there:
                raise DataError(
                    f"{path}: {what} of {day.name}: got {here}, expected {there} as in {first.name}. Write all days "
                    "with the same columns"
                )
    return days


def _open_day(path: Path, name: str, parts: Mapping[str, Path], wanted: Sequence[str]) -> DayArrays:
    if "sparse" in parts and "sparse_multi_hot" in parts:
        raise DataError(
            f"{path}: got {parts['sparse'].name} and {parts['sparse_multi_hot'].name} for the same samples, expected "
            "one of them. Move one of these files to a different folder"
        )
    sparse = parts.get("sparse_multi_hot", parts.get("sparse"))
    missing = [f"{name}_{part}.npy" for part in wanted if part not in parts]
    missing += [] if sparse else [f"{name}_sparse.npy"]
    if sparse is None or missing:
        found = ", ".join(file.name for file in parts.values())
        raise DataError(
            f"{path}: got {found}, but {' and '.join(missing)} are missing. Copy the missing files into this folder, "
            "because scripts that create multi-hot arrays do not copy dense arrays and labels"
        )
    labels, dense = (open_npy(parts[part], part) if part in wanted else None for part in ("labels", "dense"))
    of_ids = open_npz(sparse) if sparse.suffix == ".npz" else (open_npy(sparse, "sparse"),)
    first = of_ids[0]
    for array in (*of_ids, labels, dense):
        if array is not None and array.rows != first.rows:
            raise DataError(
                f"{array}: got {array.rows:,} rows, expected {first.rows:,} as in {first}. Write both files again"
            )
    return DayArrays(name, dense, labels, of_ids, is_multi_hot=sparse.suffix == ".npz")


def open_npy(path: Path, part: str) -> StoredArray:
    """Read the header of a file with one array."""
    with path.open("rb") as stream:
        return _read_header(stream, path, "", part, path.stat().st_size)


def open_npz(path: Path) -> tuple[StoredArray, ...]:
    """Read the headers of a file with one array of ids per feature. Return the arrays in the order of features."""
    found: dict[int, StoredArray] = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            for info in archive.infolist():
                number = re.fullmatch(r"(\d{1,6})\.npy", info.filename)
                if number is None:
                    raise DataError(f"{path}: got array {info.filename!r}, expected names 0, 1, 2, …")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{path} is compressed, expected an uncompressed file. Write it with numpy.savez")
                stream.seek(info.header_offset)
                _, name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                begin = info.header_offset + _LOCAL_HEADER.size + name + extra
                stream.seek(begin)
                found[int(number[1])] = _read_header(stream, path, number[1], "sparse", begin + info.file_size)
    except DataError:
        raise
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError) as error:
        raise DataError(f"{path} is damaged or truncated ({error}). Copy or write the file again") from None
    if not found or sorted(found) != list(range(len(found))):
        raise DataError(f"{path}: got arrays {', '.join(map(str, sorted(found)))}, expected arrays 0, 1, 2, …")
    return tuple(found[i] for i in sorted(found))


def _read_header(stream: BinaryIO, path: Path, member: str, part: str, end: int) -> StoredArray:
    where = f"{path}, array {member}" if member else str(path)
    kinds, wanted, columns = _CONTENTS[part]
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about headers written by Python 2
            shape, by_column, dtype = read(stream)
    except (ValueError, EOFError, TypeError, OverflowError, SyntaxError, TokenError) as error:
        raise DataError(f"{where} is not a NumPy array, or is truncated ({error}). Write it with numpy.save") from None
    if dtype.kind not in kinds:
        raise DataError(
            f"{where}: got values of type {dtype}, expected {wanted}. Write the array with a supported type"
        )
    dimensions = (1, 2) if part == "labels" else (2,)
    if len(shape) not in dimensions or shape[0] < 0 or not 1 <= prod(shape[1:]) <= _MOST_COLUMNS:
        raise DataError(
            f"{where}: got shape {list(shape)}, expected [samples, {columns}]. Write the array with this shape"
        )
    offset, expected = stream.tell(), prod(shape) * dtype.itemsize
    if end - offset != expected:
        raise DataError(
            f"{where}: got {max(0, end - offset):,} bytes, expected {expected:,} ({shape[0]:,} rows × "
            f"{prod(shape[1:])} of {dtype}). The file is truncated. Copy or write the file again"
        )
    return StoredArray(path, member, offset, shape[0], prod(shape[1:]), dtype, by_column)


_LABELS_AT_ONCE = 1 << 22
_HELD_OUT = 0.1
"""Share of the samples that are held out for validation and test if there is only one day."""


class _DaySlice(NamedTuple):
    """The ``samples`` consecutive rows of a day from row ``start``."""

    day: DayArrays
    start: int
    samples: int


class NpySource(Source):
    """Samples of a folder with arrays like ``day_0_dense.npy`` and ``day_0_sparse.npy``.

    Numericals and labels are converted to float32. The embedding checks that ids are below the rows of their table.

    Parameters
    ----------
    path
        The folder.
    schema
        Names of the columns and numbers of table rows, in the order of the arrays. The format does not support weights
        and groups. Without labels in the schema, no labels are read.
    rows
        Number of rows of each feature's table, or one number for all tables (``num_embeddings_per_feature`` of
        TorchRec's scripts). Required without a schema. Columns then have TorchRec's names: ``int_0`` …, ``cat_0`` …
        and ``label``.
    modulo
        Whether to replace each id by the id modulo the number of rows of its table, as TorchRec's loader does. Data for
        predictions must have the resulting ids.
    splits
        Names of days by split, e.g. ``{train: [day_0, day_1], test: [day_2]}``. ``"none"`` assigns all days to
        ``train``. By default, as in TorchRec's scripts, the first half of the last day is ``valid`` and the second half
        is ``test``. If there is only one day, its last tenth is divided in this way.
    chunk_samples
        Samples per chunk, the unit of reading and shuffling.

    Raises
    ------
    DataError
        If the folder has a different layout.
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
        check("chunk_samples", chunk_samples, Count, SpecError)
        folder = location(path) if isinstance(path, str) else path
        if isinstance(folder, str):
            raise DataError(f"{path}: got a URI, expected a local folder of arrays. Copy the folder, or use Parquet")
        self.days = find_days(folder.absolute())  # readers may have a different working directory
        if schema is None:
            schema = _default_schema(self.days[0], rows, str(path))
        elif rows is not None:
            raise SpecError("got both schema and rows, expected one of them")
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        _check_schema(self.schema, self.days[0], str(path))
        self.modulo = modulo
        self._position = {column.name: i for i, column in enumerate(self.schema.sparse)}
        if splits == "none":
            splits = {"train": [day.name for day in self.days]}
        parts = _default_splits(self.days) if splits is None else _select_days(self.days, splits, str(path))
        self._parts = {split: [p for part in of for p in _divide(part, chunk_samples)] for split, of in parts.items()}
        self.splits = tuple(self._parts)
        for split, of_split in self._parts.items():
            if not of_split:
                raise DataError(
                    f"{path}: got too few samples for a {split} split. Choose the days of each split with `splits`, "
                    f"e.g. {{train: [{self.days[0].name}]}}"
                )

    def files(self) -> list[Path]:
        """Return the files of all days."""
        return [file for day in self.days for file in day.files]

    def _chunks(self, split: str) -> Sequence[int]:
        return [part.samples for part in self._parts[split]]

    def _read(self, split: str, i: int) -> Batch:
        part = self._parts[split][i]
        labels = torch.from_numpy(self._labels(part)) if self.schema.labels else None
        return Batch(sparse=self._sparse(part), dense=self._read_numericals(split, i), labels=labels)

    def _read_numericals(self, split: str, i: int) -> torch.Tensor | None:
        day, start, samples = self._parts[split][i]
        if day.dense is None:
            return None
        dtype = np.float64 if self.schema.numericals else np.float32
        return torch.from_numpy(np.ascontiguousarray(day.dense.read(start, samples), dtype))

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        return find_label_ranges(
            (RowLocation(str(part.day.labels), lambda at, start=part.start: f"row {start + at:,}"), name, labels)
            for whole in (self._parts[split] if self.schema.labels else ())
            for part in _divide(whole, _LABELS_AT_ONCE)
            for name, labels in zip(self.schema.labels, self._labels(part).T, strict=True)
        )

    def _labels(self, part: _DaySlice) -> NDArray[np.float32]:
        assert part.day.labels is not None
        return np.ascontiguousarray(part.day.labels.read(part.start, part.samples), np.float32)

    def _sparse(self, part: _DaySlice) -> Jagged:
        columns, n = self.schema.sparse, part.samples
        is_wide = any(not np.can_cast(array.dtype, np.int32) for array in part.day.sparse)
        values = np.empty(n * sum(column.ids or 1 for column in columns), np.int64 if is_wide else np.int32)
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
    """Return TorchRec's names of a day's columns: sparse columns, dense columns and labels."""
    labels = 0 if day.labels is None else day.labels.columns
    return (
        tuple(f"cat_{i}" for i in range(len(day.ids))),
        tuple(f"int_{i}" for i in range(0 if day.dense is None else day.dense.columns)),
        ("label",) if labels == 1 else tuple(f"label_{t}" for t in range(labels)),
    )


def _default_schema(day: DayArrays, rows: int | Sequence[int] | None, path: str) -> Schema:
    names, dense, labels = draft_names(day)
    if rows is None:
        raise SpecError(
            f"{path}: `rows` is missing. Set it to the numbers of table rows of the {len(names)} features, or run "
            "`hotbed init`, which counts the rows"
        )
    each = [rows] * len(names) if isinstance(rows, int) else list(rows)
    if len(each) != len(names):
        raise SpecError(f"rows: got {len(each)} numbers, expected {len(names)}, one per feature of {path}")
    sparse = tuple(SparseColumn(name=n, rows=r, ids=k) for n, r, k in zip(names, each, day.ids, strict=True))
    return Schema(sparse=sparse, dense=dense, labels=labels)


def _check_schema(schema: Schema, day: DayArrays, path: str) -> None:
    """Raise `SpecError` unless a schema has the columns of the arrays."""
    names, dense, labels = draft_names(day)
    counts = [("sparse columns", len(schema.sparse), len(names)), ("dense columns", len(schema.dense), len(dense))]
    counts += [("labels", len(schema.labels), len(labels))] * bool(schema.labels)
    for what, here, there in counts:
        if here != there:
            raise SpecError(f"the schema: got {here} {what}, expected {there} as in the arrays of {path}")
    for column, ids in zip(schema.sparse, day.ids, strict=True):
        if column.ids != ids:
            raise SpecError(f"sparse column '{column.name}': ids: got {column.ids}, expected {ids} as in {path}")
    for found, what in (
        (schema.weight_columns or schema.group, "sample weights or groups"),
        (schema.id_weights, f"weights of ids ('{', '.join(schema.id_weights)}')"),
        (schema.scaling or schema.positives or schema.derived, "scaled, mapped or derived columns"),
    ):
        if found:
            raise SpecError(f"NumPy arrays do not support {what}. Use Parquet")


def _default_splits(days: Sequence[DayArrays]) -> dict[str, list[_DaySlice]]:
    """Return each day as a split if all days are named like splits. Otherwise, cut valid and test off the last day."""
    if {day.name for day in days} <= {"train", "valid", "test"}:
        named = {day.name: [_DaySlice(day, 0, day.rows)] for day in days}
        return {split: named[split] for split in ("train", "valid", "test") if split in named}
    *before, last = days
    train = [_DaySlice(day, 0, day.rows) for day in before]
    held_out = last.rows
    if not before:
        held_out = round(last.rows * _HELD_OUT)
        train = [_DaySlice(last, 0, last.rows - held_out)]
    valid = held_out // 2 + held_out % 2
    start = last.rows - held_out
    return {
        "train": train,
        "valid": [_DaySlice(last, start, valid)],
        "test": [_DaySlice(last, start + valid, held_out - valid)],
    }


def _select_days(
    days: Sequence[DayArrays], splits: Mapping[str, Sequence[str]], path: str
) -> dict[str, list[_DaySlice]]:
    by_name = {day.name: day for day in days}
    if not isinstance(splits, Mapping):
        raise SpecError(f"splits: got {splits!r}, expected none, or days by split, e.g. {{train: [{days[0].name}]}}")
    used: dict[str, str] = {}
    for split, names in splits.items():
        if isinstance(names, str):
            raise SpecError(f"splits.{split}: got {names!r}, expected a list of days, e.g. [{names}]")
        for name in names:
            check_known(f"splits.{split}: day of {path}", name, by_name, SpecError)
            if (other := used.setdefault(name, split)) != split:
                raise SpecError(f"splits: got day '{name}' in {other} and {split}, expected one split")
    if not used:
        raise SpecError(f"splits: got {dict(splits)}, expected at least one day, e.g. {{train: [{days[0].name}]}}")
    return {split: [_DaySlice(by_name[n], 0, by_name[n].rows) for n in names] for split, names in splits.items()}


def _divide(part: _DaySlice, samples: int) -> list[_DaySlice]:
    starts = range(0, part.samples, samples)
    return [_DaySlice(part.day, part.start + at, min(samples, part.samples - at)) for at in starts]
