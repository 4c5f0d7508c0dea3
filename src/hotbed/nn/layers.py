"""Define layers of click models: the MLP, its fused linear layer and ReLU, and the dot interaction."""

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
"""Number of multiplications from where on the fused layer is faster on CPUs."""


def _relu(width: int) -> nn.Module:
    return nn.ReLU(inplace=True)


class MLP(nn.Sequential):
    """Fully connected layers with ReLU, or another activation, between them.

    Weights start as N(0, √(2 / (in + out))) and biases as N(0, √(1 / out)), as in NVIDIA's DLRM. The second argument is
    the standard deviation.

    Parameters
    ----------
    inputs
        Number of columns of the input ``[B, inputs]``.
    widths
        Number of columns of each layer's output.
    last_relu
        Whether the last layer also has an activation.
    activation
        Returns the module that follows a layer with the given number of columns.
    dropout
        Fraction of each activation's outputs that are set to 0 in a training step. The other outputs are scaled up.
        Dropout draws from torch's generator.
    library
        Library for float32 products on CPUs, see `hotbed.nn.linear.Linear`.

    Attributes
    ----------
    recompute
        Whether backward computes the outputs of the layers again instead of keeping them from forward (activation
        checkpointing). Results have the same bits.
    draws
        Whether it draws random numbers for dropout.

    Raises
    ------
    SpecError
        If it has no layer, a width is not positive, or dropout is not in [0, 1).

    Examples
    --------
    >>> mlp = MLP(13, [64, 1], last_relu=False)
    >>> tuple(mlp(torch.zeros(4, 13)).shape)
    (4, 1)
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
            raise SpecError(
                f"MLP: got inputs {inputs} and widths {list(widths)}, expected positive inputs and at least one width, "
                "all of them positive"
            )
        check("MLP: dropout", dropout, Probability, SpecError)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([inputs, *widths], widths, strict=False):
            device = torch.get_default_device()
            linear = cast(Linear, nn.utils.skip_init(Linear, fan_in, fan_out, library=library, device=device))
            linear.reset_parameters()
            relu = activation(fan_out)
            # Activation and dropout are one module, so that dropout does not change the names of linear layers.
            layers += [linear, nn.Sequential(relu, nn.Dropout(dropout)) if dropout else relu]
        super().__init__(*(layers if last_relu else layers[:-1]))
        self.draws = dropout > 0

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Map ``[…, inputs]`` to ``[…, widths[-1]]``."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._apply_layers(input)
        return checkpoint(self._apply_layers, input, use_reentrant=False, preserve_rng_state=self.draws)

    def _apply_layers(self, values: Tensor) -> Tensor:
        """Apply each layer and its activation, in one fused operation if possible."""
        modules = list(self)
        for i in range(0, len(modules), 2):
            layer, activation = modules[i], modules[i + 1] if i + 1 < len(modules) else None
            if activation is not None and can_fuse(values, layer, activation):
                values = linear_relu(values, cast(Linear, layer))
            else:
                values = layer(values) if activation is None else activation(layer(values))
        return values


def recompute_activations(model: nn.Module) -> None:
    """Set `MLP.recompute` in all MLPs of a model. Raise `SpecError` if the model has no MLP."""
    found = [m for m in model.modules() if isinstance(m, MLP)]
    if not found:
        raise SpecError(
            f"model to recompute activations: got {type(model).__name__}, expected one with a hotbed.nn.MLP. Use "
            "hotbed.nn.MLP, or call torch.utils.checkpoint in its forward"
        )
    for mlp in found:
        mlp.recompute = True


class DotInteraction(nn.Module):
    """Dot interaction of DLRM: a sample's first vector, then all pairwise dot products of its vectors.

    Parameters
    ----------
    vectors
        Number of vectors ``n`` per sample: the dense vector and one vector per feature.
    dim
        Number of columns ``D`` of every vector.
    multiple_of
        Zero columns pad the result to a multiple of this number. Tensor cores need a multiple of 8, e.g. 479 → 480.
    backend
        Kernels, see `EmbeddingCollection`.
    """

    def __init__(self, vectors: int, dim: int, *, multiple_of: int = 8, backend: BackendName = "auto") -> None:
        super().__init__()
        self.vectors, self.dim = vectors, dim
        used = dim + vectors * (vectors - 1) // 2
        self.width = -(-used // multiple_of) * multiple_of
        self.backend_name: BackendName = backend

    def forward(self, vectors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map ``[B, n, D]`` to ``[B, width]``: the first vector, the strict lower triangle row by row, then zeros.

        With autocast, it is computed in the dtype of autocast, like a matrix product.

        Raises
        ------
        BatchError
            If the shape or the dtype is not supported. Kernels do not check them.
        """
        if vectors.shape != (len(vectors), self.vectors, self.dim):
            raise BatchError(
                f"DotInteraction({self.vectors}, {self.dim}): vectors: got {list(vectors.shape)}, expected "
                f"[B, {self.vectors}, {self.dim}]"
            )
        kind = vectors.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else vectors.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise BatchError(f"DotInteraction: vectors: got {dtype}, expected float32, bfloat16 or float16")
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


