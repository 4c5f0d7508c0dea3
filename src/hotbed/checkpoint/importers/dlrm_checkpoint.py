"""Read DLRMs that PyTorch saved: of facebookresearch/dlrm, TorchRec, NVIDIA and plain ``nn.EmbeddingBag`` modules.

All DLRMs have a dot interaction of ``n`` vectors with ``D`` columns. The first vector is the output of the bottom MLP.
The interaction is the first vector, followed by the products of all pairs. The libraries differ in the order of the
vectors, the order of the pairs, and the padding. `dlrm_layers` permutes the columns of the first top layer into the
order of `hotbed.nn.DLRM`.

- facebookresearch/dlrm: the ``.pt`` file of ``dlrm_s_pytorch.py --save-model``, with a ``state_dict``. Tables are
  ``emb_l.I.weight``, layers ``bot_l.2K`` and ``top_l.2K``. The interaction is the same as hotbed's, without padding.
  The model returns probabilities, and hotbed's model returns logits.
- TorchRec: the unsharded ``state_dict`` of ``torchrec.models.dlrm.DLRM`` or ``DLRMTrain``. Vectors are in the order of
  the ``EmbeddingBagConfig``s, pairs are the upper triangle, and there is no padding. Safetensors files do not keep the
  order of tables, so it must be passed unless their names are numbered.
- Directories of ``torch.distributed.checkpoint``: the same names, with any sharding
  (`hotbed.checkpoint.importers.dcp`).
- Others: weights of ``nn.EmbeddingBag`` and ``nn.Embedding`` modules, and the other tensors of their model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hotbed.checkpoint.importers.dcp import METADATA, dcp_arrays, is_dcp
from hotbed.checkpoint.importers.peer import (
    READERS,
    Names,
    PeerArray,
    PeerModel,
    arrays_of_file,
    load_pt,
    name_tables,
    raw_array,
)
from hotbed.checks import is_int
from hotbed.errors import CheckpointError, did_you_mean

Triangle = Literal["lower", "upper"]
"""The triangle of the matrix of products: pairs with previous vectors (``lower``) or with later vectors (``upper``)."""


class Layer(NamedTuple):
    """A fully connected layer: ``weight [out, in]``, ``bias [out]``, and its origin for messages."""

    weight: Tensor
    bias: Tensor
    where: str


def dlrm_layers(
    bottom: Sequence[Layer],
    top: Sequence[Layer],
    tables: Sequence[PeerArray],
    *,
    triangle: Triangle = "lower",
    positions: Sequence[int] | None = None,
    paddings: Sequence[int] = (0,),
) -> dict[str, Tensor]:
    """Return the state of the MLPs of `hotbed.nn.DLRM` from the layers of both MLPs, with ReLU between layers.

    Parameters
    ----------
    bottom, top
        All layers of the MLPs.
    tables
        One table for each feature, in the order of hotbed's features.
    triangle
        Order of pairs in the other library.
    positions
        Position of each feature's vector among the other library's features. Default: the same order.
    paddings
        Possible numbers of padding columns at the end of the other library's interaction.
    """
    for name, layers in (("bottom", bottom), ("top", top)):
        _check_chain(name, layers)
    dim, vectors = len(bottom[-1].bias), 1 + len(tables)
    for table in tables:
        if table.matrix().shape[1] != dim:
            raise CheckpointError(
                f"{table.where}: got {table.shape[1]} columns, expected {dim}, the width of the bottom MLP's last layer"
            )
    first = top[0].weight
    used = dim + vectors * (vectors - 1) // 2
    widths = sorted({used + padding for padding in paddings})
    if first.shape[1] not in widths:
        other = {
            used + vectors: " (as with products of vectors with themselves)",
            vectors * dim: " (as with concatenated vectors)",
        }
        raise CheckpointError(
            f"{top[0].where}: got {first.shape[1]} inputs{other.get(first.shape[1], '')}, expected "
            f"{' or '.join(map(str, widths))}: {dim} columns and the products of {vectors} vectors, one feature per "
            "table. hotbed's DLRM supports only this interaction"
        )
    columns = torch.cat([torch.arange(dim), dim + _pairs(vectors, triangle, positions)])
    permuted = pad(first[:, columns], (0, -used % 8))
    found: dict[str, Tensor] = {}
    for name, layers in (("bottom", bottom), ("top", [top[0]._replace(weight=permuted), *top[1:]])):
        for i, layer in enumerate(layers):
            found[f"{name}.{2 * i}.weight"] = layer.weight.to(torch.float32)
            found[f"{name}.{2 * i}.bias"] = layer.bias.to(torch.float32)
    return found


def padded_to_8(dim: int, features: int) -> int:
    """Return the number of padding columns to a multiple of 8."""
    return -(dim + features * (features + 1) // 2) % 8


def _pairs(vectors: int, triangle: Triangle, positions: Sequence[int] | None) -> Tensor:
    """Return the position, among the other library's pairs, of each of hotbed's pairs (the lower triangle by rows)."""
    position = torch.tensor([0, *(1 + p for p in (range(vectors - 1) if positions is None else positions))])
    i, j = torch.tril_indices(vectors, vectors, -1)
    later, earlier = torch.maximum(position[i], position[j]), torch.minimum(position[i], position[j])
    if triangle == "lower":
        return later * (later - 1) // 2 + earlier
    return earlier * vectors - earlier * (earlier + 1) // 2 + later - earlier - 1


def _check_chain(name: str, layers: Sequence[Layer]) -> None:
    if not layers:
        raise CheckpointError(f"{name} MLP: got no layers, expected at least one")
    width: int | None = None
    for layer in layers:
        if layer.weight.dim() != 2 or layer.bias.shape != layer.weight.shape[:1]:
            raise CheckpointError(
                f"{layer.where}: got weight {list(layer.weight.shape)} and bias {list(layer.bias.shape)}, expected "
                "[out, in] and [out]"
            )
        if width is not None and layer.weight.shape[1] != width:
            raise CheckpointError(
                f"{layer.where}: got {layer.weight.shape[1]} inputs, expected {width}, the width of the previous layer"
            )
        width = layer.weight.shape[0]


def read_facebook(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Read the tables and layers of a file. See `hotbed.checkpoint.importers.import_checkpoint`."""
    saved = load_pt(path, _numpy_scalars())
    state = saved.get("state_dict") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has no 'state_dict'. Pass the file of dlrm_s_pytorch.py --save-model")
    for key in state:
        if not isinstance(key, str) or not re.fullmatch(r"emb_l\.\d+\.weight|(bot|top)_l\.\d+\.(weight|bias)", key):
            raise CheckpointError(
                f"{path}: got '{key}', expected a DLRM of one process with plain tables. Parts of a distributed model, "
                "compressed tables and weighted pooling are not supported"
            )
    count = sum(key.startswith("emb_l.") for key in state)
    tables = [
        PeerArray.of(_tensor(state, f"emb_l.{i}.weight", path), f"{path}: 'emb_l.{i}.weight'") for i in range(count)
    ]
    layers = dlrm_layers(_layers(state, "bot_l", path), _layers(state, "top_l", path), tables)
    return PeerModel(name_tables(tables, names), layers)


