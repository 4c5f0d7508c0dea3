"""Convert a checkpoint into another one, or its tables into files that any library can read.

`convert` makes a checkpoint compact, changes the dtype of rows, or removes training states. `export_tables` writes one
safetensors file per table. `content_hashes` hashes the values of a checkpoint, so that runs with different plans, tiers
and ranks can be compared. Tables may be larger than memory. They are read in rectangles of at most `MEMORY_BYTES`, and
each rectangle is written before the next one is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args
from urllib.parse import quote

import torch
from torch import Tensor

from hotbed.checkpoint.differential import open_with_bases
from hotbed.checkpoint.load import read_states
from hotbed.checkpoint.manifest import (
    Manifest,
    SavedTable,
    SavedTile,
    file_name,
    read_manifest,
    write_manifest,
)
from hotbed.checkpoint.saved_tables import check_tables, layers, load_tile
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensor_files import Array, Chunk, FileWriter, TensorFiles, as_bits, bytes_of, write_directory
from hotbed.embed import LocalTile
from hotbed.embed.arena import Arena, Shard, form
from hotbed.errors import CheckpointError, did_you_mean
from hotbed.optim import Moment
from hotbed.plan.tiling import column_unit
from hotbed.specs import RowDtype, Table, row_bytes
from hotbed.store import MOMENT, LazyStore, Storage
from hotbed.store.device_store import TORCH_DTYPES

MEMORY_BYTES = 8 << 20
"""Upper limit of a table's bytes that are in memory together, as float32 and with moments."""
CONVERTED_BYTES = 32 << 20
"""Upper limit of the bytes of a file of converted tables, which is in memory until it is written."""

Progress = Callable[[int, int], None]
"""Called with the number of processed elements of tables, and of all elements."""
Dtypes = RowDtype | Mapping[str, RowDtype] | None
"""A dtype for the rows of all tables, or dtypes by table. Default: the dtype does not change."""


def convert(
    source: str | Path | Directory,
    target: str | Path | Directory,
    *,
    compact: bool = False,
    dtype: Dtypes = None,
    moments: bool = True,
    progress: Progress = lambda done, total: None,
) -> Manifest:
    """Convert a checkpoint, with bounded memory, and return the manifest of the new one.

    Recipe, plan and step do not change. Tiles may be split into more tiles, also without any option.

    Parameters
    ----------
    source
        The checkpoint to convert.
    target
        The new checkpoint. It must not exist. On errors, it is removed.
    compact
        Store only the rows that training has changed, with their numbers. Loading computes the initial values of all
        other rows, bit by bit.
    dtype
        Dtype of stored rows, of all tables or by table. Rows of a lower precision are rounded to nearest, which cannot
        be undone. The exponents of int8 rows are as small as possible.
    moments
        If False, keep only the tables and the part ``model``, which is enough for predictions but not for training.
    progress
        Called repeatedly with the number of processed and of all elements of tables.

    Raises
    ------
    CheckpointError
        If ``source`` is not a valid checkpoint, ``target`` exists, or ``dtype`` has an unknown table or dtype.
    """
    place = directory(source)
    old = read_manifest(place)
    specs = _specs(old, dtype)
    tables = old.tables if moments else {name: table.without_moments for name, table in old.tables.items()}
    kept = {name: state for name, state in old.parts.items() if moments or name == "model"}
    with open_with_bases(place, old) as files, write_directory(target) as (new, writer):
        check_tables(old.tables.values(), files)
        for name in kept:
            _copy_arrays(name, old, files, writer)
        chunks = _chunks(tables, specs, compact, files, progress)
        tiles = writer.write_chunks(chunks, "tables", CONVERTED_BYTES)
        made = {
            name: SavedTable.of(specs[name], table.moments, sorted(tiles[name], key=_place))
            for name, table in tables.items()
        }
        changed = {"parts": kept, "tables": made, "files": writer.entries()}
        manifest = old.model_copy(update={"base": None, "base_files": {}, "attempt": "", **changed})
        return write_manifest(new, manifest)


class Rectangle(NamedTuple):
    """A rectangle of a table to read, and the table with the saved tiles that contain it."""

    rows: range
    cols: range
    saved: SavedTable


def read_rectangle(rectangle: Rectangle, spec: Table, files: TensorFiles) -> tuple[LocalTile, dict[str, Tensor]]:
    """Load a rectangle of a saved table into memory, with the dtype of ``spec``.

    Return a tile with its values, and the arrays by their names in files.
    """
    rows, cols, saved = rectangle
    arena = Arena([Shard(spec, rows, cols)], len(cols), seed=0, device=torch.device("cpu"), backend="auto")
    tile = LocalTile(arena.shards[0], arena, 0, True)
    for name, moment in saved.moments.items():
        arena.store.add_moment(Moment(name, moment.per))
    load_tile(tile, saved, saved.moments, files)
    whole = tile.arrays()
    return tile, {name: whole[e.array][e.start : e.stop] for name, e in tile.extents().items()}


