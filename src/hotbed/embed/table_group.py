"""Define the contract between a collection and its tables of one dim, whether they are local or sharded.

`TableGroup` is implemented by `hotbed.embed.local_tables` (all tables on this rank) and `hotbed.embed.sharded_tables`
(tiles of a plan). A lookup is a list of `Request`s: bags, the `RowSource` that has their rows, and the output that they
are pooled into. Backward asks the source for a `Contribution`, the gradient that waits for the optimizer's step.
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
    "ids, offsets or per-id weights were changed in place between the lookup and the step, so it is lost which rows "
    "the gradients belong to; give every batch its own tensors, or step before reusing them"
)
"""Error for ids that were changed between lookup and step."""


class Vectors(Protocol):
    """Rows that bags are pooled from: a store, or rows exchanged with other ranks."""

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
        """Tables that it may be of."""
        ...

    @property
    def is_summed(self) -> bool:
        """Whether each row's gradients from one rank are one sum already."""
        ...

    def changed(self) -> bool:
        """Say whether the ids that it belongs to were changed in place since the lookup."""
        ...

    def finite(self) -> Tensor:
        """Return, as 0-d bool, whether all of it is finite, on all ranks."""
        ...

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return by arena: slots, and the rows of the gradient that they receive."""
        ...

    def drop(self) -> None:
        """Forget it: no step will use it."""
        ...


class RowSource(Protocol):
    """Where a request reads rows and leaves gradients."""

    @property
    def updates(self) -> int:
        """How often its rows were updated."""
        ...

    @property
    def store(self) -> Vectors:
        """The rows."""
        ...

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Make a gradient ``[…, D]`` of the pooled vectors ready to wait for the step.

        ``bags`` were looked up, when their `BagLayout.versions` were ``versions``; ``width`` and ``room`` describe
        ``grad``.
        """
        ...


class Request(NamedTuple):
    """Bags that one launch pools into output ``output``; ``trained``: whether gradients are wanted."""

    source: RowSource
    bags: BagLayout
    output: int
    trained: bool


class TableGroup(ABC):
    """The tables of one dim, and the features that are looked up in them."""

    replicas = 1  # copies of the tables that are trained separately and averaged
    is_first_replica = True  # whether this rank has tiles of the first copy
    is_shared = False  # whether its arenas also have tables of other groups

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
        """Where the rows are."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of rows and moments on this rank."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor for an output."""

    @abstractmethod
    def requests(
        self, ids: Jagged, room: int, trained: Callable[[set[str]], bool], routes: object = None
    ) -> list[Request]:
        """List what to look up: output 0 is for all pooled features, if there are any; then one per sequence.

        ``room`` vectors per sample of output 0 stay free before the others. ``routes`` are what `routes` or
        `exchange_rows` returned for these ids, if either was called before.
        """

    def routes(self, ids: Jagged, exchange: IdExchange, trained: Callable[[set[str]], bool]) -> object:
        """Add ids to an exchange, before they are needed; None where there is nothing to exchange."""
        return None

    def exchange_rows(self, ids: Jagged, routes: object, link: Link) -> object:
        """Exchange the rows of these routes, before `requests` is called with what this returns."""
        return routes

    def read_ahead(self, routes: object) -> None:
        """Read ahead, in this thread, the rows that these routes request of this rank, where a store is slow."""
        return

    def layouts(self) -> list[Tensor]:
        """List what kernels were told of the last batch's bags; who replays these kernels must keep it."""
        return []

    @abstractmethod
    def update(self, steps: Mapping[Arena, RuleStep], found: Mapping[Arena, tuple[Occurrences, Tensor]]) -> None:
        """Apply a step to gradients: by arena, slots and the rows of the gradient that they receive."""

    @abstractmethod
    def sync(self) -> None:
        """Average replicas, if any step was taken since they were."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for an average of replicas that is under way, which reads and writes rows."""

    def add_moment(self, table: str, moment: Moment, initial: float) -> None:
        """Allocate a moment of a table, filled with a value."""
        self.initial_moments.setdefault(table, {})[moment.name] = initial

    def reinitialize(self, table: str, rows: Tensor, ids: Tensor) -> None:
        """Reinitialize rows ``[n]`` of a dynamic table with the initial values of these ids ``[n]``; moments, too."""
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
        """Return what the rows of a table are stored as; see `RowStore.raw`."""

    @abstractmethod
    def load(self, table: str, raw: Mapping[str, Tensor]) -> None:
        """Overwrite a table with what `raw` returned."""

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
