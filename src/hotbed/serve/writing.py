"""Write exported models and sets of changes, with bounded memory, to a local disk or an object store.

Tables are copied window by window; a directory has its manifest last, so it is there whole or not at all. What a killed
process has left is cleared when the same directory is written again.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from hotbed.checkpoint.changes import export_changes
from hotbed.checkpoint.convert import Rectangle, read_rectangle
from hotbed.checkpoint.differential import opened
from hotbed.checkpoint.manifest import Manifest, SavedTable, read_manifest
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tables import check_tables, is_dynamic, row_ids
from hotbed.checkpoint.tensor_files import UNFINISHED, TensorFiles, bytes_of, make_directory
from hotbed.data import Encoder
from hotbed.data.lookup_table import LookupTable
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.nn.dense_part import vectors_name
from hotbed.serve.format import (
    CHUNK_BYTES,
    DENSE,
    MANIFEST,
    ROWS,
    ChangeManifest,
    CountEntry,
    DenseEntry,
    FeatureEntry,
    FileEntry,
    ModelManifest,
    StateEntry,
    TableEntry,
    encoder_digest,
    record_format,
    values_of,
)

WINDOW_BYTES = 8 << 20
"""Bytes of a table, as float32, that are in memory at once."""
PROGRAM, TABLES, LOOKUPS, VOCABULARY = "dense.pt2", "tables", "lookups", "vocabulary"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Model:
    """An exported model except the rows of its tables."""

    name: str  # of the recipe
    labels: tuple[str, ...]
    encoder: Encoder  # converts raw rows to inputs
    hash: str | None  # as in `ModelManifest`
    collections: Mapping[str, EmbeddingCollection]  # by path; only their tables and features are read
    state: Mapping[str, Tensor]  # parameters and buffers of the dense part
    inputs: int  # number of dense inputs of the program
    dtype: torch.dtype  # of the dense inputs

    @property
    def ttl_steps(self) -> dict[str, int]:
        """By dynamic table, after how many steps ids expire that are not seen."""
        return {
            _joined(path, name): table.dynamic.ttl_steps
            for path, collection in self.collections.items()
            for name, table in collection.tables.items()
            if table.dynamic is not None and table.dynamic.ttl_steps is not None
        }


def write_model(
    target: str | Path | Directory,
    checkpoint: Directory,  # source of the rows
    model: Model,
    program: torch.export.ExportedProgram,  # the traced dense part
    progress: Progress = lambda done, total: None,  # called with the rows done and the total
) -> ModelManifest:
    """Write an exported model.

    Raise `CheckpointError` if ``target`` exists, or the checkpoint is damaged or lacks a table. Then nothing is left at
    ``target``.
    """
    manifest = read_manifest(checkpoint)
    names = _check_tables(model, checkpoint, manifest)
    total, done = sum(manifest.tables[name].spec.rows for name in names), 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    with opened(checkpoint, manifest) as stored, _new(target) as files:
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
            tables[name] = _table(saved, f"{file}.rows", ids)
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
        files.finish(values_of(made))
    return made


def write_change(
    target: str | Path | Directory,
    checkpoint: Directory,
    since: Directory,
    model: Model,
    progress: Progress = lambda done, total: None,
) -> ChangeManifest:
    """Write the changes from an earlier checkpoint to a later one, whose dense state ``model`` has.

    Parameters and errors are those of `write_model`; `CheckpointError` also if the checkpoints have other tables.
    """
    with tempfile.TemporaryDirectory(prefix="hotbed-") as folder, _new(target) as files:
        rows = Path(folder) / ROWS
        found = export_changes(checkpoint, rows, since, ttl_steps=model.ttl_steps, progress=progress)
        new, old = read_manifest(checkpoint), read_manifest(since)
        files.write(ROWS, _chunks_of(rows))
        files.write(DENSE, [memoryview(save_tensors({k: t.contiguous() for k, t in model.state.items()}))])
        made = ChangeManifest(
            base=StateEntry(step=old.step, state=old.sha256),
            sequence=StateEntry(step=new.step, state=new.sha256),
            written=time.time(),
            encoder=encoder_digest(model.encoder.to_dict()),
            tables={name: CountEntry(**count) for name, count in found["tables"].items()},
            files=files.entries,
        )
        files.finish(values_of(made))
    return made


def _check_tables(model: Model, checkpoint: Directory, manifest: Manifest) -> list[str]:
    """Names of the model's tables; a `CheckpointError` unless the checkpoint has them in their shapes."""
    wanted = {_joined(p, t.name): t for p, c in model.collections.items() for t in c.tables.values()}
    for name, table in wanted.items():
        if name not in manifest.tables:
            raise CheckpointError(f"{checkpoint} has no table '{name}'; it has {', '.join(manifest.tables) or 'none'}")
        saved = manifest.tables[name].spec
        if (saved.rows, saved.dim) != (table.rows, table.dim):
            raise CheckpointError(
                f"{checkpoint}: table '{name}' is {saved.rows:,} × {saved.dim}, by the recipe and its data "
                f"{table.rows:,} × {table.dim}; give the data that it was trained on (--data)"
            )
    return list(wanted)


