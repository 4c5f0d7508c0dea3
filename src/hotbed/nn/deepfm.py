"""Define DeepFM: a factorization machine and an MLP that share embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.nn.factorization import FactorizationMachine, NumericalEmbedding
from hotbed.nn.layers import MLP
from hotbed.nn.linear import Linear
from hotbed.nn.models import dense_inputs, first_order, linear_tables, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class DeepFM(nn.Module):
    """DeepFM (Guo et al. 2017, arXiv 1703.04247): logits ``y_FM + y_DNN`` (equation 1).

    ``y_FM`` is ``⟨w, x⟩ + Σ ⟨Vᵢ, Vⱼ⟩ xᵢ xⱼ`` (equation 2). ``y_DNN`` is an MLP over the concatenation of the same
    vectors (equations 3 and 4). The weights ``w`` of ids are tables with one column per label. They are in a separate
    collection ``wide``, as in `WideDeep`, and start at 0. A numerical is a field with a weight and a vector, which are
    multiplied by its value.

    Parameters
    ----------
    tables, features, dense_features
        See `EmbeddingCollection`. All tables must have the same dim. ``dense_features`` is the number of dense inputs
        ``I``.
    top, dropout
        Widths and dropout of the MLP, see `MLP`. The last width is the number of labels.
    seed, backend
        See `EmbeddingCollection`. The layers use torch's generator.

    Raises
    ------
    SpecError
        If a feature is not pooled, dims differ, or the last width of ``top`` is not a number of labels.
    """

    schemes: ClassVar[Mapping[str, str]] = {"wide": "dp"}

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        top: Sequence[int] = (400, 400, 400, 1),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        refuse_sequences(self, features)
        dims = {table.name: table.dim for table in tables}
        dim = tables[0].dim
        if set(dims.values()) != {dim}:
            raise SpecError(f"DeepFM: dims of tables: got {dims}, expected one dim, because vectors are multiplied")
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.wide = EmbeddingCollection(linear_tables(self, tables, top), features, seed=seed, backend=backend)
        self.numericals = NumericalEmbedding(dense_features, dim) if dense_features else None
        self.linear = Linear(dense_features, top[-1]) if dense_features else None
        self.fm = FactorizationMachine()
        self.top = MLP((len(features) + dense_features) * dim, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        vectors = self.embeddings(batch.sparse).stack()
        linear = first_order(self.wide, batch.sparse)
        if dense is not None and self.numericals is not None and self.linear is not None:
            vectors = torch.cat([vectors, self.numericals(dense).to(vectors.dtype)], dim=1)
            linear = linear + self.linear(dense)
        return linear.float() + self.fm(vectors) + self.top(vectors.flatten(1)).float()
