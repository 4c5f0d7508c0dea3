"""Check the manifests of exported models and of sets of changes, before anything they name is read.

Both are JSON files that may come from anywhere. What passes here states a size and a hash for each file, and sizes that
agree with the tables, so that readers allocate no more than the files hold.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from hotbed.checkpoint.schema import Count, Digest, InitEntry, Step, Text, fault_of, parsed
from hotbed.errors import CheckpointError
from hotbed.pooling import Pooling
from hotbed.specs import MAX_DIM, Feature, OnBadId, OnTooLong, Padding, RowDtype, Table
from hotbed.store.dense import TORCH_DTYPES
from hotbed.store.format import RecordFormat

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
    """All that ``manifest.json`` of an exported model says.

    Attributes
    ----------
    name
        Of the recipe.
    step, state
        Which parameters these are, see `StateEntry`.
    written
        When it was written, in seconds since 1970.
    labels
        What the columns of the scores are.
    encoder
        How stored values become ids and numbers: the input columns as ``schema`` (`hotbed.data.Schema.to_dict`), and by
        column what its ids are.
    lookups
        By derived input, the file with keys and values that it is looked up in.
    vocabularies
        By table of the schema, the file with the ids of raw values; empty where ids are not made of them.
    hash
        How ids are hashed to rows, in words; None where they are rows.
    dense
        The dense program.
    features
        By name, the vectors that the program takes: ``COLLECTION.FEATURE``, in order; see
        `hotbed.nn.dense_part.vectors_name`.
    tables
        By name: ``COLLECTION.TABLE``.
    files
        Size and hash of each.
    """

    name: Text
    step: Count
    state: Digest
    written: Seconds
    labels: list[Text]
    encoder: dict[str, Any]
    lookups: dict[Text, FilePath]
    vocabularies: dict[Text, FilePath] = Field(default_factory=dict)
    hash: str | None
    dense: DenseEntry
    features: dict[Text, FeatureEntry]
    tables: dict[Text, TableEntry]
    files: dict[FilePath, FileEntry]


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
    """Parse a manifest and compare what it says with itself.

    Raises
    ------
    CheckpointError
        If it is of another kind or version, or is not what its schema says (`DamagedError` where it is no JSON).
    """
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