def _numpy_scalars() -> list[Any]:
    """Return the types in pickles of numpy's scalars, e.g. of losses in such a file."""
    scalar: Any = np.float64(0).__reduce__()[0]
    kinds = (np.float32, np.float64, np.int32, np.int64)
    return [(scalar, "numpy._core.multiarray.scalar"), (scalar, "numpy.core.multiarray.scalar"), np.dtype] + [
        type(np.dtype(kind)) for kind in kinds
    ]


def _layers(state: Mapping[str, Tensor], name: str, path: Path) -> list[Layer]:
    count = max(sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in state), 1)
    return [
        Layer(
            _tensor(state, f"{name}.{2 * i}.weight", path),
            _tensor(state, f"{name}.{2 * i}.bias", path),
            f"{path}: '{name}.{2 * i}'",
        )
        for i in range(count)
    ]


def _tensor(state: Mapping[str, Tensor], key: str, path: Path) -> Tensor:
    if key not in state:
        raise CheckpointError(f"{path} has no '{key}'. Save the whole state_dict")
    value: object = state[key]
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path}: '{key}': got {type(value).__name__}, expected a tensor. Save the state_dict")
    return value.detach()


def read_saved_arrays(path: Path, prefix: str = "") -> dict[str, PeerArray]:
    """Return the arrays of a file, of all files in a directory, or of a ``torch.distributed.checkpoint``, by name.

    Names without the prefix are ignored, and the prefix is removed. An array without a name, in ``NAME.npy`` or
    ``NAME.pt``, is called ``NAME.weight``.
    """
    found = _arrays_of_path(path)
    own = {name.removeprefix(prefix): array for name, array in found.items() if name.startswith(prefix)}
    if not own:
        known = dict.fromkeys(f"{name.split('.')[0]}." for name in found)
        raise CheckpointError(
            f"{path}: prefix of names: got '{prefix}', expected one of {', '.join(known)}{did_you_mean(prefix, known)}"
        )
    return own


