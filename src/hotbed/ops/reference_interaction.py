"""Define the dot interaction and its gradient, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.backend import launches


def interaction(vectors: Tensor, width: int) -> Tensor:
    """Compute the dot interaction of DLRM (Naumov et al. 2019): ``[B, n, D] → [B, width]``.

    The n vectors of a sample (the dense one first) are multiplied pairwise. The strict lower triangle of the Gram
    matrix, row by row, follows the first vector. Zeros pad to ``width ≥ D + n (n − 1) / 2``.
    """
    launches["reference.interaction"] += 1
    gram = vectors @ vectors.transpose(1, 2)
    i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=vectors.device)
    out = torch.cat([vectors[:, 0], gram[:, i, j]], dim=1)
    return torch.nn.functional.pad(out, (0, width - out.shape[1]))


def interaction_backward(grad: Tensor, vectors: Tensor) -> Tensor:
    """Gradient ``[B, n, D]`` of `interaction` from ``grad [B, width]``."""
    launches["reference.interaction_backward"] += 1
    n, dim = vectors.shape[1:]
    i, j = torch.tril_indices(n, n, -1, device=vectors.device)
    gram = grad.new_zeros(len(grad), n, n)
    gram[:, i, j] = grad[:, dim : dim + len(i)]
    out = (gram + gram.transpose(1, 2)) @ vectors
    out[:, 0] += grad[:, :dim]
    return out
