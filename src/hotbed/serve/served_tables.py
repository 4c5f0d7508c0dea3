"""Put the tables of an exported model into memory and files, look features up in them, and apply changes.

Which memory a table is in: all are in memory if they fit. Else the smallest are, in up to half of it, and the others
share the rest as caches over their files, in proportion to their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.dynamic import DynamicTables
from hotbed.embed.local_tables import LocalTables
from hotbed.errors import DamagedError, StoreError
from hotbed.ops import BackendName
from hotbed.serve.format import ChangeSet, ExportedModel, ModelManifest, TableEntry
from hotbed.serve.served_ids import ServedIds
from hotbed.serve.served_rows import FileRows, ResidentRows, ServedRows, encoded, file_storage
from hotbed.specs import ANY_ID, Feature, Table
from hotbed.store import LazyStore, Storage, Traffic
from hotbed.store.records import Records


class ServedCollection(EmbeddingCollection):
    """The tables of a collection of an exported model, read only."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        storages: dict[str, Storage],  # storage of each table
        ids: dict[str, ServedIds],  # row finders of dynamic tables
        *,
        device: torch.device,  # of the looked-up vectors
        backend: BackendName,
    ) -> None:
        super().__init__(tables, features, device="meta", backend=backend)
        zeros = [replace(table, init_bound=0.0) for table in tables]  # until the exported rows are there
        self._groups = [
            LocalTables(dim, own, features, seed=0, device=device, backend=backend, storages=storages)
            for dim, own in {t.dim: [o for o in zeros if o.dim == t.dim] for t in tables}.items()
        ]
        self._has_dynamic = bool(ids)
        self._dynamic = DynamicTables((), features, served=ids)
        self._rows = {t.name: ANY_ID if t.name in ids else t.rows for t in tables}
        self.eval()

    @override
    def train(self, mode: bool = True) -> ServedCollection:
        """Stay in evaluation mode: nothing here is trained."""
        super().train(False)
        return self


class _Place(NamedTuple):
    """Where the rows of a table are: arena, first slot in it; and what finds the rows of its ids, if it is dynamic."""

    rows: ServedRows
    first_slot: int
    ids: ServedIds | None


