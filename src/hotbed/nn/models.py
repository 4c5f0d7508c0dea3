"""Define the click models of the literature: DLRM, Wide&Deep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn.layers import MLP, DotInteraction
from hotbed.ops import BackendName
from hotbed.pooling import POOLED
from hotbed.specs import MAX_DIM, Feature, Table
from hotbed.torch_hooks import untraced


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
    dropout
        Of both MLPs, see `MLP`.
    embeddings_to_top
        Whether the top MLP sees the embeddings, too, beside their products: a product of two rows that are still near 0
        says nothing of either, so ids that are rare are learnt far sooner. NVIDIA's DLRM has it off.
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
        dropout: float = 0.0,
        embeddings_to_top: bool = False,
        seed: int = 0,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        if not bottom:
            raise SpecError("DLRM: bottom is empty; it needs at least one width, the dim of the tables")
        refuse_sequences(self, features)
        dim = bottom[-1]
        for table in tables:
            if table.dim != dim:
                raise SpecError(
                    f"DLRM: table '{table.name}' has dim {table.dim} but the bottom MLP ends with {dim}; make them one"
                )
        self.dense_features = dense_features
        self.embeddings = EmbeddingCollection(tables, features, seed=seed, backend=backend)
        self.bottom = MLP(max(dense_features, 1), bottom, dropout=dropout)
        self.interaction = DotInteraction(1 + len(features), dim, backend=backend)
        self.embeddings_to_top = embeddings_to_top
        width = self.interaction.width + (len(features) * dim if embeddings_to_top else 0)
        self.top = MLP(width, top, last_relu=False, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B, T]`` float32."""
        dense = dense_inputs_or_one(self, batch, self.dense_features)
        embeddings = self.embeddings(batch.sparse, room=1)
        vectors = embeddings.stack(lead=self.bottom(dense))
        inputs = self.interaction(vectors)
        if self.embeddings_to_top:
            inputs = torch.cat([inputs, vectors[:, 1:].flatten(1).to(inputs.dtype)], dim=1)
        return self.top(inputs).to(torch.float32)


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al. 2016) in the form of NVIDIA's TensorFlow 2 recommender with 100B+ parameters.

    The deep part is the top MLP over the pooled embeddings and the dense inputs, side by side. The wide part is linear
    in the ids: beside every table one with a column per label, computed in float32 also under autocast. The logits are
    the sum of both parts.

    The wide part is a collection of its own, so it can have an optimizer of its own (in a recipe:
    ``sparse_optimizer_groups``)::

        RowWiseAdagrad(model.embeddings, lr=0.08)
        FTRL(model.wide, lr=0.02, beta=0.0)  # its tables start at 0, as FTRL wants

    `hotbed.distribute` gives every rank all of it, so its rows are not exchanged.

    Parameters
    ----------
    tables, features
        As for `EmbeddingCollection`, of any dims. The wide tables have the same names, rows and ``frozen``.
    dense_features
        Number of dense inputs ``I``; they go to the deep part only.
    top
        Widths of the MLP. It ends with the number of labels and has no last ReLU.
    dropout
        Of the MLP, see `MLP`.
    seed
        Seed of the deep tables' initial values (the MLP uses torch's generator).
    backend
        Kernels, as in `EmbeddingCollection`.

    Attributes
    ----------
    embeddings
        The collection of the deep part.
    wide
        The collection of the wide part.
    schemes
        Sharding schemes of collections that do not follow the plan for the others, see `hotbed.embed.plan_for`.

    Raises
    ------
    SpecError
        If a feature is not pooled, or the last width of ``top`` is no number of labels.
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
        """Logits ``[B, T]`` float32."""
        dense = dense_inputs(self, batch, self.dense_features)
        vectors, wide = self._look_up(batch.sparse)
        inputs = vectors if dense is None else torch.cat([vectors, dense.to(vectors.dtype)], dim=1)
        return self.top(inputs).to(torch.float32) + wide

    @untraced
    def _look_up(self, ids: Jagged) -> tuple[Tensor, Tensor]:
        """Inputs of the deep part ``[B, ΣD]`` and logits of the wide part ``[B, T]``."""
        return self.embeddings(ids).concatenate(), first_order(self.wide, ids)


def linear_tables(model: nn.Module, tables: Sequence[Table], top: Sequence[int]) -> list[Table]:
    """Make tables of first-order weights beside others: a column per label, float32, zeros at first.

    Raises
    ------
    SpecError
        If the last width of the model's ``top`` is no number of labels.
    """
    name = type(model).__name__
    if not top:
        raise SpecError(f"{name}: top is empty; it needs at least one width, the number of labels")
    if not 1 <= top[-1] <= MAX_DIM:
        raise SpecError(
            f"{name}: top ends with {top[-1]:,}, must be between 1 and {MAX_DIM:,}; end it with the number of labels, "
            "the dim of the wide tables"
        )
    return [replace(table, dim=top[-1], init_bound=0.0, dtype="fp32", fp32_rows=0) for table in tables]


@untraced
def first_order(wide: EmbeddingCollection, ids: Jagged) -> Tensor:
    """Sum the weights of a sample's ids ``[B, T]``, float32 also under autocast; not counted as ids of their own."""
    with torch.autocast(ids.values.device.type, enabled=False):
        logits = wide(ids).stack().sum(dim=1)
    for count in (wide.bad_ids, wide.truncated_ids):
        count.clear()  # the other collection counts the same ids
    return logits


def refuse_sequences(model: nn.Module, features: Sequence[Feature]) -> None:
    """Raise `SpecError` for a feature that is not pooled, of a model that cannot take such."""
    for feature in features:
        if not feature.is_pooled:
            raise SpecError(
                f"{type(model).__name__}: feature '{feature.name}' is not pooled; give it pooling="
                + " or ".join(map(repr, POOLED))
            )


def dense_inputs(model: nn.Module, batch: Batch, expected: int) -> Tensor | None:
    """The batch's dense inputs ``[B, I]``; None where there are none."""
    got = 0 if batch.dense is None else batch.dense.shape[1]
    if got != expected:
        raise BatchError(f"{type(model).__name__} was built for {expected} dense inputs, the batch has {got}")
    if batch.dense is not None and batch.dense.dtype == torch.float64:
        raise BatchError(
            f"{type(model).__name__} got raw numbers (float64), which are not normalized; call "
            "hotbed.nn.normalize(model, schema), which takes them, or give float32"
        )
    return batch.dense if got else None


def dense_inputs_or_one(model: nn.Module, batch: Batch, expected: int) -> Tensor:
    """The batch's dense inputs ``[B, I]``; where there are none, a constant 1 ``[B, 1]``."""
    dense = dense_inputs(model, batch, expected)
    return torch.ones(batch.sparse.batch_size, 1, device=batch.sparse.values.device) if dense is None else dense
