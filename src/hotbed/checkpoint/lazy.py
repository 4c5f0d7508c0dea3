"""Tables whose rows come to be when they are trained: saving the rows that exist, in the form of a keyed tile."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from hotbed.checkpoint.snapshot import Snapshot
from hotbed.checkpoint.tensors import Array
from hotbed.checkpoint.writing import Piece, rows_per_piece
from hotbed.embed import Held
from hotbed.store import MOMENT, ExistingRows, RowStore
from hotbed.store.existing import ExistingArray


def lazy_pieces(
    name: str, held: Held, moments: Collection[str], existing: ExistingRows, snapshot: Snapshot | None
) -> Iterator[Piece]:
    """The existing rows of a tile in pieces that fit into a file; together they cover the tile.

    Parameters
    ----------
    name
        The table's name in the manifest.
    held
        The tile, in a `LazyStore`.
    moments
        Which moments to save.
    existing
        The rows of its store that exist.
    snapshot
        Where they are read as they were; None: as they are.
    """
    store, rows = held.arena.store, held.piece.rows
    keys = existing.slots[held.number] - held.arena.first_slots[held.number]
    arrays = {
        array: key
        for array, key in held.named(existing.of(held.number)).items()
        if not array.startswith(MOMENT) or array.removeprefix(MOMENT) in moments
    }
    step = rows_per_piece(8 + sum(existing.arrays[key].row_bytes for key in arrays.values()))
    for first in range(0, max(len(keys), 1), step):
        last = min(first + step, len(keys))
        begin = 0 if first == 0 else int(keys[first])
        end = len(rows) if last == len(keys) else int(keys[last])
        found = {"keys": Array.of(rows.start + keys[first:last] * rows.step)}
        for array, key in arrays.items():
            values, before = existing.arrays[key], existing.first[key]
            low, high = (min(max(at - before, 0), len(values)) for at in (first, last))
            if low < high:
                found[array] = array_of(store, key, values, low, high, snapshot)
        yield Piece(name, rows[begin:end], held.piece.cols, found)


def array_of(
    store: RowStore, name: str, values: Tensor | ExistingArray, first: int, last: int, snapshot: Snapshot | None
) -> Array:
    """Rows ``first … last − 1`` of one of a store's arrays, as they are or, in a snapshot, as they were."""

    def rows(start: int, stop: int) -> Tensor:
        if snapshot is None:
            return values[first + start : first + stop].view(values.dtype).cpu()
        return snapshot.read(store, name, first + start, first + stop)

    return Array(values.dtype, (last - first, *values.shape[1:]), rows)
