"""Define virtual ranks, and the binary tree along which their values are summed.

A *virtual rank* is a fixed slice of the global batch, by position. A process computes a block of consecutive virtual
ranks. Values of virtual ranks are summed along a binary tree: a node of level l has the ``2^l`` virtual ranks from a
multiple of ``2^l``, and its value is the sum of its left and its right half. A node with one half passes it on. The
tree does not depend on who computes which part of it, so sums have the same bits for every number of processes.

For example, 3 processes compute 4 virtual ranks: process 0 computes virtual rank 0, process 1 computes 1, and process 2
computes 2 and 3. All sums are ``(x₀ + x₁) + (x₂ + x₃)``, as with 1, 2 or 4 processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

Slices: TypeAlias = "tuple[int, ...] | None"
"""Number of samples of each virtual rank of a process. None means that each process is one virtual rank."""

MOST_IN_HOP = 8
"""Largest number of ranks that exchange in one hop of a sum, if they form further blocks."""


class VirtualRanks:
    """The blocks of ``total`` virtual ranks that ``size`` processes compute, seen from process ``rank``."""

    def __init__(self, rank: int, size: int, total: int | None = None) -> None:
        self.rank, self.size = rank, size
        self.total = size if total is None else total

    def block(self, rank: int) -> range:
        """Return the virtual ranks of a process."""
        return range(self.total * rank // self.size, self.total * (rank + 1) // self.size)

    @property
    def own(self) -> range:
        """The virtual ranks of this process."""
        return self.block(self.rank)

    @property
    def are_processes(self) -> bool:
        """Whether each process computes one virtual rank."""
        return self.total == self.size

    def share(self, samples: int) -> slice:
        """Return the slice of a global batch that this process computes."""
        return slice(samples * self.own.start // self.total, samples * self.own.stop // self.total)

    def slices(self, samples: int) -> Slices:
        """Return the `sizes` of a global batch, or None if each process is one virtual rank."""
        return None if self.are_processes else self.sizes(samples)

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each virtual rank of this process, of a global batch."""
        ends = [samples * v // self.total for v in range(self.own.start, self.own.stop + 1)]
        return tuple(stop - start for start, stop in pairwise(ends))


def tree_size(total: int) -> int:
    """Return the number of leaves of the tree over ``total`` virtual ranks: the next power of two."""
    return 1 << max(total - 1, 0).bit_length()


def subtrees(block: range) -> list[range]:
    """Divide a block of virtual ranks into the fewest nodes of the tree.

    >>> subtrees(range(2, 5))
    [range(2, 4), range(4, 5)]
    """
    found: list[range] = []
    start = block.start
    while start < block.stop:
        size = 1 << (block.stop - start).bit_length() - 1
        if start:
            size = min(size, start & -start)
        found.append(range(start, start + size))
        start += size
    return found


def tree_additions(leaves: Sequence[int]) -> list[tuple[int, int]]:
    """Return the additions of the tree for values of ascending ``leaves``, in order.

    Each pair ``(i, j)`` stands for ``values[i] += values[j]``. The sum is then in ``values[0]``. A value of a node
    counts as a value of the node's first leaf.

    >>> tree_additions([0, 1, 2, 3])
    [(0, 1), (2, 3), (0, 2)]
    """
    found: list[tuple[int, int]] = []
    waiting: list[int] = []  # sums of complete nodes, from left to right

    def add_last_two() -> None:
        last = waiting.pop()
        found.append((waiting[-1], last))

    for i, leaf in enumerate(leaves):
        # Nodes meet at the highest bit in which their leaves differ. Nodes that meet below this leaf are added first.
        while len(waiting) > 1 and leaves[waiting[-2]] ^ leaves[waiting[-1]] < leaves[waiting[-1]] ^ leaf:
            add_last_two()
        waiting.append(i)
    while len(waiting) > 1:
        add_last_two()
    return found


def hop_sizes(ranks: int, ranks_per_node: int | None = None) -> tuple[int, ...]:
    """Return the numbers of ranks that exchange in each hop of a sum over ranks.

    In the first hop, blocks of consecutive ranks add their values. In every later hop, the ranks at equal positions of
    several blocks do. All blocks are nodes of the tree, so a sum has the same bits in any number of hops. With sizes
    ``f₁, f₂, …``, a rank sends ``Σ (fᵢ − 1)`` messages, and hop i moves ``1 / (f₁ ⋯ fᵢ₋₁)`` of the data. So blocks that
    are whole nodes leave little data for the network. If ``ranks_per_node`` is unknown or not a power of two, 4 and 8
    consecutive ranks form blocks, because nodes often have 4 or 8.

    >>> hop_sizes(8), hop_sizes(64), hop_sizes(96, ranks_per_node=16)
    ((8,), (4, 2, 8), (16, 6))
    """
    if is_node_of_tree(ranks, ranks_per_node):
        assert ranks_per_node is not None
        return (ranks_per_node, *_small_hops(ranks // ranks_per_node))
    found: list[int] = []
    for most in (4, 2) if ranks > MOST_IN_HOP else ():
        size = min(most, ranks & -ranks)
        found += [size] * (size > 1)
        ranks //= size
    return (*found, *_small_hops(ranks))


def is_node_of_tree(ranks: int, ranks_per_node: int | None) -> bool:
    """Return whether there are several nodes with several ranks each, which are nodes of the tree, too."""
    return 1 < (ranks_per_node or 1) < ranks and (ranks_per_node or 1).bit_count() == 1


def nodes_are_subtrees(virtual: VirtualRanks, members: Sequence[int], ranks_per_node: int) -> bool:
    """Return whether ``members`` are consecutive ranks, and each of them and each node is one node of the tree.

    >>> nodes_are_subtrees(VirtualRanks(0, 12, 16), range(12), ranks_per_node=3)
    True
    >>> nodes_are_subtrees(VirtualRanks(0, 6, 8), range(6), ranks_per_node=2)
    False
    """
    if members[0] % ranks_per_node or list(members) != list(range(members[0], members[0] + len(members))):
        return False
    blocks = [virtual.block(member) for member in members]
    firsts, lasts = blocks[::ranks_per_node], blocks[ranks_per_node - 1 :: ranks_per_node]
    of_nodes = [range(first.start, last.stop) for first, last in zip(firsts, lasts, strict=False)]
    return all(len(subtrees(block)) == 1 for block in (*blocks, *of_nodes))


def _small_hops(blocks: int) -> tuple[int, ...]:
    """Return hops of at most `MOST_IN_HOP`, except that the last hop has an odd number of blocks."""
    found: list[int] = []
    while blocks > MOST_IN_HOP and blocks % 2 == 0:
        found.append(min(MOST_IN_HOP, blocks & -blocks))
        blocks //= found[-1]
    return (*found, *([blocks] if blocks > 1 else []))
