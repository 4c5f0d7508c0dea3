"""Define DLRM: dense inputs, and dot products of pairs of features."""

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

    Sections 2.1 and 2.2 of the paper describe the model. The bottom MLP (2.1.4) maps the dense inputs to one vector of
    the tables' dim. Dot products of all pairs of this vector and the pooled embeddings (2.1.1) are computed, as in a
    factorization machine (2.1.3). The top MLP maps the vector and the products to one logit per label.

    Parameters
    ----------
    tables, features
        See `EmbeddingCollection`. All tables must have the same dim, the last width of ``bottom``.
    dense_features
        Number of dense inputs ``I``. If it is 0, the input of the bottom MLP is a constant 1.
    bottom, top
        Widths of the MLPs. ``top`` ends with the number of labels and has no last ReLU.
    dropout
        Dropout of both MLPs, see `MLP`.
    embeddings_to_top
        Whether the embeddings are also inputs of the top MLP. Rare ids are then learned much sooner, because the
        product of two rows near 0 has no information about either row. NVIDIA's DLRM does not do this.
    seed, backend
        See `EmbeddingCollection`. MLPs use torch's generator.

    Raises
    ------
    SpecError
        If dims and widths do not match.

    Examples
    --------
    >>> tables = [hb.Table("users", rows=100, dim=8), hb.Table("items", rows=100, dim=8)]
    >>> features = [hb.Feature("user", "users"), hb.Feature("item", "items")]
    >>> model = DLRM(tables, features, dense_features=0, bottom=[8], top=[16, 1])
    >>> batch = hb.Batch(sparse=hb.Jagged.from_dict({"user": [7, 8], "item": [4, 1]}))
    >>> tuple(model(batch).shape)
    (2, 1)
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
            raise SpecError("DLRM: bottom: got no widths, expected at least one, the dim of the tables")
        refuse_sequences(self, features)
        dim = bottom[-1]
        for table in tables:
            if table.dim != dim:
                raise SpecError(
                    f"DLRM: dim of table '{table.name}': got {table.dim}, expected {dim}, the last width of bottom"
                )
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.bottom = MLP(max(dense_features, 1), bottom, dropout=dropout)
        self.interaction = DotInteraction(1 + len(features), dim, backend=backend)
        self.embeddings_to_top = embeddings_to_top
        width = self.interaction.width + (len(features) * dim if embeddings_to_top else 0)
        self.top = MLP(width, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[B, T]`` float32."""
        dense = dense_inputs_or_one(self, batch, self.dense_features)
        embeddings = self.embeddings(batch.sparse, room=1)
        vectors = embeddings.stack(lead=self.bottom(dense))
        inputs = self.interaction(vectors)
        if self.embeddings_to_top:
            inputs = torch.cat([inputs, vectors[:, 1:].flatten(1).to(inputs.dtype)], dim=1)
        return self.top(inputs).to(torch.float32)
