"""Look up and update tables that a plan distributes over ranks, with the exchanges of a batch.

A lookup exchanges ids (`ShardedTables.prepare`, see `hotbed.embed.shard_routing`), then rows or pooled vectors
(`ShardedLookup.exchange_rows`). The sources of its `Request`s have the received rows or vectors. An update changes the
tiles that this rank owns. It sums over column shards (`hotbed.embed.column_sums`), and sends changed rows to copies
(`hotbed.embed.gather.push_rows`). `hotbed.embed.replicas` averages replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.comm import Link
from hotbed.comm.hierarchical import hops_of_rows
from hotbed.embed.arena import Arena, LocalTile, Shard
from hotbed.embed.column_sums import ColumnSums
from hotbed.embed.gather import ShardedTile, gather_moment, gather_raw, push_rows, scatter_moment, scatter_raw
from hotbed.embed.ids import FeatureBags
from hotbed.embed.node_routing import make_node_route
from hotbed.embed.pooled_exchange import PooledRoute, PooledTransfer, PooledVectors, Wire, make_pooled_route
from hotbed.embed.replicas import Sync
from hotbed.embed.row_exchange import ExchangedRows
from hotbed.embed.shard_routing import ArenaType, IdExchange, Locator, Route
from hotbed.embed.table_group import Request, RowSource, TableGroup
from hotbed.embed.tile_layers import ARENA_TYPE
from hotbed.jagged import Jagged
from hotbed.ops import BackendName, Occurrences, RuleStep
from hotbed.ops.reference import sums_rows
from hotbed.optim import Moment
from hotbed.plan import Plan
from hotbed.specs import Feature, Table
from hotbed.store import DenseStore, Span, Storage


class _LookedUp(NamedTuple):
    """Features with a common exchange, the number of their output, and whether the wire format is ``"pooled"``."""

    feature_bags: FeatureBags
    output: int
    is_pooled: bool


class ShardedLookup:
    """The lookups of a batch, each with the future of its route. It is a `PreparedLookup`."""

    def __init__(
        self, group: ShardedTables, looked_up: list[_LookedUp], routes: Sequence[Future[Route] | Future[PooledRoute]]
    ) -> None:
        self._group, self._looked_up, self._routes = group, looked_up, routes
        self._sources: list[RowSource] | None = None

    def exchange_rows(self, link: Link) -> None:
        """Exchange rows or pooled vectors, after the exchange of ids has finished."""
        routes = [future.result(0) for future in self._routes]
        self._sources = [
            self._group.receive_rows(route, looked_up.feature_bags.tables, link)
            for looked_up, route in zip(self._looked_up, routes, strict=True)
        ]

    def read_ahead(self) -> None:
        """Prefetch the requested rows that this rank owns."""
        for route in self._routes:
            found = route.result(0)
            for transfer in found.at_owners if isinstance(found, Route) else found.transfers:
                slots = transfer.requested.slots if isinstance(transfer, PooledTransfer) else transfer.received
                if len(slots):
                    self._group.arenas[transfer.arena_type].store.prefetch(slots)

    def requests(self, room: int, trained: Callable[[set[str]], bool]) -> list[Request]:
        """Return the requests, after an exchange of the rows if there was none."""
        group, found = self._group, list[Request]()
        group.settle()
        if self._sources is None:
            self.exchange_rows(group.wire.link)
        assert self._sources is not None
        for (feature_bags, output, _), future, source in zip(self._looked_up, self._routes, self._sources, strict=True):
            route = future.result(0)
            bags = route.bags
            if not feature_bags.single:
                bags = replace(bags, width=room + len(group.pooled), room=room)
            wanted = route.trained and trained(feature_bags.tables)
            found.append(Request(source, bags, output, wanted))
        return found


class ShardedTables(TableGroup):
    """Tables of one dim, distributed over ranks by a plan, which also defines tiers and cache sizes."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        plan: Plan,
        wire: Wire,
        *,
        seed: int,
        device: torch.device,
        backend: BackendName,
        storage: Storage,
    ) -> None:
        super().__init__(tables[0].dim, tables, features)
        self.wire = wire
        self._storage = storage
        self._plan = plan
        self._backend: BackendName = backend
        self.locator = self._locate(device)
        self._column_sums = ColumnSums(self.locator)

        def arena(arena_type: ArenaType, tiles: list[int], where: Storage) -> Arena:
            shards = self.locator.shards(tiles)
            return Arena(shards, arena_type.cols, seed=seed, device=device, backend=backend, storage=where)

        def own(arena_type: ArenaType) -> Arena:
            tiles = self.locator.owned(arena_type)
            cache_rows = sum(self.locator.tiles[i].cache_rows for i in tiles)
            return arena(arena_type, tiles, replace(self._storage, tier=arena_type.tier, cache_rows=cache_rows))

        self.arenas = [own(arena_type) for arena_type in self.locator.arena_types]
        self.copies = [
            arena(arena_type, self.locator.copied(arena_type), Storage()) for arena_type in self.locator.arena_types
        ]
        self._sync: Sync | None = None
        if (replicas := wire.replicas) is not None:
            self.is_first_replica = replicas.link.rank == 0
            if not replicas.exact:
                self.replicas = replicas.link.size
                self._sync = Sync(replicas, self.arenas, self.copies)
        self._place_features(features)

    def _place_features(self, features: Sequence[Feature]) -> None:
        """Group features by exchange.

        For example, "a" and "b" are pooled with wire ``"rows"``, "c" is pooled with wire ``"pooled"``, and "d" is a
        sequence. There are three exchanges: "a" and "b" (output 0, columns 0 and 1), "c" (output 0, column 2) and "d"
        (output 1).
        """
        firsts = self.locator.first_keys.tolist()
        keys = {name: (first, 0) for name, first in zip(self.tables, firsts, strict=False)}
        by_name = {f.name: f for f in features}
        pooled = {by_name[name]: i for i, name in enumerate(self.pooled)}
        by_wire = {
            form: {f: i for f, i in pooled.items() if self._plan.wire.get(f.table, "rows") == form}
            for form in ("rows", "pooled")
        }
        self._looked_up = [_LookedUp(FeatureBags(f, keys), 0, form == "pooled") for form, f in by_wire.items() if f]
        first = int(bool(pooled))
        self._looked_up += [
            _LookedUp(FeatureBags({f: 0}, keys, single=True), first + i, False) for i, f in enumerate(self.sequences)
        ]

    @property
    @override
    def device(self) -> torch.device:
        return self.arenas[0].store.device

    @property
    def ops(self) -> ops.Backend:
        """The backend's kernels."""
        return ops.select(self.device, self._backend)

    @property
    @override
    def nbytes(self) -> int:
        return sum(arena.store.nbytes for arena in (*self.arenas, *self.copies))

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arenas[0].store.empty(shape, dtype)

    @override
    def prepare(self, ids: Jagged, exchange: IdExchange, trained: Callable[[set[str]], bool]) -> ShardedLookup:
        found: list[Future[Route] | Future[PooledRoute]] = []
        for feature_bags, _, is_pooled in self._looked_up:
            bags, is_trained = feature_bags.layout(ids, len(self.pooled), 0), trained(feature_bags.tables)
            if is_pooled:
                make = partial(make_pooled_route, bags, self.locator, self.ops, exchange.link, trained=is_trained)
                found.append(exchange.add_local(make))
            else:
                found.append(make_node_route(bags, self.locator, self.ops, exchange, trained=is_trained))
        return ShardedLookup(self, self._looked_up, found)

    @override
    def requests(self, ids: Jagged, room: int, trained: Callable[[set[str]], bool]) -> list[Request]:
        exchange = IdExchange(self.wire.link)
        prepared = self.prepare(ids, exchange, trained)
        exchange.finish()
        return prepared.requests(room, trained)

    def receive_rows(self, route: Route | PooledRoute, tables: set[str], link: Link) -> RowSource:
        """Receive the rows or pooled vectors of a route from their owners."""
        if isinstance(route, PooledRoute):
            return PooledVectors(route, self.arenas, tables, self.wire, self.ops, self.locator, link)
        return ExchangedRows(route, self.arenas, self.copies, tables, self.wire, self.ops, self.dim, link)

    # -- updates ---------------------------------------------------------------------------------------------------

    @override
    def update(self, steps: Mapping[Arena, RuleStep], found: Mapping[Arena, tuple[Occurrences, Tensor]]) -> None:
        self.settle()
        step = next(iter(steps.values()))
        cut: dict[int, Arena] = {}
        if (
            self._column_sums.arena_types
            and not self.wire.options.per_shard_statistics
            and sums_rows(step.rule, step.uses)
        ):
            cut = {arena_type: self.arenas[arena_type] for arena_type in self._column_sums.arena_types}
        for arena, (occurrences, grad) in found.items():
            if arena not in cut.values():
                arena.updates += 1
                with self.wire.load.measure():
                    arena.store.update(steps[arena], occurrences, grad)
        if cut:
            self._column_sums.update(cut, steps, found, self.ops, self.wire.link)
        if self.locator.has_readers:
            updated = {arena: occurrences.slots for arena, (occurrences, _) in found.items()}
            push_rows(self.locator, self.arenas, self.copies, updated, self.wire.link)
        if self._sync is not None:
            self._sync.record_step(steps, found, self.locator)

    @override
    def sync(self) -> None:
        if self._sync is not None:
            self._sync.finish()
            self._sync.start(self.locator)
            self._sync.finish()

    @override
    def settle(self) -> None:
        if self._sync is not None:
            self._sync.finish()

    @override
    def add_moment(self, table: str, moment: Moment, initial: float) -> None:
        super().add_moment(table, moment, initial)
        self.settle()
        for arena in self.arenas:
            arena.store.add_moment(moment)
        for tile in self._list_tiles(table):
            if tile.owned is not None:
                arena, number = tile.owned
                arena.store.fill(number, moment.name, initial)

    # -- whole tables ----------------------------------------------------------------------------------------------

    def _list_tiles(self, table: str) -> list[ShardedTile]:
        """List the tiles of a table, after waiting for a running average."""
        self.settle()
        locator = self.locator
        found: list[ShardedTile] = []
        for i, tile in enumerate(locator.tiles):
            if tile.table == table:
                arena_type = int(locator.entries[ARENA_TYPE, i])
                owned, copied = (
                    locator.owned(locator.arena_types[arena_type]),
                    locator.copied(locator.arena_types[arena_type]),
                )
                found.append(
                    ShardedTile(
                        Shard(self.tables[table], tile.rows, tile.cols),
                        tile.owner,
                        (self.arenas[arena_type], owned.index(i)) if i in owned else None,
                        (self.copies[arena_type], copied.index(i)) if i in copied else None,
                    )
                )
        return found

    @override
    def raw(self, table: str) -> dict[str, Tensor]:
        return gather_raw(self.tables[table], self._list_tiles(table), self.wire.link, self.device)

    @override
    def load(self, table: str, raw: Mapping[str, Tensor]) -> None:
        scatter_raw(raw, self._list_tiles(table))

    @override
    def local_tiles(self, table: str) -> list[LocalTile]:
        found: list[LocalTile] = []
        for tile in self._list_tiles(table):
            for copy, owned in ((tile.owned, True), (tile.copied, False)):
                if copy is not None:
                    found.append(LocalTile(tile.shard, *copy, owned))
        return found

    @override
    def rows(self, table: str) -> Tensor:
        spec = self.tables[table]
        span = Span(spec.rows, spec.fp32_rows)
        store = DenseStore([span], spec.dim, dtype=spec.dtype, device=self.device, backend=self._backend)
        raw = self.raw(table)
        store.load_raw(0, raw)
        return store.read(torch.arange(spec.rows, device=self.device))

    @override
    def moment(self, table: str, name: str) -> Tensor:
        spec, arena = self.tables[table], self.arenas[0]
        per_row = arena.store.moment_is_per_row(name)
        shape = (spec.rows,) if per_row else (spec.rows, spec.dim)
        whole = torch.empty(shape, dtype=torch.float32, device=self.device)
        return gather_moment(name, whole, self._list_tiles(table), self.wire.link)

    @override
    def load_moment(self, table: str, name: str, values: Tensor) -> None:
        scatter_moment(name, values, self._list_tiles(table))

    @override
    def to(self, device: torch.device) -> None:
        self.settle()
        for arena in (*self.arenas, *self.copies):
            arena.to(device)
        self.locator = self._locate(device)

    def _locate(self, device: torch.device) -> Locator:
        first_hop = hops_of_rows(self.wire.link)[0].size
        node = first_hop if first_hop < self.wire.link.size else None
        return Locator(list(self.tables.values()), self._plan, self.wire.link.rank, device, node)
