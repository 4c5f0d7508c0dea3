"""Read exported models and sets of changes: what training publishes for servers.

Both are checked before anything that they name is read, because they may come from anywhere: a manifest states a size
and a hash for each file, and sizes that agree with the tables, so that readers allocate no more than the files hold.

An exported model is a directory, local or in an object store, that needs no checkpoint beside it::

    DIR/manifest.json        what there is, with size and SHA-256 of every file; written last (`ModelManifest`)
        dense.pt2            the dense part, a program of torch.export with its parameters
        tables/NAME.rows     one record per row, in order, as stored in its dtype; files to be mapped into memory
        tables/NAME.ids      of a dynamic table: the id that each row has, int64; -1 where none
        lookups/, vocabulary/    by derived input, and by table: keys and values, for `Encoder`

A set of changes makes a later model of an earlier one::

    DIR/manifest.json        from which state to which; written last
        rows.parquet         the rows that changed, by id (`hotbed.checkpoint.changes`)
        dense.safetensors    all parameters and buffers of the dense program

A *state* is the SHA-256 of the manifest of the checkpoint that a model is of, so a change applies to the model whose
state is its base's and to no other. ``docs/serving.md`` describes every entry.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import reprlib
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from typing_extensions import override

from hotbed.checkpoint.manifest import Count, Digest, InitEntry, Step, Text, fault_of, parsed
from hotbed.checkpoint.storage import Directory, LocalDirectory, Reader, directory
from hotbed.checkpoint.tables import NO_ID as NO_ID
from hotbed.data import Encoder, Schema
from hotbed.data.derived import Lookup
from hotbed.data.lookup_table import LookupTable
from hotbed.data.preparation import PreparationEntry
from hotbed.errors import CheckpointError, DamagedError, DataError, SpecError
from hotbed.pooling import Pooling
from hotbed.specs import MAX_DIM, Feature, OnBadId, OnTooLong, Padding, RowDtype, Table
from hotbed.store.dense import TORCH_DTYPES
from hotbed.store.format import RecordFormat
from hotbed.torch_hooks import load_program

MANIFEST = "manifest.json"
MOST_BYTES = 64 << 20
"""Of a manifest."""
CHUNK_BYTES = 4 << 20
"""Bytes that are hashed, or fetched, at once."""
ROWS_AT_ONCE = 1 << 16
"""Changed rows that are read at once."""


# -- manifests ------------------------------------------------------------------------------------------------------

VERSION = 1
MODEL = "hotbed-model"
CHANGE = "hotbed-change"

FilePath = Annotated[str, Field(pattern=r"^((tables|lookups|vocabulary)/)?[\w%][\w.%~-]*$", max_length=300)]
"""In the directory, or in its folders ``tables``, ``lookups`` and ``vocabulary``."""
Seconds = Annotated[float, Field(ge=0)]


class Entry(BaseModel):
    """A part of a manifest; unknown keys are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class FileEntry(Entry):
    """Size and hash of a file."""

    bytes: Count
    sha256: Digest


class StateEntry(Entry):
    """Which parameters these are: the step, and the SHA-256 of the manifest of the checkpoint that has them."""

    step: Count
    state: Digest


class TableEntry(Entry):
    """A table: ``rows`` records of ``record_bytes`` in ``file``; of a dynamic one the id of each row in ``ids``."""

    rows: Step
    dim: Annotated[int, Field(ge=1, le=MAX_DIM)]
    dtype: RowDtype
    fp32_rows: Count
    init: InitEntry
    record_bytes: Step
    file: FilePath
    ids: FilePath | None = None

    def spec(self, name: str) -> Table:
        """The table, by the name it has in its collection; rows of a dynamic one are those there is room for."""
        return Table(
            name,
            self.rows,
            self.dim,
            init_bound=self.init.bound,
            init_seed=self.init.seed,
            init_version=self.init.version,
            dtype=self.dtype,
            fp32_rows=self.fp32_rows,
        )

    def is_wide(self, rows: Tensor) -> Tensor:
        """Which of some rows ``[n]`` are stored as float32, ``[n]`` bool."""
        return rows < (self.rows if self.dtype == "fp32" else self.fp32_rows)

    def records(self) -> RecordFormat:
        """How a row is laid out in its record, which has no moments."""
        return record_format(self.spec("table"))


