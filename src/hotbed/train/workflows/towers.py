"""Export the towers of a two-tower model and the vectors of all items: ``hotbed export --towers``.

The exported directory can be used without the checkpoint. ``user.pt2`` and ``item.pt2`` are torch programs that compute
vectors from ids. ``items.parquet`` has all items with their vectors. ``towers.json`` describes how columns of users are
encoded; its lookup tables are in ``lookup-N.parquet``. `UserTower` reads the directory. ``examples/faiss_index.py``
builds an index of the items.
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
from hotbed.checkpoint.tensor_files import write_directory
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
from hotbed.train.runs.stored_model import encoder_of, load_features, stored_recipe

USER, ITEM = "user.pt2", "item.pt2"
VECTORS, ABOUT = "items.parquet", "towers.json"
VECTOR = "vector"
"""Column of ``items.parquet`` with the vectors."""
_FEWEST = 1 << 20  # at least this many rows are collected before duplicates of items are dropped


@dataclass(frozen=True)
class ExportedTowers:
    """Result of `export_towers`."""

    items: int  # number of items
    dim: int  # number of columns of a vector
    step: int  # step of the checkpoint


class PlainTower(nn.Module):
    """Tower ``name`` (``user`` or ``item``) of a two-tower model as plain torch; it returns vectors of norm 1."""

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
            inputs.append(
                batch.dense if self.normalization is None else self.normalization.normalize_batch(batch.dense)
            )
        return F.normalize(self.mlp(torch.cat(inputs, dim=1)), dim=1)


def export_towers(
    checkpoint: str | Path, target: str | Path, data: str | None = None, *, trust_recipe: bool = False
) -> ExportedTowers:
    """Write the towers of a checkpoint's model and the vectors of all items to a local directory.

    ``checkpoint`` is a checkpoint with a recipe, or a run (then its best or newest checkpoint is used). ``data`` is a
    dataset that contains the items (default: ``retrieval.items``, or the recipe's data). Raise `CheckpointError` if the
    model is not a `hotbed.nn.TwoTower`, or ``target`` exists.
    """
    import pyarrow as pa
    from pyarrow import parquet

    path = find_checkpoint(checkpoint, best=True)
    manifest = read_manifest(path)
    recipe = replace(stored_recipe(manifest, str(path), trusted=trust_recipe), memory=MemoryRecipe())
    source = new_source(replace(recipe.data, path=data or recipe.data.path))
    load_features(source, manifest)
    model = build_model(recipe, source, torch.device("cpu"))
    if not isinstance(model, TwoTower):
        raise CheckpointError(f"{path} has a {type(model).__name__}, expected a hotbed.nn.TwoTower. Remove --towers")
    load_checkpoint(path, {"model": model})
    item = model.towers["item"]
    items = all_items(recipe, source, item)
    with evaluating(model):
        vectors = item_vectors(model, items, source.streamed().read(source.splits[0], 0)).numpy()
    inputs = model_source(recipe, source)
    take_raw(model, inputs.schema.inputs)
    programs = {USER: _trace(model, "user", inputs.schema.inputs), ITEM: _trace(model, "item", inputs.schema.inputs)}
    encoder = encoder_of(recipe, inputs, manifest)
    encoder.preparation = None  # because the exported tower reads rows of prepared data, no raw values
    encoder = encoder.of(replace(encoder.schema.only(model.towers["user"]), scaling=()))
    with write_directory(target) as (made, _):
        folder = Path(made.path)
        for name, program in programs.items():
            torch.export.save(program, folder / name)
        stored = _read_items(recipe, source, item, items)
        if VECTOR in stored.column_names:
            raise DataError(
                f"items have a column '{VECTOR}', but this name is reserved for vectors. Rename the column in the data"
            )
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        parquet.write_table(stored.append_column(VECTOR, column), folder / VECTORS)
        derived, lookups = {d.name for d in encoder.schema.derived}, dict[str, str]()
        for feature, table in encoder.tables.items():
            if feature in derived:
                lookups[feature] = f"lookup-{len(lookups)}.parquet"
                parquet.write_table(table, folder / lookups[feature])
        about = {
            "encoder": encoder.to_dict(),
            "lookups": lookups,
            "dense_dtype": "float32" if normalization_of(model) is None else "float64",
            "item": item,
            "step": manifest.step,
        }
        made.write(ABOUT, json.dumps(about, indent=1))
    return ExportedTowers(len(items), vectors.shape[1], manifest.step)


def _trace(model: TwoTower, name: str, schema: Schema) -> torch.export.ExportedProgram:
    own = schema.only(model.towers[name])
    if name == "item":
        own = replace(own, dense=(), scaling=(), numericals=())
    return trace_whole(PlainModel(PlainTower(model, name)), own)


def _read_items(recipe: Recipe, source: Source, item: Sequence[str], items: ItemSet) -> Any:
    """Return the columns of all items that are stored in the data, as an Arrow table in the order of ``items``."""
    import pyarrow as pa

    path = None if recipe.retrieval is None else recipe.retrieval.items
    catalog = source if path is None else source_of_items(recipe, source, path, item)
    if not isinstance(catalog, ParquetSource):
        return pa.table({item[0]: items.ids.numpy()})
    catalog = catalog.streamed()
    derived = {d.name for d in catalog.schema.derived}
    names = [name for name in item if name not in derived]
    only, found, rows = catalog.only(item), list[Any](), np.full(len(items), -1, np.int64)
    count = 0

    def merge() -> None:
        """Keep only the last row of each item in ``found``."""
        known = rows >= 0
        found[:] = [pa.concat_tables(found, promote_options="default").take(pa.array(rows[known])).combine_chunks()]
        rows[known] = np.arange(known.sum())

    for split in catalog.splits:
        for i in range(len(catalog.chunks(split))):
            at = items.positions(item_ids(only.read(split, i).sparse, item[0])).numpy()
            distinct, last = np.unique(at[::-1], return_index=True)
            found.append(catalog.read_columns(split, i, names).take(pa.array(len(at) - 1 - last)))
            rows[distinct] = count + np.arange(len(distinct))
            count += len(distinct)
            if count > _FEWEST + 2 * len(found[0]):
                merge()
                count = len(found[0])
    merge()
    return found[0]


class UserTower:
    """Compute vectors of users with exported towers.

    Parameters
    ----------
    folder
        Directory written by `export_towers`.

    Attributes
    ----------
    item
        Name of the column of ``items.parquet`` that identifies an item.

    Raises
    ------
    DataError
        If ``folder`` contains no exported towers.
    """

    def __init__(self, folder: str | Path) -> None:
        from pyarrow import parquet

        folder = Path(folder)
        if not (folder / ABOUT).is_file():
            raise DataError(f"{folder} has no {ABOUT}. Pass a directory written by `hotbed export RUN DIR --towers`")
        about = cast("Mapping[str, Any]", parse_json(read_limited(folder / ABOUT)))
        files = cast("Mapping[str, str]", about.get("lookups", {}))
        tables = {feature: parquet.read_table(folder / file) for feature, file in files.items()}
        self._encoder = Encoder.from_dict(about["encoder"], tables)
        self._dense_dtype: torch.dtype = getattr(torch, about["dense_dtype"])
        self._user = load_program(folder / USER).module()
        self.item: str = about["item"][0]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that describe a user."""
        return self._encoder.names

    def vectors(self, users: Any) -> NDArray[np.float32]:
        """Return the vectors ``[n, D]`` of users; ``users`` is an Arrow table with columns as in the training data."""
        batch = self._encoder.batch(users, RowLocation("users"))
        ids: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        for column in self._encoder.schema.sparse:
            bags = batch.sparse[column.name]
            values, id_weights = bags.values.long(), bags.weights
            if bags.fixed is None:
                ids[column.name] = values, bags.lengths()
            else:
                ids[column.name] = values.view(len(batch), bags.fixed)
                id_weights = None if id_weights is None else id_weights.view(len(batch), bags.fixed)
            if column.weights is not None and id_weights is not None:
                weights[column.name] = id_weights
        with torch.no_grad():
            dense = None if batch.dense is None else batch.dense.to(self._dense_dtype)
            return self._user(dense, ids, *([weights] if weights else [])).numpy()
