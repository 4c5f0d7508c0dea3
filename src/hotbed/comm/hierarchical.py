"""Exchange tensors in several hops, e.g. inside nodes, then between nodes. This suits many nodes.

In a `NodeLink`, a tensor goes first to the rank on the same node with the local rank of the receiver, and from there
to the receiver. So each rank exchanges with the ranks of its node, and with one rank of every other node. The bytes
between nodes stay equal, but they travel in fewer, larger messages. For example, the nodes are ranks 0, 1 and ranks
2, 3. A tensor from rank 0 to rank 3 (local rank 1) goes to rank 1 (local rank 1 of this node), together with the
tensor for rank 1. Then rank 1 sends it to rank 3, together with its own tensor for rank 3.

Rows and their gradients need not be forwarded. If `NodeLink.combines_rows`, a row crosses the network once per node,
and its gradients are added inside the node (`hotbed.embed.node_routing`).

Sums over ranks take the hops of `hops_of_sums`, with or without a `NodeLink`. There, each hop leaves a part of the data
to the next hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hotbed.comm.collectives import Handle, Link, Sizes, Tensors
from hotbed.errors import CommError
from hotbed.torch_private import copy_all_
from hotbed.virtual_ranks import hop_sizes, is_node_of_tree


class NodeLink(Link):
    """A link with two-hop exchanges.

    Each ``ranks_per_node`` consecutive ranks form a node. ``original`` is the link that this link is a clone of. The
    process group of ``whole`` is used for broadcasts, and for sums if ``ranks_per_node`` is not a power of two.
    """

    def __init__(
        self, whole: Link, ranks_per_node: int, original: NodeLink | None = None, *, combines_rows: bool = False
    ) -> None:
        super().__init__(
            whole.group,
            whole.timeout,
            gpu_group=whole.gpu_group,
            parent=whole,
            names=whole._names,
            all_groups=whole._all_groups,
        )
        if ranks_per_node < 1 or self.size % ranks_per_node:
            raise CommError(
                f"ranks_per_node: got {ranks_per_node}, expected a divisor of {self.size} ranks. Start an equal number "
                "of processes on every node"
            )
        self.whole, self.ranks_per_node = whole, ranks_per_node
        self.combines_rows = combines_rows
        """Whether a row crosses the network once per node, and its gradients are added inside nodes."""
        self.sent_bytes = whole.sent_bytes
        everyone = range(self.size)
        inside = between = None
        if original is not None and not original.overlaps:
            inside, between = original.inside.gpu_group, original.between.gpu_group
        self.inside = self._connect([everyone[n : n + ranks_per_node] for n in everyone[::ranks_per_node]], inside)
        """Link between the ranks of this rank's node."""
        self.between = self._connect([everyone[i::ranks_per_node] for i in range(ranks_per_node)], between)
        """Link between the ranks with this local rank on all nodes."""

    def _connect(self, parts: Sequence[Sequence[int]], gpu_group: dist.ProcessGroup | None) -> Link:
        """Return the link of this rank's part. All processes create the groups of all parts in the same order."""
        groups = {
            tuple(ranks): [self._new_group([ranks[r] for r in part]) for part in parts] for ranks in self._all_groups
        }
        (mine,) = (i for i, part in enumerate(parts) if self.rank in part)
        group = groups[tuple(dist.get_process_group_ranks(self.group))][mine]
        assert isinstance(group, dist.ProcessGroup)
        link = Link(group, self.timeout, gpu_group=gpu_group, parent=self, names=[self._names[r] for r in parts[mine]])
        link.sent_bytes = self.sent_bytes
        return link

    @override
    def clone(self) -> NodeLink:
        return NodeLink(super().clone(), self.ranks_per_node, self, combines_rows=self.combines_rows)

    @override
    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        nodes, local_ranks = range(self.between.size), range(self.inside.size)
        device = outgoing[0].device
        if nbytes is None:
            sizes = torch.tensor([t.nbytes for t in outgoing], device=device).view(len(nodes), len(local_ranks)).T
            ones = [1] * len(local_ranks)
            forwarded = self.inside.all_to_all(f"sizes of {what}", sizes.contiguous(), ones, ones).wait().tolist()
        else:
            mine, first_of_node = self.inside.rank, self.rank - self.inside.rank
            forwarded = [[nbytes(first_of_node + p, n * len(local_ranks) + mine) for n in nodes] for p in local_ranks]
        first = [torch.empty(sum(of_nodes), dtype=torch.uint8, device=device) for of_nodes in forwarded]
        to_local = [sum(outgoing[n * len(local_ranks) + p].nbytes for n in nodes) for p in local_ranks]
        packed = _bytes([outgoing[n * len(local_ranks) + p] for p in local_ranks for n in nodes])
        self.inside.exchange(what, packed.split(to_local), first).wait()
        received = [buffer.split(of_nodes) for buffer, of_nodes in zip(first, forwarded, strict=True)]
        to_node = [sum(of_local[n] for of_local in forwarded) for n in nodes]
        packed = torch.cat([received[p][n] for n in nodes for p in local_ranks])
        from_each = [tensor.nbytes for tensor in incoming]
        from_node = [sum(from_each[n * len(local_ranks) : (n + 1) * len(local_ranks)]) for n in nodes]
        second = torch.empty(sum(from_each), dtype=torch.uint8, device=device)
        arrived = self.between.exchange(what, packed.split(to_node), second.split(from_node))

        def unpack() -> None:
            arrived.wait()
            values = zip(second.split(from_each), incoming, strict=True)
            found = [v.view(t.dtype).view(t.shape) for v, t in values]
            copy_all_(incoming, found)

        return Handle(unpack)


