"""Store shards of tables with equal numbers of columns and dtypes together, so that one kernel launch serves them.

A `Shard` is a rectangle of a table. An `Arena` stores several shards consecutively and numbers their rows by slot. For
example, with whole tables "a" of 5 rows and "b" of 3 rows, "a" has slots 0 … 4 and "b" has slots 5 … 7. Then
``first_slots`` is ``[0, 5, 8]``, and ``locate`` returns shard 1 and its slot 1 for slot 6. A `LocalTile` is a shard
with its arena, and maps array names of the store to the names in checkpoints.
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
    """A rectangle of a table: the whole table, or a tile of a plan."""

    table: Table
    rows: range
    cols: range

    @staticmethod
    def whole(table: Table) -> Shard:
        """Return the shard of a whole table."""
        return Shard(table, range(table.rows), range(table.dim))

    @property
    def fp32_rows(self) -> int:
        """Number of float32 rows, which are the first rows of the shard."""
        return len(range(self.rows.start, min(self.rows.stop, self.table.fp32_rows), self.rows.step))


class Arena:
    """Shards with ``dim`` columns and one dtype, stored consecutively in one store.

    One kernel launch serves an arena. A *slot* is the number of a row in its arena. Stores find a row by its slot.

    Each table derives its seed from ``seed``. Looked-up vectors are on ``device``, and rows as well unless
    ``storage`` has another tier.
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
        """First slot of each shard, and the end."""
        self.updates = 0
        """Number of updates so far."""
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
        self._copy_offsets(device)

    def to(self, device: torch.device) -> None:
        """Move the store."""
        self.store = self.store.to(device)
        self._copy_offsets(device)

    def part(self, numbers: Sequence[int], device: torch.device) -> Arena:
        """Copy the rows and moments of some shards to a new arena on a device."""
        assert isinstance(self.store, DenseStore)
        made = object.__new__(type(self))
        made.shards = [self.shards[i] for i in numbers]
        made.tables = [self.tables[i] for i in numbers]
        made.first_slots = [0, *accumulate(len(shard.rows) for shard in made.shards)]
        made.updates, made.backend = self.updates, self.backend
        made._seeds = [self._seeds[i] for i in numbers]
        made.store = self.store.part(numbers, device)
        made._copy_offsets(device)
        return made

    def _copy_offsets(self, device: torch.device) -> None:
        self.seeds = torch.tensor(self._seeds, dtype=torch.int64, device=device)
        """Seed of each shard's table ``[T]`` int64, 32 bits."""
        self.bounds = torch.tensor(self.first_slots, dtype=torch.int64, device=device)
        """`first_slots` on the device ``[T + 1]``."""

    def seed_of(self, number: int) -> int:
        """Return the seed of the initial values of a shard's table."""
        return self._seeds[number]

    @property
    def rounds(self) -> bool:
        """Whether any rows have a low-precision dtype, so that updates are rounded stochastically."""
        return any(shard.table.dtype != "fp32" for shard in self.shards)

    def slots(self, number: int) -> Tensor:
        """Return the slots of a shard ``[R]``."""
        return torch.arange(self.first_slots[number], self.first_slots[number + 1], device=self.store.device)

    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shard of each slot ``[n]``, and its position in the shard ``[n]``."""
        firsts = self.bounds[:-1]
        shard = torch.searchsorted(firsts, slots, right=True) - 1
        return shard, slots - firsts[shard]

    def rows(self, number: int) -> Tensor:
        """Return the rows of a shard as float32. Stored float32 rows are not copied."""
        raw = self.store.raw(number)
        if set(raw) == {"weight"} and raw["weight"].dtype == torch.float32:
            return raw["weight"]
        return self.store.read(self.slots(number))


def view_as_storage(values: Tensor) -> Tensor:
    """Return a tensor with the same memory and a separate ``torch`` storage, without a copy.

    A slice of a store's tensor has the storage of the whole tensor. ``torch.save`` and Accelerate would write the whole
    storage, and safetensors treats tensors with one storage as one tensor.
    """
    if values.untyped_storage().nbytes() == values.nbytes or values.device.type not in ("cpu", "cuda"):
        return values
    # Convert to bytes, because some versions of torch do not support fp8 in DLPack.
    return torch.from_dlpack(values.view(torch.uint8)).view(values.dtype)


def raw_shapes(table: Table) -> dict[str, Tensor]:
    """Return the stored arrays of a whole table as tensors on ``meta``, see `RowStore.raw`."""
    return DenseStore([Span(table.rows, table.fp32_rows)], table.dim, dtype=table.dtype, device="meta").raw(0)


T = TypeVar("T")


class LocalTile(NamedTuple):
    """A tile of a table, which is shard ``number`` in an arena of this rank.

    A tile that is not ``owned`` is a copy of another rank's tile and has no moments.
    """

    shard: Shard
    arena: Arena
    number: int
    owned: bool

    def extents(self) -> dict[str, Extent]:
        """Return the extents of the tile in the arrays of its store, see `RowStore.extents`.

        Keys are array names of the whole table. If a table has float32 rows before low-precision rows, float32 rows are
        ``fp32_weight``, even in a tile without low-precision rows.
        """
        assert isinstance(self.arena.store, DenseStore)
        return self.to_table_names(self.arena.store.extents(self.number))

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays of the store."""
        assert isinstance(self.arena.store, DenseStore)
        return self.arena.store.arrays()

    def to_table_names(self, found: Mapping[str, T]) -> dict[str, T]:
        """Rename arrays from the names in the store to the names in the whole table."""
        if set(array_ranges(self.shard.table, self.shard.rows)) == {"fp32_weight"}:
            return {"fp32_weight" if name == "weight" else name: value for name, value in found.items()}
        return dict(found)

    def to_store_names(self, found: Mapping[str, T]) -> dict[str, T]:
        """Rename arrays from the names in the whole table to the names in the store."""
        if set(array_ranges(self.shard.table, self.shard.rows)) == {"fp32_weight"}:
            return {"weight" if name == "fp32_weight" else name: value for name, value in found.items()}
        return dict(found)


