"""Keep records in a file, which a thread writes during training in long sequential runs.

The file is log-structured (Rosenblum and Ousterhout, ACM TOCS 10(1), 1992). A record that changes is written to a new
position, next to the records that change with it. So a batch of changes is a few long writes. Updates in place would be
many small writes, and for each one the system would read a page, change a part of it, and write it back. `Segments`
knows the position of each record. A segment is reused when all its records have been written elsewhere. If half-empty
segments make the file too long, the records of the emptiest segments are moved as well.

For example, records 0 to 5 are in segments of four positions, and records 1, 2 and 3 are written again::

    positions  0 1 2 3 | 4 5 6 7 | 8
    records    0 . . . | 4 5 1 2 | 3        once record 0 is moved, the first segment is free
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import Counter, deque
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

UNWRITTEN_BYTES = 32 << 20
"""Default limit of the memory for records that wait to be written."""
_MOVED_BYTES = 8 << 20
"""Bytes of records that are moved together when the file is shortened."""
READERS = 16
"""Threads that read a file. A disk is fast only if it has many requests at once."""


class _Unwritten(NamedTuple):
    """Records that wait to be written, in ascending order of their numbers."""

    numbers: Tensor
    records: Tensor


class FileRecords(KeyedRecords):
    """Keep records in an unnamed file, which the system deletes when the process ends.

    An unnamed file cannot be mistaken for complete data. A thread of this object writes the file, and at most
    ``limit_bytes`` of records wait for this thread. Only one thread may call `write`, but any thread may call `read`. A
    record that is being overwritten is read in its old or its new state. The file takes up to 1.5 times the bytes of
    its records (`SPACE`). Raise `StoreError` if no file can be created in ``directory``.
    """

    def __init__(self, record_bytes: int, directory: str | Path, limit_bytes: int = UNWRITTEN_BYTES) -> None:
        super().__init__(record_bytes)
        self._directory, self._limit = Path(directory), limit_bytes
        self._file = unnamed_file(directory, "rows")
        self._close = weakref.finalize(self, os.close, self._file)
        if hasattr(os, "posix_fadvise"):  # otherwise the system may prefetch megabytes after a random read
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._changed = threading.Condition()
        self._segments = self._no_segments()
        self._unwritten: deque[_Unwritten] = deque()
        self._unwritten_bytes = 0
        self._failure: Exception | None = None
        self._readers = ThreadPoolExecutor(READERS, "hotbed-rows")
        self._writer = ThreadPoolExecutor(1, "hotbed-write-rows")
        self._counting = threading.Lock()  # because another thread may be prefetching

    def _no_segments(self) -> Segments:
        return Segments(at_once=max(_MOVED_BYTES // (PER_SEGMENT * self.record_bytes), 2))

    @property
    @override
    def nbytes(self) -> int:
        return self.key_bytes + self._segments.nbytes + self._unwritten_bytes

    @property
    @override
    def disk_bytes(self) -> int:
        return max(self._segments.end, self._count) * self.record_bytes  # includes records that wait to be written

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
        """Do nothing, because the file grows when it is written."""

    @override
    def _read(self, numbers: Tensor, out: Tensor, use: Use) -> None:
        start = time.perf_counter()
        with self._changed:
            waiting, segments = list(self._unwritten), self._segments
            begun, positions = segments.begin_read(), segments.positions(numbers)
        try:
            for batch in reversed(waiting):  # the newest version of a record is valid
                at = find_positions(batch.numbers, numbers)
                cpu_cache.read_rows(batch.records, at, out)
                numbers = numbers.masked_fill(at >= 0, -1)
            at = (numbers >= 0).nonzero()[:, 0]
            self._read_file(positions[at], at, out)
        finally:
            with self._changed:
                segments.end_read(begun)
        with self._counting:
            self.counted.read_bytes += len(at) * out.shape[1]
            if use != "ahead":
                self.counted.waited_s += time.perf_counter() - start

    def _read_file(self, positions: Tensor, at: Tensor, out: Tensor) -> None:
        """Read the records at ``positions [n]`` into the rows ``at [n]`` of ``out``, with all reader threads."""
        wanted, order = positions.sort()
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
        numbers, order = numbers.sort()  # popular rows have low numbers, so neighbours change about equally often
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
        except Exception as error:  # unwritten records stay in memory, where they can be read
            with self._changed:
                self._failure = self._failure or error  # the next `write` or `drain` raises the error
                self._limit = 1 << 62  # so that `write` does not wait for a thread that has failed
                self._changed.notify_all()

    def _put(self, numbers: Tensor, records: Tensor) -> None:
        """Write records to new positions."""
        with self._changed:
            positions = self._segments.take(len(numbers))
        done = cpu_cache.write_records(self._file, positions.numpy(), records.numpy())
        if done < len(positions):
            self._explain(positions[done:], written=True)
        with self._changed:
            self._segments.put(numbers, positions)
        with self._counting:
            self.counted.written_bytes += records.nbytes

    def _shorten(self) -> None:
        """Move records out of mostly empty segments until the file is short enough."""
        while True:
            with self._changed:
                numbers = self._segments.emptiest()
                positions = self._segments.positions(numbers)
            if not len(numbers):
                return
            records = torch.empty(len(numbers), self.record_bytes, dtype=torch.uint8)
            self._read_file(positions, torch.arange(len(numbers)), records)
            with self._counting:
                self.counted.read_bytes += records.nbytes
            self._put(numbers, records)

    def drain(self) -> None:
        """Wait until all records are written. Raise the error of a failed write."""
        self._writer.submit(lambda: None).result()
        if self._failure is not None:
            raise self._failure

    def _explain(self, positions: Tensor, *, written: bool) -> None:
        """Raise the system's error for these positions. A read or write failed at the first one."""
        what = "written" if written else "read"
        try:
            for at in (positions * self.record_bytes).tolist():
                if written:
                    os.pwrite(self._file, bytes(self.record_bytes), at)
                elif len(os.pread(self._file, self.record_bytes, at)) < self.record_bytes:
                    raise OSError("the file has become shorter")
        except OSError as error:
            raise OSError(error.errno, f"rows in {self._directory} could not be {what}: {error}") from None
        raise OSError(f"rows in {self._directory} could not be {what}, and the system gives no reason")


