"""Take a model apart: looked-up vectors go into its dense part, which needs no tables and can be traced.

Tables may be much larger than the memory of who computes scores, or change while the rest stays. So embedding
collections are replaced by modules that hand out vectors looked up by somebody else, and what is left is a function of
tensors: `traced` makes a program of ``torch.export`` of it, which needs no code of hotbed.

Products are those of torch, and dot interactions are plain torch, so that a part and the program made of it compute the
same bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from hotbed.bags import Bags
from hotbed.batch import Batch, Embeddings
from hotbed.embed import Distributed, EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.jagged import Jagged
from hotbed.nn.layers import DotInteraction
from hotbed.nn.linear import Linear
from hotbed.nn.normalization import normalization_of
from hotbed.nn.plain import PaddedEmbeddings, PlainInteraction, export_program
from hotbed.specs import Feature

Vectors = Tensor | tuple[Tensor, Tensor]
"""Of a feature: pooled ``[B, D]``; else ``[B, max_len, D]``, zeros where it is padded, and lengths ``[B]`` int64."""


class DensePart(nn.Module):
    """A model without its tables.

    The model itself is changed: its embedding collections, dot interactions and products are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        model = model.module if isinstance(model, Distributed) else model
        self.collections: dict[str, EmbeddingCollection] = {}  # the replaced embedding collections, by path
        self.model = self._without_tables(model, "", {})
        self.kind = type(model).__name__

    @property
    def features(self) -> dict[str, tuple[str, Feature]]:
        """By name of the vectors, the path of the collection and the feature."""
        found = ((path, f) for path, collection in self.collections.items() for f in collection.features)
        return {vectors_name(path, feature.name): (path, feature) for path, feature in found}

    @override
    def forward(
        self, dense: Tensor | None, vectors: Mapping[str, Vectors], rest: Callable[[], Batch] | None = None
    ) -> Tensor:
        """Logits ``[B, T]`` of ``dense [B, I]``, and vectors by path of the collection and feature.

        ``rest`` gives the batch, for models that ask it for more than that; programs have none.
        """
        given = _Given(vectors, rest)
        return self.model(_Inputs(given, dense) if rest is None else _Inputs(given, dense, _Extra(rest)))

    def _without_tables(self, module: nn.Module, path: str, done: dict[int, nn.Module]) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        made = module
        if isinstance(module, EmbeddingCollection):
            self.collections[path] = module
            made = GivenEmbeddings(module, path)
        elif isinstance(module, DotInteraction):
            made = PlainInteraction(module.vectors, module.width)
        elif isinstance(module, Linear) or type(module) is nn.Linear:
            made = RowWiseLinear(module)
        done[id(module)] = made
        if made is module:
            for name, child in list(module._modules.items()):
                if child is not None:
                    setattr(module, name, self._without_tables(child, f"{path}.{name}".lstrip("."), done))
        return made


