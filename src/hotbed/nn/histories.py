"""Define the common parts of models with histories: features with one vector per id, and scores of candidates.

The ids of a history are in the order of time, the newest last. Tables look up jagged ids without padding. Only the
looked-up vectors are padded, with zeros after the newest id.
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
    """Change history features so that they return one vector per id, for the newest ``max_len`` ids.

    A feature that has ``max_len`` keeps its own limit. ``histories`` maps each history feature to the candidate feature
    that it is compared with. Raise `SpecError` if no history is named, a feature is unknown, a history and its
    candidate have different tables, or the candidate is a history.
    """
    name, by_name = type(model).__name__, {feature.name: feature for feature in features}
    if not histories:
        raise SpecError(f"{name}: histories: got none, expected a history and its candidate, e.g. {{history: item}}")
    check(f"{name}: max_len", max_len, Count, SpecError)
    for role, one in (*(("history", h) for h in histories), *(("candidate", c) for c in histories.values())):
        check_known(f"{name}: the {role}", one, by_name, SpecError)
    for history, candidate in histories.items():
        if candidate in histories or not by_name[candidate].is_pooled:
            raise SpecError(f"{name}: candidate '{candidate}': got a sequence, expected one vector per sample")
        tables = by_name[history].table, by_name[candidate].table
        if tables[0] != tables[1]:
            raise SpecError(
                f"{name}: table of history '{history}': got '{tables[0]}', expected '{tables[1]}' as in its candidate "
                f"'{candidate}', so that their vectors can be compared. Set table: {tables[1]} for '{history}'"
            )

    def unpooled(feature: Feature) -> Feature:
        if feature.max_len is not None:
            return replace(feature, pooling="none", padding="right")
        return replace(feature, pooling="none", max_len=max_len, on_too_long="keep_last", padding="right")

    return [unpooled(feature) if feature.name in histories else feature for feature in features]


class NextItem(nn.Module, ABC):
    """Base of models that score a candidate by the history before it.

    The score is the product of the candidate's vector and the encoder's output at the newest item of the history.
    Positions also have vectors. They are counted from the newest item; the papers do this by padding before the oldest
    item. A history without ids has the logit 0.

    Parameters
    ----------
    tables, features
        See `EmbeddingCollection`. They are the history, the candidate, and their table.
    dense_features
        Must be 0, because the published models have no other inputs.
    history, item
        Names of the history feature and of the candidate feature.
    max_len
        Number of newest items that are used.
    dropout
        Fraction of the inputs' columns that are set to 0 in a training step.
    seed, backend
        See `EmbeddingCollection`.

    Raises
    ------
    SpecError
        If the model has other inputs, or the features cannot be a history and its candidate.
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
            extra = ", ".join(others) or f"{dense_features} dense inputs"
            raise SpecError(
                f"{name}: other inputs: got {extra}, expected none, because it scores '{item}' by '{history}' only. "
                "Remove other columns from the schema, or use DIN"
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
        """Map ``[B, L, D]`` to ``[B, L, D]``. No position may use later positions, because padding comes last."""

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[B, 1]`` float32."""
        found = self.embeddings(batch.sparse)
        vectors, mask = found.padded(self.history)
        lengths = mask.sum(dim=1, keepdim=True)
        age = lengths - 1 - torch.arange(self.length, device=mask.device)
        encoded = self.encode(self.dropout(vectors + self.positions(age.clamp(min=0))))
        newest = (lengths - 1).clamp(min=0)[:, :, None].expand(-1, -1, self.dim)
        last = encoded.gather(1, newest)[:, 0] * (lengths > 0)
        return (last.float() * found[self.item].float()).sum(dim=1, keepdim=True)
