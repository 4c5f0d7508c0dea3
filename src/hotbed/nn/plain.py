"""Convert trained models to plain ``torch.nn`` modules, traced by ``torch.export``, that run without hotbed.

Embedding collections and dot interactions, whose kernels are hotbed's own, are replaced by modules that do the same
with torch's operators; everything else of a model is left as it is.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad
from typing_extensions import override

from hotbed.bags import Bags
from hotbed.batch import Embeddings
from hotbed.data import Schema
from hotbed.embed import EmbeddingCollection
from hotbed.embed.ids import hashed
from hotbed.errors import CheckpointError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn.layers import DotInteraction
from hotbed.nn.normalization import normalization_of
from hotbed.pooling import NO_DIVISOR, POOLING_CODE, divisors
from hotbed.specs import Feature

Ids = Tensor | tuple[Tensor, Tensor]
"""Ids of a feature: ``[B, k]``, or ``(values [N], lengths [B])``; int64."""


def traced(model: PlainModel, schema: Schema) -> torch.export.ExportedProgram:
    """A plain model as a program for any number of samples of this schema.

    Raises
    ------
    CheckpointError
        If torch cannot trace it, or has no way to call a column by its name.
    """
    for column in schema.sparse:
        if "'" in column.name or '"' in column.name:  # torch writes names into the program's code as they are
            raise CheckpointError(
                f"column {column.name!r} has a quote in its name, which a program of torch cannot have as an input; "
                "rename it in the data and train again, or export in parts (hotbed export RUN DIR)"
            )
    size = 4
    samples = torch.export.Dim("samples", min=1)
    ids: dict[str, Ids] = {}
    shapes: dict[str, Any] = {}
    for column in schema.sparse:
        if column.ids is None:
            ids[column.name] = torch.zeros(2 * size, dtype=torch.int64), torch.full((size,), 2)
            shapes[column.name] = ({0: torch.export.Dim.DYNAMIC}, {0: samples})
        else:
            ids[column.name] = torch.zeros(size, column.ids, dtype=torch.int64)
            shapes[column.name] = {0: samples}
    normalization = normalization_of(model)
    if normalization is not None:
        normalization.check_measured()
    dtype = torch.float32 if normalization is None else torch.float64
    dense = torch.zeros(size, len(schema.dense), dtype=dtype) if schema.dense else None
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its internals
            return torch.export.export(
                model.eval(),
                (dense, ids),
                dynamic_shapes=(None if dense is None else {0: samples}, shapes),
                strict=False,
            )
    except Exception as error:  # whatever tracing meets in a model
        logging.getLogger("hotbed").debug("torch.export", exc_info=True)
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{type(model.model).__name__} cannot be traced: {reason}; its forward must not branch on values, nor use "
            "len() of tensors or batches"
        ) from error


class PlainModel(nn.Module):
    """A model that takes its inputs apart and needs no code of hotbed once it is traced.

    Parameters
    ----------
    model
        Takes what a hotbed model takes, and is plain otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, dense: Tensor | None, ids: Mapping[str, Ids]) -> Tensor:
        """Logits ``[B, T]`` of ``dense [B, I]`` and ids by feature."""
        bags = {name: _bags(of) for name, of in ids.items()}
        ragged = [b.offsets for b in bags.values() if b.offsets is not None]
        jagged = Jagged(
            list(bags),
            torch.cat([b.values for b in bags.values()]),
            batch_size=next(iter(bags.values())).batch_size,
            fixed=[b.fixed for b in bags.values()],
            offsets=torch.stack(ragged) if ragged else None,
            starts=(0, *accumulate(b.values.shape[0] for b in bags.values())),  # known, for checks need values
        )
        return self.model(_Inputs(jagged, dense))


@dataclass(frozen=True)
class _Inputs:
    """What a model reads of a `Batch`, whose checks cannot be traced."""

    sparse: Jagged
    dense: Tensor | None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


def plain_model(model: nn.Module) -> PlainModel:
    """A model with its collections and interactions replaced by plain ones; the model itself is changed.

    Raises
    ------
    SpecError
        If a feature has no plain counterpart.
    """
    return PlainModel(_plain(model))


