"""Read and write NVIDIA's split-binary format: one headerless little-endian file per column.

::

    feature_spec.yaml
    {train, test}/label.bin       bool                          [N]
    {train, test}/numerical.bin   float16                       [N, I]
    {train, test}/cat_*.bin       int8, int16 or int32          [N] each, the smallest that holds the cardinality

Datasets written by the scripts in NVIDIA/DeepLearningExamples (PyTorch and TensorFlow2 DLRM) are supported. These
scripts also read datasets written by hotbed, unless the datasets have a ``valid`` split.

A chunk is a range of samples of every file. `OpenFiles` opens each file once and reads it by position from several
threads, because opening 26 files per chunk took as long as reading them. Memory of large results is reused.

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
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

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
from hotbed.parsing import TextError, fault_of, parse_yaml, read_limited
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

    path: Path
    dtype: np.dtype[Any]
    sample_bytes: int


@dataclass(frozen=True)
class FeatureSpec:
    """The description of a dataset."""

    folder: Path
    schema: Schema
    files: Mapping[str, Mapping[str, StoredFile]]  # by split and column; numericals share a file
    preparation: object = None  # conversion of raw values, unchecked; None without one

    def absolute(self) -> FeatureSpec:
        """Return the description with absolute paths."""
        files = {
            split: {name: replace(file, path=file.path.absolute()) for name, file in of_split.items()}
            for split, of_split in self.files.items()
        }
        return replace(self, folder=self.folder.absolute(), files=files)


def id_dtype(name: str, rows: int) -> np.dtype[Any]:
    """Return the dtype of ids below ``rows`` by NVIDIA's rule: the first of int8/16/32 with a larger maximum."""
    for dtype in ("int8", "int16", "int32"):
        if rows < np.iinfo(dtype).max:
            return np.dtype(dtype).newbyteorder("<")
    raise SpecError(
        f"column '{name}': cardinality: got {rows:,}, expected at most {np.iinfo('int32').max - 1:,} (int32). Increase "
        "the frequency threshold, or use Parquet"
    )


def read_feature_spec(path: str | Path) -> FeatureSpec:
    """Read and check a description. See `SplitBinarySource` for the errors."""
    root = location(path) if isinstance(path, str) else path
    if isinstance(root, str):
        raise DataError(f"{path}: got a URI, expected a local folder of split-binary data. Copy it, or use Parquet")
    file = root if root.is_file() else root / DESCRIPTION
    if not file.is_file():
        raise DataError(
            f"{file} does not exist. Create it with `hotbed prepare`, or pass its directory. For data in a "
            "different format, draft a recipe with `hotbed init`"
        )
    try:
        content: object = parse_yaml(read_limited(file).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not YAML: {error}") from None
    except TextError as error:
        raise DataError(f"{file} {error}") from None
    return _DescriptionReader(file, content).read()


class _ColumnEntry(BaseModel):
    dtype: Any = None
    cardinality: Any = None


class _Channels(BaseModel):
    categorical: list[str] | None = None
    numerical: list[str] | None = None
    label: list[str] | None = None


class _FileEntry(BaseModel):
    type: Literal["split_binary"]
    features: list[str]
    files: list[str] = Field(min_length=1, max_length=1)


_LIMITS = {
    "[key]": "the name of a directory",
    "source_spec": "a mapping with at least `train`",
    "files": "a list of one file",
}


class _Description(BaseModel, coerce_numbers_to_str=True):
    feature_spec: dict[str, _ColumnEntry]
    channel_spec: _Channels
    source_spec: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], list[_FileEntry]] = Field(min_length=1)
    metadata: object = None


