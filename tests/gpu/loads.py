"""Loads of a stretch of code, by how many others they wait for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Loads:
    """Global loads of a stretch of code: ``levels[k]`` counts those that wait for k others, by bytes per thread."""

    levels: tuple[Counter[int], ...]

    @property
    def chain(self) -> int:
        """How many loads follow each other, at most."""
        return len(self.levels)

    @property
    def widths(self) -> dict[int, int]:
        """How many loads there are of each width in bytes."""
        return dict(sorted(sum(self.levels, Counter()).items()))

    @property
    def in_flight(self) -> int:
        """Most bytes that a thread waits for at once."""
        return max((sum(width * n for width, n in level.items()) for level in self.levels), default=0)
