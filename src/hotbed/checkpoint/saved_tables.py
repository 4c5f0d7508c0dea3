"""Load rows of a saved table into a tile of a table, and find the id of each row (`row_ids`).

Rows come from any saved tiles, bit for bit where the row formats match.
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

Places = range | Tensor
"""Rising positions of rows; ``[n]`` int64 where they follow no rule."""

MOST_CHUNKS = 4
"""How many times `CHUNK_BYTES` may be in memory where rows of many tiles are put together."""


class Common(NamedTuple):
    """Rows and columns that a saved tile and a tile here have in common.

    ``arrays`` are those that hold rows of the saved tile, and which of them each holds; ``there`` and ``here``
    positions of the common rows among those that the saved tile holds, and among those of the tile here.
    """

    tile: SavedTile
    arrays: dict[str, range]
    there: Places
    here: Places
    cols: range


def check_tables(tables: Iterable[SavedTable], files: TensorFiles) -> None:
    """Raise `CheckpointError` unless the arrays of all tiles have the dtypes and shapes that hold their rows."""
    for of, of_files in (layer for saved in tables for layer in layers(saved, files)):
        for tile in of.tiles:
            if fault := next(_faults(tile, of, of_files), None):
                raise CheckpointError(f"{of_files.place}/{tile.file}: '{tile.key}/{fault}")


def layers(saved: SavedTable, files: TensorFiles) -> list[tuple[SavedTable, TensorFiles]]:
    """List what a table is read from, one over the other: itself; or its base, then the rows that changed since."""
    if saved.base is None:
        return [(saved, files)]
    assert files.base is not None
    return [(saved.base, files.base), (saved, files)]


def _faults(tile: SavedTile, saved: SavedTable, files: TensorFiles) -> Iterator[str]:
    """Yield which of a tile's arrays lack the dtypes and shapes that hold its rows, or the rising keys of its rows."""
    rows, cols = tile.rows, len(tile.cols)
    count = len(rows)
    wide = len(range(rows.start, min(rows.stop, form(saved.spec)[1]), rows.step))
    if tile.keyed:
        found = files.find(tile.file, f"{tile.key}/keys")
        if (found.dtype, len(found.shape)) != (torch.int64, 1):
            yield f"keys' is {found.dtype} {list(found.shape)}, must be torch.int64 [n]"
        count, wide, before = found.shape[0], 0, -1
        for _, keys in files.keys(tile.file, f"{tile.key}/keys"):
            inside = (keys >= rows.start) & (keys < rows.stop) & ((keys - rows.start) % rows.step == 0)
            if not bool(inside.all()) or not bool((keys.diff() > 0).all()) or int(keys[0]) <= before:
                yield "keys' are not rising rows of the tile"
            wide += _below(keys, form(saved.spec)[1])
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
            yield f"{name}' is {found.dtype} {list(found.shape)}, its tile needs {dtype} {shape}"


def load_tile(tile: LocalTile, saved: SavedTable, moments: Collection[str], files: TensorFiles) -> None:
    """Overwrite a tile, and these moments of it, with what a checkpoint has of it.

    Rows beyond the saved table's stay as they are.
    """
    tile.arena.store.replaced()
    for of, of_files in layers(saved, files):
        _load_layer(tile, of, moments, of_files)


def _load_layer(tile: LocalTile, saved: SavedTable, moments: Collection[str], files: TensorFiles) -> None:
    """Overwrite a tile with a table; with a difference to its base, where that is what the tile holds."""
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
                untouched = _at(target, common_positions(tile.shard.rows, t.rows))
                (untouched if columns is None else untouched[:, columns[1]]).fill_(saved.moments[name].initial)
            for c in common(tile.shard.rows, tile.shard.cols, saved.model_copy(update={"tiles": (t,)}), files):
                copy_rows(c, f"{MOMENT}{name}", _all(c), target, range(len(target)), columns, files)


