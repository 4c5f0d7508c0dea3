"""Sum non-negative float32 values without rounding, so that the sum does not depend on their order.

A float32 is an integer of 24 bits times a power of two. The integers of each power are added as int64. For example,
``[1.5, 1.5, 2 ** -140]`` is 2 · 12,582,912 · 2^-23 and 8,388,608 · 2^-163. Sums of several ranks are added in the same
way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 24
_LEAST = -148
"""Exponent of the smallest float32, 2^-149, in `torch.frexp`."""
_BINS = 128 - _LEAST + 1
SIZE = _BINS + 2
"""Length of a sum: an integer per exponent, the number of infinite values, and the number of NaN values."""


def no_sums(device: torch.device) -> Tensor:
    """Return the sum of no values, ``[SIZE]`` int64."""
    return torch.zeros(SIZE, dtype=torch.int64, device=device)


def sums_of(values: Tensor) -> Tensor:
    """Sum float32 values of any shape. Return ``[SIZE]`` int64, exact for up to 2^39 values."""
    values = values.flatten()
    finite = torch.isfinite(values)
    mantissas, exponents = torch.frexp(torch.where(finite, values, 0.0))
    sums = no_sums(values.device)
    sums.index_add_(0, exponents.long() - _LEAST, (mantissas * 2.0**_BITS).long())
    sums[_BINS] = torch.isinf(values).sum()
    sums[_BINS + 1] = torch.isnan(values).sum()
    return sums


def float_of(sums: Sequence[int]) -> float:
    """Round a sum to the nearest float64. Return NaN if any value was NaN, or infinity if any was infinite."""
    if sums[_BINS + 1]:
        return math.nan
    if sums[_BINS]:
        return math.inf
    return sum(integer << i for i, integer in enumerate(sums[:_BINS])) / (1 << (_BITS - _LEAST))
