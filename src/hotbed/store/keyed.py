"""Keep records in an append-only slab, in memory or in a file, found by slot.

Only slots that were written have a place, so a table may have more rows than the disk has bytes. Records are numbered
in the order in which they were added; a hash table has the number of each slot::

    write slots [700, 5], then [5, 9]   →   700: number 0, 5: number 1 (overwritten), 9: number 2
    slab or file                            | record of 700 | record of 5 | record of 9 |
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
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.ops import cpu_cache
from hotbed.ops.cpu_runtime import launch
from hotbed.store import memory
from hotbed.store.records import InPlace, Records, Use

UNWRITTEN_BYTES = 256 << 20
"""Limit of the memory that holds what is not in the file yet, by default."""
READERS = 16
"""Threads that read a file: a disk is fast when it has much to do at once."""
_FIRST = 1 << 10
"""Places of a new hash table, a power of two."""
_NORESERVE = 0x4000  # Linux: no swap is set aside for memory that is never touched


class KeyedRecords(Records):
    """Number the records of a slab; any thread may `read` while one writes."""

    def __init__(self, record_bytes: int) -> None:
        super().__init__(record_bytes)
        self._lock = threading.Lock()
        self._forget()

    def __len__(self) -> int:
        return self._count

    @property
    def key_bytes(self) -> int:
        """Bytes of memory of slots and numbers."""
        return self._keys.nbytes + self._places.nbytes + self._numbers.nbytes

    @override
    def keys(self) -> Tensor:
        return self._keys[: self._count].sort().values

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        numbers = self._numbers_of(slots)
        there = numbers >= 0
        if self._count:
            self._read(numbers, out, use)
        return there

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        if not len(slots):
            return
        numbers = self._numbers_of(slots)
        new = (numbers < 0).nonzero()[:, 0]
        self._make_room(self._count + len(new))
        numbers[new] = torch.arange(self._count, self._count + len(new))
        self._write(numbers, records)
        if len(new):
            self._add(slots[new])  # last, so that whoever finds a record can read it

    def _numbers_of(self, slots: Tensor) -> Tensor:
        """Find the numbers of slots ``[n]``; −1 where there is no record."""
        numbers = torch.empty(len(slots), dtype=torch.int64)
        with self._lock:
            launch(cpu_cache.find_numbers, self._places.numpy(), self._numbers.numpy(), slots.numpy(), numbers.numpy())
        return numbers

    def _add(self, slots: Tensor) -> None:
        """Number distinct slots that have no number yet."""
        with self._lock:
            first, count = self._count, self._count + len(slots)
            if count > len(self._keys):
                grown = torch.empty(max(count, 2 * len(self._keys)), dtype=torch.int64)
                grown[:first] = self._keys[:first]
                self._keys = grown
            self._keys[first:count] = slots
            size = len(self._places)
            if 2 * count > size:  # at most half full: searches stay short
                while 2 * count > size:
                    size *= 2
                self._places = torch.full((size,), cpu_cache.EMPTY, dtype=torch.int64)
                self._numbers = torch.empty(size, dtype=torch.int64)
                cpu_cache.add_numbers(self._places.numpy(), self._numbers.numpy(), self._keys[:first].numpy(), 0)
            cpu_cache.add_numbers(self._places.numpy(), self._numbers.numpy(), slots.numpy(), first)
            self._count = count

    def _forget(self) -> None:
        """Forget all slots."""
        with self._lock:
            self._count = 0
            self._keys = torch.empty(_FIRST // 2, dtype=torch.int64)
            self._places = torch.full((_FIRST,), cpu_cache.EMPTY, dtype=torch.int64)
            self._numbers = torch.empty(_FIRST, dtype=torch.int64)

    @abstractmethod
    def _make_room(self, count: int) -> None:
        """Be ready for so many records."""

    @abstractmethod
    def _read(self, numbers: Tensor, out: Tensor, use: Use) -> None:
        """Copy the records with these numbers; −1 is none."""

    @abstractmethod
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        """Overwrite or append the records with these numbers."""


class MemoryRecords(KeyedRecords):
    """Keep records in memory, of which only what is used is taken.

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
        return self._count * self.record_bytes + self.key_bytes

    @override
    def clear(self) -> None:
        self._forget()
        # Pages appear when they are first written to; huge ones would hold rows that nobody asked for.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sys.platform == "linux" else 0)
        slab = np.frombuffer(mmap.mmap(-1, self._most * self.record_bytes, flags=flags), np.uint8)
        self._slab = torch.from_numpy(slab).view(self._most, self.record_bytes)

    @override
    @contextmanager
    def changed_in_place(self, slots: Tensor) -> Generator[InPlace | None]:
        yield InPlace(self._slab, self._numbers_of(slots))

    @override
    def _make_room(self, count: int) -> None:
        if count > self._most:
            raise StoreError(
                f"{count:,} rows of {self.record_bytes:,} bytes with their moments do not fit into this machine's "
                f"memory of {memory.host_bytes():,} bytes; put the table into tier 'disk', or cut it over more ranks"
            )

    @override
    def _read(self, numbers: Tensor, out: Tensor, use: Use) -> None:
        cpu_cache.read_rows(self._slab, numbers, out)

    @override
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        cpu_cache.write_rows(self._slab, numbers, records)