def form(table: Table) -> tuple[RowDtype, int]:
    """Return the dtype of a table's rows, and the number of float32 rows before them. They define the layout."""
    if table.dtype == "fp32" or table.fp32_rows == table.rows:
        return "fp32", 0
    return table.dtype, table.fp32_rows


def array_ranges(table: Table, rows: range) -> dict[str, range]:
    """Return the arrays that store ``rows`` of a table, with the positions of their rows. See `RowStore.raw`."""
    dtype, fp32_rows = form(table)
    wide = len(range(rows.start, min(rows.stop, fp32_rows), rows.step))
    found = {"fp32_weight": range(wide), "weight": range(wide, len(rows))}
    if dtype == "int8":
        found["exponents"] = found["weight"]
    return {name: places for name, places in found.items() if places}


def rounding_bits(arena: Arena, slots: Tensor, seeds: Tensor) -> Tensor | None:
    """Return random bits for stochastic rounding of rows ``slots [n]`` as ``[n, cols]``, or None for float32 rows.

    The bits depend on the row and column in the whole table. ``seeds [T]`` has a seed per shard, see `RuleStep.seeds`.
    """
    if not arena.shards or arena.shards[0].table.dtype == "fp32":
        return None
    shard, within = arena.locate(slots)
    of_shards = torch.tensor([(s.rows.start, s.rows.step, s.cols.start) for s in arena.shards], device="cpu")
    first, step, col = to_device(of_shards, slots.device)[shard].unbind(1)
    cols = col[:, None] + torch.arange(arena.store.dim, device=slots.device)
    return random_bits(seeds[shard], first + within * step, cols)
