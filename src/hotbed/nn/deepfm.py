"""Define DeepFM: a factorization machine and an MLP over the same embeddings."""

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

    ``y_FM`` is ``⟨w, x⟩ + Σ ⟨Vᵢ, Vⱼ⟩ xᵢ xⱼ`` (2), ``y_DNN`` an MLP over the same vectors side by side (3, 4). Weights
    ``w`` of ids are tables of one column per label, a collection ``wide`` of its own as in `WideDeep`; they start at 0.
    A numerical is a field with a weight and a vector, times its value.

    Parameters
    ----------
    tables, features, dense_features
        As for `EmbeddingCollection`; all tables must have the same dim; number of dense inputs ``I``.
    top, dropout
        Widths of the MLP, which end with the number of labels, and its dropout, see `MLP`.
    seed, backend
        As for `EmbeddingCollection` (the layers use torch's generator).

    Raises
    ------
    SpecError
        If a feature is not pooled, dims differ, or the last width of ``top`` is no number of labels.
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
            raise SpecError(f"DeepFM: tables have dims {dims}; products of vectors need one dim, give all the same")
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.wide = EmbeddingCollection(linear_tables(self, tables, top), features, seed=seed, backend=backend)
        self.numericals = NumericalEmbedding(dense_features, dim) if dense_features else None
        self.linear = Linear(dense_features, top[-1]) if dense_features else None
        self.fm = FactorizationMachine()
        self.top = MLP((len(features) + dense_features) * dim, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        vectors = self.embeddings(batch.sparse).stack()
        linear = first_order(self.wide, batch.sparse)
        if dense is not None and self.numericals is not None and self.linear is not None:
            vectors = torch.cat([vectors, self.numericals(dense).to(vectors.dtype)], dim=1)
            linear = linear + self.linear(dense)
        return linear.float() + self.fm(vectors) + self.top(vectors.flatten(1)).float()