def make_hierarchical(link: Link, ranks_per_node: int | None, *, combines_rows: bool = False) -> Link:
    """Return a link with two-hop exchanges if there are several nodes with several ranks each."""
    one_hop = ranks_per_node in (None, 1, link.size)
    return link if one_hop else NodeLink(link, ranks_per_node, combines_rows=combines_rows)


def hops_of_rows(link: Link) -> tuple[Link, ...]:
    """Return the links inside nodes and between nodes if rows are combined inside nodes, otherwise the link itself."""
    return (link.inside, link.between) if isinstance(link, NodeLink) and link.combines_rows else (link,)


@dataclass(frozen=True)
class Hop:
    """Exchanges of a rank with some ranks of a link, which include itself."""

    link: Link
    peers: range

    @property
    def position(self) -> int:
        """Position of this rank among the peers."""
        return self.peers.index(self.link.rank)

    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors) -> None:
        """Send one tensor to each peer, receive one from it, and wait. See `Link.exchange`."""
        if len(self.peers) < self.link.size:
            outgoing, incoming = self._for_all(outgoing), self._for_all(incoming)
        self.link.exchange(what, outgoing, incoming).wait()

    def _for_all(self, tensors: Tensors) -> Tensors:
        """Return tensors for all ranks of the link. They are empty for other ranks than the peers, and not sent."""
        found = [tensors[0][:0]] * self.link.size
        for peer, tensor in zip(self.peers, tensors, strict=True):
            found[peer] = tensor
        return found


def hops_of_sums(link: Link) -> list[Hop]:
    """Return the hops in which the ranks of a link add values along the tree (see `hop_sizes`).

    The peers of each hop are ranks of its link. Their distance is the number of ranks in a block of the hops before, so
    their values are nodes of the tree, and `hotbed.virtual_ranks.tree_additions` of ``peers`` adds them.
    """
    if not isinstance(link, NodeLink):
        return _hops_of(link, hop_sizes(link.size))
    sizes = hop_sizes(link.size, link.ranks_per_node)
    if not is_node_of_tree(link.size, link.ranks_per_node):
        return _hops_of(link.whole, sizes)
    return _hops_of(link.inside, sizes[:1]) + _hops_of(link.between, sizes[1:])


def _hops_of(link: Link, sizes: Sequence[int]) -> list[Hop]:
    found: list[Hop] = []
    apart = 1
    for size in sizes:
        first = link.rank - link.rank % (apart * size) + link.rank % apart
        found.append(Hop(link, range(first, first + apart * size, apart)))
        apart *= size
    return found


def messages_per_sum(link: Link) -> int:
    """Return the number of messages that a rank sends in all hops of a sum, in one direction."""
    return sum(len(hop.peers) - 1 for hop in hops_of_sums(link))


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of tensors of one dtype."""
    return torch.cat([t.reshape(-1) for t in tensors]).view(torch.uint8)
