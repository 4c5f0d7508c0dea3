"""Read what HugeCTR saves: folders of sparse models, a file of the dense model, and the graph that says what they are.

========================================== ============================================================================
``NAME.json``                              the graph, see `hotbed.checkpoint.importers.hugectr_graph`
``PREFIXi_sparse_STEP.model/key``          keys of the i-th embedding layer, int64 ``[n]``, in no order
``PREFIXi_sparse_STEP.model/emb_vector``   their vectors, float32 ``[n, embedding_vec_size]``
``PREFIXi_sparse_STEP.model/slot_id``      the slot of each key, of localized embeddings; keys are distinct without it
``PREFIX_dense_STEP.model``                float32 weights, layer by layer; of inner products ``[in, out]``, then biases
========================================== ============================================================================

All without a header, little-endian. A layer has one table for all of its slots, which here is one table that as many
features share. Keys are the ids of its rows: where they are no more than twice as many numbers as there are keys, the
table has a row for each number, and others their initial values; else it is dynamic, and takes ids of any size.

Moments (``…opt_sparse…``, ``…opt_dense…``) are left out. Of several steps the last is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotbed.checkpoint.importers.dlrm import Layer as DenseLayer
from hotbed.checkpoint.importers.dlrm import dlrm_layers
from hotbed.checkpoint.importers.hugectr_graph import PRODUCTS, Embedding, Graph, read_graph, weights_of
from hotbed.checkpoint.importers.peer import PeerModel, named
from hotbed.checkpoint.importers.peer_array import KeyedArray, PeerArray, existing
from hotbed.embed.dynamic import PREFIX, Vocabulary
from hotbed.errors import CheckpointError, SpecError
from hotbed.specs import DYNAMIC_WAYS, Dynamic, Table, row_bytes

MOST_NUMBERS_PER_KEY = 2
"""Tables of more numbers than this for each key are dynamic."""
_SPARSE = re.compile(r"(.*?)(\d+)_sparse_(\d+)\.model")
_DENSE = re.compile(r"(.*)_dense_(\d+)\.model")


def read_hugectr(path: Path, names: Sequence[str] | None, collection: str) -> PeerModel:
    """Tables and layers of a directory; see `hotbed.checkpoint.importers.import_checkpoint`."""
    graph = read_graph(_graph_file(path))
    folders, dense_file = _files(path, len(graph.embeddings))
    arrays: list[PeerArray | KeyedArray] = []
    states: list[dict[str, Tensor]] = []
    for embedding, folder in zip(graph.embeddings, folders, strict=True):
        array, state = _table(folder, embedding)
        arrays.append(array)
        states.append(state)
    tables = named(arrays, [e.name for e in graph.embeddings] if names is None else names)
    weights = _weights(graph, dense_file)
    dense = _dlrm(graph, weights, arrays[0]) if graph.of_type("Interaction") else weights
    for name, state in zip(tables, states, strict=True):
        dense |= {f"{collection}.{name}.{PREFIX}{key}": tensor for key, tensor in state.items()}
    return PeerModel(tables, dense)


def _graph_file(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder that has the graph and the models")
    found = sorted(path.glob("*.json"))
    if len(found) != 1:
        raise CheckpointError(
            f"{path} has {len(found)} .json files{': ' if found else ''}{', '.join(f.name for f in found)}; it must "
            "have one, which Model.graph_to_json writes"
        )
    return found[0]


def _files(path: Path, count: int) -> tuple[list[Path], Path]:
    """Find the folders of the last step's sparse models, in order, and its dense file."""
    sparse = [(m, f) for f in path.iterdir() if f.is_dir() and (m := _SPARSE.fullmatch(f.name))]
    dense = [(m, f) for f in path.iterdir() if f.is_file() and (m := _DENSE.fullmatch(f.name)) and "opt" not in m[1]]
    if not dense:
        raise CheckpointError(f"{path} has no file PREFIX_dense_STEP.model; give the folder that fit() saved to")
    match, file = max(dense, key=lambda found: int(found[0][2]))
    step, prefix = match[2], match[1]
    found = {int(m[2]): f for m, f in sparse if m[3] == step and m[1] == prefix}
    if sorted(found) != list(range(count)):
        raise CheckpointError(
            f"{path} has the sparse models {sorted(found)} of {file.name}, but the graph has {count} embedding layers; "
            "copy all of them"
        )
    return [found[i] for i in range(count)], file


