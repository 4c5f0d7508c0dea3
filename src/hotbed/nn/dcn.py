"""Define DCN-V2: cross layers and an MLP. The cost grows with the inputs, not with the pairs of features."""

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
    """Stacked DCN-V2 (Wang et al. 2021, arXiv 2008.13535, figure 1a): cross layers (equations 1 and 2), then an MLP.

    The number of parameters grows with the number of features. In `DLRM` it grows with the number of pairs of features.
    With ``bottom``, the model is the DLRM-DCNv2 of MLPerf and TorchRec.

    Parameters
    ----------
    tables, features, dense_features
        See `EmbeddingCollection`. Tables may have any dims. ``dense_features`` is the number of dense inputs ``I``.
    layers, low_rank
        See `CrossNetwork`.
    bottom
        Widths of an MLP for the dense inputs, as in `DLRM`. If empty, dense inputs are used without an MLP.
    top
        Widths of the MLP. It ends with the number of labels and has no last ReLU.
    dropout
        Dropout of the MLPs, see `MLP`.
    seed, backend
        See `EmbeddingCollection`. The layers use torch's generator.

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
        """Return logits ``[B, T]`` float32."""
        if self.bottom is None:
            dense = dense_inputs(self, batch, self.dense_features)
        else:
            dense = self.bottom(dense_inputs_or_one(self, batch, self.dense_features))
        first = self.embeddings(batch.sparse).concatenate()
        if dense is not None:
            first = torch.cat([first, dense.to(first.dtype)], dim=1)
        return self.top(self.cross(first)).to(torch.float32)
