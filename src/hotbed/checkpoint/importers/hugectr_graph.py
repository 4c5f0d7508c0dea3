"""Read the graph of a HugeCTR model: JSON of ``Model.graph_to_json``, or a configuration of earlier versions.

``layers`` is a list. Each has a ``type``, the names of what it takes (``bottom``) and gives (``top``), and options. The
first is ``Data``: ``label``, ``dense`` and ``sparse`` inputs, each of so many *slots*, which are features. Embedding
layers give ``[slots, embedding_vec_size]``. ``solver`` and ``optimizer`` are there in configurations only.

Written by hand from the public format: the documentation and samples of HugeCTR 3.1 to 23.12, and its ONNX converter,
which says how wide each layer's output is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from hotbed.checkpoint.importers.peer_array import existing
from hotbed.errors import CheckpointError
from hotbed.parsing import TextError, parse_json, read_limited
from hotbed.specs import is_int

EMBEDDINGS = (
    "DistributedSlotSparseEmbeddingHash",
    "LocalizedSlotSparseEmbeddingHash",
    "LocalizedSlotSparseEmbeddingOneHot",
)
PRODUCTS = ("InnerProduct", "FusedInnerProduct")
LOSSES = ("BinaryCrossEntropyLoss", "CrossEntropyLoss", "MultiCrossEntropyLoss")
_SAME = ("ReLU", "Dropout", "ELU", "Sigmoid", "Softmax", "BatchNorm", "Add", "ElementwiseMultiply", "DotProduct", "Sub")
MOST = 1 << 31
"""Of widths and counts."""
MOST_CROSSES = 1000
"""Cross layers of a network."""
_MULTIPLY = ("Multiply", "WeightMultiply")


class Layer(NamedTuple):
    """A layer: its type, the names that it takes and gives, and all that the JSON says of it."""

    type: str
    bottom: tuple[str, ...]
    top: tuple[str, ...]
    options: Mapping[str, Any]
    where: str

    @property
    def name(self) -> str:
        """The first name that it gives."""
        return self.top[0] if self.top else str(self.options.get("name", self.type))

    def number(self, *path: str) -> int:
        """An option, which must be an integer of at least 1."""
        value: Any = self.options
        for key in path:
            value = cast("Mapping[str, Any]", value).get(key) if isinstance(value, Mapping) else None
        if not is_int(value) or not 1 <= value <= MOST:
            raise CheckpointError(f"{self.where} has {'.'.join(path)} {value!r}, must be an integer from 1 to {MOST:,}")
        return value


class Embedding(NamedTuple):
    """An embedding layer: the table's name, columns, features, pooling, and rows where the JSON says how many."""

    name: str
    dim: int
    slots: int
    pooling: str
    rows: int | None


class Graph(NamedTuple):
    """A model's layers; widths of what they give, by name: columns, or slots and columns; tables; numericals."""

    path: Path
    layers: list[Layer]
    widths: Mapping[str, int | tuple[int, int]]
    embeddings: list[Embedding]
    dense_features: int
    labels: int
    config: Mapping[str, Any]

    def of_type(self, *types: str) -> list[Layer]:
        """Layers of these types, in order."""
        return [layer for layer in self.layers if layer.type in types]


def read_graph(path: Path) -> Graph:
    """Read the layers of a JSON file.

    Raises
    ------
    CheckpointError
        If it is no graph of HugeCTR, or has layers that are not known here; all of these are named.
    """
    try:
        config = parse_json(read_limited(existing(path)))
    except TextError as error:
        raise CheckpointError(f"{path} {error}; copy it again") from None
    entries = cast("Mapping[str, Any]", config).get("layers") if isinstance(config, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in cast("list[object]", entries)):
        raise CheckpointError(f"{path} has no list of layers; give what HugeCTR's Model.graph_to_json writes")
    layers = [_layer(path, entry, i) for i, entry in enumerate(cast("list[Mapping[str, Any]]", entries))]
    if not layers or layers[0].type != "Data":
        raise CheckpointError(f"{path} does not begin with a layer of type Data; give the whole graph")
    unknown = [f"{layer.name} ({layer.type})" for layer in layers if layer.type not in _WIDTHS]
    if unknown:
        raise CheckpointError(
            f"{path} has layers without counterpart in hotbed: {', '.join(unknown)}; build the model in PyTorch, with "
            "hotbed.EmbeddingCollection for its tables, and give its layers the weights"
        )
    widths: dict[str, int | tuple[int, int]] = {}
    embeddings: list[Embedding] = []
    for layer in layers:
        _WIDTHS[layer.type](layer, widths)
        if layer.type in EMBEDDINGS:
            embeddings.append(_embedding(layer, widths))
    return Graph(
        path,
        layers,
        widths,
        embeddings,
        _whole(layers[0].options["dense"].get("dense_dim")),
        layers[0].number("label", "label_dim"),
        cast("Mapping[str, Any]", config),
    )