class RowWiseLinear(nn.Module):
    """A fully connected layer that returns the same bits for a row at any place in a block.

    MKL computes the last columns of an output differently from 16 whole ones, and there the order of a row's sum
    depends on the other rows (seen on a CPU with AVX2 only). So outputs are padded to multiples of 16.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias: Tensor | None = layer.bias

    @override
    def forward(self, input: Tensor) -> Tensor:
        """``[…, in]`` to ``[…, out]``."""
        outputs = self.weight.shape[0]
        room = -outputs % 16
        if not room:
            return F.linear(input, self.weight, self.bias)
        bias = None if self.bias is None else F.pad(self.bias, (0, room))
        return F.linear(input, F.pad(self.weight, (0, 0, 0, room)), bias)[..., :outputs]


class GivenEmbeddings(nn.Module):
    """Return given vectors in place of the lookups of an `EmbeddingCollection` at ``path`` in the model."""

    def __init__(self, collection: EmbeddingCollection, path: str) -> None:
        super().__init__()
        self.path = path
        self.features: Sequence[Feature] = collection.features
        self.tables = dict(collection.tables)
        self.bad_ids: Counter[str] = Counter()
        self.truncated_ids: Counter[str] = Counter()

    @override
    def forward(self, ids: _Given, *, room: int = 0) -> Embeddings:
        """Vectors of the batch, as `EmbeddingCollection.forward`."""
        found = PaddedEmbeddings([feature.name for feature in self.features])
        for dim in dict.fromkeys(table.dim for table in self.tables.values()):
            of_dim = [f for f in self.features if f.is_pooled and self.tables[f.table].dim == dim]
            if of_dim:
                given = [cast(Tensor, ids.vectors[vectors_name(self.path, f.name)]) for f in of_dim]
                found.add_pooled([f.name for f in of_dim], torch.stack(given, dim=1), None)
        for feature in self.features:
            if not feature.is_pooled:
                sequence = ids.vectors[vectors_name(self.path, feature.name)]
                found.add_padded(feature, *cast("tuple[Tensor, Tensor]", sequence))
        return found


class _Given:
    """Vectors in the place of a batch's ids; what models ask of these, too, is mostly their number and device."""

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
                f"the model asks for batch.sparse{what}, ids themselves, but only looked-up vectors reach a program "
                "whose tables are apart; give it a table for what it makes of ids, or export it with --single"
            )
        return self._rest().sparse


class _Extra(Mapping[str, Tensor]):
    """Further columns of the batch, taken when a model asks for them."""

    def __init__(self, rest: Callable[[], Batch]) -> None:
        self._rest = rest

    def __getitem__(self, name: str) -> Tensor:
        return self._rest().extra[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rest().extra)

    def __len__(self) -> int:
        return len(self._rest().extra)


@dataclass(frozen=True)
class _Inputs:
    """What a model reads of a `Batch`, whose checks cannot be traced."""

    sparse: _Given
    dense: Tensor | None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sparse)


def traced(part: DensePart, inputs: int) -> torch.export.ExportedProgram:
    """Trace a dense part, on the CPU, to a program for any number of samples and ``inputs`` dense inputs.

    ``torch.export.load(…).module()(dense, vectors)`` has the arguments of `DensePart.forward`. Raise `SpecError` if a
    sequence feature has no ``max_len``, or the model needs more than vectors and numbers. Raise `CheckpointError` if
    torch cannot trace it.
    """
    size = 4
    samples = torch.export.Dim("samples", min=1)
    vectors: dict[str, Vectors] = {}
    shapes: dict[str, Any] = {}
    for name, (path, feature) in part.features.items():
        dim = part.collections[path].tables[feature.table].dim
        if feature.is_pooled:
            vectors[name], shapes[name] = torch.zeros(size, dim), {0: samples}
            continue
        if feature.max_len is None:
            raise SpecError(
                f"feature '{feature.name}' has pooling 'none' and no max_len, so its vectors have no shape that a "
                "program could take; give it max_len"
            )
        vectors[name] = torch.zeros(size, feature.max_len, dim), torch.ones(size, dtype=torch.int64)
        shapes[name] = ({0: samples}, {0: samples})
    dense = torch.zeros(size, inputs, dtype=dense_dtype(part)) if inputs else None
    advice = ", nor e['feature'] of features that are not pooled (use e.padded('feature'))"
    all_shapes = (None if dense is None else {0: samples}, shapes)
    return export_program(part, part.kind, (dense, vectors), all_shapes, advice)


def dense_dtype(model: nn.Module) -> torch.dtype:
    """Dtype of the numbers that a model takes: raw ones are float64, which it normalizes."""
    normalization = normalization_of(model)
    if normalization is None:
        return torch.float32
    normalization.check_measured()
    return torch.float64


def vectors_name(path: str, feature: str) -> str:
    """How programs call the vectors of a feature of the collection at a path.

    torch writes names into the code of a program without escaping them, so what could end a string there, a quote, is
    percent-encoded: columns may have any name.
    """
    return re.sub(r"""[%'"\\\x00-\x1f\x7f]""", lambda found: quote(found[0]), f"{path}.{feature}".lstrip("."))
