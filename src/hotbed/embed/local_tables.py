"""Keep gradients of tables that are on this rank, and join those that were looked up table by table.

A collection of 26 tables leaves one gradient for a step: its ids are listed, grouped and applied by one launch each. 26
modules that look up in one arena leave 26 of them (`hotbed.swap_embeddings`), which `joined` makes one again: ids lie
one after the other, and what the bags' gradients have in common is found by `_rows`.

Look one feature up by itself, with little between a module's call and the kernel.

Look up and update tables that are all on this rank, in place: one arena, and one kernel launch, per dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed.arena import Arena, LocalTile, Shard
from hotbed.embed.beside import grouped_beside
from hotbed.embed.ids import BagPlaces, id_weights
from hotbed.embed.shard_routing import IdExchange, Kind
from hotbed.embed.table_group import Contribution, Request, TableGroup, Vectors
from hotbed.jagged import Bags, Jagged
from hotbed.ops import BackendName, BagLayout, Occurrences, RuleStep
from hotbed.ops.layout import OUT, RAGGED_ROW, START
from hotbed.optim import Moment
from hotbed.plan import Plan
from hotbed.specs import POOLING_CODE, Feature, RowDtype, Table
from hotbed.store import Storage
from hotbed.store.memory import to_device


class LocalSource:
    """An arena, its tables that are looked up, and the places of their features' bags; a `RowSource`."""

    def __init__(self, arena: Arena, names: set[str], pooled: BagPlaces | None, sequences: list[BagPlaces]) -> None:
        self.arena, self.names, self.pooled, self.sequences = arena, names, pooled, sequences
        self.steps = 0
        """How often gradients of these tables were used."""

    @property
    def store(self) -> Vectors:
        """The rows."""
        return self.arena.store

    @property
    def updates(self) -> int:
        """How often they were updated."""
        return self.arena.updates + self.steps

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Make a gradient ready to wait for the step."""
        return LocalGradient(self, bags, versions, grad)


class LocalGradient(NamedTuple):
    """A gradient of rows of one arena of this rank; a `Contribution`."""

    source: LocalSource
    bags: BagLayout
    versions: tuple[int, int, int]
    grad: Tensor

    @property
    def is_summed(self) -> bool:
        """Rows may have several gradients."""
        return False

    @property
    def tables(self) -> set[str]:
        """Tables that it may be of."""
        return self.source.names

    def changed(self) -> bool:
        """Say whether ids, offsets or weights were changed in place since the lookup."""
        return self.bags.versions() != self.versions

    def finite(self) -> Tensor:
        """Return, as 0-d bool, whether all of it is finite."""
        return torch.isfinite(self.grad).all()

    def drop(self) -> None:
        """Do nothing: no other rank knows of it."""

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return the arena, slots, and the rows of the gradient that they receive."""
        self.source.steps += 1
        arena = self.source.arena
        return [(arena, arena.store.occurrences(self.bags), self.grad)]


def joined(waiting: Sequence[Contribution]) -> list[Contribution]:
    """Join gradients of single features, of one arena and as many bags, whose tables have no other gradient.

    The order of each row's occurrences stays, and so do the bits of their sum.
    """
    if len(waiting) < 2:
        return list(waiting)
    count = Counter(table for gradient in waiting for table in gradient.tables)
    found: list[Contribution] = []
    alike: dict[Hashable, list[LocalGradient]] = {}
    for gradient in waiting:
        is_alone = all(count[table] == 1 for table in gradient.tables)
        if is_alone and isinstance(gradient, LocalGradient) and len(gradient.bags.features) == 1:
            key = gradient.source.arena, gradient.bags.batch_size, gradient.grad.dtype
            alike.setdefault(key, []).append(gradient)
        else:
            found.append(gradient)
    return [*found, *map(_joined, alike.values())]


