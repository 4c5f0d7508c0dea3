"""Define layers of factorization machines: vectors of numericals, and products of all pairs of fields."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.nn.linear import draw_normal


class FactorizationMachine(nn.Module):
    """Second-order term of a factorization machine (Rendle 2010, lemma 3.1): ``½ Σ_d ((Σᵢ vᵢd)² − Σᵢ vᵢd²)``.

    It equals ``Σ_{i<j} ⟨vᵢ, vⱼ⟩``, with n additions instead of n² products. It is computed in float32 even with
    autocast, because the difference of two large sums is small.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """Map ``[B, n, D]``, one vector per field, to ``[B, 1]`` float32."""
        with torch.autocast(vectors.device.type, enabled=False):
            wide = vectors.float()
            return 0.5 * (wide.sum(1).square() - wide.square().sum(1)).sum(1, keepdim=True)


class NumericalEmbedding(nn.Module):
    """Vectors ``xᵢ Vᵢ`` of numerical fields, as in factorization machines.

    Parameters
    ----------
    inputs
        Number of numericals ``I``.
    dim
        Number of columns ``D`` of their vectors.
    """

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values from N(0, 0.01²), except on the device ``meta``.

        With a deviation of 1 ÷ √D, products of pairs of numericals would be as large as the logit before training.
        """
        if not self.weight.is_meta:
            draw_normal(self.weight, 0.01)

    def forward(self, dense: Tensor) -> Tensor:
        """Map ``[B, I]`` to ``[B, I, D]``."""
        return dense[:, :, None] * self.weight
