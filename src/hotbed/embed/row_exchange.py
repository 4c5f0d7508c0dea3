"""Exchange rows and their gradients: owners send rows to requesting ranks and receive sums of gradients.

This is the wire format ``"rows"`` of a plan. A `Route` has the slots that each rank reads for each other rank. Rows
arrive at their positions in one matrix ``[rows, dim]``, and the kernel for local tables pools them. Backward sums the
local gradients of each position and sends the sums to the owners.

Rows and gradients that a rank requests from itself are copied, not sent. The matrix with the local sums has space for
the received sums at its end. In the example of `hotbed.embed.shard_routing`, rank 1 looks up row 1 of rank 1 and row 8
of rank 2::

    row of the matrix        0        1    │   2        3
    content               Σ row 1  Σ row 8 │  rank 0's Σ row 1, Σ row 4
    sent to               itself   rank 2  │
    received gradients        [2, 3] of rank 0, [0] of itself, for slots [0, 1] and [0]

The owner adds the received sums of a row along the tree over virtual ranks (`hotbed.embed.row_sums`). A rank with
several virtual ranks sends a sum for each node of the tree that it completes, so usually one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.embed.pooled_exchange import SentGradient, Wire
from hotbed.embed.row_sums import sum_into_rows, with_leaves
from hotbed.embed.shard_routing import Route, RowTransfer
from hotbed.embed.table_group import CHANGED, Contribution, Vectors
from hotbed.errors import OptimizerError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.rows import decode, encode, rows_of
from hotbed.store import RowStore
from hotbed.store.memory import to_device
from hotbed.virtual_ranks import subtrees, tree_size


class ExchangedRows:
    """Rows of a batch by position. The class is a `RowSource` and the `Vectors` of that source.

    The constructor exchanges the rows over ``link``. If gradients are exchanged concurrently, ``link`` must not be the
    link of ``wire``.
    """

    updates = 0
    """Always 0, because these copies of rows are never updated."""

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
        over, *between = wire.of_hops(link)
        sources: list[_RowsToRead] = [arena.store for arena in arenas]
        if between:
            sources = self._fetch_for_node(*between)
        finish = [exchange(s, sources[s.arena_type], self._vectors, over) for s in route.transfers if not s.copied]
        for transfer in route.transfers:
            if transfer.copies is not None:
                with wire.load.measure(len(transfer.copies)):
                    _fill(self._vectors, transfer, copies[transfer.arena_type].store.read(transfer.copies))
        for arrive in finish:
            arrive()
        self._rows = rows_of(self._vectors)

    def _fetch_for_node(self, between: Wire) -> list[_RowsToRead]:
        """Receive the rows that the ranks of this node request from this rank, by arena type."""
        found = [_NodeRows(arena.store, rows) for arena, rows in zip(self._arenas, self._count_of_node(), strict=True)]
        transfers = [s for s in self.route.node_transfers if not s.copied]
        finish = [_exchange(s, self._arenas[s.arena_type].store, found[s.arena_type].rows, between) for s in transfers]
        for arrive in finish:
            arrive()
        return list(found)

    def _count_of_node(self) -> list[int]:
        """Return the number of distinct rows of each arena type that the ranks of this node request from this rank."""
        transfers = self.route.node_transfers
        return [sum(len(s.slots) for s in transfers if s.arena_type == i) for i in range(len(self._arenas))]

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
        occurrences = with_leaves(self._ops.occurrences(bags), bags)
        wire, *between = self._wire.of_hops(self._wire.link)
        arriving: _Arriving = []
        for number in range(wire.most_subtrees):
            arriving += self._send_subtree(number, occurrences, grad, wire)
        for second in between:
            arriving, wire = self._send_node_sums(self._collect(arriving, wire, is_last=False), second), second
        return SentGradient(
            self.tables, self._wire, self._arenas, grad.device, lambda: self._collect(arriving, wire, is_last=True)
        )

    def _send_node_sums(self, collected: Sequence[tuple[Arena, Occurrences, Tensor]], wire: Wire) -> _Arriving:
        """Add the gradients of the ranks of this node, and send the sum of each row to its owner."""
        of_arena = {arena: (occurrences, grad) for arena, occurrences, grad in collected}
        arriving: _Arriving = []
        for number, (arena, count) in enumerate(zip(self._arenas, self._count_of_node(), strict=True)):
            transfers = [s for s in self.route.node_transfers if s.arena_type == number]
            room, used = count + sum(_count_remote(s, wire) for s in transfers), count
            sums = arena.store.empty((room + 1, arena.store.dim), torch.float32)[:room]
            if arena in of_arena:
                sum_into_rows(self._ops, *of_arena[arena], sums)
            for transfer in transfers:
                arriving.append((transfer, _send(transfer, sums, transfer.first, used, wire)))
                used += _count_remote(transfer, wire)
        return arriving

    def _send_subtree(self, number: int, occurrences: Occurrences, grad: Tensor, wire: Wire) -> _Arriving:
        """Send the sums of the virtual ranks of this rank's node ``number`` of the tree.

        Return each transfer with a function that waits. Ranks may have different numbers of nodes.
        """
        route = self.route
        transfers = [_of_subtree(transfer, number, wire) for transfer in route.transfers]
        whole = [s for s in transfers if s.column_blocks is None]
        room = route.rows + (sum(_count_remote(s, wire) for s in whole) if wire.options.backward_codec == "fp32" else 0)
        sums = self._arenas[0].store.empty((room + 1, self._vectors.shape[1]), torch.float32)[:room]
        self._sum_subtree(number, occurrences, grad, sums)
        send = _send if wire.options.backward_codec == "fp32" else _send_encoded
        used = route.rows
        arriving: _Arriving = []
        for transfer in transfers:
            if transfer.column_blocks is None:
                arriving.append((transfer, send(transfer, sums, transfer.first, used, wire)))
                used += _count_remote(transfer, wire)
            else:
                count, others = len(transfer.slots), _count_remote(transfer, wire)
                store = self._arenas[transfer.arena_type].store
                blocks = store.empty((count + others, store.dim), torch.float32)
                if count:
                    transfer.column_blocks.gather(sums[: route.rows], out=blocks[:count])
                arriving.append((transfer, send(transfer, blocks, 0, count, wire)))
        return arriving

    def _sum_subtree(self, number: int, occurrences: Occurrences, grad: Tensor, sums: Tensor) -> None:
        """Write the sum of each distinct row over the virtual ranks of a node to its position."""
        route, nodes = self.route, subtrees(self._wire.virtual.own)
        if number >= len(nodes):
            return
        if len(self._wire.virtual.own) == 1:
            self._ops.segment_sum(occurrences, route.groups, grad, route.positions, sums)
            return
        assert occurrences.leaf is not None
        if len(nodes) > 1:
            sums.fill_(-0.0)  # the neutral element of additions, for rows that these virtual ranks do not need
            node = nodes[number]
            occurrences = occurrences.take((occurrences.leaf >= node.start) & (occurrences.leaf < node.stop))
        sum_into_rows(self._ops, occurrences, grad, sums)

    def _collect(self, arriving: _Arriving, wire: Wire, *, is_last: bool) -> list[tuple[Arena, Occurrences, Tensor]]:
        """Wait for gradients, and concatenate them by arena, in rank order, with the virtual ranks they belong to.

        On the last hop, two sums of a row need no virtual ranks.
        """
        found: list[tuple[Arena, Occurrences, Tensor]] = []
        arrived = [(transfer, arrive()) for transfer, arrive in arriving]
        leaves = tree_size(wire.virtual.total)
        for arena_type, arena in enumerate(self._arenas):
            here = [(s, a) for s, a in arrived if s.arena_type == arena_type and len(a.rows)]
            if here:
                matrices = list({id(a.matrix): a.matrix for _, a in here}.values())
                firsts = dict(zip(map(id, matrices), accumulate(map(len, matrices), initial=0), strict=False))
                counts = [s.recv_counts for s, _ in here]
                rows = [a.rows + firsts[id(a.matrix)] if firsts[id(a.matrix)] else a.rows for _, a in here]
                slots, rows = (
                    concatenate_by_rank([s.received for s, _ in here], counts),
                    concatenate_by_rank(rows, counts),
                )
                matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
                has_leaf = not is_last or self._wire.most_sums > 2
                leaf = _leaves_of([s for s, _ in here], wire, slots.device) if has_leaf else None
                found.append((arena, Occurrences(slots, rows, None, leaf=leaf, leaves=leaves), matrix))
        return found


def _leaves_of(transfers: Sequence[RowTransfer], wire: Wire, device: torch.device) -> Tensor:
    """Return the virtual rank of each received gradient, in the order of `concatenate_by_rank`."""
    nodes = [wire.subtrees(rank) for rank in range(wire.link.size)]
    of_ranks = [
        (nodes[rank][s.subtree], s.recv_counts[rank])
        for rank in range(len(nodes))
        for s in transfers
        if s.recv_counts[rank]
    ]
    leaf, counts = torch.tensor(of_ranks, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    return to_device(torch.repeat_interleave(leaf, counts), device)


def _of_subtree(transfer: RowTransfer, number: int, wire: Wire) -> RowTransfer:
    """Return the part of a transfer of the ranks with a node ``number`` of the tree."""
    has = [number < len(wire.subtrees(rank)) for rank in range(wire.link.size)]
    if number == 0 and all(has):
        return transfer
    sends = has[wire.link.rank]
    received = transfer.received.split(transfer.recv_counts)
    return replace(
        transfer,
        slots=transfer.slots if sends else transfer.slots[:0],
        send_counts=transfer.send_counts if sends else [0] * len(has),
        received=torch.cat([r if h else r[:0] for r, h in zip(received, has, strict=True)]),
        recv_counts=[n if h else 0 for n, h in zip(transfer.recv_counts, has, strict=True)],
        subtree=number,
    )


def concatenate_by_rank(of_transfers: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """Merge tensors that are each sorted by rank: rank 0's part of all transfers, then rank 1's part."""
    if len(of_transfers) == 1:
        return of_transfers[0]
    shares = [transfer.split(list(of_ranks)) for transfer, of_ranks in zip(of_transfers, counts, strict=True)]
    return torch.cat([share for of_rank in zip(*shares, strict=True) for share in of_rank])


class _ReceivedGradient(NamedTuple):
    """Received gradients of a transfer: ``rows [m]`` of ``matrix``, sorted by rank."""

    matrix: Tensor
    rows: Tensor


_Arriving: TypeAlias = list[tuple[RowTransfer, Callable[[], _ReceivedGradient]]]
"""Transfers, each with a function that waits for its gradients."""


class _RowsToRead(Protocol):
    """Rows that other ranks request: a `RowStore`, or the rows that were received for this node."""

    @property
    def dim(self) -> int: ...
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...
    def read(self, slots: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class _NodeRows:
    """Distinct rows ``[n, cols]`` that the ranks of a node request from one rank."""

    def __init__(self, store: RowStore, count: int) -> None:
        self.dim, self.empty = store.dim, store.empty
        self.rows = store.empty((count, store.dim), torch.float32)

    def read(self, slots: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Read rows by position."""
        return torch.index_select(self.rows, 0, slots, out=out)


