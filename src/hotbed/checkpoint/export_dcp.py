"""Export a checkpoint as a directory that ``torch.distributed.checkpoint`` reads, with bounded memory.

Tables are read in pieces, and torch's own writer saves each piece as a chunk in a separate file. So the tables can be
loaded with any sharding.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from hotbed.checkpoint.convert import MEMORY_BYTES, Progress, exported_table, exported_weight
from hotbed.checkpoint.differential import open_with_bases
from hotbed.checkpoint.load import read_states
from hotbed.checkpoint.manifest import Manifest, read_manifest
from hotbed.checkpoint.saved_tables import check_tables, is_dynamic
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensor_files import Array, TensorFiles
from hotbed.errors import CheckpointError, did_you_mean


class Exported(NamedTuple):
    """An exported table: the key of its rows, and their number, dim and dtype."""

    key: str
    rows: int
    dim: int
    dtype: str


def export_dcp(
    source: str | Path | Directory,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    prefix: str = "",
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Write a model so that ``torch.distributed.checkpoint.load`` reads it, sharded or not.

    A table has the key ``TABLE.weight``. Its dtype is bfloat16 or float16 if all rows are stored in it, otherwise
    float32. If `hotbed.swap_embeddings` has changed the model, the key of a table is the key of its former module.
    Other tensors of the part ``model`` keep their keys. Moments and other training states are not written.

    Parameters
    ----------
    source
        The checkpoint.
    target
        A local directory that does not exist. It is written atomically.
    names
        Other keys of tables, by table.
    prefix
        Prefix of all keys, e.g. ``model.`` for loading into ``{"model": model.state_dict()}``.
    progress
        Called repeatedly with the number of written and of all elements of tables.

    Returns
    -------
    dict
        ``step``, and ``tables``: ``key``, ``rows``, ``dim`` and ``dtype`` by table.

    Raises
    ------
    CheckpointError
        If ``target`` exists, ``names`` has an unknown table or repeats a key, or a table is dynamic.
    """
    place, path = directory(source), Path(target)
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists already. Use another directory")
    manifest = read_manifest(place)
    tables = _tables(manifest, names or {}, prefix)
    total, done = sum(table.rows * table.dim for table in tables.values()), 0

    def count(cells: int) -> None:
        nonlocal done
        done += cells
        progress(done, total)

    unfinished = path.parent / f".{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    try:
        with open_with_bases(place, manifest) as files, warnings.catch_warnings():
            check_tables(manifest.tables.values(), files)
            arrays = _dense(manifest, files, prefix)
            for name, table in tables.items():
                if table.key in arrays:
                    raise CheckpointError(
                        f"two tensors would have the key '{table.key}'. Pass another key for table '{name}'"
                    )
                saved = manifest.tables[name]
                arrays[table.key] = exported_weight(saved, exported_table(saved.spec), files, count)
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process writes
            writer = FileSystemWriter(unfinished, single_file_per_rank=False)
            save({}, storage_writer=writer, planner=_PiecePlanner(arrays, prefix), no_dist=True)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"step": manifest.step, "tables": {name: table._asdict() for name, table in tables.items()}}


def _tables(manifest: Manifest, names: Mapping[str, str], prefix: str) -> dict[str, Exported]:
    for name in names:
        if name not in manifest.tables:
            raise CheckpointError(
                f"names: got table '{name}', expected tables of the checkpoint: "
                f"{', '.join(manifest.tables) or 'none'}{did_you_mean(name, manifest.tables)}"
            )
    found: dict[str, Exported] = {}
    for name, saved in manifest.tables.items():
        spec = exported_table(saved.spec)
        if is_dynamic(name, manifest):
            raise CheckpointError(
                f"table '{name}' is dynamic, but a state_dict cannot hold the ids of its rows. Convert the checkpoint "
                "--to safetensors, which writes the ids into dense.safetensors"
            )
        is_swapped = name == f"{spec.name}.rows.{spec.name}"
        key = prefix + names.get(name, f"{spec.name if is_swapped else name}.weight")
        found[name] = Exported(key, spec.rows, spec.dim, spec.dtype)
    twice = [key for key, count in Counter(table.key for table in found.values()).items() if count > 1]
    if twice:
        raise CheckpointError(f"two tables would have the key '{twice[0]}'. Pass names, with one key per table")
    return found


def _dense(manifest: Manifest, files: TensorFiles, prefix: str) -> dict[str, Array]:
    """Return the tensors of the model without tables."""
    if "model" not in manifest.parts:
        return {}
    state = read_states(manifest, ["model"], files)["model"]
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"part 'model': got {type(state).__name__}, expected a mapping. Save the model as the part 'model'"
        )
    return {f"{prefix}{key}": Array.of(tensor) for key, tensor in state.items() if isinstance(tensor, Tensor)}


class _PiecePlanner(DefaultSavePlanner):
    """Plan writes of arrays in pieces, and read each piece only when torch's writer requests it."""

    def __init__(self, arrays: Mapping[str, Array], prefix: str) -> None:
        super().__init__(flatten_state_dict=False)
        self._arrays, self._prefix = arrays, prefix

    @override
    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for key, array in self._arrays.items() for item in _items(key, array)])
        return self.plan

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        start, cut = self._prefix.removesuffix("."), len(self._prefix)
        nested = self._prefix.endswith(".")  # tools that read everything create a nested dict then
        metadata.planner_data = {key: (start, key[cut:]) if nested else (key,) for key in self._arrays}
        return plans, metadata

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        array, data = self._arrays[write_item.index.fqn], write_item.tensor_data
        assert data is not None
        if not array.shape:
            return array.rows(0, 1)[0]
        first, count = data.chunk.offsets[0], data.chunk.sizes[0]
        return array.rows(first, first + count).contiguous()


def _items(key: str, array: Array) -> list[WriteItem]:
    """Split an array into pieces of at most `MEMORY_BYTES`, by rows."""
    size = torch.Size(array.shape)
    rows = size[0] if size else 1
    step = max(MEMORY_BYTES // max(array.nbytes // max(rows, 1), 1), 1)
    found: list[WriteItem] = []
    for first in range(0, max(rows, 1), step):
        offsets = torch.Size((first, *(0 for _ in size[1:])) if size else ())
        sizes = torch.Size((min(step, rows - first), *size[1:]) if size else ())
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=array.dtype), size)
        found.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
    return found
