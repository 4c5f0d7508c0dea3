"""Know what PyTorch's operations are on a CUDA device: how many kernels, which wait, which compute nothing."""

from __future__ import annotations

from typing import Any

import torch

COMPUTES_NOTHING = frozenset(
    "view as_strided slice select unsqueeze squeeze detach alias expand t transpose permute _unsafe_view unbind split "
    "split_with_sizes _reshape_alias diagonal unfold lift_fresh lift chunk narrow record_stream set_ resize_ "
    "is_same_size set_data _local_scalar_dense".split()
)
"""They change how memory is looked at, not memory."""

ALLOCATES = frozenset("empty empty_like new_empty empty_strided new_empty_strided".split())
"""They allocate, and launch nothing."""

WAITS = frozenset(
    "nonzero masked_select unique_dim _unique2 unique_consecutive bincount repeat_interleave nonzero_numpy equal "
    "is_nonzero _unique".split()
)
"""The size of the result is read by the host."""

SEVERAL = {
    "binary_cross_entropy_with_logits": 5,  # rsub, mul, log_sigmoid, sub, sum (Loss.cpp)
    "cumsum": 2,  # CUB's scan: initialise its tile states, scan
    "aminmax": 1,
    "all": 1,
    "any": 1,
    "mean": 1,
    "zeros": 1,
    "zeros_like": 1,
    "ones": 1,
    "ones_like": 1,
    "full": 1,
    "full_like": 1,
    "new_zeros": 1,
    "new_ones": 1,
    "new_full": 1,
    "arange": 1,
    "clone": 1,
    "cat": 1,
    "stack": 1,
    "linear": 1,
}


def kernels_of(func: Any, name: str, args: Any) -> int:
    """Count the kernels of an operation on a CUDA device.

    One for most. A stable sort of n keys is CUB's radix sort: indices are filled in, one histogram, one scan, a pass for
    each 8 bits of the keys. ``_foreach_`` operations take 110 tensors a launch.
    """
    if name == "sort":
        return 3 + args[0].element_size()
    if name == "argsort":
        return 3 + args[0].element_size()
    return SEVERAL.get(name, 1)
