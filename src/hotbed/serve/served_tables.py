"""Look up the features of an exported model, and apply changes to its tables.

If all tables fit into memory, all are loaded. Otherwise the smallest tables are loaded, up to half of the memory. The
rest of the memory is divided among caches for the files of the remaining tables, in proportion to the bytes of these
tables (`hotbed.serve.row_files`).
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
from hotbed.embed.ids import Discarded, repair_ids
from hotbed.embed.local_tables import LocalTables
from hotbed.errors import DamagedError, StoreError
from hotbed.files import unnamed_file
from hotbed.jagged import Jagged
from hotbed.ops import BackendName, cpu_cache
from hotbed.ops.cpu_runtime import launch
from hotbed.serve.model_files import ChangeSet, ExportedModel, ModelManifest, TableEntry
from hotbed.serve.row_files import CHANGED_ROWS, ArenaFiles, FileStorage, ResidentRows, records_of
from hotbed.specs import ANY_ID, DYNAMIC_WAYS, Feature, Table
from hotbed.store import LazyStore, Storage, Traffic
from hotbed.store.hash_index import find_positions
from hotbed.store.records import Records

SETS_AT_ONCE = 1 << 13  # sets of a dynamic table that are searched for free rows at once
COPIED_AT_ONCE = 1 << 20  # ids that are copied at once


class ServedLookup:
    """Look up the features of one collection of an exported model, without gradients."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        storages: Mapping[str, Storage],  # storage of each table that is not in memory
        ids: Mapping[str, ServedIds],  # finders of rows, by dynamic table
        discarded: Discarded,  # counts invalid ids and ids beyond `max_len`, by feature
        unknown_ids: Counter[str],  # counts ids without a row in a dynamic table, by feature
        *,
        device: torch.device,  # device of the looked-up vectors
        backend: BackendName,
    ) -> None:
        zeros = [replace(table, init_bound=0.0) for table in tables]  # exported rows replace the zeros
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
        self._ids, self._discarded, self._unknown_ids = ids, discarded, unknown_ids
        self._dynamic = {t: [f.name for f in features if f.table == t] for t in ids}

    def __call__(self, ids: Jagged) -> Embeddings:
        """Return the vectors of each feature. Raise `BatchError` for ids or bags that a feature does not accept."""
        ids = repair_ids(ids, self._features, self._rows, self._discarded)
        if self._dynamic:
            ids = replace_ids(ids, self._dynamic, lambda table, of: self._ids[table].rows_of(of), self._unknown_ids)
        found = Embeddings(self._names)
        for group in self.groups:
            vectors = group.look_up(ids)
            if group.pooled:
                found.add_pooled(group.pooled, vectors.pop(0), None)
            for feature, of_feature in zip(group.sequences, vectors, strict=True):
                found.add_sequence(feature, of_feature.squeeze(1), ids.bags_of(feature.name))
        return found


