"""Say what an exchange between ranks costs: seconds per byte, and messages that each have a fixed cost.

In *one hop* a rank sends a message to every other one, and the links inside and between nodes carry at once. In *two*
(``parallel.ranks_per_node``, `hotbed.hops`) it sends to the ``P`` ranks of its node first, then to one rank on each of
the ``K`` nodes: fewer messages, but nearly all bytes go over both links, one after the other, and are copied between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hotbed.config.parallel_memory import Layout
from hotbed.errors import PlanError
from hotbed.plan.hardware import Hardware

LinkName = Literal["node link", "network"]

HOP_COPIES = 3
"""Copies in the device's memory of what goes in two hops: joined by place, joined by node, unpacked (`hotbed.hops`)."""
COPIED_AT_ONCE = 128
"""Tensors that a kernel of torch joins; of copies from several tensors into several, half as many."""
SIZES = 1
"""Exchanges inside the node before those of a first hop: of sizes."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What ranks of a group, and replicas, send each other over."""

    hardware: Hardware
    size: int  # ranks of a group
    replicas: int = 1  # groups
    layout: Layout = "groups"  # what neighbouring ranks are
    ranks_per_node: int | None = None  # ranks of a first hop; None: one hop

    def __post_init__(self) -> None:
        if self.in_two_hops and self.size % (self.ranks_per_node or 1):
            raise PlanError(
                f"parallel.ranks_per_node is {self.ranks_per_node}, must divide the {self.size} ranks of a group"
            )

    @property
    def in_two_hops(self) -> bool:
        """Whether exchanges of a group take two hops."""
        return 1 < (self.ranks_per_node or 1) < self.size

    @property
    def messages(self) -> int:
        """Messages that a rank sends in an exchange of its group."""
        return self.messages_of_known_sizes + (SIZES * (self._hops[0] - 1) if self.in_two_hops else 0)

    @property
    def messages_of_known_sizes(self) -> int:
        """The same where every rank knows the sizes of all."""
        if not self.in_two_hops:
            return self.size - 1
        places, nodes = self._hops
        return places - 1 + nodes - 1

    @property
    def launches(self) -> int:
        """Kernels that copy in an exchange: two that join, and copies into the tensors of all ranks."""
        return 4 * math.ceil(self.size / COPIED_AT_ONCE) if self.in_two_hops else 0

    def shares(self, among: Literal["shards", "replicas"]) -> dict[LinkName, float]:
        """Bytes that each link carries per byte that is exchanged; more than one in all where it goes in two hops."""
        return {
            "node link": sum(factor * near for factor, near in self._parts(among)),
            "network": sum(factor * (1 - near) for factor, near in self._parts(among)),
        }

    def rates(self) -> dict[LinkName, float]:
        """Bytes/s that a rank sends over each link."""
        here = self.hardware
        return {"node link": here.node_link, "network": here.network * here.network_efficiency / here.oversubscription}

    def byte_s(self, among: Literal["shards", "replicas"]) -> float:
        """Seconds per byte that is exchanged: both links carry at once, hops and copies follow each other."""
        rates = self.rates()
        parts = self._parts(among)
        seconds = sum(factor * max(near / rates["node link"], (1 - near) / rates["network"]) for factor, near in parts)
        return seconds + 2 * HOP_COPIES / self.hardware.stream * (len(parts) > 1)

    def slowest(self, among: Literal["shards", "replicas"]) -> LinkName:
        """The link that most of an exchange waits for."""
        rates = self.rates()
        return max(rates, key=lambda name: self.shares(among)[name] / rates[name])

    def near_share(self, among: Literal["shards", "replicas"]) -> float:
        """Which share of the others that a rank exchanges with is on its node: of its group, or of its replicas."""
        return self._near(*self._line(among))

    @property
    def _hops(self) -> tuple[int, int]:
        places = self.ranks_per_node or 1
        return places, self.size // places

    def _line(self, among: Literal["shards", "replicas"]) -> tuple[int, int]:
        """By how much ranks that exchange are numbered apart, and how many they are."""
        others, apart = (self.size, self.replicas) if among == "shards" else (self.replicas, self.size)
        return (1 if (self.layout == "groups") == (among == "shards") else apart), others

    def _near(self, apart: int, count: int) -> float:
        near = min(max(self.hardware.ranks_per_node // apart, 1), count)
        return (near - 1) / (count - 1) if count > 1 else 1.0

    def _parts(self, among: Literal["shards", "replicas"]) -> list[tuple[float, float]]:
        """Of each hop, bytes per byte that is exchanged, and which share of them stays on the node."""
        apart, count = self._line(among)
        if among == "replicas" or not self.in_two_hops:
            return [(1.0, self._near(apart, count))]
        places, nodes = self._hops
        whole = (count - 1) / count
        return [
            ((places - 1) / places / whole, self._near(apart, places)),
            ((nodes - 1) / nodes / whole, self._near(apart * places, nodes)),
        ]
