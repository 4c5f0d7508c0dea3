"""Define MMoE for several tasks. Each task has its own tower over its own mixture of shared experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.nn.experts import MixtureOfExperts
from hotbed.nn.layers import MLP
from hotbed.nn.models import dense_inputs, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class MMoE(nn.Module):
    """Multi-gate mixture of experts (Ma et al., KDD 2018) over concatenated embeddings and dense inputs.

    The logit of task k is ``yₖ = hᵏ(fᵏ(x))`` (equation 6). ``hᵏ`` is the task's tower. ``fᵏ(x)`` is a mixture of shared
    experts (equation 7) by the task's gate (equation 8, `MixtureOfExperts`). Tasks that disagree learn to use different
    experts. In a shared bottom MLP, they would disturb each other.

    Parameters
    ----------
    tables, features
        See `EmbeddingCollection`. Tables may have any dims.
    dense_features, tasks
        Number of dense inputs ``I``, and number of labels ``T``.
    experts, expert
        Number of experts, and the widths of each.
    tower
        Hidden widths of each task's tower, which ends with one logit.
    dropout
        Dropout of experts and towers, see `MLP`.
    seed
        Seed of the tables' initial values. The layers use torch's generator.
    backend
        Kernels, see `EmbeddingCollection`.

    Raises
    ------
    SpecError
        If a feature is not pooled, or a number is out of range.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        tasks: int = 2,
        experts: int = 8,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        refuse_sequences(self, features)
        dims = {table.name: table.dim for table in tables}
        width = sum(dims[feature.table] for feature in features) + dense_features
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.mixtures = MixtureOfExperts(width, expert, experts=experts, gates=tasks, dropout=dropout)
        widths = [*tower, 1]
        self.towers = nn.ModuleList([MLP(expert[-1], widths, last_relu=False, dropout=dropout) for _ in range(tasks)])

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[B, T]`` float32."""
        dense, x = dense_inputs(self, batch, self.dense_features), self.embeddings(batch.sparse).concatenate()
        mixtures = self.mixtures(x if dense is None else torch.cat([x, dense.to(x.dtype)], dim=1)).unbind(1)
        logits = [tower(mixture) for tower, mixture in zip(self.towers, mixtures, strict=True)]
        return torch.cat(logits, dim=1).to(torch.float32)
