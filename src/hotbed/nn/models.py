"""Click models of the literature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, SpecError
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al. 2019) with the shapes of NVIDIA's DLRM.

    Dense inputs go through the bottom MLP to one vector of the tables' dim; its dot interaction with the pooled
    embeddings goes through the top MLP to one logit per label.

    Parameters
    ----------
    tables, features
        As for `EmbeddingCollection`; all tables must have the same dim, the last width of ``bottom``.
    dense_features
        Number of dense inputs ``I``. Without any, the bottom MLP sees a constant 1.
    bottom, top
        Widths of the MLPs. ``top`` ends with the number of labels and has no last ReLU.
    seed
        Seed of the tables' initial values (MLPs use torch's generator).
    backend
        Kernels, as in `EmbeddingCollection`.

    Raises
    ------
    SpecError
        If dims and widths do not fit.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 13,
        *,
        bottom: Sequence[int] = (512, 256, 128),
        top: Sequence[int] = (1024, 1024, 512, 256, 1),
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        if not bottom:
            raise SpecError("DLRM: bottom is empty; it needs at least one width, the dim of the tables")
        for feature in features:
            if feature.pooling == "none":
                raise SpecError(f"DLRM: feature '{feature.name}' is not pooled; give it pooling='sum' or 'mean'")
        dim = bottom[-1]
        for table in tables:
            if table.dim != dim:
                raise SpecError(
                    f"DLRM: table '{table.name}' has dim {table.dim} but the bottom MLP ends with {dim}; make them one"
                )
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.bottom = MLP(max(dense_features, 1), bottom)
        self.interaction = DotInteraction(1 + len(features), dim, backend=backend)
        self.top = MLP(self.interaction.width, top, last_relu=False)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        got = 0 if batch.dense is None else batch.dense.shape[1]
        if got != self.dense_features:
            raise BatchError(f"DLRM was built for {self.dense_features} dense inputs, the batch has {got}")
        embeddings = self.embeddings(batch.sparse, room=1)
        dense = batch.dense if got else torch.ones(len(batch), 1, device=batch.sparse.values.device)
        vectors = embeddings.stack(lead=self.bottom(dense))
        return self.top(self.interaction(vectors)).to(torch.float32)
