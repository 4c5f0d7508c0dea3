"""Define what models of histories share: features that give a vector per id, and scores of a candidate for a history.

A history's ids are in the order of time, the newest last. They go to the tables jagged, as they are; only their vectors
are looked up into padded memory, with zeros after the newest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checks import Count, Probability, check, check_known
from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.nn.linear import draw_normal
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


def history_features(
    model: nn.Module, features: Sequence[Feature], histories: Mapping[str, str], max_len: int
) -> list[Feature]:
    """Change history features to a vector per id, of the newest ``max_len`` ids unless the feature has a limit.

    ``histories`` maps features of histories to the candidate features that they are compared with. Raise `SpecError` if
    there is no history or no such feature, the two have different tables, or the candidate is a history itself.
    """
    name, by_name = type(model).__name__, {feature.name: feature for feature in features}
    if not histories:
        raise SpecError(f"{name}: there is no history; name its feature and that of the candidate: {{history: item}}")
    check(f"{name}: max_len", max_len, Count, SpecError)
    for role, one in (*(("history", h) for h in histories), *(("candidate", c) for c in histories.values())):
        check_known(f"{name}: the {role}", one, by_name, SpecError)
    for history, candidate in histories.items():
        if candidate in histories or not by_name[candidate].is_pooled:
            raise SpecError(f"{name}: the candidate '{candidate}' is a sequence; it must have one vector per sample")
        tables = by_name[history].table, by_name[candidate].table
        if tables[0] != tables[1]:
            raise SpecError(
                f"{name}: history '{history}' has table '{tables[0]}' and its candidate '{candidate}' '{tables[1]}'; "
                f"they must share one, so that their vectors can be compared: give '{history}' table: {tables[1]}"
            )

    def unpooled(feature: Feature) -> Feature:
        if feature.max_len is not None:
            return replace(feature, pooling="none", padding="right")
        return replace(feature, pooling="none", max_len=max_len, on_too_long="keep_last", padding="right")

    return [unpooled(feature) if feature.name in histories else feature for feature in features]


class NextItem(nn.Module, ABC):
    """Score of a candidate: the product of its vector and what an encoder makes of the history at its newest item.

    Positions have vectors, too, counted from the newest item, which is what padding in front of the oldest does in the
    papers. A history without ids has the logit 0.

    Parameters
    ----------
    tables, features
        As for `EmbeddingCollection`: the history, the candidate, and their table.
    dense_features
        Must be 0: the published models have no other inputs.
    history, item
        Names of the two features.
    max_len
        Newest items that are looked at.
    dropout
        Share of the inputs' columns that are 0 in a training step.
    seed, backend
        As for `EmbeddingCollection`.

    Raises
    ------
    SpecError
        If there are other inputs, or the features cannot be a history and its candidate.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int,
        history: str,
        item: str,
        max_len: int,
        dropout: float,
        seed: int,
        backend: BackendName,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        specs = history_features(self, features, {history: item}, max_len)
        others = [feature.name for feature in features if feature.name not in (history, item)]
        if others or dense_features:
            what = ", ".join(others) or f"{dense_features} dense inputs"
            raise SpecError(
                f"{name} scores '{item}' by '{history}' alone, not by {what}; leave other columns out of the "
                "schema, or use DIN"
            )
        check(f"{name}: dropout", dropout, Probability, SpecError)
        self.history, self.item = history, item
        self.embeddings = EmbeddingCollection(tables, specs, seed=seed, backend=backend)
        self.dim = tables[0].dim
        self.length = next(f.max_len or max_len for f in specs if f.name == history)
        self.positions = nn.Embedding(self.length, self.dim)
        draw_normal(self.positions.weight, 0.02)
        self.dropout = nn.Dropout(dropout)

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """``[B, L, D]`` to ``[B, L, D]``, of which no place may look at later ones: what is padded comes last."""

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, 1]`` float32."""
        found = self.embeddings(batch.sparse)
        vectors, mask = found.padded(self.history)
        lengths = mask.sum(dim=1, keepdim=True)
        age = lengths - 1 - torch.arange(self.length, device=mask.device)
        encoded = self.encode(self.dropout(vectors + self.positions(age.clamp(min=0))))
        newest = (lengths - 1).clamp(min=0)[:, :, None].expand(-1, -1, self.dim)
        last = encoded.gather(1, newest)[:, 0] * (lengths > 0)
        return (last.float() * found[self.item].float()).sum(dim=1, keepdim=True)
