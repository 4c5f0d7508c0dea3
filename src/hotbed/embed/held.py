"""`Held`: a tile of a table as the rank has it that holds it, and what rows are stored as; for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor

from hotbed.embed.arena import Arena, Piece
from hotbed.specs import RowDtype, Table
from hotbed.store import DenseStore, Extent

T = TypeVar("T")


class Held(NamedTuple):
    """A tile of a table in an arena of this rank.

    Attributes
    ----------
    piece
        The table and the rectangle of it.
    arena, number
        Where it is, and which of the arena's pieces.
    owned
        Whether this rank updates it; else it is a copy of another rank's, which has no moments.
    """

    piece: Piece
    arena: Arena
    number: int
    owned: bool

    def extents(self) -> dict[str, Extent]:
        """Where in the arrays of its store it is; see `RowStore.extents`.

        Names are those of the whole table: of a table that has float32 rows before narrow ones, they are
        ``fp32_weight`` also in a tile that has no others.
        """
        assert isinstance(self.arena.store, DenseStore)
        return self.named(self.arena.store.extents(self.number))

    def arrays(self) -> dict[str, Tensor]:
        """The arrays of its store."""
        assert isinstance(self.arena.store, DenseStore)
        return self.arena.store.arrays()

    def named(self, found: Mapping[str, T]) -> dict[str, T]:
        """What its store has under its own names, under those of the whole table."""
        if set(stored_as(self.piece.table, self.piece.rows)) == {"fp32_weight"}:
            return {"fp32_weight" if name == "weight" else name: value for name, value in found.items()}
        return dict(found)

    def unnamed(self, found: Mapping[str, T]) -> dict[str, T]:
        """The inverse: under the names that its store has."""
        if set(stored_as(self.piece.table, self.piece.rows)) == {"fp32_weight"}:
            return {"weight" if name == "fp32_weight" else name: value for name, value in found.items()}
        return dict(found)


def form(table: Table) -> tuple[RowDtype, int]:
    """Dtype of a table's rows, and how many before them are float32; tables of one form are stored alike."""
    if table.dtype == "fp32" or table.fp32_rows == table.rows:
        return "fp32", 0
    return table.dtype, table.fp32_rows


def stored_as(table: Table, rows: range) -> dict[str, range]:
    """Arrays that hold some rows of a table, and which of these rows each holds: names as in `RowStore.raw`."""
    dtype, fp32_rows = form(table)
    wide = len(range(rows.start, min(rows.stop, fp32_rows), rows.step))
    found = {"fp32_weight": range(wide), "weight": range(wide, len(rows))}
    if dtype == "int8":
        found["exponents"] = found["weight"]
    return {name: places for name, places in found.items() if places}