class FeatureEntry(Entry):
    """An input of the dense program: which vectors it is, of which column."""

    collection: Annotated[str, Field(max_length=4096)]
    feature: Text
    table: Text
    pooling: Pooling
    max_len: Step | None
    on_too_long: OnTooLong
    on_bad_id: OnBadId
    padding: Padding | None = None

    def spec(self, table: str) -> Feature:
        """The feature in its collection, whose name of the table this is."""
        options: dict[str, Any] = {"max_len": self.max_len, "on_too_long": self.on_too_long, "padding": self.padding}
        return Feature(self.feature, table, pooling=self.pooling, on_bad_id=self.on_bad_id, **options)


class DenseEntry(Entry):
    """The dense program, and the numbers it takes: columns, and their dtype; None where there are none."""

    file: FilePath
    inputs: Count
    dtype: Literal["float32", "float64"] | None


class ModelManifest(Entry):
    """Content of ``manifest.json`` of an exported model."""

    name: Text  # of the recipe
    step: Count  # version of the parameters, with `state`; see `StateEntry`
    state: Digest
    written: Seconds  # time of writing, in seconds since 1970
    labels: list[Text]  # columns of the scores
    encoder: dict[str, Any]  # input columns as `schema` (`hotbed.data.Schema.to_dict`), and the scheme of ids by column
    lookups: dict[Text, FilePath]  # file with keys and values, by derived input
    # file with the ids of raw values, by table of the schema
    vocabularies: dict[Text, FilePath] = Field(default_factory=dict)
    hash: str | None  # description of how ids are hashed to rows; None: ids are rows
    dense: DenseEntry  # the dense program
    # vectors that the program takes, in order, by `COLLECTION.FEATURE`; see `hotbed.nn.dense_part.vectors_name`
    features: dict[Text, FeatureEntry]
    tables: dict[Text, TableEntry]  # by `COLLECTION.TABLE`
    files: dict[FilePath, FileEntry]  # size and hash of each file


class CountEntry(Entry):
    """How many rows of a table a change has."""

    upserts: Count
    deletes: Count


class ChangeManifest(Entry):
    """All that ``manifest.json`` of a set of changes says: from which state to which, when written, and how much.

    ``encoder`` is the `encoder_digest` of both states: changes have rows and parameters, not what makes inputs.
    """

    base: StateEntry
    sequence: StateEntry
    written: Seconds
    encoder: Digest
    tables: dict[Text, CountEntry]
    files: dict[FilePath, FileEntry]


Manifest = TypeVar("Manifest", ModelManifest, ChangeManifest)
_KINDS: Mapping[type[Entry], str] = {ModelManifest: MODEL, ChangeManifest: CHANGE}
ROWS, DENSE = "rows.parquet", "dense.safetensors"
"""Files of a set of changes."""


def record_format(spec: Table) -> RecordFormat:
    """How rows of a table are laid out in its file: as stores have them, without moments."""
    wide = spec.rows if spec.dtype == "fp32" else spec.fp32_rows
    dtype = TORCH_DTYPES[spec.dtype]
    return RecordFormat(spec.dim, dtype, has_wide=wide > 0, has_narrow=wide < spec.rows)


