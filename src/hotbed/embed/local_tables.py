"""Look up and update tables on this rank, in place, with one arena and one kernel launch per dtype.

A collection of 26 tables has one gradient per step. Listing, grouping and applying its ids takes one launch each. With
`hotbed.swap_embeddings`, 26 modules may share one arena and have 26 gradients per step. `merge_gradients` concatenates
their ids, so that they need the same number of launches.

`SingleFeature` is the fast path for modules with one feature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.comm import Link
from hotbed.embed.arena import Arena, LocalTile, Shard
from hotbed.embed.ids import FeatureBags, convert_weights
from hotbed.embed.row_sums import with_leaves
from hotbed.embed.shard_routing import ArenaType, IdExchange
from hotbed.embed.side_stream import group_on_side_stream
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
    """A `RowSource` of tables in one arena, with the bags of their features."""

    def __init__(self, arena: Arena, names: set[str], pooled: FeatureBags | None, sequences: list[FeatureBags]) -> None:
        self.arena, self.names, self.pooled, self.sequences = arena, names, pooled, sequences
        self.steps = 0
        """Number of gradients of these tables that steps have used. A lookup is stale if it changed since."""

    @property
    def store(self) -> Vectors:
        """The rows."""
        return self.arena.store

    @property
    def updates(self) -> int:
        """Upper limit of the number of updates of these tables."""
        return self.arena.updates + self.steps

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Return a gradient that waits for the step."""
        return LocalGradient(self, bags, versions, grad)


class LocalGradient(NamedTuple):
    """A `Contribution` to the rows of one local arena."""

    source: LocalSource
    bags: BagLayout
    versions: tuple[int, int, int]
    grad: Tensor

    @property
    def is_summed(self) -> bool:
        """Return False, because rows may have several gradients."""
        return False

    @property
    def tables(self) -> set[str]:
        """Tables that the gradient may belong to."""
        return self.source.names

    def changed(self) -> bool:
        """Return whether ids, offsets or weights were changed in place since the lookup."""
        return self.bags.versions() != self.versions

    def finite(self) -> Tensor:
        """Return whether the gradient is finite, as a 0-d bool."""
        return torch.isfinite(self.grad).all()

    def drop(self) -> None:
        """Do nothing, because no exchange has to be completed."""

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return the arena, the occurrences of its slots, and the gradient."""
        self.source.steps += 1
        arena = self.source.arena
        return [(arena, with_leaves(arena.store.occurrences(self.bags), self.bags), self.grad)]


def merge_gradients(waiting: Sequence[Contribution]) -> list[Contribution]:
    """Merge the gradients of single features with one arena and batch size.

    Gradients of a table with several gradients are not merged. So the order of each row's occurrences stays the same,
    and with it the bits of their sum.
    """
    if len(waiting) < 2:
        return list(waiting)
    count = Counter(table for gradient in waiting for table in gradient.tables)
    found: list[Contribution] = []
    mergeable: dict[Hashable, list[LocalGradient]] = {}
    for gradient in waiting:
        is_alone = all(count[table] == 1 for table in gradient.tables)
        if is_alone and isinstance(gradient, LocalGradient) and len(gradient.bags.features) == 1:
            key = gradient.source.arena, gradient.bags.batch_size, gradient.bags.leaf_bags, gradient.grad.dtype
            mergeable.setdefault(key, []).append(gradient)
        else:
            found.append(gradient)
    return [*found, *map(_merge_arena_gradients, mergeable.values())]


def _merge_arena_gradients(gradients: list[LocalGradient]) -> LocalGradient:
    """Merge gradients of one arena, with features in the order of its tables."""
    if len(gradients) == 1:
        return gradients[0]
    place = {name: i for i, name in enumerate(gradients[0].source.arena.tables)}
    gradients = sorted(gradients, key=lambda g: place[next(iter(g.tables))])
    for gradient in gradients[1:]:
        gradient.source.steps += 1
    bags = [gradient.bags for gradient in gradients]
    grad, width, positions = _stack_rows(gradients)
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
        leaf_bags=bags[0].leaf_bags,
    )
    return LocalGradient(gradients[0].source, layout, layout.versions(), grad)


def _stack_rows(gradients: Sequence[LocalGradient]) -> tuple[Tensor, int, list[int]]:
    """Combine gradients of one feature each into rows ``[…, D]``: bag b of a feature is row ``b · width + position``.

    Return rows, width, and the position of each gradient. Gradients of stacked or concatenated vectors are slices of
    one tensor and are not copied.
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
    """Makes requests for the bags of one feature.

    ``slot`` is the slot of the table's row 0 in ``source``, and ``number`` the index of the table in `Rows.tables`.
    """

    def __init__(self, source: LocalSource, feature: Feature, slot: int, number: int) -> None:
        self._source, self._is_pooled = source, feature.is_pooled
        code = POOLING_CODE[feature.pooling]
        self._rest, self._has_divisors = [0, slot, code, 0, number], bool(code)
        self._last: tuple[tuple[int, torch.device], Tensor] | None = None

    @property
    def entries(self) -> list[Tensor]:
        """Bag-layout tensors of the last call."""
        return [] if self._last is None else [self._last[1]]

    def request(self, bags: Bags, trained: bool) -> Request:
        """Make the request for some bags. If the feature is not pooled, each id is a bag."""
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
            None if bags.weights is None else convert_weights(bags.weights.contiguous()),
            batch_size,
            count,
            self._has_divisors,
            1,
            ids_per_bag=fixed or None,
            spans=((0, count),),
        )
        return Request(self._source, layout, 0, trained)


