"""Read exported models and sets of changes, which training publishes for servers.

A manifest is a pydantic model. It is validated before any other file is read, because the directory may come from an
untrusted source. The manifest contains the size and hash of each file. Sizes are compared with the shapes of tables, so
that readers allocate no more memory than the files hold.

An exported model is a directory, local or in an object store. A server needs no further files, and no checkpoint::

    DIR/manifest.json        `ModelManifest`, with size and SHA-256 of every file; written last
        dense.pt2            the dense part, a program of torch.export with its parameters
        tables/NAME.rows     one record per row, in the order of rows and in the dtype of the table
        tables/NAME.ids      the id of each row of a dynamic table, int64; -1 for a free row
        lookups/, vocabulary/    keys and values for `Encoder`: a file per derived input with a lookup, or per table

A set of changes turns a model into a later state of the model::

    DIR/manifest.json        `ChangeManifest` with the states before and after; written last
        rows.parquet         the rows that changed, by id (`hotbed.checkpoint.changes`)
        dense.safetensors    all parameters and buffers of the dense program

A *state* identifies the parameters of a model: it is the SHA-256 of the manifest of the exported checkpoint. Changes
can be applied only to a model with the state ``base.state`` in the `ChangeManifest`. ``docs/serving.md`` describes
every entry.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from typing_extensions import override

from hotbed.checkpoint.manifest import Count, Digest, Entry, InitEntry, Step, Text, parse_object
from hotbed.checkpoint.storage import Directory, LocalDirectory, Reader, directory
from hotbed.checks import check
from hotbed.data import Encoder, Schema
from hotbed.data.derived_features import Lookup
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.encoding.prepared_dataset import PreparationEntry
from hotbed.errors import CheckpointError, DamagedError, DataError, SpecError
from hotbed.files import new_file
from hotbed.parsing import validate_model
from hotbed.specs import MAX_DIM, Feature, OnBadId, OnTooLong, Padding, Pooling, RowDtype, Table
from hotbed.store.device_store import TORCH_DTYPES
from hotbed.store.format import RecordFormat
from hotbed.torch_hooks import load_program

MANIFEST = "manifest.json"
ROWS, DENSE = "rows.parquet", "dense.safetensors"  # files of a set of changes
MOST_BYTES = 64 << 20  # upper limit of the size of a manifest
CHUNK_BYTES = 4 << 20  # bytes that are hashed or fetched at once
ROWS_AT_ONCE = 1 << 16  # changed rows that are read at once
VERSION = 1

FilePath = Annotated[str, Field(pattern=r"^((tables|lookups|vocabulary)/)?[\w%][\w.%~-]*$", max_length=300)]
"""A file in the directory, or in its folders ``tables``, ``lookups`` and ``vocabulary``."""
Seconds = Annotated[float, Field(ge=0)]


# -- manifests ------------------------------------------------------------------------------------------------------


class ExportedFile(Entry):
    """Size and hash of a whole file."""

    bytes: Count
    sha256: Digest


class StateEntry(Entry):
    """A version of the parameters: the training step, and the SHA-256 of the manifest of the exported checkpoint."""

    step: Count
    state: Digest


class TableEntry(Entry):
    """A table: ``rows`` records of ``record_bytes`` in ``file``, and the ids of a dynamic table's rows in ``ids``."""

    rows: Step
    dim: Annotated[int, Field(ge=1, le=MAX_DIM)]
    dtype: RowDtype
    fp32_rows: Count
    init: InitEntry
    record_bytes: Step
    file: FilePath
    ids: FilePath | None = None

    def spec(self, name: str) -> Table:
        """Return the spec of this table, named ``name``. For a dynamic table, the spec's ``rows`` is the capacity."""
        return self.init.table(name, self.rows, self.dim, self.dtype, self.fp32_rows)

    def is_wide(self, rows: Tensor) -> Tensor:
        """Return a mask ``[n]``: whether each of the row numbers ``[n]`` is stored as float32."""
        return rows < (self.rows if self.dtype == "fp32" else self.fp32_rows)

    def records(self) -> RecordFormat:
        """Return the layout of a record."""
        return record_format(self.spec("table"))


