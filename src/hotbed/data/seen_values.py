"""Remember which of very many values were seen, in 16 MiB: `SeenValues`, a Bloom filter over 64-bit hashes.

A value that was added is always found. One that was not is found with the probability f that all of its 4 bits are set
by others: f = (share of bits that are set)⁴, 0.4 % after 10 million values. The positions are h₁ + i h₂ of the two
halves of the hash (Bloom, "Space/time trade-offs in hash coding with allowable errors", Communications of the ACM
13(7), 1970; Kirsch and Mitzenmacher, "Less hashing, same performance", ESA 2006).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hotbed.data.hashing import Hashes

_BITS = 27
_POSITIONS = 4
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)  # of each byte


class SeenValues:
    """A set of values that may take some for seen that are not."""

    def __init__(self) -> None:
        self._bytes = np.zeros(1 << (_BITS - 3), dtype=np.uint8)

    def add(self, hashes: Hashes) -> None:
        """Add values ``[n]`` by their hashes."""
        for byte, bit in _places(hashes):
            np.bitwise_or.at(self._bytes, byte, bit)

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Whether each of these values ``[n]`` was added, or is taken for one."""
        found = np.ones(len(hashes), dtype=np.bool_)
        for byte, bit in _places(hashes):
            found &= (self._bytes[byte] & bit) != 0
        return found

    @property
    def false_rate(self) -> float:
        """Probability that a value that was never added is taken for one that was."""
        return float(_ONES[self._bytes].sum(dtype=np.int64) / (8 * len(self._bytes))) ** _POSITIONS


def _places(hashes: Hashes) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    first, step = hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32) | np.uint64(1)
    for i in range(_POSITIONS):
        at = (first + np.uint64(i) * step) & np.uint64((1 << _BITS) - 1)
        yield (at >> np.uint64(3)).astype(np.int64), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)
