"""Read and write NVIDIA's split-binary format: one headerless little-endian file per column.

::

    feature_spec.yaml
    {train, test}/label.bin       bool                          [N]
    {train, test}/numerical.bin   float16                       [N, I]
    {train, test}/cat_*.bin       int8, int16 or int32          [N] each, the smallest that holds the cardinality

Datasets made by the scripts of NVIDIA/DeepLearningExamples (PyTorch and TensorFlow2 DLRM) load as they are. Those this
module writes load there too, as long as they have no ``valid`` split, which NVIDIA's scripts do not know.

A chunk is a piece of every column's file, so `OpenFiles` opens each file once and reads it by position, from any number
of threads: with 26 files, opening each for every chunk took as long as reading. Memory of large results is used again.

``feature_spec.yaml`` has four sections: ``feature_spec`` (dtype and cardinality by column), ``channel_spec`` (columns
by role: categorical, numerical, label), ``source_spec`` (per split the files and the columns in them), and ``metadata``
(free; hotbed keeps the schema and the number of samples there).
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
from hotbed.checks import Count, check
from hotbed.data.columns import SparseColumn
from hotbed.data.row_location import RowLocation, find_label_ranges
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.jagged import Jagged
from hotbed.large_tensors import empty
from hotbed.locations import location
from hotbed.parsing import TextError, fault_of, parse_yaml, read_limited
from hotbed.torch_private import copy_all_

if TYPE_CHECKING:  # it needs pyarrow
    from hotbed.data.encoding.encoder import Encoder

DESCRIPTION = "feature_spec.yaml"
_DTYPES: dict[str, tuple[str, ...]] = {
    "categorical": ("int8", "int16", "int32", "int64"),
    "numerical": ("float16", "float32"),
    "label": ("bool", "int8", "uint8", "float16", "float32"),
}


@dataclass(frozen=True)
class StoredFile:
    """One ``.bin`` file: its path, dtype, and bytes per sample."""

    path: Path
    dtype: np.dtype[Any]
    sample_bytes: int


@dataclass(frozen=True)
class FeatureSpec:
    """A dataset's schema, and per split the file that holds each column (numericals share one).

    ``preparation`` says how raw values became what is stored, unchecked; None where the description does not say it.
    """

    folder: Path
    schema: Schema
    files: Mapping[str, Mapping[str, StoredFile]]
    preparation: object = None

    def absolute(self) -> FeatureSpec:
        """The same with paths that hold in any working directory."""
        files = {
            split: {name: replace(file, path=file.path.absolute()) for name, file in of_split.items()}
            for split, of_split in self.files.items()
        }
        return replace(self, folder=self.folder.absolute(), files=files)


def id_dtype(name: str, rows: int) -> np.dtype[Any]:
    """Dtype of stored ids below ``rows``: by NVIDIA's rule the smallest of int8/16/32 whose maximum is above."""
    for dtype in ("int8", "int16", "int32"):
        if rows < np.iinfo(dtype).max:
            return np.dtype(dtype).newbyteorder("<")
    raise SpecError(
        f"column '{name}': cardinality {rows:,} does not fit int32 (at most {np.iinfo('int32').max - 1:,}); "
        f"raise the frequency threshold, or use Parquet"
    )


def read_feature_spec(path: str | Path) -> FeatureSpec:
    """Read and check a description; see `SplitBinarySource` for the errors."""
    place = location(path) if isinstance(path, str) else path
    if isinstance(place, str):
        raise DataError(f"{path}: split-binary data is read from local disks only; copy it there, or use Parquet")
    path = place
    file = path if path.is_file() else path / DESCRIPTION
    if not file.is_file():
        raise DataError(
            f"{file} does not exist; make one with `hotbed prepare`, or give its directory; for data in another format "
            "`hotbed init` drafts a recipe"
        )
    try:
        content: object = parse_yaml(read_limited(file).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not YAML: {error}") from None
    except TextError as error:
        raise DataError(f"{file} {error}") from None
    return _Reader(file, content).read()


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
    "[key]": "a plain name, as of a directory",
    "source_spec": "a mapping with at least `train`",
    "files": "a list of one file",
}


class _Description(BaseModel, coerce_numbers_to_str=True):
    feature_spec: dict[str, _ColumnEntry]
    channel_spec: _Channels
    source_spec: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], list[_FileEntry]] = Field(min_length=1)
    metadata: object = None