class ServedTables:
    """All tables of an exported model.

    One thread may `stage` while another looks up; no thread may look up during `swap`, which publishes all staged rows
    at once. ``directory`` has the files for changed rows (default: the directory of temporary files). Raise
    `StoreError` if the memory is too small, or no file can be created.
    """

    def __init__(
        self,
        model: ExportedModel,
        *,
        memory_bytes: int | None = None,  # limit for rows, on the computing device; None: unlimited
        redis: str | None = None,  # address of a Redis that has rows of tables in files; see `redis_records`
        directory: Path | None = None,
        device: torch.device | str = "cpu",
        backend: BackendName = "auto",
    ) -> None:
        place = torch.device(device)
        self._entries = model.manifest.tables
        resident, cache_bytes = placement(self._entries, memory_bytes)
        self.collections: dict[str, ServedCollection] = {}
        self._places: dict[str, _Place] = {}
        self._arenas: list[ServedRows] = []
        for path, (tables, features) in model.collections().items():
            whole = {t.name: f"{path}.{t.name}" if path else t.name for t in tables}
            ids = {name: self._ids_of(model, full, directory) for name, full in whole.items() if self._is_dynamic(full)}
            storages: dict[str, Storage] = {}
            for alike in _alike([t for t in tables if whole[t.name] not in resident], self._entries, whole):
                names = [whole[name] for name in alike]
                share = sum(cache_bytes[name] for name in names)
                storages |= dict.fromkeys(alike, file_storage(model, names, share, directory, redis))
            collection = ServedCollection(tables, features, storages, ids, device=place, backend=backend)
            self.collections[path] = collection
            for arena in (arena for group in collection._groups for arena in group.arenas):
                if arena.tables[0] in storages:
                    rows = FileRows(arena, whole, redis)
                else:
                    rows = ResidentRows(arena, whole, model, directory)
                self._arenas.append(rows)
                for number, name in enumerate(arena.tables):
                    self._places[whole[name]] = _Place(rows, arena.first_slots[number], ids.get(name))

    def _is_dynamic(self, table: str) -> bool:
        return self._entries[table].ids is not None

    def _ids_of(self, model: ExportedModel, table: str, directory: Path | None) -> ServedIds:
        ids = model.ids(table)
        assert ids is not None
        return ServedIds(table, ids, directory)

    # -- what it does ----------------------------------------------------------------------------------------------

    @property
    def unknown_ids(self) -> Counter[str]:
        """By feature of a dynamic table, how many ids had no row so far; they are left out of their bags."""
        return sum((c.unadmitted_ids.copy() for c in self.collections.values()), Counter())

    @property
    def bad_ids(self) -> Counter[str]:
        """By feature, how many ids were dropped or hashed so far."""
        return sum((c.bad_ids.copy() for c in self.collections.values()), Counter())

    @property
    def traffic(self) -> Traffic:
        """Counts of what caches and files did so far."""
        return sum((c.traffic for c in self.collections.values()), Traffic())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows take."""
        return sum(c.nbytes for c in self.collections.values())

    @property
    def changed_share(self) -> float:
        """Disk that changed rows take, as a share of the exported files below them; 0 where all rows are in memory."""
        changed = [rows.changed for rows in self._arenas if isinstance(rows, FileRows)]
        below = sum(layer.disk_bytes for of in changed for layer in of.below.layers())
        return sum(of.disk_bytes for of in changed) / below if below else 0.0

    def layers(self) -> list[Records]:
        """List what keeps the rows of tables that are in files."""
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
            if place is None:  # no feature of the model looks it up
                continue
            if place.ids is not None:
                rows = place.ids.staged_rows(ids)
            elif len(deleted):
                raise DamagedError(f"{change} deletes ids of table '{table}', which is not dynamic")
            else:
                rows = ids
            if not len(ids):
                continue
            if place.ids is None:
                if int(ids[0]) <= last.get(table, -1) or bool((ids[1:] <= ids[:-1]).any()):
                    raise DamagedError(f"{change} has ids of table '{table}' that do not rise; copy it again")
                last[table] = int(ids[-1])
            if vectors.shape[1] != entry.dim or int(rows.min()) < 0 or int(rows.max()) >= entry.rows:
                raise DamagedError(
                    f"{change} has rows {int(rows.min()):,} … {int(rows.max()):,} of {vectors.shape[1]} columns, and "
                    f"table '{table}' has {entry.rows:,} rows of {entry.dim}"
                )
            place.rows.stage(rows + place.first_slot, encoded(entry, rows, vectors))

    def _stage_ids(self, change: ChangeSet) -> None:
        """Find rows for new ids of dynamic tables, of all of the change: rows that are deleted in it are free."""
        deleted: dict[str, list[Tensor]] = {}
        upserted: dict[str, list[Tensor]] = {}
        dynamic = {name: place.ids for name, place in self._places.items() if place.ids is not None}
        if not dynamic.keys() & change.manifest.tables.keys():
            return
        for table, gone, ids, _ in change.rows():
            if table in dynamic:
                deleted.setdefault(table, []).append(gone)
                upserted.setdefault(table, []).append(ids)
        for table, parts in deleted.items():
            gone, ids = torch.cat(parts), torch.cat(upserted[table])
            if len(torch.cat([gone, ids]).unique()) < len(gone) + len(ids):
                raise DamagedError(f"{change} has an id of table '{table}' twice; copy it again")
            dynamic[table].stage(gone, ids)

    def stage_model(self, model: ExportedModel, *, same_state: bool, check: Callable[[], None] = lambda: None) -> None:
        """Prepare to take the rows of another exported model of these tables; ``same_state``: the very same rows.

        Then files that changes have made are not needed any more. ``check`` is called now and then, and may raise.
        """
        for rows in self._arenas:
            # An id of a dynamic table may be in another row there.
            dynamic = any(self._is_dynamic(name) for name in rows.tables)
            rows.stage_model(model, same_rows=same_state and not dynamic, check=check)
        for name, place in self._places.items():
            check()
            ids = model.ids(name)
            if place.ids is not None and ids is not None:
                place.ids.stage_ids(ids)

    def swap(self) -> None:
        """Let all that was staged be found from now on."""
        for rows in self._arenas:
            rows.swap()
        for place in self._places.values():
            if place.ids is not None:
                place.ids.swap()

    def tidy(self) -> None:
        """Free what nobody needs since the last swap."""
        for rows in self._arenas:
            rows.tidy()

    def discard(self) -> None:
        """Forget what was staged."""
        for rows in self._arenas:
            rows.discard()
        for place in self._places.values():
            if place.ids is not None:
                place.ids.discard()


def placement(tables: dict[str, TableEntry], memory_bytes: int | None) -> tuple[set[str], dict[str, int]]:
    """Choose the tables that are in memory, and the cache bytes of the others.

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
    marks = sum(tables[name].rows for name in sizes if name not in resident)  # a byte a row, see `ChangedRecords`
    rest = memory_bytes - taken - marks
    if rest < 0:
        raise StoreError(
            f"memory is {memory_bytes:,} bytes, but tables in files need {taken + marks:,} to find changed rows; give "
            "more, or put fewer rows into a model"
        )
    of_files = sum(size for name, size in sizes.items() if name not in resident)
    return resident, {name: rest * size // of_files for name, size in sizes.items() if name not in resident}


def _alike(tables: Sequence[Table], entries: dict[str, TableEntry], whole: dict[str, str]) -> list[list[str]]:
    """Group tables whose records are alike, so that one store can have them."""
    found: dict[tuple[object, ...], list[str]] = {}
    for table in tables:
        layout = entries[whole[table.name]].records()
        found.setdefault((table.dim, table.dtype, layout.has_wide, layout.has_narrow), []).append(table.name)
    return list(found.values())


def same_tables(own: ModelManifest, other: ModelManifest) -> bool:
    """Whether another model has the same inputs, tables and outputs, so that it can take the place of one.

    Looked-up tables and boundaries of derived inputs may be others, as may ids of columns whose kind was not known.
    """

    def form(manifest: ModelManifest) -> object:
        tables = {n: (t.rows, t.dim, t.dtype, t.fp32_rows, t.ids is None) for n, t in manifest.tables.items()}
        encoder = manifest.encoder.get("schema"), manifest.encoder.get("ids")
        return tables, manifest.features, manifest.labels, encoder, manifest.hash, manifest.dense.inputs

    kinds, others = (dict(manifest.encoder.get("id_kinds", {})) for manifest in (own, other))
    return form(own) == form(other) and {**others, **kinds} == others
