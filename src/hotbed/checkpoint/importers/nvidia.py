"""Read NVIDIA's DLRM of PyTorch (DeepLearningExamples, PyTorch/Recommendation/DLRM).

A saved model is a flat directory:

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from torch import Tensor

from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers, padded_to_8
from hotbed.checkpoint.importers.peer import PeerArray, PeerModel, load_pt, named, raw_array
from hotbed.checks import is_int
from hotbed.errors import CheckpointError


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