class ServedIds:
    """Find the rows of a dynamic table's ids. Lookups never add or evict ids; sets of changes do.

    The ids of a table are hashed to sets. As in training (`hotbed.embed.dynamic.DynamicVocabulary`), a set has 128
    rows, and an id can have any row of its set. So changes contain ids instead of row numbers, and the server assigns
    free rows itself. The ids ``[R]`` (−1 for a free row) are mapped into memory from a file without a name, so that the
    system can reclaim the memory. The file is in ``directory`` (default: the directory of temporary files).
    """

    def __init__(self, table: str, ids: NDArray[np.int64], directory: str | Path | None = None) -> None:
        self._table, self._directory = table, directory
        self._ids = self._map_copy(ids)
        self._sets = len(ids) // DYNAMIC_WAYS
        self.discard()

    def _map_copy(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copy ids to a file, and map the file into memory."""
        file = unnamed_file(self._directory, CHANGED_ROWS)
        try:
            for first in range(0, len(ids), COPIED_AT_ONCE):  # writing all ids reserves the disk space
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
        """Return the row of each id ``[n]``, or −1 for an unknown id."""
        on_cpu, rows = ids.cpu().contiguous(), torch.empty(len(ids), dtype=torch.int64)
        launch(cpu_cache.find, self._ids, self._sets, 0, DYNAMIC_WAYS, on_cpu.numpy(), rows.numpy())
        return rows.to(ids.device)

    def stage(self, deleted: Tensor, ids: Tensor) -> None:
        """Prepare to remove the ids ``deleted [n]`` and to add ``ids [m]``. All n + m ids must be distinct.

        Raise `DamagedError` if a set has too few free rows for its new ids.
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
            candidates = some[:, None] * DYNAMIC_WAYS + ways
            is_free = torch.from_numpy(self._ids[candidates.numpy()]) == cpu_cache.FREE
            is_free |= (find_positions(freed_sorted, candidates.flatten()) >= 0).view_as(candidates)
            if bool((is_free.sum(1) < of_some).any()):
                raise DamagedError(
                    f"the changes belong to a different model: with these changes, a set of table '{self._table}' "
                    f"would have more than {DYNAMIC_WAYS} ids"
                )
            free_first = (~is_free).int().argsort(dim=1, stable=True)
            end = done + int(of_some.sum())
            at = torch.arange(len(some)).repeat_interleave(of_some)
            rows[done:end] = candidates[at, free_first[at, rank[done:end]]]
            done = end
        ids, order = new.sort()
        self._freed, self._new_ids, self._new_rows = freed, ids, rows[order]

    def stage_ids(self, ids: NDArray[np.int64]) -> None:
        """Prepare to replace all ids by the ids of another exported model."""
        self._replacement = self._map_copy(ids)

    def staged_rows(self, ids: Tensor) -> Tensor:
        """Return the rows that ids ``[n]`` will have after `swap`."""
        rows = self.rows_of(ids)
        at = find_positions(self._new_ids, ids)
        is_new = at >= 0
        rows[is_new] = self._new_rows[at[is_new]]
        return rows

    def swap(self) -> None:
        """Publish the staged ids to lookups."""
        if self._replacement is not None:
            self._ids = self._replacement
        self._ids[self._freed.numpy()] = cpu_cache.FREE
        self._ids[self._new_rows.numpy()] = self._new_ids.numpy()
        self.discard()

    def discard(self) -> None:
        """Drop the staged ids."""
        self._freed = self._new_ids = self._new_rows = torch.empty(0, dtype=torch.int64)
        self._replacement: NDArray[np.int64] | None = None


class _TableRows(NamedTuple):
    """Location of the rows of a table."""

    rows: ResidentRows | ArenaFiles  # rows of the table's arena
    first_slot: int  # slot of the table's first row in the arena
    ids: ServedIds | None  # finder of rows, for a dynamic table


class ServedTables:
    """All tables of an exported model.

    One thread may call `stage` while another thread looks up rows. No thread may look up rows during `swap`, which
    publishes all staged rows at once. The constructor raises `StoreError` if the memory is too small, or if it cannot
    create a file.
    """

    def __init__(
        self,
        model: ExportedModel,
        *,
        memory_bytes: int | None = None,  # limit for rows, on the computing device; None: unlimited
        redis: str | None = None,  # address of a Redis in front of tables in files; see `redis_records`
        directory: str | Path | None = None,  # for files of changed rows; None: the directory of temporary files
        device: torch.device | str = "cpu",
        backend: BackendName = "auto",
    ) -> None:
        # Numbers of ids by feature: invalid ids, which were dropped or hashed; ids beyond `max_len`; and ids without a
        # row in a dynamic table, which were dropped.
        self.bad_ids, self.truncated_ids, self.unknown_ids = Counter[str](), Counter[str](), Counter[str]()
        self._entries = model.manifest.tables
        resident, cache_bytes = choose_resident(self._entries, memory_bytes)
        self.collections: dict[str, ServedLookup] = {}
        self._tables: dict[str, _TableRows] = {}
        self._arenas: list[ResidentRows | ArenaFiles] = []
        for path, (tables, features) in model.collections().items():
            whole = {t.name: f"{path}.{t.name}" if path else t.name for t in tables}
            found = {name: model.ids(full) for name, full in whole.items()}
            ids = {name: ServedIds(whole[name], of, directory) for name, of in found.items() if of is not None}
            storages: dict[str, Storage] = {}
            for group in _group_by_layout([t for t in tables if whole[t.name] not in resident], self._entries, whole):
                names = tuple(whole[name] for name in group)
                share = sum(cache_bytes[name] for name in names)
                storage = FileStorage(model=model, tables=names, cache_bytes=share, changes=directory, redis=redis)
                storages |= dict.fromkeys(group, storage)
            counts = Discarded(self.bad_ids, self.truncated_ids), self.unknown_ids
            on = torch.device(device)
            lookup = ServedLookup(tables, features, storages, ids, *counts, device=on, backend=backend)
            self.collections[path] = lookup
            for arena in (arena for group in lookup.groups for arena in group.arenas):
                if arena.tables[0] in storages:
                    rows = ArenaFiles(arena, whole, redis)
                else:
                    rows = ResidentRows(arena, whole, model, directory)
                self._arenas.append(rows)
                for number, name in enumerate(arena.tables):
                    self._tables[whole[name]] = _TableRows(rows, arena.first_slots[number], ids.get(name))
        self._dynamic = {name: of.ids for name, of in self._tables.items() if of.ids is not None}

    @property
    def traffic(self) -> Traffic:
        """Counts of cache lookups and file reads so far."""
        return sum((rows.arena.store.traffic for rows in self._arenas), Traffic())

    @property
    def nbytes(self) -> int:
        """Bytes of memory for rows."""
        return sum(rows.arena.store.nbytes for rows in self._arenas)

    @property
    def changed_share(self) -> float:
        """Disk space of changed rows divided by the size of the exported files, or 0 if all rows are in memory."""
        changed = [rows.changed for rows in self._arenas if isinstance(rows, ArenaFiles)]
        below = sum(layer.disk_bytes for of in changed for layer in of.below.layers())
        return sum(of.disk_bytes for of in changed) / below if below else 0.0

    def layers(self) -> list[Records]:
        """Return all record layers of all tables in files, e.g. `CachedRecords` and `ChangedRecords`."""
        stores = [rows.arena.store for rows in self._arenas]
        return [layer for store in stores if isinstance(store, LazyStore) for layer in store.records.layers()]

    def close(self) -> None:
        """Close the files."""
        for layer in self.layers():
            layer.close()

    # -- changes ---------------------------------------------------------------------------------------------------

    def stage(self, change: ChangeSet, check: Callable[[], None] = lambda: None) -> None:
        """Prepare the rows of a set of changes. ``check`` is called regularly and may raise.

        Raise `DamagedError` if the files differ from their hashes, or the changes do not fit the model's tables. Raise
        `OSError` if the disk is full or fails.
        """
        for name in change.manifest.tables:
            if name not in self._entries:
                raise DamagedError(f"{change} has rows of table '{name}', which is not a table of the served model")
        self._stage_ids(change)
        last: dict[str, int] = {}
        for table, deleted, ids, vectors in change.rows():
            check()
            table_rows, entry = self._tables.get(table), self._entries[table]
            if table_rows is None:  # no feature of the model uses the table
                continue
            rows, fault = ids if table_rows.ids is None else table_rows.ids.staged_rows(ids), None
            if table_rows.ids is None and len(deleted):
                fault = f"deletes ids of table '{table}', which is not dynamic"
            elif not len(ids):
                continue
            elif table_rows.ids is None and (ids[0] <= last.get(table, -1) or bool((ids[1:] <= ids[:-1]).any())):
                fault = f"has unsorted ids of table '{table}'. Copy the changes again"
            elif vectors.shape[1] != entry.dim or int(rows.min()) < 0 or int(rows.max()) >= entry.rows:
                fault = (
                    f"has rows {int(rows.min()):,} … {int(rows.max()):,} of {vectors.shape[1]} columns, expected rows "
                    f"below {entry.rows:,} of {entry.dim} for table '{table}'"
                )
            if fault is not None:
                raise DamagedError(f"{change} {fault}")
            last[table] = int(ids[-1])
            table_rows.rows.stage(rows + table_rows.first_slot, records_of(entry, rows, vectors))

    def _stage_ids(self, change: ChangeSet) -> None:
        """Assign rows to new ids of dynamic tables. Rows of ids that the same change deletes can be assigned again."""
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
                raise DamagedError(f"{change} has an id of table '{table}' twice. Copy the changes again")
            self._dynamic[table].stage(gone, ids)

    def stage_model(self, model: ExportedModel, *, same_state: bool, check: Callable[[], None] = lambda: None) -> None:
        """Prepare to replace all rows by a different export of the same tables.

        With ``same_state``, the export contains the same rows as the served version. Then the only effect is that the
        files of changes are freed. ``check`` is called regularly and may raise.
        """
        for rows in self._arenas:
            # Even with equal states, an id of a dynamic table may have a different row in the export.
            is_same = same_state and self._dynamic.keys().isdisjoint(rows.tables)
            rows.stage_model(model, same_rows=is_same, check=check)
        for name, finder in self._dynamic.items():
            check()
            ids = model.ids(name)
            if ids is not None:
                finder.stage_ids(ids)

    def swap(self) -> None:
        """Publish all staged rows and ids to lookups."""
        for part in (*self._arenas, *self._dynamic.values()):
            part.swap()

    def tidy(self) -> None:
        """Free the disk space that the last swap has left unused."""
        for rows in self._arenas:
            rows.tidy()

    def discard(self) -> None:
        """Drop all staged rows and ids."""
        for part in (*self._arenas, *self._dynamic.values()):
            part.discard()


def choose_resident(tables: Mapping[str, TableEntry], memory_bytes: int | None) -> tuple[set[str], dict[str, int]]:
    """Return the names of the tables to load into memory, and the bytes of cache for each of the remaining tables.

    Raise `StoreError` if the memory is too small for one byte per row of the remaining tables (see `ChangedRecords`).
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
    marks = sum(tables[name].rows for name in sizes if name not in resident)  # a byte per row
    rest = memory_bytes - taken - marks
    if rest < 0:
        raise StoreError(
            f"memory for rows: got {memory_bytes:,} bytes, expected at least {taken + marks:,}, because finding "
            "changed rows takes one byte per row of the tables in files. Raise --memory_gib, or use fewer rows"
        )
    of_files = sum(size for name, size in sizes.items() if name not in resident)
    return resident, {name: rest * size // of_files for name, size in sizes.items() if name not in resident}


def _group_by_layout(
    tables: Sequence[Table], entries: Mapping[str, TableEntry], whole: Mapping[str, str]
) -> list[list[str]]:
    """Group the names of tables with equal record layouts. The tables of a group share a store.

    ``whole`` maps the name of each table in the collection to its name in the exported model, the key of ``entries``.
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for table in tables:
        layout = entries[whole[table.name]].records()
        found.setdefault((table.dim, table.dtype, layout.has_wide, layout.has_narrow), []).append(table.name)
    return list(found.values())


def same_tables(own: ModelManifest, other: ModelManifest) -> bool:
    """Return whether ``other`` has the inputs, tables and outputs of ``own``, so that it can replace ``own``.

    Lookup tables and boundaries of derived inputs may differ. For each input with a known type of ids in ``own``,
    ``other`` must have the same type. ``other`` may know the types of further inputs.
    """

    def form(manifest: ModelManifest) -> object:
        tables = {n: (t.rows, t.dim, t.dtype, t.fp32_rows, t.ids is None) for n, t in manifest.tables.items()}
        encoder = manifest.encoder.get("schema"), manifest.encoder.get("ids")
        return tables, manifest.features, manifest.labels, encoder, manifest.hash, manifest.dense.inputs

    kinds, others = (dict(manifest.encoder.get("id_kinds", {})) for manifest in (own, other))
    return form(own) == form(other) and {**others, **kinds} == others