def _joined(gradients: list[LocalGradient]) -> LocalGradient:
    """Join gradients of one arena: the ids of features that follow each other as their tables do."""
    if len(gradients) == 1:
        return gradients[0]
    place = {name: i for i, name in enumerate(gradients[0].source.arena.tables)}
    gradients = sorted(gradients, key=lambda g: place[next(iter(g.tables))])
    for gradient in gradients[1:]:
        gradient.source.steps += 1
    bags = [gradient.bags for gradient in gradients]
    grad, width, positions = _rows(gradients)
    firsts = [0, *accumulate(len(b.ids) for b in bags)]
    ragged = [0, *accumulate(len(b.offsets) for b in bags)]
    device = grad.device
    shift = torch.zeros(len(bags), bags[0].features.shape[1], dtype=torch.int64, device="cpu")
    shift[:, START] = torch.tensor(firsts[:-1])
    shift[:, RAGGED_ROW] = torch.tensor([row if len(b.offsets) else 0 for row, b in zip(ragged, bags, strict=False)])
    shift[:, OUT] = torch.tensor(positions)
    weights = None
    if any(b.weights is not None for b in bags):
        weights = torch.cat([torch.ones(len(b.ids), device=device) if b.weights is None else b.weights for b in bags])
    spans = [(first + start, count) for first, b in zip(firsts, bags, strict=False) for start, count in b.spans or ()]
    per_bag = {b.ids_per_bag for b in bags}
    layout = BagLayout(
        ids=torch.cat([b.ids for b in bags]),
        features=torch.cat([b.features for b in bags]) + to_device(shift, device),
        offsets=torch.cat([b.offsets for b in bags]),
        weights=weights,
        batch_size=bags[0].batch_size,
        total=sum(b.total for b in bags),
        has_divisors=any(b.has_divisors for b in bags),
        width=width,
        ids_per_bag=per_bag.pop() if len(per_bag) == 1 else None,
        spans=tuple(spans) if all(b.spans is not None for b in bags) else None,
    )
    return LocalGradient(gradients[0].source, layout, layout.versions(), grad)


def _rows(gradients: Sequence[LocalGradient]) -> tuple[Tensor, int, list[int]]:
    """Lay gradients of one feature each out as rows ``[…, D]``: bag b of each is row ``b · width + position``.

    Return rows, width, and the position of each gradient. Nothing is copied where they are slices of one tensor, as the
    gradients of vectors that were stacked or concatenated are.
    """
    first, width = gradients[0].grad, gradients[0].bags.width
    dim, start = first.shape[1], min(int(g.grad.storage_offset()) for g in gradients)
    steps = [divmod(int(g.grad.storage_offset()) - start, dim) for g in gradients]
    whole = all(
        g.grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and g.bags.width == width
        for g in gradients
    )
    if whole and len(first) and all(rest == 0 for _, rest in steps):
        count = max(step + len(g.grad) for (step, _), g in zip(steps, gradients, strict=True))
        return first.as_strided((count, dim), (dim, 1), start), width, [step for step, _ in steps]
    bags = gradients[0].bags.batch_size
    own = [g.grad[:: g.bags.width] if g.bags.width else g.grad.expand(bags, dim) for g in gradients]
    return torch.cat(own), 1, [i * bags for i in range(len(own))]


RAGGED = -1


class SingleFeature:
    """The bags of one feature in call after call.

    ``slot`` is that of its table's row 0 in ``source``, ``number`` the table's in `Rows.tables`.
    """

    def __init__(self, source: LocalSource, feature: Feature, slot: int, number: int) -> None:
        self._source, self._is_pooled = source, feature.is_pooled
        code = POOLING_CODE[feature.pooling]
        self._rest, self._has_divisors = [0, slot, code, 0, number], bool(code)
        self._last: tuple[tuple[int, torch.device], Tensor] | None = None

    @property
    def entries(self) -> list[Tensor]:
        """What kernels were told of the last call's bags."""
        return [] if self._last is None else [self._last[1]]

    def request(self, bags: Bags, trained: bool) -> Request:
        """Lay bags out; where the feature is not pooled, each id is one."""
        ids = bags.values.contiguous()
        device, count = ids.device, len(ids)
        fixed, batch_size, offsets = bags.fixed, bags.batch_size, bags.offsets
        if not self._is_pooled:
            fixed, batch_size, offsets = 1, count, None
        key = RAGGED if fixed is None else fixed, device
        last = self._last  # another thread may look up, too
        if last is None or last[0] != key:
            features = torch.tensor([[0, key[0], *self._rest]], dtype=torch.int64, device=device)
            self._last = last = key, features
        rows = torch.empty(0, batch_size + 1, dtype=torch.int64, device=device) if offsets is None else offsets[None]
        layout = BagLayout(
            ids,
            last[1],
            rows.contiguous(),
            None if bags.weights is None else id_weights(bags.weights.contiguous()),
            batch_size,
            count,
            self._has_divisors,
            1,
            ids_per_bag=fixed or None,
            spans=((0, count),),
        )
        return Request(self._source, layout, 0, trained)


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
