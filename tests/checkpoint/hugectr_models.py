"""Small models as HugeCTR saves them: graphs with the layers of its samples, keys, vectors and dense weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.checkpoint.peers import Reference

DIM = 16


def data(slots: int | list[int], dense: int = 13, names: list[str] | None = None) -> dict[str, Any]:
    each = slots if isinstance(slots, list) else [slots]
    tops = names or [f"data{i + 1}" for i in range(len(each))]
    return {
        "name": "data",
        "type": "Data",
        "source": "./train/_file_list.txt",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": dense},
        "sparse": [
            {"top": top, "type": "DistributedSlot", "slot_num": n, "nnz_per_slot": [1] * n}
            for top, n in zip(tops, each, strict=True)
        ],
    }


def embedding(top: str, bottom: str, dim: int = DIM, combiner: Any = "sum", **more: Any) -> dict[str, Any]:
    hparam = {"embedding_vec_size": dim, "combiner": combiner, "max_vocabulary_size_global": 100, **more}
    kind = "DistributedSlotSparseEmbeddingHash"
    return {"name": top, "type": kind, "bottom": bottom, "top": top, "sparse_embedding_hparam": hparam}


def layer(kind: str, top: str | list[str], bottom: str | list[str], **options: Any) -> dict[str, Any]:
    return {"name": top if isinstance(top, str) else top[0], "type": kind, "bottom": bottom, "top": top, **options}


def product(top: str, bottom: str, width: int) -> dict[str, Any]:
    return layer("InnerProduct", top, bottom, fc_param={"num_output": width})


def dlrm(reference: Reference, slots: int = 3) -> dict[str, Any]:
    """The graph of a reference, with ReLUs between its layers."""
    layers = [data(slots), embedding("sparse_embedding1", "data1", reference.tables[0].shape[1])]
    bottom = "dense"
    for i, (weight, _) in enumerate(reference.bottom):
        layers += [product(f"fc{i}", bottom, len(weight)), layer("ReLU", f"relu{i}", f"fc{i}")]
        bottom = f"relu{i}"
    layers.append(layer("Interaction", "interaction1", [bottom, "sparse_embedding1"]))
    bottom = "interaction1"
    for i, (weight, _) in enumerate(reference.top):
        layers.append(product(f"top{i}", bottom, len(weight)))
        bottom = f"top{i}"
        if i < len(reference.top) - 1:
            layers.append(layer("ReLU", f"top_relu{i}", bottom))
            bottom = f"top_relu{i}"
    layers.append(layer("BinaryCrossEntropyLoss", "loss", [bottom, "label"]))
    return {
        "solver": {"lr_policy": "fixed", "batchsize": 4096, "max_iter": 500},
        "optimizer": {"type": "SGD", "sgd_hparam": {"learning_rate": 0.5, "warmup_steps": 300}},
        "layers": layers,
    }


def wide_and_deep() -> dict[str, Any]:
    return {
        "layers": [
            data([2, 3], names=["wide_data", "deep_data"]),
            embedding("sparse_embedding2", "wide_data", 1, 0),
            embedding("sparse_embedding1", "deep_data", DIM, 1),
            layer("Reshape", "reshape1", "sparse_embedding1", leading_dim=3 * DIM),
            layer("Reshape", "reshape2", "sparse_embedding2", leading_dim=2),
            layer("ReduceSum", "wide_redn", "reshape2", axis=1),
            layer("Concat", "concat1", ["reshape1", "dense"]),
            product("fc1", "concat1", 24),
            layer("ReLU", "relu1", "fc1"),
            layer("Dropout", "dropout1", "relu1", rate=0.5),
            product("fc2", "dropout1", 1),
            layer("Add", "add1", ["fc2", "wide_redn"]),
            layer("BinaryCrossEntropyLoss", "loss", ["add1", "label"]),
        ]
    }


def deepfm() -> dict[str, Any]:
    return {
        "optimizer": {"type": "Adam", "adam_hparam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999}},
        "layers": [
            data(3),
            embedding("sparse_embedding1", "data1", 11),
            layer("Reshape", "reshape1", "sparse_embedding1", leading_dim=11),
            layer("Slice", ["slice11", "slice12"], "reshape1", ranges=[[0, 10], [10, 11]]),
            layer("Reshape", "reshape2", "slice11", leading_dim=30),
            layer("Reshape", "reshape3", "slice12", leading_dim=3),
            layer("Slice", ["slice21", "slice22"], "dense", ranges=[[0, 13], [0, 13]]),
            layer("Multiply", "multiply1", "slice21", weight_dims=[13, 10]),
            layer("Multiply", "multiply2", "slice22", weight_dims=[13, 1]),
            layer("Concat", "concat1", ["reshape2", "multiply1"]),
            layer("Slice", ["slice31", "slice32"], "concat1", ranges=[[0, 160], [0, 160]]),
            product("fc1", "slice31", 40),
            layer("ReLU", "relu1", "fc1"),
            product("fc2", "relu1", 1),
            layer("FmOrder2", "fmorder2", "slice32", out_dim=10),
            layer("ReduceSum", "reducesum1", "fmorder2", axis=1),
            layer("Concat", "concat2", ["reshape3", "multiply2"]),
            layer("ReduceSum", "reducesum2", "concat2", axis=1),
            layer("Add", "add", ["fc2", "reducesum1", "reducesum2"]),
            layer("BinaryCrossEntropyLoss", "loss", ["add", "label"]),
        ],
    }


def cross() -> dict[str, Any]:
    return {
        "layers": [
            data(3),
            embedding("sparse_embedding1", "data1"),
            layer("Reshape", "reshape1", "sparse_embedding1", leading_dim=3 * DIM),
            layer("Concat", "concat1", ["reshape1", "dense"]),
            layer("Slice", ["slice11", "slice12"], "concat1", ranges=[[0, 61], [0, 61]]),
            layer("MultiCross", "multicross1", "slice11", mc_param={"num_layers": 2}),
            product("fc1", "slice12", 8),
            layer("ReLU", "relu1", "fc1"),
            layer("Concat", "concat2", ["relu1", "multicross1"]),
            product("fc2", "concat2", 1),
            layer("BinaryCrossEntropyLoss", "loss", ["fc2", "label"]),
        ]
    }


def save(
    path: Path, graph: Any, tables: list[tuple[Tensor, Tensor]], dense: list[Tensor], step: int = 20, prefix: str = "m"
) -> Path:
    """Write keys and vectors of each embedding layer, and dense weights, inner products ``[in, out]``."""
    path.mkdir(exist_ok=True)
    (path / "graph.json").write_text(json.dumps(graph))
    for i, (keys, vectors) in enumerate(tables):
        folder = path / f"{prefix}{i}_sparse_{step}.model"
        folder.mkdir()
        keys.numpy().astype("<i8").tofile(folder / "key")
        vectors.numpy().astype("<f4").tofile(folder / "emb_vector")
        np.zeros(len(keys), dtype="<u8").tofile(folder / "slot_id")
    weights = torch.cat([w.reshape(-1) for w in dense]) if dense else torch.empty(0)
    weights.numpy().astype("<f4").tofile(path / f"{prefix}_dense_{step}.model")
    (path / f"{prefix}_opt_dense_{step}.model").write_bytes(b"moments")
    return path
