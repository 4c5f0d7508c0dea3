"""Keep the rows of tables that serve: in memory where they fit, else in files behind a cache; both take changes.

Tables in memory are training's `DenseStore`s: the kernels read them in place. Records that change are staged in a file,
and copied into place by the swap. Others are `LazyStore`s over these records::

    CachedRecords ─ ChangedRecords ─ (RedisRecords ─) RecordFiles

A swap says where the newest records are, and drops those that changed from the cache.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed.arena import Arena
from hotbed.errors import DamagedError
from hotbed.files import unnamed_file
from hotbed.ops import BackendName, cpu_cache, host_backend
from hotbed.serve.format import ExportedModel, TableEntry
from hotbed.serve.record_files import CHANGED_ROWS, ChangedRecords, RecordFile, RecordFiles, write_all
from hotbed.serve.redis_records import RedisRecords
from hotbed.specs import RowDtype
from hotbed.store import DenseStore, LazyStore, RowStore, Span, Storage
from hotbed.store.cached import CachedRecords
from hotbed.store.records import Records

BYTES_AT_ONCE = 16 << 20
"""Of records that are copied together."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Tables = Mapping[str, str]
"""Names of tables in an exported model, by those that an arena has for them."""


class ServedRows(ABC):
    """The rows of an arena's tables, with their names in the exported model.

    One thread may stage while another looks up; no thread may look up during `swap`.
    """

    def __init__(self, arena: Arena, tables: Tables) -> None:
        self.arena = arena
        self.tables = [tables[name] for name in arena.tables]

    @abstractmethod
    def stage(self, slots: Tensor, records: Tensor) -> None:
        """Prepare records ``[n, record_bytes]`` of distinct slots ``[n]``; an `OSError` if the disk is full."""

    @abstractmethod
    def stage_model(self, model: ExportedModel, *, same_rows: bool, check: Callable[[], None]) -> None:
        """Prepare to take the rows of another exported model; ``same_rows``: each slot's are those that it has.

        ``check`` is called for each chunk of rows.
        """

    @abstractmethod
    def swap(self) -> None:
        """Let what was staged be looked up from now on."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was staged."""

    def tidy(self) -> None:
        """Free what nobody needs since the last swap."""
        return


