"""Know what PyTorch's operations are on a CUDA device: how many kernels, which wait, which compute nothing."""

from __future__ import annotations

from typing import Any

import torch

COMPUTES_NOTHING = frozenset(
    [
        *("view", "as_strided", "slice", "select", "unsqueeze", "squeeze", "detach", "alias", "expand", "t"),
        *("transpose", "permute", "_unsafe_view", "unbind", "split", "split_with_sizes", "_reshape_alias"),
        *("diagonal", "unfold", "lift_fresh", "lift", "narrow", "is_same_size"),
    ]
)
"""They change how memory is looked at, not memory."""

ALLOCATES = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"])
"""They allocate, and launch nothing."""

WAITS = frozenset(
    [
        *("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount", "equal"),
        "repeat_interleave",
    ]
)
"""The host reads the size of the result."""

COMPOSITE = {
    "binary_cross_entropy_with_logits": 5,  # 1 − y, · x, log_sigmoid, −, sum (Loss.cpp)
    **dict.fromkeys(("constant_pad_nd", "masked_fill"), 2),  # a fill or a copy first
    **dict.fromkeys(("stack", "abs", "rsub", "bitwise_and", "bitwise_or", "bitwise_xor", "scalar_tensor"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones"), 1),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), 1),  # without accumulation
    **dict.fromkeys(("new_full", "arange", "clone", "repeat", "_to_copy", "select_backward", "slice_backward"), 1),
}
"""Kernels of operations that have none of their own, but a body that launches others'."""


def kernels_of(func: Any, name: str, args: Any) -> int:
    """Count the kernels of an operation on a CUDA device.

    One for most. A stable sort is CUB's radix sort: indices are filled in, one histogram, one scan, a pass for each 8
    bits of the keys; a cumulative sum is CUB's scan, which first initialises the states of its tiles.
    """
    if name == "sort":
        return 3 + args[0].element_size()
    if name == "cumsum":
        return 2
    if name in COMPOSITE:
        return COMPOSITE[name]
    if name.startswith("_foreach_"):  # composite on the CPU alone
        return 1
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has(func.name(), "CPU") and has(func.name(), "CompositeExplicitAutograd"):
        raise NotImplementedError(f"{func.name()} launches what its body launches: say in COMPOSITE how many that is")
    return 1


def flops_of(name: str, args: Any) -> int:
    """Count the floating-point operations of a matrix product; 0 of anything else."""
    if name not in ("addmm", "mm"):
        return 0
    a, b = args[-2:]
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]