def _count_remote(transfer: RowTransfer, wire: Wire) -> int:
    """Return the number of row blocks that other ranks request from this one."""
    start, stop = transfer.own_received(wire.link.rank)
    return sum(transfer.recv_counts) - (stop - start)


def _exchange(transfer: RowTransfer, store: _RowsToRead, vectors: Tensor, wire: Wire) -> Callable[[], None]:
    """Start the exchange of a transfer's rows. Return a function that waits and writes them to their positions.

    Rows that this rank requests from itself are read after sending. Whole rows are read directly to their positions.
    """
    rank = wire.link.rank
    before, after = transfer.own(rank)
    first, last = transfer.own_received(rank)
    received = transfer.received
    if transfer.column_blocks is None:
        blocks = vectors[transfer.first : transfer.first + len(transfer.slots)]
    else:
        blocks = store.empty((len(transfer.slots), store.dim), torch.float32)
    arrive = None
    if wire.link.size > 1:
        with wire.load.measure(len(received) - (last - first)):
            outgoing = store.read(torch.cat([received[:first], received[last:]]))
        arrive = _exchange_buffers("rows", outgoing, transfer.recv_counts, blocks, transfer.send_counts, wire.link)
    with wire.load.measure(last - first):
        store.read(received[first:last], out=blocks[before:after])

    def finish() -> None:
        if arrive is not None:
            arrive()
        if transfer.column_blocks is not None:
            transfer.column_blocks.scatter(blocks, vectors)

    return finish