class _Lookup(NamedTuple):
    """Bags for a lookup in ``source``, and the number of their output."""

    source: LocalSource
    output: int
    bags: BagLayout


class _LocalLookups(NamedTuple):
    """The lookups of a batch. ``pooled`` features share output 0. It is a `PreparedLookup`."""

    lookups: list[_Lookup]
    pooled: int

    def exchange_rows(self, link: Link) -> None:
        """Do nothing, because all rows are on this rank."""

    def read_ahead(self) -> None:
        for source, _, bags in self.lookups:
            if bags.groups is not None:
                source.arena.store.prefetch(bags.groups.rows[: int(bags.groups.counts[0])])

    def requests(self, room: int, trained: Callable[[set[str]], bool]) -> list[Request]:
        found: list[Request] = []
        for source, output, bags in self.lookups:
            if output == 0 and self.pooled and bags.room != room:
                bags = replace(bags, width=room + self.pooled, room=room)
            if is_trained := trained(source.names):
                bags = group_on_side_stream(source.arena, bags)
            found.append(Request(source, bags, output, is_trained))
        return found


class LocalTables(TableGroup):
    """Tables on this rank, which are looked up and updated directly.

    Arguments are as in `TableGroup` and `Arena`. Features of other tables are ignored. Tables with equal dtype and
    storage (by name in ``storages``) share an arena and its cache.
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
        storage_of = {t.name: (t.dtype, (storages or {}).get(t.name, Storage())) for t in tables}
        made: list[tuple[Arena, Mapping[str, int]]] = []
        for form in dict.fromkeys(storage_of.values()):
            members = [t for t in tables if storage_of[t.name] == form]
            whole = [Shard.whole(t) for t in members]
            arena = Arena(whole, dim, seed=seed, device=device, backend=backend, storage=form[1])
            made.append((arena, {t.name: i for i, t in enumerate(members)}))
        self.serve(made)

    def serve(self, arenas: Sequence[tuple[Arena, Mapping[str, int]]], *, shared: bool = False) -> None:
        """Use these arenas for lookups and updates. Each has a mapping from tables to shard numbers.

        Shared arenas also have tables of other groups. When the group is moved to another device, copied or pickled,
        its tables leave the shared arenas.
        """
        self.arenas = [arena for arena, _ in arenas]
        self.is_shared = shared
        self._sources: list[LocalSource] = []
        self._shard_of: dict[str, tuple[Arena, int]] = {}
        self._singles: dict[str, SingleFeature] = {}
        position = {name: i for i, name in enumerate(self.pooled)}
        of_sequences: list[Feature] = []
        for arena, numbers in arenas:
            self._shard_of.update({name: (arena, i) for name, i in numbers.items()})
            slots = {name: (arena.first_slots[i], i) for name, i in numbers.items()}
            pooled = {f: position[f.name] for f in self._features if f.table in numbers and f.name in position}
            unpooled = [f for f in self.sequences if f.table in numbers]
            of_sequences += unpooled
            source = LocalSource(
                arena,
                set(numbers),
                FeatureBags(pooled, slots) if pooled else None,
                [FeatureBags({f: 0}, slots, single=True) for f in unpooled],
            )
            self._sources.append(source)
            for feature in (*pooled, *unpooled):
                self._singles[feature.name] = SingleFeature(source, feature, *slots[feature.table])
        self.sequences = of_sequences

    def _leave_shared_arena(self, device: torch.device) -> None:
        """Copy these tables from a shared arena to a new arena on ``device``."""
        (arena,) = self.arenas
        own = arena.part([number for _, number in self._shard_of.values()], device)
        self.serve([(own, {name: i for i, name in enumerate(self._shard_of)})])

    def __getstate__(self) -> dict[str, Any]:
        if not self.is_shared:
            return dict(self.__dict__)
        alone = object.__new__(type(self))
        for name, value in self.__dict__.items():
            setattr(alone, name, value)
        alone._leave_shared_arena(self.device)
        return dict(alone.__dict__)

    def look_up(self, ids: Jagged) -> list[Tensor]:
        """Pool float32 vectors of checked ids without gradients.

        Return ``[B, features, D]`` for the pooled features, if there are any, then ``[N, 1, D]`` for each sequence.
        """
        width, device = len(self.pooled), self.device
        outputs = [torch.empty(len(ids), width, self.dim, device=device)] if width else []
        for source in self._sources:
            if source.pooled is not None:
                source.arena.store.lookup(source.pooled.layout(ids, width, 0), outputs[0])
            for feature_bags in source.sequences:
                bags = feature_bags.layout(ids, 1, 0)
                outputs.append(torch.empty(bags.batch_size, 1, self.dim, device=device))
                source.arena.store.lookup(bags, outputs[-1])
        return outputs

    def request(self, feature: str, bags: Bags, trained: bool) -> Request:
        """Return the request for one feature, with output 0. Ids must be valid, and bags at most ``max_len`` long."""
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
    def prepare(self, ids: Jagged, exchange: IdExchange, trained: Callable[[set[str]], bool]) -> _LocalLookups:
        return _LocalLookups(self._lookups(ids, 0), len(self.pooled))

    @override
    def requests(self, ids: Jagged, room: int, trained: Callable[[set[str]], bool]) -> list[Request]:
        return _LocalLookups(self._lookups(ids, room), len(self.pooled)).requests(room, trained)

    def _lookups(self, ids: Jagged, room: int) -> list[_Lookup]:
        """Lay out the bags of a batch, and group them for stores that need it."""
        found: list[_Lookup] = []
        output = int(bool(self.pooled))
        for source in self._sources:
            if source.pooled is not None:
                layout = source.pooled.layout(ids, room + len(self.pooled), room)
                found.append(_Lookup(source, 0, source.arena.store.grouped(layout)))
            for feature_bags in source.sequences:
                found.append(_Lookup(source, output, source.arena.store.grouped(feature_bags.layout(ids, 1, 0))))
                output += 1
        return found

    @override
    def layouts(self) -> list[Tensor]:
        feature_bags = [p for s in self._sources for p in (s.pooled, *s.sequences) if p is not None]
        return [entries for p in (*feature_bags, *self._singles.values()) for entries in p.entries]

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
        arena, number = self._shard_of[table]
        arena.store.add_moment(moment)
        arena.store.fill(number, moment.name, initial)

    @override
    def raw(self, table: str) -> dict[str, Tensor]:
        arena, number = self._shard_of[table]
        return arena.store.raw(number)

    @override
    def load(self, table: str, raw: Mapping[str, Tensor]) -> None:
        arena, number = self._shard_of[table]
        arena.store.load_raw(number, raw)

    @override
    def local_tiles(self, table: str) -> list[LocalTile]:
        arena, number = self._shard_of[table]
        return [LocalTile(arena.shards[number], arena, number, True)]

    @override
    def rows(self, table: str) -> Tensor:
        arena, number = self._shard_of[table]
        return arena.rows(number)

    @override
    def moment(self, table: str, name: str) -> Tensor:
        arena, number = self._shard_of[table]
        return arena.store.moment(number, name)

    @override
    def load_moment(self, table: str, name: str, values: Tensor) -> None:
        arena, number = self._shard_of[table]
        arena.store.load_moment(number, name, values)

    @override
    def to(self, device: torch.device) -> None:
        if self.is_shared:
            self._leave_shared_arena(device)
            return
        for arena in self.arenas:
            arena.to(device)


def storages_of(tables: Sequence[Table], plan: Plan, storage: Storage) -> dict[str, Storage] | None:
    """Return the storage of each table for `LocalTables`, or None if a plan cuts or copies any table.

    Tables with equal dtype and tier share an arena. The rows of their caches are added, because they share one cache.
    """
    dtypes: dict[str, RowDtype] = {t.name: t.dtype for t in tables}
    arena_types: dict[str, ArenaType] = {}
    rows: Counter[ArenaType] = Counter()
    for tile in plan.tiles:
        if tile.table in dtypes:
            if tile.readers or tile.table in arena_types:
                return None
            arena_types[tile.table] = arena_type = ArenaType(
                len(tile.cols), dtypes[tile.table], tile.tier, tile.cache_rows > 0
            )
            rows[arena_type] += tile.cache_rows
    return {
        name: replace(storage, tier=arena_type.tier, cache_rows=rows[arena_type])
        for name, arena_type in arena_types.items()
    }
