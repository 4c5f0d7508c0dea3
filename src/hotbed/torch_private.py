"""Private symbols of torch that hotbed uses. `tests/test_torch_private.py` tests each, and lists releases of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportMissingModuleSource]
from torch.autograd import forward_ad
from torch.fx._pytree import register_pytree_flatten_spec as register_pytree_flatten_spec
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import GetAttrKey as GetAttrKey
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_leaves as tree_leaves

EXPORT_LOGGER = "torch.export.pt2_archive._package"  # warns in torch 2.11 of what its own loader does
NoSubclasses = torch._C.DisableTorchFunctionSubclass


def running_backward() -> int:
    """Return the number of the backward pass that calls this; −1 outside of one."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def version(t: Tensor) -> int:
    """Count the in-place changes of a tensor; −1 in inference mode, where torch does not."""
    return -1 if t.is_inference() else t._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that only this storage has while it lives."""
    return storage._cdata


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes by one call, and one launch on a GPU."""
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def has_cuda_kernel(operator: str) -> bool:
    """Return whether an operator, e.g. ``aten::_fused_adagrad_``, has a CUDA kernel in this build."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")  # pyright: ignore[reportPrivateUsage]


def has_onednn_linear() -> bool:
    """Return whether this build has oneDNN's linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_onednn_bf16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this CPU."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``a bᵀ + bias`` of matrices of one dtype on the CPU, whose rows need not be contiguous."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def check_in_graph(condition: Tensor, message: str) -> None:
    """Raise in an exported program, where it runs, unless a 0-d bool tensor is true."""
    torch.ops.aten._assert_async.msg(condition, message)


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces; `torch.compiler.is_exporting` of torch 2.11 is true in any graph."""
    return bool(torch.compiler._is_exporting_flag)


def is_in_functorch() -> bool:
    """Return whether ``torch.func`` (vmap, grad, jacrev, …) transforms the caller."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def is_traced_or_dual(tensors: Iterable[Tensor]) -> bool:
    """Return whether a graph is traced by proxies, forward gradients are taken, or a tensor stands for a batch."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or forward_ad._current_level >= 0
        or any(map(is_legacy_batchedtensor, tensors))
    )


def make_number_while_tracing(thing: Any) -> None:
    """Have dynamo read ``thing.number``, which makes it, of an object that the graph was given."""
    from torch._dynamo.comptime import comptime

    comptime(_make_number)


def _make_number(context: Any) -> None:
    variable = context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker()
    if variable.source is not None:  # else it was made in this graph
        _ = variable.value.number


def is_compiled(model: nn.Module) -> bool:
    """Return whether ``torch.compile`` has the model, whose one graph hooks of its modules would break."""
    return model._compiled_call_impl is not None


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Have schedules count a step of an optimizer although it is skipped because gradients overflowed."""
    vars(optimizer)["_opt_called"] = True


def hooks_of(of: nn.Module | torch.optim.Optimizer | Tensor) -> list[Callable[..., Any]]:
    """List what torch calls around a forward or backward pass, a step, or the gradient of a tensor."""
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    names += ("optimizer_step_pre_hooks", "optimizer_step_post_hooks", "post_accumulate_grad_hooks")
    return [hook for name in names for hook in (getattr(of, f"_{name}", None) or {}).values()]