def common(
    rows: range, cols: range, saved: SavedTable, files: TensorFiles, within: range | None = None
) -> Iterator[Common]:
    """Find the rows and columns that a rectangle of a table has in common with each of the saved tiles.

    A tile with keys comes in pieces of at most `KEYS_AT_ONCE` keys, of rows at the positions ``within`` if given. Tiles
    come from the last columns to the first: each tile of a row that is cut into columns has the row's value of a
    moment, and that of the first columns counts.
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
    """List the saved tiles that have rows and columns of this rectangle, from the last columns to the first."""
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
    """Copy the common rows of an array.

    The array holds the rows ``there`` of the saved tile; ``out``, ``[n]`` or ``[n, D]``, the rows ``here`` of the tile
    here. ``columns`` are those of the array and of ``out``; None for ``[n]``.
    """
    first, last = _below(c.there, there.start), _below(c.there, there.stop)
    source, target = _shifted(c.there[first:last], there.start), _shifted(c.here[first:last], here.start)
    if not len(source):
        return
    cols = range(1)
    if columns is not None:
        cols, out = range(columns[0].start, columns[0].stop), out[:, columns[1]]
    file, key = c.tile.file, f"{c.tile.key}/{name}"
    if isinstance(source, range) and isinstance(target, range):
        files.copy_rows(file, key, source, cols, _at(out, target))
        return
    assert isinstance(source, Tensor) and isinstance(target, Tensor)
    out = as_bits(out)
    step = max(CHUNK_BYTES // max(files.find(file, key).row_bytes, 1), 1)
    for start in range(int(source[0]), int(source[-1]) + 1, step):
        first, last = _below(source, start), _below(source, start + step)
        if first == last:
            continue
        at = source[first:last] - source[first]
        chunk = as_bits(files.read_rows(file, key, range(int(source[first]), int(source[last - 1]) + 1)))[at]
        out[target[first:last].to(out.device)] = (chunk if columns is None else chunk[:, columns[0]]).to(out.device)


def values_of(c: Common, first: int, last: int, files: TensorFiles) -> tuple[Places, Tensor]:
    """Read common rows whose positions here are from ``first`` to ``last``: these positions, and rows as float32."""
    begin, end = _below(c.here, first), _below(c.here, last)
    part = c._replace(there=c.there[begin:end], here=range(end - begin))
    values = torch.empty(end - begin, len(c.tile.cols))
    whole = slice(0, len(c.tile.cols))
    for name in ("fp32_weight", "weight"):
        if name not in c.arrays:
            continue
        low, high = _below(part.there, c.arrays[name].start), _below(part.there, c.arrays[name].stop)
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
    """Copy rows as they are stored."""
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
    """Load into a tile whose rows are materialized on their first update: only rows that were saved are."""
    spec, cols, first_slot = saved.spec, tile.shard.cols, tile.arena.first_slots[tile.number]
    assert spec.init_seed is not None
    if saved.base is None:
        store.initialize(first_slot, seed=spec.init_seed, rows=tile.shard.rows, cols=cols, bound=spec.bound)
        for name in moments:
            store.fill(tile.number, name, saved.moments[name].initial)
    alike = form(spec) == form(tile.shard.table)
    step = max(CHUNK_BYTES // store.records.record_bytes, 1)
    for c in common(tile.shard.rows, cols, saved, files):
        for start in range(0, len(c.here), step):
            here = c.here[start : start + step]
            slots = first_slot + (torch.arange(here.start, here.stop, here.step) if isinstance(here, range) else here)
            there = c.there[start : start + step]
            positions = range(len(slots)) if isinstance(there, range) else torch.arange(len(slots))
            part = c._replace(there=there, here=positions)
            if not alike:
                values = store.read(slots)
                _, values[:, _columns(c.tile.cols, cols)[1]] = values_of(part, 0, len(slots), files)
                store.put_values(slots, values)
            stored = {
                name: t
                for name, t in tile.to_table_names(store.stored(slots)).items()
                if (name.removeprefix(MOMENT) in moments if name.startswith(MOMENT) else alike and name in c.arrays)
            }
            wide = store.count_wide(slots)
            for name, out in stored.items():
                first = wide if name in ("weight", "exponents") and len(out) < len(slots) else 0
                columns = (
                    _columns(c.tile.cols, cols, SCALE_BLOCK if name == "exponents" else 1) if out.dim() > 1 else None
                )
                holds = _all(c) if name.startswith(MOMENT) else c.arrays[name]
                copy_rows(part, name, holds, out, range(first, first + len(out)), columns, files)
            store.put_stored(slots, tile.to_store_names(stored))


def _copy_values(tile: LocalTile, saved: SavedTable, known: range, files: TensorFiles) -> None:
    """Copy the values of ``known`` rows, rounding to the nearest what is narrower here than in the saved table.

    Of a difference only the rows that it holds are written: rounding twice is not rounding once.
    """
    store, cols, spec = tile.arena.store, tile.shard.cols, saved.spec
    shared = _shared(tile.shard.rows, cols, saved)
    keyed = saved.base is None and any(t.keyed for t in shared)
    # Each chunk reads from every saved tile, so that many of them get larger chunks.
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
    """Initial values of these cells ``[rows, cols]``, as the table stores them, in float32."""
    assert spec.init_seed is not None
    unit = column_unit(spec)  # its columns share a scale, so they are rounded together
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
    """Give ``known`` rows the initial values that they had in the saved table."""
    assert spec.init_seed is not None
    _lower_exponents(tile, torch.arange(len(known)))
    slot = tile.arena.first_slots[tile.number]
    tile.arena.store.initialize(slot, seed=spec.init_seed, rows=known, cols=tile.shard.cols, bound=spec.bound)


def _lower_exponents(tile: LocalTile, places: Tensor) -> None:
    """Reset the exponents of rows at these rising positions before they are overwritten: exponents only grow."""
    extent = tile.extents().get("exponents")
    if extent is not None:
        wide = len(array_ranges(tile.shard.table, tile.shard.rows).get("fp32_weight", ()))
        array = tile.arrays()["exponents"]
        array[(extent.start + places[places >= wide] - wide).to(array.device)] = MIN_EXPONENT


def _names(saved: SavedTable) -> list[str]:
    """Arrays that rows of a table may be in."""
    dtype, fp32_rows = form(saved.spec)
    return ["weight", *(["exponents"] if dtype == "int8" else []), *(["fp32_weight"] if fp32_rows else [])]


def _columns(saved: range, cols: range, unit: int = 1) -> tuple[slice, slice]:
    """Return the common columns as positions in a saved tile's columns and in these, in units of so many columns."""
    start, stop = max(saved.start, cols.start), min(saved.stop, cols.stop)

    def within(whole: range) -> slice:
        return slice((start - whole.start) // unit, -(-(stop - whole.start) // unit))

    return within(saved), within(cols)


def _all(c: Common) -> range:
    """All rows that a saved tile holds."""
    return range(max(places.stop for places in c.arrays.values()) if c.arrays else 0)


def _at(array: Tensor, places: range) -> Tensor:
    """View of rows at these positions, of which there is at least one."""
    return array[places.start : places[-1] + 1 : places.step]


def _below(places: Places, limit: int) -> int:
    """How many of rising positions are below a limit."""
    return bisect_left(places, limit) if isinstance(places, range) else int(torch.searchsorted(places, limit))


def _shifted(places: Places, by: int) -> Places:
    if isinstance(places, Tensor):
        return places - by
    return range(places.start - by, places.stop - by, places.step)


NO_ID = -1


def is_dynamic(table: str, manifest: Manifest) -> bool:
    """Whether rows of a saved table belong to ids of a dynamic one."""
    return _state_of(table, "ids", manifest) is not None


def row_ids(table: str, rows: range, manifest: Manifest, files: TensorFiles, ttl_steps: int | None = None) -> Tensor:
    """Ids of rows ``[n]`` int64: their numbers, or those that they have in a dynamic table, `NO_ID` where none.

    With ``ttl_steps`` ids that were not seen for longer, which lookups no longer find, are none either.
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
            f"{files.place}/{found[0]}: '{found[1]}' is {stored.dtype} {list(stored.shape)}, must be torch.int64 "
            f"[{wanted}]"
        )
    return files.read_rows(*found, rows)


def _state_of(table: str, name: str, manifest: Manifest) -> tuple[str, str] | None:
    """File and array with a state of the rows of a dynamic table; None for other tables."""
    own, _, path = table.rpartition(":")
    for part, state in manifest.parts.items():
        entry = cast("Mapping[str, Any]", state).get(f"{path}.{PREFIX}{name}") if isinstance(state, Mapping) else None
        if own in ("", part) and isinstance(entry, Mapping) and "$tensor" in entry:
            return manifest.file_of(part), str(cast("Mapping[str, Any]", entry)["$tensor"])
    return None