class FeatureEntry(Entry):
    """A feature, and how its ids are looked up. The vectors of the feature are an input of the dense program."""

    collection: Annotated[str, Field(max_length=4096)]
    feature: Text
    table: Text
    pooling: Pooling
    max_len: Step | None
    on_too_long: OnTooLong
    on_bad_id: OnBadId
    padding: Padding | None = None

    def spec(self, table: str) -> Feature:
        """Return the spec of the feature. ``table`` is the name of the feature's table in the collection."""
        options: dict[str, Any] = {"max_len": self.max_len, "on_too_long": self.on_too_long, "padding": self.padding}
        return Feature(self.feature, table, pooling=self.pooling, on_bad_id=self.on_bad_id, **options)


class DenseEntry(Entry):
    """The dense program, the number of its dense inputs, and their dtype (None without inputs)."""

    file: FilePath
    inputs: Count
    dtype: Literal["float32", "float64"] | None


class ModelManifest(Entry):
    """Content of ``manifest.json`` of an exported model."""

    format: Literal["hotbed-model"] = "hotbed-model"
    version: Literal[1] = VERSION
    name: Text  # name of the recipe
    step: Count  # `step` and `state` are the version of the parameters, see `StateEntry`
    state: Digest
    written: Seconds  # time when the model was written, in seconds since 1970
    labels: list[Text]  # label of each column of the scores
    encoder: dict[str, Any]  # `hotbed.data.Encoder.to_dict`, with the input columns as `schema`
    lookups: dict[Text, FilePath]  # file with keys and values, by derived input
    # file with the ids of raw values, by table of the schema
    vocabularies: dict[Text, FilePath] = Field(default_factory=dict)
    hash: str | None  # description of how ids are hashed to rows; None: ids are row numbers
    dense: DenseEntry
    # input vectors of the dense program, in order, by `COLLECTION.FEATURE`; see `hotbed.nn.dense_program.vectors_name`
    features: dict[Text, FeatureEntry]
    tables: dict[Text, TableEntry]  # by `COLLECTION.TABLE`
    files: dict[FilePath, ExportedFile]  # size and hash of each file

    def faults(self) -> Iterator[str]:
        """Yield contradictions between tables, features and files."""
        named = {"dense.file": self.dense.file}
        named |= {f"lookups.{feature}": file for feature, file in self.lookups.items()}
        named |= {f"vocabularies.{name}": file for name, file in self.vocabularies.items()}
        sizes: list[tuple[str, str, int]] = []
        for name, table in self.tables.items():
            if table.fp32_rows > table.rows:
                yield f"tables.{name}.fp32_rows: got {table.fp32_rows:,}, expected at most rows {table.rows:,}"
            elif table.record_bytes != (nbytes := table.records().record_bytes):
                yield (
                    f"tables.{name}.record_bytes: got {table.record_bytes:,}, expected {nbytes:,} for {table.dtype} "
                    f"rows of {table.dim} columns. Use the release that wrote the model"
                )
            for key, file, nbytes in (("file", table.file, table.record_bytes), ("ids", table.ids, 8)):
                if file is not None:
                    named[f"tables.{name}.{key}"] = file
                    sizes.append((name, file, table.rows * nbytes))
        yield from _missing_files(named, self.files)
        for name, file, nbytes in sizes:
            if file in self.files and self.files[file].bytes != nbytes:
                yield f"files.{file}.bytes: got {self.files[file].bytes:,}, expected {nbytes:,} for table '{name}'"
        for name, feature in self.features.items():
            if feature.table not in self.tables:
                yield f"features.{name}.table: got '{feature.table}', expected a key of tables"
            if feature.pooling == "none" and feature.max_len is None:
                yield f"features.{name}.max_len: got null, expected a limit for a feature without pooling"
        if not isinstance(self.encoder.get("schema"), dict):
            yield "encoder.schema: expected a mapping of columns"
        if (self.dense.inputs == 0) != (self.dense.dtype is None):
            expected = "0 for dense.dtype null" if self.dense.dtype is None else f"at least 1 for {self.dense.dtype}"
            yield f"dense.inputs: got {self.dense.inputs}, expected {expected}"


