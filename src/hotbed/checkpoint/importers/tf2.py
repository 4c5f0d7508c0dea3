"""NVIDIA's TensorFlow 2 DLRM (DeepLearningExamples, TensorFlow2/Recommendation/DLRM_and_DCNv2): a directory.

``sparse/feature_I.npy`` are the tables, float32 ``[R, D]``; ``dense/dense.index`` and ``.data-…`` the layers, kernels
``[in, out]``; ``dense/config.json`` says how many inputs there are. Dense inputs and the interaction are padded to a
multiple of 8. Features have the order of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hotbed.checkpoint.importers.arrays import PeerArray, existing, npy_array
from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers, padded_to_8
from hotbed.checkpoint.importers.peer import PeerModel, named
from hotbed.checkpoint.importers.tensor_bundle import read_bundle
from hotbed.errors import CheckpointError

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
    bottom, top = (_layers(tensors, name, path) for name in ("bottom_mlp_layers", "top_mlp"))
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


def _layers(tensors: Mapping[str, Tensor], name: str, path: Path) -> list[Layer]:
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
