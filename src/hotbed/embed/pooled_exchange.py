"""Connect the tables of all ranks: links, codecs, load counters, and gradients in flight.

`Wire` is what all tables of a model share. `LoadCounters` counts lookups and seconds of this rank, by which a run
reports whether ranks have equal loads. `SentGradient` is a gradient between backward and step.

Exchange pooled vectors: each owner pools its rows of a bag, and one vector crosses the wire.

This is the wire format ``"pooled"`` of a plan; `hotbed.embed.row_exchange` is the format ``"rows"``. A *unit* here is
what one rank holds of a bag: ids of one bag whose tiles have one owner, one arena kind and the same columns. Its owner
gets their slots and answers with their pooled vector. The requester then adds the units of a bag, in rank order; a bag
of one unit has the bits of plain pooling, one of several is summed in another order.

The batch of `hotbed.embed.shard_routing`: rank 0 has bags [4 1] and [3 4 2], and rank r the rows r, r + 3, r + 6::

    units, by owner        rank 0  │ rank 1          │ rank 2
      bag                    1     │   0       1     │   1
      ids                   [3]    │  [4 1]   [4]    │  [2]
      slots there           [1]    │  [1 0]   [1]    │  [0]
    counts of units          1     │   2             │   1         of ids  1 │ 3 │ 1
    vectors that arrive    r₃      │ r₄ + r₁   r₄    │   r₂
    position                 1     │   0       2     │   3         those of a bag follow each other, in rank order
    bags of positions      [0] [1 2 3]                            pooled as in one process

First come requests and what owners make of them, then the requester's side (`make_pooled_route`, `PooledVectors`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.config.parallel_memory import ParallelOptions
from hotbed.embed.arena import Arena
from hotbed.embed.replicas import Replicas, gather_gradients
from hotbed.embed.shard_routing import KIND, LANE, OWNER, Locator, RowTiles
from hotbed.embed.table_group import Contribution, Vectors
from hotbed.errors import BatchError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.layout import FIXED, OUT, POOLING, RAGGED_ROW, START, spans_of
from hotbed.ops.rows import decode, encode, rows_of
from hotbed.specs import divisors
from hotbed.store import RowStore

_DEFAULTS = ParallelOptions()


class LoadCounters:
    """Lookups and seconds of one rank's tables.

    Seconds are time of the host in which rows were read and updated, without exchanges; a GPU may do it later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups = 0
        self.seconds = 0.0

    @contextmanager
    def counted(self, lookups: int = 0) -> Generator[None]:
        """Count the lookups and the time of the body."""
        start = time.perf_counter()
        yield
        with self._lock:  # another thread may exchange rows of the next batch
            self.seconds += time.perf_counter() - start
            self.lookups += lookups


@dataclass(frozen=True)
class Wire:
    """Links, options and counters of a distributed model's tables.

    ``link`` is of its own, because gradients travel while others compute; ``replicas`` are other groups that hold
    copies of the tables, if there are any.
    """

    link: Link
    options: ParallelOptions = _DEFAULTS
    replicas: Replicas | None = None
    load: LoadCounters = field(default_factory=LoadCounters)

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: copies of a model share links, and count their loads together."""
        return self

    @property
    def links(self) -> list[Link]:
        """List the links of the own group, and where there are replicas, of the ranks that hold the same tiles."""
        return [self.link] if self.replicas is None else [self.link, self.replicas.link]

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, and nothing that its rows or gradients pass through."""
        codecs = self.options.forward_codec, self.options.backward_codec
        return self.link.size == 1 and self.replicas is None and codecs == ("fp32", "fp32")

    @property
    def summed_ranks(self) -> int:
        """Count the ranks whose gradients a row is updated by."""
        exact = self.replicas is not None and self.replicas.exact
        return math.prod(link.size for link in (self.links if exact else [self.link]))