class CountEntry(Entry):
    """Number of ids of a table that a set of changes writes (``upserts``) and deletes (``deletes``)."""

    upserts: Count
    deletes: Count


class ChangeManifest(Entry):
    """Content of ``manifest.json`` of a set of changes.

    ``encoder`` is the `encoder_digest` of the models before and after the changes. The digest must be the same for
    both models, because a set of changes contains only rows and parameters.
    """

    format: Literal["hotbed-change"] = "hotbed-change"
    version: Literal[1] = VERSION
    base: StateEntry
    sequence: StateEntry
    written: Seconds
    encoder: Digest
    tables: dict[Text, CountEntry]
    files: dict[FilePath, ExportedFile]

    def faults(self) -> Iterator[str]:
        """Yield a message for each file that is missing in ``files``."""
        return _missing_files({f"file {name}": name for name in (ROWS, DENSE)}, self.files)


def _missing_files(named: Mapping[str, str], files: Mapping[str, ExportedFile]) -> Iterator[str]:
    return (f"{key}: got {file}, expected a key of files" for key, file in named.items() if file not in files)


_Manifest = TypeVar("_Manifest", ModelManifest, ChangeManifest)


def read_export(form: type[_Manifest], folder: Directory) -> _Manifest:
    """Read and check the manifest of a directory. ``form`` is `ModelManifest` or `ChangeManifest`.

    Raise `CheckpointError` if the manifest is missing or invalid, and `DamagedError` if it is not JSON.
    """
    if not folder.has(MANIFEST):
        raise CheckpointError(f"{folder} has no {MANIFEST}. Pass a complete directory written by hotbed export")
    where = f"{folder}/{MANIFEST}"
    values = parse_object(folder.read(MANIFEST, MOST_BYTES), where)
    for key, fix in (
        ("format", "Pass a directory written by hotbed export or train.publish"),
        ("version", "Use the release that wrote the manifest"),
    ):
        check(f"{where}: {key}", values.get(key), form.model_fields[key].annotation, CheckpointError, fix)
    manifest = validate_model(form, values, CheckpointError, where)
    if fault := next(manifest.faults(), None):
        raise CheckpointError(f"{where}: {fault}")
    return manifest


def record_format(spec: Table) -> RecordFormat:
    """Return the layout of a table's records, which have no moments."""
    wide = spec.rows if spec.dtype == "fp32" else spec.fp32_rows
    return RecordFormat(spec.dim, TORCH_DTYPES[spec.dtype], has_wide=wide > 0, has_narrow=wide < spec.rows)


def encoder_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the result of `Encoder.to_dict`, to recognize models that encode rows differently."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# -- directories ----------------------------------------------------------------------------------------------------