def _layer(path: Path, entry: Mapping[str, Any], number: int) -> Layer:
    kind = entry.get("type")
    where = f"{path}: layer {number}, '{entry.get('name', kind)}',"
    if not isinstance(kind, str):
        raise CheckpointError(f"{where} has type {kind!r}, must be text")
    return Layer(kind, _names(entry.get("bottom"), where), _names(entry.get("top"), where), entry, where)


def _names(value: object, where: str) -> tuple[str, ...]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(n, str) for n in cast("list[object]", names)):
        raise CheckpointError(f"{where} has {str(value)[:80]} for what it takes or gives, must be names")
    return tuple(cast("list[str]", names))


def _whole(value: object) -> int:
    return value if is_int(value) and value >= 0 else 0


def _embedding(layer: Layer, widths: Mapping[str, int | tuple[int, int]]) -> Embedding:
    slots, dim = cast("tuple[int, int]", widths[layer.name])
    given = layer.options["sparse_embedding_hparam"]
    combiner = given.get("combiner", "sum")
    poolings = {0: "sum", 1: "mean", "sum": "sum", "mean": "mean"}
    if isinstance(combiner, float | list | dict) or combiner not in poolings:
        raise CheckpointError(f"{layer.where} has combiner {combiner!r}, must be 'sum' or 'mean'")
    sizes = given.get("slot_size_array") or ()
    rows = sum(sizes) if sizes and all(map(is_int, sizes)) else None
    return Embedding(layer.name, dim, slots, poolings[combiner], rows)


# -- widths of what layers give ------------------------------------------------------------------------------------

_Widths = dict[str, int | tuple[int, int]]


def _taken(layer: Layer, widths: _Widths, at: int = 0) -> int | tuple[int, int]:
    if len(layer.bottom) <= at or layer.bottom[at] not in widths:
        name = layer.bottom[at] if len(layer.bottom) > at else "nothing"
        raise CheckpointError(f"{layer.where} takes '{name}', which no layer before it gives")
    return widths[layer.bottom[at]]


def columns(layer: Layer, widths: Mapping[str, int | tuple[int, int]], at: int = 0) -> int:
    """Columns of what a layer takes, which must be a matrix."""
    found = _taken(layer, cast("_Widths", widths), at)
    if isinstance(found, tuple):
        raise CheckpointError(f"{layer.where} takes '{layer.bottom[at]}', {list(found)}, which must be reshaped first")
    return found


def _data(layer: Layer, widths: _Widths) -> None:
    for kind in ("label", "dense"):
        if not isinstance(layer.options.get(kind), Mapping):
            raise CheckpointError(f"{layer.where} has no {kind}; give the whole graph")
    widths[str(layer.options["dense"].get("top"))] = _whole(layer.options["dense"].get("dense_dim"))
    widths[str(layer.options["label"].get("top"))] = layer.number("label", "label_dim")
    sparse = layer.options.get("sparse")
    for entry in cast("list[Any]", sparse) if isinstance(sparse, list) else []:
        slots = cast("Mapping[str, Any]", entry).get("slot_num") if isinstance(entry, Mapping) else None
        if not is_int(slots) or slots < 1:
            raise CheckpointError(
                f"{layer.where} has {str(entry)[:80]} among sparse, must have a slot_num of at least 1"
            )
        widths[str(entry.get("top"))] = slots, 1


def _embed(layer: Layer, widths: _Widths) -> None:
    taken = _taken(layer, widths)
    slots = taken[0] if isinstance(taken, tuple) else taken
    widths[layer.name] = slots, layer.number("sparse_embedding_hparam", "embedding_vec_size")


def _reshape(layer: Layer, widths: _Widths) -> None:
    taken = _taken(layer, widths)
    selected, shape = layer.options.get("selected"), layer.options.get("shape")
    if isinstance(selected, list) and isinstance(taken, tuple):
        widths[layer.name] = len(cast("list[object]", selected)) * taken[1]
    elif isinstance(shape, list):
        sizes = [size for size in cast("list[Any]", shape)[1:] if is_int(size) and size > 0]
        widths[layer.name] = (sizes[0], sizes[1]) if len(sizes) == 2 else math.prod(sizes)
    else:
        leading, time = layer.number("leading_dim"), layer.options.get("time_step")
        whole = math.prod(taken) if isinstance(taken, tuple) else taken
        if whole % leading:
            raise CheckpointError(f"{layer.where} has leading_dim {leading}, which does not divide {whole}")
        rows = time if is_int(time) and time > 0 else whole // leading
        widths[layer.name] = leading if rows == 1 else (rows, leading)