class SentGradient:
    """A gradient on its way to the owners of its rows; a `Contribution`.

    ``arrived`` waits for what the ranks sent to this one, and returns it by arena, in rank order.
    """

    is_summed = True

    def __init__(
        self,
        tables: set[str],
        wire: Wire,
        arenas: Sequence[Arena],
        device: torch.device,
        arrived: Callable[[], Sequence[tuple[Arena, Occurrences, Tensor]]],
    ) -> None:
        self.tables = tables
        self._wire, self._arenas, self._device, self._arrived = wire, arenas, device, arrived
        self._gradients: Sequence[tuple[Arena, Occurrences, Tensor]] | None = None
        self._agreed: Tensor | None = None

    def changed(self) -> bool:
        """Return False: the gradient was summed in backward."""
        return False

    def finite(self) -> Tensor:
        """Return, as 0-d bool, whether all that arrived on any rank is finite; all ranks must call this."""
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
        """Receive and forget it: the other ranks wait until it has arrived."""
        self.gradients()

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return by arena: slots, and the rows of the gradient that they receive."""
        if self._gradients is None:  # several optimizers may call this
            self._gradients = self._arrived()
            if self._wire.replicas is not None and self._wire.replicas.exact:
                self._gradients = gather_gradients(self._gradients, self._arenas, self._wire.replicas.link)
        return self._gradients


class UnitRequest(NamedTuple):
    """Units of one arena kind that a rank requests, by owner, or that are requested of an owner, by rank."""

    slots: Tensor  # [n], of all ids, in the owners' arenas
    lengths: Tensor  # [m], ids of each unit
    weights: Tensor | None  # [n] float32, per id
    divisors: Tensor | None  # [m] float32, divisor of the whole bag of each unit; None: no feature divides
    ids: list[int]  # number by owner, or by rank
    units: list[int]  # number by owner, or by rank


def exchange_requests(requests: Sequence[UnitRequest], link: Link) -> list[UnitRequest]:
    """Exchange the requests of all ranks, one per arena kind; all ranks must call this.

    Rank 1 of the example gets slots ``[1, 0, 1]`` with lengths ``[2, 1]`` from rank 0, and if its own bags are [1] and
    [8], slot ``[0]`` from itself, without a length: ``slots [1, 0, 1, 0]``, ``lengths [2, 1, 1]``, ``ids [3, 1, 0]``,
    ``units [2, 1, 0]``. Per-id weights of some ranks only raise `BatchError`.
    """
    device = requests[0].slots.device
    weighted = requests[0].weights is not None
    counts = torch.tensor(
        [c for r in requests for c in (r.ids, r.units)] + [[int(weighted)] * link.size]
    ).T.contiguous()
    ones = [1] * link.size
    recv_counts = link.all_to_all("numbers of ids", counts.to(device), ones, ones).wait().T.tolist()
    if any(flag != weighted for flag in recv_counts[-1]):
        ranks = [r for r, flag in enumerate(recv_counts[-1]) if flag]
        raise BatchError(f"ranks {ranks} have per-id weights and the others none; give all of them, or none")
    handles: list[list[Handle[Tensor] | None]] = []
    for i, a in enumerate(requests):
        ids, units = recv_counts[2 * i], recv_counts[2 * i + 1]
        # As many ids as units: every unit has one id, so no lengths are sent.
        sent = [0 if n == m else m for n, m in zip(a.ids, a.units, strict=True)]
        kept = torch.repeat_interleave(torch.tensor([s > 0 for s in sent]), torch.tensor(a.units)).to(device)
        expected = [0 if n == m else m for n, m in zip(ids, units, strict=True)]
        handles.append(
            [
                link.all_to_all("ids", a.slots, a.ids, ids),
                link.all_to_all("bag lengths", a.lengths[kept], sent, expected),
                None if a.weights is None else link.all_to_all("weights", a.weights, a.ids, ids),
                None if a.divisors is None else link.all_to_all("lengths of whole bags", a.divisors, a.units, units),
            ]
        )
    found: list[UnitRequest] = []
    for i, (slots, lengths, weights, divided_by) in enumerate(handles):
        ids, units = recv_counts[2 * i], recv_counts[2 * i + 1]
        assert slots is not None
        assert lengths is not None
        found.append(
            UnitRequest(
                slots.wait(),
                _with_ones(lengths.wait(), ids, units),
                None if weights is None else weights.wait(),
                None if divided_by is None else divided_by.wait(),
                ids,
                units,
            )
        )
    return found


def _with_ones(lengths: Tensor, ids: Sequence[int], units: Sequence[int]) -> Tensor:
    """Return lengths of all units, from those of the ranks that sent them."""
    by_rank: list[Tensor] = []
    first = 0
    for n, m in zip(ids, units, strict=True):
        if n == m:
            by_rank.append(lengths.new_ones(m))
        else:
            by_rank.append(lengths[first : first + m])
            first += m
    return torch.cat(by_rank)


def pool(store: RowStore, request: UnitRequest, ops: Backend) -> Tensor:
    """Pool units into vectors ``[m, cols]`` float32: sums of rows in bag order, over the divisors of whole bags."""
    out = store.empty((len(request.lengths), 1, store.dim), torch.float32)
    rows = store.read(request.slots)  # one table for the kernel, whatever tables and dtypes the rows are of
    ids = torch.arange(len(request.slots), device=rows.device)
    ops.lookup(rows_of(rows), _layout(request, ids), out)
    vectors = out[:, 0]
    return vectors if request.divisors is None else vectors / request.divisors[:, None]


def sum_by_rank(store: RowStore, request: UnitRequest, grad: Tensor, ops: Backend) -> tuple[Tensor, Tensor]:
    """Sum the gradient of each row for each rank, from gradients of units ``[m, cols]``.

    Return slots ``[u]``, rank by rank, and sums ``[u, cols]``.
    """
    device = grad.device
    unit = torch.repeat_interleave(torch.arange(len(request.lengths), device=device), request.lengths)
    rank = torch.repeat_interleave(
        torch.arange(len(request.ids), device=device), torch.tensor(request.ids, device=device), output_size=len(unit)
    )
    scale = request.weights
    if request.divisors is not None:
        scale = (1 if scale is None else scale) / request.divisors[unit]
    starts = torch.tensor([*accumulate(request.ids, initial=0)], dtype=torch.int64, device="cpu")
    limit = len(request.ids) * store.slots
    occurrences = Occurrences(rank * store.slots + request.slots, unit, scale, starts, limit)
    groups = ops.group(occurrences)
    slots = groups.rows[: int(groups.counts[0])] % store.slots
    sums = torch.empty(len(slots), grad.shape[1], dtype=torch.float32, device=device)
    ops.segment_sum(occurrences, groups, grad, None, sums)
    return slots, sums


def _layout(request: UnitRequest, ids: Tensor) -> BagLayout:
    features = torch.tensor([[0, -1, 0, 0, 0, 0, 0]], device=ids.device)
    offsets = torch.nn.functional.pad(request.lengths.cumsum(0), (1, 0))[None]
    return BagLayout(ids, features, offsets, request.weights, len(request.lengths), len(ids), False, 1)


class PooledStream(NamedTuple):
    """Units of one arena kind."""

    kind: int  # number of the arena kind
    rows: Tensor  # [m], position of each arriving vector
    lanes: Tensor  # [m], lane of each arriving vector
    bags: Tensor  # [m], bag of each unit, by owner: feature · B + sample
    send_counts: list[int]  # units by owner
    requested: UnitRequest  # requests of the ranks to this one


@dataclass(frozen=True)
class PooledRoute:
    """The bags of one output after the exchange of their ids."""

    bags: BagLayout  # with positions of units in place of ids
    rows: int  # number of positions
    streams: list[PooledStream]  # exchanges, by arena kind
    trained: bool  # whether gradients will be exchanged, too


def make_pooled_route(bags: BagLayout, locator: Locator, ops: Backend, link: Link, *, trained: bool) -> PooledRoute:
    """Cut bags into units and exchange the requests for them; all ranks must call this.

    Parameters are those of `hotbed.embed.shard_routing.make_route`. In the example at the top of this file ``bag`` is
    ``[0, 0, 1, 1, 1]`` (of ids 4, 1, 3, 4, 2), sorted by ``message`` (the owner, as there is one kind and lane) the ids
    are 3 │ 4 1 4 │ 2, ``starts`` of units ``[0, 1, 3, 4]``, ``of_unit`` (their bags) ``[1, 0, 1, 1]``, ``row`` (their
    positions) ``[1, 0, 2, 3]``, and ``first_rows`` (first position of each bag, and past the last) ``[0, 1, 4]``.
    """
    size, features = bags.batch_size, len(bags.features)
    order_of = bags.features.clone()
    order_of[:, OUT] = torch.arange(features, device=order_of.device)
    ids = ops.occurrences(replace(bags, features=order_of, weights=None, has_divisors=False, width=features, room=0))
    bag = ids.bags % features * size + torch.div(ids.bags, features, rounding_mode="floor")
    found = locator.find(ids.slots)
    kind, owner, lane = (locator.entries[column] for column in (KIND, OWNER, LANE))
    message = ((kind * link.size + owner) * len(locator.lanes) + lane)[found.tile]
    order = torch.argsort(found.row, stable=True)  # layers follow each other, but ids of a bag must keep their order
    order = order[torch.argsort(message[order], stable=True)]
    at, tile, message = found.row[order], found.tile[order], message[order]
    starts = _starts(message, bag[at])
    of_unit, kind, owner, lane = bag[at[starts]], kind[tile[starts]], owner[tile[starts]], lane[tile[starts]]
    lengths = torch.diff(starts, append=torch.tensor([len(at)], device=starts.device))
    row, first_rows = _rows(of_unit, locator.lines[tile[starts]], features * size)
    slots = locator.slots(ids.slots, RowTiles(at, tile))
    weights = None if bags.weights is None else _by_occurrence(bags, bags.weights)[at]
    divided_by = None
    if bags.has_divisors:
        whole = torch.bincount(bag, minlength=features * size)[of_unit]
        pooling = bags.features[torch.div(of_unit, max(size, 1), rounding_mode="floor"), POOLING]
        divided_by = divisors(pooling, whole)
    requests: list[UnitRequest] = []
    slices: list[slice] = []
    firsts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ends = torch.searchsorted(kind, torch.arange(len(locator.kinds) + 1, device=at.device)).tolist()
    for a, b in pairwise(ends):
        i, j = firsts[[a, b]].tolist()
        to = owner[a:b]
        requests.append(
            UnitRequest(
                slots[i:j],
                lengths[a:b],
                None if weights is None else weights[i:j],
                None if divided_by is None else divided_by[a:b],
                torch.bincount(torch.repeat_interleave(to, lengths[a:b]), minlength=link.size).tolist(),
                torch.bincount(to, minlength=link.size).tolist(),
            )
        )
        slices.append(slice(a, b))
    streams = [
        PooledStream(i, row[here], lane[here], of_unit[here], requests[i].units, requested)
        for (i, here), requested in zip(enumerate(slices), exchange_requests(requests, link), strict=True)
    ]
    rows = int(first_rows[-1])
    return PooledRoute(within_group(bags, first_rows, rows), rows, streams, trained)


def _starts(*keys: Tensor) -> Tensor:
    """Find the positions where any of the keys differs from the one before."""
    if not len(keys[0]):
        return torch.empty(0, dtype=torch.int64, device=keys[0].device)
    new = torch.ones(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    new[1:] = torch.stack([key.diff() != 0 for key in keys]).any(dim=0)
    return new.nonzero()[:, 0]


def _rows(bag: Tensor, lane: Tensor, bags: int) -> tuple[Tensor, Tensor]:
    """Give each unit a position among those of its bag and line; return these, and the first one of each bag."""
    lanes = int(lane.max()) + 1 if len(lane) else 1
    key = bag * lanes + lane
    order = torch.argsort(key, stable=True)
    starts = _starts(key[order])
    count = torch.diff(starts, append=torch.tensor([len(key)], device=key.device))
    which = torch.empty_like(order)
    which[order] = torch.arange(len(order), device=order.device) - torch.repeat_interleave(starts, count)
    rows = torch.zeros(bags, dtype=torch.int64, device=bag.device)
    rows.scatter_reduce_(0, bag, which + 1, "amax")
    first_rows = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    return first_rows[bag] + which, first_rows


def _by_occurrence(bags: BagLayout, values: Tensor) -> Tensor:
    """Sort values that are parallel to the batch's ids into the order of occurrences."""
    return torch.cat([values[start : start + count] for start, count in spans_of(bags)])


