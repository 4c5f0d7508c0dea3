"""Know what PyTorch's operations are on a CUDA device: how many kernels, which wait, which compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
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
    **dict.fromkeys(
        (
            "stack",
            "abs",
            "rsub",
            "sum",
            "mul",
            "add",
            "sub",
            "div",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "scalar_tensor",
            "remainder",
        ),
        1,
    ),
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
    if name.startswith(("_foreach_", "_fused_")):  # composite on the CPU alone
        lists = [[t.numel() for t in arg] for arg in args if _is_list(arg)]
        # A result is a list, too; counts of steps, the last list of an optimizer, have room of their own.
        return multi_tensor_launches(lists, len(lists) + (not name.endswith("_")) - name.startswith("_fused_ada"))
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has(func.name(), "CPU") and has(func.name(), "CompositeExplicitAutograd"):
        raise NotImplementedError(f"{func.name()} launches what its body launches: say in COMPOSITE how many that is")
    return 1


_CHUNK, _BLOCKS = 65_536, 320
_TENSORS = (110, 64, 48, 36, 30)
"""Elements of a block, blocks of a launch, and tensors of a launch, by number of lists (MultiTensorApply.cuh)."""


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def multi_tensor_launches(lists: Sequence[Sequence[int]], depth: int) -> int:
    """Count the kernels of an operation on ``depth`` lists of tensors, given numbers of elements.

    PyTorch hands chunks of the tensors to the blocks of a launch until it has as many blocks, or whole tensors, as its
    arguments have room for. Counted with the room before CUDA 13; later there is more.
    """
    if not lists:
        return 1
    most = _TENSORS[min(depth, len(_TENSORS)) - 1]
    launches = blocks = tensors = 0
    for elements in lists[0]:
        chunks = -(-elements // _CHUNK)
        tensors += elements > 0
        for chunk in range(1, chunks + 1):
            blocks += 1
            if blocks == _BLOCKS or (tensors == most and chunk == chunks):
                launches, blocks, tensors = launches + 1, 0, int(chunk < chunks)
    return launches + (blocks > 0)


def flops_of(name: str, args: Any) -> int:
    """Count the floating-point operations of a matrix product; 0 of anything else."""
    if name not in ("addmm", "mm"):
        return 0
    a, b = args[-2:]
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]
