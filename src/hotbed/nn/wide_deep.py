"""Define Wide & Deep: a linear part that memorizes ids, and an MLP that generalizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.nn.layers import MLP
from hotbed.nn.models import dense_inputs, first_order, linear_tables, refuse_sequences
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al. 2016, arXiv 1606.07792) in the form of NVIDIA's recommender with 100B+ parameters.

    The wide part (section 3.1) is linear in the ids. For each table it has another table with one column per label,
    which is float32 even with autocast. The deep part (section 3.2) is an MLP over pooled embeddings and dense inputs.
    The logits are the sum of both parts (section 3.3).

    The wide part is a separate collection, so it can have a separate optimizer. For example, use
    ``RowWiseAdagrad(model.embeddings)`` and ``FTRL(model.wide)``, or ``sparse_optimizer_groups`` in a recipe. The wide
    tables start at 0, as FTRL requires. `hotbed.distribute` replicates them on every rank, so that their rows are not
    exchanged.

    Parameters
    ----------
    tables, features
        See `EmbeddingCollection`. Tables may have any dims. The wide tables have the same names, rows and ``frozen``.
    dense_features
        Number of dense inputs ``I`` of the deep part.
    top, dropout
        Widths and dropout of the MLP, see `MLP`. The last width is the number of labels.
    seed, backend
        See `EmbeddingCollection`. The MLP uses torch's generator.

    Attributes
    ----------
    embeddings, wide
        Collections of the deep part and of the wide part.
    schemes
        Sharding schemes of collections that do not use the plan of the other collections, see `hotbed.embed.plan_for`.

    Raises
    ------
    SpecError
        If a feature is not pooled, or the last width of ``top`` is not a number of labels.
    """

    schemes: ClassVar[Mapping[str, str]] = {"wide": "dp"}

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        top: Sequence[int] = (1024, 1024, 512, 256, 1),
        dropout: float = 0.0,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        linear = linear_tables(self, tables, top)
        refuse_sequences(self, features)
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.wide = EmbeddingCollection(linear, features, seed=seed, backend=backend)
        dims = {table.name: table.dim for table in tables}
        width = sum(dims[feature.table] for feature in features) + dense_features
        self.top = MLP(width, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        vectors, wide = self._look_up(batch.sparse)
        inputs = vectors if dense is None else torch.cat([vectors, dense.to(vectors.dtype)], dim=1)
        return self.top(inputs).to(torch.float32) + wide

    def _look_up(self, ids: Jagged) -> tuple[Tensor, Tensor]:
        """Return inputs of the deep part ``[B, ΣD]`` and logits of the wide part ``[B, T]``."""
        return self.embeddings(ids).concatenate(), first_order(self.wide, ids)
