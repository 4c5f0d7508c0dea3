"""Read DLRMs that PyTorch saved: of facebookresearch/dlrm, TorchRec, NVIDIA and plain ``nn.EmbeddingBag`` modules.

All of them put ``n`` vectors of ``D`` columns, that of the dense inputs first, into a dot interaction: the first
vector, then the products of all pairs. They differ in the order of the vectors, of the pairs, and in padding; so
`dlrm_layers` puts columns of the first top layer into the order of `hotbed.nn.DLRM`.

- facebookresearch/dlrm: what ``dlrm_s_pytorch.py --save-model`` writes, a ``.pt`` file with a ``state_dict``. Tables
  are ``emb_l.I.weight``, layers ``bot_l.2K`` and ``top_l.2K``; the interaction is hotbed's, without padding. The model
  gives probabilities where hotbed's gives logits.
- TorchRec: the ``state_dict``, unsharded, of ``torchrec.models.dlrm.DLRM``, alone or in ``DLRMTrain``. Vectors come in
  the order of the ``EmbeddingBagConfig``s, pairs as the upper triangle; nothing is padded. Safetensors files do not
  keep the order of tables, so it has to be given unless their names are numbered.
- Directories of ``torch.distributed.checkpoint`` hold the same names, however they were sharded (`hotbed.checkpoint.
  importers.dcp`).
- Others: weights of ``nn.EmbeddingBag`` and ``nn.Embedding`` modules, and whatever else their model has.
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
    named,
    raw_array,
)
from hotbed.checks import is_int
from hotbed.errors import CheckpointError, did_you_mean

Triangle = Literal["lower", "upper"]
"""Which pairs a row of the matrix of products gives: those with vectors before, or those with vectors after."""


class Layer(NamedTuple):
    """A fully connected layer: ``weight [out, in]``, ``bias [out]``, and where it comes from."""

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
    """Return the state of the MLPs of `hotbed.nn.DLRM`, from all layers of both, with ReLU between them.

    ``tables`` has one for each feature, in the order that hotbed's features are to have. ``triangle`` is the peer's
    order of pairs, ``positions`` for each feature the place of its vector among the peer's features (default: its own),
    and ``paddings`` by how many columns the peer may have padded the interaction, at its end.
    """
    for name, layers in (("bottom", bottom), ("top", top)):
        _check_chain(name, layers)
    dim, vectors = len(bottom[-1].bias), 1 + len(tables)
    for table in tables:
        if table.matrix().shape[1] != dim:
            raise CheckpointError(
                f"{table.where} has {table.shape[1]} columns, but the bottom MLP ends with {dim}; a DLRM needs one dim"
            )
    first = top[0].weight
    used = dim + vectors * (vectors - 1) // 2
    widths = sorted({used + padding for padding in paddings})
    if first.shape[1] not in widths:
        other = {
            used + vectors: " (this is what products of vectors with themselves, too, would give)",
            vectors * dim: " (this is what vectors side by side would give)",
        }
        raise CheckpointError(
            f"{top[0].where} takes {first.shape[1]} inputs{other.get(first.shape[1], '')}, but {dim} columns and the "
            f"products of {vectors} vectors, of one feature per table, are {' or '.join(map(str, widths))}; hotbed's "
            "DLRM computes no other interaction"
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
    """Columns that are missing to a multiple of 8."""
    return -(dim + features * (features + 1) // 2) % 8


def _pairs(vectors: int, triangle: Triangle, positions: Sequence[int] | None) -> Tensor:
    """Place among the peer's pairs of each of hotbed's, which are the lower triangle by rows."""
    place = torch.tensor([0, *(1 + p for p in (range(vectors - 1) if positions is None else positions))])
    i, j = torch.tril_indices(vectors, vectors, -1)
    later, earlier = torch.maximum(place[i], place[j]), torch.minimum(place[i], place[j])
    if triangle == "lower":
        return later * (later - 1) // 2 + earlier
    return earlier * vectors - earlier * (earlier + 1) // 2 + later - earlier - 1


def _check_chain(name: str, layers: Sequence[Layer]) -> None:
    if not layers:
        raise CheckpointError(f"the {name} MLP has no layers; a DLRM needs at least one")
    width: int | None = None
    for layer in layers:
        if layer.weight.dim() != 2 or layer.bias.shape != layer.weight.shape[:1]:
            raise CheckpointError(
                f"{layer.where}: weight {list(layer.weight.shape)} and bias {list(layer.bias.shape)} must be [out, in] "
                "and [out]"
            )
        if width is not None and layer.weight.shape[1] != width:
            raise CheckpointError(
                f"{layer.where} takes {layer.weight.shape[1]} inputs, but the layer before it gives {width}"
            )
        width = layer.weight.shape[0]


def read_facebook(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Tables and layers of a file; see `hotbed.checkpoint.importers.import_checkpoint`."""
    saved = load_pt(path, _numpy_scalars())
    state = saved.get("state_dict") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has no 'state_dict'; name what dlrm_s_pytorch.py --save-model wrote")
    for key in state:
        if not isinstance(key, str) or not re.fullmatch(r"emb_l\.\d+\.weight|(bot|top)_l\.\d+\.(weight|bias)", key):
            raise CheckpointError(
                f"{path} has '{key}': parts of a distributed model, compressed tables and weighted pooling have no "
                "counterpart; save a model of one process with plain tables"
            )
    count = sum(key.startswith("emb_l.") for key in state)
    tables = [
        PeerArray.of(_tensor(state, f"emb_l.{i}.weight", path), f"{path}: 'emb_l.{i}.weight'") for i in range(count)
    ]
    layers = dlrm_layers(_layers(state, "bot_l", path), _layers(state, "top_l", path), tables)
    return PeerModel(named(tables, names), layers)


