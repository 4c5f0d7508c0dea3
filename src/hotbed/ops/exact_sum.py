"""Sum float32 values that are not negative without rounding, so that the sum does not depend on their order.

A float32 is an integer of 24 bits times a power of two. The integers of each power are added as int64: ``[1.5, 1.5,
2 ** -140]`` is 2 · 12,582,912 · 2^-23 and 8,388,608 · 2^-163. Sums of several ranks are added likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 24
_LEAST = -148
"""Exponent of the smallest float32, 2^-149, as `torch.frexp` has it."""
_BINS = 128 - _LEAST + 1
SIZE = _BINS + 2
"""Numbers of a sum: integers by exponent, and how many values were infinite and NaN."""


def no_sums(device: torch.device) -> Tensor:
    """Return the sum of nothing ``[SIZE]`` int64."""
    return torch.zeros(SIZE, dtype=torch.int64, device=device)


def sums_of(values: Tensor) -> Tensor:
    """Sum float32 values of any shape: ``[SIZE]`` int64. Sums are exact for up to 2^39 values."""
    values = values.flatten()
    finite = torch.isfinite(values)
    mantissas, exponents = torch.frexp(torch.where(finite, values, 0.0))
    sums = no_sums(values.device)
    sums.index_add_(0, exponents.long() - _LEAST, (mantissas * 2.0**_BITS).long())
    sums[_BINS] = torch.isinf(values).sum()
    sums[_BINS + 1] = torch.isnan(values).sum()
    return sums


def float_of(sums: Sequence[int]) -> float:
    """Round a sum to the nearest float64; infinity and NaN are what any of the values was."""
    if sums[_BINS + 1]:
        return math.nan
    if sums[_BINS]:
        return math.inf
    return sum(integer << i for i, integer in enumerate(sums[:_BINS])) / (1 << (_BITS - _LEAST))
