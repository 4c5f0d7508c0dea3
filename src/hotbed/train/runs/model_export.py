"""Export the model of a checkpoint: in parts, as one program, or only the changes since an earlier checkpoint.

An export in parts is a directory of `hotbed.serve.model_files`. The model is built from the recipe without tables, and
tables are copied from file to file, window by window. Untrained rows are copied, too. Otherwise servers would need the
kernel of initial values. The manifest is written last, so a directory without a manifest is incomplete. A repeated
export removes the files that a killed process has left. As one program (``--single``), the model contains its tables
and needs only torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from hotbed.checkpoint import Directory, find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.changes import export_changes
from hotbed.checkpoint.convert import Rectangle, read_rectangle
from hotbed.checkpoint.differential import open_with_bases
from hotbed.checkpoint.load import load_dense
from hotbed.checkpoint.manifest import Manifest, SavedTable, find_earlier
from hotbed.checkpoint.saved_tables import check_tables, is_dynamic, row_ids
from hotbed.checkpoint.storage import LocalDirectory, directory
from hotbed.checkpoint.tensor_files import UNFINISHED, TensorFiles, bytes_of, make_directory, write_directory
from hotbed.config import MemoryRecipe, Recipe
from hotbed.data import Encoder, Source, SparseColumn
from hotbed.data.encoding.encoder import describe_features, encoding_of
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.hashing import HASH
from hotbed.embed import EmbeddingCollection, tables_on_meta
from hotbed.errors import CheckpointError
from hotbed.files import new_file
from hotbed.nn.dense_program import DensePart, dense_dtype, plain_model, trace_dense_part, trace_whole, vectors_name
from hotbed.nn.normalization import normalization_of, take_raw
from hotbed.serve.model_files import (
    CHUNK_BYTES,
    DENSE,
    MANIFEST,
    ROWS,
    ChangeManifest,
    CountEntry,
    DenseEntry,
    ExportedFile,
    FeatureEntry,
    ModelManifest,
    StateEntry,
    TableEntry,
    encoder_digest,
    record_format,
)
from hotbed.train.retrieval import model_source
from hotbed.train.runs.build import build_model, new_model
from hotbed.train.runs.stored_model import (
    FEATURES,
    encoder_of,
    id_kinds_of,
    labels_of,
    load_features,
    stored_recipe,
    trained_inputs,
)

WINDOW_BYTES = 8 << 20
"""Bytes of the rows that are copied at once, counted as float32."""
PROGRAM, TABLES, LOOKUPS, VOCABULARY = "dense.pt2", "tables", "lookups", "vocabulary"
MODEL, INPUTS = "model.pt2", "inputs.json"
"""Files written by ``--single``."""

Progress = Callable[[int, int], None]


class Exporter:
    """Export checkpoints of a recipe, and changes between two checkpoints.

    Create the exporter before training starts. Its constructor builds and traces the model, which draws random numbers
    and marks all threads as tracing. The other methods do neither.
    """

    def __init__(self, recipe: Recipe, source: Source) -> None:
        source = model_source(recipe, source)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), tables_on_meta():
            model = new_model(recipe, source)
        normalization = normalization_of(model)
        if normalization is not None:
            normalization.assume_standard()  # placeholders, because each checkpoint has its own statistics
        self._recipe, self._source = recipe, source
        self._labels = labels_of(recipe, source)
        self._part = DensePart(model)
        self._program = trace_dense_part(self._part, len(source.schema.dense))

    def write_model(
        self, target: str | Path | Directory, checkpoint: Directory, progress: Progress = lambda done, total: None
    ) -> ModelManifest:
        """Export a checkpoint; see the function `write_model`."""
        model = self._load(checkpoint)
        with torch.no_grad():
            for name, value in self._program.state_dict.items():
                value.copy_(model.state[name])
        return write_model(target, checkpoint, model, self._program, progress)

    def write_change(
        self,
        target: str | Path | Directory,
        checkpoint: Directory,
        since: Directory,
        progress: Progress = lambda done, total: None,
    ) -> ChangeManifest:
        """Export the changes since an earlier checkpoint; see the function `write_change`.

        Raise `CheckpointError` if the encoding of inputs has changed, because a change contains only rows and
        parameters.
        """
        new, old = read_manifest(checkpoint), read_manifest(since)
        if (new.parts.get(FEATURES), id_kinds_of(new)) != (old.parts.get(FEATURES), id_kinds_of(old)):
            raise CheckpointError(
                f"{checkpoint} encodes inputs differently than {since}, so their difference cannot be exported. Lookup "
                "tables, vocabularies, boundaries or types of ids have changed, or an old release recorded no "
                "vocabularies. Remove --since to export a full model"
            )
        return write_change(target, checkpoint, since, self._load(checkpoint), progress)

    def encoder_digest(self, checkpoint: Directory) -> str:
        """Return the digest of a checkpoint's encoding, as manifests of changes contain it."""
        return encoder_digest(encoder_of(self._recipe, self._source, read_manifest(checkpoint)).to_dict())

    def _load(self, checkpoint: Directory) -> Model:
        """Load a checkpoint's model without the rows of its tables."""
        manifest = load_dense(checkpoint, self._part.model)
        encoder = encoder_of(self._recipe, self._source, manifest)
        return Model(
            name=self._recipe.name,
            labels=self._labels,
            encoder=encoder,
            hash=HASH if encoder.hashed else None,
            collections=self._part.collections,
            state=self._part.state_dict(),
            inputs=len(self._source.schema.dense),
            dtype=dense_dtype(self._part),
        )


