"""Export the Triton backend: the operations of `hotbed.ops.reference` on CUDA tensors.

Triton's interpreter can run it slowly on CPU tensors.
"""

from hotbed.ops.triton_cache import cache_find, cache_read, cache_take, cache_use, cache_write
from hotbed.ops.triton_dense import interaction, interaction_backward
from hotbed.ops.triton_group import group, occurrences, spread
from hotbed.ops.triton_lookup import gather, lookup, weight_gradient
from hotbed.ops.triton_rows import initial_values_
from hotbed.ops.triton_tree import add_along_tree
from hotbed.ops.triton_update import segment_sum, square_blocks, update

NAME = "triton"
TAKES_STRIDED_ROWS = False
SUMS_LEAVES = False

__all__ = [
    "NAME",
    "SUMS_LEAVES",
    "TAKES_STRIDED_ROWS",
    "add_along_tree",
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
