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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad
from typing_extensions import override

from hotbed.bags import Bags, padding_mask
from hotbed.batch import Embeddings
from hotbed.data import Schema
from hotbed.embed import EmbeddingCollection
from hotbed.embed.ids import hashed
from hotbed.errors import BatchError, CheckpointError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn.layers import DotInteraction
from hotbed.nn.normalization import normalization_of
from hotbed.pooling import NO_DIVISOR, POOLING_CODE, divisors
from hotbed.specs import Feature, Padding
from hotbed.torch_private import check_in_graph

Ids = Tensor | tuple[Tensor, Tensor]
"""Ids of a feature: ``[B, k]``, or ``(values [N], lengths [B])``; int64."""
Weights = Mapping[str, Tensor]
"""By feature whose ids have weights, these: ``[B, k]`` or ``[N]``, as its ids; float32."""


def traced(model: PlainModel, schema: Schema) -> torch.export.ExportedProgram:
    """Trace a plain model to a program for any number of samples of this schema.

    Raise `CheckpointError` if torch cannot trace it, or a column name cannot be an argument name.
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
    weights: dict[str, Tensor] = {}
    shapes: dict[str, Any] = {}
    of_weights: dict[str, Any] = {}
    for column in schema.sparse:
        if column.ids is None:
            ids[column.name] = torch.zeros(2 * size, dtype=torch.int64), torch.full((size,), 2)
            shapes[column.name] = ({0: torch.export.Dim.DYNAMIC}, {0: samples})
        else:
            ids[column.name] = torch.zeros(size, column.ids, dtype=torch.int64)
            shapes[column.name] = {0: samples}
        if column.weights is not None:
            weights[column.name] = torch.ones(2 * size) if column.ids is None else torch.ones(size, column.ids)
            of_weights[column.name] = {0: torch.export.Dim.DYNAMIC if column.ids is None else samples}
    normalization = normalization_of(model)
    if normalization is not None:
        normalization.check_measured()
    dtype = torch.float32 if normalization is None else torch.float64
    dense = torch.zeros(size, len(schema.dense), dtype=dtype) if schema.dense else None
    inputs = (dense, ids, weights) if weights else (dense, ids)
    all_shapes = (None if dense is None else {0: samples}, shapes, *([of_weights] if weights else []))
    return export_program(model, type(model.model).__name__, inputs, all_shapes)


def export_program(
    module: nn.Module, name: str, inputs: tuple[Any, ...], shapes: tuple[Any, ...], advice: str = ""
) -> torch.export.ExportedProgram:
    """Trace a module; raise `CheckpointError`, with more advice if there is some, where torch cannot."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its internals
            program = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)
            for graph in (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)):
                for node in graph.graph.nodes:
                    node.meta.pop("stack_trace", None)  # paths of source files on this machine
            return program
    except SpecError:
        raise
    except Exception as error:  # whatever tracing meets in a model
        logging.getLogger("hotbed").debug("torch.export", exc_info=True)
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{name} cannot be traced: {reason}; its forward must not branch on values, nor use len() of tensors or "
            f"batches{advice}"
        ) from error


class PlainModel(nn.Module):
    """A model with separate inputs that needs no code of hotbed once it is traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, dense: Tensor | None, ids: Mapping[str, Ids], weights: Weights | None = None) -> Tensor:
        """Logits ``[B, T]`` of ``dense [B, I]``, ids by feature, and their weights where some have any."""
        bags = {name: _bags(of) for name, of in ids.items()}
        found = weights or {}
        each = [
            found[name].reshape(-1) if name in found else torch.ones_like(of.values, dtype=torch.float32)
            for name, of in bags.items()
        ]
        ragged = [b.offsets for b in bags.values() if b.offsets is not None]
        jagged = Jagged(
            list(bags),
            torch.cat([b.values for b in bags.values()]),
            batch_size=next(iter(bags.values())).batch_size,
            fixed=[b.fixed for b in bags.values()],
            offsets=torch.stack(ragged) if ragged else None,
            weights=torch.cat(each) if found else None,
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
    """Replace a model's collections and interactions, in place, by plain modules.

    Raise `SpecError` if a feature has no plain counterpart.
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