def _exchange_buffers(
    what: str, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int], link: Link
) -> Callable[[], None]:
    """Exchange rows with other ranks, and skip the part of this rank in ``recv``. Return a function that waits."""
    outgoing = send.split([0 if r == link.rank else n for r, n in enumerate(send_counts)])
    incoming = list(recv.split(list(recv_counts)))
    incoming[link.rank] = recv[:0]
    return link.exchange(what, outgoing, incoming).wait


def _exchange_encoded(transfer: RowTransfer, store: _RowsToRead, vectors: Tensor, wire: Wire) -> Callable[[], None]:
    """Exchange rows with a codec. Rows of this rank are encoded as well, but copies of rows that it reads are not."""
    with wire.load.measure(len(transfer.received)):
        answer = encode(store.read(transfer.received), wire.options.forward_codec)
    handle = wire.link.all_to_all("rows", answer, transfer.recv_counts, transfer.send_counts)
    return lambda: _fill(vectors, transfer, decode(handle.wait(), wire.options.forward_codec))


def _fill(vectors: Tensor, transfer: RowTransfer, blocks: Tensor) -> None:
    """Write the row blocks of a transfer ``[n, cols]`` to their positions."""
    if transfer.column_blocks is None:
        vectors[transfer.first : transfer.first + len(blocks)] = blocks
    else:
        transfer.column_blocks.scatter(blocks, vectors)


