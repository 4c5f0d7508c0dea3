"""Keep records in a file, which is written beside training in runs of neighbours.

Where a record is, by its number, is known by `hotbed.store.segments`: one that changes is written to another place.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.files import unnamed_file
from hotbed.ops import cpu_cache
from hotbed.store.hash_index import KeyedRecords, find_positions, gather_records
from hotbed.store.records import Use
from hotbed.store.segments import PER_SEGMENT, Segments

UNWRITTEN_BYTES = 32 << 20
"""Limit of the memory that holds what is not in the file yet, by default."""
_MOVED_BYTES = 8 << 20
"""Bytes of records that are moved together where the file is shortened."""
READERS = 16
"""Threads that read a file: a disk is fast when it has much to do at once."""


class _Unwritten(NamedTuple):
    """Records that a file does not have yet, by rising number."""

    numbers: Tensor
    records: Tensor


class FileRecords(KeyedRecords):
    """Keep records in a file without a name, which ends with the process.

    Without a name, the file cannot be mistaken for complete data. A thread writes; at most ``limit_bytes`` wait to be
    written. One thread may call `write`, any may read. A record that is overwritten meanwhile is read in its old or its
    new state. The file needs half as much room again as the written records (`Segments`). Raise `StoreError` if no file
    can be created in ``directory``.
    """

    def __init__(self, record_bytes: int, directory: str | Path, limit_bytes: int = UNWRITTEN_BYTES) -> None:
        super().__init__(record_bytes)
        self._directory, self._limit = Path(directory), limit_bytes
        self._file = unnamed_file(directory, "rows")
        self._close = weakref.finalize(self, os.close, self._file)
        if hasattr(os, "posix_fadvise"):  # else the system reads megabytes around what it takes for a sequence
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._changed = threading.Condition()
        self._segments = self._no_segments()
        self._unwritten: deque[_Unwritten] = deque()
        self._unwritten_bytes = 0
        self._failure: Exception | None = None
        self._readers = ThreadPoolExecutor(READERS, "hotbed-rows")
        self._writer = ThreadPoolExecutor(1, "hotbed-write-rows")
        self._counting = threading.Lock()  # another thread may be reading ahead

    def _no_segments(self) -> Segments:
        return Segments(at_once=max(_MOVED_BYTES // (PER_SEGMENT * self.record_bytes), 2))

    @property
    @override
    def nbytes(self) -> int:
        return self.key_bytes + self._segments.nbytes + self._unwritten_bytes

    @property
    @override
    def disk_bytes(self) -> int:
        return max(self._segments.end, self._count) * self.record_bytes  # with what waits to be written

    @override
    def clear(self) -> None:
        self.drain()
        self._forget()
        self._segments = self._no_segments()
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
            waiting, segments = list(self._unwritten), self._segments
            begun, places = segments.begin_read(), segments.places(numbers)
        try:
            for batch in reversed(waiting):  # the newest counts
                at = find_positions(batch.numbers, numbers)
                cpu_cache.read_rows(batch.records, at, out)
                numbers = numbers.masked_fill(at >= 0, -1)
            at = (numbers >= 0).nonzero()[:, 0]
            self._read_file(places[at], at, out)
        finally:
            with self._changed:
                segments.end_read(begun)
        with self._counting:
            self.counted.read_bytes += len(at) * out.shape[1]
            if use != "ahead":
                self.counted.waited_s += time.perf_counter() - start

    def _read_file(self, places: Tensor, at: Tensor, out: Tensor) -> None:
        """Read the records at these places ``[n]`` into rows ``at [n]``, by all readers."""
        wanted, order = places.sort()
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

    @override
    def _write(self, numbers: Tensor, records: Tensor) -> None:
        start = time.perf_counter()
        numbers, order = numbers.sort()  # popular rows have come first, so neighbours change about as often
        batch = _Unwritten(numbers, gather_records(records, order))
        with self._changed:
            while self._unwritten and self._unwritten_bytes + batch.records.nbytes > self._limit:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            self._unwritten.append(batch)
            self._unwritten_bytes += batch.records.nbytes
        self._writer.submit(self._write_oldest)
        with self._counting:
            self.counted.waited_s += time.perf_counter() - start

    def _write_oldest(self) -> None:
        batch = self._unwritten[0]
        try:
            self._put(batch.numbers, batch.records)
            with self._changed:
                self._unwritten.popleft()
                self._unwritten_bytes -= batch.records.nbytes
                self._changed.notify_all()
            self._shorten()
        except Exception as error:  # what is not in the file stays where it can be read
            with self._changed:
                self._failure = self._failure or error  # whoever writes or drains raises it
                self._limit = 1 << 62  # nobody waits for room that does not come
                self._changed.notify_all()

    def _put(self, numbers: Tensor, records: Tensor) -> None:
        """Write records to new places."""
        with self._changed:
            places = self._segments.take(len(numbers))
        done = cpu_cache.write_records(self._file, places.numpy(), records.numpy())
        if done < len(places):
            self._explain(places[done:], written=True)
        with self._changed:
            self._segments.put(numbers, places)
        with self._counting:
            self.counted.written_bytes += records.nbytes

    def _shorten(self) -> None:
        """Move what is left of segments that are mostly empty, until the file is short enough."""
        while True:
            with self._changed:
                numbers = self._segments.emptiest()
                places = self._segments.places(numbers)
            if not len(numbers):
                return
            records = torch.empty(len(numbers), self.record_bytes, dtype=torch.uint8)
            self._read_file(places, torch.arange(len(numbers)), records)
            with self._counting:
                self.counted.read_bytes += records.nbytes
            self._put(numbers, records)

    def drain(self) -> None:
        """Wait until everything is written, and raise what failed."""
        self._writer.submit(lambda: None).result()
        if self._failure is not None:
            raise self._failure

    def _explain(self, places: Tensor, *, written: bool) -> None:
        """Raise what the system says of these places, of which the first run could not be read or written."""
        what = "written" if written else "read"
        try:
            for at in (places * self.record_bytes).tolist():
                if written:
                    os.pwrite(self._file, bytes(self.record_bytes), at)
                elif len(os.pread(self._file, self.record_bytes, at)) < self.record_bytes:
                    raise OSError("the file is shorter than it was")
        except OSError as error:
            raise OSError(error.errno, f"rows in {self._directory} could not be {what}: {error}") from None
        raise OSError(f"rows in {self._directory} could not be {what}, for no reason that the system gives")