def _arrays_of_path(path: Path) -> dict[str, PeerArray]:
    if not path.is_dir():
        return arrays_of_file(path)
    if is_dcp(path):
        return dcp_arrays(path)
    found: dict[str, PeerArray] = {}
    for file in sorted(f for f in path.iterdir() if f.suffix in READERS):
        for name, array in arrays_of_file(file).items():
            if name in found:
                raise CheckpointError(f"'{name}' is in {found[name].where} and in {file}. Remove one of them")
            found[name] = array
    if not found:
        raise CheckpointError(f"{path} has no {', '.join(READERS)} file")
    return found


def read_embedding_bags(path: Path, names: Names, collection: str, prefix: str) -> PeerModel:
    """Read tables and other tensors. See `hotbed.checkpoint.importers.import_checkpoint`.

    Keys of tables may start with the name of the collection. Other tensors keep their keys.
    """
    arrays = read_saved_arrays(path, prefix)
    if isinstance(names, Mapping):
        return _bags_by_key(path, arrays, names)
    keys = {_table_of(key, collection): key for key, array in arrays.items() if _may_be_table(key, array, arrays)}
    wanted = list(keys) if names is None else names
    if names is not None:
        keys = {_table_of(key, collection): key for key in arrays if key.endswith(".weight")}
    for name in wanted:
        if name not in keys:
            raise CheckpointError(
                f"{path}: got table '{name}.weight', expected one of {', '.join(sorted(arrays))}"
                f"{did_you_mean(name, keys)}"
            )
    tables = {name: arrays[keys[name]].matrix() for name in wanted}
    used = {keys[name] for name in wanted}
    return PeerModel(tables, {key: array.whole() for key, array in arrays.items() if key not in used})


def read_dcp(path: Path, names: Names, collection: str, prefix: str) -> PeerModel:
    """Read tables and other tensors of a directory of ``torch.distributed.checkpoint``."""
    if not is_dcp(path):
        raise CheckpointError(f"{path} is not a directory of torch.distributed.checkpoint: it has no {METADATA} file")
    return read_embedding_bags(path, names, collection, prefix)


def _bags_by_key(path: Path, arrays: Mapping[str, PeerArray], keys: Mapping[str, str]) -> PeerModel:
    """Read tables by the keys of their weights. Other tensors keep their names."""
    for table, key in keys.items():
        if key not in arrays:
            raise CheckpointError(
                f"{path}: key of table '{table}': got '{key}', expected one of {', '.join(sorted(arrays))}"
                f"{did_you_mean(key, arrays)}"
            )
    if twice := [key for key, count in Counter(keys.values()).items() if count > 1]:
        raise CheckpointError(
            f"names: got '{twice[0]}' for two tables, expected unique keys. Features may share a table"
        )
    tables = {table: arrays[key].matrix() for table, key in keys.items()}
    used = set(keys.values())
    return PeerModel(tables, {key: array.whole() for key, array in arrays.items() if key not in used})


def _table_of(key: str, collection: str) -> str:
    return key.removeprefix(f"{collection}.").removesuffix(".weight")


def _may_be_table(key: str, array: PeerArray, arrays: dict[str, PeerArray]) -> bool:
    bias = f"{key.removesuffix('.weight')}.bias"
    return key.endswith(".weight") and len(array.shape) == 2 and bias not in arrays


_TORCHREC_TABLES = "sparse_arch.embedding_bag_collection.embedding_bags."