def _numpy_scalars() -> list[Any]:
    """What numpy's scalars, such as the losses that such a file holds, are pickled as."""
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
        raise CheckpointError(f"{path} has no '{key}'; save the whole state_dict")
    value: object = state[key]
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path}: '{key}' is {type(value).__name__}, must be a tensor; save the state_dict")
    return value.detach()


def read_saved_arrays(path: Path, prefix: str = "") -> dict[str, PeerArray]:
    """Return the arrays of a file, or of all files of a directory, by name; of ``torch.distributed.checkpoint``, too.

    Only names that begin with the prefix count, and what follows it is the name. An array that has no name, in
    ``NAME.npy`` or ``NAME.pt``, is ``NAME.weight``.
    """
    found = _arrays_of_path(path)
    own = {name.removeprefix(prefix): array for name, array in found.items() if name.startswith(prefix)}
    if not own:
        known = dict.fromkeys(f"{name.split('.')[0]}." for name in found)
        raise CheckpointError(
            f"{path} has no name that begins with '{prefix}'; names begin with {', '.join(known)}"
            f"{did_you_mean(prefix, known)}"
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
                raise CheckpointError(f"'{name}' is in {found[name].where} and in {file}; keep one of them")
            found[name] = array
    if not found:
        raise CheckpointError(f"{path} holds no {', '.join(READERS)} file")
    return found


def read_embedding_bags(path: Path, names: Names, collection: str, prefix: str) -> PeerModel:
    """Tables and other tensors; see `hotbed.checkpoint.importers.import_checkpoint`.

    Keys of tables may begin with the name of the collection; the others keep theirs.
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
                f"{path} has no '{name}.weight'; it has {', '.join(sorted(arrays))}{did_you_mean(name, keys)}"
            )
    tables = {name: arrays[keys[name]].matrix() for name in wanted}
    used = {keys[name] for name in wanted}
    return PeerModel(tables, {key: array.whole() for key, array in arrays.items() if key not in used})


def read_dcp(path: Path, names: Names, collection: str, prefix: str) -> PeerModel:
    """Tables and other tensors of a directory of ``torch.distributed.checkpoint``."""
    if not is_dcp(path):
        raise CheckpointError(f"{path} is no directory of torch.distributed.checkpoint: it has no {METADATA} file")
    return read_embedding_bags(path, names, collection, prefix)


def _bags_by_key(path: Path, arrays: Mapping[str, PeerArray], keys: Mapping[str, str]) -> PeerModel:
    """Tables whose weights are given by key; the rest of the tensors keep their names."""
    for table, key in keys.items():
        if key not in arrays:
            raise CheckpointError(
                f"{path} has no '{key}' for table '{table}'; it has {', '.join(sorted(arrays))}"
                f"{did_you_mean(key, arrays)}"
            )
    if twice := [key for key, count in Counter(keys.values()).items() if count > 1]:
        raise CheckpointError(f"names gives '{twice[0]}' to two tables; features may share a table, name it once")
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
    """Tables and layers of a file; see `hotbed.checkpoint.importers.import_checkpoint`."""
    arrays = read_saved_arrays(path, prefix)
    prefix = "model." if any(key.startswith(f"model.{_TORCHREC_TABLES}") for key in arrays) else ""
    arrays = {key.removeprefix(prefix): array for key, array in arrays.items()}
    found = {
        key.removeprefix(_TORCHREC_TABLES).removesuffix(".weight"): a
        for key, a in arrays.items()
        if _is_torchrec_table(key)
    }
    if not found:
        raise CheckpointError(f"{path} has no {_TORCHREC_TABLES}TABLE.weight; save the state_dict of a torchrec DLRM")
    if any(key.startswith("inter_arch.crossnet.") for key in arrays):
        raise CheckpointError(f"{path} is a DLRM_DCN (inter_arch.crossnet); hotbed's DLRM has the dot interaction only")
    order = _numbered(path, list(found)) if names is None else list(names)
    for name in order:
        if name not in found:
            raise CheckpointError(
                f"names has '{name}', {path} has {', '.join(found)}{did_you_mean(name, found)}; name its own tables"
            )
    if sorted(order) != sorted(found):
        left_out = next((n for n in found if n not in order), None)
        problem = f"leaves out '{left_out}'" if left_out else "names a table twice"
        raise CheckpointError(f"names {problem}; give all {len(found)} tables once, in the order of their configs")
    tables = {name: found[name].matrix() for name in order}
    bottom = _torchrec_layers(arrays, "dense_arch.model._mlp.{}._linear", path)
    hidden = _torchrec_layers(arrays, "over_arch.model.0._mlp.{}._linear", path)
    last = _torchrec_layer(arrays, "over_arch.model.1", path)
    return PeerModel(tables, dlrm_layers(bottom, [*hidden, last], list(tables.values()), triangle="upper"))


def _is_torchrec_table(key: str) -> bool:
    return key.startswith(_TORCHREC_TABLES) and key.endswith(".weight")


def _numbered(path: Path, names: Sequence[str]) -> list[str]:
    """Names that differ in one number, by this number."""
    parts = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    stems = {(part[1], part[3]) if part else None for part in parts}
    if len(names) > 1 and (len(stems) > 1 or None in stems):
        raise CheckpointError(
            f"{path} does not say in which order the model has its tables {', '.join(sorted(names))}; give names in "
            "the order of the EmbeddingBagConfigs"
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
            raise CheckpointError(f"{path} has no '{key}'; save the whole state_dict of a torchrec DLRM")
    return Layer(arrays[f"{name}.weight"].whole(), arrays[f"{name}.bias"].whole(), f"{path}: '{name}'")


def read_nvidia(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Read the tables and layers of NVIDIA's DLRM of PyTorch (DeepLearningExamples, PyTorch/Recommendation/DLRM).

    A saved model is a flat directory:

    ================================= ==================================================================
    ``bottom_model.embeddings.I.bin`` float32 ``[R, D]``, raw, little-endian; ``I`` counts features
    ``embeddings.I.meta.pt``          ``{"shape": (R, D)}``
    ``bottom_model.mlp.pt``           ``{"weights": [[out, in], …], "biases": [[out], …]}``
    ``top_model.mlp.pt``              the same, without the last layer
    ``top_model.out.pt``              the last layer: ``{"weight", "bias"}``
    ``metadata.pt``                   ``{"data": {"device_mapping": {"embedding": [[I, …] per GPU]}}, "config": {…}}``
    ================================= ==================================================================

    The interaction sees features in the order in which GPUs tile them, unless ``bottom_features_ordered`` was set (with
    one GPU it is ignored). Its result is padded to a multiple of 8; earlier releases padded it by one column.
    """
    metadata = _mapping(path / "metadata.pt", load_pt(path / "metadata.pt"))
    config = _mapping(path / "metadata.pt", metadata.get("config", {}))
    if config.get("interaction_op", "dot") != "dot":
        raise CheckpointError(
            f"{path}: interaction_op is '{config['interaction_op']}', hotbed's DLRM has the dot interaction only"
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
    return PeerModel(named(tables, names), dense)


def _nvidia_tables(path: Path) -> list[PeerArray]:
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


def _nvidia_order(path: Path, metadata: Mapping[str, Any], config: Mapping[str, Any], count: int) -> list[int]:
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


def _nvidia_layers(path: Path) -> list[Layer]:
    mlp = _mapping(path, load_pt(path))
    weights, biases = (_tensors(path, mlp.get(key, [])) for key in ("weights", "biases"))
    if not weights or len(weights) != len(biases):
        raise CheckpointError(f"{path} has {len(weights)} weights and {len(biases)} biases, must be as many, not 0")
    pairs = list(zip(weights, biases, strict=True))
    return [Layer(w.detach(), b.detach(), f"{path}: layer {i}") for i, (w, b) in enumerate(pairs)]


def _nvidia_layer(path: Path) -> Layer:
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
