# pyright: reportMissingImports=false, reportUnknownParameterType=false
"""Export the towers of a two-tower model and the vectors of all items: ``hotbed export --towers``.

The result needs no checkpoint: ``user.pt2`` and ``item.pt2`` are programs of torch that compute vectors from ids,
``items.parquet`` has all items as they are stored, with their vectors, and ``towers.json`` describes how rows of users
are encoded, with the tables in ``lookup-N.parquet`` where columns are looked up. `UserTower` reads them;
``examples/faiss_index.py`` builds an index of the items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.checkpoint import find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.tensor_files import new_directory
from hotbed.config import MemoryRecipe, Recipe
from hotbed.data import Encoder, ParquetSource, Schema, Source
from hotbed.data.items import ItemSet, item_ids
from hotbed.data.row_location import RowLocation
from hotbed.errors import CheckpointError, DataError
from hotbed.nn import TwoTower
from hotbed.nn.dense_program import PlainEmbeddings, PlainModel, trace_whole
from hotbed.nn.normalization import normalization_of, take_raw
from hotbed.parsing import parse_json, read_limited
from hotbed.torch_hooks import load_program
from hotbed.train.metrics import evaluating
from hotbed.train.retrieval import all_items, item_vectors, model_source, source_of_items
from hotbed.train.runs.build import build_model, new_source
from hotbed.train.runs.stored_model import encoder_of, recipe_of, take_features

USER, ITEM = "user.pt2", "item.pt2"
VECTORS, ABOUT = "items.parquet", "towers.json"
VECTOR = "vector"
"""Column of the vectors."""
_FEWEST = 1 << 20
"""Rows of items that are collected before those of one item are merged."""


@dataclass(frozen=True)
class Exported:
    """Number of items that `export_towers` wrote, columns of their vectors, and the step of the model."""

    items: int
    dim: int
    step: int


class Tower(nn.Module):
    """One tower of a two-tower model as a model of its own, in plain torch; it returns vectors of norm 1."""

    def __init__(self, model: TwoTower, name: str) -> None:
        super().__init__()
        whole = model.embeddings
        self.names, self.takes_dense = model.towers[name], name == "user" and model.dense_features > 0
        self.normalization = normalization_of(model) if self.takes_dense else None
        self.embeddings = PlainEmbeddings(whole, [f for f in whole.features if f.name in self.names])
        self.mlp = getattr(model, name)

    def forward(self, batch: Batch) -> Tensor:
        """Compute vectors ``[B, D]``."""
        found = self.embeddings(batch.sparse)
        inputs = [found[name] for name in self.names]
        if self.takes_dense and batch.dense is not None:
            inputs.append(batch.dense if self.normalization is None else self.normalization.of_batch(batch.dense))
        return F.normalize(self.mlp(torch.cat(inputs, dim=1)), dim=1)


def export_towers(
    checkpoint: str | Path, target: str | Path, data: str | None = None, *, trust_recipe: bool = False
) -> Exported:
    """Write the towers of a checkpoint's model, and the vectors of all items, to a local directory.

    ``checkpoint`` is one with a recipe, or a run (its best or newest checkpoint). ``data`` has the items; by default
    they are those of ``retrieval.items`` or of the recipe's data. Raise `CheckpointError` if the model is no
    `hotbed.nn.TwoTower`, or ``target`` exists.
    """
    place = find_checkpoint(checkpoint, best=True)
    manifest = read_manifest(place)
    recipe = replace(recipe_of(manifest, str(place), trusted=trust_recipe), memory=MemoryRecipe())
    source = new_source(replace(recipe.data, path=data or recipe.data.path))
    take_features(source, manifest)
    model = build_model(recipe, source, torch.device("cpu"))
    if not isinstance(model, TwoTower):
        raise CheckpointError(
            f"{place} has a {type(model).__name__}, which has no towers to export; they are hotbed.nn.TwoTower's"
        )
    load_checkpoint(place, {"model": model})
    item = model.towers["item"]
    items = all_items(recipe, source, item)
    like = source.streamed().read(source.splits[0], 0)
    with evaluating(model):
        vectors = item_vectors(model, items, like).numpy()
    schema = model_source(recipe, source).schema.inputs
    take_raw(model, schema)
    programs = {USER: _program(model, "user", schema), ITEM: _program(model, "item", schema)}
    with new_directory(target) as (made, _):
        folder = Path(made.path)
        for name, program in programs.items():
            torch.export.save(program, folder / name)
        _write_items(folder / VECTORS, _stored(recipe, source, item, items), vectors)
        encoder = _encoder(recipe, source, manifest, model)
        about = {
            "encoder": encoder.to_dict(),
            "lookups": _write_lookups(folder, encoder),
            "dense_dtype": "float32" if normalization_of(model) is None else "float64",
            "item": item,
            "step": manifest.step,
        }
        made.write(ABOUT, json.dumps(about, indent=1))
    return Exported(len(items), vectors.shape[1], manifest.step)


def _program(model: TwoTower, name: str, schema: Schema) -> torch.export.ExportedProgram:
    own = schema.only(model.towers[name])
    if name == "item":
        own = replace(own, dense=(), scaling=(), numericals=())
    return trace_whole(PlainModel(Tower(model, name)), own)


def _encoder(recipe: Recipe, source: Source, manifest: Manifest, model: TwoTower) -> Encoder:
    """Give what makes ids of rows of users; of prepared data, rows have these ids."""
    whole = encoder_of(recipe, model_source(recipe, source), manifest)
    whole.preparation = None
    return whole.of(replace(whole.schema.only(model.towers["user"]), scaling=()))


def _stored(recipe: Recipe, source: Source, item: Sequence[str], items: ItemSet) -> Any:
    """Read the items as they are stored, in the order of the set: an Arrow table of the item's columns."""
    import pyarrow as pa

    asked = None if recipe.retrieval is None else recipe.retrieval.items
    place = source if asked is None else source_of_items(recipe, source, asked, item)
    if not isinstance(place, ParquetSource):
        return pa.table({item[0]: items.ids.numpy()})
    place = place.streamed()
    derived = {d.name for d in place.schema.derived}
    names = [name for name in item if name not in derived]
    only, found, rows = place.only(item), list[Any](), np.full(len(items), -1, np.int64)
    count = 0

    def merge() -> None:
        """Keep the last row of each item that was met."""
        there = rows >= 0
        found[:] = [pa.concat_tables(found, promote_options="default").take(pa.array(rows[there])).combine_chunks()]
        rows[there] = np.arange(there.sum())

    for split in place.splits:
        for i in range(len(place.chunks(split))):
            at = items.positions(item_ids(only.read(split, i).sparse, item[0])).numpy()
            here, last = np.unique(at[::-1], return_index=True)
            kept = len(at) - 1 - last
            found.append(place.read_columns(split, i, names).take(pa.array(kept)))
            rows[here] = count + np.arange(len(here))
            count += len(here)
            if count > _FEWEST + 2 * len(found[0]):
                merge()
                count = len(found[0])
    merge()
    return found[0]


