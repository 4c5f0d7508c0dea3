"""Read NVIDIA's DLRMs, of PyTorch and of TensorFlow 2.

The PyTorch one (DeepLearningExamples, PyTorch/Recommendation/DLRM) is a flat directory:

============================== ======================================================================
``bottom_model.embeddings.I.bin`` float32 ``[R, D]``, raw, little-endian; ``I`` counts features
``embeddings.I.meta.pt``       ``{"shape": (R, D)}``
``bottom_model.mlp.pt``        ``{"weights": [[out, in], …], "biases": [[out], …]}``
``top_model.mlp.pt``           the same, without the last layer
``top_model.out.pt``           the last layer: ``{"weight", "bias"}``
``metadata.pt``                ``{"data": {"device_mapping": {"embedding": [[I, …] per GPU]}}, "config": {…}}``
============================== ======================================================================

The interaction sees features in the order in which GPUs tile them, also where one GPU tile all, unless
``bottom_features_ordered`` was set (of one GPU that was ignored). Its result is padded to a multiple of 8, by earlier
releases by one column.

NVIDIA's TensorFlow 2 DLRM (DeepLearningExamples, TensorFlow2/Recommendation/DLRM_and_DCNv2): a directory.

``sparse/feature_I.npy`` are the tables, float32 ``[R, D]``; ``dense/dense.index`` and ``.data-…`` the layers, kernels
``[in, out]``; ``dense/config.json`` says how many inputs there are. Dense inputs and the interaction are padded to a
multiple of 8. Features have the order of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from torch import Tensor

from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers, padded_to_8
from hotbed.checkpoint.importers.peer import PeerModel, load_pt, named, npy_array, raw_array
from hotbed.checkpoint.importers.peer_array import PeerArray, existing
from hotbed.checkpoint.importers.tensor_bundle import read_bundle
from hotbed.errors import CheckpointError
from hotbed.parsing import TextError, parse_json, read_limited
from hotbed.specs import is_int


def read_nvidia(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Tables and layers of a directory; see `hotbed.checkpoint.importers.import_checkpoint`."""
    metadata = _mapping(path / "metadata.pt", load_pt(path / "metadata.pt"))
    config = _mapping(path / "metadata.pt", metadata.get("config", {}))
    if config.get("interaction_op", "dot") != "dot":
        raise CheckpointError(
            f"{path}: interaction_op is '{config['interaction_op']}', hotbed's DLRM has the dot interaction only"
        )
    tables = _tables(path)
    top = [*_layers(path / "top_model.mlp.pt"), _last_layer(path / "top_model.out.pt")]
    bottom = _layers(path / "bottom_model.mlp.pt")
    order = _order(path, metadata, config, len(tables))
    dense = dlrm_layers(
        bottom,
        top,
        tables,
        positions=[order.index(feature) for feature in range(len(tables))],
        paddings=(padded_to_8(tables[0].shape[1], len(tables)), 1),
    )
    return PeerModel(named(tables, names), dense)


def _tables(path: Path) -> list[PeerArray]:
    count = len(list(path.glob("bottom_model.embeddings.*.bin")))
    if not count:
        raise CheckpointError(
            f"{path} holds no bottom_model.embeddings.0.bin; name the directory that NVIDIA's DLRM saved to"
        )
    tables: list[PeerArray] = []
    for i in range(count):
        meta = path / f"embeddings.{i}.meta.pt"
        shape: object = _mapping(meta, load_pt(meta)).get("shape", ())
        if not isinstance(shape, list | tuple):
            raise CheckpointError(f"{meta} says shape {shape!r}, must be [rows, dim]")
        lengths = tuple(cast("Sequence[object]", shape))
        tables.append(raw_array(path / f"bottom_model.embeddings.{i}.bin", lengths).matrix())
    return tables


def _order(path: Path, metadata: Mapping[str, Any], config: Mapping[str, Any], count: int) -> list[int]:
    """Features in the order in which the interaction saw them."""
    file = path / "metadata.pt"
    mapping = _mapping(file, metadata.get("data", {})).get("device_mapping")
    buckets: object = [] if mapping is None else _mapping(file, mapping).get("embedding", [])
    if not _are_buckets(buckets):
        raise CheckpointError(f"{file} has the device_mapping {str(mapping)[:80]}, must be lists of features by GPU")
    if mapping is None or (len(buckets) > 1 and config.get("bottom_features_ordered", False)):
        return list(range(count))
    order = [feature for bucket in buckets for feature in bucket]
    if sorted(order) != list(range(count)):
        raise CheckpointError(
            f"{path}/metadata.pt speaks of features {sorted(order)}, but there are {count} tables, 0 … {count - 1}; "
            "copy the whole checkpoint"
        )
    return order


def _are_buckets(value: object) -> TypeGuard[list[list[int]]]:
    """Whether a value is lists of integers."""
    buckets = cast("list[object]", value) if isinstance(value, list) else [None]
    return all(isinstance(b, list) and all(map(is_int, cast("list[object]", b))) for b in buckets)