def _table(folder: Path, embedding: Embedding) -> tuple[KeyedArray, dict[str, Tensor]]:
    """Find the rows of a table, and the state of a dynamic one."""
    key_file, vector_file, dim = existing(folder / "key"), existing(folder / "emb_vector"), embedding.dim
    count, rest = divmod(key_file.stat().st_size, 8)
    if rest or not count or vector_file.stat().st_size != count * dim * 4:
        raise CheckpointError(
            f"{folder} has {key_file.stat().st_size:,} bytes of keys and {vector_file.stat().st_size:,} of vectors, "
            f"must be 8 for each key and {4 * dim} for its vector of {dim} float32; copy it again"
        )
    keys = torch.from_numpy(np.fromfile(key_file, dtype="<i8"))
    order = torch.argsort(keys, stable=True)
    keys = keys[order]
    if int(keys[0]) < 0:
        raise CheckpointError(f"{key_file} has the key {int(keys[0])}; ids of hotbed's tables begin at 0")
    if len(twice := keys[1:][keys[1:] == keys[:-1]]):
        raise CheckpointError(f"{key_file} has the key {int(twice[0])} twice; a table has one row for each")
    numbers, state = max(int(keys[-1]) + 1, embedding.rows or 0), dict[str, Tensor]()
    if numbers > max(MOST_NUMBERS_PER_KEY * count, embedding.rows or 0):
        rows, numbers, state = _dynamic(keys, embedding)
        by_row = torch.argsort(rows)
        keys, order = rows[by_row], order[by_row]
    vectors = np.memmap(vector_file, dtype="<f4", mode="r", shape=(count, dim))

    def read(first: int, last: int) -> Tensor:
        return torch.from_numpy(vectors[order[first:last].numpy()])

    return KeyedArray(numbers, keys, PeerArray((count, dim), read, f"{vector_file}")), state


def _dynamic(keys: Tensor, embedding: Embedding) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Give each key a row, as training would; returns these ``[n]``, the number of rows, and the table's state."""
    nbytes, room = row_bytes("fp32", embedding.dim), max(len(keys), DYNAMIC_WAYS)
    while True:
        room = -(-room * 5 // 4 // DYNAMIC_WAYS) * DYNAMIC_WAYS
        try:
            table = Table(
                embedding.name, "dynamic", embedding.dim, dynamic=Dynamic(capacity_bytes=room * nbytes), init_bound=1.0
            )
        except SpecError as error:
            raise CheckpointError(f"embedding layer '{embedding.name}' can be no table of hotbed's: {error}") from None
        vocabulary = Vocabulary(table, 0, 1)
        rows, _ = vocabulary.rows_of(keys, None, train=True)
        if bool((rows >= 0).all()):
            return rows, table.rows, vocabulary.state(None)


def _weights(graph: Graph, file: Path) -> dict[str, Tensor]:
    """Read the dense file: weights of inner products ``[out, in]``, by ``TOP.weight``."""
    shapes = {
        f"{layer.name}.{name}": (shape, layer.type in PRODUCTS)
        for layer in graph.layers
        for name, shape in weights_of(layer, graph).items()
    }
    expected, size = 4 * sum(math.prod(shape) for shape, _ in shapes.values()), file.stat().st_size
    if size != expected:
        raise CheckpointError(
            f"{file} has {size:,} bytes, but the layers of {graph.path.name} have {expected:,} of weights; give the "
            "graph that was trained"
        )
    values, first, found = torch.from_numpy(np.fromfile(file, dtype="<f4")), 0, dict[str, Tensor]()
    for key, (shape, is_product) in shapes.items():
        tensor = values[first : first + math.prod(shape)].view(shape)
        found[key] = (tensor.T if is_product and len(shape) == 2 else tensor).clone()
        first += math.prod(shape)
    return found


def _dlrm(graph: Graph, weights: dict[str, Tensor], table: PeerArray | KeyedArray) -> dict[str, Tensor]:
    """State of `hotbed.nn.DLRM`, whose interaction is HugeCTR's without the last column, which is 0."""
    at = graph.layers.index(graph.of_type("Interaction")[0])
    layers = [[layer for layer in part if layer.type in PRODUCTS] for part in (graph.layers[:at], graph.layers[at:])]
    bottom, top = (
        [DenseLayer(weights[f"{x.name}.weight"], weights[f"{x.name}.bias"], x.where) for x in part] for part in layers
    )
    used = {f"{layer.name}.{kind}" for part in layers for layer in part for kind in ("weight", "bias")}
    if others := weights.keys() - used:
        raise CheckpointError(
            f"{graph.path} has an Interaction and weights {', '.join(sorted(others))}, which hotbed's DLRM has not; "
            "build the model in PyTorch, with hotbed.EmbeddingCollection for its tables"
        )
    array = table.array if isinstance(table, KeyedArray) else table
    slots = graph.embeddings[0].slots
    return dlrm_layers(bottom, top, [array] * slots, paddings=(1,))