class _Reader:
    """The checks of one description, each error naming the file."""

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
        columns = self.given.feature_spec
        if name not in columns:
            raise DataError(
                f"{self.file}: channel_spec names column '{name}', which feature_spec does not describe"
                f"{did_you_mean(name, columns)}"
            )
        where, given, allowed = f"{self.file}: column '{name}'", columns[name].dtype, _DTYPES[self.role[name]]
        if given not in allowed:
            raise DataError(
                f"{where} has dtype {given!r}, must be one of {', '.join(allowed)} for a {self.role[name]} column"
            )
        if self.role[name] == "categorical":
            cardinality = columns[name].cardinality
            key = f"{self.file}: feature_spec.{name}.cardinality"
            check(key, cardinality, Count, DataError, "Write the number of its ids")
            if cardinality - 1 > (most := np.iinfo(given).max):
                raise DataError(
                    f"{where} has cardinality {cardinality:,}, but its dtype {given} holds ids up to {most:,}; correct "
                    "one of them, or prepare the dataset again"
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
                    f"{where}: {path} holds columns {names}; a file holds one column or all numericals, ordered as in "
                    f"channel_spec ({numerical})"
                )
            for name in names:
                if name not in dtypes:
                    raise DataError(f"{where}: column '{name}' is in no channel of channel_spec")
                size = dtypes[name].itemsize * len(names)
                files[name] = StoredFile(self._within(path, where), dtypes[name], size)
        missing = [name for name in dtypes if name not in files]
        if missing:
            raise DataError(f"{where} lists no file for column '{missing[0]}'")
        # Numericals must be one matrix: [N, 1] files of several columns would be read as something else.
        if len({files[name].path for name in numerical}) > 1:
            raise DataError(f"{where}: the numericals must be in one file [N, {len(numerical)}], not several")
        return {_plain(name): file for name, file in files.items()}

    def _within(self, name: str, where: str) -> Path:
        """A file below the dataset's own directory; a `DataError` for any other, also behind a link."""
        root = self.file.parent
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise DataError(f"{where}: file {name!r} must be a path below {root}, without '..'")
        try:
            found = (root / name).resolve()
            found.is_file()  # raises if the name is too long
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{where}: file {name!r} cannot be found: {error}") from None
        if not found.is_relative_to(root.resolve()):
            raise DataError(f"{where}: {name} is a link to {found}, out of the dataset; move the file itself there")
        return root / name

    def _schema(self) -> Schema:
        kept = self._metadata("schema")
        try:
            sparse = tuple(
                SparseColumn(name=_plain(name), rows=self.given.feature_spec[name].cardinality)
                for name in self.channels["categorical"]
            )
            dense, labels = (tuple(map(_plain, self.channels[role])) for role in ("numerical", "label"))
            plain = Schema(sparse=sparse, dense=dense, labels=labels)
            if kept is not None and not isinstance(kept, Mapping):
                raise SpecError(f"metadata.schema is {type(kept).__name__}, must be a mapping")
            schema = plain if kept is None else Schema.from_dict(cast("Mapping[str, object]", kept))
        except SpecError as error:
            raise DataError(f"{self.file}: {error}") from None
        if [(c.name, c.rows) for c in schema.sparse] != [(c.name, c.rows) for c in sparse] or (
            (schema.dense, schema.labels) != (dense, labels) or schema.scaling or schema.numericals or schema.positives
        ):
            raise DataError(
                f"{self.file}: metadata.schema and feature_spec disagree about the columns; remove metadata.schema"
            )
        return schema


def _plain(name: str) -> str:
    """Column name without the ``.bin`` that NVIDIA's scripts put at the end of names of categorical columns."""
    return name.removesuffix(".bin")


_MOST_OPEN = 256
"""Files that stay open at a time, of the 1,024 that a process commonly may have."""
_WIDENED_AT_ONCE = 1 << 14
"""Values; torch divides 32,768 and more among threads."""
_LABELS_AT_ONCE = 1 << 24


