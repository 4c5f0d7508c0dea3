"""Define DIN: attention that weights the items of a history by their similarity to the candidate."""

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

    `AttentionPooling` pools each history by attention to the candidate (equation 3). An MLP with `Dice` (equation 9)
    then processes the pooled histories, all other features, and the dense inputs.

    Parameters
    ----------
    tables, features, dense_features
        See `EmbeddingCollection`. Features that are not histories must be pooled. ``dense_features`` is the number of
        dense inputs ``I``.
    histories
        Maps each history feature to its candidate feature, e.g. ``{history: item, shops: shop}``. The history has
        earlier values of the candidate, and both use one table.
    max_len, attention
        Number of newest ids of a history that are used, and hidden widths of the attention MLPs.
    top, dropout
        Widths and dropout of the MLP, see `MLP`. The last width is the number of labels.
    seed, backend
        See `EmbeddingCollection`. The layers use torch's generator.

    Raises
    ------
    SpecError
        If features cannot be histories and candidates, or another feature is not pooled.
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
        """Return logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        found = self.embeddings(batch.sparse)
        inputs = [found[name] for name in self.pooled]
        for (history, candidate), pooling in zip(self.histories.items(), self.attention, strict=True):
            inputs.append(pooling(found[candidate], *found.padded(history)))
        if dense is not None:
            inputs.append(dense)
        return self.top(torch.cat([x.float() for x in inputs], dim=1)).float()
