"""Convert trained models to programs of ``torch.export`` that run without hotbed.

Both conversions replace modules in place (`_replace`), because programs cannot call hotbed's kernels for embedding
collections and dot interactions:

- `DensePart` replaces embedding collections by modules that return given vectors. It is for models with tables that are
  larger than memory, or that change independently of the other weights. Looked-up vectors are inputs of the dense part,
  so it needs no tables. torch computes its products, so that the dense part and its program have the same bits.
- `PlainModel` replaces embedding collections by ``nn.EmbeddingBag``s that contain the tables.
"""

from __future__ import annotations

import logging
import re
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from hotbed.batch import Batch, Embeddings
from hotbed.data import Schema
from hotbed.embed import Distributed, EmbeddingCollection
from hotbed.embed.ids import hash_ids
from hotbed.errors import BatchError, CheckpointError, SpecError
from hotbed.jagged import Bags, Jagged, padding_mask
from hotbed.nn.layers import DotInteraction
from hotbed.nn.linear import Linear
from hotbed.nn.normalization import normalization_of
from hotbed.specs import NO_DIVISOR, POOLING_CODE, Feature, Padding, divisors
from hotbed.torch_private import check_in_graph

Vectors = Tensor | tuple[Tensor, Tensor]
"""Vectors of a feature: pooled ``[B, D]``, or zero-padded ``[B, max_len, D]`` with lengths ``[B]`` int64."""
Ids = Tensor | tuple[Tensor, Tensor]
"""Ids of a feature, int64: ``[B, k]``, or ``(values [N], lengths [B])``."""
Weights = Mapping[str, Tensor]
"""Weights of ids by feature, float32. They have the shape of the feature's ids: ``[B, k]`` or ``[N]``."""

TRACED_SAMPLES = 4
"""Number of samples of the batch that is traced. Programs accept any number of samples."""


def _replace(
    module: nn.Module,
    new: Callable[[nn.Module, str], nn.Module],
    path: str = "",
    done: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Replace a module and its children in place by what ``new(module, path)`` returns, each module once."""
    done = {} if done is None else done
    if id(module) not in done:
        made = done[id(module)] = new(module, path)
        if made is module:
            for name, child in list(module._modules.items()):
                if child is not None:
                    setattr(module, name, _replace(child, new, f"{path}.{name}".lstrip("."), done))
    return done[id(module)]


def _trace(
    module: nn.Module, name: str, columns: int, inputs: Sequence[Any], shapes: Sequence[Any], advice: str = ""
) -> torch.export.ExportedProgram:
    """Trace a module with the arguments ``(dense [B, columns], *inputs)``. ``dense`` is None for 0 columns.

    Raise `CheckpointError`, which ends with ``advice``, if torch cannot trace it.
    """
    dense = torch.zeros(TRACED_SAMPLES, columns, dtype=dense_dtype(module)) if columns else None
    all_shapes = (None if dense is None else {0: _samples()}, *shapes)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own internals
            program = torch.export.export(module.eval(), (dense, *inputs), dynamic_shapes=all_shapes, strict=False)
    except SpecError:
        raise
    except Exception as error:  # a model can raise any exception
        logging.getLogger("hotbed").debug("torch.export", exc_info=True)
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{name} cannot be traced: {reason}. Its forward must not branch on values, nor use len() of tensors or "
            f"batches{advice}"
        ) from error
    for graph in (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in graph.graph.nodes:
            node.meta.pop("stack_trace", None)  # it has paths of source files on this machine
    return program


def _samples() -> Any:
    """Return the named dimension of samples, so that all inputs have the same number of samples."""
    return torch.export.Dim("samples", min=1)


def dense_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's dense inputs. It is float64 if the model normalizes them, because they are raw."""
    normalization = normalization_of(model)
    if normalization is None:
        return torch.float32
    normalization.check_measured()
    return torch.float64


# -- modules of both conversions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    """Parts of a `Batch` that a model reads. It replaces `Batch`, because the checks of `Batch` cannot be traced."""

    sparse: Any
    dense: Tensor | None
    rest: Callable[[], Batch] | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """Return further columns of the batch."""
        return {} if self.rest is None else self.rest().extra

    def __len__(self) -> int:
        return len(self.sparse)


class PlainInteraction(nn.Module):
    """A `DotInteraction` that uses only torch operations."""

    pairs: Tensor

    def __init__(self, vectors: int, width: int) -> None:
        super().__init__()
        self.width = width
        first, second = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)

    @override
    def forward(self, vectors: Tensor) -> Tensor:
        """Map ``[B, n, D]`` to ``[B, width]``: the first vector, the strict lower triangle row by row, then zeros."""
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        out = torch.cat([vectors[:, 0], products.index_select(1, self.pairs)], dim=1)
        return F.pad(out, (0, self.width - out.shape[1]))


