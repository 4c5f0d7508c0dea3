# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUnknownParameterType=false
"""Export the towers of a two-tower model and the vectors of all items, and find items by them: ``export --towers``.

What is written needs no checkpoint: ``user.pt2`` and ``item.pt2`` are programs of torch that make vectors of ids,
``items.parquet`` has all items as they are stored, with their vectors, ``items.faiss`` is an index of these, and
``towers.json`` says how rows of users become ids.
"""

# faiss is an extra, and pyarrow ships no types.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from hotbed.errors import CheckpointError, DataError, RecipeError
from hotbed.nn import TwoTower
from hotbed.nn.normalization import normalization_of, take_raw
from hotbed.nn.plain import PlainEmbeddings, PlainModel, traced
from hotbed.parsing import parse_json, read_limited
from hotbed.train.build import build_model, new_source
from hotbed.train.metrics import evaluating
from hotbed.train.retrieval_build import all_items, model_source, source_of_items
from hotbed.train.retrieval_metrics import item_vectors
from hotbed.train.stored import encoder_of, recipe_of, take_features

USER, ITEM = "user.pt2", "item.pt2"
VECTORS, INDEX, ABOUT = "items.parquet", "items.faiss", "towers.json"
_VECTOR = "vector"
_BATCH = 16_384
_GRAPH_FROM = 1_000_000
"""Items from which on the index is a graph, which finds most of what a search of all finds, in less time."""
_LINKS = 32


@dataclass(frozen=True)
class Exported:
    """What `export_towers` wrote: items, columns of their vectors, kind of the index, and the step of the model."""

    items: int
    dim: int
    index: str
    step: int


class Tower(nn.Module):
    """One tower of a two-tower model as a model of its own, of plain torch: a batch in, vectors of norm 1 out.

    Parameters
    ----------
    model
        The model, on the CPU.
    name
        ``"user"`` or ``"item"``.
    """

    def __init__(self, model: TwoTower, name: str) -> None:
        super().__init__()
        whole = model.embeddings
        self.names, self.takes_dense = model.towers[name], name == "user" and model.dense_features > 0
        self.normalization = normalization_of(model) if self.takes_dense else None
        self.embeddings = PlainEmbeddings(whole, [f for f in whole.features if f.name in self.names])
        self.mlp = getattr(model, name)

    def forward(self, batch: Batch) -> Tensor:
        """Vectors ``[B, D]``."""
        found = self.embeddings(batch.sparse)
        inputs = [found[name] for name in self.names]
        if self.takes_dense and batch.dense is not None:
            inputs.append(batch.dense if self.normalization is None else self.normalization.of_batch(batch.dense))
        return F.normalize(self.mlp(torch.cat(inputs, dim=1)), dim=1)


def export_towers(
    checkpoint: str | Path, target: str | Path, data: str | None = None, *, trust_recipe: bool = False
) -> Exported:
    """Write the towers of a checkpoint's model, the vectors of all items, and an index of them.

    Parameters
    ----------
    checkpoint
        A checkpoint with a recipe, or a run's directory, whose best or newest is taken.
    target
        Local directory to make.
    data
        Path of other data, whose items are taken; default: the recipe's, or its ``retrieval.items``.
    trust_recipe
        See `hotbed.config.check_trust`.

    Raises
    ------
    CheckpointError
        If the model is no `hotbed.nn.TwoTower`, or there is anything at ``target``.
    RecipeError
        If faiss is not installed.
    """
    faiss = faiss_module()
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
    index = _index(faiss, vectors)
    with new_directory(target) as (made, _):
        folder = Path(made.path)
        for name, program in programs.items():
            torch.export.save(program, folder / name)
        _write_items(folder / VECTORS, _stored(recipe, source, item, items), vectors)
        faiss.write_index(index, str(folder / INDEX))
        about = {
            "encoder": _encoder(recipe, source, manifest, model).to_dict(),
            "dense_dtype": "float32" if normalization_of(model) is None else "float64",
            "item": item,
            "step": manifest.step,
        }
        made.write(ABOUT, json.dumps(about, indent=1))
    kind = "a graph (HNSW)" if len(items) >= _GRAPH_FROM else "exact"
    return Exported(len(items), vectors.shape[1], kind, manifest.step)


def _program(model: TwoTower, name: str, schema: Schema) -> torch.export.ExportedProgram:
    own = schema.only(model.towers[name])
    if name == "item":
        own = replace(own, dense=(), scaling=(), numericals=())
    return traced(PlainModel(Tower(model, name)), own)


def _encoder(recipe: Recipe, source: Source, manifest: Manifest, model: TwoTower) -> Encoder:
    """What makes ids of rows of users; of prepared data, rows have these ids."""
    whole = encoder_of(recipe, model_source(recipe, source), manifest)
    whole.preparation = None
    return whole.of(replace(whole.schema.only(model.towers["user"]), scaling=()))


def _stored(recipe: Recipe, source: Source, item: Sequence[str], items: ItemSet) -> Any:
    """The items as they are stored, in the order of the set: an Arrow table of the item's columns."""
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
    for split in place.splits:
        for i in range(len(place.chunks(split))):
            at = items.positions(item_ids(only.read(split, i).sparse, item[0])).numpy()
            here, last = np.unique(at[::-1], return_index=True)
            kept = len(at) - 1 - last
            found.append(place.read_columns(split, i, names).take(pa.array(kept)))
            rows[here] = count + np.arange(len(here))
            count += len(here)
    return pa.concat_tables(found, promote_options="default").take(pa.array(rows)).combine_chunks()


