"""Define custom operators that call the kernels of dense layers and their gradients in graphs of ``torch.compile``.

Outside of graphs, autograd functions call the same kernels, because a custom operator costs more than a small kernel.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from hotbed import ops
from hotbed.ops import BackendName


def traced_interaction(vectors: Tensor, width: int, backend: str) -> Tensor:
    """Compute the dot interaction ``[B, width]`` of ``vectors [B, n, D]``, see `hotbed.nn.DotInteraction`."""
    return torch.ops.hotbed.interaction(vectors, width, backend)


def traced_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the binary cross-entropy of logits on a GPU, see `hotbed.nn.loss.summed_cross_entropy`."""
    return torch.ops.hotbed.cross_entropy(logits, labels, weights)[0]


@torch.library.custom_op("hotbed::interaction", mutates_args=())
def _interaction(vectors: Tensor, width: int, backend: str) -> Tensor:
    with torch.autocast(vectors.device.type, enabled=False):
        return ops.select(vectors.device, cast(BackendName, backend)).interaction(vectors, width)


@_interaction.register_fake
def _(vectors: Tensor, width: int, backend: str) -> Tensor:
    return vectors.new_empty(vectors.shape[0], width)


@torch.library.custom_op("hotbed::interaction_backward", mutates_args=())
def _interaction_backward(grad: Tensor, vectors: Tensor, backend: str) -> Tensor:
    with torch.autocast(vectors.device.type, enabled=False):
        return ops.select(vectors.device, cast(BackendName, backend)).interaction_backward(grad, vectors)


@_interaction_backward.register_fake
def _(grad: Tensor, vectors: Tensor, backend: str) -> Tensor:
    return vectors.new_empty(vectors.shape)


def _keep_vectors(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.backend = inputs[2]


def _backward_to_vectors(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (vectors,) = ctx.saved_tensors
    return torch.ops.hotbed.interaction_backward(grad, vectors, ctx.backend), None, None


_interaction.register_autograd(_backward_to_vectors, setup_context=_keep_vectors)


@torch.library.custom_op("hotbed::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return importlib.import_module("hotbed.ops.triton_dense").cross_entropy(logits, labels, weights)


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return logits.new_empty(()), logits.new_empty(logits.shape)


def _keep_gradient(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward_to_logits(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    (gradient,) = ctx.saved_tensors
    return gradient * grad, None, None


_cross_entropy.register_autograd(_backward_to_logits, setup_context=_keep_gradient)
