"""Define an ensemble of DLRMs in one model. Each member has its own columns of the same tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checks import Range, check
from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.nn.models import dense_inputs_or_one, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class DLRMEnsemble(nn.Module):
    """Ensemble of DLRMs. Each member has its own MLPs and its own columns. The ensemble's logit is the mean logit.

    Models that differ only in their random initial values have different errors where samples are few. Their mean has a
    smaller error (Lakshminarayanan et al. 2017, arXiv 1612.01474; several sets of embeddings in one model: Guo et al.
    2024, arXiv 2310.04400). Each member has a separate loss, because with the loss of the mean all members would learn
    from the same error. A table row has the vectors of all members, so ids are looked up, updated and exchanged once.

    Parameters
    ----------
    tables, features
        See `EmbeddingCollection`. All tables must have the same dim, ``members`` times the last width of ``bottom``.
    dense_features
        Number of dense inputs ``I``. If it is 0, the input of the bottom MLPs is a constant 1.
    members
        Number of DLRMs ``M``.
    bottom, top
        Widths of each member's MLPs, as in `DLRM`. The embeddings and their products are inputs of the top MLP.
    dropout, seed, backend
        See `DLRM`.

    Raises
    ------
    SpecError
        If dims and widths do not match, or the ensemble has fewer than two members.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        members: int = 4,
        bottom: Sequence[int] = (64, 8),
        top: Sequence[int] = (256, 128, 1),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        fix = "Use hotbed.nn.DLRM for a single model."
        check("DLRMEnsemble: members", members, Annotated[int, Range(least=2)], SpecError, fix)
        if not bottom:
            raise SpecError("DLRMEnsemble: bottom: got no widths, expected at least one, the columns of a member")
        refuse_sequences(self, features)
        self.columns = bottom[-1]
        dim = members * self.columns
        for table in tables:
            if table.dim != dim:
                raise SpecError(
                    f"DLRMEnsemble: dim of table '{table.name}': got {table.dim}, expected {dim}, which is {members} "
                    f"members × {self.columns}, the last width of bottom"
                )
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        inputs = max(dense_features, 1)
        self.bottoms = nn.ModuleList([MLP(inputs, bottom, dropout=dropout) for _ in range(members)])
        self.interaction = DotInteraction(1 + len(features), self.columns, backend=backend)
        width = self.interaction.width + len(features) * self.columns
        self.tops = nn.ModuleList([MLP(width, top, last_relu=False, dropout=dropout) for _ in range(members)])

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[B, T]`` float32. In training, return the logits of each member, ``[M, B, T]``."""
        dense = dense_inputs_or_one(self, batch, self.dense_features)
        embeddings = self.embeddings(batch.sparse, room=1)
        vectors = embeddings.stack(lead=torch.cat([bottom(dense) for bottom in self.bottoms], dim=1))
        parts = vectors.split(self.columns, dim=2)
        logits = torch.stack([self._score(cast(MLP, top), part) for top, part in zip(self.tops, parts, strict=True)])
        return logits if self.training else logits.mean(dim=0)

    def _score(self, top: MLP, vectors: Tensor) -> Tensor:
        """Return a member's logits ``[B, T]`` float32 from its columns ``[B, 1 + F, D ÷ M]`` of all vectors."""
        vectors = vectors.contiguous()
        products = self.interaction(vectors)
        return top(torch.cat([products, vectors[:, 1:].flatten(1).to(products.dtype)], dim=1)).to(torch.float32)
