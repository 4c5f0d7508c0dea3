"""Exchange rows and their gradients: rows of a batch from owners to requesters, sums of gradients back.

This is the wire format ``"rows"`` of a plan. A `Route` says which slots each rank reads for which other; rows arrive at
their positions in one matrix ``[rows, dim]``, which bags are then pooled from by the kernel that serves whole tables.
Backward adds up the gradients of each position and sends the sums the way back.

What a rank requests of itself is copied, not sent. The matrix that holds a stream's sums has room behind them for those
that arrive; rank 1 of the example in `hotbed.embed.shard_routing` (its own rows 1 and 8, of ranks 1 and 2)::

    row of the matrix      0       1    │   2        3
    holds                 Σ row 1  Σ row 8 │  rank 0's Σ row 1, Σ row 4
    sent to               itself   rank 2  │
    arrived, in rank order [2, 3] of rank 0, [0] of itself, for slots [0, 1] and [0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.embed.pooled_exchange import SentGradient, Wire
from hotbed.embed.shard_routing import Route, Stream
from hotbed.embed.table_group import CHANGED, Contribution, Vectors
from hotbed.errors import OptimizerError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.rows import decode, encode, rows_of
from hotbed.store import RowStore


class ExchangedRows:
    """The rows of a batch by position, exchanged by the constructor; a `RowSource` and its own `Vectors`.

    They come over ``link``, which is one of its own where gradients are exchanged at the same time.
    """

    updates = 0
    """Never updated: exchanged rows are copies, whatever the owners do to theirs."""

    def __init__(
        self,
        route: Route,
        arenas: Sequence[Arena],
        copies: Sequence[Arena],
        tables: set[str],
        wire: Wire,
        ops: Backend,
        dim: int,
        link: Link,
    ) -> None:
        self.route, self.tables = route, tables
        self._arenas, self._wire, self._ops = arenas, wire, ops
        self._vectors = arenas[0].store.empty((route.rows, dim), torch.float32)
        exchange = _exchange if wire.options.forward_codec == "fp32" else _exchange_encoded
        over = replace(wire, link=link)
        finish = [exchange(s, arenas[s.kind].store, self._vectors, over) for s in route.streams if not s.copied]
        for stream in route.streams:
            if stream.copies is not None:
                with wire.load.counted(len(stream.copies)):
                    _fill(self._vectors, stream, copies[stream.kind].store.read(stream.copies))
        for arrive in finish:
            arrive()
        self._rows = rows_of(self._vectors)

    @property
    def store(self) -> Vectors:
        """The rows."""
        return self

    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Pool vectors into ``out [B, width, D]``."""
        self._ops.lookup(self._rows, bags, out)

    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Write the gradient of the per-id weights into ``out [N]``."""
        self._ops.weight_gradient(self._rows, bags, grad, out)

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Sum the gradient of each distinct row, and send the sums to the owners."""
        if bags.versions() != versions:
            raise OptimizerError(CHANGED)
        route, wire = self.route, self._wire
        whole = [s for s in route.streams if s.cells is None]
        room = route.rows + (sum(_from_others(s, wire) for s in whole) if wire.options.backward_codec == "fp32" else 0)
        sums = self._arenas[0].store.empty((room, self._vectors.shape[1]), torch.float32)
        self._ops.segment_sum(self._ops.occurrences(bags), route.groups, grad, route.places, sums)
        send = _send if wire.options.backward_codec == "fp32" else _send_encoded
        used = route.rows
        arriving: list[Callable[[], _Arrived]] = []
        for stream in route.streams:
            if stream.cells is None:
                arriving.append(send(stream, sums, stream.first, used, wire))
                used += _from_others(stream, wire)
            else:
                count, others = len(stream.slots), _from_others(stream, wire)
                store = self._arenas[stream.kind].store
                units = store.empty((count + others, store.dim), torch.float32)
                stream.cells.take(sums[: route.rows], out=units[:count])
                arriving.append(send(stream, units, 0, count, wire))
        return SentGradient(
            self.tables, wire, self._arenas, grad.device, lambda: self._arrived([arrive() for arrive in arriving])
        )

    def _arrived(self, arrived: Sequence[_Arrived]) -> list[tuple[Arena, Occurrences, Tensor]]:
        """Join what the ranks sent to this one, by arena, in rank order."""
        found: list[tuple[Arena, Occurrences, Tensor]] = []
        for kind, arena in enumerate(self._arenas):
            here = [(s, a) for s, a in zip(self.route.streams, arrived, strict=True) if s.kind == kind and len(a.rows)]
            if here:
                matrices = list({id(a.matrix): a.matrix for _, a in here}.values())
                firsts = dict(zip(map(id, matrices), accumulate(map(len, matrices), initial=0), strict=False))
                slots = by_rank([s.received for s, _ in here], [s.recv_counts for s, _ in here])
                rows = [a.rows + firsts[id(a.matrix)] if firsts[id(a.matrix)] else a.rows for _, a in here]
                rows = by_rank(rows, [s.recv_counts for s, _ in here])
                matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
                found.append((arena, Occurrences(slots, rows, None), matrix))
        return found


