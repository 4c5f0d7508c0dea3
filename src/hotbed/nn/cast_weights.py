"""Cast the weights of all linear layers at once, in the place of autocast, which launches a kernel for each.

The values are those of autocast, and so are the gradients: those of the narrow weights, widened, by one kernel, too.
The narrow weights keep their memory from step to step. Gradients of all layers are there at once, at the end of
backward, so this is not for ranks that average gradients of the last layers while those of the first are computed.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotbed.nn.linear import Linear
from hotbed.torch_private import copy_all_


class CastWeights:
    """Narrow weights of the `Linear` layers of a model to autocast's ``dtype``, for one forward pass after the other.

    Layers that share parameters, or have other dtypes than float32, are left to autocast.
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
        """Let the layers use narrow weights inside, where autocast is on."""
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
    """Forward: fill narrow tensors with parameters. Backward: widen their gradients."""

    @staticmethod
    def forward(ctx: Any, narrow: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [p.dtype for p in parameters]
        copy_all_(narrow, parameters)
        return tuple(t.detach() for t in narrow)  # for autograd sets what it returns

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
