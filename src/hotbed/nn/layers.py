"""Define the layers of click models: MLP, dot interaction."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from hotbed import ops
from hotbed.checks import Probability, check
from hotbed.config import LinearLibrary
from hotbed.errors import BatchError, SpecError
from hotbed.nn.linear import Linear, is_plain, is_transformed
from hotbed.ops import BackendName
from hotbed.torch_private import has_onednn_bf16, has_onednn_linear, is_exporting, onednn_product

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_FUSED_PRODUCTS = 1 << 26
"""Multiplications of a product from which fewer passes are faster on CPUs; below, their start costs more."""


def _relu(width: int) -> nn.Module:
    return nn.ReLU(inplace=True)


class MLP(nn.Sequential):
    """Fully connected layers with ReLU, or another activation, between them.

    Weights start as N(0, √(2 / (in + out))), biases as N(0, √(1 / out)) (standard deviations; NVIDIA DLRM).

    Parameters
    ----------
    inputs
        Columns of the input ``[B, inputs]``.
    widths
        Columns of each layer's output.
    last_relu
        Whether the last layer has an activation too.
    activation
        Makes the module that follows a layer of so many columns.
    dropout
        Share of each activation's outputs that are 0 in a training step, the others scaled up; it draws from torch's
        generator.
    library
        What computes float32 products on CPUs, see `hotbed.nn.linear.Linear`.

    Attributes
    ----------
    recompute
        Whether the outputs of its layers are computed again in backward, instead of kept from forward to backward
        (activation checkpointing). Results are the same, to the bit.
    draws
        Whether it draws random numbers, for dropout.

    Raises
    ------
    SpecError
        If there is no layer, a width is not positive, or dropout is not in [0, 1).
    """

    recompute = False

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        *,
        last_relu: bool = True,
        activation: Callable[[int], nn.Module] = _relu,
        dropout: float = 0.0,
        library: LinearLibrary = "auto",
    ) -> None:
        if not widths or min(inputs, *widths) < 1:
            raise SpecError(f"MLP({inputs}, {list(widths)}): needs at least one layer and positive widths")
        check("MLP: dropout", dropout, Probability, SpecError)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([inputs, *widths], widths, strict=False):
            device = torch.get_default_device()
            linear = cast(Linear, nn.utils.skip_init(Linear, fan_in, fan_out, library=library, device=device))
            linear.reset_parameters()
            relu = activation(fan_out)
            # One module, so that the linear layers have the same names in checkpoints with and without dropout.
            layers += [linear, nn.Sequential(relu, nn.Dropout(dropout)) if dropout else relu]
        super().__init__(*(layers if last_relu else layers[:-1]))
        self.draws = dropout > 0

    @override
    def forward(self, input: Tensor) -> Tensor:
        """``[…, inputs]`` to ``[…, widths[-1]]``."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._layers(input)
        return checkpoint(self._layers, input, use_reentrant=False, preserve_rng_state=self.draws)

    def _layers(self, values: Tensor) -> Tensor:
        """Call each layer and its activation, or both at once where kernels do that."""
        modules = list(self)
        for i in range(0, len(modules), 2):
            layer, activation = modules[i], modules[i + 1] if i + 1 < len(modules) else None
            if activation is not None and can_fuse(values, layer, activation):
                values = linear_relu(values, cast(Linear, layer))
            else:
                values = layer(values) if activation is None else activation(layer(values))
        return values


def recompute_activations(model: nn.Module) -> None:
    """Let all MLPs of a model recompute their activations in backward, see `MLP`; `SpecError` without an MLP."""
    found = [m for m in model.modules() if isinstance(m, MLP)]
    if not found:
        raise SpecError(
            f"{type(model).__name__} has no hotbed.nn.MLP, whose activations could be computed again; build it of "
            "them, or call torch.utils.checkpoint in its forward"
        )
    for mlp in found:
        mlp.recompute = True


class DotInteraction(nn.Module):
    """Dot interaction of DLRM: all pairwise dot products of a sample's vectors, after its first vector.

    Parameters
    ----------
    vectors
        Number of vectors ``n`` per sample: the dense one and those of the features.
    dim
        Columns ``D`` of every vector.
    multiple_of
        The result is padded with zero columns to a multiple of this (8 keeps tensor cores fed: 479 → 480).
    backend
        Kernels, as in `EmbeddingCollection`.
    """

    def __init__(self, vectors: int, dim: int, *, multiple_of: int = 8, backend: BackendName = "auto") -> None:
        super().__init__()
        self.vectors, self.dim = vectors, dim
        used = dim + vectors * (vectors - 1) // 2
        self.width = -(-used // multiple_of) * multiple_of
        self.backend_name: BackendName = backend

    def forward(self, vectors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``[B, n, D]`` to ``[B, width]``: the first vector, the strict lower triangle row by row, zeros.

        Under autocast in the dtype of autocast, as a matrix product is.

        Raises
        ------
        BatchError
            If the shape or the dtype is another one: the kernels trust it.
        """
        if vectors.shape != (len(vectors), self.vectors, self.dim):
            raise BatchError(
                f"DotInteraction({self.vectors}, {self.dim}) needs vectors [B, {self.vectors}, {self.dim}], got "
                f"{list(vectors.shape)}"
            )
        kind = vectors.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else vectors.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise BatchError(f"DotInteraction got {dtype} vectors; give it float32, bfloat16 or float16")
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            from hotbed.nn.traced_ops import traced_interaction

            return traced_interaction(vectors.to(dtype), self.width, self.backend_name)
        kernels = ops.select(vectors.device, self.backend_name)
        with torch.autocast(kind, enabled=False):
            return _DotInteraction.apply(vectors.to(dtype), self.width, kernels)


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, width: int, kernels: ops.Backend) -> Tensor:
        ctx.save_for_backward(vectors)
        ctx.kernels = kernels
        return kernels.interaction(vectors, width)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        (vectors,) = ctx.saved_tensors
        return ctx.kernels.interaction_backward(grad_outputs[0], vectors), None, None


# -- a layer and its ReLU ----------------------------------------------------------------------------------------------


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
        and input.numel() * layer.out_features >= MIN_FUSED_PRODUCTS
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
