"""Export the Numba backend: the operations of `hotbed.ops.reference` on CPU tensors."""

from hotbed.ops.cpu_cache import cache_find, cache_read, cache_take, cache_use, cache_write
from hotbed.ops.cpu_dense import interaction, interaction_backward
from hotbed.ops.cpu_group import group, occurrences, spread
from hotbed.ops.cpu_lookup import gather, lookup, weight_gradient
from hotbed.ops.cpu_rows import initial_values_
from hotbed.ops.cpu_update import segment_sum, square_blocks, update

NAME = "cpu"
TAKES_STRIDED_ROWS = True
SUMS_LEAVES = True

__all__ = [
    "NAME",
    "SUMS_LEAVES",
    "TAKES_STRIDED_ROWS",
    "cache_find",
    "cache_read",
    "cache_take",
    "cache_use",
    "cache_write",
    "gather",
    "group",
    "initial_values_",
    "interaction",
    "interaction_backward",
    "lookup",
    "occurrences",
    "segment_sum",
    "spread",
    "square_blocks",
    "update",
    "weight_gradient",
]