def within_group(bags: BagLayout, first_rows: Tensor, rows: int) -> BagLayout:
    """Return the bags as runs of neighbouring positions; owners have divided the sums already."""
    size, features = bags.batch_size, len(bags.features)
    first = first_rows[torch.arange(features, device=first_rows.device) * size]
    places = torch.zeros_like(bags.features)
    places[:, START] = first
    places[:, FIXED] = -1
    places[:, RAGGED_ROW] = torch.arange(features, device=first_rows.device)
    places[:, OUT] = bags.features[:, OUT]
    windows = torch.arange(size + 1, device=first_rows.device) + size * places[:, RAGGED_ROW, None]
    ids = torch.arange(rows, device=first_rows.device)
    return BagLayout(ids, places, first_rows[windows] - first[:, None], None, size, rows, False, bags.width, bags.room)


class PooledVectors:
    """Vectors of units, which bags are pooled from; a `RowSource` and its own `Vectors`.

    Parameters are those of `hotbed.embed.row_exchange.ExchangedRows`, and the locator of the tables.
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
        for stream in route.streams:
            with wire.load.counted(len(stream.requested.slots)):
                answer = encode(pool(arenas[stream.kind].store, stream.requested, ops), wire.options.forward_codec)
            handles.append(link.all_to_all("pooled vectors", answer, stream.requested.units, stream.send_counts))
        vectors = arenas[0].store.empty((route.rows, locator.dim), torch.float32)
        if sum(len(s.rows) * locator.kinds[s.kind].cols for s in route.streams) < vectors.numel():
            vectors.zero_()  # a bag may have more units of some columns than of others
        for stream, handle in zip(route.streams, handles, strict=True):
            values = decode(handle.wait(), wire.options.forward_codec)
            locator.cells(stream.kind, stream.rows, stream.lanes).put(values, vectors)
        self._rows = rows_of(vectors)

    @property
    def store(self) -> Vectors:
        """The vectors."""
        return self

    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Pool vectors into ``out [B, width, D]``."""
        self._ops.lookup(self._rows, bags, out)

    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Refuse: the rows stayed with their owners."""
        raise BatchError(
            f"per-id weights that are trained need the rows of {', '.join(sorted(self.tables))}, which stay with their "
            "owners where wire is 'pooled'; plan wire='rows' for these tables"
        )

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Send each unit's owner the gradient of its bag."""
        link, size = self._wire.link, max(bags.batch_size, 1)
        handles: list[Handle[Tensor]] = []
        for stream in self.route.streams:
            feature, sample = torch.div(stream.bags, size, rounding_mode="floor"), stream.bags % size
            of_bag = sample * bags.width + bags.room + bags.features[feature, OUT]
            units = self._locator.cells(stream.kind, of_bag, stream.lanes).take(grad)
            values = encode(units.float(), self._wire.options.backward_codec)
            handles.append(link.all_to_all("gradients", values, stream.send_counts, stream.requested.units))
        return SentGradient(self.tables, self._wire, self._arenas, grad.device, lambda: self._arrived(handles))

    def _arrived(self, handles: Sequence[Handle[Tensor]]) -> list[tuple[Arena, Occurrences, Tensor]]:
        found: list[tuple[Arena, Occurrences, Tensor]] = []
        for stream, handle in zip(self.route.streams, handles, strict=True):
            grad = decode(handle.wait(), self._wire.options.backward_codec)
            arena = self._arenas[stream.kind]
            if len(grad):
                slots, sums = sum_by_rank(arena.store, stream.requested, grad, self._ops)
                found.append((arena, Occurrences(slots, torch.arange(len(slots), device=slots.device), None), sums))
        return found
