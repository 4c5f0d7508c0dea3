"""Define DLRM: products of pairs of features, beside the dense inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.models import dense_inputs_or_one, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al. 2019, arXiv 1906.00091) with the shapes of NVIDIA's DLRM.

    Sections 2.1 and 2.2 of the paper: dense inputs go through the bottom MLP (2.1.4) to one vector of the tables' dim;
    its dot products with the pooled embeddings (2.1.1), and those of pairs of these, as in a factorization machine
    (2.1.3), go beside it through the top MLP to one logit per label.

    Parameters
    ----------
    tables, features
        As for `EmbeddingCollection`; all tables must have the same dim, the last width of ``bottom``.
    dense_features
        Number of dense inputs ``I``. Without any, the bottom MLP sees a constant 1.
    bottom, top
        Widths of the MLPs. ``top`` ends with the number of labels and has no last ReLU.
    dropout
        Of both MLPs, see `MLP`.
    embeddings_to_top
        Whether the top MLP sees the embeddings, too: a product of two rows that are still near 0 says nothing of
        either, so that rare ids are learnt far sooner. NVIDIA's DLRM has it off.
    seed, backend
        As for `EmbeddingCollection` (MLPs use torch's generator).

    Raises
    ------
    SpecError
        If dims and widths do not fit.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        bottom: Sequence[int] = (512, 256, 128),
        top: Sequence[int] = (1024, 1024, 512, 256, 1),
        dropout: float = 0.0,
        embeddings_to_top: bool = False,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        if not bottom:
            raise SpecError("DLRM: bottom is empty; it needs at least one width, the dim of the tables")
        refuse_sequences(self, features)
        dim = bottom[-1]
        for table in tables:
            if table.dim != dim:
                raise SpecError(
                    f"DLRM: table '{table.name}' has dim {table.dim} but the bottom MLP ends with {dim}; make them one"
                )
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.bottom = MLP(max(dense_features, 1), bottom, dropout=dropout)
        self.interaction = DotInteraction(1 + len(features), dim, backend=backend)
        self.embeddings_to_top = embeddings_to_top
        width = self.interaction.width + (len(features) * dim if embeddings_to_top else 0)
        self.top = MLP(width, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        dense = dense_inputs_or_one(self, batch, self.dense_features)
        embeddings = self.embeddings(batch.sparse, room=1)
        vectors = embeddings.stack(lead=self.bottom(dense))
        inputs = self.interaction(vectors)
        if self.embeddings_to_top:
            inputs = torch.cat([inputs, vectors[:, 1:].flatten(1).to(inputs.dtype)], dim=1)
        return self.top(inputs).to(torch.float32)
