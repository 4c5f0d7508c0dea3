"""Compute a fully connected layer and its ReLU with fewer passes: on GPUs, and of bfloat16 on CPUs.

Backward, one pass over the gradient applies ReLU's and sums it for the bias (`hotbed.ops.triton_dense`, `cpu_dense`),
where torch takes two, of which the sum is several times slower than a GPU's memory. On CPUs the product adds the bias,
too, where torch copies it to every row first. The gradient of ReLU's input is torch's own; gradients of biases are
rounded from a float32 sum in another order.

Forward, ReLU is an operation of its own: that in the products' (cuBLASLt, oneDNN) makes zeros of NaN, so a batch with
NaN would have a finite loss, and be trained on.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import ops
from hotbed.nn.linear import Linear, is_plain, is_transformed
from hotbed.torch_private import has_onednn_bf16, has_onednn_linear, onednn_product

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_PRODUCTS = 1 << 26
"""Multiplications of a product from which fewer passes are faster on CPUs; below, their start costs more."""


def can_fuse(input: Tensor, linear: nn.Module, activation: nn.Module) -> bool:
    """Whether these two modules, one after the other, are computed at once for this input.

    They are where that is faster, if nothing sees what is between them: no hook, no transformation of torch's.
    """
    return (
        type(linear) is Linear
        and type(activation) is nn.ReLU
        and _may_gain(input)  # before what takes longer: most layers on CPUs end here
        and not is_transformed()
        and not (_is_watched(linear) or _is_watched(activation))
        and _fits(input, linear)
        and (_is_faster_on_cpu(input, linear) if input.device.type == "cpu" else ops.select("cuda").NAME == "triton")
    )


def _may_gain(input: Tensor) -> bool:
    """Whether inputs of this device and dtype can gain; of float32 on CPUs products are too slow (docs/log.md).

    Without gradients only the bias would be gained there, and lost is that autocast casts a weight once for many calls.
    """
    if input.device.type == "cpu":
        return torch.is_grad_enabled() and _dtype(input) == torch.bfloat16
    return input.device.type == "cuda"


def _fits(input: Tensor, layer: Linear) -> bool:
    """Whether a layer takes this input; what it does not take, it refuses itself, and says why."""
    return (
        input.shape[-1] == layer.in_features
        and input.device == layer.weight.device
        and input.dtype in _DTYPES
        and layer.weight.dtype in _DTYPES
        and (torch.is_autocast_enabled(input.device.type) or layer.weight.dtype == input.dtype)
        and layer.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
    )


def _is_faster_on_cpu(input: Tensor, layer: Linear) -> bool:
    """Whether the product is oneDNN's, and large enough."""
    return (
        is_plain(input, layer.weight)
        and input.numel() * layer.out_features >= MIN_PRODUCTS
        and has_onednn_linear()
        and has_onednn_bf16()
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


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody is told of what this module gets or gives, or has replaced its ``forward``."""
    of_all = nn.modules.module
    return "forward" in vars(module) or any(
        getattr(of, name)
        for names, of in ((_HOOKS, module), ([f"_global{name}" for name in _HOOKS], of_all))
        for name in names
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _LinearRelu(torch.autograd.Function):
    """``relu(x Wᵀ + b)`` and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = (onednn_product(x, weight, bias) if x.is_cpu else torch.addmm(bias, x, weight.t())).relu_()
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        x, weight, out = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_transformed(grad_outputs[0]):  # for gradients of gradients, or many at once
            grad = torch.where(out <= 0, 0, grad_outputs[0])
            of_bias = grad.sum(0)
        else:
            kernels = importlib.import_module(f"hotbed.ops.{'cpu' if out.is_cpu else 'triton'}_dense")
            grad, of_bias = kernels.relu_backward(grad_outputs[0], out)
        return grad @ weight if of_x else None, grad.mT @ x if of_weight else None, of_bias