def export_model(
    checkpoint: str | Path | Directory,
    target: str | Path | Directory,
    *,
    since: str | Path | Directory | None = None,
    data: str | None = None,
    trust_recipe: bool = False,
    progress: Progress = lambda done, total: None,
) -> ModelManifest | ChangeManifest:
    """Export the model of a checkpoint, or only its changes since an earlier checkpoint.

    Memory holds the dense part of the model, a few windows of the tables, and one vocabulary at a time.

    Parameters
    ----------
    checkpoint
        Path or URI of a checkpoint with a recipe, or of a run (then its best or newest checkpoint is used).
    target
        Path or URI of the new directory.
    since
        Earlier checkpoint of the same model (then only the changes are written), or its step if both checkpoints are
        in the same directory.
    data
        Dataset with the schema of the inputs. The default is the recipe's schema, or the recipe's data if the recipe
        has no schema.
    trust_recipe
        Import classes outside of hotbed and torch.optim; see `hotbed.config.check_trust`.
    progress
        Called with the number of finished rows and the total.

    Raises
    ------
    CheckpointError
        If the checkpoint has no recipe, the model cannot be traced, ``since`` has different tables, or ``target``
        exists. Then nothing is written.
    SpecError
        If a sequence feature has no ``max_len``, or the model reads ids outside of its embedding collections.
    """
    path = find_checkpoint(checkpoint, best=True)
    earlier = None if since is None else find_earlier(path, since)
    manifest = read_manifest(path)
    recipe = stored_recipe(manifest, str(path), trusted=trust_recipe)
    exporter = Exporter(recipe, trained_inputs(recipe, manifest, data))
    if earlier is not None:
        return exporter.write_change(target, path, earlier, progress)
    return exporter.write_model(target, path, progress)


def describe_export(manifest: ModelManifest | ChangeManifest) -> dict[str, Any]:
    """Return the manifest of an export as plain values for ``--json``."""
    files = {name: entry.bytes for name, entry in manifest.files.items()}
    if isinstance(manifest, ChangeManifest):
        tables = {name: count.model_dump() for name, count in manifest.tables.items()}
        return {"base": manifest.base.step, "sequence": manifest.sequence.step, "tables": tables, "files": files}
    return {"step": manifest.step, "state": manifest.state, "tables": list(manifest.tables), "files": files}


# -- in parts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model to export, without the rows of its tables."""

    name: str  # name of the recipe
    labels: tuple[str, ...]
    encoder: Encoder  # converts raw rows to inputs
    hash: str | None  # name of the hash function of ids, as in `ModelManifest`
    collections: Mapping[str, EmbeddingCollection]  # by path; only the specs of their tables and features are used
    state: Mapping[str, Tensor]  # parameters and buffers of the dense part
    inputs: int  # number of dense inputs of the program
    dtype: torch.dtype  # dtype of the dense inputs

    @property
    def ttl_steps(self) -> dict[str, int]:
        """Number of steps after which an unused id expires, for each dynamic table with expiring ids."""
        return {
            _table_name(path, name): table.dynamic.ttl_steps
            for path, collection in self.collections.items()
            for name, table in collection.tables.items()
            if table.dynamic is not None and table.dynamic.ttl_steps is not None
        }