class Published(Generic[_Manifest]):
    """A directory with a checked manifest. Its other files are read on demand.

    Remote files of models are copied to ``cache``, named by their SHA-256 (default: ``hotbed/models`` in the user's
    cache directory).
    """

    _form: type[_Manifest]

    def __init__(self, folder: Directory, manifest: _Manifest, cache: str | Path | None = None) -> None:
        self.folder, self.manifest, self._entries = folder, manifest, manifest.files
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed" / "models"
        self._cache = default if cache is None else Path(cache)
        self._fetched: dict[str, Path] = {}

    @classmethod
    def open(cls, path: str | Path | Directory, cache: str | Path | None = None) -> Self:
        """Open a directory written by ``hotbed export`` or ``train.publish``, at a path or URI.

        Raise `CheckpointError` if the directory has no valid manifest, or if the manifest belongs to a different class.
        """
        folder = directory(path)
        return cls(folder, read_export(cls._form, folder), cache)

    @override
    def __str__(self) -> str:
        return str(self.folder)

    def path(self, name: str) -> Path:
        """Return the path of a local file with the content of ``name``. A remote file is fetched to the cache first.

        Raise `DamagedError` if the file is missing, or its size differs from the manifest. The hash is checked only for
        remote files.
        """
        if name in self._fetched and self._fetched[name].is_file():
            return self._fetched[name]
        with self._open_sized(name) as (folder, reader):
            if isinstance(folder, LocalDirectory):
                return folder.root / name.rpartition("/")[2]
            self._fetched[name] = self._fetch_into_cache(name, reader)
            return self._fetched[name]

    @contextmanager
    def open_file(self, name: str) -> Generator[BinaryIO]:
        """Open a file and check its hash. A remote file is copied first, and closing the file deletes the copy.

        Raise `DamagedError` if the file is missing, or its size or hash differs from the manifest.
        """
        with ExitStack() as stack:
            folder, reader = stack.enter_context(self._open_sized(name))
            if isinstance(folder, LocalDirectory):
                file = stack.enter_context((folder.root / name.rpartition("/")[2]).open("rb"))
                self._check(name, hashlib.file_digest(file, "sha256").hexdigest())
            else:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="hotbed-"))
                self._fetch(name, reader, file)
            file.seek(0)
            yield file

    def read(self, name: str) -> bytes:
        """Read a whole file and check its hash; see `open_file`."""
        with self.open_file(name) as file:
            return file.read()

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read all files, and raise `DamagedError` if the size or hash of a file differs from the manifest.

        ``progress`` is called with the number of bytes that have been read, and the number of all bytes.
        """
        done, total = 0, sum(entry.bytes for entry in self._entries.values())
        for name in self._entries:
            found = hashlib.sha256()
            with self.path(name).open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    found.update(chunk)
                    done += len(chunk)
                    progress(done, total)
            self._check(name, found.hexdigest())

    def forget(self, kept: Self | None = None) -> None:
        """Remove the files that this object fetched from the cache, except files that ``kept`` needs."""
        needed = set[Path]() if kept is None else {self._cache / entry.sha256 for entry in kept._entries.values()}
        for path in set(self._fetched.values()) - needed:
            path.unlink(missing_ok=True)
        self._fetched.clear()

    @contextmanager
    def _open_sized(self, name: str) -> Generator[tuple[Directory, Reader]]:
        """Open a file and check its size. Yield the directory that contains the file, and a reader of the file."""
        wanted = self._entries[name].bytes
        inner, _, last = name.rpartition("/")
        folder = self.folder / inner if inner else self.folder
        try:
            reader = folder.reader(last)
        except FileNotFoundError:
            raise DamagedError(f"{self}/{name} is missing. Copy the directory again") from None
        try:
            if reader.size != wanted:
                raise DamagedError(
                    f"{self}/{name}: got {reader.size:,} bytes, expected {wanted:,}. Copy the directory again"
                )
            yield folder, reader
        finally:
            reader.close()

    def _check(self, name: str, sha256: str) -> None:
        if sha256 != self._entries[name].sha256:
            raise DamagedError(f"{self}/{name} is damaged: its SHA-256 differs. Copy the directory again")

    def _fetch_into_cache(self, name: str, reader: Reader) -> Path:
        """Fetch a remote file, unless the cache contains it, and return its path in the cache."""
        entry = self._entries[name]
        target = self._cache / entry.sha256
        if target.is_file() and target.stat().st_size == entry.bytes:
            with target.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256:
                    return target
        self._cache.mkdir(parents=True, exist_ok=True)
        with new_file(target) as unfinished, unfinished.open("r+b") as stream:
            self._fetch(name, reader, stream)
        return target

    def _fetch(self, name: str, reader: Reader, file: BinaryIO) -> None:
        size, found = self._entries[name].bytes, hashlib.sha256()
        for start in range(0, size, CHUNK_BYTES):
            chunk = memoryview(bytearray(min(CHUNK_BYTES, size - start)))
            reader.read_into(chunk, start)
            found.update(chunk)
            file.write(chunk)
        self._check(name, found.hexdigest())


class ExportedModel(Published[ModelManifest]):
    """An exported model."""

    _form = ModelManifest

    def __init__(self, folder: Directory, manifest: ModelManifest, cache: str | Path | None = None) -> None:
        super().__init__(folder, manifest, cache)
        try:
            self.schema = Schema.from_dict(manifest.encoder["schema"])  # the input columns
        except (SpecError, DataError) as error:
            raise CheckpointError(f"{folder}/{MANIFEST}: encoder.schema is invalid: {error}") from None
        self._program: bytes | None = None

    def encoder(self) -> Encoder:
        """Return the encoder that converts raw rows to inputs, as in training.

        Raise `CheckpointError` if the manifest's entry ``encoder`` is invalid, or if a lookup table is damaged.
        """
        from pyarrow import parquet

        needed = [("lookups", "table for feature", d.name) for d in self.schema.derived if isinstance(d, Lookup)]
        if (preparation := self.manifest.encoder.get("preparation")) is not None:
            tables = PreparationEntry.parse(preparation, f"{self}/{MANIFEST}: encoder.preparation").vocabularies
            needed += [("vocabularies", "values of table", table) for table in tables]
        for key, what, name in needed:
            if name not in getattr(self.manifest, key):
                raise CheckpointError(f"{self}/{MANIFEST}: {key} has no {what} '{name}'. Export the model again")
        try:
            found = self.manifest.lookups.items()
            tables = {feature: parquet.read_table(io.BytesIO(self.read(file))) for feature, file in found}
            return Encoder.from_dict(self.manifest.encoder, tables, self._vocabulary)
        except DamagedError:
            raise
        except (DataError, SpecError, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{self}/{MANIFEST}: encoder is invalid: {error}") from None

    def _vocabulary(self, table: str) -> LookupTable:
        return LookupTable.map_file(self.path(self.manifest.vocabularies[table]))

    def collections(self) -> dict[str, tuple[list[Table], list[Feature]]]:
        """Return the tables and features of each embedding collection, by the path of the collection in the model.

        Tables and features have their names in the collection, without the path.
        """
        found: dict[str, tuple[dict[str, Table], list[Feature]]] = {}
        for feature in self.manifest.features.values():
            tables, features = found.setdefault(feature.collection, ({}, []))
            own = feature.table.removeprefix(f"{feature.collection}." if feature.collection else "")
            tables[own] = self.manifest.tables[feature.table].spec(own)
            features.append(feature.spec(own))
        return {path: (list(tables.values()), features) for path, (tables, features) in found.items()}

    def records(self, table: str) -> NDArray[np.uint8]:
        """Return the stored rows of a table ``[R, record_bytes]``, mapped into memory and read-only."""
        entry = self.manifest.tables[table]
        return np.memmap(self.path(entry.file), np.uint8, "r", shape=(entry.rows, entry.record_bytes))

    def ids(self, table: str) -> NDArray[np.int64] | None:
        """Return the id of each row of a dynamic table ``[R]``, −1 for a free row. Return None for any other table."""
        entry = self.manifest.tables[table]
        return None if entry.ids is None else np.memmap(self.path(entry.ids), "<i8", "r", shape=(entry.rows,))

    def dense(self) -> nn.Module:
        """Load the dense program. Each call returns a module with separate parameters.

        The content of the file stays in memory, because each later set of changes loads the program again, and the
        directory may be removed by then. A program is code, and torch's loader may run it, so open only trusted models.
        """
        if self._program is None:
            self._program = self.read(self.manifest.dense.file)
        try:
            return load_program(io.BytesIO(self._program)).module(check_guards=False)
        except Exception as error:  # e.g. a program of another release of torch
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{self}/{self.manifest.dense.file} cannot be loaded by torch {torch.__version__}: {reason}. Export "
                "the model again with this release"
            ) from error


class TableChange(NamedTuple):
    """A block of changes of one table."""

    table: str
    deleted: Tensor  # ids ``[n]`` int64 that were deleted
    ids: Tensor  # ids ``[m]`` int64 with new vectors
    vectors: Tensor  # the new vectors ``[m, D]``


class ChangeSet(Published[ChangeManifest]):
    """Changes from one state of a model to a later state."""

    _form = ChangeManifest

    def rows(self) -> Iterator[TableChange]:
        """Yield the changed rows in blocks. No id of a table occurs twice.

        Raise `DamagedError` if the file differs from its hash, or the number of rows from the counts in the manifest.
        """
        import pyarrow as pa
        from pyarrow import parquet

        where, found = f"{self}/{ROWS}", Counter[tuple[str, str]]()
        try:
            with self.open_file(ROWS) as file, parquet.ParquetFile(file) as parquet_file:
                metadata: dict[bytes, bytes] = parquet_file.schema_arrow.metadata or {}
                for key, state in (("base", self.manifest.base.state), ("sequence", self.manifest.sequence.state)):
                    has = metadata.get(f"hotbed.{key}".encode(), b"").decode()
                    if has != state:
                        raise DamagedError(
                            f"{where}: got {key} {has[:12]}…, expected {state[:12]}… as in its manifest. Copy the file "
                            "again"
                        )
                for batch in parquet_file.iter_batches(ROWS_AT_ONCE, columns=["table", "id", "op", "vector"]):
                    yield from _by_table(batch, found, where)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise DamagedError(f"{where} is not a valid file of changes: {error}. Copy it again") from None
        for table, count in self.manifest.tables.items():
            counted = found[table, "upsert"], found[table, "delete"]
            if counted != (count.upserts, count.deletes):
                raise DamagedError(
                    f"{where}, table '{table}': got {counted[0]:,} rows and {counted[1]:,} deleted ids, expected "
                    f"{count.upserts:,} and {count.deletes:,}. Copy the file again"
                )

    def dense(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the dense program, by the names of its ``state_dict()``."""
        content = self.read(DENSE)
        try:
            return load_tensors(content)
        except Exception as error:
            raise DamagedError(f"{self}/{DENSE} is not a safetensors file: {error}. Copy the file again") from None