class _DescriptionReader:
    """Checks a description. Errors name its file."""

    def __init__(self, file: Path, content: object) -> None:
        self.file = file
        try:
            self.given = _Description.model_validate(content)
        except ValidationError as error:
            raise DataError(f"{file}: {fault_of(error, _LIMITS)}") from None
        channels = self.given.channel_spec
        self.channels: dict[str, list[str]] = {role: getattr(channels, role) or [] for role in _DTYPES}
        self.role = {name: role for role, names in self.channels.items() for name in names}

    def read(self) -> FeatureSpec:
        dtypes = {name: self._dtype(name) for name in self.role}
        files = {split: self._files(split, entries, dtypes) for split, entries in self.given.source_spec.items()}
        preparation = self._metadata("preparation")
        return FeatureSpec(folder=self.file.parent, schema=self._schema(), files=files, preparation=preparation)

    def _metadata(self, key: str) -> object:
        metadata = self.given.metadata
        return cast("Mapping[str, object]", metadata).get(key) if isinstance(metadata, Mapping) else None

    def _dtype(self, name: str) -> np.dtype[Any]:
        columns, where = self.given.feature_spec, f"{self.file}: feature_spec.{name}"
        check_known(f"{self.file}: column of channel_spec", name, columns, DataError, "Describe it in feature_spec.")
        given, allowed = columns[name].dtype, _DTYPES[self.role[name]]
        if given not in allowed:
            raise DataError(
                f"{where}.dtype: got {given!r}, expected one of {', '.join(allowed)} for a {self.role[name]} column"
            )
        if self.role[name] == "categorical":
            cardinality = columns[name].cardinality
            check(f"{where}.cardinality", cardinality, Count, DataError, "Set it to the number of ids.")
            if cardinality - 1 > (most := np.iinfo(given).max):
                raise DataError(
                    f"{where}.cardinality: got {cardinality:,}, expected at most {most + 1:,} because of its dtype "
                    f"{given}. Correct one of them, or prepare the dataset again"
                )
        return np.dtype(given).newbyteorder("<")

    def _files(
        self, split: str, entries: Sequence[_FileEntry], dtypes: Mapping[str, np.dtype[Any]]
    ) -> dict[str, StoredFile]:
        where, numerical = f"{self.file}: source_spec.{split}", self.channels["numerical"]
        files: dict[str, StoredFile] = {}
        for entry in entries:
            names, (path,) = entry.features, entry.files
            if len(names) != 1 and names != numerical:
                raise DataError(
                    f"{where}: columns of {path}: got {names}, expected one column, or all numericals as in "
                    f"channel_spec ({numerical})"
                )
            for name in names:
                check_known(f"{where}: column of {path}", name, dtypes, DataError, "Add it to channel_spec.")
                size = dtypes[name].itemsize * len(names)
                files[name] = StoredFile(self._within(path, where), dtypes[name], size)
        missing = [name for name in dtypes if name not in files]
        if missing:
            raise DataError(f"{where}: the file of column '{missing[0]}' is missing")
        # Numericals are one matrix, so several files of shape [N, 1] would be read incorrectly.
        if (count := len({files[name].path for name in numerical})) > 1:
            raise DataError(f"{where}: got {count} files of numericals, expected one of shape [N, {len(numerical)}]")
        return {_column_name(name): file for name, file in files.items()}

    def _within(self, name: str, where: str) -> Path:
        """Return the path of a file. Raise `DataError` if the path, or a link, leads out of the dataset's directory."""
        root = self.file.parent
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise DataError(f"{where}: got file {name!r}, expected a path within {root}, without '..'")
        try:
            found = (root / name).resolve()
            found.is_file()  # raises if the name is too long
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{where}: file {name!r} is inaccessible: {error}") from None
        if not found.is_relative_to(root.resolve()):
            raise DataError(f"{where}: {name} is a link to {found}, outside of the dataset. Replace it by the file")
        return root / name

    def _schema(self) -> Schema:
        stored = self._metadata("schema")
        try:
            sparse = tuple(
                SparseColumn(name=_column_name(name), rows=self.given.feature_spec[name].cardinality)
                for name in self.channels["categorical"]
            )
            dense, labels = (tuple(map(_column_name, self.channels[role])) for role in ("numerical", "label"))
            plain = Schema(sparse=sparse, dense=dense, labels=labels)
            check("metadata.schema", stored or {}, Mapping, SpecError)
            schema = plain if stored is None else Schema.from_dict(cast("Mapping[str, object]", stored))
        except SpecError as error:
            raise DataError(f"{self.file}: {error}") from None
        if [(c.name, c.rows) for c in schema.sparse] != [(c.name, c.rows) for c in sparse] or (
            (schema.dense, schema.labels) != (dense, labels) or schema.scaling or schema.numericals or schema.positives
        ):
            raise DataError(
                f"{self.file}: metadata.schema and feature_spec have different columns. Remove metadata.schema"
            )
        return schema


