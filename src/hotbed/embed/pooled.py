"""The wire format ``"pooled"``: owners pool the rows of a bag that they hold, and one vector crosses the wire.

A *unit* is what one rank holds of a bag: ids of one bag whose tiles have one owner, one arena kind and the same
columns. Its owner is told the ids and answers with their pooled vector (`hotbed.embed.pooling`). Units of a bag are
then added here, in the order of ranks; a bag of one unit has the bits of plain pooling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.embed.arena import Arena
from hotbed.embed.part import Contribution, Vectors
from hotbed.embed.placement import KIND, LANE, OWNER, Found, Placement
from hotbed.embed.pooling import Asked, ask, pool, sum_by_rank
from hotbed.embed.wire import Sent, Wire
from hotbed.errors import BatchError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.codec import decode, encode
from hotbed.ops.layout import FIXED, MEAN, OUT, RAGGED_ROW, START, counts_of
from hotbed.ops.rows import rows_of


class PooledStream(NamedTuple):
    """Units of one arena kind.

    Attributes
    ----------
    kind
        Number of the kind.
    rows, lanes
        Where vectors go when they arrive ``[m]``: row here, and lane.
    bags
        Bag of each unit ``[m]``, by owner: ``feature · B + sample``.
    to
        Units by owner.
    asked
        What the ranks asked for here.
    """

    kind: int
    rows: Tensor
    lanes: Tensor
    bags: Tensor
    to: list[int]
    asked: Asked


@dataclass(frozen=True)
class PooledRoute:
    """Bags of one output, exchanged.

    Attributes
    ----------
    bags
        The bags, with rows here in the place of ids: at least one for each unit.
    rows
        How many rows there are here.
    streams
        What is exchanged, by arena kind.
    trained
        Whether gradients will be exchanged, too.
    """

    bags: BagLayout
    rows: int
    streams: list[PooledStream]
    trained: bool


def make_pooled_route(bags: BagLayout, placement: Placement, ops: Backend, link: Link, *, trained: bool) -> PooledRoute:
    """Cut bags into units and tell the owners; all ranks must call this. See `hotbed.embed.route.make_route`."""
    size, features = bags.batch_size, len(bags.features)
    order_of = bags.features.clone()
    order_of[:, OUT] = torch.arange(features, device=order_of.device)
    ids = ops.occurrences(replace(bags, features=order_of, weights=None, has_mean=False, width=features, room=0))
    bag = ids.bags % features * size + torch.div(ids.bags, features, rounding_mode="floor")
    found = placement.find(ids.slots)
    kind, owner, lane = (placement.entries[column] for column in (KIND, OWNER, LANE))
    message = ((kind * link.size + owner) * len(placement.lanes) + lane)[found.tile]
    order = torch.argsort(found.at, stable=True)  # layers follow each other, but ids of a bag must keep their order
    order = order[torch.argsort(message[order], stable=True)]
    at, tile, message = found.at[order], found.tile[order], message[order]
    starts = _starts(message, bag[at])
    of_unit, kind, owner, lane = bag[at[starts]], kind[tile[starts]], owner[tile[starts]], lane[tile[starts]]
    lengths = torch.diff(starts, append=torch.tensor([len(at)], device=starts.device))
    row, first_rows = _rows(of_unit, placement.lines[tile[starts]], features * size)
    slots = placement.slots(ids.slots, Found(at, tile))
    weights = None if bags.weights is None else _by_occurrence(bags, bags.weights)[at]
    divisors = None
    if bags.has_mean:
        whole = torch.bincount(bag, minlength=features * size)[of_unit]
        mean = bags.features[:, MEAN].bool()[torch.div(of_unit, max(size, 1), rounding_mode="floor")]
        divisors = torch.where(mean, whole, 1).float()
    asking: list[Asked] = []
    parts: list[slice] = []
    firsts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ends = torch.searchsorted(kind, torch.arange(len(placement.kinds) + 1, device=at.device)).tolist()
    for a, b in pairwise(ends):
        i, j = firsts[[a, b]].tolist()
        to = owner[a:b]
        asking.append(
            Asked(
                slots[i:j],
                lengths[a:b],
                None if weights is None else weights[i:j],
                None if divisors is None else divisors[a:b],
                torch.bincount(torch.repeat_interleave(to, lengths[a:b]), minlength=link.size).tolist(),
                torch.bincount(to, minlength=link.size).tolist(),
            )
        )
        parts.append(slice(a, b))
    streams = [
        PooledStream(i, row[part], lane[part], of_unit[part], asking[i].units, asked)
        for (i, part), asked in zip(enumerate(parts), ask(asking, link), strict=True)
    ]
    rows = int(first_rows[-1])
    return PooledRoute(renamed(bags, first_rows, rows), rows, streams, trained)


def _starts(*keys: Tensor) -> Tensor:
    """Positions where any of the keys differs from the one before."""
    if not len(keys[0]):
        return torch.empty(0, dtype=torch.int64, device=keys[0].device)
    new = torch.ones(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    new[1:] = torch.stack([key.diff() != 0 for key in keys]).any(dim=0)
    return new.nonzero()[:, 0]


def _rows(bag: Tensor, lane: Tensor, bags: int) -> tuple[Tensor, Tensor]:
    """Row of each unit, and first row of each bag: its units of a line have rows of their own, in their order."""
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
    """Values that are parallel to the batch's ids, in the order of occurrences."""
    starts = bags.features[:, START].tolist()
    return torch.cat([values[start : start + count] for start, count in zip(starts, counts_of(bags), strict=True)])


