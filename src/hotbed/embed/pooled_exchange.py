"""Exchange pooled vectors: each owner pools its rows of a bag and sends one vector.

This is the wire format ``"pooled"`` of a plan. The format ``"rows"`` is in `hotbed.embed.row_exchange`. A *partial bag*
has the ids of one bag with one owner, arena type and column range. The owner receives their slots and returns their
pooled vector. The requesting rank adds the partial bags of a bag in rank order. A bag of one partial bag has the same
bits as in one process. A bag of several is summed in a different order.

For example, in the batch of `hotbed.embed.shard_routing`, rank 0 has bags [4 1] and [3 4 2], and rank r has rows r,
r + 3, r + 6::

    partial bags           rank 0  │ rank 1          │ rank 2
      bag                    1     │   0       1     │   1
      ids                   [3]    │  [4 1]   [4]    │  [2]
      slots there           [1]    │  [1 0]   [1]    │  [0]
    numbers of these         1     │   2             │   1         of ids  1 │ 3 │ 1
    vectors that arrive    r₃      │ r₄ + r₁   r₄    │   r₂
    position                 1     │   0       2     │   3         partial bags of a bag are adjacent, in rank order
    bags of positions      [0] [1 2 3]                            pooled as in one process

The owner's side is `exchange_requests`, `pool` and `sum_by_leaf_and_row`. The requester's side is `make_pooled_route`
and `PooledVectors`. Both wire formats use `Wire`, the links and options of all tables of a model, and `SentGradient`,
a gradient between backward and step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.comm.hierarchical import hops_of_rows
from hotbed.config.parallel_memory import ParallelOptions
from hotbed.embed.arena import Arena
from hotbed.embed.replicas import Replicas, gather_gradients
from hotbed.embed.row_sums import add_sums, kernels_of
from hotbed.embed.shard_routing import Locator
from hotbed.embed.table_group import Contribution, Vectors
from hotbed.embed.tile_layers import ARENA_TYPE, COLUMN_SHARD, OWNER, RowTiles
from hotbed.errors import BatchError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.layout import FIXED, OUT, POOLING, RAGGED_ROW, START, LeafBags, spans_of
from hotbed.ops.rows import decode, encode, rows_of
from hotbed.specs import divisors
from hotbed.store import RowStore
from hotbed.store.memory import to_device
from hotbed.virtual_ranks import VirtualRanks, subtrees, tree_size

_DEFAULTS = ParallelOptions()


class LoadCounters:
    """Counts lookups and seconds of one rank's tables, which show whether ranks have equal loads.

    Seconds are host time for reading and updating rows, without exchanges. A GPU may run the work later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups = 0
        self.seconds = 0.0

    @contextmanager
    def measure(self, lookups: int = 0) -> Generator[None]:
        """Count the lookups, and measure the time of the body."""
        start = time.perf_counter()
        yield
        with self._lock:  # another thread may exchange rows of the next batch
            self.seconds += time.perf_counter() - start
            self.lookups += lookups