def encoder_digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of what makes inputs of raw rows, looked-up tables and measured boundaries included.

    ``values`` are those of `hotbed.data.Encoder.to_dict`.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest_of(kind: type[Manifest], data: bytes, where: str) -> Manifest:
    """Parse a manifest and check its consistency. Raise `CheckpointError`, or `DamagedError` if it is no JSON."""
    values = parsed(data, where)
    found, version = values.pop("format", None), values.pop("version", None)
    if found != _KINDS[kind]:
        raise CheckpointError(
            f"{where}: 'format' is {reprlib.repr(found)}, must be '{_KINDS[kind]}'; give a directory that hotbed "
            "export or train.publish made"
        )
    if version != VERSION:
        raise CheckpointError(
            f"{where} has version {reprlib.repr(version)}, this release reads {VERSION}; use the release that wrote it"
        )
    try:
        manifest = kind.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(fault_of(error, where)) from None
    if isinstance(manifest, ModelManifest):
        _check_model(manifest, where)
    else:
        _check_files(manifest, {f"file {name}": name for name in (ROWS, DENSE)}, where)
    return manifest


def values_of(manifest: ModelManifest | ChangeManifest) -> dict[str, Any]:
    """What a manifest's file holds."""
    return {"format": _KINDS[type(manifest)], "version": VERSION, **manifest.model_dump()}


def _check_model(manifest: ModelManifest, where: str) -> None:
    """Raise `CheckpointError` unless tables, features and files fit each other."""
    named = {"'dense.file'": manifest.dense.file}
    named |= {f"'lookups.{feature}'": file for feature, file in manifest.lookups.items()}
    named |= {f"'vocabularies.{name}'": file for name, file in manifest.vocabularies.items()}
    for name, table in manifest.tables.items():
        named[f"'tables.{name}.file'"] = table.file
        if table.ids is not None:
            named[f"'tables.{name}.ids'"] = table.ids
        if table.fp32_rows > table.rows:
            raise CheckpointError(
                f"{where}: 'tables.{name}.fp32_rows' is {table.fp32_rows:,}, must be at most rows {table.rows:,}"
            )
        if table.record_bytes != (nbytes := table.records().record_bytes):
            raise CheckpointError(
                f"{where}: 'tables.{name}.record_bytes' is {table.record_bytes:,}, but {table.dtype} rows of "
                f"{table.dim} columns take {nbytes:,}; use the release that wrote it"
            )
    _check_files(manifest, named, where)
    for name, table in manifest.tables.items():
        for file, nbytes in ((table.file, table.rows * table.record_bytes), (table.ids, table.rows * 8)):
            if file is not None and manifest.files[file].bytes != nbytes:
                raise CheckpointError(
                    f"{where}: 'files.{file}.bytes' is {manifest.files[file].bytes:,}, but table '{name}' needs "
                    f"{nbytes:,}"
                )
    for name, feature in manifest.features.items():
        if feature.table not in manifest.tables:
            raise CheckpointError(f"{where}: 'features.{name}.table' is '{feature.table}', which is not in 'tables'")
        if feature.pooling == "none" and feature.max_len is None:
            raise CheckpointError(f"{where}: 'features.{name}' is not pooled and has no 'max_len'")
    if (manifest.dense.inputs == 0) != (manifest.dense.dtype is None):
        raise CheckpointError(
            f"{where}: 'dense.inputs' is {manifest.dense.inputs}, with 'dense.dtype' {manifest.dense.dtype}"
        )


def _check_files(manifest: ModelManifest | ChangeManifest, named: Mapping[str, str], where: str) -> None:
    for key, file in named.items():
        if file not in manifest.files:
            raise CheckpointError(f"{where}: {key} is {file}, which 'files' does not list")


# -- directories ----------------------------------------------------------------------------------------------------


