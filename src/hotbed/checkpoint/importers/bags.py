"""Weights of plain ``nn.EmbeddingBag`` and ``nn.Embedding`` modules, and whatever else their model has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotbed.checkpoint.importers.arrays import PeerArray, arrays_of
from hotbed.checkpoint.importers.peer import PeerModel
from hotbed.errors import CheckpointError, did_you_mean


def read_embedding_bags(path: Path, names: Sequence[str] | None, collection: str) -> PeerModel:
    """Tables and other tensors; see `hotbed.checkpoint.importers.import_checkpoint`.

    Keys of tables may begin with the name of the collection; the others keep theirs.
    """
    arrays = arrays_of(path)
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


def _table_of(key: str, collection: str) -> str:
    return key.removeprefix(f"{collection}.").removesuffix(".weight")


def _may_be_table(key: str, array: PeerArray, arrays: dict[str, PeerArray]) -> bool:
    bias = f"{key.removesuffix('.weight')}.bias"
    return key.endswith(".weight") and len(array.shape) == 2 and bias not in arrays
