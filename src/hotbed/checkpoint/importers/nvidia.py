"""NVIDIA's PyTorch DLRM (DeepLearningExamples, PyTorch/Recommendation/DLRM): a flat directory.

============================== ======================================================================
``bottom_model.embeddings.I.bin`` float32 ``[R, D]``, raw, little-endian; ``I`` counts features
``embeddings.I.meta.pt``       ``{"shape": (R, D)}``
``bottom_model.mlp.pt``        ``{"weights": [[out, in], …], "biases": [[out], …]}``
``top_model.mlp.pt``           the same, without the last layer
``top_model.out.pt``           the last layer: ``{"weight", "bias"}``
``metadata.pt``                ``{"data": {"device_mapping": {"embedding": [[I, …] per GPU]}}, "config": {…}}``
============================== ======================================================================

The interaction sees features in the order in which GPUs held them, also where one GPU held all, unless
``bottom_features_ordered`` was set (of one GPU that was ignored). Its result is padded to a multiple of 8, by earlier
releases by one column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from hotbed.checkpoint.importers.arrays import PeerArray, load_pt, raw_array
from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers, padded_to_8
from hotbed.checkpoint.importers.peer import PeerModel, named
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
