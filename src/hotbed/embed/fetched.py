"""The rows that a batch needs, brought here; and the gradients of these rows, sent back to who owns them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.comm import Handle
from hotbed.embed.arena import Arena
from hotbed.embed.part import CHANGED, Contribution, Vectors
from hotbed.embed.pooling import rows_of
from hotbed.embed.route import Route, Stream
from hotbed.embed.wire import Sent, Wire
from hotbed.errors import OptimizerError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.codec import decode, encode


class Fetched:
    """Rows of a batch by position, see `Route`; a `Source` and its own `Vectors`.

    Parameters
    ----------
    route
        What was exchanged.
    arenas, copies
        Of this rank, by kind.
    tables
        Tables of the features.
    wire, ops
        Exchange and kernels.
    """

    updates = 0
    """Never updated: what was fetched stays as it is, whatever the owners do to their rows."""

    def __init__(
        self,
        route: Route,
        arenas: Sequence[Arena],
        copies: Sequence[Arena],
        tables: set[str],
        wire: Wire,
        ops: Backend,
        dim: int,
    ) -> None:
        self.route, self.tables = route, tables
        self._arenas, self._wire, self._ops = arenas, wire, ops
        self._vectors = arenas[0].store.empty((route.rows, dim), torch.float32)
        on_their_way = [(s, _answer(s, arenas[s.kind], self._vectors, wire)) for s in route.streams if not s.copied]
        for stream in route.streams:
            if stream.copies is not None:
                _fill(self._vectors, stream, copies[stream.kind].store.read(stream.copies))
        for stream, handle in on_their_way:
            values = decode(handle.wait(), wire.forward)
            _fill(self._vectors, stream, values)
        self._rows = rows_of(self._vectors)

    @property
    def store(self) -> Vectors:
        """The rows."""
        return self

    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Pooled vectors into ``out [B, width, D]``."""
        self._ops.lookup(self._rows, bags, out)

    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Gradient of the per-id weights into ``out [N]``."""
        self._ops.weight_gradient(self._rows, bags, grad, out)

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Sum the gradient of each distinct row, and send the sums to the owners."""
        if bags.versions() != versions:
            raise OptimizerError(CHANGED)
        route, link = self.route, self._wire.link
        sums = torch.empty_like(self._vectors)
        self._ops.segment_sum(self._ops.occurrences(bags), route.groups, grad, route.places, sums)
        handles: list[Handle[Tensor]] = []
        for stream in route.streams:
            values = encode(_units(sums, stream, self._arenas[stream.kind].store.dim), self._wire.backward)
            handles.append(link.all_to_all("gradients", values, stream.to, stream.came))
        return Sent(self.tables, link, grad.device, lambda: self._arrived(handles))

    def _arrived(self, handles: Sequence[Handle[Tensor]]) -> list[tuple[Arena, Occurrences, Tensor]]:
        """What the ranks sent to this one, by arena, in rank order."""
        grads = [decode(handle.wait(), self._wire.backward) for handle in handles]
        found: list[tuple[Arena, Occurrences, Tensor]] = []
        for kind, arena in enumerate(self._arenas):
            here = [(s, g) for s, g in zip(self.route.streams, grads, strict=True) if s.kind == kind and len(g)]
            if here:
                slots, bags = _in_rank_order([s for s, _ in here])
                grad = here[0][1] if len(here) == 1 else torch.cat([g for _, g in here])
                found.append((arena, Occurrences(slots, bags, None), grad))
        return found


def _answer(stream: Stream, arena: Arena, vectors: Tensor, wire: Wire) -> Handle[Tensor]:
    """Send the rows that were asked for, and receive what this rank asked for, where it belongs if it can be."""
    if stream.first < 0 or wire.forward != "fp32":
        answer = encode(arena.store.read(stream.received), wire.forward)
        return wire.link.all_to_all("rows", answer, stream.came, stream.to)
    # What this rank asks of itself is not sent, but read to where it belongs; which can wait until the rest is sent.
    rank = wire.link.rank
    before, own = sum(stream.came[:rank]), stream.came[rank]
    mine = stream.received[before : before + own]
    others = torch.cat([stream.received[:before], stream.received[before + own :]])
    here = vectors[stream.first : stream.first + len(stream.slots)]
    incoming = list(here.split(stream.to))
    outgoing = arena.store.read(others).split([0 if r == rank else count for r, count in enumerate(stream.came)])
    place, incoming[rank] = incoming[rank], here[:0]
    handle = wire.link.exchange("rows", outgoing, incoming)
    arena.store.read(mine, out=place)
    return Handle(lambda: (handle.wait(), here.view(torch.uint8))[1])


def _fill(vectors: Tensor, stream: Stream, values: Tensor) -> None:
    """Put the units of a stream ``[n, cols]`` where they belong."""
    if stream.first >= 0:
        here = vectors[stream.first : stream.first + len(values)]
        if here.data_ptr() != values.data_ptr():
            here.copy_(values)
    for lane in stream.lanes:
        vectors[lane.rows, lane.cols] = values[lane.units]


def _units(sums: Tensor, stream: Stream, cols: int) -> Tensor:
    """The units of a stream ``[n, cols]``."""
    if stream.first >= 0:
        return sums[stream.first : stream.first + len(stream.slots)]
    values = sums.new_empty(len(stream.slots), cols)
    for lane in stream.lanes:
        values[lane.units] = sums[lane.rows, lane.cols]
    return values


def _in_rank_order(streams: Sequence[Stream]) -> tuple[Tensor, Tensor]:
    """Slots of all streams by the rank they came from, and the row of each in the streams one after the other."""
    slots = torch.cat([s.received for s in streams])
    bags = torch.arange(len(slots), device=slots.device)
    if len(streams) > 1:
        ranks = torch.tensor([r for s in streams for r, n in enumerate(s.came) for _ in range(n)])
        bags = torch.argsort(ranks.to(slots.device), stable=True)
    return slots[bags], bags