def _plain(module: nn.Module) -> nn.Module:
    if isinstance(module, EmbeddingCollection):
        return PlainEmbeddings(module)
    if isinstance(module, DotInteraction):
        return PlainInteraction(module.vectors, module.width)
    for name, child in module.named_children():
        setattr(module, name, _plain(child))
    return module


class PlainEmbeddings(nn.Module):
    """What an `EmbeddingCollection` computes, of ``nn.EmbeddingBag``s.

    Parameters
    ----------
    collection
        Whose tables are copied, as float32.
    features
        Some of its features; default: all.
    """

    def __init__(self, collection: EmbeddingCollection, features: Sequence[Feature] | None = None) -> None:
        super().__init__()
        features = collection.features if features is None else features
        tables = {f.table: collection.tables[f.table] for f in features}
        for feature in features:
            if not feature.is_pooled or feature.max_len is not None:
                raise SpecError(
                    f"feature '{feature.name}' has pooling '{feature.pooling}' and max_len {feature.max_len}; only "
                    "pooled features without max_len can be exported as plain torch, so models of histories (DIN, "
                    "SASRec, HSTU) cannot; export them in parts: hotbed export RUN DIR"
                )
        self.features: Sequence[Feature] = features
        self.rows = {name: table.rows for name, table in tables.items()}
        self.dims = {name: table.dim for name, table in tables.items()}
        self._number = {name: i for i, name in enumerate(tables)}
        weights = (collection.weight(name).detach().clone() for name in tables)
        self.tables = nn.ModuleList([nn.EmbeddingBag.from_pretrained(weight, mode="sum") for weight in weights])
        self.bad_ids: Counter[str] = Counter()
        self.truncated_ids: Counter[str] = Counter()

    @override
    def forward(self, ids: Jagged, *, room: int = 0) -> Embeddings:
        """Look up and pool, as `EmbeddingCollection.forward`."""
        found = Embeddings([feature.name for feature in self.features])
        for dim in dict.fromkeys(self.dims.values()):
            features = [feature for feature in self.features if self.dims[feature.table] == dim]
            pooled = [self._pooled(feature, ids[feature.name]) for feature in features]
            found.add_pooled([feature.name for feature in features], torch.stack(pooled, dim=1), None)
        return found

    def _pooled(self, feature: Feature, bags: Bags) -> Tensor:
        values, rows = bags.values, self.rows[feature.table]
        offsets = bags.offsets
        if offsets is None:
            offsets = torch.arange(bags.batch_size + 1, device=values.device) * (bags.fixed or 0)
        used: Tensor | None = None
        if feature.on_bad_id != "error":
            right = (values >= 0) & (values < rows)
            if feature.on_bad_id == "hash":
                values = torch.where(right, values, hashed(values, rows))
            else:
                values, used = torch.where(right, values, 0), right.to(torch.float32)
        weight = cast(Tensor, self.tables[self._number[feature.table]].weight)
        out = embedding_bag(values, weight, offsets, mode="sum", per_sample_weights=used, include_last_offset=True)
        pooling = POOLING_CODE[feature.pooling]
        if pooling == NO_DIVISOR:
            return out
        upto = pad(torch.ones_like(values) if used is None else used.long(), (1, 0)).cumsum(0)
        return out / divisors(pooling, upto[offsets[1:]] - upto[offsets[:-1]])[:, None]


class PlainInteraction(nn.Module):
    """What a `DotInteraction` computes.

    Parameters
    ----------
    vectors
        Vectors ``n`` per sample.
    width
        Columns of the result.
    """

    pairs: Tensor

    def __init__(self, vectors: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    @override
    def forward(self, vectors: Tensor) -> Tensor:
        """``[B, n, D]`` to ``[B, width]``: the first vector, the strict lower triangle row by row, zeros."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        out = torch.cat([vectors[:, 0], products[:, self.pairs[0], self.pairs[1]]], dim=1)
        return pad(out, (0, self.width - out.shape[1]))


def _bags(ids: Ids) -> Bags:
    if isinstance(ids, Tensor):
        return Bags(ids.reshape(-1), ids.shape[0], ids.shape[1], None, None)
    values, lengths = ids
    return Bags(values, lengths.shape[0], None, pad(lengths.cumsum(0), (1, 0)), None)