@dataclass(frozen=True)
class Wire:
    """How the tables of a distributed model exchange data: links, options and counters.

    No other exchange uses ``link``, because gradients are in flight during computation. ``replicas`` are the groups
    with copies of the tables, if there are any.
    """

    link: Link
    options: ParallelOptions = _DEFAULTS
    replicas: Replicas | None = None
    load: LoadCounters = field(default_factory=LoadCounters)
    # of all ranks whose gradients are summed; default: each rank of the link is one
    virtual: VirtualRanks = field(default_factory=lambda: VirtualRanks(0, 0))
    members: Sequence[int] = ()  # the link's ranks, numbered as in ``virtual``

    def __post_init__(self) -> None:
        if not self.virtual.size:
            object.__setattr__(self, "virtual", VirtualRanks(self.link.rank, self.link.size))
            object.__setattr__(self, "members", range(self.link.size))

    def subtrees(self, rank: int) -> list[int]:
        """Return the first virtual rank of each node of a rank of ``link``. The rank sends a sum per row and node."""
        return self._subtrees[rank]

    @cached_property
    def _subtrees(self) -> list[list[int]]:
        return [[node.start for node in subtrees(self.virtual.block(member))] for member in self.members]

    @cached_property
    def most_sums(self) -> int:
        """Largest number of sums of a row that its owner receives. If there are two, each order has the same bits."""
        virtual = self.virtual
        return sum(len(subtrees(virtual.block(rank))) for rank in range(virtual.size))

    @cached_property
    def most_subtrees(self) -> int:
        """Largest number of `subtrees` of a rank."""
        return max(map(len, self._subtrees))

    def of_hops(self, link: Link) -> list[Wire]:
        """Return the wire of each hop of rows over a link: this one, or one inside the node and one between nodes."""
        if link not in self._wires:
            self._wires[link] = self._make_wires(link)
        return self._wires[link]

    @cached_property
    def _wires(self) -> dict[Link, list[Wire]]:
        return {}

    def _make_wires(self, link: Link) -> list[Wire]:
        hops, virtual = hops_of_rows(link), self.virtual
        if len(hops) == 1:
            return [self if link is self.link else replace(self, link=link)]
        (inside, between), first = hops, self.members[0]
        start, locals_ = link.rank - inside.rank, inside.size
        of_nodes = VirtualRanks((first + link.rank) // locals_, virtual.size // locals_, virtual.total)
        nodes = range(first // locals_, first // locals_ + between.size)
        return [
            replace(self, link=inside, members=self.members[start : start + locals_], load=LoadCounters()),
            replace(self, link=between, members=nodes, virtual=of_nodes),
        ]

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself, because copies of a model share links and counters."""
        return self

    @property
    def links(self) -> list[Link]:
        """Links of the own group and, with replicas, of the ranks that have the same tiles."""
        return [self.link] if self.replicas is None else [self.link, self.replicas.link]

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, without replicas or codecs."""
        codecs = self.options.forward_codec, self.options.backward_codec
        return self.link.size == 1 and self.replicas is None and codecs == ("fp32", "fp32")


class SentGradient:
    """A `Contribution` that is being sent to the owners of its rows.

    ``arrived`` waits for the gradients that this rank receives, and returns them by arena, in rank order. If a row may
    have more than two, they have virtual ranks and are added along the tree.
    """

    def __init__(
        self,
        tables: set[str],
        wire: Wire,
        arenas: Sequence[Arena],
        device: torch.device,
        arrived: Callable[[], Sequence[tuple[Arena, Occurrences, Tensor]]],
    ) -> None:
        self.tables = tables
        self._wire, self._arenas, self._device, self._collect = wire, arenas, device, arrived
        self._gradients: Sequence[tuple[Arena, Occurrences, Tensor]] | None = None
        self._agreed: Tensor | None = None

    @property
    def is_summed(self) -> bool:
        """Whether each row has at most one gradient."""
        return self._wire.most_sums != 2 and all(of_arena.leaf is None for _, of_arena, _ in self.gradients())

    def changed(self) -> bool:
        """Return False, because the gradient was summed in backward."""
        return False

    def finite(self) -> Tensor:
        """Return whether received gradients are finite on all ranks, as a 0-d bool. All ranks must call this."""
        if self._agreed is None:
            finite = torch.ones((), dtype=torch.bool, device=self._device)
            for _, _, grad in self.gradients():
                finite = finite & torch.isfinite(grad).all()
            for link in self._wire.links:
                flags = link.all_gather("whether gradients are finite", finite.to(torch.uint8)[None])
                finite = flags.wait().bool().all()
            self._agreed = finite
        return self._agreed

    def drop(self) -> None:
        """Receive and drop the gradient, because its senders wait until it has arrived."""
        self.gradients()

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return the arenas, the occurrences of their slots, and the gradients."""
        if self._gradients is None:  # several optimizers may call this
            self._gradients = self._collect()
            if self._wire.replicas is not None and self._wire.replicas.exact:
                self._gradients = gather_gradients(
                    self._gradients, self._arenas, self._wire.replicas.link, self._wire.virtual
                )
            self._gradients = [_add_leaves(*of_arena) for of_arena in self._gradients]
        return self._gradients


def _add_leaves(arena: Arena, occurrences: Occurrences, sums: Tensor) -> tuple[Arena, Occurrences, Tensor]:
    """Add the sums of each row along the tree over virtual ranks, if there may be more than two."""
    if occurrences.leaf is not None:
        occurrences, sums, _ = add_sums(kernels_of(arena), occurrences, sums, arena.store.slots)
    return arena, occurrences, sums


class PartialBags(NamedTuple):
    """Partial bags of one arena type: a rank's requests, sorted by owner, or an owner's answers, sorted by rank."""

    slots: Tensor  # [n], slots of all ids in the owners' arenas
    lengths: Tensor  # [m], number of ids of each partial bag
    weights: Tensor | None  # [n] float32, per id
    divisors: Tensor | None  # [m] float32, divisor of the whole bag; None: no feature divides
    ids: list[int]  # numbers of ids by owner or rank
    partials: list[int]  # numbers of partial bags by owner or rank


def exchange_requests(requests: Sequence[PartialBags], link: Link) -> list[PartialBags]:
    """Exchange the requests of all ranks, one per arena type. All ranks must call this.

    In the example, rank 1 receives slots ``[1, 0, 1]`` with lengths ``[2, 1]`` from rank 0. If its own bags are [1] and
    [8], it requests slot ``[0]`` from itself. The result is ``slots [1, 0, 1, 0]``, ``lengths [2, 1, 1]``, ``ids [3, 1,
    0]``, ``partials [2, 1, 0]``. If only some ranks have per-id weights, `BatchError` is raised.
    """
    device = requests[0].slots.device
    weighted = requests[0].weights is not None
    counts = torch.tensor(
        [c for r in requests for c in (r.ids, r.partials)] + [[int(weighted)] * link.size]
    ).T.contiguous()
    ones = [1] * link.size
    recv_counts = link.all_to_all("numbers of ids", counts.to(device), ones, ones).wait().T.tolist()
    if any(flag != weighted for flag in recv_counts[-1]):
        ranks = [r for r, flag in enumerate(recv_counts[-1]) if flag]
        raise BatchError(
            f"per-id weights: got weights on ranks {ranks} only, expected them on all ranks or none. Pass weights on "
            "all ranks"
        )
    handles: list[list[Handle[Tensor] | None]] = []
    for i, a in enumerate(requests):
        ids, partials = recv_counts[2 * i], recv_counts[2 * i + 1]
        # If all partial bags of a rank have one id, their lengths are not sent.
        sent = [0 if n == m else m for n, m in zip(a.ids, a.partials, strict=True)]
        kept = torch.repeat_interleave(torch.tensor([s > 0 for s in sent]), torch.tensor(a.partials)).to(device)
        expected = [0 if n == m else m for n, m in zip(ids, partials, strict=True)]
        handles.append(
            [
                link.all_to_all("ids", a.slots, a.ids, ids),
                link.all_to_all("bag lengths", a.lengths[kept], sent, expected),
                None if a.weights is None else link.all_to_all("weights", a.weights, a.ids, ids),
                None
                if a.divisors is None
                else link.all_to_all("lengths of whole bags", a.divisors, a.partials, partials),
            ]
        )
    found: list[PartialBags] = []
    for i, (slots, lengths, weights, bag_divisors) in enumerate(handles):
        ids, partials = recv_counts[2 * i], recv_counts[2 * i + 1]
        assert slots is not None
        assert lengths is not None
        found.append(
            PartialBags(
                slots.wait(),
                _fill_ones(lengths.wait(), ids, partials),
                None if weights is None else weights.wait(),
                None if bag_divisors is None else bag_divisors.wait(),
                ids,
                partials,
            )
        )
    return found


def _fill_ones(lengths: Tensor, ids: Sequence[int], partials: Sequence[int]) -> Tensor:
    """Return the lengths of all partial bags. The lengths of ranks that sent none are 1."""
    parts: list[Tensor] = []
    first = 0
    for n, m in zip(ids, partials, strict=True):
        if n == m:
            parts.append(lengths.new_ones(m))
        else:
            parts.append(lengths[first : first + m])
            first += m
    return torch.cat(parts)


def pool(store: RowStore, request: PartialBags, ops: Backend) -> Tensor:
    """Pool partial bags into vectors ``[m, cols]`` float32: sums in bag order, divided by divisors of whole bags."""
    out = store.empty((len(request.lengths), 1, store.dim), torch.float32)
    rows = store.read(request.slots)  # one float32 table for the kernel, for rows of any table and dtype
    ids = torch.arange(len(request.slots), device=rows.device)
    ops.lookup(rows_of(rows), _layout(request, ids), out)
    vectors = out[:, 0]
    return vectors if request.divisors is None else vectors / request.divisors[:, None]


def sum_by_leaf_and_row(
    store: RowStore, request: PartialBags, leaf: Tensor, leaves: int, grad: Tensor, ops: Backend
) -> tuple[Occurrences, Tensor]:
    """Sum the gradients of partial bags ``[m, cols]`` by virtual rank (``leaf [m]``) and row.

    Return the occurrences of the sums, sorted by virtual rank, and the sums ``[u, cols]``.
    """
    device = grad.device
    partial = torch.repeat_interleave(torch.arange(len(request.lengths), device=device), request.lengths)
    scale = request.weights
    if request.divisors is not None:
        scale = (1 if scale is None else scale) / request.divisors[partial]
    keys = leaf[partial] * store.slots + request.slots
    occurrences = Occurrences(keys, partial, scale, limit=leaves * store.slots)
    groups = ops.group(occurrences)
    keys = groups.rows[: int(groups.counts[0])]
    sums = torch.empty(len(keys), grad.shape[1], dtype=torch.float32, device=device)
    ops.segment_sum(occurrences, groups, grad, None, sums)
    here = torch.arange(len(keys), device=device)
    leaf = torch.div(keys, store.slots, rounding_mode="floor")
    return Occurrences(keys % store.slots, here, None, leaf=leaf, leaves=leaves), sums


def _layout(request: PartialBags, ids: Tensor) -> BagLayout:
    features = torch.tensor([[0, -1, 0, 0, 0, 0, 0]], device=ids.device)
    offsets = torch.nn.functional.pad(request.lengths.cumsum(0), (1, 0))[None]
    return BagLayout(ids, features, offsets, request.weights, len(request.lengths), len(ids), False, 1)


class PooledTransfer(NamedTuple):
    """Partial bags of one arena type that this rank requests, and requests of the ranks to this one."""

    arena_type: int  # index in `Locator.arena_types`
    rows: Tensor  # [m], position of each received vector
    column_shards: Tensor  # [m], column shard of each received vector
    bags: Tensor  # [m], bag of each partial bag, sorted by owner: feature · B + sample
    send_counts: list[int]  # number of partial bags by owner
    requested: PartialBags  # requests of the ranks to this one


@dataclass(frozen=True)
class PooledRoute:
    """The bags of one output after the exchange of their ids."""

    bags: BagLayout  # with positions of partial bags instead of ids
    rows: int  # number of positions
    transfers: list[PooledTransfer]
    trained: bool  # whether gradients will be exchanged, too


def make_pooled_route(bags: BagLayout, locator: Locator, ops: Backend, link: Link, *, trained: bool) -> PooledRoute:
    """Split bags into partial bags and exchange the requests. All ranks must call this.

    Parameters are as in `hotbed.embed.shard_routing.make_route`. In the example at the top of this file, the bags of
    ids 4, 1, 3, 4, 2 are ``bag`` = ``[0, 0, 1, 1, 1]``. With one arena type and column shard, ``destination`` is the
    owner, and sorting by it gives ids 3 │ 4 1 4 │ 2. Partial bags have ``starts`` ``[0, 1, 3, 4]``, bags
    ``bag_of_partial`` ``[1, 0, 1, 1]`` and positions ``row`` ``[1, 0, 2, 3]``. ``first_rows`` ``[0, 1, 4]`` are the
    first positions of the bags, and the end.
    """
    size, features = bags.batch_size, len(bags.features)
    order_of = bags.features.clone()
    order_of[:, OUT] = torch.arange(features, device=order_of.device)
    ids = ops.occurrences(replace(bags, features=order_of, weights=None, has_divisors=False, width=features, room=0))
    bag = ids.bags % features * size + torch.div(ids.bags, features, rounding_mode="floor")
    found = locator.find(ids.slots)
    arena_type, owner, column_shard = (locator.entries[column] for column in (ARENA_TYPE, OWNER, COLUMN_SHARD))
    destination = ((arena_type * link.size + owner) * len(locator.column_shards) + column_shard)[found.tile]
    order = torch.argsort(found.row, stable=True)  # pairs are sorted by layer, but ids of a bag must keep their order
    order = order[torch.argsort(destination[order], stable=True)]
    at, tile, destination = found.row[order], found.tile[order], destination[order]
    starts = _find_starts(destination, bag[at])
    bag_of_partial, arena_type, owner, column_shard = (
        bag[at[starts]],
        arena_type[tile[starts]],
        owner[tile[starts]],
        column_shard[tile[starts]],
    )
    lengths = torch.diff(starts, append=torch.tensor([len(at)], device=starts.device))
    row, first_rows = _assign_positions(bag_of_partial, locator.column_groups[tile[starts]], features * size)
    slots = locator.slots(ids.slots, RowTiles(at, tile))
    weights = None if bags.weights is None else _sort_by_occurrence(bags, bags.weights)[at]
    bag_divisors = None
    if bags.has_divisors:
        whole = torch.bincount(bag, minlength=features * size)[bag_of_partial]
        pooling = bags.features[torch.div(bag_of_partial, max(size, 1), rounding_mode="floor"), POOLING]
        bag_divisors = divisors(pooling, whole)
    requests: list[PartialBags] = []
    slices: list[slice] = []
    firsts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ends = torch.searchsorted(arena_type, torch.arange(len(locator.arena_types) + 1, device=at.device)).tolist()
    for a, b in pairwise(ends):
        i, j = firsts[[a, b]].tolist()
        to = owner[a:b]
        requests.append(
            PartialBags(
                slots[i:j],
                lengths[a:b],
                None if weights is None else weights[i:j],
                None if bag_divisors is None else bag_divisors[a:b],
                torch.bincount(torch.repeat_interleave(to, lengths[a:b]), minlength=link.size).tolist(),
                torch.bincount(to, minlength=link.size).tolist(),
            )
        )
        slices.append(slice(a, b))
    transfers = [
        PooledTransfer(i, row[here], column_shard[here], bag_of_partial[here], requests[i].partials, requested)
        for (i, here), requested in zip(enumerate(slices), exchange_requests(requests, link), strict=True)
    ]
    rows = int(first_rows[-1])
    return PooledRoute(_layout_of_positions(bags, first_rows, rows), rows, transfers, trained)


def _find_starts(*keys: Tensor) -> Tensor:
    """Return the positions where any of the keys differs from its predecessor."""
    if not len(keys[0]):
        return torch.empty(0, dtype=torch.int64, device=keys[0].device)
    new = torch.ones(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    new[1:] = torch.stack([key.diff() != 0 for key in keys]).any(dim=0)
    return new.nonzero()[:, 0]


def _assign_positions(bag: Tensor, column_shard: Tensor, bags: int) -> tuple[Tensor, Tensor]:
    """Assign a position to each partial bag. Return the positions, and the first position of each bag.

    Partial bags of one bag get the same position if their column groups differ.
    """
    column_shards = int(column_shard.max()) + 1 if len(column_shard) else 1
    key = bag * column_shards + column_shard
    order = torch.argsort(key, stable=True)
    starts = _find_starts(key[order])
    count = torch.diff(starts, append=torch.tensor([len(key)], device=key.device))
    which = torch.empty_like(order)
    which[order] = torch.arange(len(order), device=order.device) - torch.repeat_interleave(starts, count)
    rows = torch.zeros(bags, dtype=torch.int64, device=bag.device)
    rows.scatter_reduce_(0, bag, which + 1, "amax")
    first_rows = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    return first_rows[bag] + which, first_rows


def _sort_by_occurrence(bags: BagLayout, values: Tensor) -> Tensor:
    """Sort per-id values of the batch into the order of occurrences."""
    return torch.cat([values[start : start + count] for start, count in spans_of(bags)])


def _layout_of_positions(bags: BagLayout, first_rows: Tensor, rows: int) -> BagLayout:
    """Return the layout of bags as ranges of positions. Poolings are sums, because owners have already divided."""
    size, features = bags.batch_size, len(bags.features)
    first = first_rows[torch.arange(features, device=first_rows.device) * size]
    entries = torch.zeros_like(bags.features)
    entries[:, START] = first
    entries[:, FIXED] = -1
    entries[:, RAGGED_ROW] = torch.arange(features, device=first_rows.device)
    entries[:, OUT] = bags.features[:, OUT]
    windows = torch.arange(size + 1, device=first_rows.device) + size * entries[:, RAGGED_ROW, None]
    ids = torch.arange(rows, device=first_rows.device)
    return BagLayout(ids, entries, first_rows[windows] - first[:, None], None, size, rows, False, bags.width, bags.room)


class PooledVectors:
    """Vectors of partial bags. The class is a `RowSource` and the `Vectors` of that source.

    Parameters are as in `hotbed.embed.row_exchange.ExchangedRows`, plus the locator of the tables.
    """

    updates = 0

    def __init__(
        self,
        route: PooledRoute,
        arenas: Sequence[Arena],
        tables: set[str],
        wire: Wire,
        ops: Backend,
        locator: Locator,
        link: Link,
    ) -> None:
        self.route, self.tables = route, tables
        self._arenas, self._wire, self._ops, self._locator = arenas, wire, ops, locator
        handles: list[Handle[Tensor]] = []
        for transfer in route.transfers:
            with wire.load.measure(len(transfer.requested.slots)):
                answer = encode(
                    pool(arenas[transfer.arena_type].store, transfer.requested, ops), wire.options.forward_codec
                )
            handles.append(link.all_to_all("pooled vectors", answer, transfer.requested.partials, transfer.send_counts))
        vectors = arenas[0].store.empty((route.rows, locator.dim), torch.float32)
        if sum(len(s.rows) * locator.arena_types[s.arena_type].cols for s in route.transfers) < vectors.numel():
            vectors.zero_()  # a bag may have more partial bags for some columns than for others
        for transfer, handle in zip(route.transfers, handles, strict=True):
            values = decode(handle.wait(), wire.options.forward_codec)
            locator.column_blocks(transfer.arena_type, transfer.rows, transfer.column_shards).scatter(values, vectors)
        self._assign_positions = rows_of(vectors)

    @property
    def store(self) -> Vectors:
        """The vectors."""
        return self

    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Pool vectors into ``out [B, width, D]``."""
        self._ops.lookup(self._assign_positions, bags, out)

    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Raise `BatchError`, because this rank did not receive the rows."""
        raise BatchError(
            f"per-id weights that are trained need the rows of {', '.join(sorted(self.tables))}: got wire='pooled', "
            "which does not send rows, expected wire='rows'. Plan wire='rows' for these tables, or give them a scheme "
            "other than 'auto'"
        )

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Send the gradient of each bag to the owners of its partial bags."""
        link, size = self._wire.link, max(bags.batch_size, 1)
        handles: list[Handle[Tensor]] = []
        leaves: list[Callable[[], Tensor]] = []
        for transfer in self.route.transfers:
            feature, sample = torch.div(transfer.bags, size, rounding_mode="floor"), transfer.bags % size
            of_bag = sample * bags.width + bags.room + bags.features[feature, OUT]
            partials = self._locator.column_blocks(transfer.arena_type, of_bag, transfer.column_shards).gather(grad)
            values = encode(partials.float(), self._wire.options.backward_codec)
            handles.append(link.all_to_all("gradients", values, transfer.send_counts, transfer.requested.partials))
            leaves.append(self._send_leaves(transfer, sample, bags.leaf_bags))
        return SentGradient(self.tables, self._wire, self._arenas, grad.device, lambda: self._collect(handles, leaves))

    def _send_leaves(
        self, transfer: PooledTransfer, sample: Tensor, leaf_bags: LeafBags | None
    ) -> Callable[[], Tensor]:
        """Tell the owners the virtual rank of each partial bag, if ranks compute several. Return a function that waits.

        ``sample [m]`` is the sample of each partial bag of this rank.
        """
        wire, requested = self._wire, transfer.requested
        if leaf_bags is not None:
            ends = to_device(torch.tensor(leaf_bags.ends, dtype=torch.int64, device="cpu"), sample.device)
            leaf = torch.searchsorted(ends, sample, right=True, out_int32=True) + leaf_bags.first
            return wire.link.all_to_all("virtual ranks", leaf, transfer.send_counts, requested.partials).wait
        of_ranks = torch.tensor([wire.virtual.block(wire.members[r]).start for r in range(wire.link.size)])
        leaf = to_device(torch.repeat_interleave(of_ranks, torch.tensor(requested.partials)), sample.device)
        return lambda: leaf

    def _collect(
        self, handles: Sequence[Handle[Tensor]], leaves: Sequence[Callable[[], Tensor]]
    ) -> list[tuple[Arena, Occurrences, Tensor]]:
        found: list[tuple[Arena, Occurrences, Tensor]] = []
        for transfer, handle, leaf in zip(self.route.transfers, handles, leaves, strict=True):
            grad = decode(handle.wait(), self._wire.options.backward_codec)
            arena, total = self._arenas[transfer.arena_type], tree_size(self._wire.virtual.total)
            by_leaf = leaf().long()
            if len(grad):
                occurrences, sums = sum_by_leaf_and_row(
                    arena.store, transfer.requested, by_leaf, total, grad, self._ops
                )
                if self._wire.virtual.total <= 2 and self._wire.virtual.are_processes:
                    occurrences = replace(occurrences, leaf=None)
                found.append((arena, occurrences, sums))
        return found