def _concat(layer: Layer, widths: _Widths) -> None:
    parts = [_taken(layer, widths, i) for i in range(max(len(layer.bottom), 1))]
    if all(isinstance(part, tuple) for part in parts):
        slots, cols = zip(*cast("list[tuple[int, int]]", parts), strict=True)
        beside = layer.options.get("axis", 1) != 1
        widths[layer.name] = (slots[0], sum(cols)) if beside else (sum(slots), cols[0])
    else:
        widths[layer.name] = sum(columns(layer, widths, i) for i in range(len(layer.bottom)))


def _slice(layer: Layer, widths: _Widths) -> None:
    taken, ranges = _taken(layer, widths), layer.options.get("ranges")
    spans = cast("Sequence[Any]", ranges) if isinstance(ranges, list) else ()
    if len(spans) != len(layer.top) or not all(
        isinstance(s, list) and len(cast("list[Any]", s)) == 2 and all(map(is_int, cast("list[Any]", s))) for s in spans
    ):
        raise CheckpointError(f"{layer.where} has ranges {str(ranges)[:80]}, must be [first, last] for each top")
    for name, (first, last) in zip(layer.top, spans, strict=True):
        widths[name] = (taken[0], last - first) if isinstance(taken, tuple) else last - first


def _same(layer: Layer, widths: _Widths) -> None:
    widths[layer.name] = _taken(layer, widths)


def _product(layer: Layer, widths: _Widths) -> None:
    columns(layer, widths)
    widths[layer.name] = layer.number("fc_param", "num_output")


def _interaction(layer: Layer, widths: _Widths) -> None:
    taken, dim = _taken(layer, widths, 1), columns(layer, widths)
    slots, cols = taken if isinstance(taken, tuple) else (0, 0)
    if cols != dim:
        raise CheckpointError(f"{layer.where} takes {dim} columns and vectors of {cols}; they must be as wide")
    widths[layer.name] = dim + slots * (slots + 1) // 2 + 1


def _multiply(layer: Layer, widths: _Widths) -> None:
    dims = layer.options.get("weight_dims")
    if not isinstance(dims, list) or len(cast("list[Any]", dims)) != 2 or not all(map(is_int, cast("list[Any]", dims))):
        raise CheckpointError(f"{layer.where} has weight_dims {dims!r}, must be two integers")
    widths[layer.name] = math.prod(cast("list[int]", dims))


def _sum(layer: Layer, widths: _Widths) -> None:
    taken = _taken(layer, widths)
    rows, cols = taken if isinstance(taken, tuple) else (1, taken)
    widths[layer.name] = cols if isinstance(taken, tuple) and layer.options.get("axis", 1) == 1 else rows


def _second_order(layer: Layer, widths: _Widths) -> None:
    widths[layer.name] = layer.number("out_dim")


def _nothing(layer: Layer, widths: _Widths) -> None:
    """A loss gives nothing that a layer takes."""


_WIDTHS = {
    "Data": _data,
    **dict.fromkeys(EMBEDDINGS, _embed),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(LOSSES, _nothing),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_MULTIPLY, _multiply),
    "Reshape": _reshape,
    "Concat": _concat,
    "Slice": _slice,
    "Interaction": _interaction,
    "MultiCross": _same,
    "FmOrder2": _second_order,
    "ReduceSum": _sum,
    "ReduceMean": _sum,
}
"""By type of layer, what notes how wide its output is."""


def weights_of(layer: Layer, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights by name, in the order of the dense file; none for layers without any."""
    if layer.type in PRODUCTS:
        taken, given = columns(layer, graph.widths), layer.number("fc_param", "num_output")
        return {"weight": (taken, given), "bias": (given,)}
    if layer.type == "BatchNorm":
        width = columns(layer, graph.widths)
        return {"gamma": (width,), "beta": (width,)}
    if layer.type in _MULTIPLY:
        return {"weight": tuple(layer.options["weight_dims"])}
    if layer.type == "MultiCross":
        width, count = columns(layer, graph.widths), layer.number("mc_param", "num_layers")
        if count > MOST_CROSSES:
            raise CheckpointError(f"{layer.where} has num_layers {count:,}, must be at most {MOST_CROSSES:,}")
        if layer.options["mc_param"].get("projection_dim"):
            raise CheckpointError(
                f"{layer.where} has a projection_dim, whose order in the dense file is not known here; import the "
                "tables alone: --names, without the dense file"
            )
        return {f"{kind}.{i}": (width,) for i in range(count) for kind in ("weight", "bias")}
    return {}