def _by_table(batch: Any, found: Counter[tuple[str, str]], where: str) -> Iterator[TableChange]:
    """Split a record batch, which is sorted by table and operation, into one part per table and operation.

    ``found`` counts the ids of each table and operation. ``where`` is the file's path for messages.
    """
    tables, ops = (batch.column(name).cast("string").to_numpy(zero_copy_only=False) for name in ("table", "op"))
    ids = torch.from_numpy(batch.column("id").to_numpy(zero_copy_only=False).astype(np.int64))
    vectors = batch.column("vector")
    starts = np.flatnonzero((tables[1:] != tables[:-1]) | (ops[1:] != ops[:-1])) + 1
    for first, last in zip([0, *starts.tolist()], [*starts.tolist(), len(ids)], strict=True):
        if first == last:
            continue
        table, op, some = str(tables[first]), str(ops[first]), ids[first:last]
        found[table, op] += last - first
        if op == "delete":
            yield TableChange(table, some, some[:0], torch.empty(0, 0))
            continue
        lists = vectors.slice(first, last - first)
        flat = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        lengths = np.diff(lists.offsets.to_numpy())
        if lists.null_count or op != "upsert" or (lengths != lengths[0]).any():
            raise DamagedError(
                f"{where}: table '{table}' has vectors of several lengths, or an unknown op '{op}'. Copy the file again"
            )
        yield TableChange(table, some[:0], some, torch.from_numpy(flat.copy()).view(last - first, -1))