def read_torchrec(path: Path, names: Sequence[str] | None, prefix: str) -> PeerModel:
    """Read the tables and layers of a file. See `hotbed.checkpoint.importers.import_checkpoint`."""
    arrays = read_saved_arrays(path, prefix)
    prefix = "model." if any(key.startswith(f"model.{_TORCHREC_TABLES}") for key in arrays) else ""
    arrays = {key.removeprefix(prefix): array for key, array in arrays.items()}
    found = {
        key.removeprefix(_TORCHREC_TABLES).removesuffix(".weight"): a
        for key, a in arrays.items()
        if _is_torchrec_table(key)
    }
    if not found:
        raise CheckpointError(f"{path} has no {_TORCHREC_TABLES}TABLE.weight. Save the state_dict of a torchrec DLRM")
    if any(key.startswith("inter_arch.crossnet.") for key in arrays):
        raise CheckpointError(
            f"{path}: got a DLRM_DCN (inter_arch.crossnet), expected a DLRM, because hotbed's has a dot interaction"
        )
    order = _order_by_number(path, list(found)) if names is None else list(names)
    for name in order:
        if name not in found:
            raise CheckpointError(
                f"names: got '{name}', expected tables of {path}: {', '.join(found)}{did_you_mean(name, found)}"
            )
    if sorted(order) != sorted(found):
        left_out = next((n for n in found if n not in order), None)
        problem = f"lacks '{left_out}'" if left_out else "repeats a table"
        raise CheckpointError(f"names {problem}. Pass all {len(found)} tables once, in the order of their configs")
    tables = {name: found[name].matrix() for name in order}
    bottom = _torchrec_layers(arrays, "dense_arch.model._mlp.{}._linear", path)
    hidden = _torchrec_layers(arrays, "over_arch.model.0._mlp.{}._linear", path)
    last = _torchrec_layer(arrays, "over_arch.model.1", path)
    return PeerModel(tables, dlrm_layers(bottom, [*hidden, last], list(tables.values()), triangle="upper"))


def _is_torchrec_table(key: str) -> bool:
    return key.startswith(_TORCHREC_TABLES) and key.endswith(".weight")


def _order_by_number(path: Path, names: Sequence[str]) -> list[str]:
    """Sort names that differ in one number by this number."""
    parts = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    stems = {(part[1], part[3]) if part else None for part in parts}
    if len(names) > 1 and (len(stems) > 1 or None in stems):
        raise CheckpointError(
            f"{path} does not contain the order of the tables {', '.join(sorted(names))}. Pass names in the order of "
            "the EmbeddingBagConfigs"
        )
    return sorted(names, key=lambda name: int((re.findall(r"\d+", name) or ["0"])[-1]))


def _torchrec_layers(arrays: Mapping[str, PeerArray], pattern: str, path: Path) -> list[Layer]:
    count = 0
    while f"{pattern.format(count)}.weight" in arrays:
        count += 1
    return [_torchrec_layer(arrays, pattern.format(i), path) for i in range(max(count, 1))]


def _torchrec_layer(arrays: Mapping[str, PeerArray], name: str, path: Path) -> Layer:
    for key in (f"{name}.weight", f"{name}.bias"):
        if key not in arrays:
            raise CheckpointError(f"{path} has no '{key}'. Save the whole state_dict of a torchrec DLRM")
    return Layer(arrays[f"{name}.weight"].whole(), arrays[f"{name}.bias"].whole(), f"{path}: '{name}'")


