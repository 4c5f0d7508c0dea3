"""Look up the features of an exported model, read only, and apply changes of its tables.

Tables are in memory if all of them fit. Otherwise the smallest tables are, in up to half of the memory, and the other
tables share the rest as caches over their files, in proportion to their bytes (`hotbed.serve.row_files`).
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.batch import Embeddings
from hotbed.embed.dynamic import replace_ids
from hotbed.embed.ids import Discarded, repaired_ids
from hotbed.embed.local_tables import LocalTables
from hotbed.errors import DamagedError, StoreError
from hotbed.files import unnamed_file
from hotbed.jagged import Jagged
from hotbed.ops import BackendName, cpu_cache
from hotbed.ops.cpu_runtime import launch
from hotbed.serve.model_files import ChangeSet, ExportedModel, ModelManifest, TableEntry
from hotbed.serve.row_files import CHANGED_ROWS, FileRows, FileStorage, ResidentRows, records_of
from hotbed.specs import ANY_ID, DYNAMIC_WAYS, Feature, Table
from hotbed.store import LazyStore, Storage, Traffic
from hotbed.store.hash_index import find_positions
from hotbed.store.records import Records

SETS_AT_ONCE = 1 << 13
"""Sets of a dynamic table for which free rows are listed at once."""
COPIED_AT_ONCE = 1 << 20
"""Ids that are copied at once."""


class ServedLookup:
    """Look up the features of one collection of an exported model, without gradients."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        storages: Mapping[str, Storage],  # storage of each table that is not in memory
        ids: Mapping[str, ServedIds],  # row finders of dynamic tables
        *,
        device: torch.device,  # of the looked-up vectors
        backend: BackendName,
    ) -> None:
        zeros = [replace(table, init_bound=0.0) for table in tables]  # until the exported rows are read
        self.groups = [
            LocalTables(
                dim,
                [table for table in zeros if table.dim == dim],
                features,
                seed=0,
                device=device,
                backend=backend,
                storages=storages,
            )
            for dim in dict.fromkeys(table.dim for table in tables)
        ]
        self._features, self._names = features, [feature.name for feature in features]
        self._rows = {t.name: ANY_ID if t.name in ids else t.rows for t in tables}
        self._ids = ids
        self._dynamic = {t: [f.name for f in features if f.table == t] for t in ids}
        self.bad_ids: Counter[str] = Counter()
        self.truncated_ids: Counter[str] = Counter()
        self.unknown_ids: Counter[str] = Counter()

    def __call__(self, ids: Jagged) -> Embeddings:
        """Return vectors by feature. Raise `BatchError` for ids or bags that the features refuse."""
        ids = repaired_ids(ids, self._features, self._rows, Discarded(self.bad_ids, self.truncated_ids))
        if self._dynamic:
            ids = replace_ids(ids, self._dynamic, lambda table, of: self._ids[table].rows_of(of), self.unknown_ids)
        found = Embeddings(self._names)
        for group in self.groups:
            vectors = group.look_up(ids)
            if group.pooled:
                found.add_pooled(group.pooled, vectors.pop(0), None)
            for feature, of_feature in zip(group.sequences, vectors, strict=True):
                found.add_sequence(feature, of_feature.squeeze(1), ids.bags_of(feature.name))
        return found