def write_model(
    target: str | Path | Directory,
    checkpoint: Directory,
    model: Model,
    program: torch.export.ExportedProgram,
    progress: Progress = lambda done, total: None,
) -> ModelManifest:
    """Write an exported model with the rows of a checkpoint and the traced dense part ``program``.

    Raise `CheckpointError` if ``target`` exists, or the checkpoint is damaged or lacks a table. Then no file is left.
    """
    manifest = read_manifest(checkpoint)
    names = _check_tables(model, checkpoint, manifest)
    total, done = sum(manifest.tables[name].spec.rows for name in names), 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    with open_with_bases(checkpoint, manifest) as stored, _new_export(target) as files:
        check_tables((manifest.tables[name] for name in names), stored)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        files.write(PROGRAM, [buffer.getbuffer()])
        tables: dict[str, TableEntry] = {}
        for name in names:
            saved, file = manifest.tables[name], f"{TABLES}/{_file_name(name)}"
            files.write(f"{file}.rows", _records(saved, stored, count))
            ids = f"{file}.ids" if is_dynamic(name, manifest) else None
            if ids is not None:
                files.write(ids, _ids(name, manifest, stored, model.ttl_steps.get(name)))
            tables[name] = TableEntry(
                rows=saved.rows,
                dim=saved.dim,
                dtype=saved.dtype,
                fp32_rows=saved.fp32_rows,
                init=saved.init,
                record_bytes=record_format(saved.spec).record_bytes,
                file=f"{file}.rows",
                ids=ids,
            )
        lookups: dict[str, str] = {}
        for feature, table in model.encoder.tables.items():
            lookups[feature] = f"{LOOKUPS}/{_file_name(feature)}.parquet"
            files.write(lookups[feature], [memoryview(_parquet(table))])
        preparation = model.encoder.preparation
        vocabularies: dict[str, str] = {}
        if preparation is not None:
            for name in preparation.entry.vocabularies:
                vocabularies[name] = f"{VOCABULARY}/{_file_name(name)}.arrow"
                files.write(vocabularies[name], _mapped(preparation.read(name)))
        made = ModelManifest(
            name=model.name,
            step=manifest.step,
            state=manifest.sha256,
            written=time.time(),
            labels=list(model.labels),
            encoder=model.encoder.to_dict(),
            lookups=lookups,
            vocabularies=vocabularies,
            hash=model.hash,
            dense=DenseEntry(
                file=PROGRAM,
                inputs=model.inputs,
                dtype=None if not model.inputs else "float64" if model.dtype == torch.float64 else "float32",
            ),
            features=_features(model.collections),
            tables=tables,
            files=files.entries,
        )
        files.finish(made)
    return made


def write_change(
    target: str | Path | Directory,
    checkpoint: Directory,
    since: Directory,
    model: Model,
    progress: Progress = lambda done, total: None,
) -> ChangeManifest:
    """Write the changes from checkpoint ``since`` to ``checkpoint``; ``model`` has the dense state of ``checkpoint``.

    Raise the errors of `write_model`. Also raise `CheckpointError` if the two checkpoints have different tables.
    """
    with tempfile.TemporaryDirectory(prefix="hotbed-") as folder, _new_export(target) as files:
        rows = Path(folder) / ROWS
        found = export_changes(checkpoint, rows, since, ttl_steps=model.ttl_steps, progress=progress)
        new, old = read_manifest(checkpoint), read_manifest(since)
        with rows.open("rb") as stream:
            files.write(ROWS, _chunks_of(stream))
        files.write(DENSE, [memoryview(save_tensors({k: t.contiguous() for k, t in model.state.items()}))])
        made = ChangeManifest(
            base=StateEntry(step=old.step, state=old.sha256),
            sequence=StateEntry(step=new.step, state=new.sha256),
            written=time.time(),
            encoder=encoder_digest(model.encoder.to_dict()),
            tables={name: CountEntry(**count) for name, count in found["tables"].items()},
            files=files.entries,
        )
        files.finish(made)
    return made


