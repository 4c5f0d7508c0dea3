"""Define the layers of factorization machines: vectors of numericals, and all products of two fields in linear time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.nn.linear import draw_normal


class FactorizationMachine(nn.Module):
    """Second-order term of a factorization machine (Rendle 2010, lemma 3.1): ``½ Σ_d ((Σᵢ vᵢd)² − Σᵢ vᵢd²)``.

    That is ``Σ_{i<j} ⟨vᵢ, vⱼ⟩``, in n additions instead of n² products. It is computed in float32, also under autocast:
    the difference of two large sums is small.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """``[B, n, D]``, a vector per field, to ``[B, 1]`` float32."""
        with torch.autocast(vectors.device.type, enabled=False):
            wide = vectors.float()
            return 0.5 * (wide.sum(1).square() - wide.square().sum(1)).sum(1, keepdim=True)


class NumericalEmbedding(nn.Module):
    """Vectors of numerical fields: ``xᵢ Vᵢ``, as factorization machines have them.

    Parameters
    ----------
    inputs
        Number of numericals ``I``.
    dim
        Columns ``D`` of their vectors.
    """

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values from N(0, 0.01²), unless there is nothing to hold them yet.

        Products of pairs of numericals would be as large as the logit with 1 ÷ √D, before anything is learnt.
        """
        if not self.weight.is_meta:
            draw_normal(self.weight, 0.01)

    def forward(self, dense: Tensor) -> Tensor:
        """``[B, I]`` to ``[B, I, D]``."""
        return dense[:, :, None] * self.weight
