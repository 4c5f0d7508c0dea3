"""Convert a checkpoint into another one, or its tables into files that any library can read.

`convert` makes it compact, gives its rows another dtype, or leaves out what only training needs; `export_tables` writes
one safetensors file for each table. `content_hashes` hashes the values of a checkpoint, so that two runs can be
compared whatever their plans, tiers and ranks. Tables are read by rectangles of at most `MEMORY_BYTES`, as if they were
loaded into a tile of that size, and written before the next is read; so tables may be larger than memory.
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
"""Upper limit of a table's bytes that are in memory at once, as float32 and with moments."""
CONVERTED_BYTES = 32 << 20
"""Upper limit of a file of converted tables, which is in memory until it is written."""

Progress = Callable[[int, int], None]
"""Called with how many cells of tables are done, and with how many there are."""
Dtypes = RowDtype | Mapping[str, RowDtype] | None
"""A dtype for the rows of all tables, or of some by name; others keep theirs."""


def convert(
    source: str | Path | Directory,
    target: str | Path | Directory,
    *,
    compact: bool = False,
    dtype: Dtypes = None,
    moments: bool = True,
    progress: Progress = lambda done, total: None,
) -> Manifest:
    """Make a checkpoint of another one, with bounded memory, and return its manifest.

    Recipe, plan and step stay as they are. Without options, too, the tables' tiles may be cut into more tiles. There
    must be nothing at ``target``, which is not made on errors.

    ``compact`` stores only the rows that training has changed, with their numbers; all others have their initial
    values, which loading computes again, bit for bit. ``dtype`` is what rows are to be stored as, of all tables or by
    table; narrower ones are rounded to the nearest, which loses bits for good. The exponents of int8 rows are the
    smallest that hold them. Without ``moments`` only tables and the part ``model`` are kept: enough to predict, not to
    train on. ``progress`` is called now and then with cells done and all cells.
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
        write_manifest(new, manifest)
    return manifest


class Rectangle(NamedTuple):
    """A rectangle of a table that is to be read, and the table with the saved tiles that it is in."""

    rows: range
    cols: range
    saved: SavedTable


def read_rectangle(rectangle: Rectangle, spec: Table, files: TensorFiles) -> tuple[LocalTile, dict[str, Tensor]]:
    """Load a rectangle of a saved table into memory, with the dtype of ``spec``.

    Return a tile with its values, and its arrays under the names that files have for them.
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
    """How many rows of so many columns take `MEMORY_BYTES` with their moments."""
    beside = sum(Moment(name, moment.per).nbytes(cols) for name, moment in saved.moments.items())
    return max(MEMORY_BYTES // (row_bytes("fp32", cols) + beside), 1)


def _specs(manifest: Manifest, dtype: Dtypes) -> dict[str, Table]:
    """Tables with the dtypes that their rows are to have."""
    given = dict.fromkeys(manifest.tables, dtype) if dtype is None or isinstance(dtype, str) else dtype
    known = get_args(RowDtype)
    for name, wanted in given.items():
        if name not in manifest.tables:
            raise CheckpointError(
                f"dtype names table '{name}', which the checkpoint lacks; it has "
                f"{', '.join(manifest.tables) or 'none'}{did_you_mean(name, manifest.tables)}"
            )
        if wanted is not None and wanted not in known:
            raise CheckpointError(f"dtype is {wanted!r}, must be {', '.join(known)}{did_you_mean(wanted, known)}")
    return {
        name: replace(table.spec, dtype=given.get(name) or table.spec.dtype) for name, table in manifest.tables.items()
    }


def _copy_arrays(part: str, old: Manifest, files: TensorFiles, writer: FileWriter) -> None:
    """Copy the tensors of a part, if it has some; every block is checked."""
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
    """Yield all tables in chunks, each read when the one before is written."""
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
                    if changed.nbytes >= CONVERTED_BYTES // 2:  # putting parts together takes twice the memory
                        yield changed.chunk()
                else:
                    yield Chunk(name, some.rows, some.cols, {key: Array.of(t) for key, t in arrays.items()})
                done += len(some.rows) * len(some.cols)
                progress(done, total)
                del tile, arrays  # before the next are made
            if changed.rows:
                yield changed.chunk()


def _rectangles(saved: SavedTable, spec: Table) -> list[Rectangle]:
    """The saved tiles; all of the table if they are cut at columns where rows of the new dtype cannot be."""
    unit, full = column_unit(spec), saved.base or saved
    if any(tile.cols.start % unit for tile in full.tiles):
        return [Rectangle(range(spec.rows), range(spec.dim), saved)]
    found: list[Rectangle] = []
    for tile in full.tiles:
        only = full.model_copy(update={"tiles": (tile,)})  # what else there is has nothing of this rectangle
        of = only if saved.base is None else saved.model_copy(update={"base": only})
        found.append(Rectangle(tile.rows, tile.cols, of))
    return found


def _changed_rows(tile: LocalTile, arrays: Mapping[str, Tensor], saved: SavedTable) -> Tensor:
    """Return which rows of a tile ``[R]`` differ in any bit from untouched ones."""
    shard = tile.shard
    arena = Arena([shard], len(shard.cols), seed=0, device=torch.device("cpu"), backend="auto")
    untouched = LocalTile(shard, arena, 0, True)
    changed = torch.zeros(len(shard.rows), dtype=torch.bool)
    for name, extent in untouched.extents().items():
        before = untouched.arrays()[extent.array][extent.start : extent.stop]
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
        """Keep those of the next rows that have changed."""
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
        """Return a chunk of the rows collected so far, and clear the collection."""
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
"""File that says which file holds which table."""


def export_tables(
    source: str | Path | Directory,
    target: str | Path | Directory,
    *,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Write each table to a file, with bounded memory, and the rest of the model to ``dense.safetensors``.

    A table's file is ``NAME.safetensors``, its name percent-encoded, with the array ``weight [R, D]``: bfloat16 or
    float16 where all rows are stored so, else float32. ``tables.json`` says what there is, and is returned: ``step``,
    and by name each table's ``file``, ``rows``, ``dim`` and ``dtype``. ``target`` is a path or URI where nothing is.
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
                raise CheckpointError(f"{place}: part 'model' is {type(state).__name__}, must be a mapping")
            writer.write("dense.safetensors", {k: Array.of(t) for k, t in state.items() if isinstance(t, Tensor)})
        writer.entries()
        new.write(TABLES, json.dumps(found, indent=1))
    return found


def exported_table(spec: Table) -> Table:
    """Return the table with rows of a dtype that others know, and of one only."""
    stored, fp32_rows = form(spec)
    return replace(spec, dtype=stored if stored in ("bf16", "fp16") and not fp32_rows else "fp32", fp32_rows=0)


def exported_weight(saved: SavedTable, spec: Table, files: TensorFiles, count: Any) -> Array:
    """Return all rows, of which some more than are asked for are in memory: tiles may lie across them."""
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

    The hash of a table covers the rows that training has changed, with their numbers and moments. Untouched rows are
    left out, because some plans store them and others compute them again.

    The key ``parameters`` is for all tensors of the part ``model``; states of dense optimizers and random numbers are
    not hashed. ``progress`` is called with rows done and all rows.
    """
    place = directory(path)
    manifest = read_manifest(place)
    found: dict[str, str] = {}
    total, before = sum(table.spec.rows for table in manifest.tables.values()), 0
    with open_with_bases(place, manifest) as files:
        check_tables(manifest.tables.values(), files)
        for name, table in sorted(manifest.tables.items()):
            start = before
            found[name] = _hash_of(table, files, lambda done, start=start: progress(start + done, total))
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


def _hash_of(table: SavedTable, files: TensorFiles, progress: Callable[[int], None]) -> str:
    """Hash what a table is, and numbers, stored bits and moments of its changed rows, each kind by itself."""
    spec = table.spec
    digests: dict[str, Any] = {}
    for rows in _windows(table, files):
        # A store that keeps only rows that differ from their initial values.
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
    described = [spec.rows, spec.dim, *form(spec), spec.init_seed, spec.init_version, spec.bound, moments, whole]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _windows(table: SavedTable, files: TensorFiles) -> Iterator[range]:
    """Yield ranges of rows whose stored rows fit into memory; no range without stored rows."""
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
