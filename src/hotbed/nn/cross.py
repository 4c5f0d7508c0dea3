"""Define the cross layers of DCN-V2, with full or low-rank matrices."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from hotbed.checks import Count, check
from hotbed.config import LinearLibrary
from hotbed.errors import SpecError
from hotbed.nn.linear import Linear


class CrossLayer(nn.Module):
    """Cross layer of DCN-V2 (Wang et al. 2021, arXiv 2008.13535): ``x₀ ⊙ (W x + b) + x``.

    With ``low_rank``, ``W = U Vᵀ``.

    Parameters
    ----------
    width
        Number of columns ``d`` of x₀ and x.
    low_rank
        Number of columns ``r`` of U and V, or None for a full matrix W ``[d, d]``.
    library
        Library for float32 products on CPUs, see `hotbed.nn.linear.Linear`.

    Raises
    ------
    SpecError
        If the rank is not between 1 and the width.
    """

    def __init__(self, width: int, low_rank: int | None = None, *, library: LinearLibrary = "auto") -> None:
        super().__init__()
        if low_rank is not None and not 1 <= low_rank <= width:
            raise SpecError(f"CrossLayer: low_rank: got {low_rank:,}, expected 1 to {width:,}, the inputs, or None")
        device = torch.get_default_device()
        self.down: nn.Linear | None = None
        if low_rank is not None:
            self.down = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, low_rank, bias=False, device=device))
            if not self.down.weight.is_meta:
                nn.init.normal_(self.down.weight, std=math.sqrt(2 / (width + low_rank)))
        inputs = width if low_rank is None else low_rank
        self.up = cast(Linear, nn.utils.skip_init(Linear, inputs, width, library=library, device=device))
        self.up.reset_parameters()

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """Compute equation 1, or equation 2 for a low rank: ``[B, d]`` from x₀ and x ``[B, d]``."""
        return first * self.up(x if self.down is None else self.down(x)) + x


class CrossNetwork(nn.ModuleList):
    """Sequence of cross layers. Each layer also gets the inputs x₀ (figure 1a of the paper).

    Parameters
    ----------
    width
        Number of columns ``d`` of the inputs.
    layers
        Number of layers. Each layer multiplies once more with the inputs.
    low_rank
        Rank of the matrices, or None for full matrices. If the rank is not below the number of inputs, the matrices are
        full, because two matrices of full rank would not be smaller.

    Raises
    ------
    SpecError
        If a number is not positive.
    """

    def __init__(self, width: int, layers: int, low_rank: int | None = None) -> None:
        check("CrossNetwork: layers", layers, Count, SpecError)
        check("CrossNetwork: low_rank", low_rank, Count | None, SpecError)
        rank = low_rank if low_rank is not None and low_rank < width else None
        super().__init__([CrossLayer(width, rank) for _ in range(layers)])

    def forward(self, first: Tensor) -> Tensor:
        """Map x₀ ``[B, d]`` to ``[B, d]``."""
        x = first
        for layer in self:
            x = layer(first, x)
        return x