def _check_tables(model: Model, checkpoint: Directory, manifest: Manifest) -> list[str]:
    """Check that a checkpoint has the model's tables in their shapes, and return their names."""
    wanted = {_table_name(p, t.name): t for p, c in model.collections.items() for t in c.tables.values()}
    for name, table in wanted.items():
        if name not in manifest.tables:
            raise CheckpointError(
                f"{checkpoint} lacks table '{name}' of its recipe: got {', '.join(manifest.tables) or 'no tables'}. "
                "Export a checkpoint that was trained with this recipe"
            )
        saved = manifest.tables[name].spec
        if (saved.rows, saved.dim) != (table.rows, table.dim):
            raise CheckpointError(
                f"{checkpoint}: table '{name}' has {saved.rows:,} × {saved.dim}, expected {table.rows:,} × {table.dim} "
                "by its recipe and the data. Pass the training data with --data"
            )
    return list(wanted)


class _Files:
    """Write the files of an export, and collect the manifest entry (size and digest) of each file."""

    def __init__(self, target: Directory) -> None:
        self._target = target
        self.entries: dict[str, ExportedFile] = {}

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        folder, _, last = name.rpartition("/")
        target = self._target / folder if folder else self._target
        if folder:
            target.make()
        digest, size, writer = hashlib.sha256(), 0, target.writer(last)
        try:
            for chunk in chunks:
                writer.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        except BaseException:
            writer.abandon()
            raise
        writer.finish()
        self.entries[name] = ExportedFile(bytes=size, sha256=digest.hexdigest())

    def finish(self, manifest: ModelManifest | ChangeManifest) -> None:
        self._target.write(MANIFEST, json.dumps(manifest.model_dump(), indent=1))


@contextmanager
def _new_export(target: str | Path | Directory) -> Generator[_Files]:
    """Create the directory ``target`` for an export, and remove the directory if the body raises."""
    where = directory(target)
    names = where.names()
    if UNFINISHED in names and MANIFEST not in names:  # a killed process has left these files
        for folder in (TABLES, LOOKUPS, VOCABULARY):
            (where / folder).remove_all()
    make_directory(where)
    try:
        yield _Files(where)
        where.remove(UNFINISHED)
    except BaseException:
        where.remove(MANIFEST)
        where.remove_all()
        raise


