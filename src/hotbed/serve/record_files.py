"""Read rows from the files of an exported model, and rows that changed since from files without a name.

`RecordFiles` reads what was exported. `ChangedRecords` lies over it: two files, into which the records of changes are
written beside requests, each at the place of its slot; a byte per slot says where its newest record is::

    slot      0  1  2  3
    is in     0  0  1  0      0: what was exported; 1 and 2: the files
    stage the changes of slots [2, 3]: 2 goes to file 2, 3 to file 1, and nobody reads them there
    swap      0  0  2  1

So a swap is quick however long the records took to write, memory stays what it was when the model was opened, and
nothing is left when the process ends. Files have holes where no record is.

They are read by system calls, not mapped: then a file that is cut off or whose disk fails is an error of the requests
that need it, where a mapping ends the process; and many reads are under way at once.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.files import unnamed_file
from hotbed.ops import cpu_cache
from hotbed.store.records import Records, RecordsAbove, Use
from hotbed.store.rising import ListedSlots, RisingSlots

READERS = 16
"""Threads that read files, of all models together: a disk is fast when it has much to do at once."""
CHANGED_ROWS = "changed rows"
"""What files without a name are for, in errors."""
LEAST_READS = 8
"""Records that one thread reads before another one is asked."""

_readers = ThreadPoolExecutor(READERS, "hotbed-serve-rows")


class RecordFile(NamedTuple):
    """A file of records, the first of which is that of slot ``first``."""

    path: Path
    first: int


class _Open(NamedTuple):
    """Files that are open: their descriptors, first slots, what to call them, and the size of their records."""

    descriptors: list[int]
    firsts: list[int]
    names: list[str]
    record_bytes: int

    def read(self, slots: Tensor, at: Tensor, out: Tensor) -> None:
        """Read the records of rising slots ``[n]`` into rows ``at [n]`` of ``out``, by several threads."""
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
            places = numbers.numpy(), rows.numpy()
            done = cpu_cache.read_records(self.descriptors[file], self.record_bytes, *places, out.numpy())
            if done < len(numbers):
                self._explain(file, int(numbers[done]))
            begin = end

    def _explain(self, file: int, number: int) -> None:
        """Raise what the system says of a record that could not be read."""
        reason = f"it ends before byte {(number + 1) * self.record_bytes:,}"
        try:
            found = len(os.pread(self.descriptors[file], self.record_bytes, number * self.record_bytes))
            reason = reason if found < self.record_bytes else "no reason is given"
        except OSError as error:
            reason = str(error)
        raise StoreError(f"row {number:,} of {self.names[file]} cannot be read ({reason}); mend the disk, or the file")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RecordFiles(Records):
    """Read the records of exported tables; every slot has one, and none is written.

    The files stay open, so they may be removed from their directory meanwhile. They are sorted by first slot.
    """

    def __init__(self, record_bytes: int, files: Sequence[RecordFile]) -> None:
        super().__init__(record_bytes)
        descriptors: list[int] = []
        self._close = weakref.finalize(self, _close, descriptors)
        for file in files:
            descriptors.append(os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
            if hasattr(os, "posix_fadvise"):  # neighbours of a row that is needed are not
                os.posix_fadvise(descriptors[-1], 0, 0, os.POSIX_FADV_RANDOM)
        self._files = _Open(
            descriptors, [file.first for file in files], [str(file.path) for file in files], record_bytes
        )
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
        raise StoreError("the rows of an exported model are read only; changes of it are applied as a whole")

    @override
    def slots(self) -> RisingSlots:
        return ListedSlots(torch.arange(self._bytes // self.record_bytes))

    @override
    def clear(self) -> None:
        raise StoreError("the rows of an exported model are read only")

    @override
    def close(self) -> None:
        self._close()


class ChangedRecords(RecordsAbove):
    """Overlay changed records on those of an exported model (``below``); see above.

    One thread may `stage` while others read; none may read during `swap`. ``directory`` has the files (default: the
    directory of temporary files). Raise `StoreError` if no file can be created there.
    """

    def __init__(self, below: Records, slots: int, directory: str | Path | None = None) -> None:
        super().__init__(below)
        self._where = torch.zeros(slots, dtype=torch.uint8)
        self._staged: list[tuple[Tensor, Tensor]] = []  # slots, and which file each is going to be read from
        self._replacement: Records | None = None
        self._outdated: Records | None = None
        descriptors = [unnamed_file(directory, CHANGED_ROWS) for _ in range(2)]
        self._close = weakref.finalize(self, _close, descriptors)
        place = str(directory or tempfile.gettempdir())
        self._files = [_Open([d], [0], [f"the changes in {place}"], self.record_bytes) for d in descriptors]

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
        """Write records ``[n, record_bytes]`` of distinct slots ``[n]`` to be read after the next `swap`.

        Raise `OSError` if the disk is full or fails.
        """
        slots, order = slots.sort()
        records = records[order]
        target = 2 - (self._where[slots] == 2).to(torch.uint8)  # 2, but 1 where 2 is read
        for number, file in enumerate(self._files, start=1):
            at = (target == number).nonzero()[:, 0]
            write_all(file.descriptors[0], slots[at], records[at])
        self._staged.append((slots, target))

    def stage_below(self, below: Records) -> None:
        """Take other records of a model for those below, with no changes over them, at the next `swap`."""
        self._replacement, self._fresh = below, torch.zeros_like(self._where)

    def swap(self) -> None:
        """Let what was staged be read from now on."""
        if self._replacement is not None:
            self._outdated = self.below
            self.below, self._where, self._replacement = self._replacement, self._fresh, None
        for slots, target in self._staged:
            self._where[slots] = target
        self._staged = []

    def tidy(self) -> None:
        """Free the disk of what nobody reads since the last swap."""
        if self._outdated is not None:
            self._outdated.close()
            self._outdated = None
            for file in self._files:
                os.ftruncate(file.descriptors[0], 0)

    def discard(self) -> None:
        """Forget what was staged, and free the disk behind the last record that is read."""
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
    """Write records ``[n, record_bytes]`` to the places of these rising numbers ``[n]``; an `OSError` if it fails."""
    done = cpu_cache.write_records(file, numbers.numpy(), records.contiguous().numpy())
    if done < len(numbers):
        size = records.shape[1]
        for number in numbers[done:].tolist():  # the system's reason
            os.pwrite(file, bytes(size), number * size)
        raise OSError("changed rows could not be written, for no reason that the system gives")
