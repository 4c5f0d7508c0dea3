"""Define `Linear`, a fully connected layer that computes float32 products with the faster library on this CPU.

On x86 CPUs, torch computes float32 products with MKL, which does not use the 512-bit instructions of AMD's cores.
oneDNN, which is also part of torch, uses them. The library depends only on the CPU model and on the shape of the
product, never on a timing. Therefore equal machines use the same library, and the bits of a product repeat.
Measurements of both libraries: docs/decisions/cpu.md.

torch computes products in other dtypes, with autocast, on GPUs and in compiled or exported graphs. `hotbed.nn.layers`
fuses the products of an `MLP` with its ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from hotbed.checks import check
from hotbed.config import LinearLibrary
from hotbed.errors import SpecError
from hotbed.machine import cpu
from hotbed.torch_private import copy_all_, has_onednn_linear, is_traced_or_dual, onednn_product

MIN_PRODUCTS = 1 << 24
"""Number of multiplications from where on oneDNN is faster. Its start-up time dominates smaller products."""
MIN_OUTPUTS = 8
"""Number of output columns from where on oneDNN is faster."""
NARROW_INPUTS = 16
"""Below this number of input columns, oneDNN computes the transposed gradient of the weight faster."""
WIDE_INPUTS = 256
"""From this number of input columns on, oneDNN computes the gradient of the weight faster on Zen 5."""
ZEN_5 = 26
"""AMD's CPU family number of Zen 5."""


def faster_library() -> Literal["torch", "onednn"]:
    """Return the faster library for float32 products: oneDNN on AMD CPUs with AVX-512, else torch's default."""
    here = cpu()
    has_slow_mkl = here.is_amd and "avx512f" in here.flags and torch.backends.mkl.is_available()
    return "onednn" if has_slow_mkl and has_onednn_linear() else "torch"


class Linear(nn.Linear):
    """A fully connected layer that is initialized as in NVIDIA's DLRM.

    Weights are N(0, √(2 / (in + out))) and biases N(0, √(1 / out)); the second argument is the standard deviation.
    ``library`` computes float32 products on CPUs: ``"torch"`` (MKL on x86), ``"onednn"``, or ``"auto"``. ``"auto"`` is
    the faster library on this CPU (`faster_library`); all ranks can later agree on one with `use`. The libraries round
    differently in the last bits. Raise `SpecError` if the library is not available.
    """

    narrow: tuple[Tensor, Tensor] | None = None
    """Weight and bias in the dtype of autocast, if `CastWeights` has cast them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        library: LinearLibrary = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check("library", library, LinearLibrary, SpecError)
        self.library = library
        self.use(faster_library() if library == "auto" else library)
        super().__init__(in_features, out_features, device=device, dtype=dtype)

    def use(self, library: Literal["torch", "onednn"]) -> None:
        """Set the library for this layer's products. Raise `SpecError` if this build of torch does not have it."""
        if library == "onednn" and not has_onednn_linear():
            raise SpecError(
                f"library: got 'onednn', expected 'auto' or 'torch', because torch {torch.__version__} was built "
                "without oneDNN"
            )
        self.uses: Literal["torch", "onednn"] = library

    @override
    def reset_parameters(self) -> None:
        """Draw new values, except on the device ``meta``."""
        if self.weight.is_meta:
            return
        draw_normal(self.weight, math.sqrt(2.0 / (self.in_features + self.out_features)))
        draw_normal(self.bias, math.sqrt(1.0 / self.out_features))

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Map ``[…, in]`` to ``[…, out]``."""
        if self.narrow is not None and torch.is_autocast_enabled(input.device.type):
            return F.linear(input, *self.narrow)
        if self.uses == "torch" or not _onednn_gains(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return _OneDnnLinear.apply(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def _onednn_gains(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN is faster for this layer: a large enough float32 product of plain tensors on a CPU."""
    return (
        not is_transformed()  # before sizes are compared, because they may be symbolic
        and is_plain(x, weight)
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.shape[0] >= MIN_OUTPUTS
        and x.numel() * weight.shape[0] >= MIN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
    )