class PaddedEmbeddings(Embeddings):
    """Embeddings whose sequence features are padded already."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.given: dict[str, tuple[Tensor, Tensor]] = {}
        self.padding: dict[str, Padding] = {}

    def add_padded(self, feature: Feature, vectors: Tensor, lengths: Tensor) -> None:
        """Add vectors ``[B, max_len, D]`` of a feature that is not pooled, and how many ``[B]`` are no padding."""
        self.given[feature.name] = vectors, lengths
        if feature.padding is not None:
            self.padding[feature.name] = feature.padding

    @override
    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self.given:
            return super().padded(name)  # which says why there is nothing to pad
        vectors, lengths = self.given[name]
        return vectors, padding_mask(lengths, vectors.shape[1], self.padding.get(name))

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name not in self.given:
            return super().__getitem__(name)
        vectors, lengths = self.given[name]
        if name in self.padding:
            return vectors
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(vectors[self.padded(name)[1]], offsets)

    @override
    def _refuse_sequences(self, method: str) -> None:
        if self.given:
            raise BatchError(
                f"{method}() needs pooled features, and {', '.join(self.given)} has pooling='none'; pick features by "
                "name"
            )


class PlainEmbeddings(nn.Module):
    """An `EmbeddingCollection` as ``nn.EmbeddingBag``s, with its tables copied as float32."""

    def __init__(self, collection: EmbeddingCollection, features: Sequence[Feature] | None = None) -> None:
        super().__init__()
        features = collection.features if features is None else features
        tables = {f.table: collection.tables[f.table] for f in features}
        for feature in features:
            if not feature.is_pooled and feature.max_len is None:
                raise SpecError(
                    f"feature '{feature.name}' has pooling 'none' and no max_len, so its vectors have no shape that a "
                    "program could have; give it max_len"
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
        found = PaddedEmbeddings([feature.name for feature in self.features])
        for dim in dict.fromkeys(self.dims.values()):
            features = [f for f in self.features if f.is_pooled and self.dims[f.table] == dim]
            if features:
                pooled = [self._pooled(feature, ids[feature.name]) for feature in features]
                found.add_pooled([feature.name for feature in features], torch.stack(pooled, dim=1), None)
        for feature in self.features:
            if not feature.is_pooled:
                found.add_padded(feature, *self._padded(feature, ids[feature.name]))
        return found

    def _pooled(self, feature: Feature, bags: Bags) -> Tensor:
        """Vectors ``[B, D]`` of a feature."""
        taken = self._taken(feature, bags)
        used = taken.weights
        if taken.keep is not None:
            used = taken.keep.to(torch.float32) if used is None else torch.where(taken.keep, used, 0)
        weight, offsets = self._weight(feature), taken.offsets
        out = embedding_bag(
            taken.values, weight, offsets, mode="sum", per_sample_weights=used, include_last_offset=True
        )
        pooling = POOLING_CODE[feature.pooling]
        if pooling == NO_DIVISOR:
            return out
        upto = taken.upto
        return out / divisors(pooling, upto[offsets[1:]] - upto[offsets[:-1]])[:, None]

    def _padded(self, feature: Feature, bags: Bags) -> tuple[Tensor, Tensor]:
        """Vectors ``[B, max_len, D]`` of a feature that is not pooled, and how many ``[B]`` are no padding."""
        taken, length = self._taken(feature, bags), cast(int, feature.max_len)
        rows = torch.embedding(self._weight(feature), taken.values)  # which refuses ids below 0, as indexing does not
        rows = rows if taken.weights is None else rows * taken.weights[:, None]
        upto, offsets, bag = taken.upto, taken.offsets, taken.bag
        lengths = upto[offsets[1:]] - upto[offsets[:-1]]
        place = upto[:-1] - upto[offsets[:-1]][bag]
        if feature.padding == "left":
            place = place + length - lengths[bag]
        at = bag * length + place
        if taken.keep is not None:  # what is left out goes into a row behind all others
            at = torch.where(taken.keep, at, bags.batch_size * length)
        out = rows.new_zeros(bags.batch_size * length + 1, rows.shape[1]).index_put((at,), rows)
        return out[:-1].view(bags.batch_size, length, rows.shape[1]), lengths

    def _taken(self, feature: Feature, bags: Bags) -> _Taken:
        """Ids that are looked up: bags are cut to ``max_len``, then ids out of range are repaired."""
        values, rows, size = bags.values, self.rows[feature.table], bags.batch_size
        offsets = bags.offsets
        if offsets is None:
            offsets = torch.arange(size + 1, device=values.device) * (bags.fixed or 0)
        at = torch.arange(values.shape[0], device=values.device)
        bag, keep = torch.searchsorted(offsets[1:].contiguous(), at, right=True), None
        if feature.max_len is not None:
            lengths = offsets[1:] - offsets[:-1]
            place = at - offsets[:-1][bag]
            if feature.on_too_long == "error":
                what = f"feature '{feature.name}' has a sample of more than {feature.max_len} ids"
                check_in_graph((lengths <= feature.max_len).all(), what)
            else:
                last = feature.on_too_long == "keep_last"
                keep = (lengths[bag] - 1 - place if last else place) < feature.max_len
        if feature.on_bad_id != "error":
            right = (values >= 0) & (values < rows)
            if feature.on_bad_id == "hash":
                values = torch.where(right, values, hashed(values, rows))
            else:
                values, keep = torch.where(right, values, 0), right if keep is None else keep & right
        return _Taken(values, offsets, bags.weights, bag, keep)

    def _weight(self, feature: Feature) -> Tensor:
        return cast(Tensor, self.tables[self._number[feature.table]].weight)


class _Taken(NamedTuple):
    """Ids ``values [N]`` in bags with their weights, the bag of each ``[N]``, and which are looked up; None: all."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    bag: Tensor
    keep: Tensor | None

    @property
    def upto(self) -> Tensor:
        """How many ids before each, and in all ``[N + 1]``, are looked up."""
        kept = torch.ones_like(self.values) if self.keep is None else self.keep.long()
        return pad(kept, (1, 0)).cumsum(0)


class PlainInteraction(nn.Module):
    """A `DotInteraction` of plain torch."""

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
