"""Define DCN-V2: cross layers, whose cost grows with the inputs and not with the pairs of features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.config import LinearLibrary
from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.nn.layers import MLP
from hotbed.nn.linear import Linear
from hotbed.nn.models import dense_inputs, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class CrossLayer(nn.Module):
    """Cross layer of DCN-V2 (Wang et al. 2021, arXiv 2008.13535): ``x₀ ⊙ (W x + b) + x``, or of low rank, ``W = U Vᵀ``.

    Parameters
    ----------
    width
        Columns ``d`` of x₀ and x.
    low_rank
        Columns ``r`` of U and V, or None for a whole matrix W ``[d, d]``.
    library
        What computes float32 products on CPUs, see `hotbed.nn.linear.Linear`.

    Raises
    ------
    SpecError
        If the rank is not between 1 and the width.
    """

    def __init__(self, width: int, low_rank: int | None = None, *, library: LinearLibrary = "auto") -> None:
        super().__init__()
        if low_rank is not None and not 1 <= low_rank <= width:
            raise SpecError(f"CrossLayer: low_rank is {low_rank:,}, must be from 1 to the {width:,} inputs, or None")
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
        """``[B, d]`` of x₀ and x ``[B, d]``."""
        return first * self.up(x if self.down is None else self.down(x)) + x


class DCNv2(nn.Module):
    """DCN-V2, stacked: cross layers over embeddings and dense inputs side by side, then an MLP.

    Its parameters grow with the number of features, where those of `DLRM` grow with the number of their pairs: 400
    features of dim 16 are 6,400 inputs of 64 × 6,400 weights per low-rank layer, and 80,000 products of pairs.

    Parameters
    ----------
    tables, features
        As for `EmbeddingCollection`, of any dims.
    dense_features
        Number of dense inputs ``I``.
    layers
        Cross layers; each multiplies once more with the inputs.
    low_rank
        Rank of their matrices, or None for whole ones. Where there are no more inputs than that, they are whole, too:
        two matrices of full rank would be no less.
    top
        Widths of the MLP. It ends with the number of labels and has no last ReLU.
    dropout
        Share of the outputs of the MLP's hidden layers that are 0 in a training step, see `MLP`.
    seed
        Seed of the tables' initial values (the layers use torch's generator).
    backend
        Kernels, as in `EmbeddingCollection`.

    Raises
    ------
    SpecError
        If a feature is not pooled, or a number is out of range.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        layers: int = 3,
        low_rank: int | None = 64,
        top: Sequence[int] = (1024, 512, 1),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        if layers < 1:
            raise SpecError(f"DCNv2: layers is {layers}, must be at least 1")
        if low_rank is not None and low_rank < 1:
            raise SpecError(f"DCNv2: low_rank is {low_rank}, must be at least 1, or null for whole matrices")
        refuse_sequences(self, features)
        dims = {table.name: table.dim for table in tables}
        width = sum(dims[feature.table] for feature in features) + dense_features
        rank = low_rank if low_rank is not None and low_rank < width else None
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.cross = nn.ModuleList([CrossLayer(width, rank) for _ in range(layers)])
        self.top = MLP(width, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        first = self.embeddings(batch.sparse).concatenate()
        if dense is not None:
            first = torch.cat([first, dense.to(first.dtype)], dim=1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        return self.top(x).to(torch.float32)
