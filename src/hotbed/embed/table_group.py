"""Define the contract between a collection and its tables of one dim, which are local or sharded.

`hotbed.embed.local_tables` implements `TableGroup` for tables on this rank, and `hotbed.embed.sharded_tables` for the
tiles of a plan. A lookup is a list of `Request`s: bags, the `RowSource` with their rows, and the output. In backward,
the source returns a `Contribution`: a gradient that waits for the optimizer's step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed import ops
from hotbed.comm import Link
from hotbed.embed.arena import Arena, LocalTile
from hotbed.embed.shard_routing import IdExchange
from hotbed.jagged import Jagged
from hotbed.ops import BagLayout, Occurrences, RuleStep
from hotbed.optim import Moment
from hotbed.specs import Feature, Table

CHANGED = (
    "ids, offsets or per-id weights were changed in place between the lookup and the step, so the rows of the "
    "gradients are unknown. Use new tensors for every batch, or step before reusing them"
)
"""Error message for ids that were changed between lookup and step."""


class Vectors(Protocol):
    """Rows for pooling: a store, or rows received from other ranks."""

    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Pool vectors into ``out [B, width, D]``."""
        ...

    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Write the gradient of the per-id weights into ``out [N]``."""
        ...


class Contribution(Protocol):
    """A gradient that waits for the step."""

    @property
    def tables(self) -> set[str]:
        """Tables with rows that the gradient may change."""
        ...

    @property
    def is_summed(self) -> bool:
        """Whether each row has at most one gradient."""
        ...

    def changed(self) -> bool:
        """Return whether the ids were changed in place since the lookup."""
        ...

    def finite(self) -> Tensor:
        """Return whether the gradient is finite on all ranks, as a 0-d bool."""
        ...

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return the arenas, the occurrences of their slots, and the gradients."""
        ...

    def drop(self) -> None:
        """Drop the gradient, because no step will use it."""
        ...


class RowSource(Protocol):
    """Source of rows for a lookup, and destination of their gradients."""

    @property
    def updates(self) -> int:
        """Number of updates of the rows."""
        ...

    @property
    def store(self) -> Vectors:
        """The rows."""
        ...

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Convert a gradient ``[…, D]`` of pooled vectors to a `Contribution`.

        ``versions`` are the `BagLayout.versions` of the bags at the lookup. ``width`` and ``room`` of the bags describe
        ``grad``.
        """
        ...


class Request(NamedTuple):
    """Bags that one launch pools into output number ``output``. ``trained`` requests gradients."""

    source: RowSource
    bags: BagLayout
    output: int
    trained: bool


class PreparedLookup(Protocol):
    """The lookup of a batch in the tables of one dim. Its exchanges may be done ahead of the step."""

    def exchange_rows(self, link: Link) -> None:
        """Exchange the rows with other ranks. `requests` calls this if the caller has not."""
        ...

    def read_ahead(self) -> None:
        """Prefetch the rows that ranks request from slow stores of this rank."""
        ...

    def requests(self, room: int, trained: Callable[[set[str]], bool]) -> list[Request]:
        """Return the requests of the batch. See `TableGroup.requests`."""
        ...


class TableGroup(ABC):
    """The tables of one dim and their features."""

    replicas = 1  # number of copies of the tables that are trained separately and averaged
    is_first_replica = True  # whether this rank has tiles of the first copy
    is_shared = False  # whether the arenas also have tables of other groups

    def __init__(self, dim: int, tables: Sequence[Table], features: Sequence[Feature]) -> None:
        self.dim = dim
        self.tables = {t.name: t for t in tables}
        own = [f for f in features if f.table in self.tables]
        self.pooled = [f.name for f in own if f.is_pooled]  # their vectors share one output
        self.sequences = [f for f in own if not f.is_pooled]  # one output each
        self.arenas: list[Arena] = []  # arenas that this rank updates
        self.initial_moments: dict[str, dict[str, float]] = {}
        """Initial values of moments, by table and moment."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the lookups."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of rows and moments on this rank."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate an output without initializing it."""

    @abstractmethod
    def requests(self, ids: Jagged, room: int, trained: Callable[[set[str]], bool]) -> list[Request]:
        """Return the lookups of a batch. Pooled features share output 0, and each sequence has one output after it.

        ``room`` vectors per sample stay free at the start of output 0.
        """

    @abstractmethod
    def prepare(self, ids: Jagged, exchange: IdExchange, trained: Callable[[set[str]], bool]) -> PreparedLookup:
        """Add the ids of a batch to an exchange ahead of its lookup. The exchange must finish before the lookup."""

    def layouts(self) -> list[Tensor]:
        """Return the bag-layout tensors of the last batch. Keep them alive while a captured graph may replay."""
        return []

    @abstractmethod
    def update(self, steps: Mapping[Arena, RuleStep], found: Mapping[Arena, tuple[Occurrences, Tensor]]) -> None:
        """Apply a step. ``found`` has the occurrences and gradients of each arena."""

    @abstractmethod
    def sync(self) -> None:
        """Average replicas if any step followed the last average."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for a running average of replicas, which reads and writes rows."""

    def add_moment(self, table: str, moment: Moment, initial: float) -> None:
        """Allocate a moment of a table and fill it with a value."""
        self.initial_moments.setdefault(table, {})[moment.name] = initial

    def reinitialize(self, table: str, rows: Tensor, ids: Tensor) -> None:
        """Reset rows ``[n]`` of a dynamic table, and their moments, to the initial values of new ids ``[n]``."""
        spec, own = self.tables[table], self.initial_moments.get(table, {})
        for tile in self.local_tiles(table):
            shard, store = tile.shard, tile.arena.store
            here = (rows >= shard.rows.start) & (rows < shard.rows.stop)
            here &= (rows - shard.rows.start) % shard.rows.step == 0
            if not bool(here.any()):
                continue
            slots = (rows[here] - shard.rows.start) // shard.rows.step + tile.arena.first_slots[tile.number]
            slots = slots.to(store.device)
            values = torch.empty(len(slots), len(shard.cols), device=store.device)
            kernels = ops.select(store.device, tile.arena.backend)
            seed, own_ids = tile.arena.seed_of(tile.number), ids[here].to(store.device)
            kernels.initial_values_(values, seed=seed, rows=own_ids, cols=shard.cols, bound=spec.bound)
            store.write(slots, values)
            for moment, initial in own.items() if tile.owned else ():
                shape = (len(slots),) if store.moment_is_per_row(moment) else values.shape
                store.write(slots, torch.full(shape, initial, device=store.device), moment)

    @abstractmethod
    def raw(self, table: str) -> dict[str, Tensor]:
        """Return the stored arrays of a table, see `RowStore.raw`."""

    @abstractmethod
    def load(self, table: str, raw: Mapping[str, Tensor]) -> None:
        """Overwrite a table with stored arrays, see `raw`."""

    @abstractmethod
    def local_tiles(self, table: str) -> list[LocalTile]:
        """List the tiles of a table that are on this rank."""

    @abstractmethod
    def rows(self, table: str) -> Tensor:
        """Return the rows of a table ``[R, D]`` float32."""

    @abstractmethod
    def moment(self, table: str, name: str) -> Tensor:
        """Return a moment of a table ``[R]`` or ``[R, D]``."""

    @abstractmethod
    def load_moment(self, table: str, name: str, values: Tensor) -> None:
        """Overwrite a moment of a table."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move rows and moments to a device."""
