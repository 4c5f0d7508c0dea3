"""Compute a fully connected layer and its ReLU on GPUs with fewer passes over the gradient.

Backward, one pass over the gradient applies ReLU's and sums it for the bias (`hotbed.ops.triton_relu`), where torch
takes two kernels, of which the sum is several times slower than the memory. Values of forward and the gradient of
ReLU's input are torch's own; gradients of biases are rounded from a float32 sum in another order.

Forward, ReLU is a kernel of its own: that in the product's (cuBLASLt) makes zeros of NaN, so a batch with NaN would
have a finite loss, and be trained on.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import ops
from hotbed.nn.linear import Linear, is_transformed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(input: Tensor, linear: nn.Module, activation: nn.Module) -> bool:
    """Whether these two modules, one after the other, are computed at once for this input.

    They are on GPUs with Triton's kernels, if nothing sees what is between them: no hook, no transformation of torch's.
    """
    return (
        input.device.type == "cuda"
        and type(linear) is Linear
        and type(activation) is nn.ReLU
        and input.shape[-1] == linear.in_features  # else the layer says what is wrong
        and not is_transformed()
        and not (_has_hooks(linear) or _has_hooks(activation))
        and _dtype(input) in _DTYPES
        and (torch.is_autocast_enabled("cuda") or linear.weight.dtype == input.dtype)
        and ops.select(input.device).NAME == "triton"
    )


def linear_relu(input: Tensor, layer: Linear) -> Tensor:
    """Compute ``relu(input Wᵀ + b)``, ``[…, in]`` to ``[…, out]``, in the dtype of autocast where that is on."""
    dtype = _dtype(input)
    weight, bias = layer.narrow or (layer.weight, layer.bias)
    rows = input.reshape(-1, layer.in_features).to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        out = _LinearRelu.apply(rows, weight.to(dtype), bias.to(dtype))
    return out.view(*input.shape[:-1], layer.out_features)


def _dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody is told of what this module gets or gives."""
    of_all = nn.modules.module
    return any(
        getattr(of, name)
        for names, of in ((_HOOKS, module), ([f"_global{name}" for name in _HOOKS], of_all))
        for name in names
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _LinearRelu(torch.autograd.Function):
    """``relu(x Wᵀ + b)`` and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = torch.addmm(bias, x, weight.t()).relu_()
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        x, weight, out = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for gradients of gradients
            grad = torch.where(out <= 0, 0, grad_outputs[0])
            of_bias = grad.sum(0)
        else:
            grad, of_bias = importlib.import_module("hotbed.ops.triton_relu").relu_backward(grad_outputs[0], out)
        return grad @ weight if of_x else None, grad.mT @ x if of_weight else None, of_bias