def _write_items(path: Path, stored: Any, vectors: NDArray[np.float32]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    if _VECTOR in stored.column_names:
        raise DataError(f"the item has a column named '{_VECTOR}', which is what its vectors are called; rename it")
    parquet.write_table(stored.append_column(_VECTOR, column), path)


# -- the index ---------------------------------------------------------------------------------------------------------


def faiss_module() -> Any:
    """Import faiss, or say how to get it."""
    try:
        import faiss
    except ImportError as error:
        raise RecipeError(
            f"an index of items needs faiss, which cannot be imported ({error}); pip install 'hotbed[retrieval]'"
        ) from error
    return faiss


def _index(faiss: Any, vectors: NDArray[np.float32]) -> Any:
    """An index by products; as vectors have norm 1, the largest are the nearest."""
    dim = vectors.shape[1]
    if len(vectors) < _GRAPH_FROM:
        index = faiss.IndexFlatIP(dim)
    else:
        index = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.add(np.ascontiguousarray(vectors))
    return index


# -- finding -----------------------------------------------------------------------------------------------------------


class Finder:
    """Find items for users, by what `export_towers` wrote.

    Parameters
    ----------
    folder
        Its directory.

    Attributes
    ----------
    item
        The column that says which item it is.
    items
        All items, an Arrow table of their columns.

    Raises
    ------
    DataError
        If the directory has no towers.
    RecipeError
        If faiss is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        from pyarrow import parquet

        folder = Path(folder)
        if not (folder / ABOUT).is_file():
            raise DataError(f"{folder} has no {ABOUT}; give what hotbed export RUN DIR --towers wrote")
        about = cast("Mapping[str, Any]", parse_json(read_limited(folder / ABOUT)))
        self._index = faiss_module().read_index(str(folder / INDEX))
        self._encoder = Encoder.from_dict(about["encoder"], {})
        self._dense_dtype: torch.dtype = getattr(torch, about["dense_dtype"])
        self._user = torch.export.load(folder / USER).module()
        self.item: str = about["item"][0]
        names = [name for name in parquet.read_schema(folder / VECTORS).names if name != _VECTOR]
        self.items = parquet.read_table(folder / VECTORS, columns=names)

    @property
    def columns(self) -> list[str]:
        """Columns that rows of users must have."""
        return self._encoder.names

    def vectors(self, users: Any) -> NDArray[np.float32]:
        """Vectors ``[n, D]`` of rows of users, an Arrow table with their columns as in the data to train on."""
        batch = self._encoder.batch(users, place="users", row_of=lambda at: f"row {at:,}")
        ids: dict[str, Any] = {}
        for name in batch.sparse.names:
            bags = batch.sparse[name]
            fixed = bags.values.view(len(batch), bags.fixed or 0).long()
            ids[name] = fixed if bags.offsets is None else (bags.values.long(), bags.lengths())
        with torch.no_grad():
            dense = None if batch.dense is None else batch.dense.to(self._dense_dtype)
            return self._user(dense, ids).numpy()

    def __call__(self, users: Any, k: int = 10) -> Any:
        """The best ``k`` items of each user: an Arrow table of two columns of lists, the items and their products."""
        import pyarrow as pa

        k = min(k, len(self.items))
        scores, at = self._index.search(self.vectors(users), k)
        chosen = self.items[self.item].combine_chunks().take(pa.array(at.reshape(-1)))
        lists = (pa.array(scores.reshape(-1)), chosen)
        products, items = (pa.FixedSizeListArray.from_arrays(values, k).cast(pa.list_(values.type)) for values in lists)
        return pa.table({self.item: items, "score": products})


def find(
    folder: str | Path,
    users: str | Path,
    out: str | Path,
    *,
    k: int = 10,
    keep: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the best items of each row of a Parquet file of users; returns how many rows there are.

    Parameters
    ----------
    folder
        What `export_towers` wrote.
    users
        Parquet file with the columns of the user's tower.
    out
        Parquet file to make: ``keep``, then the items and their products, lists of ``k``, a row for each row.
    k
        How many items to find.
    keep
        Columns of the users to copy.
    progress
        Called with rows done and all rows.

    Raises
    ------
    DataError
        If there is no such file, or a column is missing.
    RecipeError
        If ``out`` exists, or ``k`` is less than 1.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if k < 1:
        raise RecipeError(f"--k is {k}, must be at least 1")
    if Path(out).exists():
        raise RecipeError(f"{out} exists already and is not overwritten; choose another --out")
    finder = Finder(folder)
    try:
        file = parquet.ParquetFile(users)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{users} is no Parquet file of users: {error}") from error
    if missing := [name for name in (*finder.columns, *keep) if name not in file.schema_arrow.names]:
        raise DataError(
            f"{users} has no column '{missing[0]}'; it has {', '.join(file.schema_arrow.names)}, and the user's tower "
            f"needs {', '.join(finder.columns)}"
        )
    done, writer = 0, cast(Any, None)
    for rows in file.iter_batches(_BATCH):
        table = pa.Table.from_batches([rows])
        found = finder(table, k)
        for i, name in enumerate(keep):
            found = found.add_column(i, name, table[name])
        writer = writer or parquet.ParquetWriter(out, found.schema)
        writer.write_table(found)
        done += len(table)
        progress(done, file.metadata.num_rows)
    if writer is None:
        raise DataError(f"{users} has no rows")
    writer.close()
    return done
