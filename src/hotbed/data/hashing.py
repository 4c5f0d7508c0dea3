"""Hash ids and strings to table rows. Results are the same in every run, process and release.

- An integer, as 64 bits x: ``h = mix(x)``.
- A string, as UTF-8 bytes padded with zeros to 8-byte little-endian words w₀, w₁, …: ``h = mix(length)``, then
  ``h = mix(h ^ w)`` for each word.
- The row: ``1 + h mod (rows − 1)``. Row 0 is for missing values.

``mix`` is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
It first adds SplitMix64's increment, so that 0 is not a fixed point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
HASH = (
    "row = 1 + h mod (rows - 1); row 0 is null. Integer, as 64 bits x: h = mix(x). Text, as UTF-8 in little-endian "
    "words of 8 bytes, the last padded with zeros: h = mix(length in bytes), then h = mix(h ^ word) for each word. "
    "mix(x), modulo 2^64: x += 0x9E3779B97F4A7C15; x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9; "
    "x = (x ^ x >> 27) * 0x94D049BB133111EB; x ^= x >> 31"
)
"""Description of the hash in one paragraph, for programs that compute it without hotbed."""


def mix(x: Hashes) -> Hashes:
    """Apply a bijection to 64-bit words ``[n]``. Changing one input bit changes about half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hash_integers(values: NDArray[Any]) -> Hashes:
    """Hash integers ``[n]`` of any width. Equal numbers have equal hashes in all widths."""
    return mix(values if values.dtype == np.uint64 else values.astype(np.int64).view(np.uint64))


def hash_strings(offsets: NDArray[Any], data: NDArray[np.uint8]) -> Hashes:
    """Hash byte strings ``[n]``. String i is ``data[offsets[i] : offsets[i + 1]]``."""
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    h = mix(lengths.astype(np.uint64))
    padded = np.concatenate([data, np.zeros(8, dtype=np.uint8)])
    words = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))  # the 8 bytes that begin at each byte
    active = np.flatnonzero(lengths > 0)  # strings that have a word at byte ``at``
    at = 0
    while len(active):  # one iteration per word of the longest string
        word = words[starts[active] + at]
        beyond = np.maximum(at + 8 - lengths[active], 0).astype(np.uint64) * np.uint64(8)
        h[active] = mix(h[active] ^ (word & (np.uint64(0xFFFFFFFFFFFFFFFF) >> beyond)))
        at += 8
        active = active[lengths[active] > at]
    return h


def hashes_to_rows(hashes: Hashes, rows: int) -> NDArray[np.int64]:
    """Return the table rows ``1 … rows − 1`` of hashes ``[n]``."""
    return (np.uint64(1) + hashes % np.uint64(rows - 1)).astype(np.int64)
