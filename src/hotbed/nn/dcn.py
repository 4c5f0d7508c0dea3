"""Define DCN-V2: cross layers, whose cost grows with the inputs and not with the pairs of features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.nn.cross import CrossNetwork
from hotbed.nn.layers import MLP
from hotbed.nn.models import dense_inputs, dense_inputs_or_one, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class DCNv2(nn.Module):
    """DCN-V2, stacked (Wang et al. 2021, arXiv 2008.13535, figure 1a): cross layers, equations 1 and 2, then an MLP.

    Its parameters grow with the number of features, where those of `DLRM` grow with the number of their pairs. With
    ``bottom`` it is the DLRM-DCNv2 of MLPerf and TorchRec.

    Parameters
    ----------
    tables, features, dense_features
        As for `EmbeddingCollection`, of any dims; number of dense inputs ``I``.
    layers, low_rank
        As for `CrossNetwork`.
    bottom
        Widths of an MLP that dense inputs go through first, as in `DLRM`; without any, they are taken as they are.
    top
        Widths of the MLP. It ends with the number of labels and has no last ReLU.
    dropout
        Of the MLPs, see `MLP`.
    seed, backend
        As for `EmbeddingCollection` (the layers use torch's generator).

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
        bottom: Sequence[int] = (),
        top: Sequence[int] = (1024, 512, 1),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        refuse_sequences(self, features)
        dims = {table.name: table.dim for table in tables}
        width = sum(dims[feature.table] for feature in features) + (bottom[-1] if bottom else dense_features)
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.bottom = MLP(max(dense_features, 1), bottom, dropout=dropout) if bottom else None
        self.cross = CrossNetwork(width, layers, low_rank)
        self.top = MLP(width, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        if self.bottom is None:
            dense = dense_inputs(self, batch, self.dense_features)
        else:
            dense = self.bottom(dense_inputs_or_one(self, batch, self.dense_features))
        first = self.embeddings(batch.sparse).concatenate()
        if dense is not None:
            first = torch.cat([first, dense.to(first.dtype)], dim=1)
        return self.top(self.cross(first)).to(torch.float32)