# -- positions of records --------------------------------------------------------------------------------------------

PER_SEGMENT = 1024
"""Positions per segment. For any record size that is a multiple of 4 bytes, a segment fills whole pages."""
SPACE = 1.5
"""Limit of positions per record. Beyond it, and `_SLACK` segments, records are moved to shorten the file."""
_SLACK = 8
"""Segments that a file may have in addition to `SPACE`. Segments that are being read also count on top."""
_AT_ONCE = 16
"""Default number of segments that are emptied together."""


class Segments:
    """Track the positions of records in a file, by record number. Callers must hold a lock during each call.

    The only writer calls `take`, writes to these positions, and calls `put`. A reader calls `begin_read` and
    `positions`, reads, and calls `end_read`. Records are not overwritten before `end_read`.
    """

    def __init__(self, per_segment: int = PER_SEGMENT, at_once: int = _AT_ONCE) -> None:
        self._per, self._at_once = per_segment, at_once
        self._positions = torch.full((1,), -1)
        self._numbers = torch.empty(0, dtype=torch.int64)
        """Number of the record that was last written at each position. The record may be elsewhere by now."""
        self._live = torch.empty(0, dtype=torch.int64)
        """Number of valid records in each segment. Free segments have the capacity plus one."""
        self._segments = self._count = 0
        self._next = self._end = 0
        """Range of the unused positions in the newest segment."""
        self._free = list[int]()
        self._freed = deque[tuple[int, int]]()
        self._puts = 0
        self._reads = Counter[int]()

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._positions.nbytes + self._numbers.nbytes + self._live.nbytes

    @property
    def end(self) -> int:
        """Length of the file in positions."""
        length = self._segments * self._per
        return self._next if self._end == length else length

    # -- for readers -----------------------------------------------------------------------------------------------

    def begin_read(self) -> int:
        """Protect the present content of the file from being overwritten. Return a token for `end_read`."""
        self._reads[self._puts] += 1
        return self._puts

    def end_read(self, begun: int) -> None:
        """Release positions that only this reader protected."""
        self._reads[begun] -= 1
        if not self._reads[begun]:
            del self._reads[begun]

    def positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of records ``[n]``, or −1 for records that are not in the file and for number −1."""
        known = (numbers >= 0) & (numbers < len(self._positions))
        return torch.where(known, self._positions[numbers * known], -1)

    # -- for the writer --------------------------------------------------------------------------------------------

    def take(self, count: int) -> Tensor:
        """Choose positions ``[count]`` that no reader uses, adjacent if possible."""
        here = min(count, self._end - self._next)
        found = [torch.arange(self._next, self._next + here)]
        self._next += here
        wanted = -(-(count - here) // self._per)
        if wanted:
            oldest = min(self._reads, default=math.inf)
            while self._freed and self._freed[0][0] < oldest:
                self._free.append(self._freed.popleft()[1])
            cut = max(len(self._free) - wanted, 0)  # the newest, because they may still be in the page cache
            segments = sorted(self._free[cut:])
            del self._free[cut:]
            new = wanted - len(segments)
            segments += range(self._segments, self._segments + new)
            self._segments += new
            self._live = _grown(self._live, self._segments, 0)
            self._numbers = _grown(self._numbers, self._segments * self._per, -1)
            self._live[segments] = 0
            firsts = torch.tensor(segments)[:, None] * self._per
            all_positions = (firsts + torch.arange(self._per)).view(-1)
            found.append(all_positions[: count - here])
            self._end = (segments[-1] + 1) * self._per
            self._next = self._end - (wanted * self._per - (count - here))
        return torch.cat(found)

    def put(self, numbers: Tensor, positions: Tensor) -> None:
        """Record that these distinct records ``[n]`` are now at these positions, which `take` returned."""
        if not len(numbers):
            return
        self._positions = _grown(self._positions, int(numbers.max()) + 1, -1)
        before = self._positions[numbers]
        before = before[before >= 0]
        self._positions[numbers] = positions
        self._numbers[positions] = numbers
        self._count += len(numbers) - len(before)
        self._live.index_add_(0, positions // self._per, torch.ones_like(positions))
        left = before // self._per
        self._live.index_add_(0, left, torch.full_like(left, -1))
        left = left.unique()
        filling = self._next // self._per if self._next < self._end else -1
        for segment in left[(self._live[left] == 0) & (left != filling)].tolist():
            self._live[segment] = self._per + 1
            self._freed.append((self._puts, segment))
        self._puts += 1

    def emptiest(self) -> Tensor:
        """Return the records of the emptiest segments if the file is too long, otherwise none."""
        used = self._segments - len(self._free) - len(self._freed)
        excess = used - math.ceil(SPACE * self._count / self._per) - _SLACK
        if excess <= 0:
            return torch.empty(0, dtype=torch.int64)
        live = self._live[: self._segments].clone()
        if self._next < self._end:
            live[self._next // self._per] = self._per + 1
        segments = live.topk(min(max(excess, 2), self._at_once, len(live)), largest=False).indices.sort().values
        positions = (segments[:, None] * self._per + torch.arange(self._per)).view(-1)
        numbers = self._numbers[positions]
        return numbers[self.positions(numbers) == positions]


def _grown(values: Tensor, count: int, value: int) -> Tensor:
    """Return a copy of ``values`` with at least ``count`` elements. New elements are ``value``."""
    if count <= len(values):
        return values
    grown = torch.full((max(count, 2 * len(values)),), value, dtype=torch.int64)
    grown[: len(values)] = values
    return grown
