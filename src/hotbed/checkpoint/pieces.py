"""Tiles that a rank writes of tables, in pieces that fit into files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hotbed.checkpoint.lazy import array_of, lazy_pieces
from hotbed.checkpoint.parts import TablePart
from hotbed.checkpoint.snapshot import Snapshot, rows_of
from hotbed.checkpoint.tensors import Array
from hotbed.checkpoint.writing import Piece, rows_per_piece
from hotbed.embed import Held
from hotbed.embed.held import stored_as
from hotbed.store import MOMENT, DenseStore, ExistingRows

OwnedTile = tuple[str, TablePart, Held]
"""A tile that this rank writes: name of the table in checkpoints, and what holds it."""


def owned_tiles(tables: Mapping[str, TablePart]) -> list[OwnedTile]:
    """What this rank writes of tables; where there are replicas, those of the first do."""
    return [
        (name, table, held)
        for name, table in tables.items()
        for held in table.collection.held(table.table.name)
        if held.owned and table.collection.is_first_replica
    ]


def pieces_of(owned: Sequence[OwnedTile], snapshot: Snapshot | None) -> list[Piece]:
    """All tiles that this rank owns, in the order of their memory, in which a snapshot is read."""
    # Small stores first: what was kept of a store's rows is free when it has been read.
    stores = sorted(dict.fromkeys(held.arena.store for _, _, held in owned), key=lambda store: store.nbytes)
    order = {store: i for i, store in enumerate(stores)}
    tiles = sorted(owned, key=lambda tile: (order[tile[2].arena.store], tile[2].number))
    existing = {store: rows_of(store) for store in stores} if snapshot is None else snapshot.rows
    return [piece for tile in tiles for piece in _pieces(*tile, existing[tile[2].arena.store], snapshot)]


def _pieces(
    name: str, table: TablePart, held: Held, existing: DenseStore | ExistingRows, snapshot: Snapshot | None
) -> Iterator[Piece]:
    """A tile in pieces that fit into a file."""
    store, rows = held.arena.store, held.piece.rows
    if isinstance(existing, ExistingRows):
        yield from lazy_pieces(name, held, table.saved.moments, existing, snapshot)
        return
    extents = {
        key: extent
        for key, extent in held.extents().items()
        if not key.startswith(MOMENT) or key.removeprefix(MOMENT) in table.saved.moments
    }
    of_rows, whole = stored_as(held.piece.table, rows), held.arrays()
    step = rows_per_piece(sum(whole[e.array][:1].nbytes for e in extents.values()))
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        arrays: dict[str, Array] = {}
        for key, extent in extents.items():
            of = of_rows.get(key, range(len(rows)))  # all rows have moments
            start, stop = max(first, of.start) - of.start, min(last, of.stop) - of.start
            if start < stop:
                tensor = whole[extent.array]
                arrays[key] = array_of(store, extent.array, tensor, extent.start + start, extent.start + stop, snapshot)
        yield Piece(name, rows[first:last], held.piece.cols, arrays)