class ResidentRows(ServedRows):
    """Rows in the memory of the device, in a `DenseStore`. All rows of the model are read."""

    def __init__(self, arena: Arena, tables: Tables, model: ExportedModel, directory: Path | None) -> None:
        super().__init__(arena, tables)
        assert isinstance(arena.store, DenseStore)
        self._store = arena.store
        self._size = max(model.manifest.tables[name].record_bytes for name in self.tables)
        self._entries = [model.manifest.tables[name] for name in self.tables]
        self._file = unnamed_file(directory, CHANGED_ROWS)
        self._close = weakref.finalize(self, os.close, self._file)
        self._staged: list[tuple[int, Tensor]] = []
        self._count = 0
        for number in range(len(self.tables)):
            for slots, records in self._of(model, number):
                self._put(number, slots, records)

    def _of(self, model: ExportedModel, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slots and records of a table of an exported model, chunk by chunk."""
        first, name = self.arena.first_slots[number], self.tables[number]
        for rows, records in chunks(model, name):
            yield rows + first, records

    def _put(self, number: int, slots: Tensor, records: Tensor) -> None:
        """Overwrite the rows of slots of a table."""
        entry, arrays = self._entries[number], self._store.arrays()
        slots = slots.to(self._store.device)
        wide = entry.is_wide(slots.cpu() - self.arena.first_slots[number])
        places = self._store.places(slots)
        for name, values in entry.records().stored(records, wide).items():
            bits = _BITS[values.element_size()]
            values = values.to(self._store.device).view(bits)
            arrays[name].view(bits).index_copy_(0, places[name], values)

    def _taken(self, number: int, slots: Tensor) -> dict[str, Tensor]:
        """Copy what slots of a table are stored as, to the CPU."""
        arrays, places = self._store.arrays(), self._store.places(slots.to(self._store.device))
        return {n: arrays[n].view(_BITS[arrays[n].element_size()])[at].cpu() for n, at in places.items()}

    @override
    def stage(self, slots: Tensor, records: Tensor) -> None:
        number = int(self.arena.locate(slots[:1])[0])
        padded = torch.zeros(len(slots), self._size, dtype=torch.uint8)
        padded[:, : records.shape[1]] = records
        write_all(self._file, torch.arange(self._count, self._count + len(slots)), padded)
        self._staged.append((number, slots))
        self._count += len(slots)

    @override
    def stage_model(self, model: ExportedModel, *, same_rows: bool, check: Callable[[], None]) -> None:
        for number in () if same_rows else range(len(self.tables)):
            entry = self._entries[number]
            for slots, records in self._of(model, number):
                check()
                wide = entry.is_wide(slots - self.arena.first_slots[number])
                own, theirs = self._taken(number, slots), entry.records().stored(records, wide)
                differs = torch.zeros(len(slots), dtype=torch.bool)
                for name, values in theirs.items():
                    at = wide if name == "wide" else ~wide
                    differs[at] |= (values.view(own[name].dtype) != own[name]).any(1)
                if bool(differs.any()):
                    self.stage(slots[differs], records[differs])

    @override
    def swap(self) -> None:
        done = 0
        step = max(BYTES_AT_ONCE // self._size, 1)
        for number, slots in self._staged:
            size = self._entries[number].record_bytes
            for some in slots.split(step):
                records = torch.empty(len(some), self._size, dtype=torch.uint8)
                numbers, at = torch.arange(done, done + len(some)), torch.arange(len(some))
                places = numbers.numpy(), at.numpy()
                if cpu_cache.read_records(self._file, self._size, *places, records.numpy()) < len(some):
                    raise OSError("changed rows that were written cannot be read again")
                self._put(number, some, records[:, :size].contiguous())
                done += len(some)
        self._staged, self._count = [], 0

    @override
    def discard(self) -> None:
        self._staged, self._count = [], 0
        os.ftruncate(self._file, 0)

    @override
    def tidy(self) -> None:
        os.ftruncate(self._file, 0)


class FileRows(ServedRows):
    """Rows in files, behind a cache; made by `storage`, which an arena is made with."""

    def __init__(self, arena: Arena, tables: Tables, redis: str | None) -> None:
        super().__init__(arena, tables)
        assert isinstance(arena.store, LazyStore)
        layers = arena.store.records.layers()
        self.changed = next(layer for layer in layers if isinstance(layer, ChangedRecords))
        self.cache = next((layer for layer in layers if isinstance(layer, CachedRecords)), None)
        self._redis = redis
        self._changed_slots: list[Tensor] = []
        self._forgets_all = False

    @override
    def stage(self, slots: Tensor, records: Tensor) -> None:
        self.changed.stage(slots, records)
        self._changed_slots.append(slots)

    @override
    def stage_model(self, model: ExportedModel, *, same_rows: bool, check: Callable[[], None]) -> None:
        self.changed.stage_below(base_records(model, self.tables, self._redis))
        self._forgets_all = not same_rows

    @override
    def swap(self) -> None:
        self.changed.swap()
        if self.cache is not None:
            if self._forgets_all:
                self.cache.forget()
            for slots in self._changed_slots:
                self.cache.forget(slots)
        self._changed_slots, self._forgets_all = [], False

    @override
    def discard(self) -> None:
        self.changed.discard()
        self._changed_slots, self._forgets_all = [], False

    @override
    def tidy(self) -> None:
        self.changed.tidy()


class _ServedStore(LazyStore):
    """Rows of an exported model, which all have a record."""

    @override
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        """Leave the rows as they were exported."""


@dataclass(frozen=True)
class FileStorage(Storage):
    """Make stores over files; tables that are given one such object share an arena."""

    records: Callable[[int, int, torch.device, BackendName], Records] | None = None

    @override
    def make(
        self, spans: Sequence[Span], dim: int, *, dtype: RowDtype, device: torch.device, backend: BackendName
    ) -> RowStore:
        records = self.records
        assert records is not None

        def make(record_bytes: int, slots: int, device: torch.device) -> Records:
            return records(record_bytes, slots, device, backend)

        return _ServedStore(spans, dim, make, tier="disk", dtype=dtype, device=device, backend=backend)


def file_storage(
    model: ExportedModel, tables: Sequence[str], cache_bytes: int, directory: Path | None, redis: str | None
) -> FileStorage:
    """Storage of tables of an exported model that are in files; see `FileRows`."""

    def make(record_bytes: int, slots: int, device: torch.device, backend: BackendName) -> Records:
        changed = ChangedRecords(base_records(model, tables, redis), slots, directory)
        rows = min(cache_bytes // (record_bytes + CACHE_TAG_BYTES), slots)
        if not rows:
            return changed
        if device.type == "cpu":
            return CachedRecords(changed, rows, backend=host_backend(backend, device))
        return CachedRecords(changed, rows, device=device, backend=backend)

    return FileStorage(records=make)


CACHE_TAG_BYTES = 25
"""What a cache needs for a record besides its bytes: its slot, when and how often it was used, a mark."""


def base_records(model: ExportedModel, tables: Sequence[str], redis: str | None) -> Records:
    """Records of tables of an exported model, one after the other, with Redis in front of them if there is one."""
    entries = [model.manifest.tables[name] for name in tables]
    files: list[RecordFile] = []
    first = 0
    for entry in entries:
        files.append(RecordFile(model.path(entry.file), first))
        first += entry.rows
    records = RecordFiles(entries[0].record_bytes, files)
    if redis is None:
        return records
    return RedisRecords(
        records, [(n, e.rows) for n, e in zip(tables, entries, strict=True)], model.manifest.state, redis
    )


def chunks(model: ExportedModel, table: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows ``[n]`` and records ``[n, record_bytes]`` of a table of an exported model, in order.

    Raise `DamagedError` if the file is shorter than in its manifest.
    """
    entry = model.manifest.tables[table]
    size, path = entry.record_bytes, model.path(entry.file)
    step = max(BYTES_AT_ONCE // size, 1)
    for first in range(0, entry.rows, step):
        count = min(step, entry.rows - first)
        data = np.fromfile(path, np.uint8, count * size, offset=first * size)
        if len(data) < count * size:
            raise DamagedError(f"{model}/{entry.file} ends before row {first + count:,}; copy the directory again")
        yield torch.arange(first, first + count), torch.from_numpy(data).view(count, size)


def encoded(entry: TableEntry, rows: Tensor, vectors: Tensor) -> Tensor:
    """Make records of rows ``[n]`` with these vectors ``[n, D]``, which are what rows of this dtype can be."""
    layout = entry.records()
    records = layout.blank(len(rows), rows.device)
    layout.put_rows(records, entry.is_wide(rows), vectors)
    return records