def rows_in_memory(saved: SavedTable, cols: int) -> int:
    """Return the number of rows with ``cols`` columns and moments that fit into `MEMORY_BYTES`."""
    moments = sum(Moment(name, moment.per).nbytes(cols) for name, moment in saved.moments.items())
    return max(MEMORY_BYTES // (row_bytes("fp32", cols) + moments), 1)


def _specs(manifest: Manifest, dtype: Dtypes) -> dict[str, Table]:
    """Return the tables with their new dtypes."""
    given = dict.fromkeys(manifest.tables, dtype) if dtype is None or isinstance(dtype, str) else dtype
    known = get_args(RowDtype)
    for name, wanted in given.items():
        if name not in manifest.tables:
            raise CheckpointError(
                f"dtype: got table '{name}', expected tables of the checkpoint: "
                f"{', '.join(manifest.tables) or 'none'}{did_you_mean(name, manifest.tables)}"
            )
        if wanted is not None and wanted not in known:
            raise CheckpointError(
                f"dtype: got {wanted!r}, expected one of {', '.join(known)}{did_you_mean(wanted, known)}"
            )
    return {
        name: replace(table.spec, dtype=given.get(name) or table.spec.dtype) for name, table in manifest.tables.items()
    }


def _copy_arrays(part: str, old: Manifest, files: TensorFiles, writer: FileWriter) -> None:
    """Copy the tensors of a part, if it has any. Every block is verified."""
    file = old.file_of(part)
    if file not in old.files:
        return

    def array(key: str) -> Array:
        stored = files.find(file, key)

        def rows(start: int, stop: int) -> Tensor:
            return files.read_rows(file, key, range(start, stop)) if stored.shape else files.read(file, key)

        return Array(stored.dtype, stored.shape, rows)

    writer.write(file_name(part, ""), {key: array(key) for key in files.arrays(file)})


def _chunks(
    tables: Mapping[str, SavedTable],
    specs: Mapping[str, Table],
    compact: bool,
    files: TensorFiles,
    progress: Progress,
) -> Iterator[Chunk]:
    """Yield all tables in chunks. Each chunk is read after the previous chunk was written."""
    done, total = 0, sum(spec.rows * spec.dim for spec in specs.values())
    for name, saved in tables.items():
        spec = specs[name]
        for whole in _rectangles(saved, spec):
            changed = _Changed(name, whole)
            step = rows_in_memory(saved, len(whole.cols))
            for first in range(0, len(whole.rows), step):
                some = whole._replace(rows=whole.rows[first : first + step])
                tile, arrays = read_rectangle(some, spec, files)
                if compact:
                    changed.add(some.rows, _changed_rows(tile, arrays, whole.saved), arrays)
                    if changed.nbytes >= CONVERTED_BYTES // 2:  # concatenation doubles the memory
                        yield changed.chunk()
                else:
                    yield Chunk(name, some.rows, some.cols, {key: Array.of(t) for key, t in arrays.items()})
                done += len(some.rows) * len(some.cols)
                progress(done, total)
                del tile, arrays  # free their memory before the next rectangle is read
            if changed.rows:
                yield changed.chunk()


def _rectangles(saved: SavedTable, spec: Table) -> list[Rectangle]:
    """Return the rectangles of the tiles, or the whole table if the new dtype cannot be sharded at their columns."""
    unit, full = column_unit(spec), saved.base or saved
    if any(tile.cols.start % unit for tile in full.tiles):
        return [Rectangle(range(spec.rows), range(spec.dim), saved)]
    found: list[Rectangle] = []
    for tile in full.tiles:
        only = full.model_copy(update={"tiles": (tile,)})  # other tiles do not overlap this rectangle
        of = only if saved.base is None else saved.model_copy(update={"base": only})
        found.append(Rectangle(tile.rows, tile.cols, of))
    return found


def _changed_rows(tile: LocalTile, arrays: Mapping[str, Tensor], saved: SavedTable) -> Tensor:
    """Return ``[R]`` bool, whether each row of a tile differs from its initial values in any bit."""
    shard = tile.shard
    arena = Arena([shard], len(shard.cols), seed=0, device=torch.device("cpu"), backend="auto")
    initial_tile = LocalTile(shard, arena, 0, True)
    changed = torch.zeros(len(shard.rows), dtype=torch.bool)
    for name, extent in initial_tile.extents().items():
        before = initial_tile.arrays()[extent.array][extent.start : extent.stop]
        of = slice(0, len(before)) if name == "fp32_weight" else slice(len(changed) - len(before), None)
        changed[of] |= (as_bits(arrays[name]) != as_bits(before)).any(1)
    for name, moment in saved.moments.items():
        initial = torch.tensor(moment.initial, dtype=torch.float32).view(torch.int32)
        changed |= (as_bits(arrays[f"{MOMENT}{name}"]).view(len(changed), -1) != initial).any(1)
    return changed


class _Changed:
    """Collect the changed rows of a rectangle of a table."""

    def __init__(self, table: str, whole: Rectangle) -> None:
        self._table, self._whole = table, whole
        self._found: list[dict[str, Tensor]] = []
        self.rows = range(0)
        self.nbytes = 0

    def add(self, rows: range, changed: Tensor, arrays: Mapping[str, Tensor]) -> None:
        """Add the changed rows of the next rows."""
        self.rows = range(self.rows.start if self.rows else rows.start, rows[-1] + 1, rows.step)
        at = changed.nonzero()[:, 0]
        if not len(at) and self._found:
            return
        found = {"keys": rows.start + at * rows.step}
        for name, array in arrays.items():
            first = 0 if name == "fp32_weight" else len(changed) - len(array)
            here = at[(at >= first) & (at < first + len(array))] - first
            found[name] = as_bits(array)[here].view(array.dtype)
        self._found.append(found)
        self.nbytes += sum(array.nbytes for array in found.values())

    def chunk(self) -> Chunk:
        """Return a chunk of the collected rows, and clear the collection."""
        names = dict.fromkeys(name for part in self._found for name in part)
        arrays = {name: torch.cat([as_bits(p[name]) for p in self._found if name in p]) for name in names}
        dtypes = {name: part[name].dtype for part in self._found for name in part}
        of_rows = {n: Array.of(t.view(dtypes[n])) for n, t in arrays.items() if len(t) or n == "keys"}
        chunk = Chunk(self._table, self.rows, self._whole.cols, of_rows)
        self._found, self.rows, self.nbytes = [], range(0), 0
        return chunk


def _place(tile: SavedTile) -> tuple[int, int]:
    return tile.cols.start, tile.rows.start


TABLES = "tables.json"
"""File that lists the files of tables."""


def export_tables(
    source: str | Path | Directory,
    target: str | Path | Directory,
    *,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Write each table to a file, with bounded memory, and the rest of the model to ``dense.safetensors``.

    A table's file is ``NAME.safetensors``, with the name percent-encoded. Its array ``weight [R, D]`` is bfloat16 or
    float16 if all rows are stored in this dtype, otherwise float32. The content of ``tables.json`` is also returned:
    ``step``, and ``file``, ``rows``, ``dim`` and ``dtype`` by table. ``target`` is a path or URI that must not exist.
    """
    place = directory(source)
    manifest = read_manifest(place)
    specs = {name: exported_table(table.spec) for name, table in manifest.tables.items()}
    total = sum(spec.rows * spec.dim for spec in specs.values())
    done = 0

    def count(cells: int) -> None:
        nonlocal done
        done += cells
        progress(done, total)

    found: dict[str, Any] = {"step": manifest.step, "tables": {}}
    with open_with_bases(place, manifest) as files, write_directory(target) as (new, writer):
        check_tables(manifest.tables.values(), files)
        for name, table in manifest.tables.items():
            spec, file = specs[name], f"{quote(name, safe='')}.safetensors"
            writer.write(file, {"weight": exported_weight(table, spec, files, count)})
            found["tables"][name] = {"file": file, "rows": spec.rows, "dim": spec.dim, "dtype": spec.dtype}
        if manifest.file_of("model") in manifest.files and "model" in manifest.parts:
            state = read_states(manifest, ["model"], files)["model"]
            if not isinstance(state, Mapping):
                raise CheckpointError(f"{place}: part 'model': got {type(state).__name__}, expected a mapping")
            writer.write("dense.safetensors", {k: Array.of(t) for k, t in state.items() if isinstance(t, Tensor)})
        writer.entries()
        new.write(TABLES, json.dumps(found, indent=1))
    return found


def exported_table(spec: Table) -> Table:
    """Return the table with one dtype for all rows, which other libraries support."""
    stored, fp32_rows = form(spec)
    return replace(spec, dtype=stored if stored in ("bf16", "fp16") and not fp32_rows else "fp32", fp32_rows=0)


def exported_weight(saved: SavedTable, spec: Table, files: TensorFiles, count: Any) -> Array:
    """Return an array of all rows. It reads more rows than requested, because rows may come from many tiles."""
    saved = saved.model_copy(update={"moments": {}})
    first, slab = 0, torch.empty(0)

    def rows(start: int, stop: int) -> Tensor:
        nonlocal first, slab
        if stop > first + len(slab):
            first, slab = start, torch.empty(0)
            last = min(start + max(rows_in_memory(saved, spec.dim), stop - start), spec.rows)
            _, arrays = read_rectangle(Rectangle(range(start, last), range(spec.dim), saved), spec, files)
            slab = arrays["weight"]
        count((stop - start) * spec.dim)
        return slab[start - first : stop - first]

    return Array(TORCH_DTYPES[spec.dtype], (spec.rows, spec.dim), rows)


_ROWS_AT_ONCE = 4096


def content_hashes(
    path: str | Path | Directory, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, str]:
    """Return the SHA-256 of each table and of the parameters of a checkpoint, with bounded memory.

    The hash of a table covers the rows that training has changed, with their numbers and moments. Other rows are
    excluded, because some plans store them and other plans compute their initial values.

    The key ``parameters`` has the hash of all tensors of the part ``model``. States of dense optimizers and of random
    generators are not hashed. ``progress`` is called with the numbers of processed and of all rows.
    """
    place = directory(path)
    manifest = read_manifest(place)
    found: dict[str, str] = {}
    total, before = sum(table.spec.rows for table in manifest.tables.values()), 0
    with open_with_bases(place, manifest) as files:
        check_tables(manifest.tables.values(), files)
        for name, table in sorted(manifest.tables.items()):
            start = before
            found[name] = _hash_table(table, files, lambda done, start=start: progress(start + done, total))
            before += table.spec.rows
        if "model" in manifest.parts:
            state = cast("dict[str, object]", read_states(manifest, ["model"], files)["model"])
            digest = hashlib.sha256()
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    digest.update(json.dumps([key, str(value.dtype), list(value.shape)]).encode())
                    digest.update(bytes_of(value.contiguous()))
            found["parameters"] = digest.hexdigest()
    return found


def _hash_table(table: SavedTable, files: TensorFiles, progress: Callable[[int], None]) -> str:
    """Hash a table's properties, and the numbers, stored bits and moments of its changed rows, each separately."""
    spec = table.spec
    digests: dict[str, Any] = {}
    for rows in _windows(table, files):
        # This store keeps only rows that differ from their initial values.
        shard = Shard(spec, rows, range(spec.dim))
        arena = Arena([shard], spec.dim, seed=0, device=torch.device("cpu"), backend="auto", storage=Storage("host"))
        store = arena.store
        assert isinstance(store, LazyStore)
        for name, moment in table.moments.items():
            store.add_moment(Moment(name, moment.per))
        tile = LocalTile(shard, arena, 0, True)
        load_tile(tile, table, table.moments, files)
        for slots in store.keys(0).chunks(_ROWS_AT_ONCE):
            found = {"keys": rows.start + slots, **tile.to_table_names(store.stored(slots))}
            for name, array in found.items():
                if len(array):
                    digests.setdefault(name, hashlib.sha256()).update(bytes_of(array.contiguous()))
        progress(rows.stop)
    whole = {name: digest.hexdigest() for name, digest in sorted(digests.items())}
    moments = {name: [moment.per, moment.initial] for name, moment in sorted(table.moments.items())}
    properties = [spec.rows, spec.dim, *form(spec), spec.init_seed, spec.init_version, spec.bound, moments, whole]
    return hashlib.sha256(json.dumps(properties).encode()).hexdigest()


def _windows(table: SavedTable, files: TensorFiles) -> Iterator[range]:
    """Yield ranges of rows. The stored rows of each range fit into memory. Ranges without stored rows are skipped."""
    most, rows = rows_in_memory(table, table.spec.dim), table.spec.rows
    tiles = [(tile, of_files) for of, of_files in layers(table, files) for tile in of.tiles]
    if not all(tile.keyed for tile, _ in tiles):
        yield from (range(first, min(first + most, rows)) for first in range(0, rows, most))
        return
    first = 0
    while first < rows:
        begin, end = rows, rows
        for tile, of_files in tiles:
            key = f"{tile.key}/keys"
            at, count = of_files.count_below(tile.file, key, first), of_files.find(tile.file, key).shape[0]
            if at < count:
                begin = min(begin, int(of_files.read_rows(tile.file, key, range(at, at + 1))))
            if at + most < count:
                end = min(end, int(of_files.read_rows(tile.file, key, range(at + most, at + most + 1))))
        if begin < rows:
            yield range(begin, end)
        first = end