class _Unwritten(NamedTuple):
    """Records that a file does not have yet, by rising number."""

    numbers: Tensor
    records: Tensor


class FileRecords(KeyedRecords):
    """Keep records in a file without a name, which nobody can mistake for complete data: it ends with the process.

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
        self._unwritten: deque[_Unwritten] = deque()
        self._unwritten_bytes = 0
        self._failure: OSError | None = None
        self._readers = ThreadPoolExecutor(READERS, "hotbed-rows")
        self._writer = ThreadPoolExecutor(1, "hotbed-write-rows")
        self._counting = threading.Lock()  # another thread may be reading ahead

    @property
    @override
    def nbytes(self) -> int:
        return self.key_bytes + self._unwritten_bytes

    @property
    @override
    def disk_bytes(self) -> int:
        return self._count * self.record_bytes

    @override
    def clear(self) -> None:
        self.drain()
        self._forget()
        os.ftruncate(self._file, 0)

    @override
    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._close()

    @override
    def _make_room(self, count: int) -> None:
        """Nothing: the file grows as it is written."""

    @override
    def _read(self, numbers: Tensor, out: Tensor, use: Use) -> None:
        start = time.perf_counter()
        with self._changed:
            waiting = list(self._unwritten)
        for batch in reversed(waiting):  # the newest counts
            place = positions(batch.numbers, numbers)
            cpu_cache.read_rows(batch.records, place, out)
            numbers = numbers.masked_fill(place >= 0, -1)
        at = (numbers >= 0).nonzero()[:, 0]
        wanted, order = numbers[at].sort()
        rows, chunk = at[order], max(-(-len(wanted) // READERS), 256)
        chunks = list(zip(wanted.split(chunk), rows.split(chunk), strict=True)) if len(wanted) else []
        calls = [
            self._readers.submit(
                cpu_cache.read_records, self._file, self.record_bytes, n.numpy(), to.numpy(), out.numpy()
            )
            for n, to in chunks
        ]
        for (of_chunk, _), call in zip(chunks, calls, strict=True):
            if (done := call.result()) < len(of_chunk):
                self._explain(of_chunk[done:], written=False)
        with self._counting:
            self.counted.read_bytes += len(wanted) * out.shape[1]
            if use != "ahead":
                self.counted.waited_s += time.perf_counter() - start

    @override
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        start = time.perf_counter()
        numbers, order = numbers.sort()
        batch = _Unwritten(numbers, gathered(records, order))
        with self._changed:
            while self._unwritten and self._unwritten_bytes + batch.records.nbytes > self._limit:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            self._unwritten.append(batch)
            self._unwritten_bytes += batch.records.nbytes
        self._writer.submit(self._write_oldest)
        with self._counting:
            self.counted.written_bytes += batch.records.nbytes
            self.counted.waited_s += time.perf_counter() - start

    def _write_oldest(self) -> None:
        batch = self._unwritten[0]
        failure: OSError | None = None
        try:
            done = cpu_cache.write_records(self._file, batch.numbers.numpy(), batch.records.numpy())
            if done < len(batch.numbers):
                self._explain(batch.numbers[done:], written=True)
        except OSError as error:
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            if failure is None:  # what is not in the file stays where it can be read
                self._unwritten.popleft()
                self._unwritten_bytes -= batch.records.nbytes
            else:
                self._limit = 1 << 62  # nobody waits for room that does not come
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten or self._failure is not None)
            if self._failure is not None:
                raise self._failure

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


def positions(of: Tensor, wanted: Tensor) -> Tensor:
    """Find each wanted value ``[n]`` among rising ones: its position, or −1; fastest where they rise, too."""
    found = torch.empty_like(wanted)
    cpu_cache.find_rising(of.numpy(), wanted.numpy(), found.numpy())
    return found


def gathered(records: Tensor, at: Tensor) -> Tensor:
    """Copy the records ``[m, bytes]`` at these places ``[n]``, by all threads."""
    out = torch.empty(len(at), records.shape[1], dtype=torch.uint8)
    cpu_cache.read_rows(records, at, out)
    return out


def distinct(slots: Tensor) -> tuple[Tensor, Tensor]:
    """List the distinct slots, rising, and the first position of each."""
    ordered, order = slots.sort(stable=True)
    new = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
    new[1:] = ordered[1:] != ordered[:-1]
    at = new.nonzero()[:, 0]
    return ordered[at], order[at]
