"""Read and write NVIDIA's split-binary format: one headerless little-endian file per column.

::

    feature_spec.yaml
    {train, test}/label.bin       bool                          [N]
    {train, test}/numerical.bin   float16                       [N, I]
    {train, test}/cat_*.bin       int8, int16 or int32          [N] each, the smallest that holds the cardinality

Datasets written by the scripts in NVIDIA/DeepLearningExamples (PyTorch and TensorFlow2 DLRM) are supported. These
scripts also read datasets written by hotbed, unless the datasets have a ``valid`` split.

A chunk is a range of samples, which is read from every file. `OpenFiles` opens each file once and reads it by position
from several threads, because opening 26 files per chunk took as long as reading them. The memory of large results is
reused.

``feature_spec.yaml`` has four sections: ``feature_spec`` (dtype and cardinality by column), ``channel_spec`` (columns
by role: categorical, numerical, label), ``source_spec`` (files and columns by split), and ``metadata`` (hotbed's schema
and the number of samples).
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from hotbed.batch import Batch
from hotbed.checks import Count, check, check_known
from hotbed.data.columns import SparseColumn
from hotbed.data.row_location import RowLocation, find_label_ranges
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.large_tensors import empty
from hotbed.locations import location
from hotbed.parsing import TextError, parse_yaml, read_limited, validate_model, yaml_text
from hotbed.torch_private import copy_all_

if TYPE_CHECKING:  # imports pyarrow
    from hotbed.data.encoding.encoder import Encoder

DESCRIPTION = "feature_spec.yaml"
_DTYPES: dict[str, tuple[str, ...]] = {
    "categorical": ("int8", "int16", "int32", "int64"),
    "numerical": ("float16", "float32"),
    "label": ("bool", "int8", "uint8", "float16", "float32"),
}


@dataclass(frozen=True)
class StoredFile:
    """A ``.bin`` file."""

    path: Path  # absolute, because readers may have a different working directory
    dtype: np.dtype[Any]
    sample_bytes: int


@dataclass(frozen=True)
class FeatureSpec:
    """The checked content of ``feature_spec.yaml``."""

    folder: Path  # absolute
    schema: Schema
    files: Mapping[str, Mapping[str, StoredFile]]  # by split and column; all numericals have the same file
    preparation: object = None  # unchecked `PreparationEntry` of the conversion from raw values, or None


def id_dtype(name: str, rows: int) -> np.dtype[Any]:
    """Return the dtype of ids below ``rows`` by NVIDIA's rule: the first of int8/16/32 with a larger maximum."""
    for dtype in ("int8", "int16", "int32"):
        if rows < np.iinfo(dtype).max:
            return np.dtype(dtype).newbyteorder("<")
    raise SpecError(
        f"column '{name}': cardinality: got {rows:,}, expected at most {np.iinfo('int32').max - 1:,} (int32). Increase "
        "the frequency threshold of `hotbed prepare`, or use Parquet"
    )


# -- description -----------------------------------------------------------------------------------------------------


class _Channels(BaseModel):
    categorical: list[str] | None = None
    numerical: list[str] | None = None
    label: list[str] | None = None


class _FileEntry(BaseModel):
    type: Literal["split_binary"]
    features: list[str]
    files: list[str] = Field(min_length=1, max_length=1)


class _Description(BaseModel, coerce_numbers_to_str=True):
    feature_spec: dict[str, dict[str, Any]]
    channel_spec: _Channels
    source_spec: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], list[_FileEntry]] = Field(min_length=1)
    metadata: object = None


_LIMITS = {
    "[key]": "the name of a directory",
    "source_spec": "a mapping with at least `train`",
    "files": "a list of one file",
}


