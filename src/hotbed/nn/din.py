"""Define DIN: a user's history, weighted by how like the candidate its items are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.nn.attention import AttentionPooling, Dice
from hotbed.nn.histories import history_features
from hotbed.nn.layers import MLP
from hotbed.nn.models import dense_inputs, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class DIN(nn.Module):
    """Deep interest network (Zhou et al. 2018, arXiv 1706.06978).

    Histories are pooled by attention to the candidate (equation 3), see `AttentionPooling`, and go through an MLP with
    `Dice` (equation 9), beside all other features and the dense inputs.

    Parameters
    ----------
    tables, features, dense_features
        As for `EmbeddingCollection`; those other than histories must be pooled; number of dense inputs ``I``.
    histories
        Features of histories, each with the feature of the candidate that it holds earlier values of, in one table:
        ``{history: item, shops: shop}``.
    max_len, attention
        Newest ids of a history that are looked at; hidden widths of the MLPs that weight them.
    top, dropout
        Widths of the MLP, which end with the number of labels, and its dropout, see `MLP`.
    seed, backend
        As for `EmbeddingCollection` (the layers use torch's generator).

    Raises
    ------
    SpecError
        If features cannot be histories and candidates, or another one is not pooled.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 0,
        *,
        histories: Mapping[str, str],
        max_len: int = 50,
        attention: Sequence[int] = (80, 40),
        top: Sequence[int] = (200, 80, 1),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        specs = history_features(self, features, histories, max_len)
        refuse_sequences(self, [feature for feature in specs if feature.name not in histories])
        dims = {f.name: table.dim for f in features for table in tables if table.name == f.table}
        self.dense_features, self.histories = dense_features, dict(histories)
        self.pooled = [feature.name for feature in specs if feature.is_pooled]
        self.embeddings = EmbeddingCollection(tables, specs, seed=seed, backend=backend)
        self.attention = nn.ModuleList([AttentionPooling(dims[history], attention) for history in histories])
        self.top = MLP(sum(dims.values()) + dense_features, top, last_relu=False, activation=Dice, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        found = self.embeddings(batch.sparse)
        inputs = [found[name] for name in self.pooled]
        for (history, candidate), pooling in zip(self.histories.items(), self.attention, strict=True):
            inputs.append(pooling(found[candidate], *found.padded(history)))
        if dense is not None:
            inputs.append(dense)
        return self.top(torch.cat([x.float() for x in inputs], dim=1)).float()
