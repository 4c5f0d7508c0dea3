"""Keyed records: a slot's record is a place in an append-only slab, in memory or in a file.

Only slots that were written have a place, so a table may have more rows than the disk has bytes.

`Index`: the number of each key, in the order in which keys were added.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.ops import cpu_records
from hotbed.ops.cpu_runtime import launch
from hotbed.store import memory
from hotbed.store.records import Records, Traffic, Use, positions

_FIRST = 1 << 10


class Index:
    """Numbers 0, 1, 2, … of int64 keys that are not negative; any thread may `find` while one adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._count = 0
            self._keys = torch.empty(_FIRST // 2, dtype=torch.int64)
            self._make_places(_FIRST)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._keys.nbytes + self._places.nbytes + self._numbers.nbytes

    @property
    def keys(self) -> Tensor:
        """All keys ``[n]``, by number."""
        return self._keys[: self._count]

    def find(self, keys: Tensor) -> Tensor:
        """Number of each key ``[n]``, −1 where it is not there."""
        out = torch.empty(len(keys), dtype=torch.int64)
        with self._lock:
            launch(cpu_records.find, self._places.numpy(), self._numbers.numpy(), keys.numpy(), out.numpy())
        return out

    def add(self, keys: Tensor) -> Tensor:
        """Add distinct keys ``[n]`` that are not there, and return their numbers."""
        with self._lock:
            first, count = self._count, self._count + len(keys)
            if count > len(self._keys):
                grown = torch.empty(max(count, 2 * len(self._keys)), dtype=torch.int64)
                grown[:first] = self._keys[:first]
                self._keys = grown
            self._keys[first:count] = keys
            size = len(self._places)
            if 2 * count > size:  # at most half full: searches stay short
                while 2 * count > size:
                    size *= 2
                self._make_places(size)
                cpu_records.add(self._places.numpy(), self._numbers.numpy(), self._keys[:first].numpy(), 0)
            cpu_records.add(self._places.numpy(), self._numbers.numpy(), keys.numpy(), first)
            self._count = count
        return torch.arange(first, count)

    def _make_places(self, size: int) -> None:
        self._places = torch.full((size,), cpu_records.EMPTY, dtype=torch.int64)
        self._numbers = torch.empty(size, dtype=torch.int64)


UNWRITTEN_BYTES = 256 << 20
"""Limit of the memory that holds what is not in the file yet, by default."""
READERS = 16
"""Threads that read a file: a disk is fast when it has much to do at once."""
_NORESERVE = 0x4000  # Linux: no swap is set aside for memory that is never touched


class KeyedRecords(Records):
    """Records in a slab, found by an `Index`."""

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self._index = Index()

    def __len__(self) -> int:
        return len(self._index)

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        numbers = self._index.find(slots)
        there = numbers >= 0
        if len(self._index):
            self._read(numbers, there, out)
        return there

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        if not len(slots):
            return
        numbers = self._index.find(slots)
        new, count = (numbers < 0).nonzero()[:, 0], len(self._index)
        self._make_room(count + len(new))
        numbers[new] = torch.arange(count, count + len(new))
        self._write(numbers, records)
        if len(new):
            self._index.add(slots[new])  # last, so that whoever finds a record can read it

    @override
    def keys(self) -> Tensor:
        return self._index.keys.sort().values

    def _make_room(self, count: int) -> None:
        """Be ready for so many records."""
        return

    @abstractmethod
    def _read(self, numbers: Tensor, there: Tensor, out: Tensor) -> None:
        """Copy the records with these numbers, where there are any."""

    @abstractmethod
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        """Overwrite or append the records with these numbers."""


class MemoryRecords(KeyedRecords):
    """Records in memory, of which only what is used is taken.

    Parameters
    ----------
    record_bytes
        Size of a record.
    slots
        Most records that there can be.
    """

    def __init__(self, record_bytes: int, slots: int) -> None:
        super().__init__(record_bytes)
        self._most = max(min(slots, memory.host_bytes() // record_bytes), 1)
        self.clear()

    @property
    @override
    def nbytes(self) -> int:
        return len(self._index) * self.record_bytes + self._index.nbytes

    @override
    def clear(self) -> None:
        self._index.clear()
        # Pages appear when they are first written to; huge ones would hold rows that nobody asked for.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sys.platform == "linux" else 0)
        slab = np.frombuffer(mmap.mmap(-1, self._most * self.record_bytes, flags=flags), np.uint8)
        self._slab = torch.from_numpy(slab).view(self._most, self.record_bytes)

    @override
    def _make_room(self, count: int) -> None:
        if count > self._most:
            raise StoreError(
                f"{count:,} rows of {self.record_bytes:,} bytes with their moments do not fit into this machine's "
                f"memory of {memory.host_bytes():,} bytes; put the table into tier 'disk', or cut it over more ranks"
            )

    @override
    def _read(self, numbers: Tensor, there: Tensor, out: Tensor) -> None:
        if bool(there.all()):
            torch.index_select(self._slab, 0, numbers, out=out)
        else:
            out[there] = self._slab[numbers[there]]

    @override
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        self._slab.index_copy_(0, numbers, records)


class _Batch:
    """Records that a file does not have yet, by rising number."""

    def __init__(self, numbers: Tensor, records: Tensor) -> None:
        self.numbers, order = numbers.sort()
        self.records = records[order]
        self.nbytes = self.records.nbytes


class FileRecords(KeyedRecords):
    """Records in a file without a name, which nobody can mistake for data that is whole: it ends with the process.

    Writing is done by a thread, in order of place, from a limited amount of memory. One thread may call `write`, any
    may read; a record that is overwritten meanwhile may come as a mixture of both.

    Parameters
    ----------
    record_bytes
        Size of a record.
    directory
        Where the file is made; it needs as much room as records are written.
    limit_bytes
        Most bytes that wait to be written.

    Raises
    ------
    StoreError
        If no file can be made there.
    """

    def __init__(self, record_bytes: int, directory: str | Path, limit_bytes: int = UNWRITTEN_BYTES) -> None:
        super().__init__(record_bytes)
        self._directory, self._limit = Path(directory), limit_bytes
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory, prefix="hotbed-") as unnamed:
                self._file = os.dup(unnamed.fileno())
        except OSError as error:
            raise StoreError(f"no file for rows can be made in {directory} ({error}); choose another") from None
        self._close = weakref.finalize(self, os.close, self._file)
        self._changed = threading.Condition()
        self._unwritten: deque[_Batch] = deque()
        self._unwritten_bytes = 0
        self._failure: OSError | None = None
        self._readers = ThreadPoolExecutor(READERS, "hotbed-rows")
        self._writer = ThreadPoolExecutor(1, "hotbed-write-rows")
        self._counted, self._counting = Traffic(), threading.Lock()

    @property
    @override
    def nbytes(self) -> int:
        return self._index.nbytes + self._unwritten_bytes

    @property
    @override
    def disk_bytes(self) -> int:
        return len(self._index) * self.record_bytes

    @property
    @override
    def traffic(self) -> Traffic:
        return self._counted

    @override
    def clear(self) -> None:
        self._drain()
        self._index.clear()
        os.ftruncate(self._file, 0)

    @override
    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._close()

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        start = time.perf_counter()
        there = super().read(slots, out, use=use)
        if use != "ahead":
            self._count(waited_s=time.perf_counter() - start)
        return there

    def _count(self, **more: float) -> None:
        with self._counting:  # another thread may be reading ahead
            self._counted += Traffic(**more)  # pyright: ignore[reportArgumentType]

    @override
    def _read(self, numbers: Tensor, there: Tensor, out: Tensor) -> None:
        at = there.nonzero()[:, 0]
        with self._changed:
            waiting = list(self._unwritten)
        for batch in reversed(waiting):  # the newest counts
            place, found = positions(batch.numbers, numbers[at])
            out[at[found]] = batch.records[place[found]]
            at = at[~found]
        wanted, order = numbers[at].sort()
        rows = at[order]
        parts = self._parts(len(wanted))
        calls = [(wanted[a:b], self._readers.submit(self._read_part, wanted[a:b], rows[a:b], out)) for a, b in parts]
        for part, call in calls:
            self._check(part, call)
        self._count(read_bytes=len(wanted) * self.record_bytes)

    @override
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        start = time.perf_counter()
        batch = _Batch(numbers, records)
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten or self._unwritten_bytes + batch.nbytes <= self._limit)
            if self._failure is not None:
                raise self._failure
            self._unwritten.append(batch)
            self._unwritten_bytes += batch.nbytes
        self._writer.submit(self._write_oldest)
        self._count(written_bytes=batch.nbytes, waited_s=time.perf_counter() - start)

    def _write_oldest(self) -> None:
        batch = self._unwritten[0]
        failure: OSError | None = None
        try:
            done = cpu_records.write_records(self._file, batch.numbers.numpy(), batch.records.numpy())
            if done < len(batch.numbers):
                self._explain(batch.numbers[done:], written=True)
        except OSError as error:
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            if failure is None:  # what is not in the file stays where it can be read
                self._unwritten.popleft()
                self._unwritten_bytes -= batch.nbytes
            else:
                self._limit = 1 << 62  # nobody waits for room that does not come
            self._changed.notify_all()

    def _drain(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def _parts(self, count: int) -> Iterator[tuple[int, int]]:
        step = max(-(-count // READERS), 256)
        return ((start, min(start + step, count)) for start in range(0, count, step))

    def _read_part(self, numbers: Tensor, rows: Tensor, out: Tensor) -> int:
        return cpu_records.read_records(self._file, numbers.numpy(), rows.numpy(), out.numpy())

    def _check(self, numbers: Tensor, call: Future[int]) -> None:
        done = call.result()
        if done < len(numbers):
            self._explain(numbers[done:], written=False)

    def _explain(self, numbers: Tensor, *, written: bool) -> None:
        """Raise what the system says of these records, of which the first run could not be read or written."""
        what = "written" if written else "read"
        try:
            for at in (numbers * self.record_bytes).tolist():
                if written:
                    os.pwrite(self._file, bytes(self.record_bytes), at)
                elif len(os.pread(self._file, self.record_bytes, at)) < self.record_bytes:
                    raise OSError("the file is shorter than it was")
        except OSError as error:
            raise OSError(error.errno, f"rows in {self._directory} could not be {what}: {error}") from None
        raise OSError(f"rows in {self._directory} could not be {what}, for no reason that the system gives")