def read_nvidia(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Read the tables and layers of NVIDIA's DLRM of PyTorch (DeepLearningExamples, PyTorch/Recommendation/DLRM).

    A saved model is a flat directory:

    ================================= ==================================================================
    ``bottom_model.embeddings.I.bin`` float32 ``[R, D]``, raw, little-endian; ``I`` counts features
    ``embeddings.I.meta.pt``          ``{"shape": (R, D)}``
    ``bottom_model.mlp.pt``           ``{"weights": [[out, in], …], "biases": [[out], …]}``
    ``top_model.mlp.pt``              the same keys, without the last layer
    ``top_model.out.pt``              the last layer: ``{"weight", "bias"}``
    ``metadata.pt``                   ``{"data": {"device_mapping": {"embedding": [[I, …] per GPU]}}, "config": {…}}``
    ================================= ==================================================================

    The interaction has features in the order of the device mapping, unless ``bottom_features_ordered`` was set (which
    is ignored with one GPU). Its result is padded to a multiple of 8. Earlier releases padded it by one column.
    """
    metadata = _mapping(path / "metadata.pt", load_pt(path / "metadata.pt"))
    config = _mapping(path / "metadata.pt", metadata.get("config", {}))
    if config.get("interaction_op", "dot") != "dot":
        raise CheckpointError(
            f"{path}: interaction_op: got '{config['interaction_op']}', expected 'dot', the only one of hotbed's DLRM"
        )
    tables = _nvidia_tables(path)
    top = [*_nvidia_layers(path / "top_model.mlp.pt"), _nvidia_layer(path / "top_model.out.pt")]
    bottom = _nvidia_layers(path / "bottom_model.mlp.pt")
    order = _nvidia_order(path, metadata, config, len(tables))
    dense = dlrm_layers(
        bottom,
        top,
        tables,
        positions=[order.index(feature) for feature in range(len(tables))],
        paddings=(padded_to_8(tables[0].shape[1], len(tables)), 1),
    )
    return PeerModel(name_tables(tables, names), dense)


def _nvidia_tables(path: Path) -> list[PeerArray]:
    count = len(list(path.glob("bottom_model.embeddings.*.bin")))
    if not count:
        raise CheckpointError(
            f"{path} has no bottom_model.embeddings.0.bin. Pass the directory that NVIDIA's DLRM saved to"
        )
    tables: list[PeerArray] = []
    for i in range(count):
        meta = path / f"embeddings.{i}.meta.pt"
        shape: object = _mapping(meta, load_pt(meta)).get("shape", ())
        if not isinstance(shape, list | tuple):
            raise CheckpointError(f"{meta}: shape: got {shape!r}, expected [rows, dim]")
        lengths = tuple(cast("Sequence[object]", shape))
        tables.append(raw_array(path / f"bottom_model.embeddings.{i}.bin", lengths).matrix())
    return tables


def _nvidia_order(path: Path, metadata: Mapping[str, Any], config: Mapping[str, Any], count: int) -> list[int]:
    """Return the features in the order of the interaction."""
    file = path / "metadata.pt"
    mapping = _mapping(file, metadata.get("data", {})).get("device_mapping")
    buckets: object = [] if mapping is None else _mapping(file, mapping).get("embedding", [])
    if not _are_buckets(buckets):
        raise CheckpointError(f"{file}: device_mapping: got {str(mapping)[:80]}, expected lists of features by GPU")
    if mapping is None or (len(buckets) > 1 and config.get("bottom_features_ordered", False)):
        return list(range(count))
    order = [feature for bucket in buckets for feature in bucket]
    if sorted(order) != list(range(count)):
        raise CheckpointError(
            f"{path}/metadata.pt: features: got {sorted(order)}, expected 0 … {count - 1}, one for each of {count} "
            "tables. Copy the whole checkpoint"
        )
    return order


def _are_buckets(value: object) -> TypeGuard[list[list[int]]]:
    """Return whether a value is a list of lists of integers."""
    buckets = cast("list[object]", value) if isinstance(value, list) else [None]
    return all(isinstance(b, list) and all(map(is_int, cast("list[object]", b))) for b in buckets)


def _nvidia_layers(path: Path) -> list[Layer]:
    mlp = _mapping(path, load_pt(path))
    weights, biases = (_tensors(path, mlp.get(key, [])) for key in ("weights", "biases"))
    if not weights or len(weights) != len(biases):
        raise CheckpointError(
            f"{path}: got {len(weights)} weights and {len(biases)} biases, expected equal numbers above 0"
        )
    pairs = list(zip(weights, biases, strict=True))
    return [Layer(w.detach(), b.detach(), f"{path}: layer {i}") for i, (w, b) in enumerate(pairs)]


def _nvidia_layer(path: Path) -> Layer:
    state = {str(key).removeprefix("module."): t for key, t in _mapping(path, load_pt(path)).items()}
    if not {"weight", "bias"} <= state.keys():
        raise CheckpointError(f"{path}: got {', '.join(state) or 'nothing'}, expected weight and bias")
    weight, bias = _tensors(path, [state["weight"], state["bias"]])
    return Layer(weight.detach(), bias.detach(), f"{path}")


def _tensors(path: Path, value: object) -> list[Tensor]:
    if not isinstance(value, list | tuple) or not all(isinstance(t, Tensor) for t in cast("Sequence[object]", value)):
        raise CheckpointError(f"{path}: got {str(value)[:80]}, expected tensors. Copy it again")
    return list(cast("Sequence[Tensor]", value))


def _mapping(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: got {type(value).__name__}, expected a dict. Pass a directory of NVIDIA's DLRM")
    return cast("Mapping[str, Any]", value)
