# pyright: reportMissingImports=false, reportUnknownParameterType=false
"""Find the best items of users by exported towers: `Finder`, and what ``hotbed find`` calls.

No model and no data of the training are read, only what `hotbed.train.towers.export_towers` wrote.
"""

# faiss is an extra, and pyarrow ships no types.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data import Encoder
from hotbed.data.parquet_files import ParquetFile
from hotbed.errors import DataError, RecipeError
from hotbed.files import new_file
from hotbed.parsing import parse_json, read_limited
from hotbed.torch_hooks import load_program
from hotbed.train.predict import new_target, refuse_keep
from hotbed.train.towers import ABOUT, INDEX, USER, VECTOR, VECTORS, faiss_module

_BATCH = 16_384
_LOOKED_AT = 128
"""Candidates that a search of a graph keeps while it looks for the best, at least (docs/log.md, 2026-11-26)."""
SCORE = "score"
"""Column of the products."""


class Written(NamedTuple):
    """Say what `find` wrote: rows, and how many items were looked for each: ``k``, or all if there are fewer."""

    rows: int
    k: int


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
        files = cast("Mapping[str, str]", about.get("lookups", {}))
        tables = {feature: parquet.read_table(folder / file) for feature, file in files.items()}
        self._encoder = Encoder.from_dict(about["encoder"], tables)
        self._dense_dtype: torch.dtype = getattr(torch, about["dense_dtype"])
        self._user = load_program(folder / USER).module()
        self.item: str = about["item"][0]
        names = [name for name in parquet.read_schema(folder / VECTORS).names if name != VECTOR]
        self.items = parquet.read_table(folder / VECTORS, columns=names)

    @property
    def columns(self) -> list[str]:
        """Name the columns that rows of users must have."""
        return self._encoder.names

    def vectors(self, users: Any) -> NDArray[np.float32]:
        """Compute vectors ``[n, D]`` of rows of users, an Arrow table with their columns as in the data to train on."""
        batch = self._encoder.batch(users, place="users", row_of=lambda at: f"row {at:,}")
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

    def __call__(self, users: Any, k: int = 10) -> Any:
        """Find the best ``k`` items of each user: an Arrow table of two columns of lists, the items and their products.

        Lists are shorter where there are fewer items, or a graph leads to fewer.
        """
        import pyarrow as pa

        k = min(k, len(self.items))
        scores, at = self._search(self.vectors(users), k)
        there = at >= 0
        offsets = pa.array(np.concatenate([[0], there.sum(1).cumsum()]).astype(np.int32))
        chosen = self.items[self.item].combine_chunks().take(pa.array(at[there]))
        items, products = (pa.ListArray.from_arrays(offsets, values) for values in (chosen, pa.array(scores[there])))
        return pa.table({self.item: items, SCORE: products})

    def _search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the largest products ``[n, k]`` and the positions of their items, −1 where the index found fewer."""
        if not hasattr(self._index, "hnsw"):
            return self._index.search(vectors, k)
        wide = faiss_module().SearchParametersHNSW(efSearch=max(_LOOKED_AT, 2 * k))
        return self._index.search(vectors, k, params=wide)


def find(
    folder: str | Path,
    users: str | Path,
    out: str | Path,
    *,
    k: int = 10,
    keep: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Write the best items of each row of a Parquet file of users.

    Parameters
    ----------
    folder
        What `export_towers` wrote.
    users
        Parquet file with the columns of the user's tower.
    out
        Parquet file to make: ``keep``, then the items and their products, lists of ``k``, a row for each row. It
        appears when it is complete.
    k
        How many items to find.
    keep
        Columns of the users to copy.
    progress
        Called with rows done and all rows.

    Raises
    ------
    DataError
        If there is no such file, it has no rows, or a column is missing.
    RecipeError
        If ``out`` exists or has another ending, ``k`` is less than 1, or a column to keep has the name of another.
    """
    import pyarrow as pa
    from pyarrow import fs, parquet

    if k < 1:
        raise RecipeError(f"--k is {k}, must be at least 1")
    target = Path(new_target(out, (".parquet",)))
    finder = Finder(folder)
    file = ParquetFile(fs.LocalFileSystem(), str(Path(users).absolute()), Path(users).name, str(users))
    try:
        fields, total = file.schema, file.metadata.num_rows
    except OSError as error:
        raise DataError(f"{users} is no Parquet file of users: {error}") from error
    if missing := [name for name in finder.columns if name not in fields.names]:
        raise DataError(
            f"{users} has no column '{missing[0]}'; it has {', '.join(fields.names)}, and the user's tower "
            f"needs {', '.join(finder.columns)}"
        )
    refuse_keep({field.name: str(field.type) for field in fields}, keep, (finder.item, SCORE), target, str(users))
    if not total:
        raise DataError(f"{users} has no rows")
    lists = {finder.item: finder.items.schema.field(finder.item).type, SCORE: pa.float32()}
    schema = pa.schema([*map(fields.field, keep), *(pa.field(name, pa.list_(kind)) for name, kind in lists.items())])
    names, done = list(dict.fromkeys((*finder.columns, *keep))), 0
    with new_file(target) as unfinished, parquet.ParquetWriter(unfinished, schema) as writer:
        for table in (rows for group in file.row_groups() for rows in group.batches(names, _BATCH)):
            found = finder(table, k)
            columns = [*(table[name] for name in keep), *found.columns]
            writer.write_table(pa.table(columns, schema=schema))
            done += len(table)
            progress(done, total)
    return Written(done, min(k, len(finder.items)))
