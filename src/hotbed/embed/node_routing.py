"""Combine rows inside nodes: a row crosses the network once per node, and so does the sum of its gradients.

Rank p of a node handles the rows of all owners that are rank p of their nodes. It collects the requests of the ranks of
its node, requests each distinct row once from its owner, and passes it on. In backward it adds the gradients of its
node's ranks along the tree over virtual ranks, and sends one sum per row to the owner. Together, the ranks of a node
are a node of this tree, so a sum has the same bits as in one hop.

For example, ranks 0, 1 and ranks 2, 3 are nodes. Ranks 0 and 1 need row 7 of rank 3, and rank 1 needs row 5 of rank 1::

    inside the node     ranks 0 and 1 request row 7 from rank 1 (local rank 1, as rank 3), rank 1 also row 5
    rank 1 groups       row 5 of rank 1, row 7 of rank 3        `RowTransfer.received` are positions: 1 │ 0 1
    between nodes       row 5 from itself, row 7 from rank 3
    backward            rank 1 adds the gradients of row 7 of ranks 0 and 1, and sends one sum to rank 3

So a lookup has two exchanges with equal parts: `Route.transfers` inside the node, and `Route.node_transfers` between
nodes. Both are `hotbed.embed.shard_routing.RowTransfer`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.embed.shard_routing import Counts, IdExchange, Locator, Route, RowTransfer, exchange_slots, make_route
from hotbed.ops import Backend, BagLayout, Occurrences


def make_node_route(
    bags: BagLayout, locator: Locator, ops: Backend, exchange: IdExchange, *, trained: bool
) -> Future[Route]:
    """Make a route, and if rows are combined inside nodes, add its transfers between nodes. All ranks must call this.

    For the parameters, see `hotbed.embed.shard_routing.make_route`.
    """
    first = make_route(bags, locator, ops, exchange, trained=trained)
    second = exchange.second
    if second is None:
        return first
    requests: list[_NodeRequests] = []

    def counts() -> Tensor:
        requests.extend(
            _combine([t for t in first.result(0).transfers if t.arena_type == number], most, second.link.size, ops)
            for number, most in enumerate(locator.most_slots)
        )
        return torch.cat([of_type.counts for of_type in requests], dim=1)

    def finish(own: Counts, received: Counts) -> Route:
        route, column = first.result(0), 0
        for arena_type, of_type in enumerate(requests):
            start = 0
            for copied in (False, True)[: of_type.counts.shape[1]]:
                send_counts = [of_node[column] for of_node in own]
                slots = of_type.slots[start : start + sum(send_counts)]
                route.node_transfers.append(RowTransfer(arena_type, copied, slots, None, send_counts, start, None))
                start, column = start + sum(send_counts), column + 1
        exchange_slots(route.node_transfers, received, second.link, trained=trained)
        return route

    return second.add(counts, finish)


class _NodeRequests(NamedTuple):
    """Distinct rows of one arena type that the ranks of a node request from the owners of one local rank.

    ``slots`` are sorted by owner, and followed by padding. Rows that are requested only by ranks with copies follow the
    others, because only their gradients are exchanged. ``counts [nodes, 1 or 2]`` has the numbers of both by node.
    """

    slots: Tensor
    counts: Tensor


def _combine(transfers: Sequence[RowTransfer], most_slots: int, nodes: int, ops: Backend) -> _NodeRequests:
    """Group the requests of a node's ranks, and replace `RowTransfer.received` by positions in the distinct rows.

    ``transfers`` are the transfer of requested rows and, with readers, the transfer of copied rows.
    """
    received = [transfer.received for transfer in transfers if transfer.recv_counts]
    keys = torch.cat(received)
    here = torch.arange(len(keys), device=keys.device)
    groups = ops.group(Occurrences(keys, here, None, limit=nodes * most_slots))
    rows = groups.rows
    if keys.device.type == "cpu":
        rows = rows[: int(groups.counts[0])]
    else:  # the host does not know the count, so padding is sorted to an additional, last destination
        rows = torch.where(here < groups.counts[0], rows, len(transfers) * nodes * most_slots)
    destination = torch.div(rows, max(most_slots, 1), rounding_mode="floor")
    group = ops.spread(groups, here[: len(rows)])
    if len(transfers) > 1:
        is_copy = torch.ones(len(rows), dtype=torch.bool, device=keys.device)
        is_copy.index_fill_(0, group[: len(received[0])], False)
        destination = torch.where(is_copy, destination + nodes, destination).clamp_(max=len(transfers) * nodes)
        destination, order = torch.sort(destination, stable=True)
        rows = rows[order]
        position = torch.empty_like(order)
        position[order] = here[: len(rows)]
        group = position[group]
    for transfer, positions in zip(transfers, group.split([len(r) for r in received]), strict=False):
        transfer.received = positions
    ends = torch.arange(len(transfers) * nodes + 1, device=keys.device)
    bounds = torch.searchsorted(destination, ends)
    return _NodeRequests(rows % max(most_slots, 1), bounds.diff().view(len(transfers), nodes).T)