def _layers(path: Path) -> list[Layer]:
    mlp = _mapping(path, load_pt(path))
    weights, biases = (_tensors(path, mlp.get(key, [])) for key in ("weights", "biases"))
    if not weights or len(weights) != len(biases):
        raise CheckpointError(f"{path} has {len(weights)} weights and {len(biases)} biases, must be as many, not 0")
    pairs = list(zip(weights, biases, strict=True))
    return [Layer(w.detach(), b.detach(), f"{path}: layer {i}") for i, (w, b) in enumerate(pairs)]


def _last_layer(path: Path) -> Layer:
    state = {str(key).removeprefix("module."): t for key, t in _mapping(path, load_pt(path)).items()}
    if not {"weight", "bias"} <= state.keys():
        raise CheckpointError(f"{path} has {', '.join(state) or 'nothing'}, must have weight and bias")
    weight, bias = _tensors(path, [state["weight"], state["bias"]])
    return Layer(weight.detach(), bias.detach(), f"{path}")


def _tensors(path: Path, value: object) -> list[Tensor]:
    if not isinstance(value, list | tuple) or not all(isinstance(t, Tensor) for t in cast("Sequence[object]", value)):
        raise CheckpointError(f"{path} holds {str(value)[:80]} where tensors must be; copy it again")
    return list(cast("Sequence[Tensor]", value))


def _mapping(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} holds {type(value).__name__}, must be a dict; is this NVIDIA's DLRM?")
    return cast("Mapping[str, Any]", value)


_INTERACTIONS = ("dot_tensorflow", "dot_custom_cuda")


def read_tf2(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Tables and layers of a directory; see `hotbed.checkpoint.importers.import_checkpoint`."""
    config = _config(path / "dense" / "config.json")
    interaction = config["interaction"]
    if interaction not in _INTERACTIONS:
        raise CheckpointError(
            f"{path}: interaction is '{interaction}', hotbed's DLRM has the dot interaction only "
            f"({', '.join(_INTERACTIONS)})"
        )
    tables = [_table(path, i, rows) for i, rows in enumerate(config["categorical_cardinalities"])]
    tensors = read_bundle(path / "dense" / "dense")
    bottom, top = (_keras_layers(tensors, name, path) for name in ("bottom_mlp_layers", "top_mlp"))
    inputs: int = config["num_numerical_features"]
    have = bottom[0].weight.shape[1]
    if not inputs <= have <= -(-inputs // 8) * 8:
        raise CheckpointError(
            f"{bottom[0].where} takes {have} inputs, but config.json says {inputs} numerical features, padded to a "
            "multiple of 8; copy the whole checkpoint"
        )
    bottom[0] = bottom[0]._replace(weight=bottom[0].weight[:, :inputs])
    dense = dlrm_layers(bottom, top, tables, paddings=(padded_to_8(len(bottom[-1].bias), len(tables)), 1))
    return PeerModel(named(tables, names), dense)


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = _mapping(path, parse_json(read_limited(existing(path))))
    except TextError as error:
        raise CheckpointError(f"{path} {error}; copy it again") from None
    for key in ("interaction", "categorical_cardinalities", "num_numerical_features"):
        if key not in config:
            raise CheckpointError(f"{path} has no '{key}'; is this NVIDIA's TensorFlow 2 DLRM?")
    rows, inputs = config["categorical_cardinalities"], config["num_numerical_features"]
    if not _are_buckets([rows]) or not is_int(inputs) or inputs < 1:
        raise CheckpointError(
            f"{path} says {str(rows)[:80]} and {str(inputs)[:80]}, must be integers: the rows of each table, and how "
            "many numerical features there are; copy it again"
        )
    return config


def _table(path: Path, number: int, rows: int) -> PeerArray:
    table = npy_array(path / "sparse" / f"feature_{number}.npy").matrix()
    if table.shape[0] != rows:
        raise CheckpointError(
            f"{table.where} has {table.shape[0]:,} rows, but dense/config.json says {rows:,}; tables that were saved "
            "as one (concat_embedding) cannot be told apart, save them without it"
        )
    return table


def _keras_layers(tensors: Mapping[str, Tensor], name: str, path: Path) -> list[Layer]:
    value = ".ATTRIBUTES/VARIABLE_VALUE"
    layers: list[Layer] = []
    while f"{name}/{len(layers)}/kernel/{value}" in tensors:
        key = f"{name}/{len(layers)}"
        if f"{key}/bias/{value}" not in tensors:
            raise CheckpointError(f"{path}/dense/dense has no '{key}/bias'; copy the whole checkpoint")
        kernel, bias = (tensors[f"{key}/{kind}/{value}"] for kind in ("kernel", "bias"))
        layers.append(Layer(kernel.T, bias, f"{path}/dense/dense: '{key}'"))
    if not layers:
        raise CheckpointError(f"{path}/dense/dense has no '{name}/0/kernel'; is this NVIDIA's TensorFlow 2 DLRM?")
    return layers
