"""Look up and update tables that are all on this rank, in place: one arena, and one kernel launch, per dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed.arena import Arena, LocalTile, Shard
from hotbed.embed.ids import BagPlaces
from hotbed.embed.table_group import Contribution, Request, TableGroup, Vectors
from hotbed.jagged import Jagged
from hotbed.ops import BackendName, BagLayout, Occurrences, RuleStep
from hotbed.optim import Moment
from hotbed.specs import Feature, Table
from hotbed.store import Storage


class LocalTables(TableGroup):
    """Tables that are all on this rank: an arena per dtype, looked up and updated directly.

    Parameters
    ----------
    dim, tables, features
        As in `TableGroup`; features of other tables are ignored.
    seed, device, backend
        As in `Arena`.
    storages
        Where the rows of tables are, by name; default: in the device's memory. Tables with one dtype and one storage
        share an arena.
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
        self._sources: list[_LocalSource] = []
        self._place: dict[str, tuple[Arena, int]] = {}
        position = {name: i for i, name in enumerate(self.pooled)}
        of_sequences: list[Feature] = []
        kept = {t.name: (t.dtype, (storages or {}).get(t.name, Storage())) for t in tables}
        for form in dict.fromkeys(kept.values()):
            members = [t for t in tables if kept[t.name] == form]
            whole = [Shard.whole(t) for t in members]
            arena = Arena(whole, dim, seed=seed, device=device, backend=backend, storage=form[1])
            names = {t.name: i for i, t in enumerate(members)}
            self._place.update({name: (arena, i) for name, i in names.items()})
            self.arenas.append(arena)
            slots = {name: (arena.first_slots[i], i) for name, i in names.items()}
            pooled = {f: position[f.name] for f in features if f.table in names and f.name in position}
            unpooled = [f for f in self.sequences if f.table in names]
            of_sequences += unpooled
            self._sources.append(
                _LocalSource(
                    arena,
                    BagPlaces(pooled, slots) if pooled else None,
                    [BagPlaces({f: 0}, slots, single=True) for f in unpooled],
                )
            )
        self.sequences = of_sequences

    @property
    @override
    def device(self) -> torch.device:
        return self.arenas[0].store.device

    @property
    @override
    def nbytes(self) -> int:
        return sum(arena.store.nbytes for arena in self.arenas)

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arenas[0].store.empty(shape, dtype)

    @override
    def requests(
        self, ids: Jagged, room: int, trained: Callable[[set[str]], bool], routes: object = None
    ) -> list[Request]:
        found: list[Request] = []
        output = int(bool(self.pooled))
        for source in self._sources:
            wanted = trained(source.names)
            if source.pooled is not None:
                found.append(Request(source, source.pooled.layout(ids, room + len(self.pooled), room), 0, wanted))
            for places in source.sequences:
                found.append(Request(source, places.layout(ids, 1, 0), output, wanted))
                output += 1
        return found

    @override
    def layouts(self) -> list[Tensor]:
        places = [p for s in self._sources for p in (s.pooled, *s.sequences) if p is not None]
        return [entries for p in places for entries in p.entries]

    @override
    def update(self, steps: Mapping[Arena, RuleStep], found: Mapping[Arena, tuple[Occurrences, Tensor]]) -> None:
        for arena, (occurrences, grad) in found.items():
            arena.updates += 1
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
        for arena in self.arenas:
            arena.to(device)


class _LocalSource:
    """An arena of whole tables, and the places of their features' bags; a `RowSource`."""

    def __init__(self, arena: Arena, pooled: BagPlaces | None, sequences: list[BagPlaces]) -> None:
        self.arena, self.pooled, self.sequences = arena, pooled, sequences
        self.names = set(arena.tables)

    @property
    def store(self) -> Vectors:
        return self.arena.store

    @property
    def updates(self) -> int:
        return self.arena.updates

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        return _LocalGradient(self, bags, versions, grad)


class _LocalGradient(NamedTuple):
    """A gradient of rows of one arena of this rank; a `Contribution`."""

    source: _LocalSource
    bags: BagLayout
    versions: tuple[int, int, int]
    grad: Tensor

    @property
    def is_summed(self) -> bool:
        return False

    @property
    def tables(self) -> set[str]:
        return self.source.names

    def changed(self) -> bool:
        return self.bags.versions() != self.versions

    def finite(self) -> Tensor:
        return torch.isfinite(self.grad).all()

    def drop(self) -> None:
        pass

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        arena = self.source.arena
        return [(arena, arena.store.occurrences(self.bags), self.grad)]
