"""Define the poolings: how the rows of a bag become one vector.

A pooling divides the sum of a bag's rows by nothing, or by a function of the number of its ids. A new one is a name, a
code and a divisor here, and the same divisor in `ops.cpu_lookup.divisor` and `ops.triton_lookup.divisors`; gradients,
exchanges and exports use these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Pooling = Literal["sum", "mean", "none"]
NO_DIVISOR, MEAN = 0, 1
POOLING_CODE: dict[Pooling, int] = {"sum": NO_DIVISOR, "mean": MEAN, "none": NO_DIVISOR}
"""By what the sum is divided, as kernels take it."""
POOLED: tuple[Pooling, ...] = tuple(mode for mode in get_args(Pooling) if mode != "none")
"""Poolings that give a sample one vector; the others give a vector per id."""


def divisors(pooling: Tensor | int, lengths: Tensor) -> Tensor:
    """Compute the float32 divisors of the sums of bags of these lengths ``[n]``; 1 for empty bags.

    ``pooling`` is the `POOLING_CODE` of all bags, or of each ``[n]``.
    """
    codes = lengths.new_full(lengths.shape, pooling) if isinstance(pooling, int) else pooling
    return lengths.clamp(min=1).where(codes == MEAN, 1).float()
