"""An arena: the parts of tables that a rank holds in one store, served by one launch.

`LocalTile`: a tile of a table as the rank has it that holds it, and what rows are stored as; for checkpoints.

Random bits of stochastic rounding for rows of an arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hotbed.ops import BackendName
from hotbed.ops.rows import random_bits
from hotbed.specs import RowDtype, Table
from hotbed.store import DenseStore, Extent, RowStore, Span, Storage


class Shard(NamedTuple):
    """A rectangle of a table: all of it, or a tile of a plan."""

    table: Table
    rows: range
    cols: range

    @staticmethod
    def whole(table: Table) -> Shard:
        """All of a table."""
        return Shard(table, range(table.rows), range(table.dim))

    @property
    def fp32_rows(self) -> int:
        """How many of its rows are float32; they are its first ones."""
        return len(range(self.rows.start, min(self.rows.stop, self.table.fp32_rows), self.rows.step))


class Arena:
    """Pieces of tables with as many columns and one dtype, one after the other in one store.

    Parameters
    ----------
    shards
        What is here, of equally many columns and equal ``dtype``.
    dim
        Their number of columns.
    seed
        Seed of the collection; each table derives its own.
    device, backend
        Where lookups deliver and which kernels serve the store.
    storage
        Where the rows are; default: in the device's memory.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        dim: int,
        *,
        seed: int,
        device: torch.device,
        backend: BackendName,
        storage: Storage | None = None,
    ) -> None:
        self.shards = list(shards)
        self.tables = [shard.table.name for shard in shards]
        """Table of each piece, as `Rows.tables` and `RuleStep.hyper` number them."""
        self.first_slots = [0, *accumulate(len(shard.rows) for shard in shards)]
        """First slot of each piece, and past the last."""
        self.updates = 0
        """How often rows were updated."""
        self.backend: BackendName = backend
        self._seeds = [shard.table.seed(seed) for shard in shards]
        self.store: RowStore = (storage or Storage()).make(
            [
                Span(len(s.rows), s.fp32_rows, first_row=s.rows.start, row_step=s.rows.step, first_col=s.cols.start)
                for s in shards
            ],
            dim,
            dtype=shards[0].table.dtype if shards else "fp32",
            device=device,
            backend=backend,
        )
        for shard, slot in zip(shards, self.first_slots, strict=False):
            table = shard.table
            if device.type == "meta":
                break  # no values yet
            self.store.initialize(slot, seed=table.seed(seed), rows=shard.rows, cols=shard.cols, bound=table.bound)
        self._placed(device)

    def to(self, device: torch.device) -> None:
        """Move the store."""
        self.store = self.store.to(device)
        self._placed(device)

    def _placed(self, device: torch.device) -> None:
        self.seeds = torch.tensor(self._seeds, dtype=torch.int64, device=device)
        """Seed of each piece's table ``[T]`` int64, 32 bits."""

    def seed_of(self, number: int) -> int:
        """Seed of the initial values of a piece's table."""
        return self._seeds[number]

    def slots(self, number: int) -> Tensor:
        """Slots of a piece ``[R]``."""
        return torch.arange(self.first_slots[number], self.first_slots[number + 1], device=self.store.device)

    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Shard of each slot ``[n]``, and which slot of the piece it is."""
        firsts = torch.tensor(self.first_slots[:-1], dtype=torch.int64, device=slots.device)
        shard = torch.searchsorted(firsts, slots, right=True) - 1
        return shard, slots - firsts[shard]

    def rows(self, number: int) -> Tensor:
        """The rows of a piece float32; shares memory where all of them are stored so."""
        raw = self.store.raw(number)
        if set(raw) == {"weight"} and raw["weight"].dtype == torch.float32:
            return raw["weight"]
        return self.store.read(self.slots(number))


def untied(values: Tensor) -> Tensor:
    """The same memory as a tensor that has a storage of its own; a part of a store's tensor shares that of all.

    What saves states (``torch.save``, safetensors, Accelerate) writes whole storages, or takes tensors of one storage
    for one. No byte is copied: tables may take more than half of the memory.
    """
    if values.untyped_storage().nbytes() == values.nbytes or values.device.type not in ("cpu", "cuda"):
        return values
    # As bytes, for not every version of torch exchanges fp8.
    return torch.from_dlpack(values.view(torch.uint8)).view(values.dtype)


def raw_shapes(table: Table) -> dict[str, Tensor]:
    """What the rows of a whole table are stored as, without their values: tensors on ``meta``; see `RowStore.raw`."""
    return DenseStore([Span(table.rows, table.fp32_rows)], table.dim, dtype=table.dtype, device="meta").raw(0)


T = TypeVar("T")


class LocalTile(NamedTuple):
    """A tile of a table in an arena of this rank.

    Attributes
    ----------
    shard
        The table and the rectangle of it.
    arena, number
        Where it is, and which of the arena's pieces.
    owned
        Whether this rank updates it; else it is a copy of another rank's, which has no moments.
    """

    shard: Shard
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
        if set(stored_as(self.shard.table, self.shard.rows)) == {"fp32_weight"}:
            return {"fp32_weight" if name == "weight" else name: value for name, value in found.items()}
        return dict(found)

    def unnamed(self, found: Mapping[str, T]) -> dict[str, T]:
        """The inverse: under the names that its store has."""
        if set(stored_as(self.shard.table, self.shard.rows)) == {"fp32_weight"}:
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


def rounding_bits(arena: Arena, slots: Tensor, seeds: Tensor) -> Tensor | None:
    """Bits ``[n, cols]`` by row and column of the whole table; None where all rows are float32.

    Parameters
    ----------
    arena
        Where the rows are.
    slots
        Which they are ``[n]``.
    seeds
        Of each piece ``[T]``, see `RuleStep.seeds`.
    """
    if not arena.shards or arena.shards[0].table.dtype == "fp32":
        return None
    shard, within = arena.locate(slots)
    first, step, col = torch.tensor(
        [(s.rows.start, s.rows.step, s.cols.start) for s in arena.shards], device=slots.device
    )[shard].unbind(1)
    cols = col[:, None] + torch.arange(arena.store.dim, device=slots.device)
    return random_bits(seeds[shard], first + within * step, cols)
