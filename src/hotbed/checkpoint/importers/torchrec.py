"""TorchRec's ``torchrec.models.dlrm.DLRM``, alone or in ``DLRMTrain``: its ``state_dict``, unsharded.

Vectors come in the order of the ``EmbeddingBagConfig``s, pairs as the upper triangle; nothing is padded. Safetensors
files do not keep the order of tables, so it has to be given unless their names are numbered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotbed.checkpoint.importers.dlrm import Layer, dlrm_layers
from hotbed.checkpoint.importers.peer import PeerArray, PeerModel, arrays_of
from hotbed.errors import CheckpointError, did_you_mean

_TABLES = "sparse_arch.embedding_bag_collection.embedding_bags."


def read_torchrec(path: Path, names: Sequence[str] | None) -> PeerModel:
    """Tables and layers of a file; see `hotbed.checkpoint.importers.import_checkpoint`."""
    arrays = arrays_of(path)
    prefix = "model." if any(key.startswith(f"model.{_TABLES}") for key in arrays) else ""
    arrays = {key.removeprefix(prefix): array for key, array in arrays.items()}
    found = {key.removeprefix(_TABLES).removesuffix(".weight"): a for key, a in arrays.items() if _is_table(key)}
    if not found:
        raise CheckpointError(f"{path} has no {_TABLES}TABLE.weight; save the state_dict of a torchrec DLRM")
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
    bottom = _layers(arrays, "dense_arch.model._mlp.{}._linear", path)
    hidden = _layers(arrays, "over_arch.model.0._mlp.{}._linear", path)
    last = _layer(arrays, "over_arch.model.1", path)
    return PeerModel(tables, dlrm_layers(bottom, [*hidden, last], list(tables.values()), triangle="upper"))


def _is_table(key: str) -> bool:
    return key.startswith(_TABLES) and key.endswith(".weight")


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


def _layers(arrays: Mapping[str, PeerArray], pattern: str, path: Path) -> list[Layer]:
    count = 0
    while f"{pattern.format(count)}.weight" in arrays:
        count += 1
    return [_layer(arrays, pattern.format(i), path) for i in range(max(count, 1))]


def _layer(arrays: Mapping[str, PeerArray], name: str, path: Path) -> Layer:
    for key in (f"{name}.weight", f"{name}.bias"):
        if key not in arrays:
            raise CheckpointError(f"{path} has no '{key}'; save the whole state_dict of a torchrec DLRM")
    return Layer(arrays[f"{name}.weight"].whole(), arrays[f"{name}.bias"].whole(), f"{path}: '{name}'")
