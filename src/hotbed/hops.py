"""Exchange tensors in two hops, inside nodes and then between them: for many nodes of several ranks each.

What a rank has for another goes first to the rank of its own node that has the receiver's place there, and from it to
the receiver. So a rank exchanges with the ranks of its node and with one rank of every other node: as many bytes cross
between nodes, in fewer and larger messages. Nodes of ranks 0, 1 and 2, 3: what rank 0 has for rank 3 (place 1 of its
node) goes to rank 1 (place 1 of the own node), together with what it has for rank 1, and from rank 1 to rank 3 together
with what rank 1 itself has for rank 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hotbed.comm import Handle, Link, Sizes, Tensors
from hotbed.errors import CommError
from hotbed.torch_private import copy_all_


class NodeLink(Link):
    """A link whose exchanges take two hops; the process group of ``whole`` is used for broadcasts only.

    Each ``ranks_per_node`` consecutive ranks share a node. ``like`` is the link that this one is a clone of.
    """

    def __init__(self, whole: Link, ranks_per_node: int, like: NodeLink | None = None) -> None:
        super().__init__(
            whole.group,
            whole.timeout,
            gpu_group=whole.gpu_group,
            of=whole,
            names=whole._names,
            beside=whole._beside,
        )
        if ranks_per_node < 1 or self.size % ranks_per_node:
            raise CommError(
                f"ranks_per_node is {ranks_per_node}, must divide the {self.size} ranks; start as many processes on "
                "every node"
            )
        self.ranks_per_node = ranks_per_node
        everyone = range(self.size)
        inside = between = None
        if like is not None and not like.overlaps:
            inside, between = like._inside.gpu_group, like._between.gpu_group
        self._inside = self._line([everyone[n : n + ranks_per_node] for n in everyone[::ranks_per_node]], inside)
        self._between = self._line([everyone[i::ranks_per_node] for i in range(ranks_per_node)], between)

    def _line(self, lines: Sequence[Sequence[int]], gpu_group: dist.ProcessGroup | None) -> Link:
        """Make the link of the line of ranks that has this one; all processes make all of them, in one order."""
        groups = {tuple(ranks): [self._new_group([ranks[r] for r in line]) for line in lines] for ranks in self._beside}
        (mine,) = (i for i, line in enumerate(lines) if self.rank in line)
        group = groups[tuple(dist.get_process_group_ranks(self.group))][mine]
        assert isinstance(group, dist.ProcessGroup)
        link = Link(group, self.timeout, gpu_group=gpu_group, of=self, names=[self._names[r] for r in lines[mine]])
        link.sent_bytes = self.sent_bytes
        return link

    @override
    def clone(self) -> NodeLink:
        return NodeLink(super().clone(), self.ranks_per_node, self)

    @override
    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        nodes, places = range(self._between.size), range(self._inside.size)
        device = outgoing[0].device
        if nbytes is None:
            sizes = torch.tensor([t.nbytes for t in outgoing], device=device).view(len(nodes), len(places)).T
            ones = [1] * len(places)
            passed_on = self._inside.all_to_all(f"sizes of {what}", sizes.contiguous(), ones, ones).wait().tolist()
        else:
            mine, first_of_node = self._inside.rank, self.rank - self._inside.rank
            passed_on = [[nbytes(first_of_node + p, n * len(places) + mine) for n in nodes] for p in places]
        first = [torch.empty(sum(of_nodes), dtype=torch.uint8, device=device) for of_nodes in passed_on]
        to_place = [sum(outgoing[n * len(places) + p].nbytes for n in nodes) for p in places]
        joined = _bytes([outgoing[n * len(places) + p] for p in places for n in nodes])
        self._inside.exchange(what, joined.split(to_place), first).wait()
        received = [buffer.split(of_nodes) for buffer, of_nodes in zip(first, passed_on, strict=True)]
        to_node = [sum(of_place[n] for of_place in passed_on) for n in nodes]
        joined = torch.cat([received[p][n] for n in nodes for p in places])
        from_each = [tensor.nbytes for tensor in incoming]
        from_node = [sum(from_each[n * len(places) : (n + 1) * len(places)]) for n in nodes]
        second = torch.empty(sum(from_each), dtype=torch.uint8, device=device)
        arrived = self._between.exchange(what, joined.split(to_node), second.split(from_node))

        def unpack() -> None:
            arrived.wait()
            values = zip(second.split(from_each), incoming, strict=True)
            found = [v.view(t.dtype).view(t.shape) for v, t in values]
            copy_all_(incoming, found)

        return Handle(unpack)


def in_hops(link: Link, ranks_per_node: int | None) -> Link:
    """Make a link's exchanges take two hops, where nodes are said and one would not do."""
    return link if ranks_per_node in (None, 1, link.size) else NodeLink(link, ranks_per_node)


def messages_per_exchange(link: Link) -> int:
    """Count the messages that a rank sends in an exchange whose sizes all ranks know."""
    return link._inside.size + link._between.size - 2 if isinstance(link, NodeLink) else link.size - 1


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of one dtype, as bytes."""
    return torch.cat([t.reshape(-1) for t in tensors]).view(torch.uint8)
