"""Export the rows in which two checkpoints differ, by id, for servers that have the older checkpoint.

The checkpoints are read in windows of rows and compared bit by bit. So the export is exact for any two full or
differential checkpoints with the same tables. A window is skipped if the keys of differential and compact checkpoints
show that it has no changes. Rows of dynamic tables are identified by their ids. The row of an id is always in the same
set of `DYNAMIC_WAYS` rows, and windows consist of whole sets. So an id that is not in its former window is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.convert import Rectangle, read_rectangle, rows_in_memory
from hotbed.checkpoint.differential import open_with_bases
from hotbed.checkpoint.manifest import Manifest, SavedTable, read_manifest
from hotbed.checkpoint.saved_tables import NO_ID, check_tables, is_dynamic, layers, row_ids
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.errors import CheckpointError
from hotbed.files import new_file
from hotbed.specs import DYNAMIC_WAYS

_IDS_AT_ONCE = DYNAMIC_WAYS << 16


class _Model(NamedTuple):
    """An open checkpoint."""

    place: Directory
    manifest: Manifest
    files: TensorFiles


class _Changes(NamedTuple):
    """Changes of some rows of a table: deleted ids ``[n]``, and upserted ids ``[m]`` with vectors ``[m, D]``."""

    deleted: Tensor
    ids: Tensor
    vectors: Tensor

    @staticmethod
    def none() -> _Changes:
        nothing = torch.empty(0, dtype=torch.int64)
        return _Changes(nothing, nothing, torch.empty(0, 1))


def export_changes(
    source: str | Path | Directory,
    target: Path,
    since: str | Path | Directory | None = None,
    *,
    ttl_steps: Mapping[str, int] = MappingProxyType({}),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the rows in which a checkpoint differs from an older one to a Parquet file, with bounded memory.

    The columns are ``table``, ``id``, ``op`` (``upsert`` or ``delete``), ``vector`` (float32, null for deleted ids),
    ``base`` (step of ``since``) and ``sequence`` (step of ``source``). Each pair of table and id occurs once, so the
    order of rows does not matter. Applying the file to the vectors of ``since`` results in the vectors of ``source``.
    The file's metadata has the SHA-256 of both manifests as ``hotbed.base`` and ``hotbed.sequence``.

    Parameters
    ----------
    source
        The newer checkpoint.
    target
        The file, which is written atomically.
    since
        The older checkpoint. Without it, all rows are written, and ``base`` is null.
    ttl_steps
        `Dynamic.ttl_steps` by dynamic table. Ids that have not been seen for more steps count as deleted.
    progress
        Called repeatedly with the number of processed rows and of all rows.

    Returns
    -------
    dict
        ``base``, ``sequence``, and ``tables``: the numbers of ``upserts`` and ``deletes`` by table.

    Raises
    ------
    CheckpointError
        If a checkpoint does not exist or is damaged, or the checkpoints have different tables.
    """
    place = directory(source)
    manifest = read_manifest(place)
    old_place = None if since is None else directory(since)
    old_manifest = None if old_place is None else read_manifest(old_place)
    counts: dict[str, dict[str, int]] = {}
    done, total = 0, sum(table.spec.rows for table in manifest.tables.values())
    with ExitStack() as stack:
        new = _Model(place, manifest, stack.enter_context(open_with_bases(place, manifest)))
        old = None
        if old_place is not None and old_manifest is not None:
            _refuse_different_tables(place, manifest, old_place, old_manifest)
            old = _Model(old_place, old_manifest, stack.enter_context(open_with_bases(old_place, old_manifest)))
        for model in (new, old):
            if model is not None:
                check_tables(model.manifest.tables.values(), model.files)
        file = stack.enter_context(new_file(target))
        writer = stack.enter_context(_Writer(file, manifest, old_manifest))
        for name in manifest.tables:
            counts[name] = {"upserts": 0, "deletes": 0}
            for rows, changes in _windows(name, new, old, ttl_steps.get(name)):
                writer.write(name, changes)
                counts[name]["upserts"] += len(changes.ids)
                counts[name]["deletes"] += len(changes.deleted)
                done += len(rows)
                progress(done, total)
    return {"base": None if old is None else old.manifest.step, "sequence": manifest.step, "tables": counts}


def count_ids(source: str | Path | Directory, since: str | Path | Directory | None = None) -> dict[str, dict[str, int]]:
    """Count the ids with rows (``ids``) and the ids that were evicted since an older checkpoint, by dynamic table.

    Without ``since``, ``evicted`` is 0.
    """
    places = [directory(path) for path in (source, since) if path is not None]
    manifests = [read_manifest(place) for place in places]
    if len(places) == 2:
        _refuse_different_tables(places[0], manifests[0], places[1], manifests[1])
    found: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        models = [
            _Model(p, m, stack.enter_context(open_with_bases(p, m))) for p, m in zip(places, manifests, strict=True)
        ]
        for name, table in manifests[0].tables.items():
            if not is_dynamic(name, manifests[0]):
                continue
            counts = found[name] = {"ids": 0, "evicted": 0}
            for start in range(0, table.spec.rows, _IDS_AT_ONCE):  # whole sets, because ids stay in their sets
                rows = range(start, min(start + _IDS_AT_ONCE, table.spec.rows))
                ids, *older = (
                    of[of != NO_ID] for of in (row_ids(name, rows, model.manifest, model.files) for model in models)
                )
                counts["ids"] += len(ids)
                counts["evicted"] += sum(int((~torch.isin(old, ids)).sum()) for old in older)
    return found