class _Files:
    """Files of a directory that is being written, with what its manifest says of them."""

    def __init__(self, place: Directory) -> None:
        self._place = place
        self.entries: dict[str, FileEntry] = {}

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        folder, _, last = name.rpartition("/")
        place = self._place / folder if folder else self._place
        if folder:
            place.make()
        found, size, writer = hashlib.sha256(), 0, place.writer(last)
        try:
            for chunk in chunks:
                writer.write(chunk)
                found.update(chunk)
                size += len(chunk)
        except BaseException:
            writer.abandon()
            raise
        writer.finish()
        self.entries[name] = FileEntry(bytes=size, sha256=found.hexdigest())

    def finish(self, manifest: Mapping[str, Any]) -> None:
        self._place.write(MANIFEST, json.dumps(manifest, indent=1))


@contextmanager
def _new(target: str | Path | Directory) -> Generator[_Files]:
    """Make a directory where there is nothing, and remove it on errors."""
    place = directory(target)
    names = place.names()
    if UNFINISHED in names and MANIFEST not in names:
        for folder in (TABLES, LOOKUPS, VOCABULARY):
            (place / folder).remove_all()
    make_directory(place)
    try:
        yield _Files(place)
        place.remove(UNFINISHED)
    except BaseException:
        place.remove(MANIFEST)
        place.remove_all()
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
    """A `pyarrow.Table` as the bytes of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    stream = pa.BufferOutputStream()
    parquet.write_table(table, stream)
    return stream.getvalue()


def _mapped(table: LookupTable) -> Iterator[memoryview]:
    """Yield a file of keys and values that is to be mapped into memory."""
    with tempfile.TemporaryFile(prefix="hotbed-") as file:
        table.write_mapped(file)
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            yield memoryview(chunk)


def _chunks_of(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield memoryview(chunk)


def _table(saved: SavedTable, file: str, ids: str | None) -> TableEntry:
    return TableEntry(
        rows=saved.rows,
        dim=saved.dim,
        dtype=saved.dtype,
        fp32_rows=saved.fp32_rows,
        init=saved.init,
        record_bytes=record_format(saved.spec).record_bytes,
        file=file,
        ids=ids,
    )


def _features(collections: Mapping[str, EmbeddingCollection]) -> dict[str, FeatureEntry]:
    return {
        vectors_name(path, feature.name): FeatureEntry(
            collection=path,
            feature=feature.name,
            table=_joined(path, feature.table),
            pooling=feature.pooling,
            max_len=feature.max_len,
            on_too_long=feature.on_too_long,
            on_bad_id=feature.on_bad_id,
            padding=feature.padding,
        )
        for path, collection in collections.items()
        for feature in collection.features
    }


def _joined(path: str, name: str) -> str:
    """How checkpoints call a table of the collection at a path."""
    return f"{path}.{name}".lstrip(".")


def _file_name(table: str) -> str:
    """A table's name as part of a file's, which has no '/' and is not too long for any file system."""
    quoted = quote(table, safe="")
    quoted = f"%2E{quoted[1:]}" if quoted[0] == "." else quoted
    return quoted if len(quoted) <= 200 else f"{quoted[:150]}-{hashlib.sha256(table.encode()).hexdigest()[:32]}"
