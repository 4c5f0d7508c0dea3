"""Sum the loss of a batch: binary cross-entropy of logits, by kernels of its own on GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hotbed import ops

SummedLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps logits and labels ``[…, B, T]`` and sample weights ``[B, 1]`` or ``[B, T]`` to the sum of all losses."""


def summed_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the weighted binary cross-entropy of logits.

    Parameters
    ----------
    logits, labels
        ``[B, T]``, or ``[M, B, T]`` of an ensemble.
    weights
        Of samples ``[B, 1]``, or by label ``[B, T]``; None: all 1.

    Returns
    -------
    Tensor
        0-d. What torch defines; on GPUs, of float32 logits ``[B, T]``, summed in blocks in two launches where torch's
        takes five, and its gradient is computed in the same pass.
    """
    given = [t for t in (logits, labels, weights) if t is not None]
    fits = logits.ndim == 2 and all(t.device.type == "cuda" and t.dtype == torch.float32 for t in given)
    if fits and torch.compiler.is_dynamo_compiling():
        from hotbed.nn.traced_ops import traced_cross_entropy

        return traced_cross_entropy(logits, labels, weights)
    if fits and ops.select(logits.device).NAME == "triton":
        return _CrossEntropy.apply(logits, labels, weights)
    return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")


class _CrossEntropy(torch.autograd.Function):
    """Forward: the sum, and its gradient, which backward scales."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        total, gradient = importlib.import_module("hotbed.ops.triton_dense").cross_entropy(logits, labels, weights)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None