class OpenFiles:
    """Files of a dataset that were read, open until this is garbage; safe for several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        weakref.finalize(self, _close, self._descriptors)

    def read(self, file: StoredFile, start: int, out: NDArray[Any]) -> None:
        """Fill ``out`` (``[n]`` or ``[n, I]``) with the samples from ``start`` on, converted to its dtype."""
        descriptor = self._descriptor(file.path)
        try:
            same = file.dtype == out.dtype
            stored = out.reshape(-1) if same else self._memory(out.size, file.dtype)
            _fill(file, descriptor, start * file.sample_bytes, stored)
        finally:
            if file.path not in self._descriptors:
                os.close(descriptor)
        if not same:
            _convert(stored, out.reshape(-1))

    def labels(self, name: str, file: StoredFile, samples: int) -> Iterator[tuple[RowLocation, str, NDArray[Any]]]:
        """Read the labels of a file part by part, each with its place and the name of its column."""
        for start in range(0, samples, _LABELS_AT_ONCE):
            part = np.empty(min(_LABELS_AT_ONCE, samples - start), dtype=file.dtype)
            self.read(file, start, part)
            if part.dtype == np.bool_:
                part = part.view(np.uint8)  # a byte may hold more than 0 and 1
            yield RowLocation(str(file.path), lambda at, start=start: f"sample {start + at:,}"), name, part

    def _descriptor(self, path: Path) -> int:
        """One that stays open, unless there are too many of them."""
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
        """Uninitialised ``[size]`` of this thread, until it asks again."""
        found: NDArray[np.uint8] | None = getattr(self._scratch, "memory", None)
        if found is None or len(found) < size * dtype.itemsize:
            found = self._scratch.memory = np.empty(size * dtype.itemsize, np.uint8)
        return found[: size * dtype.itemsize].view(dtype)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # of another process, or of a copy: none


def _fill(file: StoredFile, descriptor: int, first: int, out: NDArray[Any]) -> None:
    """Read ``out`` from byte ``first`` on."""
    view, found = out.view(np.uint8).data, 0
    while found < len(view):
        count = os.preadv(descriptor, [view[found:]], first + found)
        if not count:
            raise DataError(
                f"{file.path}: expected {len(view):,} bytes from byte {first:,} on, found {found:,}; the file was cut "
                "short after it was opened"
            )
        found += count


def _close(descriptors: Mapping[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def count_samples(files: Mapping[str, StoredFile]) -> int:
    """Count the samples of a split; raises unless every file holds whole samples and all hold as many."""
    sizes: dict[str, int] = {}
    for name, file in files.items():
        if not file.path.is_file():
            raise DataError(f"{file.path} does not exist, but feature_spec.yaml lists it for '{name}'")
        sizes[name] = file.path.stat().st_size
    fullest = max(files, key=lambda name: sizes[name] / files[name].sample_bytes)
    samples = -(-sizes[fullest] // files[fullest].sample_bytes)
    for name, file in files.items():
        expected = samples * file.sample_bytes
        if sizes[name] != expected:
            raise DataError(
                f"{file.path}: expected {expected:,} bytes, found {sizes[name]:,} ({samples:,} samples × "
                f"{file.sample_bytes} bytes of {file.dtype.name}, as {files[fullest].path.name} has); the file is "
                f"truncated or its dtype in feature_spec.yaml is wrong: copy or prepare it again"
            )
    return samples


def _convert(stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Convert values ``[n]``; float16 by torch, five times as fast as NumPy, in parts that it does not divide."""
    if stored.dtype == np.float16 and out.dtype == np.float32:
        # One call for all parts, as each call waits for Python's lock.
        target, source = (list(torch.from_numpy(of).split(_WIDENED_AT_ONCE)) for of in (out, stored))
        copy_all_(target, source)
    else:
        np.copyto(out, stored, casting="unsafe")


class SplitBinarySource(Source):
    """Samples in NVIDIA's split-binary format.

    Ids come out as int32 (int64 if any column is stored so), numericals and labels as float32. Ids that are not below
    the cardinality are left to the embedding's own check.

    Parameters
    ----------
    path
        Directory with ``feature_spec.yaml``, or that file.
    chunk_samples
        Samples per chunk, the unit of reading and shuffling.

    Raises
    ------
    DataError
        If the description is not what the format says, a cardinality does not fit its dtype, or a ``.bin`` file is
        absent or has not the bytes that the others imply.
    """

    def __init__(self, path: str | Path, *, chunk_samples: int = 65_536) -> None:
        if chunk_samples < 1:
            raise SpecError(f"chunk_samples is {chunk_samples:,}, must be at least 1")
        self._spec: FeatureSpec = read_feature_spec(path)
        self.schema = self._spec.schema
        self.splits = tuple(self._spec.files)
        self.chunk_samples = chunk_samples
        self._samples = {split: count_samples(files) for split, files in self._spec.files.items()}
        self._open = OpenFiles()
        self._encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder | None:
        """What turns raw rows into batches, as `hotbed.prepare` did; None where the dataset does not say how.

        Raises
        ------
        DataError
            If what it says cannot be right.
        """
        from hotbed.data.encoding.encoder import Encoder
        from hotbed.data.encoding.prepared_dataset import Preparation

        if self._encoder is None and self._spec.preparation is not None:
            preparation = Preparation.of_dataset(self._spec.folder, self.schema, self._spec.preparation)
            self._encoder = Encoder(self.schema, ids="raw", preparation=preparation)
        if self._encoder is not None and self._encoder.schema is not self.schema:  # of fewer columns, see `only`
            self._encoder = self._encoder.of(self.schema)
        return self._encoder

    def __getstate__(self) -> dict[str, object]:
        """What is sent to readers, which may run in other directories."""
        return {**self.__dict__, "_spec": self._spec.absolute(), "_encoder": None, "_open": OpenFiles()}

    def files(self) -> list[Path]:
        """All files of columns."""
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
        wide = any(files[c.name].dtype.itemsize == 8 for c in self.schema.sparse)
        ids = empty((len(self.schema.sparse), n), torch.int64 if wide else torch.int32)
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
    """Raise a `SpecError` if the format cannot hold samples of a schema."""
    ragged = next((column for column in schema.sparse if column.ids != 1), None)
    for found, problem in (
        (schema.weight_columns or schema.group, "has no weight or group column; use Parquet for them"),
        (schema.scaling or schema.numericals, "does not scale numericals; write them scaled, or use Parquet"),
        (schema.positives, "does not map labels; write them as 0 and 1, or use Parquet"),
        (not schema.labels, "needs at least one label column"),
        (schema.id_weights, f"has no weights of ids ('{', '.join(schema.id_weights)}'); use Parquet for them"),
        (
            ragged,
            f"holds one id per sample, and sparse column '{ragged and ragged.name}' has "
            f"{(ragged and ragged.ids) or 'a varying number of'} ids per sample; use Parquet for multi-hot columns",
        ),
    ):
        if found:
            raise SpecError(f"the split-binary format {problem}")


