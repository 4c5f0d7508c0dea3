"""Time calls, each with cold caches and in turn with the limit that it is compared with.

A machine is rarely at rest, so a call and its limit alternate: each repeat gives a ratio of two measurements that are
neighbours in time, and the median of the ratios is reported with the smallest and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hotbed.measure import machine_profile


class Way(NamedTuple):
    """One way to move the bytes of a limit; its seconds times ``scale`` count."""

    move: Callable[[], object]
    scale: float = 1.0


@dataclass(frozen=True)
class Limit:
    """What a call cannot beat: the fastest of some ways to move the same bytes with nothing else to do."""

    name: str
    ways: Sequence[Way]


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, of a call and of its limit."""

    seconds: Sequence[float]
    limit_seconds: Sequence[float]

    @property
    def median_s(self) -> float:
        """Median seconds of the call."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, float]:
        """Median, smallest and largest seconds; median seconds of the limit; share of it that is reached."""
        shares = [limit / s for s, limit in zip(self.seconds, self.limit_seconds, strict=True)]
        return {
            **spread("s", self.seconds),
            "limit_s": statistics.median(self.limit_seconds),
            **spread("share", shares),
        }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``median_NAME``, ``min_NAME``, ``max_NAME``."""
    return {f"median_{name}": statistics.median(values), f"min_{name}": min(values), f"max_{name}": max(values)}


class Meter(machine_profile.Meter):
    """Times calls in turn with their limits."""

    def compare(self, call: Callable[[], object], limit: Limit) -> Timing:
        """Time a call and its limit in turn."""
        pairs = [(self.seconds(call), self.limit_seconds(limit)) for _ in range(1 + self.repeats)][1:]
        return Timing([s for s, _ in pairs], [s for _, s in pairs])

    def limit_seconds(self, limit: Limit) -> float:
        """Seconds of the fastest way."""
        return min(self.seconds(way.move) * way.scale for way in limit.ways)