def _column_name(name: str) -> str:
    """Return a name without ``.bin``, which NVIDIA's scripts append to names of categorical columns."""
    return name.removesuffix(".bin")


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
        weakref.finalize(self, _close, self._descriptors)

    def read(self, file: StoredFile, start: int, out: NDArray[Any]) -> None:
        """Fill ``out`` (``[n]`` or ``[n, I]``) with the samples from ``start``, converted to the dtype of ``out``."""
        descriptor = self._descriptor(file.path)
        try:
            is_same = file.dtype == out.dtype
            stored = out.reshape(-1) if is_same else self._memory(out.size, file.dtype)
            _fill(file, descriptor, start * file.sample_bytes, stored)
        finally:
            if file.path not in self._descriptors:
                os.close(descriptor)
        if not is_same:
            _convert(stored, out.reshape(-1))

    def labels(self, name: str, file: StoredFile, samples: int) -> Iterator[tuple[RowLocation, str, NDArray[Any]]]:
        """Yield the labels of a file in parts, with their location and column."""
        for start in range(0, samples, _LABELS_AT_ONCE):
            part = np.empty(min(_LABELS_AT_ONCE, samples - start), dtype=file.dtype)
            self.read(file, start, part)
            if part.dtype == np.bool_:
                part = part.view(np.uint8)  # bytes of the file may have other values than 0 and 1
            yield RowLocation(str(file.path), lambda at, start=start: f"sample {start + at:,}"), name, part

    def _descriptor(self, path: Path) -> int:
        """Return a descriptor of a file. The descriptor stays open, unless there are too many."""
        found = self._descriptors.get(path)
        if found is None:
            with self._lock:
                found = self._descriptors.get(path)
                if found is None:
                    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if len(self._descriptors) < _MOST_OPEN:
                        self._descriptors[path] = found
        return found

    def _memory(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return uninitialized memory ``[size]`` of this thread. The next call reuses it."""
        found: NDArray[np.uint8] | None = getattr(self._scratch, "memory", None)
        if found is None or len(found) < size * dtype.itemsize:
            found = self._scratch.memory = np.empty(size * dtype.itemsize, np.uint8)
        return found[: size * dtype.itemsize].view(dtype)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # other processes and copies open files again


def _fill(file: StoredFile, descriptor: int, first: int, out: NDArray[Any]) -> None:
    """Fill ``out`` with bytes of a file from byte ``first``."""
    view, found = out.view(np.uint8).data, 0
    while found < len(view):
        count = os.preadv(descriptor, [view[found:]], first + found)
        if not count:
            raise DataError(
                f"{file.path}: got {found:,} bytes from byte {first:,}, expected {len(view):,}. The file was truncated "
                "after it was opened. Copy the file again"
            )
        found += count


def _close(descriptors: Mapping[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def count_samples(files: Mapping[str, StoredFile]) -> int:
    """Return the number of samples of a split. Raise `DataError` unless the sizes of all files match."""
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


def _convert(stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Convert values ``[n]``. torch converts float16 five times as fast as NumPy."""
    if stored.dtype == np.float16 and out.dtype == np.float32:
        # For such small parts, torch starts no threads. One call converts all parts, because calls wait for the GIL.
        target, source = (list(torch.from_numpy(of).split(_CONVERTED_AT_ONCE)) for of in (out, stored))
        copy_all_(target, source)
    else:
        np.copyto(out, stored, casting="unsafe")


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
        If the description is invalid, a cardinality does not fit its dtype, or a ``.bin`` file is missing, or
        numbers of samples differ between files.
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
        if self._encoder is not None and self._encoder.schema is not self.schema:  # `only` has replaced the schema
            self._encoder = self._encoder.of(self.schema)
        return self._encoder

    def __getstate__(self) -> dict[str, object]:
        """Return the state for readers, with absolute paths because their working directory may differ."""
        return {**self.__dict__, "_spec": self._spec.absolute(), "_encoder": None, "_open": OpenFiles()}

    def files(self) -> list[Path]:
        """Return the files of all columns."""
        return sorted({file.path for of_split in self._spec.files.values() for file in of_split.values()})

    def _chunks(self, split: str) -> Sequence[int]:
        full, rest = divmod(self._samples[split], self.chunk_samples)
        return [self.chunk_samples] * full + [rest] * (rest > 0)

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        files, samples = self._spec.files[split], self._samples[split]
        return find_label_ranges(
            part for name in self.schema.labels for part in self._open.labels(name, files[name], samples)
        )

    def _read(self, split: str, i: int) -> Batch:
        start = i * self.chunk_samples
        n = min(self.chunk_samples, self._samples[split] - start)
        files = self._spec.files[split]
        is_wide = any(files[c.name].dtype.itemsize == 8 for c in self.schema.sparse)
        ids = empty((len(self.schema.sparse), n), torch.int64 if is_wide else torch.int32)
        for row, column in zip(ids.numpy(), self.schema.sparse, strict=True):
            self._open.read(files[column.name], start, row)
        labels = np.empty((n, len(self.schema.labels)), dtype=np.float32)
        for t, name in enumerate(self.schema.labels):
            column = np.empty(n, dtype=np.float32)
            self._open.read(files[name], start, column)
            labels[:, t] = column
        dense = None
        if self.schema.dense:
            dense = empty((n, len(self.schema.dense)))
            self._open.read(files[self.schema.dense[0]], start, dense.numpy())
        return Batch(
            sparse=Jagged([c.name for c in self.schema.sparse], ids.view(-1), batch_size=n),
            dense=dense,
            labels=torch.from_numpy(labels) if self.schema.labels else None,
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

    ``feature_spec.yaml`` is written last, so a directory without it is not a dataset.

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
        labels = ["label"] if len(schema.labels) == 1 else [f"label_{t}" for t in range(len(schema.labels))]
        self._label_names = [f"{name}.bin" for name in labels]
        self._cat_names = [f"cat_{i}.bin" for i in range(len(schema.sparse))]
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
            import yaml

            text = yaml.safe_dump(self._description(), sort_keys=False)
            (self.path / "feature_spec.yaml").write_text(text, encoding="utf-8")

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
        """Append ids ``[n]`` of the sparse column at a position in the schema."""
        name, rows = self.schema.sparse[column].name, self.schema.sparse[column].rows
        file = self._cat_names[column]
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
            for name in (*self._label_names, *(["numerical.bin"] if self.schema.dense else []), *self._cat_names):
                with (path / split / name).open("rb") as stored:
                    shutil.copyfileobj(stored, self._file(f"{split}/{name}"), 1 << 20)
            samples = (path / split / self._label_names[0]).stat().st_size  # labels have one byte
            self.samples[split] += samples

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
        contents: list[tuple[list[str], str]] = (
            [(list(self.schema.dense), "numerical.bin")] if self.schema.dense else []
        )
        contents += [([n], file) for n, file in zip(self.schema.labels, self._label_names, strict=True)]
        contents += [([c.name], file) for c, file in zip(sparse, self._cat_names, strict=True)]
        return {
            "channel_spec": {
                "categorical": [c.name for c in sparse],
                "numerical": list(self.schema.dense),
                "label": list(self.schema.labels),
            },
            "feature_spec": columns,
            "source_spec": {
                split: [
                    {"type": "split_binary", "features": list(features), "files": [f"{split}/{file}"]}
                    for features, file in contents
                ]
                for split in self.samples
            },
            "metadata": {
                "samples": dict(self.samples),
                "schema": self.schema.to_dict(),
                **({} if self._preparation is None else {"preparation": self._preparation}),
            },
        }
