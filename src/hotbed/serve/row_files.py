"""Store the rows of served tables in memory, or in files behind a cache, and apply changes to them.

Tables in memory are `DenseStore`s (`ResidentRows`). Other tables are `LazyStore`s over these layers (`ArenaFiles`)::

    CachedRecords ─ ChangedRecords ─ (RedisRecords ─) RecordFiles

`RecordFiles` reads the exported files. `ChangedRecords` has two files without names, and writes changed records to them
while requests run, each at the offset of its slot. One byte per slot is the number of the file that requests read::

    slot      0  1  2  3
    file      0  0  1  0      0: the exported file; 1 and 2: the files of changes
    stage the changes of slots [2, 3]: slot 2 is written to file 2 and slot 3 to file 1, where no request reads them
    swap      0  0  2  1

So a swap is quick, changes need no memory, and no file is left when the process ends. Files are read by system calls,
because a truncated file with a memory mapping would kill the process, and because many reads can then run at once.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed.arena import Arena
from hotbed.errors import DamagedError, StoreError
from hotbed.files import unnamed_file
from hotbed.ops import BackendName, cpu_cache
from hotbed.serve.model_files import ExportedModel, TableEntry
from hotbed.serve.redis_records import RedisRecords
from hotbed.specs import RowDtype
from hotbed.store import DenseStore, LazyStore, RowStore, Span, Storage
from hotbed.store.records import Records, RecordsAbove, Use
from hotbed.store.row_cache import CachedRecords
from hotbed.store.slot_lists import SlotTensor, SortedSlots

READERS = 16  # threads that read files for all models; disks are fast if many reads are queued
LEAST_READS = 8  # smallest number of records per thread
CHANGED_ROWS = "changed rows"  # purpose of the files without names, for error messages
BYTES_AT_ONCE = 16 << 20  # bytes of records that are copied together
CACHE_TAG_BYTES = 25  # bytes that a cache needs per record besides the record: slot, time and number of uses, a mark
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_readers = ThreadPoolExecutor(READERS, "hotbed-serve-rows")


class _OpenFiles(NamedTuple):
    """Open files of records. The files are ordered by the slots of their records."""

    descriptors: list[int]
    firsts: Sequence[int]  # slot of each file's first record
    names: list[str]  # for error messages
    record_bytes: int

    def read(self, slots: Tensor, at: Tensor, out: Tensor) -> None:
        """Read the records of ascending slots ``[n]`` into the rows ``at [n]`` of ``out``, in several threads."""
        chunk = max(-(-len(slots) // READERS), LEAST_READS)
        parts = list(zip(slots.split(chunk), at.split(chunk), strict=True))
        calls = [_readers.submit(self._read, *part, out) for part in parts[1:]]
        for part in parts[:1]:
            self._read(*part, out)
        for call in calls:
            call.result()

    def _read(self, slots: Tensor, at: Tensor, out: Tensor) -> None:
        begin = 0
        while begin < len(slots):
            file = bisect_right(self.firsts, int(slots[begin])) - 1
            end = len(slots)
            if file + 1 < len(self.firsts):
                end = int(torch.searchsorted(slots, self.firsts[file + 1]))
            numbers, rows = slots[begin:end] - self.firsts[file], at[begin:end]
            targets = numbers.numpy(), rows.numpy()
            done = cpu_cache.read_records(self.descriptors[file], self.record_bytes, *targets, out.numpy())
            if done < len(numbers):
                self._raise_reason(file, int(numbers[done]))
            begin = end

    def _raise_reason(self, file: int, number: int) -> None:
        """Read a record again, and raise `StoreError` with the reason why the read fails."""
        reason = f"it ends before byte {(number + 1) * self.record_bytes:,}"
        try:
            found = len(os.pread(self.descriptors[file], self.record_bytes, number * self.record_bytes))
            reason = reason if found < self.record_bytes else "unknown reason"
        except OSError as error:
            reason = str(error)
        raise StoreError(f"row {number:,} of {self.names[file]} cannot be read ({reason}). Check the disk and the file")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RecordFiles(Records):
    """Read the records of exported tables from files.

    ``firsts`` has the slot of the first record of each file, in ascending order. The files stay open, so they may be
    removed from their directory.
    """

    def __init__(self, record_bytes: int, paths: Sequence[Path], firsts: Sequence[int]) -> None:
        super().__init__(record_bytes)
        descriptors: list[int] = []
        self._close = weakref.finalize(self, _close, descriptors)
        for path in paths:
            descriptors.append(os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
            if hasattr(os, "posix_fadvise"):  # so that the system does not read neighbouring rows ahead
                os.posix_fadvise(descriptors[-1], 0, 0, os.POSIX_FADV_RANDOM)
        self._files = _OpenFiles(descriptors, firsts, list(map(str, paths)), record_bytes)
        self._bytes = sum(os.fstat(descriptor).st_size for descriptor in descriptors)

    @property
    @override
    def nbytes(self) -> int:
        return 0

    @property
    @override
    def disk_bytes(self) -> int:
        return self._bytes

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        slots, order = slots.sort()
        self._files.read(slots, order, out)
        self.counted.read_bytes += len(slots) * out.shape[1]
        return torch.ones(len(slots), dtype=torch.bool)

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        raise StoreError("the rows of an exported model are read-only. Publish changes with hotbed export --since")

    @override
    def slots(self) -> SortedSlots:
        return SlotTensor(torch.arange(self._bytes // self.record_bytes))

    @override
    def clear(self) -> None:
        raise StoreError("the rows of an exported model are read-only, so clear() is not supported")

    @override
    def close(self) -> None:
        self._close()


class ChangedRecords(RecordsAbove):
    """Overlay changed records on the records of an exported model (``below``), as the top of this file describes.

    One thread may call `stage` while other threads read. No thread may read during `swap`. The files are in
    ``directory`` (default: the directory of temporary files). Raise `StoreError` if no file can be created there.
    """

    def __init__(self, below: Records, slots: int, directory: str | Path | None = None) -> None:
        super().__init__(below)
        self._where = torch.zeros(slots, dtype=torch.uint8)
        self._staged: list[tuple[Tensor, Tensor]] = []  # slots, and the file of each slot's staged record
        self._replacement: Records | None = None  # records below after the next swap
        self._outdated: Records | None = None  # records below before the last swap, until `tidy`
        descriptors = [unnamed_file(directory, CHANGED_ROWS) for _ in range(2)]
        self._close = weakref.finalize(self, _close, descriptors)
        folder = str(directory or tempfile.gettempdir())
        self._files = [_OpenFiles([d], [0], [f"the changes in {folder}"], self.record_bytes) for d in descriptors]

    @property
    @override
    def nbytes(self) -> int:
        return self._where.nbytes

    @property
    @override
    def disk_bytes(self) -> int:
        return sum(getattr(os.fstat(f.descriptors[0]), "st_blocks", 0) * 512 for f in self._files)

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        where = self._where[slots]
        if not bool(where.any()):
            return self.below.read(slots, out, use=use)
        for number, file in enumerate(self._files, start=1):
            at = (where == number).nonzero()[:, 0]
            own, order = slots[at].sort()
            file.read(own, at[order], out)
            self.counted.read_bytes += len(own) * self.record_bytes
        rest = (where == 0).nonzero()[:, 0]
        if len(rest):
            found = torch.empty(len(rest), out.shape[1], dtype=torch.uint8)
            self.below.read(slots[rest], found, use=use)
            out[rest] = found
        return torch.ones(len(slots), dtype=torch.bool)

    def stage(self, slots: Tensor, records: Tensor) -> None:
        """Write records ``[n, record_bytes]`` of distinct slots ``[n]``. Requests read them after the next `swap`.

        Raise `OSError` if the disk is full or fails.
        """
        slots, order = slots.sort()
        records = records[order]
        target = 2 - (self._where[slots] == 2).to(torch.uint8)  # the file that requests do not read for the slot
        for number, file in enumerate(self._files, start=1):
            at = (target == number).nonzero()[:, 0]
            write_all(file.descriptors[0], slots[at], records[at])
        self._staged.append((slots, target))

    def stage_below(self, below: Records) -> None:
        """Prepare to replace the records below, and to drop all changes, at the next `swap`."""
        self._replacement, self._fresh = below, torch.zeros_like(self._where)

    def swap(self) -> list[Tensor]:
        """Publish the staged records to reads, and return their slots."""
        if self._replacement is not None:
            self._outdated = self.below
            self.below, self._where, self._replacement = self._replacement, self._fresh, None
        for slots, target in self._staged:
            self._where[slots] = target
        staged, self._staged = self._staged, []
        return [slots for slots, _ in staged]

    def tidy(self) -> None:
        """After a swap that replaced the records below, close the old records and free the space of their changes."""
        if self._outdated is not None:
            self._outdated.close()
            self._outdated = None
            for file in self._files:
                os.ftruncate(file.descriptors[0], 0)

    def discard(self) -> None:
        """Drop the staged records. In each file, free the disk space after the last record that requests read."""
        self._staged = []
        for number, file in enumerate(self._files, start=1):
            read = (self._where == number).nonzero()
            os.ftruncate(file.descriptors[0], (int(read[-1]) + 1) * self.record_bytes if len(read) else 0)
        if self._replacement is not None:
            self._replacement.close()
            self._replacement = None

    @override
    def close(self) -> None:
        self._close()
        self.below.close()


def write_all(file: int, numbers: Tensor, records: Tensor) -> None:
    """Write records ``[n, record_bytes]`` at ascending record numbers ``[n]``. Raise `OSError` on failure."""
    done = cpu_cache.write_records(file, numbers.numpy(), records.contiguous().numpy())
    if done < len(numbers):
        size = records.shape[1]
        for number in numbers[done:].tolist():  # fails for the same reason, and raises it
            os.pwrite(file, bytes(size), number * size)
        raise OSError("changed rows could not be written, for an unknown reason")


# -- rows of an arena -----------------------------------------------------------------------------------------------


class ResidentRows:
    """Rows of an arena in device memory.

    Changed rows are staged in a file, and `swap` copies them to the arena. One thread may stage while another thread
    looks up rows. No thread may look up rows during `swap`. ``tables`` maps the arena's tables to their exported names.
    """

    def __init__(
        self, arena: Arena, tables: Mapping[str, str], model: ExportedModel, directory: str | Path | None
    ) -> None:
        assert isinstance(arena.store, DenseStore)
        self.arena, self._store = arena, arena.store
        self.tables = [tables[name] for name in arena.tables]
        self._entries = [model.manifest.tables[name] for name in self.tables]
        self._size = max(entry.record_bytes for entry in self._entries)
        self._file = unnamed_file(directory, CHANGED_ROWS)
        self._close = weakref.finalize(self, os.close, self._file)
        self._staged: list[tuple[int, Tensor]] = []  # number of the table, and its slots
        self._count = 0
        for number in range(len(self.tables)):
            for slots, records in self._records_of(model, number):
                self._put(number, slots, records)

    def stage(self, slots: Tensor, records: Tensor) -> None:
        """Write records ``[n, record_bytes]`` of distinct slots ``[n]`` of one table to the file, for the next `swap`.

        Raise `OSError` if the disk is full or fails.
        """
        number = int(self.arena.locate(slots[:1])[0])
        padded = torch.zeros(len(slots), self._size, dtype=torch.uint8)
        padded[:, : records.shape[1]] = records
        write_all(self._file, torch.arange(self._count, self._count + len(slots)), padded)
        self._staged.append((number, slots))
        self._count += len(slots)

    def stage_model(self, model: ExportedModel, *, same_rows: bool, check: Callable[[], None]) -> None:
        """Stage the rows of an exported model that differ from the served rows.

        The caller sets ``same_rows`` if it knows that no row differs, so no row is compared. ``check`` is called for
        each block of rows, and may raise an exception to cancel.
        """
        for number in () if same_rows else range(len(self.tables)):
            entry = self._entries[number]
            for slots, records in self._records_of(model, number):
                check()
                wide = entry.is_wide(slots - self.arena.first_slots[number])
                own, theirs = self._stored(slots), entry.records().stored(records, wide)
                differs = torch.zeros(len(slots), dtype=torch.bool)
                for name, values in theirs.items():
                    at = wide if name == "wide" else ~wide
                    differs[at] |= (values.view(own[name].dtype) != own[name]).any(1)
                if bool(differs.any()):
                    self.stage(slots[differs], records[differs])

    def swap(self) -> None:
        """Copy the staged rows to the arena."""
        done = 0
        step = max(BYTES_AT_ONCE // self._size, 1)
        for number, slots in self._staged:
            size = self._entries[number].record_bytes
            for some in slots.split(step):
                records = torch.empty(len(some), self._size, dtype=torch.uint8)
                targets = np.arange(done, done + len(some)), np.arange(len(some))
                if cpu_cache.read_records(self._file, self._size, *targets, records.numpy()) < len(some):
                    raise OSError("staged rows cannot be read back")
                self._put(number, some, records[:, :size].contiguous())
                done += len(some)
        self._staged, self._count = [], 0

    def discard(self) -> None:
        """Drop the staged rows."""
        self._staged, self._count = [], 0
        self.tidy()

    def tidy(self) -> None:
        """Free the disk space of the staged rows, which `swap` has copied to the arena."""
        os.ftruncate(self._file, 0)

    def _records_of(self, model: ExportedModel, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the slots ``[n]`` and records ``[n, record_bytes]`` of table ``number`` of the arena, in blocks."""
        first, entry = self.arena.first_slots[number], model.manifest.tables[self.tables[number]]
        size, path = entry.record_bytes, model.path(entry.file)
        step = max(BYTES_AT_ONCE // size, 1)
        for row in range(0, entry.rows, step):
            count = min(step, entry.rows - row)
            data = np.fromfile(path, np.uint8, count * size, offset=row * size)
            if len(data) < count * size:
                raise DamagedError(f"{model}/{entry.file} ends before row {row + count:,}. Copy the directory again")
            yield torch.arange(first + row, first + row + count), torch.from_numpy(data).view(count, size)

    def _put(self, number: int, slots: Tensor, records: Tensor) -> None:
        """Decode records, and write them to the slots of table ``number`` of the arena."""
        entry, arrays = self._entries[number], self._store.arrays()
        slots = slots.to(self._store.device)
        wide = entry.is_wide(slots.cpu() - self.arena.first_slots[number])
        positions = self._store.positions(slots)
        for name, values in entry.records().stored(records, wide).items():
            bits = _BITS[values.element_size()]
            values = values.to(self._store.device).view(bits)
            arrays[name].view(bits).index_copy_(0, positions[name], values)

    def _stored(self, slots: Tensor) -> dict[str, Tensor]:
        """Return CPU copies of the stored bits of these slots, by the name of the array in the store."""
        arrays, positions = self._store.arrays(), self._store.positions(slots.to(self._store.device))
        return {n: arrays[n].view(_BITS[arrays[n].element_size()])[at].cpu() for n, at in positions.items()}


class ArenaFiles:
    """Rows of an arena (several shards in one store) that are read from files, through a cache.

    It has the methods of `ResidentRows`, which holds rows in memory.
    """

    def __init__(self, arena: Arena, tables: Mapping[str, str], redis: str | None) -> None:
        assert isinstance(arena.store, LazyStore)
        self.arena, self._redis = arena, redis
        self.tables = [tables[name] for name in arena.tables]
        layers = arena.store.records.layers()
        self.changed = next(layer for layer in layers if isinstance(layer, ChangedRecords))
        self.cache = next((layer for layer in layers if isinstance(layer, CachedRecords)), None)
        self.stage, self.tidy = self.changed.stage, self.changed.tidy
        self._forgets_all = False

    def stage_model(self, model: ExportedModel, *, same_rows: bool, check: Callable[[], None]) -> None:
        """Prepare to read all rows from the files of another exported model; see `ResidentRows.stage_model`."""
        check()
        self.changed.stage_below(base_records(model, self.tables, self._redis))
        self._forgets_all = not same_rows

    def swap(self) -> None:
        """Publish the staged rows, and drop the changed rows from the cache."""
        changed: list[Tensor | None] = [*self.changed.swap(), *([None] if self._forgets_all else [])]
        self._forgets_all = False
        if self.cache is not None:
            for slots in changed:
                self.cache.forget(slots)  # None: all rows

    def discard(self) -> None:
        """Drop the staged rows."""
        self.changed.discard()
        self._forgets_all = False


class _FileStore(LazyStore):
    """A store of rows in the files of an exported model."""

    @override
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        """Do nothing, because exported rows need no initial values."""


@dataclass(frozen=True, kw_only=True)
class FileStorage(Storage):
    """Build stores that read the files of an exported model. Tables with the same storage object share an arena."""

    model: ExportedModel
    tables: tuple[str, ...]  # names in the exported model, in the order of their slots
    cache_bytes: int
    changes: str | Path | None  # directory for changed rows; None: the directory of temporary files
    redis: str | None

    @override
    def make(
        self, spans: Sequence[Span], dim: int, *, dtype: RowDtype, device: torch.device, backend: BackendName
    ) -> RowStore:
        records = partial(self._records_on, backend)
        return _FileStore(spans, dim, records, tier="disk", dtype=dtype, device=device, backend=backend)

    def _records_on(self, backend: BackendName, record_bytes: int, slots: int, device: torch.device) -> Records:
        changed = ChangedRecords(base_records(self.model, self.tables, self.redis), slots, self.changes)
        rows = min(self.cache_bytes // (record_bytes + CACHE_TAG_BYTES), slots)
        if not rows:
            return changed
        return CachedRecords(changed, rows, device=None if device.type == "cpu" else device, backend=backend)


def base_records(model: ExportedModel, tables: Sequence[str], redis: str | None) -> Records:
    """Open the records of exported tables, in the order of ``tables``. Redis caches the records if ``redis`` is set."""
    entries = [model.manifest.tables[name] for name in tables]
    *firsts, _ = accumulate((entry.rows for entry in entries), initial=0)
    records = RecordFiles(entries[0].record_bytes, [model.path(entry.file) for entry in entries], firsts)
    if redis is None:
        return records
    rows = [(name, entry.rows) for name, entry in zip(tables, entries, strict=True)]
    return RedisRecords(records, rows, model.manifest.state, redis)


def records_of(entry: TableEntry, rows: Tensor, vectors: Tensor) -> Tensor:
    """Encode vectors ``[n, D]`` of rows ``[n]`` as records. The dtype of the rows must represent them exactly."""
    layout = entry.records()
    records = layout.blank(len(rows), rows.device)
    layout.put_rows(records, entry.is_wide(rows), vectors)
    return records
