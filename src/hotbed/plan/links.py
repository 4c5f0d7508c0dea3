"""Estimate the cost of an exchange between ranks: seconds per byte, and the number of messages.

In *one hop* a rank sends a message to every other rank, and the links inside and between nodes work at the same time.
In *two hops* (``parallel.ranks_per_node``, `hotbed.comm.hierarchical`) it sends to the ``P`` ranks of its node first,
then to one rank on each of the ``K`` nodes. This takes fewer messages, but most bytes cross both links in turn, and are
copied. If rows are *combined* inside nodes (`hotbed.embed.node_routing`), a row crosses the network once per node.

Sums of dense gradients take the hops of `hotbed.virtual_ranks.hop_sizes`, without copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hotbed.config.parallel_memory import Layout
from hotbed.errors import PlanError
from hotbed.plan.hardware import Hardware
from hotbed.virtual_ranks import VirtualRanks, hop_sizes, nodes_are_subtrees, tree_size

LinkName = Literal["node link", "network"]

HOP_COPIES = 3
"""Copies in device memory of a two-hop exchange: packed by local rank, packed by node, unpacked (`NodeLink`)."""
COPIED_AT_ONCE = 128
"""Tensors that one torch kernel concatenates. Kernels that copy several tensors into several take half of this."""
SIZES = 1
"""Exchanges of sizes inside the node before a first hop."""
COMBINED_COPIES = 1
"""Copies in device memory of rows or gradients that are combined inside nodes: they are read once and written once."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links between the ranks of a group, and between replicas."""

    hardware: Hardware
    size: int  # ranks of a group
    replicas: int = 1  # groups
    layout: Layout = "groups"  # relation of neighbouring ranks
    ranks_per_node: int | None = None  # ranks of the first hop; None: one hop
    is_lossless: bool = True  # whether rows and gradients are exchanged without codecs

    def __post_init__(self) -> None:
        if self.in_two_hops and self.size % (self.ranks_per_node or 1):
            raise PlanError(
                f"parallel.ranks_per_node: got {self.ranks_per_node}, expected a divisor of the {self.size} ranks of "
                "a group"
            )

    @property
    def in_two_hops(self) -> bool:
        """Whether exchanges of a group take two hops."""
        return 1 < (self.ranks_per_node or 1) < self.size

    @property
    def messages(self) -> int:
        """Messages of a rank in an exchange of its group."""
        if not self.in_two_hops:
            return self.size - 1
        locals_, nodes = self._hops
        return (1 + SIZES) * (locals_ - 1) + nodes - 1

    @property
    def combines_rows(self) -> bool:
        """Whether rows are combined inside nodes, with the default number of virtual ranks.

        Averaged replicas have one virtual rank per rank of a group.
        """
        total = tree_size(self.size) if self.replicas == 1 else self.size
        return self.is_lossless and self.in_two_hops and _nodes_are_subtrees(self.size, total, self.ranks_per_node or 1)

    @property
    def messages_of_rows(self) -> int:
        """Messages of a rank in an exchange of ids, rows or gradients of rows."""
        return sum(self._hops) - 2 if self.combines_rows else self.messages

    @property
    def launches(self) -> int:
        """Copy kernels of an exchange: two concatenations, and copies into the tensors of all ranks."""
        return 4 * math.ceil(self.size / COPIED_AT_ONCE) if self.in_two_hops else 0

    def shares(self, among: Literal["shards", "replicas"], combined: float | None = None) -> dict[LinkName, float]:
        """Return the bytes on each link per exchanged byte, as in `byte_s`. In two hops they may exceed one."""
        parts = self._parts(among, combined)
        return {
            "node link": sum(factor * near for factor, near in parts),
            "network": sum(factor * (1 - near) for factor, near in parts),
        }

    def rates(self) -> dict[LinkName, float]:
        """Return the bytes/s of a rank on each link."""
        here = self.hardware
        return {"node link": here.node_link, "network": here.network * here.network_efficiency / here.oversubscription}

    def byte_s(self, among: Literal["shards", "replicas"], combined: float | None = None) -> float:
        """Return the seconds per exchanged byte.

        Both links work at the same time. Hops and copies follow each other. If rows are combined inside nodes,
        ``combined`` is the number of distinct rows of a node per row of its ranks.
        """
        rates = self.rates()
        parts, copies = self._parts(among, combined), HOP_COPIES if combined is None else COMBINED_COPIES
        seconds = sum(factor * max(near / rates["node link"], (1 - near) / rates["network"]) for factor, near in parts)
        return seconds + 2 * copies / self.hardware.stream * (len(parts) > 1)

    def slowest(self, among: Literal["shards", "replicas"]) -> LinkName:
        """Return the link that an exchange waits for longest."""
        rates = self.rates()
        return max(rates, key=lambda name: self.shares(among)[name] / rates[name])

    def near_share(self, among: Literal["shards", "replicas"]) -> float:
        """Return the share of a rank's peers (shards of its group, or replicas) on its own node."""
        return self._near(*self._spacing(among))

    @property
    def hops_of_sums(self) -> tuple[int, ...]:
        """Number of ranks that exchange in each hop of a sum over ranks."""
        return hop_sizes(self.size, self.ranks_per_node)

    @property
    def messages_of_sums(self) -> int:
        """Messages of a rank in all hops of a sum over ranks, in one direction."""
        return sum(size - 1 for size in self.hops_of_sums)

    def shares_of_sums(self) -> dict[LinkName, float]:
        """Return the bytes on each link per byte that is summed over ranks and returned to all of them."""
        return {
            "node link": sum(factor * near for factor, near in self._parts_of_sums()),
            "network": sum(factor * (1 - near) for factor, near in self._parts_of_sums()),
        }

    def byte_s_of_sums(self) -> float:
        """Return the seconds per byte that is summed over ranks and returned to all of them. Hops follow each other."""
        rates = self.rates()
        return sum(
            factor * max(near / rates["node link"], (1 - near) / rates["network"])
            for factor, near in self._parts_of_sums()
        )

    def slowest_of_sums(self) -> LinkName:
        """Return the link that a sum over ranks waits for longest."""
        rates, shares = self.rates(), self.shares_of_sums()
        return max(rates, key=lambda name: shares[name] / rates[name])

    @property
    def _hops(self) -> tuple[int, int]:
        locals_ = self.ranks_per_node or 1
        return locals_, self.size // locals_

    def _spacing(self, among: Literal["shards", "replicas"]) -> tuple[int, int]:
        """Return the distance of the numbers of exchanging ranks, and their count."""
        others, apart = (self.size, self.replicas) if among == "shards" else (self.replicas, self.size)
        return (1 if (self.layout == "groups") == (among == "shards") else apart), others

    def _near(self, apart: int, count: int) -> float:
        near = min(max(self.hardware.ranks_per_node // apart, 1), count)
        return (near - 1) / (count - 1) if count > 1 else 1.0

    def _parts(self, among: Literal["shards", "replicas"], combined: float | None = None) -> list[tuple[float, float]]:
        """Return for each hop the bytes per exchanged byte, and the share of them inside the node."""
        apart, count = self._spacing(among)
        if among == "replicas" or not self.in_two_hops:
            return [(1.0, self._near(apart, count))]
        locals_, nodes = self._hops
        whole = (count - 1) / count
        return [
            ((locals_ - 1) / locals_ / whole, self._near(apart, locals_)),
            ((nodes - 1) / nodes / whole * (combined or 1.0), self._near(apart * locals_, nodes)),
        ]

    def _parts_of_sums(self) -> list[tuple[float, float]]:
        """Return for each hop of a sum the bytes in both directions per byte, and the share of them inside the node."""
        found: list[tuple[float, float]] = []
        apart = 1
        for size in self.hops_of_sums:
            found.append((2 * (size - 1) / size / apart, self._near(apart, size)))
            apart *= size
        return found


@cache
def _nodes_are_subtrees(size: int, total: int, ranks_per_node: int) -> bool:
    return nodes_are_subtrees(VirtualRanks(0, size, total), range(size), ranks_per_node)