class PaddedEmbeddings(Embeddings):
    """Embeddings with sequence features that are already padded."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.given: dict[str, tuple[Tensor, Tensor]] = {}
        self.padding: dict[str, Padding] = {}

    @override
    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self.given:
            return super().padded(name)  # raises an error with the reason
        vectors, lengths = self.given[name]
        return vectors, padding_mask(lengths, vectors.shape[1], self.padding.get(name))

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name not in self.given:
            return super().__getitem__(name)
        vectors, lengths = self.given[name]
        if name in self.padding:
            return vectors
        return torch.nested.nested_tensor_from_jagged(vectors[self.padded(name)[1]], F.pad(lengths.cumsum(0), (1, 0)))

    @override
    def _refuse_sequences(self, method: str) -> None:
        if self.given:
            raise BatchError(
                f"{method}(): pooling: got 'none' for {', '.join(self.given)}, expected pooled features. Select "
                "features by name"
            )


class _Collection(nn.Module):
    """The interface of an `EmbeddingCollection` that models use. `vectors` returns its vectors."""

    def __init__(self, collection: EmbeddingCollection, features: Sequence[Feature]) -> None:
        super().__init__()
        self.features: Sequence[Feature] = features
        self.specs = dict(collection.tables)
        self.bad_ids: Counter[str] = Counter()
        self.truncated_ids: Counter[str] = Counter()

    @abstractmethod
    def vectors(self, feature: Feature, ids: Any) -> Vectors:
        """Return the vectors of a feature."""

    @override
    def forward(self, ids: Any, *, room: int = 0) -> Embeddings:
        """Return vectors as `EmbeddingCollection.forward` does."""
        found = PaddedEmbeddings([feature.name for feature in self.features])
        vectors = {feature: self.vectors(feature, ids) for feature in self.features}
        for dim in dict.fromkeys(table.dim for table in self.specs.values()):
            pooled = {f.name: v for f, v in vectors.items() if isinstance(v, Tensor) and self.specs[f.table].dim == dim}
            if pooled:
                found.add_pooled(list(pooled), torch.stack(list(pooled.values()), dim=1), None)
        for feature, of in vectors.items():
            if not isinstance(of, Tensor):
                found.given[feature.name] = of
                if feature.padding is not None:
                    found.padding[feature.name] = feature.padding
        return found


def _check_lengths(features: Sequence[Feature]) -> None:
    for feature in features:
        if not feature.is_pooled and feature.max_len is None:
            raise SpecError(
                f"feature '{feature.name}': max_len: got none with pooling 'none', expected a number, because a "
                "program needs fixed shapes. Set max_len"
            )


# -- the dense part --------------------------------------------------------------------------------------------------


class DensePart(nn.Module):
    """A model without its tables.

    The model itself is changed: its embedding collections, dot interactions and products are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        model = model.module if isinstance(model, Distributed) else model
        self.collections: dict[str, EmbeddingCollection] = {}  # the replaced embedding collections, by path
        self.model = _replace(model, self._new)
        self.kind = type(model).__name__

    def _new(self, module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, EmbeddingCollection):
            self.collections[path] = module
            return GivenEmbeddings(module, path)
        if isinstance(module, DotInteraction):
            return PlainInteraction(module.vectors, module.width)
        return RowWiseLinear(module) if isinstance(module, Linear) or type(module) is nn.Linear else module

    @property
    def features(self) -> dict[str, tuple[str, Feature]]:
        """Return the path of the collection, and the feature, by the name of its vectors."""
        found = ((path, f) for path, collection in self.collections.items() for f in collection.features)
        return {vectors_name(path, feature.name): (path, feature) for path, feature in found}

    @override
    def forward(
        self, dense: Tensor | None, vectors: Mapping[str, Vectors], rest: Callable[[], Batch] | None = None
    ) -> Tensor:
        """Return logits ``[B, T]`` from ``dense [B, I]`` and vectors by the name of `vectors_name`.

        ``rest`` creates the batch for models that read other parts of it. Programs have no ``rest``.
        """
        return self.model(_Inputs(_Given(vectors, rest), dense, rest))