def is_plain(*tensors: Tensor) -> bool:
    """Return whether these are ordinary tensors, not fake, traced or sharded tensors."""
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Return whether torch compiles, exports, traces, or differentiates in forward mode or by torch.func.

    Also return True if a tensor is batched, as gradients are in ``torch.autograd.grad(is_grads_batched=True)``.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or is_traced_or_dual(tensors)
    )


class _OneDnnLinear(torch.autograd.Function):
    """Compute ``x Wᵀ + b`` and its gradients with oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # higher-order gradients need torch's own products
            return (
                grad @ weight if of_x else None,
                grad.mT @ x if of_weight else None,
                grad.sum(0) if of_bias else None,
            )
        grad = grad.contiguous()
        return (
            onednn_product(grad, weight.t()) if of_x else None,
            _weight_gradient(grad, x) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Compute ``grad [B, out]ᵀ x [B, in]`` with the library that is faster for these shapes."""
    if x.shape[1] < min(NARROW_INPUTS, grad.shape[1]):
        return onednn_product(x.t(), grad.t()).t().contiguous()
    if x.shape[1] >= WIDE_INPUTS and cpu().family >= ZEN_5:
        return onednn_product(grad.t(), x.t())
    return grad.t() @ x


@torch.no_grad()
def draw_normal(parameter: Tensor, std: float) -> None:
    """Draw values from N(0, std²) on the CPU, so that a seed results in the same model on every device."""
    parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0.0, std))


class CastWeights:
    """Cast the weights of all `Linear` layers of a model to autocast's ``dtype`` in one kernel per step.

    Autocast would launch one kernel per layer. Values and gradients equal autocast's. One kernel also casts the
    gradients to float32. The low-precision weights keep their memory from step to step. The gradients of all layers
    become available together at the end of backward. Therefore this class is not suitable for ranks that average
    gradients of the last layers during backward. Autocast still casts layers that share parameters or are not float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        layers = [m for m in model.modules() if isinstance(m, Linear)]
        often = [id(p) for m in layers for p in m.parameters()]
        self._layers = [
            m for m in layers if all(often.count(id(p)) == 1 and p.dtype == torch.float32 for p in m.parameters())
        ]
        self._narrow: list[Tensor] = []

    @contextmanager
    def used(self) -> Generator[None]:
        """Use low-precision weights in the layers inside this context, if autocast is enabled."""
        parameters = [p for layer in self._layers for p in (layer.weight, layer.bias)]
        if not parameters:
            yield
            return
        if not self._narrow or self._narrow[0].device != parameters[0].device:
            self._narrow = [torch.empty_like(p, dtype=self._dtype) for p in parameters]
        narrow = _Cast.apply(self._narrow, *parameters)
        for layer, weight, bias in zip(self._layers, narrow[::2], narrow[1::2], strict=True):
            layer.narrow = weight, bias
        try:
            yield
        finally:
            for layer in self._layers:
                layer.narrow = None


class _Cast(torch.autograd.Function):
    """Copy parameters to low-precision tensors in forward. Cast their gradients to float32 in backward."""

    @staticmethod
    def forward(ctx: Any, narrow: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [p.dtype for p in parameters]
        copy_all_(narrow, parameters)
        return tuple(t.detach() for t in narrow)  # autograd modifies the returned tensors, so do not return `narrow`

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        wide: list[Tensor | None] = [None] * len(grad_outputs)
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for i, (grad, dtype) in enumerate(zip(grad_outputs, ctx.dtypes, strict=True)):
            if grad is not None:
                wide[i] = target = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
                sources.append(grad)
                targets.append(target)
        if targets:
            copy_all_(targets, sources)
        return None, *wide