class SplitBinaryWriter:
    """Write samples in split-binary format, part by part; a context manager.

    ``feature_spec.yaml`` is written last, so a directory without it is not a dataset.

    Parameters
    ----------
    path
        An existing directory, which becomes the dataset.
    schema
        What is written: one-hot sparse columns, one or more labels, no weight and no group column. The files of sparse
        columns are ``cat_0.bin``, ``cat_1.bin``, … in this order.
    splits
        Names of the splits; NVIDIA's scripts know ``train`` and ``test``.
    preparation
        How raw values became what is written, see `hotbed.data.encoding.prepared_dataset.PreparationEntry`.

    Raises
    ------
    SpecError
        If the format cannot hold the schema.
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
        """Append labels ``[n]`` or ``[n, T]``, 0 or 1; a `DataError` names any other."""
        columns = labels.reshape(len(labels), len(self.schema.labels))
        for t, file in enumerate(self._label_names):
            values = columns[:, t]
            self._refuse((values != 0) & (values != 1), values, f"{split}/{file}", self.schema.labels[t], "0 or 1")
        self.samples[split] += len(labels)
        for t, file in enumerate(self._label_names):
            self._append(split, file, (columns[:, t] != 0).view(np.uint8))

    def append_dense(self, split: str, dense: NDArray[Any]) -> None:
        """Append numericals ``[n, I]``; stored as float16. A `DataError` names one that it cannot hold."""
        with np.errstate(over="ignore"):
            stored = dense.astype("<f2")
        bad = ~np.isfinite(stored)
        if bad.any():
            problem = f"finite and at most {np.finfo(np.float16).max:,.0f} in size to be stored as float16"
            for i, column in enumerate(self.schema.dense):
                self._refuse(bad[:, i], dense[:, i], f"{split}/numerical.bin", column, problem)
        self._append(split, "numerical.bin", stored)

    def append_ids(self, split: str, column: int, ids: NDArray[Any]) -> None:
        """Append ids ``[n]`` of one sparse column, by its position in the schema; a `DataError` names a bad one."""
        name, rows = self.schema.sparse[column].name, self.schema.sparse[column].rows
        file = self._cat_names[column]
        self._refuse((ids < 0) | (ids >= rows), ids, f"{split}/{file}", name, f"an id from 0 to {rows - 1:,}")
        self._append(split, file, ids.astype(self._dtypes[column]))

    def append(self, split: str, batch: Batch) -> None:
        """Append all columns of a batch, matched by name."""
        if batch.labels is None or (batch.dense is None) == bool(self.schema.dense):
            raise SpecError("the batch needs the labels and numericals of the schema, to be written")
        self.append_labels(split, batch.labels.numpy())
        if batch.dense is not None:
            self.append_dense(split, batch.dense.numpy())
        for i, column in enumerate(self.schema.sparse):
            self.append_ids(split, i, batch.sparse[column.name].values.numpy())

    def append_dataset(self, path: Path) -> None:
        """Append all samples of a dataset that another writer has written with the same schema and splits."""
        for split in self.samples:
            for name in (*self._label_names, *(["numerical.bin"] if self.schema.dense else []), *self._cat_names):
                with (path / split / name).open("rb") as stored:
                    shutil.copyfileobj(stored, self._file(f"{split}/{name}"), 1 << 20)
            samples = (path / split / self._label_names[0]).stat().st_size  # of a byte each
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
        """Raise `DataError` if any value ``[n]`` is bad, naming the first; samples count from the split's start."""
        place = RowLocation(key, lambda at: f"sample {self._written[key] + at:,}")
        place.refuse(column, "values", bad, values, "{}", f"it must be {wanted}")

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
