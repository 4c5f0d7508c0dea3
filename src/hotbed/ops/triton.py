"""Gather the Triton backend: `hotbed.ops.reference`'s operations on CUDA tensors, or slowly in Triton's interpreter."""

from hotbed.ops.triton_cache import cache_find, cache_read, cache_take, cache_use, cache_write
from hotbed.ops.triton_dense import interaction, interaction_backward
from hotbed.ops.triton_group import group, occurrences, spread
from hotbed.ops.triton_lookup import gather, lookup, weight_gradient
from hotbed.ops.triton_rows import initial_values_
from hotbed.ops.triton_update import segment_sum, square_blocks, update

NAME = "triton"
TAKES_STRIDED_ROWS = False

__all__ = [
    "NAME",
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