def by_rank(of_streams: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """Join in rank order what streams received, each in rank order: that of rank 0 from all streams, then of rank 1."""
    if len(of_streams) == 1:
        return of_streams[0]
    shares = [stream.split(list(of_ranks)) for stream, of_ranks in zip(of_streams, counts, strict=True)]
    return torch.cat([share for of_rank in zip(*shares, strict=True) for share in of_rank])


class _Arrived(NamedTuple):
    """Gradients of a stream: rows ``[m]`` of a matrix, by rank."""

    matrix: Tensor
    rows: Tensor


def _from_others(stream: Stream, wire: Wire) -> int:
    """Count the units that other ranks request of this one."""
    start, stop = stream.own_received(wire.link.rank)
    return sum(stream.recv_counts) - (stop - start)


def _exchange(stream: Stream, store: RowStore, vectors: Tensor, wire: Wire) -> Callable[[], None]:
    """Send the rows that others request; what is returned receives what this rank requests, at their positions.

    What it requests of itself is read after the rest is on its way, and at its position if rows are whole.
    """
    rank = wire.link.rank
    before, after = stream.own(rank)
    first, last = stream.own_received(rank)
    received = stream.received
    if stream.cells is None:
        units = vectors[stream.first : stream.first + len(stream.slots)]
    else:
        units = store.empty((len(stream.slots), store.dim), torch.float32)
    arrive = None
    if wire.link.size > 1:
        with wire.load.counted(len(received) - (last - first)):
            outgoing = store.read(torch.cat([received[:first], received[last:]]))
        arrive = _swap("rows", outgoing, stream.recv_counts, units, stream.send_counts, wire.link)
    with wire.load.counted(last - first):
        store.read(received[first:last], out=units[before:after])

    def finish() -> None:
        if arrive is not None:
            arrive()
        if stream.cells is not None:
            stream.cells.put(units, vectors)

    return finish


def _swap(
    what: str, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int], link: Link
) -> Callable[[], None]:
    """Send rows to the other ranks, and return what receives theirs, around the gap for what this rank has itself."""
    outgoing = send.split([0 if r == link.rank else n for r, n in enumerate(send_counts)])
    incoming = list(recv.split(list(recv_counts)))
    incoming[link.rank] = recv[:0]
    return link.exchange(what, outgoing, incoming).wait


def _exchange_encoded(stream: Stream, store: RowStore, vectors: Tensor, wire: Wire) -> Callable[[], None]:
    """Exchange rows with a codec; what a rank requests of itself goes through it, too, but not its copies."""
    with wire.load.counted(len(stream.received)):
        answer = encode(store.read(stream.received), wire.options.forward_codec)
    handle = wire.link.all_to_all("rows", answer, stream.recv_counts, stream.send_counts)
    return lambda: _fill(vectors, stream, decode(handle.wait(), wire.options.forward_codec))


def _fill(vectors: Tensor, stream: Stream, units: Tensor) -> None:
    """Write the units of a stream ``[n, cols]`` at their positions."""
    if stream.cells is None:
        vectors[stream.first : stream.first + len(units)] = units
    else:
        stream.cells.put(units, vectors)


def _send(stream: Stream, matrix: Tensor, first: int, free: int, wire: Wire) -> Callable[[], _Arrived]:
    """Send the gradients of a stream, rows of a matrix from ``first`` on; what is returned receives from ``free`` on.

    What is for this rank stays where it is.
    """
    link = wire.link
    if link.size == 1:
        return lambda: _Arrived(matrix, torch.arange(first, first + len(stream.slots), device=matrix.device))
    before, after = stream.own(link.rank)
    outgoing = list(matrix[first : first + len(stream.slots)].split(stream.send_counts))
    outgoing[link.rank] = matrix[:0]
    others = _from_others(stream, wire)
    counts = [0 if r == link.rank else n for r, n in enumerate(stream.recv_counts)]
    handle = link.exchange("gradients", outgoing, matrix[free : free + others].split(counts))
    lower = sum(counts[: link.rank])
    rows = torch.cat(
        [
            torch.arange(start, stop, device=matrix.device)
            for start, stop in (
                (free, free + lower),
                (first + before, first + after),
                (free + lower, free + others),
            )
        ]
    )
    return lambda: (handle.wait(), _Arrived(matrix, rows))[1]


def _send_encoded(stream: Stream, matrix: Tensor, first: int, free: int, wire: Wire) -> Callable[[], _Arrived]:
    """Send gradients with a codec, which those for this rank pass, too; they arrive in a matrix of their own."""
    values = encode(matrix[first : first + len(stream.slots)], wire.options.backward_codec)
    handle = wire.link.all_to_all("gradients", values, stream.send_counts, stream.recv_counts)

    def arrived() -> _Arrived:
        grad = decode(handle.wait(), wire.options.backward_codec)
        return _Arrived(grad, torch.arange(len(grad), device=grad.device))

    return arrived
