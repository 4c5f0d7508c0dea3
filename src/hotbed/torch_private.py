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

EXPORT_LOGGER = "torch.export.pt2_archive._package"  # torch 2.11 warns about its own loader
NoSubclasses = torch._C.DisableTorchFunctionSubclass


def running_backward() -> int:
    """Return the number of the current backward pass, or −1 outside of a backward pass."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def version(t: Tensor) -> int:
    """Return the number of in-place changes of a tensor, or −1 for inference tensors, which torch does not count."""
    return -1 if t.is_inference() else t._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies the storage during its lifetime."""
    return storage._cdata


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into tensors of the same shapes with one call, which is one launch on a GPU."""
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
    """Return ``a bᵀ + bias`` for CPU matrices of one dtype. Their rows need not be contiguous."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def check_in_graph(condition: Tensor, message: str) -> None:
    """Raise an error when an exported program runs and a 0-d bool tensor is false."""
    torch.ops.aten._assert_async.msg(condition, message)


def is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing. In torch 2.11, `torch.compiler.is_exporting` is true in any graph."""
    return bool(torch.compiler._is_exporting_flag)


def is_in_functorch() -> bool:
    """Return whether ``torch.func`` (vmap, grad, jacrev, …) transforms the caller."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def is_traced_or_dual(tensors: Iterable[Tensor]) -> bool:
    """Return whether proxies trace a graph, forward-mode gradients are computed, or a tensor is a vmap batch."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or forward_ad._current_level >= 0
        or any(map(is_legacy_batchedtensor, tensors))
    )


def make_number_while_tracing(thing: Any) -> None:
    """Read ``thing.number``, which creates the number, while dynamo traces, if ``thing`` is an input of the graph."""
    from torch._dynamo.comptime import comptime

    comptime(_make_number)


def _make_number(context: Any) -> None:
    variable = context.get_local("thing")._i_will_not_complain_if_bc_breaks_VariableTracker()
    if variable.source is not None:  # otherwise it was created in this graph
        _ = variable.value.number


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled with ``torch.compile``. Hooks of its modules would break its graph."""
    return model._compiled_call_impl is not None


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer's step as done for schedules, although overflowed gradients skipped it."""
    vars(optimizer)["_opt_called"] = True


def hooks_of(of: nn.Module | torch.optim.Optimizer | Tensor) -> list[Callable[..., Any]]:
    """List the hooks of a module's forward and backward pass, of an optimizer's step, or of a tensor's gradient."""
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    names += ("optimizer_step_pre_hooks", "optimizer_step_post_hooks", "post_accumulate_grad_hooks")
    return [hook for name in names for hook in (getattr(of, f"_{name}", None) or {}).values()]