class Published:
    """A directory with a manifest: its files are local, or fetched.

    Remote files of models are cached under their SHA-256, by default in ``hotbed/models`` in the user's cache
    directory.
    """

    def __init__(self, place: Directory, files: Mapping[str, FileEntry], cache: Path | None = None) -> None:
        self.place, self._entries = place, files
        self._cache = _user_cache() if cache is None else cache
        self._fetched: dict[str, Path] = {}

    @override
    def __str__(self) -> str:
        return str(self.place)

    def path(self, name: str) -> Path:
        """Return a local file with the content of ``name``. Its size is checked, and the hash of a fetched file.

        Raise `DamagedError` if the file is missing or does not match the manifest.
        """
        if name in self._fetched and self._fetched[name].is_file():
            return self._fetched[name]
        entry = self._entries[name]
        with self._reader(name) as (place, reader):
            if isinstance(place, LocalDirectory):
                return place.root / name.rpartition("/")[2]
            self._fetched[name] = self._into_cache(name, entry, reader)
            return self._fetched[name]

    @contextmanager
    def opened(self, name: str) -> Generator[BinaryIO]:
        """Open a file whose hash is checked. A fetched file has no name and is deleted when it is closed.

        Raise `DamagedError` if the file is missing or does not match the manifest.
        """
        entry = self._entries[name]
        with ExitStack() as stack:
            place, reader = stack.enter_context(self._reader(name))
            if isinstance(place, LocalDirectory):
                file = stack.enter_context((place.root / name.rpartition("/")[2]).open("rb"))
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    raise _damaged(f"{self}/{name}")
            else:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="hotbed-"))
                self._fetch(name, entry, reader, file)
            file.seek(0)
            yield file

    @contextmanager
    def _reader(self, name: str) -> Generator[tuple[Directory, Reader]]:
        """Open a file of the size that the manifest says."""
        entry = self._entries[name]
        folder, _, last = name.rpartition("/")
        place = self.place / folder if folder else self.place
        try:
            reader = place.reader(last)
        except FileNotFoundError:
            raise DamagedError(f"{self}/{name} is gone; copy the directory again") from None
        try:
            if reader.size != entry.bytes:
                raise DamagedError(
                    f"{self}/{name} has {reader.size:,} bytes, its manifest says {entry.bytes:,}; copy the directory "
                    "again"
                )
            yield place, reader
        finally:
            reader.close()

    def read(self, name: str) -> bytes:
        """A whole file, whose hash is compared; a `DamagedError` if it is another's."""
        with self.opened(name) as file:
            return file.read()

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read all files and check their hashes. Raise `DamagedError` if one does not match.

        ``progress`` is called with the bytes read and the total.
        """
        done, total = 0, sum(entry.bytes for entry in self._entries.values())
        for name, entry in self._entries.items():
            found = hashlib.sha256()
            with self.path(name).open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    found.update(chunk)
                    done += len(chunk)
                    progress(done, total)
            if found.hexdigest() != entry.sha256:
                raise _damaged(f"{self}/{name}")

    def forget(self, kept: Published | None = None) -> None:
        """Remove what was fetched into the cache, but files that another one has, too."""
        others = set[Path]() if kept is None else {self._cache / entry.sha256 for entry in kept._entries.values()}
        for path in set(self._fetched.values()) - others:
            path.unlink(missing_ok=True)
        self._fetched.clear()

    def _into_cache(self, name: str, entry: FileEntry, reader: Reader) -> Path:
        """Fetch a remote file, unless one with its hash is there from before."""
        target = self._cache / entry.sha256
        if target.is_file() and target.stat().st_size == entry.bytes:
            with target.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256:
                    return target
        self._cache.mkdir(parents=True, exist_ok=True)
        unfinished = self._cache / f".{entry.sha256}.unfinished-{uuid.uuid4().hex[:8]}"
        try:
            with unfinished.open("xb") as stream:
                self._fetch(name, entry, reader, stream)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
        return target

    def _fetch(self, name: str, entry: FileEntry, reader: Reader, file: BinaryIO) -> None:
        found = hashlib.sha256()
        for start in range(0, entry.bytes, CHUNK_BYTES):
            chunk = memoryview(bytearray(min(CHUNK_BYTES, entry.bytes - start)))
            reader.read_into(chunk, start)
            found.update(chunk)
            file.write(chunk)
        if found.hexdigest() != entry.sha256:
            raise _damaged(f"{self}/{name}")


class ExportedModel(Published):
    """An exported model whose manifest has been checked. Its other files are read on demand."""

    def __init__(self, place: Directory, manifest: ModelManifest, cache: Path | None = None) -> None:
        super().__init__(place, manifest.files, cache)
        self.manifest = manifest
        if not isinstance(columns := manifest.encoder.get("schema"), Mapping):
            raise CheckpointError(f"{place}/{MANIFEST}: 'encoder.schema' is missing, or no mapping of columns")
        try:
            self.schema = Schema.from_dict(columns)  # the input columns
        except (SpecError, DataError) as error:
            raise CheckpointError(f"{place}/{MANIFEST}: 'encoder.schema' cannot be used: {error}") from None
        self._program: bytes | None = None

    @classmethod
    def open(cls, place: str | Path | Directory, cache: Path | None = None) -> ExportedModel:
        """Open a directory (path or URI) that ``hotbed export`` wrote; ``cache`` is as in `Published`.

        Raise `CheckpointError` if it is no exported model, or its manifest does not match the schema.
        """
        found = directory(place)
        return cls(found, _manifest(ModelManifest, found), cache)

    def encoder(self) -> Encoder:
        """Return the encoder that converts raw rows to inputs, as in training.

        Raise `CheckpointError` if its entry in the manifest is invalid or a lookup table is damaged.
        """
        from pyarrow import parquet

        needed = [("lookups", "table for feature", d.name) for d in self.schema.derived if isinstance(d, Lookup)]
        if (preparation := self.manifest.encoder.get("preparation")) is not None:
            tables = PreparationEntry.parse(preparation, f"{self}/{MANIFEST}: encoder.preparation").vocabularies
            needed += [("vocabularies", "values of table", table) for table in tables]
        for key, what, name in needed:
            if name not in getattr(self.manifest, key):
                raise CheckpointError(f"{self}/{MANIFEST}: '{key}' has no {what} '{name}'; export the model again")
        try:
            found = self.manifest.lookups.items()
            tables = {feature: parquet.read_table(io.BytesIO(self.read(file))) for feature, file in found}
            return Encoder.from_dict(self.manifest.encoder, tables, self._vocabulary)
        except DamagedError:
            raise
        except (DataError, SpecError, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{self}/{MANIFEST}: 'encoder' cannot be used: {error}") from None

    def _vocabulary(self, table: str) -> LookupTable:
        return LookupTable.mapped(self.path(self.manifest.vocabularies[table]))

    def collections(self) -> dict[str, tuple[list[Table], list[Feature]]]:
        """Tables and features of each embedding collection of the model, by its path; names are those inside of it."""
        found: dict[str, tuple[dict[str, Table], list[Feature]]] = {}
        for feature in self.manifest.features.values():
            tables, features = found.setdefault(feature.collection, ({}, []))
            own = feature.table.removeprefix(f"{feature.collection}." if feature.collection else "")
            tables[own] = self.manifest.tables[feature.table].spec(own)
            features.append(feature.spec(own))
        return {path: (list(tables.values()), features) for path, (tables, features) in found.items()}

    def records(self, table: str) -> NDArray[np.uint8]:
        """Rows of a table as they are stored ``[R, record_bytes]``, mapped into memory and not writable."""
        entry = self.manifest.tables[table]
        return self._mapped(entry.file, np.dtype(np.uint8), (entry.rows, entry.record_bytes))

    def ids(self, table: str) -> NDArray[np.int64] | None:
        """The id that each row of a dynamic table has ``[R]``, `NO_ID` where none; None for other tables."""
        entry = self.manifest.tables[table]
        return None if entry.ids is None else self._mapped(entry.ids, np.dtype("<i8"), (entry.rows,))

    def dense(self) -> nn.Module:
        """The dense program, as a module; each call makes one with parameters of its own.

        Its file is read once and kept, for it may be removed while changes to this model go on.
        A program is code: torch's loader may run what is in the file, so open only models whose origin is trusted.
        """
        if self._program is None:
            self._program = self.read(self.manifest.dense.file)
        try:
            return load_program(io.BytesIO(self._program)).module(check_guards=False)
        except Exception as error:  # whatever another release of torch meets in it
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{self}/{self.manifest.dense.file} cannot be loaded by torch {torch.__version__}: {reason}; export "
                "the model again with this release"
            ) from error

    def _mapped(self, file: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        return np.memmap(self.path(file), dtype, "r", shape=shape)


class TableChange(NamedTuple):
    """Some of the changes of a table: ids that are gone ``[n]`` int64, and ids ``[m]`` with vectors ``[m, D]``."""

    table: str
    deleted: Tensor
    ids: Tensor
    vectors: Tensor


class ChangeSet(Published):
    """Changes from one state of a model to a later one, whose manifest has been checked."""

    def __init__(self, place: Directory, manifest: ChangeManifest, cache: Path | None = None) -> None:
        super().__init__(place, manifest.files, cache)
        self.manifest = manifest

    @classmethod
    def open(cls, place: str | Path | Directory, cache: Path | None = None) -> ChangeSet:
        """Open a directory that ``hotbed export --since`` or ``train.publish`` made; as `ExportedModel.open`."""
        found = directory(place)
        return cls(found, _manifest(ChangeManifest, found), cache)

    def rows(self) -> Iterator[TableChange]:
        """Yield the changed rows in blocks; each id of a table occurs once.

        Raise `DamagedError` if the file does not match its hash, or the rows do not match the counts of the manifest.
        """
        import pyarrow as pa
        from pyarrow import parquet

        where, found = f"{self}/{ROWS}", Counter[tuple[str, str]]()
        try:
            with self.opened(ROWS) as file, parquet.ParquetFile(file) as parquet_file:
                metadata: dict[bytes, bytes] = parquet_file.schema_arrow.metadata or {}
                for key, state in (("base", self.manifest.base.state), ("sequence", self.manifest.sequence.state)):
                    has = metadata.get(f"hotbed.{key}".encode(), b"").decode()
                    if has != state:
                        raise DamagedError(
                            f"{where} has '{key}' {has[:12]}…, its manifest {state[:12]}…; copy it again"
                        )
                for batch in parquet_file.iter_batches(ROWS_AT_ONCE, columns=["table", "id", "op", "vector"]):
                    yield from _by_table(batch, found, where)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise DamagedError(f"{where} is not what hotbed writes: {error}") from None
        for table, count in self.manifest.tables.items():
            counted = found[table, "upsert"], found[table, "delete"]
            if counted != (count.upserts, count.deletes):
                raise DamagedError(
                    f"{where} has {counted[0]:,} rows and {counted[1]:,} deleted ids of table '{table}', its manifest "
                    f"says {count.upserts:,} and {count.deletes:,}; copy it again"
                )

    def dense(self) -> dict[str, Tensor]:
        """All parameters and buffers of the dense program, by the names of its ``state_dict()``."""
        try:
            return load_tensors(self.read(DENSE))
        except DamagedError:
            raise
        except Exception as error:
            raise DamagedError(f"{self}/{DENSE} is no safetensors file: {error}") from None


def _by_table(batch: Any, found: Counter[tuple[str, str]], where: str) -> Iterator[TableChange]:
    """Split a record batch at the changes of table or operation, which rows are sorted by."""
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
            raise DamagedError(f"{where}: rows of table '{table}' have no vectors of one length, or an op '{op}'")
        yield TableChange(table, some[:0], some, torch.from_numpy(flat.copy()).view(last - first, -1))


def _manifest(kind: type[Manifest], place: Directory) -> Manifest:
    if not place.has(MANIFEST):
        raise CheckpointError(
            f"{place} holds no {MANIFEST}, so it is nothing that hotbed export made, or it was never finished"
        )
    return manifest_of(kind, place.read(MANIFEST, MOST_BYTES), f"{place}/{MANIFEST}")


def _damaged(file: str) -> DamagedError:
    return DamagedError(f"{file} is damaged (its SHA-256 is not the manifest's); copy the directory again")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed" / "models"