# Backward reads the gradient once: one kernel applies ReLU's gradient and sums the result for the bias
# (`hotbed.ops.triton_dense` and `cpu_dense`). torch needs two passes, and its sum is several times slower than a GPU's
# memory. On CPUs, the product also adds the bias, and torch would first copy the bias to every row. The gradient of
# ReLU's input equals torch's. Gradients of biases are rounded from a float32 sum in another order.
#
# In forward, ReLU is a separate operation, because the fused ReLU of cuBLASLt and oneDNN replaces NaN by zeros. A batch
# with NaN would then have a finite loss, and training would continue.


def can_fuse(input: Tensor, linear: nn.Module, activation: nn.Module) -> bool:
    """Return whether to compute a linear layer and its activation in one fused operation for this input.

    They are fused if this is faster and nothing observes the value between them, such as a hook or a transformation.
    """
    return (
        type(linear) is Linear
        and type(activation) is nn.ReLU
        and _may_gain(input)  # before slower checks, because most layers on CPUs stop here
        and not is_transformed()
        and not (_is_observed(linear) or _is_observed(activation))
        and _fits(input, linear)
        and (_is_faster_on_cpu(input, linear) if input.device.type == "cpu" else ops.select("cuda").NAME == "triton")
    )


def _may_gain(input: Tensor) -> bool:
    """Return whether a fused layer can be faster for inputs of this device and dtype.

    For float32 on CPUs it is not, because the products are too slow (docs/decisions/cpu.md). Without gradients
    on CPUs, only the bias would be faster, and autocast could no longer cast a weight once for several calls.
    """
    if input.device.type == "cpu":
        return torch.is_grad_enabled() and _dtype(input) == torch.bfloat16
    return input.device.type == "cuda"


def _fits(input: Tensor, layer: Linear) -> bool:
    """Return whether a layer accepts this input. Otherwise the layer itself raises an error with the reason."""
    return (
        input.shape[-1] == layer.in_features
        and input.device == layer.weight.device
        and input.dtype in _DTYPES
        and layer.weight.dtype in _DTYPES
        and (torch.is_autocast_enabled(input.device.type) or layer.weight.dtype == input.dtype)
        and layer.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
    )


def _is_faster_on_cpu(input: Tensor, layer: Linear) -> bool:
    """Return whether oneDNN can compute the product and the product is large enough."""
    return (
        is_plain(input, layer.weight)
        and input.numel() * layer.out_features >= MIN_FUSED_PRODUCTS
        and has_onednn_linear()
        and has_onednn_bf16()
    )


def linear_relu(input: Tensor, layer: Linear) -> Tensor:
    """Compute ``relu(input Wᵀ + b)``, ``[…, in]`` to ``[…, out]``, in the dtype of autocast if it is enabled."""
    dtype = _dtype(input)
    weight, bias = layer.narrow or (layer.weight, layer.bias)
    rows = input.reshape(-1, layer.in_features).to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        out = _LinearRelu.apply(rows, weight.to(dtype), bias.to(dtype))
    return out.view(*input.shape[:-1], layer.out_features)


def _dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def _is_observed(module: nn.Module) -> bool:
    """Return whether a hook observes the inputs or outputs of a module, or its ``forward`` was replaced."""
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
        if torch.is_grad_enabled() or is_transformed(grad_outputs[0]):  # higher-order or batched gradients
            grad = torch.where(out <= 0, 0, grad_outputs[0])
            of_bias = grad.sum(0)
        else:
            kernels = importlib.import_module(f"hotbed.ops.{'cpu' if out.is_cpu else 'triton'}_dense")
            grad, of_bias = kernels.relu_backward(grad_outputs[0], out)
        return grad @ weight if of_x else None, grad.mT @ x if of_weight else None, of_bias
