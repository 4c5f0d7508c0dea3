"""Rows of a saved table into a tile of a table: any saved tiles into any tile, raw where rows are stored alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.manifest import SavedTable, SavedTile
from hotbed.checkpoint.tensors import CHUNK_BYTES, TensorFiles
from hotbed.embed import Held
from hotbed.embed.held import form, stored_as
from hotbed.ops.layout import SCALE_BLOCK
from hotbed.ops.narrow import MIN_EXPONENT, widen
from hotbed.plan.ranges import common_places
from hotbed.store import MOMENT

Places = range | Tensor
"""Rising positions of rows; ``[n]`` int64 where they follow no rule."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Common(NamedTuple):
    """What a saved tile and a tile here have in common.

    Attributes
    ----------
    tile
        The saved one.
    arrays
        Arrays that hold its rows, and which of them each holds.
    there, here
        Positions of the common rows among the rows that the saved tile holds, and among those of the tile here.
    cols
        Common columns of the table.
    """

    tile: SavedTile
    arrays: dict[str, range]
    there: Places
    here: Places
    cols: range


def load_tile(held: Held, saved: SavedTable, moments: Collection[str], files: TensorFiles) -> None:
    """Overwrite a tile with what a checkpoint has of it; rows beyond the saved table's stay as they are.

    Parameters
    ----------
    held
        The tile.
    saved
        The table, of equally many columns.
    moments
        Which moments to load, too.
    files
        The checkpoint's files.
    """
    known = len(range(held.piece.rows.start, min(held.piece.rows.stop, saved.spec.rows), held.piece.rows.step))
    if any(tile.keyed for tile in saved.tiles):
        _reset(held, saved, moments, known)
    found = list(common(held.piece.rows, held.piece.cols, saved, files))
    if form(saved.spec) == form(held.piece.table):
        _copy_raw(held, found, files)
    else:
        _copy_values(held, found, known, files)
    extents, arrays = held.extents(), held.arena.store.arrays()
    for name in moments:
        e = extents[f"{MOMENT}{name}"]
        target = arrays[e.array][e.start : e.stop]
        # Of a row that is cut into columns each tile has its value: that of the first columns is taken, last.
        for c in sorted(found, key=lambda c: -c.tile.cols.start):
            columns = _columns(c, held.piece.cols) if target.dim() > 1 else None
            copy_rows(c, f"{MOMENT}{name}", _all(c), target, range(len(target)), columns, files)