def _send(transfer: RowTransfer, matrix: Tensor, first: int, free: int, wire: Wire) -> Callable[[], _ReceivedGradient]:
    """Send the local gradients of a transfer, rows ``first`` and following of a matrix.

    Return a function that waits. Received gradients are written to rows ``free`` and following. Gradients for this rank
    are not copied.
    """
    link = wire.link
    if link.size == 1:
        return lambda: _ReceivedGradient(matrix, torch.arange(first, first + len(transfer.slots), device=matrix.device))
    before, after = transfer.own(link.rank)
    outgoing = list(matrix[first : first + len(transfer.slots)].split(transfer.send_counts))
    outgoing[link.rank] = matrix[:0]
    others = _count_remote(transfer, wire)
    counts = [0 if r == link.rank else n for r, n in enumerate(transfer.recv_counts)]
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
    return lambda: (handle.wait(), _ReceivedGradient(matrix, rows))[1]


def _send_encoded(
    transfer: RowTransfer, matrix: Tensor, first: int, free: int, wire: Wire
) -> Callable[[], _ReceivedGradient]:
    """Send gradients with a codec, including gradients for this rank. They are received in a new matrix."""
    values = encode(matrix[first : first + len(transfer.slots)], wire.options.backward_codec)
    handle = wire.link.all_to_all("gradients", values, transfer.send_counts, transfer.recv_counts)

    def arrived() -> _ReceivedGradient:
        grad = decode(handle.wait(), wire.options.backward_codec)
        return _ReceivedGradient(grad, torch.arange(len(grad), device=grad.device))

    return arrived