def _refuse_different_tables(place: Directory, manifest: Manifest, old_place: Directory, old: Manifest) -> None:
    """Raise `CheckpointError` unless two checkpoints have the same tables."""
    shapes, before = (
        {name: (t.spec.rows, t.spec.dim, is_dynamic(name, m)) for name, t in m.tables.items()} for m in (manifest, old)
    )
    for name in [*shapes, *before]:
        if shapes.get(name) != before.get(name):
            found = [
                "no such table" if of is None else f"{of[0]:,} × {of[1]}{', dynamic' * of[2]}"
                for of in (shapes.get(name), before.get(name))
            ]
            raise CheckpointError(
                f"table '{name}': got {found[0]} in {place}, expected {found[1]} as in {old_place}. Remove --since, so "
                "that all rows are written"
            )


def _windows(name: str, new: _Model, old: _Model | None, ttl_steps: int | None) -> Iterator[tuple[range, _Changes]]:
    """Yield windows of a table's rows, with the changes in each window."""
    table = new.manifest.tables[name]
    of_old = None if old is None else old.manifest.tables[name]
    # Ids expire without a change of their rows.
    keyed = None if old is None or ttl_steps is not None else _keyed_layers(name, new, old)
    step = max(rows_in_memory(table, table.spec.dim) // (4 * DYNAMIC_WAYS), 1) * DYNAMIC_WAYS
    for first in range(0, table.spec.rows, step):
        rows = range(first, min(first + step, table.spec.rows))
        if keyed is not None and not any(_has_keys(rows, *layer) for layer in keyed):
            yield rows, _Changes.none()
            continue
        after, ids = _values(table, rows, new.files), row_ids(name, rows, new.manifest, new.files, ttl_steps)
        if old is None or of_old is None:
            yield rows, _Changes(ids[:0], ids[ids != NO_ID], after[ids != NO_ID])
        else:
            before = row_ids(name, rows, old.manifest, old.files, ttl_steps)
            yield rows, _compare(before, _values(of_old, rows, old.files), ids, after)


def _compare(old_ids: Tensor, before: Tensor, ids: Tensor, after: Tensor) -> _Changes:
    """Compare the ids and values of the same rows before and after."""
    same = ids == old_ids
    same &= (before.view(torch.int32) == after.view(torch.int32)).all(1)
    changed = ~same & (ids != NO_ID)
    gone = old_ids[(old_ids != NO_ID) & ~torch.isin(old_ids, ids)]
    return _Changes(gone, ids[changed], after[changed])


def _keyed_layers(name: str, new: _Model, old: _Model) -> list[tuple[SavedTable, TensorFiles]] | None:
    """List the layers with the keys of all rows that may differ. Return None if any row may differ."""
    above, below = (_layers(name, model) for model in (new, old))
    if above[0][0] == below[0][0]:  # both have the same base, or one is the base of the other
        above, below = above[1:], below[1:]
    elif above[0][1].spec != below[0][1].spec:  # initial values differ
        return None
    found = [(table, files) for _, table, files in (*above, *below)]
    return found if all(tile.keyed for table, _ in found for tile in table.tiles) else None


def _has_keys(rows: range, table: SavedTable, files: TensorFiles) -> bool:
    """Return whether a layer of a saved table has a key in a contiguous range of rows."""
    for tile in table.tiles:
        first, last = (files.count_below(tile.file, f"{tile.key}/keys", at) for at in (rows.start, rows.stop))
        if first < last:
            return True
    return False


def _layers(name: str, model: _Model) -> list[tuple[str, SavedTable, TensorFiles]]:
    """List the layers of a table, each with the SHA-256 of its manifest."""
    base, sha256 = model.manifest.base, model.manifest.sha256
    hashes = [sha256] if base is None else [base.sha256, sha256]
    found = layers(model.manifest.tables[name], model.files)
    return [(own, *layer) for own, layer in zip(hashes, found, strict=True)]


def _values(table: SavedTable, rows: range, files: TensorFiles) -> Tensor:
    """Read rows as float32 ``[n, D]``."""
    rectangle = Rectangle(rows, range(table.dim), table.without_moments)
    tile, _ = read_rectangle(rectangle, table.spec, files)
    return tile.arena.store.read(tile.arena.slots(0))


class _Writer(AbstractContextManager["_Writer"]):
    """Write a Parquet file of changes."""

    def __init__(self, path: Path, manifest: Manifest, old: Manifest | None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        word = pa.dictionary(pa.int32(), pa.string())
        columns = {"table": word, "id": pa.int64(), "op": word, "vector": pa.list_(pa.float32())}
        self._schema = pa.schema(
            {**columns, "base": pa.int64(), "sequence": pa.int64()},
            {"hotbed.base": "" if old is None else old.sha256, "hotbed.sequence": manifest.sha256},
        )
        self._numbers = None if old is None else old.step, manifest.step
        self._writer: Any = parquet.ParquetWriter(str(path), self._schema)

    def write(self, table: str, changes: _Changes) -> None:
        import pyarrow as pa

        vectors = changes.vectors
        offsets = torch.arange(len(vectors) + 1, dtype=torch.int32) * vectors.shape[1]
        lists: Any = pa.ListArray.from_arrays(offsets.numpy(), vectors.reshape(-1).numpy())
        for op, ids, values in (("delete", changes.deleted, None), ("upsert", changes.ids, lists)):
            n = len(ids)
            if n:
                given = [[table] * n, ids.numpy(), [op] * n, values, *([number] * n for number in self._numbers)]
                types: list[Any] = self._schema.types
                columns = [
                    pa.nulls(n, t) if v is None else v if v is lists else pa.array(v, t)
                    for v, t in zip(given, types, strict=True)
                ]
                self._writer.write_batch(pa.record_batch(columns, self._schema))

    def __exit__(self, *_: object) -> None:
        self._writer.close()
