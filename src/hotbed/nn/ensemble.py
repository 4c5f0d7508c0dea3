"""Define an ensemble of DLRMs in one model: members with columns of their own in the same tables."""

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
    """Ensemble of DLRMs, each with MLPs and columns of its own, whose mean logit is the ensemble's.

    Models that differ in their random beginnings alone err differently where samples are few, and their mean errs
    less (Lakshminarayanan et al. 2017, arXiv 1612.01474; several sets of embeddings in one model: Guo et al. 2024,
    arXiv 2310.04400). Each member is trained by a loss of its own: by that of their mean they would share one error.
    Tables hold the vectors of all members side by side, so that ids are looked up, updated and exchanged once.

    Parameters
    ----------
    tables, features
        As for `EmbeddingCollection`; all tables must have the same dim, ``members`` times the last width of ``bottom``.
    dense_features
        Number of dense inputs ``I``. Without any, the bottom MLPs see a constant 1.
    members
        Number of DLRMs ``M``.
    bottom, top
        Widths of each member's MLPs, as in `DLRM`. Its top MLP sees the embeddings beside their products.
    dropout, seed, backend
        As for `DLRM`.

    Raises
    ------
    SpecError
        If dims and widths do not fit, or there are fewer than two members.
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
        fix = "A single one is hotbed.nn.DLRM."
        check("DLRMEnsemble: members", members, Annotated[int, Range(least=2)], SpecError, fix)
        if not bottom:
            raise SpecError("DLRMEnsemble: bottom is empty; it needs at least one width, the columns of a member")
        refuse_sequences(self, features)
        self.columns = bottom[-1]
        dim = members * self.columns
        for table in tables:
            if table.dim != dim:
                raise SpecError(
                    f"DLRMEnsemble: table '{table.name}' has dim {table.dim}, must have {dim}: {members} members × the "
                    f"{self.columns} that the bottom MLPs end with"
                )
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        inputs = max(dense_features, 1)
        self.bottoms = nn.ModuleList([MLP(inputs, bottom, dropout=dropout) for _ in range(members)])
        self.interaction = DotInteraction(1 + len(features), self.columns, backend=backend)
        width = self.interaction.width + len(features) * self.columns
        self.tops = nn.ModuleList([MLP(width, top, last_relu=False, dropout=dropout) for _ in range(members)])

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32; in training those of each member, ``[M, B, T]``, for a loss of its own."""
        dense = dense_inputs_or_one(self, batch, self.dense_features)
        embeddings = self.embeddings(batch.sparse, room=1)
        vectors = embeddings.stack(lead=torch.cat([bottom(dense) for bottom in self.bottoms], dim=1))
        parts = vectors.split(self.columns, dim=2)
        logits = torch.stack([self._logits(cast(MLP, top), part) for top, part in zip(self.tops, parts, strict=True)])
        return logits if self.training else logits.mean(dim=0)

    def _logits(self, top: MLP, vectors: Tensor) -> Tensor:
        """``[B, T]`` float32 of a member, of its columns ``[B, 1 + F, D ÷ M]`` of all vectors."""
        vectors = vectors.contiguous()
        products = self.interaction(vectors)
        return top(torch.cat([products, vectors[:, 1:].flatten(1).to(products.dtype)], dim=1)).to(torch.float32)