def trace_dense_part(part: DensePart, inputs: int) -> torch.export.ExportedProgram:
    """Trace a dense part on the CPU to a program for any number of samples and ``inputs`` dense inputs.

    ``torch.export.load(…).module()(dense, vectors)`` has the arguments of `DensePart.forward`. Raise `SpecError` if a
    sequence feature has no ``max_len``, or the model needs more than vectors and numbers. Raise `CheckpointError` if
    torch cannot trace it.
    """
    _check_lengths([feature for _, feature in part.features.values()])
    samples, vectors, shapes = _samples(), dict[str, Vectors](), dict[str, Any]()
    for name, (path, feature) in part.features.items():
        dim = part.collections[path].tables[feature.table].dim
        if feature.is_pooled:
            vectors[name], shapes[name] = torch.zeros(TRACED_SAMPLES, dim), {0: samples}
        else:
            padded = torch.zeros(TRACED_SAMPLES, feature.max_len or 0, dim)
            vectors[name] = padded, torch.ones(TRACED_SAMPLES, dtype=torch.int64)
            shapes[name] = ({0: samples}, {0: samples})
    advice = ", nor e['feature'] of features that are not pooled (use e.padded('feature'))"
    return _trace(part, part.kind, inputs, (vectors,), (shapes,), advice)


def vectors_name(path: str, feature: str) -> str:
    """Return a program's name for the vectors of a feature of the collection at ``path``.

    torch writes names into the code of a program without escaping them, and columns may have any name. Therefore
    characters that could end a string, such as quotes, are percent-encoded.
    """
    return re.sub(r"""[%'"\\\x00-\x1f\x7f]""", lambda found: quote(found[0]), f"{path}.{feature}".lstrip("."))


class RowWiseLinear(nn.Module):
    """A fully connected layer that returns the same bits for a row at any position in a block.

    MKL computes the last columns of an output differently if they are fewer than 16. In these columns, the order of a
    row's sum depends on the other rows (observed on a CPU with AVX2 only). Therefore outputs are padded to multiples of
    16 columns.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias: Tensor | None = layer.bias

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Map ``[…, in]`` to ``[…, out]``."""
        outputs = self.weight.shape[0]
        room = -outputs % 16
        if not room:
            return F.linear(input, self.weight, self.bias)
        bias = None if self.bias is None else F.pad(self.bias, (0, room))
        return F.linear(input, F.pad(self.weight, (0, 0, 0, room)), bias)[..., :outputs]


class GivenEmbeddings(_Collection):
    """A module that returns given vectors. It replaces the `EmbeddingCollection` at ``path`` in the model."""

    def __init__(self, collection: EmbeddingCollection, path: str) -> None:
        super().__init__(collection, collection.features)
        self.path = path

    @property
    def tables(self) -> Mapping[str, Any]:
        """Return the tables by name."""
        return self.specs

    @override
    def vectors(self, feature: Feature, ids: _Given) -> Vectors:
        return ids.vectors[vectors_name(self.path, feature.name)]