class ServedIds:
    """Find the rows of the ids of a dynamic table. A lookup never assigns a row; changes evict ids and add others.

    The directory is that of training (`hotbed.embed.dynamic.DynamicVocabulary`): the row of an id is one of the 128
    rows of its set. It is a copy of the exported ids ``[R]`` (−1 where a row has none), mapped from a file without a
    name in ``directory`` (default: the directory of temporary files). So the system can reclaim its memory. Changes
    name ids and not rows, because any free row of the set will do.
    """

    def __init__(self, table: str, ids: NDArray[np.int64], directory: str | Path | None = None) -> None:
        self._table, self._directory = table, directory
        self._ids = self._copied(ids)
        self._sets = len(ids) // DYNAMIC_WAYS
        self.discard()

    def _copied(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copy ids to a file and map it. All of it is written, so that its disk cannot be full later."""
        file = unnamed_file(self._directory, CHANGED_ROWS)
        try:
            for first in range(0, len(ids), COPIED_AT_ONCE):
                data = memoryview(ids[first : first + COPIED_AT_ONCE].tobytes())
                at = 8 * first
                while len(data):
                    done = os.pwrite(file, data, at)
                    data, at = data[done:], at + done
            mapped = mmap.mmap(file, 8 * len(ids))
        finally:
            os.close(file)
        return np.frombuffer(mapped, np.int64)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Find the row of each id ``[n]``, −1 where it has none."""
        given, rows = ids.cpu().contiguous(), torch.empty(len(ids), dtype=torch.int64)
        launch(cpu_cache.find, self._ids, self._sets, 0, DYNAMIC_WAYS, given.numpy(), rows.numpy())
        return rows.to(ids.device)

    def stage(self, deleted: Tensor, ids: Tensor) -> None:
        """Prepare to remove the ids ``deleted [n]`` and to add ``ids [m]``, all different.

        Raise `DamagedError` if a set has no room for its ids.
        """
        found = self.rows_of(deleted)
        freed = found[found >= 0]
        new = ids[self.rows_of(ids) < 0]
        sets = torch.empty_like(new)
        cpu_cache.sets_of(new.numpy(), self._sets, sets.numpy())
        order = sets.argsort(stable=True)
        new, sets = new[order], sets[order]
        distinct, counts = sets.unique_consecutive(return_counts=True)
        rank = torch.arange(len(new)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        freed_sorted = freed.sort().values
        rows = torch.empty_like(new)
        done = 0
        ways = torch.arange(DYNAMIC_WAYS)
        for some, of_some in zip(distinct.split(SETS_AT_ONCE), counts.split(SETS_AT_ONCE), strict=True):
            places = some[:, None] * DYNAMIC_WAYS + ways
            is_free = torch.from_numpy(self._ids[places.numpy()]) == cpu_cache.FREE
            is_free |= (find_positions(freed_sorted, places.flatten()) >= 0).view_as(places)
            if bool((is_free.sum(1) < of_some).any()):
                raise DamagedError(
                    f"the changes give more ids to a set of table '{self._table}' than the {DYNAMIC_WAYS} that it has "
                    "room for, so they are not of this model"
                )
            free_first = (~is_free).int().argsort(dim=1, stable=True)
            end = done + int(of_some.sum())
            at = torch.arange(len(some)).repeat_interleave(of_some)
            rows[done:end] = places[at, free_first[at, rank[done:end]]]
            done = end
        ids, order = new.sort()
        self._freed, self._new_ids, self._new_rows = freed, ids, rows[order]

    def stage_ids(self, ids: NDArray[np.int64]) -> None:
        """Prepare to replace all ids by those of another exported model."""
        self._replacement = self._copied(ids)

    def staged_rows(self, ids: Tensor) -> Tensor:
        """Find the rows that staged ids ``[n]`` will have."""
        rows = self.rows_of(ids)
        at = find_positions(self._new_ids, ids)
        is_new = at >= 0
        rows[is_new] = self._new_rows[at[is_new]]
        return rows

    def swap(self) -> None:
        """Find the staged ids from now on."""
        if self._replacement is not None:
            self._ids = self._replacement
        self._ids[self._freed.numpy()] = cpu_cache.FREE
        self._ids[self._new_rows.numpy()] = self._new_ids.numpy()
        self.discard()

    def discard(self) -> None:
        """Forget the staged ids."""
        self._freed = self._new_ids = self._new_rows = torch.empty(0, dtype=torch.int64)
        self._replacement: NDArray[np.int64] | None = None


class _Place(NamedTuple):
    """Place of a table's rows: the rows of its arena, its first slot, and the row finder of a dynamic table."""

    rows: ResidentRows | FileRows
    first_slot: int
    ids: ServedIds | None


class ServedTables:
    """All tables of an exported model.

    One thread may `stage` while another looks up. No thread may look up during `swap`, which publishes all staged rows
    at once. ``directory`` has the files for changed rows (default: the directory of temporary files). Raise
    `StoreError` if the memory is too small, or no file can be created.
    """

    def __init__(
        self,
        model: ExportedModel,
        *,
        memory_bytes: int | None = None,  # limit for rows, on the computing device; None: unlimited
        redis: str | None = None,  # address of a Redis in front of tables in files; see `redis_records`
        directory: Path | None = None,
        device: torch.device | str = "cpu",
        backend: BackendName = "auto",
    ) -> None:
        self._entries = model.manifest.tables
        resident, cache_bytes = placement(self._entries, memory_bytes)
        self.collections: dict[str, ServedLookup] = {}
        self._places: dict[str, _Place] = {}
        self._arenas: list[ResidentRows | FileRows] = []
        for path, (tables, features) in model.collections().items():
            whole = {t.name: f"{path}.{t.name}" if path else t.name for t in tables}
            found = {name: model.ids(full) for name, full in whole.items()}
            ids = {name: ServedIds(whole[name], of, directory) for name, of in found.items() if of is not None}
            storages: dict[str, Storage] = {}
            for alike in _alike([t for t in tables if whole[t.name] not in resident], self._entries, whole):
                names = tuple(whole[name] for name in alike)
                share = sum(cache_bytes[name] for name in names)
                storage = FileStorage(model=model, tables=names, cache_bytes=share, changes=directory, redis=redis)
                storages |= dict.fromkeys(alike, storage)
            lookup = ServedLookup(tables, features, storages, ids, device=torch.device(device), backend=backend)
            self.collections[path] = lookup
            for arena in (arena for group in lookup.groups for arena in group.arenas):
                if arena.tables[0] in storages:
                    rows = FileRows(arena, whole, redis)
                else:
                    rows = ResidentRows(arena, whole, model, directory)
                self._arenas.append(rows)
                for number, name in enumerate(arena.tables):
                    self._places[whole[name]] = _Place(rows, arena.first_slots[number], ids.get(name))
        self._dynamic = {name: place.ids for name, place in self._places.items() if place.ids is not None}

    @property
    def unknown_ids(self) -> Counter[str]:
        """Count, by feature of a dynamic table, the ids without a row so far; they are left out of their bags."""
        return sum((c.unknown_ids.copy() for c in self.collections.values()), Counter())

    @property
    def bad_ids(self) -> Counter[str]:
        """Count, by feature, the ids that were dropped or hashed so far."""
        return sum((c.bad_ids.copy() for c in self.collections.values()), Counter())

    @property
    def traffic(self) -> Traffic:
        """Counts of cache lookups and file reads so far."""
        return sum((rows.arena.store.traffic for rows in self._arenas), Traffic())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows take."""
        return sum(rows.arena.store.nbytes for rows in self._arenas)

    @property
    def changed_share(self) -> float:
        """Disk space of changed rows as a share of the exported files below them; 0 if all rows are in memory."""
        changed = [rows.changed for rows in self._arenas if isinstance(rows, FileRows)]
        below = sum(layer.disk_bytes for of in changed for layer in of.below.layers())
        return sum(of.disk_bytes for of in changed) / below if below else 0.0

    def layers(self) -> list[Records]:
        """List the record layers of tables in files."""
        stores = [rows.arena.store for rows in self._arenas]
        return [layer for store in stores if isinstance(store, LazyStore) for layer in store.records.layers()]

    def close(self) -> None:
        """Close files."""
        for layer in self.layers():
            layer.close()

    # -- changes ---------------------------------------------------------------------------------------------------

    def stage(self, change: ChangeSet, check: Callable[[], None] = lambda: None) -> None:
        """Prepare the rows of a set of changes. ``check`` is called regularly and may raise.

        Raise `DamagedError` if the set does not match its hash or the tables of the model, and `OSError` if the disk is
        full or fails.
        """
        for name in change.manifest.tables:
            if name not in self._entries:
                raise DamagedError(f"{change} has rows of table '{name}', which this model has not")
        self._stage_ids(change)
        last: dict[str, int] = {}
        for table, deleted, ids, vectors in change.rows():
            check()
            place, entry = self._places.get(table), self._entries[table]
            if place is None:  # no feature of the model uses it
                continue
            rows, fault = ids if place.ids is None else place.ids.staged_rows(ids), None
            if place.ids is None and len(deleted):
                fault = f"deletes ids of table '{table}', which is not dynamic"
            elif not len(ids):
                continue
            elif place.ids is None and (ids[0] <= last.get(table, -1) or bool((ids[1:] <= ids[:-1]).any())):
                fault = f"has ids of table '{table}' that do not rise; copy it again"
            elif vectors.shape[1] != entry.dim or int(rows.min()) < 0 or int(rows.max()) >= entry.rows:
                fault = (
                    f"has rows {int(rows.min()):,} … {int(rows.max()):,} of {vectors.shape[1]} columns, and table "
                    f"'{table}' has {entry.rows:,} rows of {entry.dim}"
                )
            if fault is not None:
                raise DamagedError(f"{change} {fault}")
            last[table] = int(ids[-1])
            place.rows.stage(rows + place.first_slot, records_of(entry, rows, vectors))

    def _stage_ids(self, change: ChangeSet) -> None:
        """Assign rows to the new ids of dynamic tables. Rows of ids that the same change deletes are free."""
        if not self._dynamic.keys() & change.manifest.tables.keys():
            return
        deleted: dict[str, list[Tensor]] = {}
        upserted: dict[str, list[Tensor]] = {}
        for table, gone, ids, _ in change.rows():
            if table in self._dynamic:
                deleted.setdefault(table, []).append(gone)
                upserted.setdefault(table, []).append(ids)
        for table, parts in deleted.items():
            gone, ids = torch.cat(parts), torch.cat(upserted[table])
            if len(torch.cat([gone, ids]).unique()) < len(gone) + len(ids):
                raise DamagedError(f"{change} has an id of table '{table}' twice; copy it again")
            self._dynamic[table].stage(gone, ids)

    def stage_model(self, model: ExportedModel, *, same_state: bool, check: Callable[[], None] = lambda: None) -> None:
        """Prepare to replace all rows by those of another export of these tables.

        With ``same_state`` the export has the rows that are served, so that the files of changes can be freed.
        ``check`` is called regularly and may raise.
        """
        for rows in self._arenas:
            # An id of a dynamic table may have another row in the export.
            is_same = same_state and self._dynamic.keys().isdisjoint(rows.tables)
            rows.stage_model(model, same_rows=is_same, check=check)
        for name, finder in self._dynamic.items():
            check()
            ids = model.ids(name)
            if ids is not None:
                finder.stage_ids(ids)

    def swap(self) -> None:
        """Look up all that was staged from now on."""
        for part in (*self._arenas, *self._dynamic.values()):
            part.swap()

    def tidy(self) -> None:
        """Free the memory and disk space that no request needs since the last swap."""
        for rows in self._arenas:
            rows.tidy()

    def discard(self) -> None:
        """Forget all that was staged."""
        for part in (*self._arenas, *self._dynamic.values()):
            part.discard()


def placement(tables: Mapping[str, TableEntry], memory_bytes: int | None) -> tuple[set[str], dict[str, int]]:
    """Choose the tables in memory, and the cache bytes of the other tables.

    Raise `StoreError` if the memory is too small for the index of changed rows.
    """
    sizes = {name: entry.rows * entry.record_bytes for name, entry in tables.items()}
    if memory_bytes is None or sum(sizes.values()) <= memory_bytes:
        return set(sizes), {}
    resident: set[str] = set()
    taken = 0
    for name in sorted(sizes, key=sizes.__getitem__):
        if taken + sizes[name] > memory_bytes // 2:
            break
        resident.add(name)
        taken += sizes[name]
    marks = sum(tables[name].rows for name in sizes if name not in resident)  # a byte per row, see `ChangedRecords`
    rest = memory_bytes - taken - marks
    if rest < 0:
        raise StoreError(
            f"memory is {memory_bytes:,} bytes, but tables in files need {taken + marks:,} to find changed rows; give "
            "more, or put fewer rows into a model"
        )
    of_files = sum(size for name, size in sizes.items() if name not in resident)
    return resident, {name: rest * size // of_files for name, size in sizes.items() if name not in resident}


def _alike(tables: Sequence[Table], entries: Mapping[str, TableEntry], whole: Mapping[str, str]) -> list[list[str]]:
    """Group tables with the same record layout, which can share a store."""
    found: dict[tuple[object, ...], list[str]] = {}
    for table in tables:
        layout = entries[whole[table.name]].records()
        found.setdefault((table.dim, table.dtype, layout.has_wide, layout.has_narrow), []).append(table.name)
    return list(found.values())


def same_tables(own: ModelManifest, other: ModelManifest) -> bool:
    """Return whether another model has the same inputs, tables and outputs, so that it can replace this one.

    Looked-up tables and boundaries of derived inputs may differ, as may the kind of ids where it was not known.
    """

    def form(manifest: ModelManifest) -> object:
        tables = {n: (t.rows, t.dim, t.dtype, t.fp32_rows, t.ids is None) for n, t in manifest.tables.items()}
        encoder = manifest.encoder.get("schema"), manifest.encoder.get("ids")
        return tables, manifest.features, manifest.labels, encoder, manifest.hash, manifest.dense.inputs

    kinds, others = (dict(manifest.encoder.get("id_kinds", {})) for manifest in (own, other))
    return form(own) == form(other) and {**others, **kinds} == others