def read_feature_spec(path: str | Path) -> FeatureSpec:
    """Read and check a description. See `SplitBinarySource` for the errors."""
    root = location(path) if isinstance(path, str) else path
    if isinstance(root, str):
        raise DataError(
            f"{path}: got a URI, expected a local folder of split-binary data. Copy the data to a local folder, or use "
            "Parquet"
        )
    file = root if root.is_file() else root / DESCRIPTION
    if not file.is_file():
        raise DataError(
            f"{file} does not exist. Create split-binary data with `hotbed prepare`, or set `path` to their directory. "
            "For data in a different format, draft a recipe with `hotbed init`"
        )
    try:
        content: object = parse_yaml(read_limited(file).decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{file} {error if isinstance(error, TextError) else f'is not YAML: {error}'}") from None
    given = validate_model(_Description, content, DataError, str(file), limits=_LIMITS)
    channels = {role: cast("list[str] | None", getattr(given.channel_spec, role)) or [] for role in _DTYPES}
    roles = {name: role for role, names in channels.items() for name in names}
    dtypes = {name: _check_dtype(file, name, role, given.feature_spec) for name, role in roles.items()}
    metadata = cast("Mapping[str, object]", given.metadata) if isinstance(given.metadata, Mapping) else {}
    return FeatureSpec(
        folder=file.parent.absolute(),
        files={
            split: _check_files(file, split, entries, dtypes, channels["numerical"])
            for split, entries in given.source_spec.items()
        },
        schema=_check_schema(file, channels, given.feature_spec, metadata.get("schema")),
        preparation=metadata.get("preparation"),
    )


def _check_dtype(file: Path, name: str, role: str, columns: Mapping[str, Mapping[str, Any]]) -> np.dtype[Any]:
    where = f"{file}: feature_spec.{name}"
    check_known(f"{file}: column of channel_spec", name, columns, DataError, "Add the column to feature_spec.")
    given, allowed = columns[name].get("dtype"), _DTYPES[role]
    if given not in allowed:
        raise DataError(f"{where}.dtype: got {given!r}, expected one of {', '.join(allowed)} for a {role} column")
    if role == "categorical":
        cardinality: Any = columns[name].get("cardinality")
        check(f"{where}.cardinality", cardinality, Count, DataError, "Set it to the number of ids.")
        if cardinality - 1 > (most := np.iinfo(given).max):
            raise DataError(
                f"{where}.cardinality: got {cardinality:,}, expected at most {most + 1:,} because of the column's "
                f"dtype {given}. Correct the dtype or the cardinality, or prepare the dataset again"
            )
    return np.dtype(given).newbyteorder("<")


def _check_files(
    file: Path, split: str, entries: Sequence[_FileEntry], dtypes: Mapping[str, np.dtype[Any]], numerical: list[str]
) -> dict[str, StoredFile]:
    """Return the file of each column of a split. The keys are column names without ``.bin``."""
    where = f"{file}: source_spec.{split}"
    files: dict[str, StoredFile] = {}
    for entry in entries:
        names, (path,) = entry.features, entry.files
        if len(names) != 1 and names != numerical:
            raise DataError(
                f"{where}: columns of {path}: got {names}, expected one column, or all numericals as in "
                f"channel_spec ({numerical})"
            )
        for name in names:
            check_known(f"{where}: column of {path}", name, dtypes, DataError, "Add the column to channel_spec.")
            size = dtypes[name].itemsize * len(names)
            files[name] = StoredFile(_check_path(file.parent, path, where), dtypes[name], size)
    if missing := [name for name in dtypes if name not in files]:
        raise DataError(f"{where}: column '{missing[0]}' has no file. Add an entry with its file")
    # Numericals are one matrix, so several files of shape [N, 1] would be read incorrectly.
    if (count := len({files[name].path for name in numerical})) > 1:
        raise DataError(f"{where}: got {count} files of numericals, expected one of shape [N, {len(numerical)}]")
    return {_column_name(name): stored for name, stored in files.items()}


def _check_path(root: Path, name: str, where: str) -> Path:
    """Return the path of a file. Raise `DataError` if the path, or a link, leads out of the dataset's directory."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise DataError(f"{where}: got file {name!r}, expected a path within {root}, without '..'")
    try:
        found = (root / name).resolve()
        found.is_file()  # raises if the name is too long
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{where}: file {name!r} is inaccessible: {error}") from None
    if not found.is_relative_to(root.resolve()):
        raise DataError(f"{where}: {name} links to {found}, outside of the dataset. Replace the link by the file")
    return root.absolute() / name


def _check_schema(
    file: Path, channels: Mapping[str, Sequence[str]], columns: Mapping[str, Mapping[str, Any]], stored: object
) -> Schema:
    """Return the schema in the metadata, or the schema of the described columns if the metadata have none."""
    try:
        sparse = tuple(
            SparseColumn(name=_column_name(name), rows=columns[name]["cardinality"]) for name in channels["categorical"]
        )
        dense, labels = (tuple(map(_column_name, channels[role])) for role in ("numerical", "label"))
        plain = Schema(sparse=sparse, dense=dense, labels=labels)
        check("metadata.schema", stored or {}, Mapping, SpecError)
        schema = plain if stored is None else Schema.from_dict(cast("Mapping[str, object]", stored))
    except SpecError as error:
        raise DataError(f"{file}: {error}") from None
    if [(c.name, c.rows) for c in schema.sparse] != [(c.name, c.rows) for c in sparse] or (
        (schema.dense, schema.labels) != (dense, labels) or schema.scaling or schema.numericals or schema.positives
    ):
        raise DataError(f"{file}: metadata.schema and feature_spec have different columns. Remove metadata.schema")
    return schema


def _column_name(name: str) -> str:
    """Return a name without ``.bin``, which NVIDIA's scripts append to names of categorical columns."""
    return name.removesuffix(".bin")


# -- reading ---------------------------------------------------------------------------------------------------------

_MOST_OPEN = 256
"""Limit of open files. The usual limit of a process is 1,024."""
_CONVERTED_AT_ONCE = 1 << 14
"""Values per conversion. For 32,768 values or more, torch would use several threads."""
_LABELS_AT_ONCE = 1 << 24


class OpenFiles:
    """The open files of a dataset. This object is thread-safe. When it is garbage-collected, the files are closed."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)

    def read(self, file: StoredFile, start: int, out: NDArray[Any]) -> None:
        """Fill ``out`` (``[n]`` or ``[n, I]``) with the samples from number ``start``, in the dtype of ``out``."""
        descriptor = self._descriptor(file.path)
        try:
            is_same = file.dtype == out.dtype
            stored = out.reshape(-1) if is_same else self._memory(out.size, file.dtype)
            _fill(file.path, descriptor, start * file.sample_bytes, stored)
        finally:
            if file.path not in self._descriptors:
                os.close(descriptor)
        if not is_same:
            _convert(stored, out.reshape(-1))

    def _descriptor(self, path: Path) -> int:
        """Return the descriptor of a file. It stays open, unless too many files are open."""
        with self._lock:
            found = self._descriptors.get(path)
            if found is None:
                found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if len(self._descriptors) < _MOST_OPEN:
                    self._descriptors[path] = found
                    self._stack.callback(os.close, found)
        return found

    def _memory(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return uninitialized memory ``[size]`` of this thread. The thread's next call reuses the same memory."""
        found: NDArray[np.uint8] | None = getattr(self._scratch, "memory", None)
        if found is None or len(found) < size * dtype.itemsize:
            found = self._scratch.memory = np.empty(size * dtype.itemsize, np.uint8)
        return found[: size * dtype.itemsize].view(dtype)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # other processes and copies open files again


def _fill(path: Path, descriptor: int, first: int, out: NDArray[Any]) -> None:
    """Fill ``out`` with bytes of a file from byte ``first``."""
    view, found = out.view(np.uint8).data, 0
    while found < len(view):
        count = os.preadv(descriptor, [view[found:]], first + found)
        if not count:
            raise DataError(
                f"{path}: got {found:,} bytes from byte {first:,}, expected {len(view):,}. The file was truncated "
                "after it was opened. Copy the file again"
            )
        found += count


def _convert(stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Convert values ``[n]`` to the dtype of ``out``. torch converts float16 five times as fast as NumPy."""
    if stored.dtype == np.float16 and out.dtype == np.float32:
        # For such small parts, torch starts no threads. One call converts all parts, because calls wait for the GIL.
        target, source = (list(torch.from_numpy(of).split(_CONVERTED_AT_ONCE)) for of in (out, stored))
        copy_all_(target, source)
    else:
        np.copyto(out, stored, casting="unsafe")


def count_samples(files: Mapping[str, StoredFile]) -> int:
    """Return the number of samples in the files of a split. Raise `DataError` unless all files have that number."""
    sizes: dict[str, int] = {}
    for name, file in files.items():
        if not file.path.is_file():
            raise DataError(f"{file.path} does not exist, expected column '{name}' of feature_spec.yaml")
        sizes[name] = file.path.stat().st_size
    fullest = max(files, key=lambda name: sizes[name] / files[name].sample_bytes)
    samples = -(-sizes[fullest] // files[fullest].sample_bytes)
    for name, file in files.items():
        expected = samples * file.sample_bytes
        if sizes[name] != expected:
            raise DataError(
                f"{file.path}: got {sizes[name]:,} bytes, expected {expected:,} ({samples:,} samples as in "
                f"{files[fullest].path.name} × {file.sample_bytes} bytes of {file.dtype.name}). The file is truncated, "
                "or its dtype in feature_spec.yaml is wrong. Copy or prepare the dataset again"
            )
    return samples


class SplitBinarySource(Source):
    """Samples in NVIDIA's split-binary format.

    Ids are int32 (int64 if any column is stored as int64), and numericals and labels are float32. The embedding checks
    that ids are below the cardinality.

    Parameters
    ----------
    path
        Directory of ``feature_spec.yaml``, or the file itself.
    chunk_samples
        Samples per chunk, the unit of reading and shuffling.

    Raises
    ------
    DataError
        If the description is invalid, a column's cardinality does not fit its dtype, a ``.bin`` file is missing, or
        files have different numbers of samples.
    """

    def __init__(self, path: str | Path, *, chunk_samples: int = 65_536) -> None:
        check("chunk_samples", chunk_samples, Count, SpecError)
        self._spec: FeatureSpec = read_feature_spec(path)
        self.schema = self._spec.schema
        self.splits = tuple(self._spec.files)
        self.chunk_samples = chunk_samples
        self._samples = {split: count_samples(files) for split, files in self._spec.files.items()}
        self._open = OpenFiles()
        self._encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of raw rows, or None if `hotbed.prepare` did not write the dataset."""
        from hotbed.data.encoding.encoder import Encoder
        from hotbed.data.encoding.prepared_dataset import Preparation

        if self._encoder is None and self._spec.preparation is not None:
            preparation = Preparation.of_dataset(self._spec.folder, self.schema, self._spec.preparation)
            self._encoder = Encoder(self.schema, ids="raw", preparation=preparation)
        if self._encoder is not None:
            self._encoder = self._encoder.of(self.schema)  # `only` replaces the schema
        return self._encoder

    def __getstate__(self) -> dict[str, object]:
        """Return the state for readers, which open files and vocabularies again."""
        return {**self.__dict__, "_encoder": None, "_open": OpenFiles()}

    def files(self) -> list[Path]:
        """Return the files of all columns."""
        return sorted({file.path for of_split in self._spec.files.values() for file in of_split.values()})

    def _chunks(self, split: str) -> Sequence[int]:
        full, rest = divmod(self._samples[split], self.chunk_samples)
        return [self.chunk_samples] * full + [rest] * (rest > 0)

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        samples = self._samples[split]

        def parts() -> Iterator[tuple[RowLocation, str, NDArray[Any]]]:
            for name in self.schema.labels:
                file = self._spec.files[split][name]
                for start in range(0, samples, _LABELS_AT_ONCE):
                    labels = np.empty(min(_LABELS_AT_ONCE, samples - start), dtype=file.dtype)
                    self._open.read(file, start, labels)
                    if labels.dtype == np.bool_:
                        labels = labels.view(np.uint8)  # bytes of the file may have other values than 0 and 1
                    yield RowLocation(str(file.path), lambda at, start=start: f"sample {start + at:,}"), name, labels

        return find_label_ranges(parts())

    def _read(self, split: str, i: int) -> Batch:
        start = i * self.chunk_samples
        n = min(self.chunk_samples, self._samples[split] - start)
        files = self._spec.files[split]
        is_wide = any(files[c.name].dtype.itemsize == 8 for c in self.schema.sparse)
        sparse = [c.name for c in self.schema.sparse]
        ids = empty((len(sparse), n), torch.int64 if is_wide else torch.int32)
        labels = np.empty((len(self.schema.labels), n), dtype=np.float32)
        for name, out in zip((*sparse, *self.schema.labels), (*ids.numpy(), *labels), strict=True):
            self._open.read(files[name], start, out)
        dense = empty((n, len(self.schema.dense))) if self.schema.dense else None
        if dense is not None:
            self._open.read(files[self.schema.dense[0]], start, dense.numpy())
        return Batch(
            sparse=Jagged(sparse, ids.view(-1), batch_size=n),
            dense=dense,
            labels=torch.from_numpy(np.ascontiguousarray(labels.T)) if self.schema.labels else None,
        )


def check_split_binary(schema: Schema) -> None:
    """Raise `SpecError` if the format does not support a schema."""
    ragged = next((column for column in schema.sparse if column.ids != 1), None)
    for found, problem in (
        (schema.weight_columns or schema.group, "got a weight or group column, expected none"),
        (schema.scaling or schema.numericals, "got columns to scale, expected scaled numericals"),
        (schema.positives, "got labels to map, expected 0 and 1"),
        (not schema.labels, "got no label column, expected at least one"),
        (schema.id_weights, f"got weights of ids '{', '.join(schema.id_weights)}', expected none"),
        (
            ragged,
            f"sparse column '{ragged and ragged.name}': got {(ragged and ragged.ids) or 'a varying number of'} ids per "
            "sample, expected 1",
        ),
    ):
        if found:
            raise SpecError(f"split-binary format: {problem}. Use Parquet for such data")


class SplitBinaryWriter:
    """Write samples in split-binary format, part by part. Use the writer as a context manager.

    ``feature_spec.yaml`` is written last, so a directory without this file is not a dataset.

    Parameters
    ----------
    path
        An existing directory, which becomes the dataset.
    schema
        One-hot sparse columns and at least one label, without weights and groups. Files of sparse columns are
        ``cat_0.bin``, ``cat_1.bin``, … in order.
    splits
        Names of the splits. NVIDIA's scripts support ``train`` and ``test``.
    preparation
        Conversion of raw values, see `hotbed.data.encoding.prepared_dataset.PreparationEntry`.

    Raises
    ------
    SpecError
        If the format does not support the schema.
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema,
        splits: Sequence[str],
        *,
        preparation: Mapping[str, object] | None = None,
    ) -> None:
        check_split_binary(schema)
        self.path = Path(path)
        self.schema = schema
        self._preparation = preparation
        self.samples = dict.fromkeys(splits, 0)
        self._dtypes = [id_dtype(c.name, c.rows) for c in schema.sparse]
        count = len(schema.labels)
        self._label_names = ["label.bin"] if count == 1 else [f"label_{t}.bin" for t in range(count)]
        self._columns: dict[str, list[str]] = {"numerical.bin": [*schema.dense]} if schema.dense else {}  # by file
        self._columns |= {file: [name] for file, name in zip(self._label_names, schema.labels, strict=True)}
        self._columns |= {f"cat_{i}.bin": [column.name] for i, column in enumerate(schema.sparse)}
        self._written: Counter[str] = Counter()  # samples by file
        self._stack = ExitStack()
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> SplitBinaryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None:
            (self.path / DESCRIPTION).write_text(f"{yaml_text(self._description())}\n", encoding="utf-8")

    def append_labels(self, split: str, labels: NDArray[Any]) -> None:
        """Append labels ``[n]`` or ``[n, T]``, which must be 0 or 1."""
        columns = labels.reshape(len(labels), len(self.schema.labels))
        for t, file in enumerate(self._label_names):
            values = columns[:, t]
            self._refuse((values != 0) & (values != 1), values, f"{split}/{file}", self.schema.labels[t], "0 or 1")
        self.samples[split] += len(labels)
        for t, file in enumerate(self._label_names):
            self._append(split, file, (columns[:, t] != 0).view(np.uint8))

    def append_dense(self, split: str, dense: NDArray[Any]) -> None:
        """Append numericals ``[n, I]`` as float16. They must be finite in float16."""
        with np.errstate(over="ignore"):
            stored = dense.astype("<f2")
        bad = ~np.isfinite(stored)
        if bad.any():
            wanted = f"a magnitude of at most {np.finfo(np.float16).max:,.0f} (float16)"
            for i, column in enumerate(self.schema.dense):
                self._refuse(bad[:, i], dense[:, i], f"{split}/numerical.bin", column, wanted)
        self._append(split, "numerical.bin", stored)

    def append_ids(self, split: str, column: int, ids: NDArray[Any]) -> None:
        """Append ids ``[n]`` of a sparse column. ``column`` is its position in the schema."""
        name, rows = self.schema.sparse[column].name, self.schema.sparse[column].rows
        file = f"cat_{column}.bin"
        self._refuse((ids < 0) | (ids >= rows), ids, f"{split}/{file}", name, f"an id from 0 to {rows - 1:,}")
        self._append(split, file, ids.astype(self._dtypes[column]))

    def append(self, split: str, batch: Batch) -> None:
        """Append all columns of a batch. Columns are matched by name."""
        if batch.labels is None or (batch.dense is None) == bool(self.schema.dense):
            raise SpecError("the batch lacks labels or numericals, expected all columns of the schema")
        self.append_labels(split, batch.labels.numpy())
        if batch.dense is not None:
            self.append_dense(split, batch.dense.numpy())
        for i, column in enumerate(self.schema.sparse):
            self.append_ids(split, i, batch.sparse[column.name].values.numpy())

    def append_dataset(self, path: Path) -> None:
        """Append all samples of a dataset that was written with the same schema and splits."""
        for split in self.samples:
            for name in self._columns:
                with (path / split / name).open("rb") as stored:
                    shutil.copyfileobj(stored, self._file(f"{split}/{name}"), 1 << 20)
            self.samples[split] += (path / split / self._label_names[0]).stat().st_size  # a label has one byte

    def _append(self, split: str, name: str, values: NDArray[Any]) -> None:
        key = f"{split}/{name}"
        self._file(key).write(np.ascontiguousarray(values).data)
        self._written[key] += len(values)

    def _file(self, key: str) -> BinaryIO:
        if key not in self._open:
            (self.path / key).parent.mkdir(exist_ok=True)
            self._open[key] = self._stack.enter_context((self.path / key).open("wb"))
        return self._open[key]

    def _refuse(self, bad: NDArray[np.bool_], values: NDArray[Any], key: str, column: str, wanted: str) -> None:
        location = RowLocation(key, lambda at: f"sample {self._written[key] + at:,}")
        location.refuse(column, "values", bad, values, "{}", f"expected {wanted}")

    def _description(self) -> dict[str, object]:
        sparse = self.schema.sparse
        columns: dict[str, dict[str, object]] = {
            c.name: {"dtype": dtype.name, "cardinality": c.rows} for c, dtype in zip(sparse, self._dtypes, strict=True)
        }
        columns |= {name: {"dtype": "float16"} for name in self.schema.dense}
        columns |= {name: {"dtype": "bool"} for name in self.schema.labels}
        return {
            "channel_spec": {
                "categorical": [c.name for c in sparse],
                "numerical": list(self.schema.dense),
                "label": list(self.schema.labels),
            },
            "feature_spec": columns,
            "source_spec": {
                split: [
                    {"type": "split_binary", "features": list(names), "files": [f"{split}/{file}"]}
                    for file, names in self._columns.items()
                ]
                for split in self.samples
            },
            "metadata": {
                "samples": dict(self.samples),
                "schema": self.schema.to_dict(),
                **({} if self._preparation is None else {"preparation": self._preparation}),
            },
        }