def renamed(bags: BagLayout, first_rows: Tensor, rows: int) -> BagLayout:
    """The bags as runs of neighbouring rows; what is mean has been divided already."""
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
    """Vectors of units, which bags are pooled from; a `Source` and its own `Vectors`.

    Parameters
    ----------
    route
        What was exchanged.
    arenas
        Of this rank, by kind.
    tables
        Tables of the features.
    wire, ops
        Exchange and kernels.
    placement
        Of the tables.
    link
        Over which the vectors come; see `hotbed.embed.fetched.Fetched`.
    """

    updates = 0
    """Never updated, see `hotbed.embed.fetched.Fetched`."""

    def __init__(
        self,
        route: PooledRoute,
        arenas: Sequence[Arena],
        tables: set[str],
        wire: Wire,
        ops: Backend,
        placement: Placement,
        link: Link,
    ) -> None:
        self.route, self.tables = route, tables
        self._arenas, self._wire, self._ops, self._placement = arenas, wire, ops, placement
        handles: list[Handle[Tensor]] = []
        for stream in route.streams:
            with wire.work.counted(len(stream.asked.slots)):
                answer = encode(pool(arenas[stream.kind].store, stream.asked, ops), wire.forward)
            handles.append(link.all_to_all("pooled vectors", answer, stream.asked.units, stream.to))
        vectors = arenas[0].store.empty((route.rows, placement.dim), torch.float32)
        if sum(len(s.rows) * placement.kinds[s.kind].cols for s in route.streams) < vectors.numel():
            vectors.zero_()  # a bag may have more units of some columns than of others
        for stream, handle in zip(route.streams, handles, strict=True):
            values = decode(handle.wait(), wire.forward)
            placement.cells(stream.kind, stream.rows, stream.lanes).put(values, vectors)
        self._rows = rows_of(vectors)

    @property
    def store(self) -> Vectors:
        """The vectors."""
        return self

    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Pooled vectors into ``out [B, width, D]``."""
        self._ops.lookup(self._rows, bags, out)

    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Not here: the rows stayed with their owners."""
        raise BatchError(
            f"per-id weights that are trained need the rows of {', '.join(sorted(self.tables))}, which stay with their "
            "owners where wire is 'pooled'; plan wire='rows' for these tables"
        )

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Send each unit the gradient of its bag."""
        link, size = self._wire.link, max(bags.batch_size, 1)
        handles: list[Handle[Tensor]] = []
        for stream in self.route.streams:
            feature, sample = torch.div(stream.bags, size, rounding_mode="floor"), stream.bags % size
            of_bag = sample * bags.width + bags.room + bags.features[feature, OUT]
            units = self._placement.cells(stream.kind, of_bag, stream.lanes).take(grad)
            values = encode(units.float(), self._wire.backward)
            handles.append(link.all_to_all("gradients", values, stream.to, stream.asked.units))
        return Sent(self.tables, self._wire, self._arenas, grad.device, lambda: self._arrived(handles))

    def _arrived(self, handles: Sequence[Handle[Tensor]]) -> list[tuple[Arena, Occurrences, Tensor]]:
        found: list[tuple[Arena, Occurrences, Tensor]] = []
        for stream, handle in zip(self.route.streams, handles, strict=True):
            grad = decode(handle.wait(), self._wire.backward)
            arena = self._arenas[stream.kind]
            if len(grad):
                slots, sums = sum_by_rank(arena.store, stream.asked, grad, self._ops)
                found.append((arena, Occurrences(slots, torch.arange(len(slots), device=slots.device), None), sums))
        return found
