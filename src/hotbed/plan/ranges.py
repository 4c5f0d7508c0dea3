"""Arithmetic of strided ranges."""

from __future__ import annotations

import math


def first_common(a: range, b: range) -> int | None:
    """Smallest number that two rising ranges have in common, or None."""
    g = math.gcd(a.step, b.step)
    if (b.start - a.start) % g:
        return None
    # a.start + i · a.step ≡ b.start modulo b.step
    modulus = b.step // g
    i = (b.start - a.start) // g * pow(a.step // g, -1, modulus) % modulus
    period = a.step * modulus
    found = a.start + i * a.step
    low = max(a.start, b.start)
    if found < low:
        found += -(-(low - found) // period) * period
    return found if found in a and found in b else None


def count_common(a: range, b: range) -> int:
    """How many numbers two rising ranges have in common."""
    first = first_common(a, b)
    if first is None:
        return 0
    return (min(a[-1], b[-1]) - first) // math.lcm(a.step, b.step) + 1


def common_places(a: range, b: range) -> range:
    """Where in ``a`` the numbers are that two rising ranges have in common."""
    first = first_common(a, b)
    if first is None:
        return range(0)
    start, step = (first - a.start) // a.step, math.lcm(a.step, b.step) // a.step
    return range(start, start + step * count_common(a, b), step)