def _records(saved: SavedTable, files: TensorFiles, count: Callable[[int], None]) -> Iterator[memoryview]:
    """Yield the records of a table, window by window."""
    table, layout = saved.without_moments, record_format(saved.spec)
    spec, step = saved.spec, max(WINDOW_BYTES // (4 * saved.spec.dim), 1)
    fp32_rows = spec.rows if spec.dtype == "fp32" else spec.fp32_rows
    for first in range(0, spec.rows, step):
        rows = range(first, min(first + step, spec.rows))
        _, arrays = read_rectangle(Rectangle(rows, range(spec.dim), table), spec, files)
        wide = torch.arange(rows.start, rows.stop) < fp32_rows
        found = {"wide": arrays.get("fp32_weight", arrays.get("weight") if layout.has_narrow is False else None)}
        if layout.has_narrow:
            found |= {"narrow": arrays.get("weight"), "exponents": arrays.get("exponents")}
        records = torch.zeros(len(rows), layout.record_bytes, dtype=torch.uint8)
        layout.put_stored(records, wide, {name: array for name, array in found.items() if array is not None})
        yield bytes_of(records)
        count(len(rows))


def _ids(name: str, manifest: Manifest, files: TensorFiles, ttl_steps: int | None) -> Iterator[memoryview]:
    rows = manifest.tables[name].spec.rows
    for first in range(0, rows, step := WINDOW_BYTES // 8):
        yield bytes_of(row_ids(name, range(first, min(first + step, rows)), manifest, files, ttl_steps))


def _parquet(table: Any) -> Any:
    """Return a `pyarrow.Table` as the bytes of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    stream = pa.BufferOutputStream()
    parquet.write_table(table, stream)
    return stream.getvalue()


def _mapped(table: LookupTable) -> Iterator[memoryview]:
    """Yield the bytes of a vocabulary in its memory-mapped format."""
    with tempfile.TemporaryFile(prefix="hotbed-") as file:
        table.write_file(file)
        file.seek(0)
        yield from _chunks_of(file)


def _chunks_of(stream: Any) -> Iterator[memoryview]:
    while chunk := stream.read(CHUNK_BYTES):
        yield memoryview(chunk)


def _features(collections: Mapping[str, EmbeddingCollection]) -> dict[str, FeatureEntry]:
    return {
        vectors_name(path, feature.name): FeatureEntry(
            collection=path,
            feature=feature.name,
            table=_table_name(path, feature.table),
            pooling=feature.pooling,
            max_len=feature.max_len,
            on_too_long=feature.on_too_long,
            on_bad_id=feature.on_bad_id,
            padding=feature.padding,
        )
        for path, collection in collections.items()
        for feature in collection.features
    }


def _table_name(path: str, name: str) -> str:
    """Return the name that checkpoints use for table ``name`` of the collection at ``path`` in the model."""
    return f"{path}.{name}".lstrip(".")


def _file_name(table: str) -> str:
    """Return a file name without '/' and of at most 200 characters for a table."""
    quoted = quote(table, safe="")
    quoted = f"%2E{quoted[1:]}" if quoted[0] == "." else quoted
    return quoted if len(quoted) <= 200 else f"{quoted[:150]}-{hashlib.sha256(table.encode()).hexdigest()[:32]}"


# -- as one program ----------------------------------------------------------------------------------------------------


def export_single(
    checkpoint: str | Path, target: str | Path, data: str | None = None, *, trust_recipe: bool = False
) -> dict[str, Any]:
    """Export the model of a checkpoint as one torch program (``docs/prediction.md``), and return ``inputs.json``.

    The export needs twice the model's memory. ``checkpoint`` is a checkpoint with a recipe, or a run (then its newest
    checkpoint is used). ``target`` is a file ``NAME.pt2`` that also contains ``inputs.json``
    (``torch.export.load(FILE, extra_files={"inputs.json": ""})``), or a directory for ``model.pt2`` and
    ``inputs.json``. For ``data`` and ``trust_recipe`` see `export_model`. Raise `CheckpointError` if the checkpoint has
    no recipe, the model cannot be traced, or ``target`` exists.
    """
    source = find_checkpoint(checkpoint)
    if not isinstance(directory(target), LocalDirectory):
        raise CheckpointError(f"{target} is a URI, but torch writes {MODEL} only to local disks. Pass a local path")
    file = Path(target) if str(target).endswith(".pt2") else None
    if file is not None and file.exists():
        raise CheckpointError(f"{file} exists. Choose a different file")
    manifest = read_manifest(source)
    recipe = replace(stored_recipe(manifest, str(source), trusted=trust_recipe), memory=MemoryRecipe())
    origin = trained_inputs(recipe, manifest, data)
    load_features(origin, manifest)
    model = build_model(recipe, origin, torch.device("cpu"))
    load_checkpoint(source, {"model": model})
    take_raw(model, origin.schema)
    program = trace_whole(plain_model(model), origin.schema)
    found = _describe_inputs(origin, raw=normalization_of(model) is not None)
    text = json.dumps(found, indent=1)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as unfinished, unfinished.open("wb") as stream:
            torch.export.save(program, stream, extra_files={INPUTS: text})
        return found
    with write_directory(target) as (made, _):
        torch.export.save(program, Path(made.path) / MODEL)
        made.write(INPUTS, text)
    return found


def _describe_inputs(source: Source, *, raw: bool) -> dict[str, Any]:
    """Return the content of ``inputs.json``."""
    schema, kinds, encoder = source.schema, source.id_kinds(), source.encoder

    def encoding(column: str) -> dict[str, str]:
        if encoder is not None:
            return encoding_of(encoder, column)
        return {"encoding": "hash", "values": kinds[column]} if column in kinds else {"encoding": "rows"}

    def describe_ids(column: SparseColumn) -> dict[str, Any]:
        weights = {} if column.weights is None else {"weights": column.weights}
        return {"rows": column.rows, "ids": column.ids, "pooling": column.pooling, **weights, **encoding(column.name)}

    return {
        "dense": replace(schema, derived=()).to_dict()["dense"],
        "dense_dtype": "float64" if raw else "float32",
        "labels": list(schema.labels),
        "positives": {label.column: label.positive for label in schema.positives},
        "output": "logits [B, labels]; the probability of a label is 1 / (1 + exp(-logit))",
        "ids": {c.name: describe_ids(c) for c in schema.sparse},
        "features": [] if encoder is None else describe_features(encoder),
        "hash": HASH if kinds else None,
        "tables": schema.rows,
    }
