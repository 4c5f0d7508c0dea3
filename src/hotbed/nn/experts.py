"""Define a layer for models with several tasks: shared experts that a separate gate mixes for each task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hotbed.checks import Count, check
from hotbed.config import LinearLibrary
from hotbed.errors import SpecError
from hotbed.nn.layers import MLP


class MixtureOfExperts(nn.Module):
    """Multi-gate mixture of experts (Ma et al. 2018, equations 7 and 8): ``fᵏ(x) = Σᵢ softmax(Wₖ x)ᵢ fᵢ(x)``.

    With one gate, all tasks share the same mixture of experts (equation 5).

    Parameters
    ----------
    inputs
        Number of columns ``d`` of the input.
    widths
        Widths of each expert, which is an MLP with a ReLU after each layer.
    experts
        Number of experts ``E``.
    gates
        Number of gates ``K``, one for each task.
    dropout
        Dropout of the experts, see `MLP`.
    library
        Library for float32 products on CPUs, see `hotbed.nn.linear.Linear`.

    Raises
    ------
    SpecError
        If the number of experts or gates, or a width, is not positive.
    """

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        *,
        experts: int,
        gates: int,
        dropout: float = 0.0,
        library: LinearLibrary = "auto",
    ) -> None:
        super().__init__()
        check("MixtureOfExperts: experts", experts, Count, SpecError)
        check("MixtureOfExperts: gates (one per task)", gates, Count, SpecError)
        mlps = [MLP(inputs, widths, dropout=dropout, library=library) for _ in range(experts)]
        self.experts, self.shape = nn.ModuleList(mlps), (gates, experts)
        device = torch.get_default_device()
        of_gates = nn.utils.skip_init(nn.Linear, inputs, gates * experts, bias=False, device=device)
        self.gates = cast(nn.Linear, of_gates)
        if not self.gates.weight.is_meta:
            nn.init.normal_(self.gates.weight, std=math.sqrt(2 / (inputs + experts)))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [B, d]`` to the mixture of the experts' outputs for each gate, ``[B, K, W]``."""
        found = torch.stack([expert(x) for expert in self.experts], dim=1)
        shares = self.gates(x).unflatten(1, self.shape).softmax(dim=2)
        return torch.bmm(shares.to(found.dtype), found)
