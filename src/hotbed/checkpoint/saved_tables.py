"""Load rows of a saved table into a tile of a table, and return the id of each row (`row_ids`).

Rows may come from any saved tiles. They are copied bit by bit if the row formats are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hotbed import ops
from hotbed.checkpoint.manifest import Manifest, SavedTable, SavedTile
from hotbed.checkpoint.tensor_files import CHUNK_BYTES, TensorFiles, as_bits
from hotbed.embed import LocalTile
from hotbed.embed.arena import array_ranges, form
from hotbed.embed.dynamic import PREFIX
from hotbed.errors import CheckpointError
from hotbed.ops.layout import SCALE_BLOCK
from hotbed.ops.rows import MIN_EXPONENT, exponents_of, round_nearest, widen
from hotbed.plan.tiling import column_unit, common_positions
from hotbed.specs import Table
from hotbed.store import MOMENT, LazyStore
from hotbed.store.device_store import TORCH_DTYPES

Positions = range | Tensor
"""Ascending positions of rows, as a range or as ``[n]`` int64."""

MOST_CHUNKS = 4
"""Upper limit of the memory for rows from many tiles, in multiples of `CHUNK_BYTES`."""


class Common(NamedTuple):
    """The rows and columns that a saved tile and a tile of this model have in common.

    ``arrays`` maps each array of the saved tile to the stored rows that it holds. ``there`` are the positions of the
    common rows among the stored rows of the saved tile. ``here`` are their positions in this model's tile.
    """

    tile: SavedTile
    arrays: dict[str, range]
    there: Positions
    here: Positions
    cols: range


def check_tables(tables: Iterable[SavedTable], files: TensorFiles) -> None:
    """Raise `CheckpointError` if an array of a tile has the wrong dtype or shape for its rows."""
    for of, of_files in (layer for saved in tables for layer in layers(saved, files)):
        for tile in of.tiles:
            if fault := next(_faults(tile, of, of_files), None):
                raise CheckpointError(f"{of_files.place}/{tile.file}: '{tile.key}/{fault}")


def layers(saved: SavedTable, files: TensorFiles) -> list[tuple[SavedTable, TensorFiles]]:
    """List the layers to read a table from: the full table, or the base and then the changed rows."""
    if saved.base is None:
        return [(saved, files)]
    assert files.base is not None
    return [(saved.base, files.base), (saved, files)]


def _faults(tile: SavedTile, saved: SavedTable, files: TensorFiles) -> Iterator[str]:
    """Yield messages about arrays of a tile with wrong dtypes or shapes, and about keys that are not valid."""
    rows, cols = tile.rows, len(tile.cols)
    count = len(rows)
    wide = len(range(rows.start, min(rows.stop, form(saved.spec)[1]), rows.step))
    if tile.keyed:
        found = files.find(tile.file, f"{tile.key}/keys")
        if (found.dtype, len(found.shape)) != (torch.int64, 1):
            yield f"keys': got {found.dtype} {list(found.shape)}, expected torch.int64 [n]"
        count, wide, before = found.shape[0], 0, -1
        for _, keys in files.keys(tile.file, f"{tile.key}/keys"):
            inside = (keys >= rows.start) & (keys < rows.stop) & ((keys - rows.start) % rows.step == 0)
            if not bool(inside.all()) or not bool((keys.diff() > 0).all()) or int(keys[0]) <= before:
                yield "keys' are not ascending rows of the tile"
            wide += _count_below(keys, form(saved.spec)[1])
            before = int(keys[-1])
    narrow = TORCH_DTYPES[form(saved.spec)[0]]
    wanted: dict[str, tuple[torch.dtype, list[int]]] = {}
    for name in _names(saved):
        n = wide if name == "fp32_weight" else count - wide
        if name == "exponents":
            wanted[name] = torch.int8, [n, -(-cols // SCALE_BLOCK)]
        else:
            wanted[name] = torch.float32 if name == "fp32_weight" else narrow, [n, cols]
    for name, moment in saved.moments.items():
        wanted[f"{MOMENT}{name}"] = torch.float32, [count] if moment.per == "row" else [count, cols]
    for name, (dtype, shape) in wanted.items():
        if not shape[0]:
            continue
        found = files.find(tile.file, f"{tile.key}/{name}")
        if (found.dtype, list(found.shape)) != (dtype, shape):
            yield f"{name}': got {found.dtype} {list(found.shape)}, expected {dtype} {shape} for its tile"


def load_tile(tile: LocalTile, saved: SavedTable, moments: Collection[str], files: TensorFiles) -> None:
    """Overwrite the rows and these moments of a tile with a saved table.

    Rows beyond the last row of the saved table are not changed.
    """
    tile.arena.store.replaced()
    for of, of_files in layers(saved, files):
        _load_layer(tile, of, moments, of_files)


def _load_layer(tile: LocalTile, saved: SavedTable, moments: Collection[str], files: TensorFiles) -> None:
    """Overwrite a tile with one layer of a table. For changed rows, the tile must hold the base."""
    known = tile.shard.rows[: len(range(tile.shard.rows.start, saved.spec.rows, tile.shard.rows.step))]
    if isinstance(tile.arena.store, LazyStore):
        _load_existing(tile, tile.arena.store, saved, moments, files)
        return
    if form(saved.spec) == form(tile.shard.table):
        if saved.base is None and any(t.keyed for t in _shared(tile.shard.rows, tile.shard.cols, saved)):
            _initialize(tile, saved.spec, known)
        _copy_raw(tile, saved, files)
    else:
        _copy_values(tile, saved, known, files)
    extents, arrays = tile.extents(), tile.arrays()
    for name in moments:
        e = extents[f"{MOMENT}{name}"]
        target = arrays[e.array][e.start : e.stop]
        for t in _shared(tile.shard.rows, tile.shard.cols, saved):
            columns = _columns(t.cols, tile.shard.cols) if target.dim() > 1 else None
            if t.keyed and saved.base is None:
                initial = _rows_at(target, common_positions(tile.shard.rows, t.rows))
                (initial if columns is None else initial[:, columns[1]]).fill_(saved.moments[name].initial)
            for c in common(tile.shard.rows, tile.shard.cols, saved.model_copy(update={"tiles": (t,)}), files):
                copy_rows(c, f"{MOMENT}{name}", _stored_rows(c), target, range(len(target)), columns, files)


def common(
    rows: range, cols: range, saved: SavedTable, files: TensorFiles, within: range | None = None
) -> Iterator[Common]:
    """Yield the rows and columns that a rectangle of a table has in common with each saved tile.

    Tiles with keys are yielded in pieces of at most `KEYS_AT_ONCE` keys. ``within`` limits them to rows at these
    positions. Tiles are ordered from the last columns to the first. So if a row is sharded by columns, the per-row
    moment of the first columns is loaded last and overwrites the other tiles' moments.
    """
    for tile in _shared(rows, cols, saved):
        shared = range(max(cols.start, tile.cols.start), min(cols.stop, tile.cols.stop))
        there = common_positions(tile.rows, rows)
        if not tile.keyed:
            yield Common(tile, array_ranges(saved.spec, tile.rows), there, common_positions(rows, tile.rows), shared)
            continue
        file, key = tile.file, f"{tile.key}/keys"
        some = rows if within is None else rows[within.start : within.stop]
        if not len(some):
            continue
        count, wide = files.find(file, key).shape[0], files.count_below(file, key, form(saved.spec)[1])
        arrays = {name: range(*((0, wide) if name == "fp32_weight" else (wide, count))) for name in _names(saved)}
        first, last = files.count_below(file, key, some.start), files.count_below(file, key, some[-1] + 1)
        for start, keys in files.keys(file, key, first, last):
            distance = keys - rows.start
            at = (distance % rows.step == 0).nonzero()[:, 0]
            if len(at):
                yield Common(tile, arrays, start + at, distance[at] // rows.step, shared)


def _shared(rows: range, cols: range, saved: SavedTable) -> list[SavedTile]:
    """List the saved tiles that overlap this rectangle, from the last columns to the first."""
    found = [
        tile
        for tile in saved.tiles
        if max(cols.start, tile.cols.start) < min(cols.stop, tile.cols.stop) and len(common_positions(tile.rows, rows))
    ]
    return sorted(found, key=lambda tile: -tile.cols.start)


def copy_rows(
    c: Common,
    name: str,
    there: range,
    out: Tensor,
    here: range,
    columns: tuple[slice, slice] | None,
    files: TensorFiles,
) -> None:
    """Copy the common rows of an array to ``out``, which is ``[n]`` or ``[n, D]``.

    The array holds the rows ``there`` of the saved tile, and ``out`` the rows ``here`` of this model's tile.
    ``columns`` are the common columns in the array and in ``out``, or None if ``out`` is ``[n]``.
    """
    first, last = _count_below(c.there, there.start), _count_below(c.there, there.stop)
    source, target = _shift(c.there[first:last], there.start), _shift(c.here[first:last], here.start)
    if not len(source):
        return
    cols = range(1)
    if columns is not None:
        cols, out = range(columns[0].start, columns[0].stop), out[:, columns[1]]
    file, key = c.tile.file, f"{c.tile.key}/{name}"
    if isinstance(source, range) and isinstance(target, range):
        files.copy_rows(file, key, source, cols, _rows_at(out, target))
        return
    assert isinstance(source, Tensor) and isinstance(target, Tensor)
    out = as_bits(out)
    step = max(CHUNK_BYTES // max(files.find(file, key).row_bytes, 1), 1)
    for start in range(int(source[0]), int(source[-1]) + 1, step):
        first, last = _count_below(source, start), _count_below(source, start + step)
        if first == last:
            continue
        at = source[first:last] - source[first]
        chunk = as_bits(files.read_rows(file, key, range(int(source[first]), int(source[last - 1]) + 1)))[at]
        out[target[first:last].to(out.device)] = (chunk if columns is None else chunk[:, columns[0]]).to(out.device)


def values_of(c: Common, first: int, last: int, files: TensorFiles) -> tuple[Positions, Tensor]:
    """Return the common rows at positions ``first … last − 1`` of this model's tile: positions, and float32 rows."""
    begin, end = _count_below(c.here, first), _count_below(c.here, last)
    part = c._replace(there=c.there[begin:end], here=range(end - begin))
    values = torch.empty(end - begin, len(c.tile.cols))
    whole = slice(0, len(c.tile.cols))
    for name in ("fp32_weight", "weight"):
        if name not in c.arrays:
            continue
        low, high = _count_below(part.there, c.arrays[name].start), _count_below(part.there, c.arrays[name].stop)
        if low == high:
            continue
        some = part._replace(there=part.there[low:high], here=range(high - low))
        if isinstance(some.there, Tensor):
            some = some._replace(here=torch.arange(high - low))
        stored = files.find(c.tile.file, f"{c.tile.key}/{name}")
        rows = torch.empty(high - low, stored.shape[1], dtype=stored.dtype)
        copy_rows(some, name, c.arrays[name], rows, range(high - low), (whole, whole), files)
        exponents = torch.empty(0, dtype=torch.int8)
        if stored.dtype == torch.int8:
            blocks = slice(0, -(-len(c.tile.cols) // SCALE_BLOCK))
            exponents = torch.empty(high - low, blocks.stop, dtype=torch.int8)
            copy_rows(some, "exponents", c.arrays["exponents"], exponents, range(high - low), (blocks, blocks), files)
        values[low:high] = widen(rows, exponents)
    return c.here[begin:end], values[:, c.cols.start - c.tile.cols.start : c.cols.stop - c.tile.cols.start]


def _copy_raw(tile: LocalTile, saved: SavedTable, files: TensorFiles) -> None:
    """Copy rows of the same format, bit by bit."""
    extents, arrays = tile.extents(), tile.arrays()
    for name, here in array_ranges(tile.shard.table, tile.shard.rows).items():
        e = extents[name]
        unit = SCALE_BLOCK if name == "exponents" else 1
        for c in common(tile.shard.rows, tile.shard.cols, saved, files):
            if name in c.arrays:
                columns = _columns(c.tile.cols, tile.shard.cols, unit)
                copy_rows(c, name, c.arrays[name], arrays[e.array][e.start : e.stop], here, columns, files)


def _load_existing(
    tile: LocalTile,
    store: LazyStore,
    saved: SavedTable,
    moments: Collection[str],
    files: TensorFiles,
) -> None:
    """Load rows into a tile of a lazy store. Only saved rows are materialized."""
    spec, cols, first_slot = saved.spec, tile.shard.cols, tile.arena.first_slots[tile.number]
    assert spec.init_seed is not None
    if saved.base is None:
        store.initialize(first_slot, seed=spec.init_seed, rows=tile.shard.rows, cols=cols, bound=spec.bound)
        for name in moments:
            store.fill(tile.number, name, saved.moments[name].initial)
    same_format = form(spec) == form(tile.shard.table)
    step = max(CHUNK_BYTES // store.records.record_bytes, 1)
    for c in common(tile.shard.rows, cols, saved, files):
        for start in range(0, len(c.here), step):
            here = c.here[start : start + step]
            slots = first_slot + (torch.arange(here.start, here.stop, here.step) if isinstance(here, range) else here)
            there = c.there[start : start + step]
            positions = range(len(slots)) if isinstance(there, range) else torch.arange(len(slots))
            part = c._replace(there=there, here=positions)
            if not same_format:
                values = store.read(slots)
                _, values[:, _columns(c.tile.cols, cols)[1]] = values_of(part, 0, len(slots), files)
                store.put_values(slots, values)
            stored = {
                name: t
                for name, t in tile.to_table_names(store.stored(slots)).items()
                if (
                    name.removeprefix(MOMENT) in moments
                    if name.startswith(MOMENT)
                    else same_format and name in c.arrays
                )
            }
            wide = store.count_wide(slots)
            for name, out in stored.items():
                first = wide if name in ("weight", "exponents") and len(out) < len(slots) else 0
                columns = (
                    _columns(c.tile.cols, cols, SCALE_BLOCK if name == "exponents" else 1) if out.dim() > 1 else None
                )
                stored_rows = _stored_rows(c) if name.startswith(MOMENT) else c.arrays[name]
                copy_rows(part, name, stored_rows, out, range(first, first + len(out)), columns, files)
            store.put_stored(slots, tile.to_store_names(stored))


def _copy_values(tile: LocalTile, saved: SavedTable, known: range, files: TensorFiles) -> None:
    """Copy the values of ``known`` rows of another format. Rows of a lower precision are rounded to nearest.

    For a layer of changed rows, only these rows are written, because rounding other rows twice would change them.
    """
    store, cols, spec = tile.arena.store, tile.shard.cols, saved.spec
    shared = _shared(tile.shard.rows, cols, saved)
    keyed = saved.base is None and any(t.keyed for t in shared)
    # Each chunk reads from every saved tile, so chunks are larger if there are many tiles.
    step = max(CHUNK_BYTES * min(max(len(shared), 1), MOST_CHUNKS) // (4 * len(cols)), 1)
    slots = tile.arena.slots(tile.number)
    for first in range(0, len(known), step):
        last = min(first + step, len(known))
        part = slots[first:last]
        values = initial_values(spec, known[first:last], cols).to(store.device) if keyed else store.read(part)
        held = torch.full((last - first,), saved.base is None)
        for c in common(tile.shard.rows, cols, saved, files, range(first, last)):
            here, rows = values_of(c, first, last, files)
            if len(here):
                at = (torch.arange(here.start, here.stop, here.step) if isinstance(here, range) else here) - first
                values[at.to(values.device), _columns(c.tile.cols, cols)[1]] = rows.to(values.device)
                held[at] = True
        _lower_exponents(tile, first + held.nonzero()[:, 0])
        store.write(part[held.to(part.device)], values[held.to(values.device)])


def initial_values(spec: Table, rows: range, cols: range) -> Tensor:
    """Return the initial values of these rows and columns, rounded to the table's dtype, as float32."""
    assert spec.init_seed is not None
    unit = column_unit(spec)  # columns that share a scale are rounded together
    blocks = range(cols.start // unit * unit, min(-(-cols.stop // unit) * unit, spec.dim))
    values = torch.empty(len(rows), len(blocks), dtype=torch.float32)
    kernels = ops.select(values.device)
    kernels.initial_values_(values, seed=spec.init_seed, rows=rows, cols=blocks, bound=spec.bound)
    narrow = values[len(array_ranges(spec, rows).get("fp32_weight", ())) :]
    dtype = TORCH_DTYPES[form(spec)[0]]
    exponents = exponents_of(narrow) if dtype == torch.int8 else torch.empty(0, dtype=torch.int8)
    narrow.copy_(widen(round_nearest(narrow, dtype, exponents), exponents))
    return values[:, cols.start - blocks.start : cols.stop - blocks.start]


def _initialize(tile: LocalTile, spec: Table, known: range) -> None:
    """Set ``known`` rows to their initial values in the saved table."""
    assert spec.init_seed is not None
    _lower_exponents(tile, torch.arange(len(known)))
    slot = tile.arena.first_slots[tile.number]
    tile.arena.store.initialize(slot, seed=spec.init_seed, rows=known, cols=tile.shard.cols, bound=spec.bound)


def _lower_exponents(tile: LocalTile, positions: Tensor) -> None:
    """Reset the exponents of rows before the rows are overwritten, because writes only increase exponents."""
    extent = tile.extents().get("exponents")
    if extent is not None:
        wide = len(array_ranges(tile.shard.table, tile.shard.rows).get("fp32_weight", ()))
        array = tile.arrays()["exponents"]
        array[(extent.start + positions[positions >= wide] - wide).to(array.device)] = MIN_EXPONENT


def _names(saved: SavedTable) -> list[str]:
    """Return the names of the arrays that hold rows of a table."""
    dtype, fp32_rows = form(saved.spec)
    return ["weight", *(["exponents"] if dtype == "int8" else []), *(["fp32_weight"] if fp32_rows else [])]


def _columns(saved: range, cols: range, unit: int = 1) -> tuple[slice, slice]:
    """Return the positions of the common columns in a saved tile and in ``cols``, divided by ``unit``."""
    start, stop = max(saved.start, cols.start), min(saved.stop, cols.stop)

    def within(whole: range) -> slice:
        return slice((start - whole.start) // unit, -(-(stop - whole.start) // unit))

    return within(saved), within(cols)


def _stored_rows(c: Common) -> range:
    """Return the positions of all stored rows of a saved tile."""
    return range(max(positions.stop for positions in c.arrays.values()) if c.arrays else 0)


def _rows_at(array: Tensor, positions: range) -> Tensor:
    """Return a view of the rows at these positions. There is at least one position."""
    return array[positions.start : positions[-1] + 1 : positions.step]


def _count_below(positions: Positions, limit: int) -> int:
    """Return the number of ascending positions below a limit."""
    return bisect_left(positions, limit) if isinstance(positions, range) else int(torch.searchsorted(positions, limit))


def _shift(positions: Positions, by: int) -> Positions:
    if isinstance(positions, Tensor):
        return positions - by
    return range(positions.start - by, positions.stop - by, positions.step)


NO_ID = -1


def is_dynamic(table: str, manifest: Manifest) -> bool:
    """Return whether a saved table is dynamic."""
    return _state_of(table, "ids", manifest) is not None


def row_ids(table: str, rows: range, manifest: Manifest, files: TensorFiles, ttl_steps: int | None = None) -> Tensor:
    """Return the ids of rows, ``[n]`` int64: their numbers, or for a dynamic table the assigned ids or `NO_ID`.

    If ``ttl_steps`` is passed, ids that have not been seen for more steps are `NO_ID`, because they have expired.
    """
    found = _read_state(table, "ids", rows, manifest, files)
    if found is None:
        return torch.arange(rows.start, rows.stop)
    now = _state_of(table, "now", manifest)
    times = None if ttl_steps is None else _read_state(table, "times", rows, manifest, files)
    if now is None or times is None:
        return found
    return found.masked_fill(int(files.read(*now)) - times > (ttl_steps or 0), NO_ID)


def _read_state(table: str, name: str, rows: range, manifest: Manifest, files: TensorFiles) -> Tensor | None:
    found = _state_of(table, name, manifest)
    if found is None:
        return None
    stored, wanted = files.find(*found), manifest.tables[table].spec.rows
    if (stored.dtype, list(stored.shape)) != (torch.int64, [wanted]):
        raise CheckpointError(
            f"{files.place}/{found[0]}: '{found[1]}': got {stored.dtype} {list(stored.shape)}, expected torch.int64 "
            f"[{wanted}]"
        )
    return files.read_rows(*found, rows)


def _state_of(table: str, name: str, manifest: Manifest) -> tuple[str, str] | None:
    """Return the file and array with a state of a dynamic table, or None for other tables."""
    own, _, path = table.rpartition(":")
    for part, state in manifest.parts.items():
        entry = cast("Mapping[str, Any]", state).get(f"{path}.{PREFIX}{name}") if isinstance(state, Mapping) else None
        if own in ("", part) and isinstance(entry, Mapping) and "$tensor" in entry:
            return manifest.file_of(part), str(cast("Mapping[str, Any]", entry)["$tensor"])
    return None
