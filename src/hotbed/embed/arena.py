"""Put shards of tables, of one number of columns and one dtype, into one store that one kernel launch serves.

A `Shard` is a rectangle of a table; an `Arena` holds several, one after the other, and numbers their rows by slot. Of
tables "a" and "b" of 5 and 3 rows, whole, "a" has slots 0 … 4 and "b" 5 … 7: ``first_slots`` is ``[0, 5, 8]``, and
``locate`` says that slot 6 is slot 1 of shard 1. A `LocalTile` is a shard and the arena that has it, by the names that
checkpoints give to what it is stored as.
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
from hotbed.store.memory import to_device


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
    """Shards of tables with ``dim`` columns and one dtype, one after the other in one store.

    Each table derives its own seed from ``seed``. Lookups deliver to ``device``; rows are there, too, unless
    ``storage`` says otherwise.
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
        """Table of each shard, as `Rows.tables` and `RuleStep.hyper` number them."""
        self.first_slots = [0, *accumulate(len(shard.rows) for shard in shards)]
        """First slot of each shard, and past the last."""
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

    def part(self, numbers: Sequence[int], device: torch.device) -> Arena:
        """Copy the rows and moments of some shards to an arena of their own on a device."""
        assert isinstance(self.store, DenseStore)
        made = object.__new__(type(self))
        made.shards = [self.shards[i] for i in numbers]
        made.tables = [self.tables[i] for i in numbers]
        made.first_slots = [0, *accumulate(len(shard.rows) for shard in made.shards)]
        made.updates, made.backend = self.updates, self.backend
        made._seeds = [self._seeds[i] for i in numbers]
        made.store = self.store.part(numbers, device)
        made._placed(device)
        return made

    def _placed(self, device: torch.device) -> None:
        self.seeds = torch.tensor(self._seeds, dtype=torch.int64, device=device)
        """Seed of each shard's table ``[T]`` int64, 32 bits."""
        self.bounds = torch.tensor(self.first_slots, dtype=torch.int64, device=device)
        """`first_slots` on the device ``[T + 1]``."""

    def seed_of(self, number: int) -> int:
        """Return the seed of the initial values of a shard's table."""
        return self._seeds[number]

    @property
    def rounds(self) -> bool:
        """Whether any rows are stored in a narrow dtype, into which updates are rounded stochastically."""
        return any(shard.table.dtype != "fp32" for shard in self.shards)

    def slots(self, number: int) -> Tensor:
        """List the slots of a shard ``[R]``."""
        return torch.arange(self.first_slots[number], self.first_slots[number + 1], device=self.store.device)

    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Find the shard of each slot ``[n]``, and which slot of that shard it is."""
        firsts = self.bounds[:-1]
        shard = torch.searchsorted(firsts, slots, right=True) - 1
        return shard, slots - firsts[shard]

    def rows(self, number: int) -> Tensor:
        """Return the rows of a shard as float32; shares memory where all of them are stored so."""
        raw = self.store.raw(number)
        if set(raw) == {"weight"} and raw["weight"].dtype == torch.float32:
            return raw["weight"]
        return self.store.read(self.slots(number))


def untied(values: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own; a slice of a store's tensor shares that of all.

    What saves states (``torch.save``, safetensors, Accelerate) writes whole storages, or takes tensors of one storage
    for one. No byte is copied: tables may take more than half of the memory.
    """
    if values.untyped_storage().nbytes() == values.nbytes or values.device.type not in ("cpu", "cuda"):
        return values
    # As bytes, for not every version of torch exchanges fp8.
    return torch.from_dlpack(values.view(torch.uint8)).view(values.dtype)


def raw_shapes(table: Table) -> dict[str, Tensor]:
    """Return what the rows of a whole table are stored as, as tensors on ``meta``; see `RowStore.raw`."""
    return DenseStore([Span(table.rows, table.fp32_rows)], table.dim, dtype=table.dtype, device="meta").raw(0)


T = TypeVar("T")


class LocalTile(NamedTuple):
    """A tile of a table in an arena of this rank, of whose shards it is ``number``.

    A tile that is not ``owned`` is a copy of another rank's, which has no moments.
    """

    shard: Shard
    arena: Arena
    number: int
    owned: bool

    def extents(self) -> dict[str, Extent]:
        """Find where in the arrays of its store it is; see `RowStore.extents`.

        Names are those of the whole table: of a table that has float32 rows before narrow ones, they are
        ``fp32_weight`` also in a tile that has no others.
        """
        assert isinstance(self.arena.store, DenseStore)
        return self.named(self.arena.store.extents(self.number))

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays of its store."""
        assert isinstance(self.arena.store, DenseStore)
        return self.arena.store.arrays()

    def named(self, found: Mapping[str, T]) -> dict[str, T]:
        """Rename what its store has to the names of the whole table."""
        if set(stored_as(self.shard.table, self.shard.rows)) == {"fp32_weight"}:
            return {"fp32_weight" if name == "weight" else name: value for name, value in found.items()}
        return dict(found)

    def unnamed(self, found: Mapping[str, T]) -> dict[str, T]:
        """Rename what the whole table has to the names of its store."""
        if set(stored_as(self.shard.table, self.shard.rows)) == {"fp32_weight"}:
            return {"weight" if name == "fp32_weight" else name: value for name, value in found.items()}
        return dict(found)


def form(table: Table) -> tuple[RowDtype, int]:
    """Return the dtype of a table's rows, and how many before them are float32; tables of one form share a layout."""
    if table.dtype == "fp32" or table.fp32_rows == table.rows:
        return "fp32", 0
    return table.dtype, table.fp32_rows


def stored_as(table: Table, rows: range) -> dict[str, range]:
    """List the arrays that hold some rows of a table, and which of these rows each holds; names of `RowStore.raw`."""
    dtype, fp32_rows = form(table)
    wide = len(range(rows.start, min(rows.stop, fp32_rows), rows.step))
    found = {"fp32_weight": range(wide), "weight": range(wide, len(rows))}
    if dtype == "int8":
        found["exponents"] = found["weight"]
    return {name: places for name, places in found.items() if places}


def rounding_bits(arena: Arena, slots: Tensor, seeds: Tensor) -> Tensor | None:
    """Draw bits for stochastic rounding ``[n, cols]``, by row and column of the whole table; None for float32 rows.

    ``slots`` are the rows ``[n]``, ``seeds`` those of each shard ``[T]``, see `RuleStep.seeds`.
    """
    if not arena.shards or arena.shards[0].table.dtype == "fp32":
        return None
    shard, within = arena.locate(slots)
    of_shards = torch.tensor([(s.rows.start, s.rows.step, s.cols.start) for s in arena.shards], device="cpu")
    first, step, col = to_device(of_shards, slots.device)[shard].unbind(1)
    cols = col[:, None] + torch.arange(arena.store.dim, device=slots.device)
    return random_bits(seeds[shard], first + within * step, cols)