def common(rows: range, cols: range, saved: SavedTable, files: TensorFiles) -> Iterator[Common]:
    """What a rectangle of a table has in common with each of the saved tiles."""
    for tile in saved.tiles:
        shared = range(max(cols.start, tile.cols.start), min(cols.stop, tile.cols.stop))
        there = common_places(tile.rows, rows)
        if not len(shared) or not len(there):
            continue
        if not tile.keyed:
            yield Common(tile, stored_as(saved.spec, tile.rows), there, common_places(rows, tile.rows), shared)
            continue
        keys = files.read(tile.file, f"{tile.key}/keys")
        within = (keys >= rows.start) & (keys < rows.stop) & ((keys - rows.start) % rows.step == 0)
        wide = int(torch.searchsorted(keys, form(saved.spec)[1]))
        arrays = {name: range(*((0, wide) if name == "fp32_weight" else (wide, len(keys)))) for name in _names(saved)}
        places = within.nonzero()[:, 0]
        yield Common(tile, arrays, places, (keys[places] - rows.start) // rows.step, shared)


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

    Parameters
    ----------
    c
        Which rows.
    name
        The array.
    there
        Which rows of the saved tile it holds.
    out
        Where they go ``[n]`` or ``[n, D]``.
    here
        Which rows of the tile here ``out`` is.
    columns
        Which columns of the array, and of ``out``; None for ``[n]``.
    files
        The checkpoint's files.
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
        files.copy_rows(file, key, source, cols, out[target.start : target[-1] + 1 : target.step])
        return
    assert isinstance(source, Tensor) and isinstance(target, Tensor)
    bits = _BITS[out.element_size()]
    out = out.view(bits)  # torch cannot index all narrow dtypes
    step = max(CHUNK_BYTES // max(files.find(file, key).row_bytes, 1), 1)
    for start in range(int(source[0]), int(source[-1]) + 1, step):
        first, last = _below(source, start), _below(source, start + step)
        if first == last:
            continue
        at = source[first:last] - source[first]
        chunk = files.read_rows(file, key, range(int(source[first]), int(source[last - 1]) + 1)).view(bits)[at]
        out[target[first:last].to(out.device)] = (chunk if columns is None else chunk[:, columns[0]]).to(out.device)


def values_of(c: Common, first: int, last: int, files: TensorFiles) -> tuple[Places, Tensor]:
    """Common rows whose positions here are from ``first`` to ``last``: these positions, and the rows as float32."""
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


def _copy_raw(held: Held, found: Collection[Common], files: TensorFiles) -> None:
    """Copy rows as they are stored."""
    extents, arrays = held.extents(), held.arena.store.arrays()
    for name, here in stored_as(held.piece.table, held.piece.rows).items():
        e = extents[name]
        unit = SCALE_BLOCK if name == "exponents" else 1
        for c in found:
            if name in c.arrays:
                columns = _columns(c, held.piece.cols, unit)
                copy_rows(c, name, c.arrays[name], arrays[e.array][e.start : e.stop], here, columns, files)


def _copy_values(held: Held, found: Collection[Common], known: int, files: TensorFiles) -> None:
    """Copy the values of the first ``known`` rows, rounding to the nearest what is narrower here."""
    store, cols = held.arena.store, held.piece.cols
    exponents = held.extents().get("exponents")
    wide = len(stored_as(held.piece.table, held.piece.rows).get("fp32_weight", ()))
    if exponents is not None:  # they only grow, but these are of values that go
        rows = slice(exponents.start, exponents.start + max(known - wide, 0))
        store.arrays()["exponents"][rows] = MIN_EXPONENT
    step = max(CHUNK_BYTES // (4 * len(cols)), 1)
    slots = held.arena.slots(held.number)
    for first in range(0, known, step):
        last = min(first + step, known)
        values = store.read(slots[first:last])
        for c in found:
            here, rows = values_of(c, first, last, files)
            if len(here):
                at = torch.arange(here.start, here.stop, here.step) if isinstance(here, range) else here
                values[at.to(values.device) - first, _columns(c, cols)[1]] = rows.to(values.device)
        store.write(slots[first:last], values)


def _reset(held: Held, saved: SavedTable, moments: Collection[str], known: int) -> None:
    """Give the first ``known`` rows the initial values that the saved table's had, and their moments theirs."""
    store, spec = held.arena.store, saved.spec
    slot = held.arena.first_slots[held.number]
    assert spec.init_seed is not None
    rows = held.piece.rows[:known]
    store.initialize(slot, seed=spec.init_seed, rows=rows, cols=held.piece.cols, bound=spec.bound)
    for name in moments:
        store.view(held.number, name)[:known] = saved.moments[name].initial


def _names(saved: SavedTable) -> list[str]:
    """Arrays that rows of a table may be in."""
    dtype, fp32_rows = form(saved.spec)
    return ["weight", *(["exponents"] if dtype == "int8" else []), *(["fp32_weight"] if fp32_rows else [])]


def _columns(c: Common, cols: range, unit: int = 1) -> tuple[slice, slice]:
    """Common columns as positions in the saved tile and in one of these columns, in units of so many."""

    def within(whole: range) -> slice:
        return slice((c.cols.start - whole.start) // unit, -(-(c.cols.stop - whole.start) // unit))

    return within(c.tile.cols), within(cols)


def _all(c: Common) -> range:
    """All rows that a saved tile holds."""
    return range(max(places.stop for places in c.arrays.values()) if c.arrays else 0)


def _below(places: Places, limit: int) -> int:
    """How many of rising positions are below a limit."""
    return bisect_left(places, limit) if isinstance(places, range) else int(torch.searchsorted(places, limit))


def _shifted(places: Places, by: int) -> Places:
    if isinstance(places, Tensor):
        return places - by
    return range(places.start - by, places.stop - by, places.step)
