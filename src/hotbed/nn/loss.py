"""Sum the binary cross-entropy of a batch's logits, with hotbed's kernels on GPUs."""

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
"""A function of logits and labels ``[…, B, T]`` and weights ``[B, 1]`` or ``[B, T]`` that returns the summed loss."""


def summed_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the weighted binary cross-entropy of logits.

    Parameters
    ----------
    logits, labels
        ``[B, T]``, or ``[M, B, T]`` for an ensemble.
    weights
        Weights of samples ``[B, 1]``, or of samples and labels ``[B, T]``. None: all weights are 1.

    Returns
    -------
    Tensor
        0-d, as torch defines it. For float32 logits ``[B, T]`` on GPUs, two kernels sum it in blocks and compute its
        gradient in the same pass. torch launches five kernels.
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
    """Compute the sum and its gradient in forward. Backward only scales the gradient."""

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
