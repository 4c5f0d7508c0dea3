"""Look up and update tables that are all on this rank, in place: one arena, and one kernel launch, per dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed.arena import Arena, LocalTile, Shard
from hotbed.embed.beside import grouped_beside
from hotbed.embed.ids import BagPlaces
from hotbed.embed.local_gradients import LocalSource
from hotbed.embed.shard_routing import IdExchange, Kind
from hotbed.embed.single_feature import SingleFeature
from hotbed.embed.table_group import Request, TableGroup
from hotbed.jagged import Bags, Jagged
from hotbed.ops import BackendName, BagLayout, Occurrences, RuleStep
from hotbed.optim import Moment
from hotbed.plan import Plan
from hotbed.specs import Feature, RowDtype, Table
from hotbed.store import Storage


class _Lookup(NamedTuple):
    """Bags that are looked up in a source, and in which output."""

    source: LocalSource
    output: int
    bags: BagLayout


class LocalTables(TableGroup):
    """Tables that are all on this rank: an arena per dtype, looked up and updated directly.

    Arguments are as in `TableGroup` and `Arena`; features of other tables are ignored. Tables with one dtype and one
    storage (by name in ``storages``) share an arena, and its cache.
    """

    def __init__(
        self,
        dim: int,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int,
        device: torch.device,
        backend: BackendName,
        storages: Mapping[str, Storage] | None = None,
    ) -> None:
        super().__init__(dim, tables, features)
        self._features = [f for f in features if f.table in self.tables]
        kept = {t.name: (t.dtype, (storages or {}).get(t.name, Storage())) for t in tables}
        made: list[tuple[Arena, Mapping[str, int]]] = []
        for form in dict.fromkeys(kept.values()):
            members = [t for t in tables if kept[t.name] == form]
            whole = [Shard.whole(t) for t in members]
            arena = Arena(whole, dim, seed=seed, device=device, backend=backend, storage=form[1])
            made.append((arena, {t.name: i for i, t in enumerate(members)}))
        self.serve(made)

    def serve(self, arenas: Sequence[tuple[Arena, Mapping[str, int]]], *, shared: bool = False) -> None:
        """Look up and update in these arenas, each with the numbers of its shards by table.

        Shared arenas have tables of other groups, too. The group leaves them when it is moved to another device, copied
        or pickled: then its own tables are.
        """
        self.arenas = [arena for arena, _ in arenas]
        self.is_shared = shared
        self._sources: list[LocalSource] = []
        self._place: dict[str, tuple[Arena, int]] = {}
        self._singles: dict[str, SingleFeature] = {}
        position = {name: i for i, name in enumerate(self.pooled)}
        of_sequences: list[Feature] = []
        for arena, numbers in arenas:
            self._place.update({name: (arena, i) for name, i in numbers.items()})
            slots = {name: (arena.first_slots[i], i) for name, i in numbers.items()}
            pooled = {f: position[f.name] for f in self._features if f.table in numbers and f.name in position}
            unpooled = [f for f in self.sequences if f.table in numbers]
            of_sequences += unpooled
            source = LocalSource(
                arena,
                set(numbers),
                BagPlaces(pooled, slots) if pooled else None,
                [BagPlaces({f: 0}, slots, single=True) for f in unpooled],
            )
            self._sources.append(source)
            for feature in (*pooled, *unpooled):
                self._singles[feature.name] = SingleFeature(source, feature, *slots[feature.table])
        self.sequences = of_sequences

    def _leave(self, device: torch.device) -> None:
        """Copy what a shared arena has of these tables to an arena of their own."""
        (arena,) = self.arenas
        own = arena.part([number for _, number in self._place.values()], device)
        self.serve([(own, {name: i for i, name in enumerate(self._place)})])

    def __getstate__(self) -> dict[str, Any]:
        if not self.is_shared:
            return dict(self.__dict__)
        alone = object.__new__(type(self))
        for name, value in self.__dict__.items():
            setattr(alone, name, value)
        alone._leave(self.device)
        return dict(alone.__dict__)

    def look_up(self, ids: Jagged) -> list[Tensor]:
        """Pool vectors of checked ids as float32, without gradients.

        Return ``[B, features, D]`` of the pooled features, if there are any, then ``[N, 1, D]`` of each sequence.
        """
        width, device = len(self.pooled), self.device
        outputs = [torch.empty(len(ids), width, self.dim, device=device)] if width else []
        for source in self._sources:
            if source.pooled is not None:
                source.arena.store.lookup(source.pooled.layout(ids, width, 0), outputs[0])
            for places in source.sequences:
                bags = places.layout(ids, 1, 0)
                outputs.append(torch.empty(bags.batch_size, 1, self.dim, device=device))
                source.arena.store.lookup(bags, outputs[-1])
        return outputs

    def request(self, feature: str, bags: Bags, trained: bool) -> Request:
        """Return what to look up of one feature alone, into output 0; ids must be valid rows, and bags not too long."""
        return self._singles[feature].request(bags, trained)

    @property
    @override
    def device(self) -> torch.device:
        return self.arenas[0].store.device

    @property
    @override
    def nbytes(self) -> int:
        if not self.is_shared:
            return sum(arena.store.nbytes for arena in self.arenas)
        tiles = [tile for table in self.tables for tile in self.local_tiles(table)]
        return sum(tile.arrays()[e.array][e.start : e.stop].nbytes for tile in tiles for e in tile.extents().values())

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arenas[0].store.empty(shape, dtype)

    @override
    def routes(self, ids: Jagged, exchange: IdExchange, trained: Callable[[set[str]], bool]) -> list[_Lookup]:
        return self._lookups(ids, 0)

    @override
    def read_ahead(self, routes: object) -> None:
        for source, _, bags in cast("list[_Lookup]", routes):
            if bags.groups is not None:
                source.arena.store.prefetch(bags.groups.rows[: int(bags.groups.counts[0])])

    @override
    def requests(
        self, ids: Jagged, room: int, trained: Callable[[set[str]], bool], routes: object = None
    ) -> list[Request]:
        found: list[Request] = []
        for source, output, bags in self._lookups(ids, room) if routes is None else cast("list[_Lookup]", routes):
            if output == 0 and self.pooled and bags.room != room:
                bags = replace(bags, width=room + len(self.pooled), room=room)
            if is_trained := trained(source.names):
                bags = grouped_beside(source.arena, bags)
            found.append(Request(source, bags, output, is_trained))
        return found

    def _lookups(self, ids: Jagged, room: int) -> list[_Lookup]:
        """Lay out the bags of a batch, and group them where the store wants them so."""
        found: list[_Lookup] = []
        output = int(bool(self.pooled))
        for source in self._sources:
            if source.pooled is not None:
                layout = source.pooled.layout(ids, room + len(self.pooled), room)
                found.append(_Lookup(source, 0, source.arena.store.grouped(layout)))
            for places in source.sequences:
                found.append(_Lookup(source, output, source.arena.store.grouped(places.layout(ids, 1, 0))))
                output += 1
        return found

    @override
    def layouts(self) -> list[Tensor]:
        places = [p for s in self._sources for p in (s.pooled, *s.sequences) if p is not None]
        return [entries for p in (*places, *self._singles.values()) for entries in p.entries]

    @override
    def update(self, steps: Mapping[Arena, RuleStep], found: Mapping[Arena, tuple[Occurrences, Tensor]]) -> None:
        for arena, (occurrences, grad) in found.items():
            arena.store.update(steps[arena], occurrences, grad)

    @override
    def sync(self) -> None:
        pass

    @override
    def settle(self) -> None:
        pass

    @override
    def add_moment(self, table: str, moment: Moment, initial: float) -> None:
        super().add_moment(table, moment, initial)
        arena, number = self._place[table]
        arena.store.add_moment(moment)
        arena.store.fill(number, moment.name, initial)

    @override
    def raw(self, table: str) -> dict[str, Tensor]:
        arena, number = self._place[table]
        return arena.store.raw(number)

    @override
    def load(self, table: str, raw: Mapping[str, Tensor]) -> None:
        arena, number = self._place[table]
        arena.store.load_raw(number, raw)

    @override
    def local_tiles(self, table: str) -> list[LocalTile]:
        arena, number = self._place[table]
        return [LocalTile(arena.shards[number], arena, number, True)]

    @override
    def rows(self, table: str) -> Tensor:
        arena, number = self._place[table]
        return arena.rows(number)

    @override
    def moment(self, table: str, name: str) -> Tensor:
        arena, number = self._place[table]
        return arena.store.moment(number, name)

    @override
    def load_moment(self, table: str, name: str, values: Tensor) -> None:
        arena, number = self._place[table]
        arena.store.load_moment(number, name, values)

    @override
    def to(self, device: torch.device) -> None:
        if self.is_shared:
            self._leave(device)
            return
        for arena in self.arenas:
            arena.to(device)


def storages_of(tables: Sequence[Table], plan: Plan, storage: Storage) -> dict[str, Storage] | None:
    """Say where the rows of tables are, for `LocalTables`; None unless a plan keeps each whole, in one place.

    Caches of tables that share an arena, by dtype, memory and whether there is one, are one cache.
    """
    dtypes: dict[str, RowDtype] = {t.name: t.dtype for t in tables}
    kinds: dict[str, Kind] = {}
    rows: Counter[Kind] = Counter()
    for tile in plan.tiles:
        if tile.table in dtypes:
            if tile.readers or tile.table in kinds:
                return None
            kinds[tile.table] = kind = Kind(len(tile.cols), dtypes[tile.table], tile.tier, tile.cache_rows > 0)
            rows[kind] += tile.cache_rows
    return {name: replace(storage, tier=kind.tier, cache_rows=rows[kind]) for name, kind in kinds.items()}