class _Given:
    """Vectors instead of a batch's ids. Models usually read only the number and the device of ids."""

    def __init__(self, vectors: Mapping[str, Vectors], rest: Callable[[], Batch] | None) -> None:
        self.vectors, self._rest = vectors, rest
        self._first = next(v if isinstance(v, Tensor) else v[0] for v in vectors.values())

    @property
    def batch_size(self) -> int:
        return self._first.shape[0]

    @property
    def values(self) -> Tensor:
        return self._first if self._rest is None else self._rest().sparse.values

    def __len__(self) -> int:
        return self._first.shape[0]

    def __getitem__(self, name: str) -> Bags:
        return self._ids(f"['{name}']")[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._ids(f".{name}"), name)

    def _ids(self, what: str) -> Jagged:
        if self._rest is None:
            raise SpecError(
                f"the model reads the ids batch.sparse{what}, but a program without tables gets only looked-up "
                "vectors. Use a table for the model's function of ids, or export it with --single"
            )
        return self._rest().sparse


# -- one program with tables -------------------------------------------------------------------------------------------


class PlainModel(nn.Module):
    """A model with separate inputs. After tracing, it runs without hotbed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, dense: Tensor | None, ids: Mapping[str, Ids], weights: Weights | None = None) -> Tensor:
        """Return logits ``[B, T]`` from ``dense [B, I]``, ids by feature, and optional weights by feature."""
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
            starts=(0, *accumulate(b.values.shape[0] for b in bags.values())),  # skips checks, which need values
        )
        return self.model(_Inputs(jagged, dense))


def plain_model(model: nn.Module) -> PlainModel:
    """Replace a model's collections and interactions in place by modules of torch.

    Raise `SpecError` if torch has no module for a feature.
    """

    def new(module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, EmbeddingCollection):
            return PlainEmbeddings(module)
        return PlainInteraction(module.vectors, module.width) if isinstance(module, DotInteraction) else module

    return PlainModel(_replace(model, new))


def trace_whole(model: PlainModel, schema: Schema) -> torch.export.ExportedProgram:
    """Trace a plain model to a program for any number of samples of a schema.

    Raise `CheckpointError` if torch cannot trace it, or a column name cannot be an argument name.
    """
    samples, ragged = _samples(), torch.export.Dim.DYNAMIC
    ids, weights = dict[str, Ids](), dict[str, Tensor]()
    shapes, of_weights = dict[str, Any](), dict[str, Any]()
    for column in schema.sparse:
        name, count = column.name, column.ids
        if "'" in name or '"' in name:  # torch writes names into the program's code without escaping them
            raise CheckpointError(
                f"name of an input: got column {name!r}, expected no quote, because torch cannot escape it in a "
                "program. Rename it in the data and train again, or export in parts (hotbed export RUN DIR)"
            )
        shape = (2 * TRACED_SAMPLES,) if count is None else (TRACED_SAMPLES, count)
        values, rows = torch.zeros(shape, dtype=torch.int64), {0: ragged if count is None else samples}
        ids[name] = (values, torch.full((TRACED_SAMPLES,), 2)) if count is None else values
        shapes[name] = (rows, {0: samples}) if count is None else rows
        if column.weights is not None:
            weights[name], of_weights[name] = torch.ones(shape), rows
    extra = ((weights,), (of_weights,)) if weights else ((), ())
    kind = type(model.model).__name__
    return _trace(model, kind, len(schema.dense), (ids, *extra[0]), (shapes, *extra[1]))


class PlainEmbeddings(_Collection):
    """An `EmbeddingCollection` as ``nn.EmbeddingBag``s, with its tables copied as float32."""

    def __init__(self, collection: EmbeddingCollection, features: Sequence[Feature] | None = None) -> None:
        super().__init__(collection, collection.features if features is None else features)
        _check_lengths(self.features)
        self.specs = {f.table: self.specs[f.table] for f in self.features}
        self._number = {name: i for i, name in enumerate(self.specs)}
        weights = (collection.weight(name).detach().clone() for name in self.specs)
        self.tables = nn.ModuleList([nn.EmbeddingBag.from_pretrained(weight, mode="sum") for weight in weights])

    @override
    def vectors(self, feature: Feature, ids: Jagged) -> Vectors:
        bags, weight = ids[feature.name], cast(Tensor, self.tables[self._number[feature.table]].weight)
        selected = self._select(feature, bags)
        offsets, upto = selected.offsets, selected.upto
        lengths = upto[offsets[1:]] - upto[offsets[:-1]]
        if feature.is_pooled:
            used = selected.weights
            if selected.keep is not None:
                used = selected.keep.to(torch.float32) if used is None else torch.where(selected.keep, used, 0)
            out = F.embedding_bag(
                selected.values, weight, offsets, mode="sum", per_sample_weights=used, include_last_offset=True
            )
            pooling = POOLING_CODE[feature.pooling]
            return out if pooling == NO_DIVISOR else out / divisors(pooling, lengths)[:, None]
        length = feature.max_len or 0
        rows = torch.embedding(weight, selected.values)  # unlike indexing, it raises an error for negative ids
        rows = rows if selected.weights is None else rows * selected.weights[:, None]
        position = upto[:-1] - upto[offsets[:-1]][selected.bag]
        if feature.padding == "left":
            position = position + length - lengths[selected.bag]
        at = selected.bag * length + position
        if selected.keep is not None:  # ids that are not kept are written to an extra last row
            at = torch.where(selected.keep, at, bags.batch_size * length)
        padded = rows.new_zeros(bags.batch_size * length + 1, rows.shape[1]).index_put((at,), rows)
        return padded[:-1].view(bags.batch_size, length, rows.shape[1]), lengths

    def _select(self, feature: Feature, bags: Bags) -> _SelectedIds:
        """Select the ids to look up: truncate bags to ``max_len``, then repair ids out of range."""
        values, rows, size = bags.values, self.specs[feature.table].rows, bags.batch_size
        offsets = bags.offsets
        if offsets is None:
            offsets = torch.arange(size + 1, device=values.device) * (bags.fixed or 0)
        at = torch.arange(values.shape[0], device=values.device)
        bag, keep = torch.searchsorted(offsets[1:].contiguous(), at, right=True), None
        if feature.max_len is not None:
            lengths = offsets[1:] - offsets[:-1]
            position = at - offsets[:-1][bag]
            if feature.on_too_long == "error":
                problem = f"feature '{feature.name}' has a sample of more than {feature.max_len} ids"
                check_in_graph((lengths <= feature.max_len).all(), problem)
            else:
                last = feature.on_too_long == "keep_last"
                keep = (lengths[bag] - 1 - position if last else position) < feature.max_len
        if feature.on_bad_id != "error":
            right = (values >= 0) & (values < rows)
            if feature.on_bad_id == "hash":
                values = torch.where(right, values, hash_ids(values, rows))
            else:
                values, keep = torch.where(right, values, 0), right if keep is None else keep & right
        return _SelectedIds(values, offsets, bags.weights, bag, keep)


class _SelectedIds(NamedTuple):
    """Ids ``values [N]`` in bags, their weights, their bags ``[N]``, and a mask of ids to look up (None: all)."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    bag: Tensor
    keep: Tensor | None

    @property
    def upto(self) -> Tensor:
        """Return the number of looked-up ids before each id, and the total number, ``[N + 1]``."""
        kept = torch.ones_like(self.values) if self.keep is None else self.keep.long()
        return F.pad(kept, (1, 0)).cumsum(0)


def _bags(ids: Ids) -> Bags:
    if isinstance(ids, Tensor):
        return Bags(ids.reshape(-1), ids.shape[0], ids.shape[1], None, None)
    values, lengths = ids
    return Bags(values, lengths.shape[0], None, F.pad(lengths.cumsum(0), (1, 0)), None)
