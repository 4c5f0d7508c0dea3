"""Time calls with cold caches, each in turn with its limit.

A call and its limit alternate, because a machine is rarely idle: each ratio is of two measurements that are neighbors
in time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hotbed.measure import machine_profile


class Way(NamedTuple):
    """One way to move the bytes of a limit. Its seconds are multiplied by ``scale``."""

    move: Callable[[], object]
    scale: float = 1.0


@dataclass(frozen=True)
class Limit:
    """The fastest of some ways to move the bytes of a call and to do nothing else."""

    name: str
    ways: Sequence[Way]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"median_{name}": statistics.median(values), f"min_{name}": min(values), f"max_{name}": max(values)}


class Meter(machine_profile.Meter):
    """Times calls in turn with their limits."""

    def compare(self, call: Callable[[], object], limit: Limit) -> dict[str, float]:
        """Time a call and its limit in turn, and return their seconds and the share of the limit that is reached."""
        pairs = [(self.seconds(call), self.limit_seconds(limit)) for _ in range(1 + self.repeats)][1:]
        limits = {"limit_s": statistics.median(of_limit for _, of_limit in pairs)}
        shares = [of_limit / s for s, of_limit in pairs]
        return {**spread("s", [s for s, _ in pairs]), **limits, **spread("share", shares)}

    def limit_seconds(self, limit: Limit) -> float:
        return min(self.seconds(way.move) * way.scale for way in limit.ways)