def _write_lookups(folder: Path, encoder: Encoder) -> dict[str, str]:
    """Write the tables that the encoder looks values up in; their files by feature."""
    from pyarrow import parquet

    used = {d.name for d in encoder.schema.derived}
    files: dict[str, str] = {}
    for feature, table in encoder.tables.items():
        if feature in used:
            files[feature] = f"lookup-{len(files)}.parquet"
            parquet.write_table(table, folder / files[feature])
    return files


def _write_items(path: Path, stored: Any, vectors: NDArray[np.float32]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    if VECTOR in stored.column_names:
        raise DataError(f"the item has a column named '{VECTOR}', which is what its vectors are called; rename it")
    parquet.write_table(stored.append_column(VECTOR, column), path)


class UserTower:
    """Compute vectors of users with exported towers.

    Parameters
    ----------
    folder
        Directory that `export_towers` wrote.

    Attributes
    ----------
    item
        Column of ``items.parquet`` that identifies an item.

    Raises
    ------
    DataError
        If the directory has no towers.
    """

    def __init__(self, folder: str | Path) -> None:
        from pyarrow import parquet

        folder = Path(folder)
        if not (folder / ABOUT).is_file():
            raise DataError(f"{folder} has no {ABOUT}; give what hotbed export RUN DIR --towers wrote")
        about = cast("Mapping[str, Any]", parse_json(read_limited(folder / ABOUT)))
        files = cast("Mapping[str, str]", about.get("lookups", {}))
        tables = {feature: parquet.read_table(folder / file) for feature, file in files.items()}
        self._encoder = Encoder.from_dict(about["encoder"], tables)
        self._dense_dtype: torch.dtype = getattr(torch, about["dense_dtype"])
        self._user = load_program(folder / USER).module()
        self.item: str = about["item"][0]

    @property
    def columns(self) -> list[str]:
        """Columns that rows of users must have."""
        return self._encoder.names

    def vectors(self, users: Any) -> NDArray[np.float32]:
        """Compute vectors ``[n, D]`` of an Arrow table of users, whose columns are as in the training data."""
        batch = self._encoder.batch(users, RowLocation("users"))
        ids: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        for column in self._encoder.schema.sparse:
            bags = batch.sparse[column.name]
            values, of_ids = bags.values.long(), bags.weights
            if bags.fixed is None:
                ids[column.name] = values, bags.lengths()
            else:
                ids[column.name] = values.view(len(batch), bags.fixed)
                of_ids = None if of_ids is None else of_ids.view(len(batch), bags.fixed)
            if column.weights is not None and of_ids is not None:
                weights[column.name] = of_ids
        with torch.no_grad():
            dense = None if batch.dense is None else batch.dense.to(self._dense_dtype)
            return self._user(dense, ids, *([weights] if weights else [])).numpy()
