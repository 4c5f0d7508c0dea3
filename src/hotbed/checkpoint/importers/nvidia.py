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

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers, padded_to_8
from hotbed.checkpoint.importers.peer import PeerArray, PeerModel, existing, load_pt, named, npy_array, raw_array
from hotbed.checkpoint.importers.tensor_bundle import read_bundle
from hotbed.errors import CheckpointError


def read_nvidia(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Tables and layers of a directory; see `hotbed.checkpoint.importers.import_checkpoint`."""
    metadata = _mapping(path / "metadata.pt", load_pt(path / "metadata.pt"))
    config = cast("Mapping[str, Any]", metadata.get("config", {}))
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
        shape = tuple(_mapping(meta, load_pt(meta)).get("shape", ()))
        if len(shape) != 2:
            raise CheckpointError(f"{meta} says shape {list(shape)}, must be [rows, dim]")
        tables.append(raw_array(path / f"bottom_model.embeddings.{i}.bin", shape).matrix())
    return tables


def _order(path: Path, metadata: Mapping[str, Any], config: Mapping[str, Any], count: int) -> list[int]:
    """Features in the order in which the interaction saw them."""
    mapping = metadata.get("data", {}).get("device_mapping")
    buckets: list[list[int]] = [] if mapping is None else mapping.get("embedding", [])
    if mapping is None or (len(buckets) > 1 and config.get("bottom_features_ordered", False)):
        return list(range(count))
    order = [feature for bucket in buckets for feature in bucket]
    if sorted(order) != list(range(count)):
        raise CheckpointError(
            f"{path}/metadata.pt speaks of features {sorted(order)}, but there are {count} tables, 0 … {count - 1}; "
            "copy the whole checkpoint"
        )
    return order


def _layers(path: Path) -> list[Layer]:
    mlp = _mapping(path, load_pt(path))
    weights, biases = list(mlp.get("weights", [])), list(mlp.get("biases", []))
    if not weights or len(weights) != len(biases):
        raise CheckpointError(f"{path} has {len(weights)} weights and {len(biases)} biases, must be as many, not 0")
    pairs: list[tuple[Tensor, Tensor]] = list(zip(weights, biases, strict=True))
    return [Layer(w.detach(), b.detach(), f"{path}: layer {i}") for i, (w, b) in enumerate(pairs)]


def _last_layer(path: Path) -> Layer:
    state = {key.removeprefix("module."): t for key, t in _mapping(path, load_pt(path)).items()}
    if not {"weight", "bias"} <= state.keys():
        raise CheckpointError(f"{path} has {', '.join(state) or 'nothing'}, must have weight and bias")
    return Layer(state["weight"].detach(), state["bias"].detach(), f"{path}")


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
        config = json.loads(existing(path).read_text(encoding="utf-8"))
        missing = [k for k in ("interaction", "categorical_cardinalities", "num_numerical_features") if k not in config]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from None
    if missing:
        raise CheckpointError(f"{path} has no '{missing[0]}'; is this NVIDIA's TensorFlow 2 DLRM?")
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
