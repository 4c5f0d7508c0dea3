"""Write and read files in blocks: record each block's SHA-256 when writing, verify it before any of it is used.

So a part of a file can be checked without the rest, and damage has a place. Hashing, writing and reading go on in
threads beside the caller.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hotbed.checkpoint.storage import Directory
from hotbed.errors import CheckpointError, DamagedError

BLOCK_BYTES = 16 << 20
"""Bytes of a block; the last of a file may be shorter."""
BLOCKS_UNDER_WAY = 4
"""Blocks that may wait to be hashed and written, or that are read ahead."""
FILES_UNDER_WAY = 8
"""Files that may be open because not all of them is written."""

Entry = dict[str, Any]
"""What a manifest says of a file: ``bytes``, ``block_bytes`` and the ``sha256`` of each block."""


class BlockWriters:
    """Threads that hash and write the blocks of files, one file after the other."""

    def __init__(self) -> None:
        self.free = threading.Semaphore(BLOCKS_UNDER_WAY)
        """Blocks that may still be sent."""
        self.files = threading.Semaphore(FILES_UNDER_WAY)
        """Files that may still be begun."""
        self.hashing, self.writing, self.finishing = (
            ThreadPoolExecutor(count, f"hotbed-{name}") for name, count in (("hash", 2), ("write", 1), ("sync", 1))
        )

    def close(self) -> None:
        """End them; files that are not finished are closed as they are."""
        for pool in (self.hashing, self.writing):
            pool.shutdown(wait=True, cancel_futures=True)
        self.finishing.shutdown(wait=True)


class BlockWriter:
    """Writes a file from start to end.

    Parameters
    ----------
    place, name
        Where it goes.
    threads
        Shared by the files of a checkpoint.
    """

    def __init__(self, place: Directory, name: str, threads: BlockWriters) -> None:
        self._threads = threads
        threads.files.acquire()
        self._file = place.writer(name)
        self._block = bytearray()
        self._hashes: list[Future[str]] = []
        self._writes: list[Future[None]] = []
        self._bytes = 0

    def write(self, data: memoryview) -> None:
        """Append bytes, which must stay as they are until the file is finished."""
        self._bytes += len(data)
        if self._block:
            room = BLOCK_BYTES - len(self._block)
            self._block += data[:room]
            data = data[room:]
            if len(self._block) == BLOCK_BYTES:
                self._send(memoryview(self._block))
                self._block = bytearray()
        while len(data) >= BLOCK_BYTES:
            self._send(data[:BLOCK_BYTES])
            data = data[BLOCK_BYTES:]
        self._block += data

    def finish(self) -> Future[Entry]:
        """The file's entry, once all of it is safe."""
        if self._block:
            self._send(memoryview(self._block))
        return self._threads.finishing.submit(self._finished)

    def abandon(self) -> None:
        """Give up."""
        for write in self._writes:
            if write.cancel():
                self._threads.free.release()
        self._file.abandon()
        self._threads.files.release()

    def _send(self, block: memoryview) -> None:
        self._threads.free.acquire()
        for write in self._writes:
            if write.done():
                write.result()  # raises what went wrong
        self._writes = [write for write in self._writes if not write.done()]
        hashed = self._threads.hashing.submit(lambda: hashlib.sha256(block).hexdigest())
        self._hashes.append(hashed)
        self._writes.append(self._threads.writing.submit(self._write, block, hashed))

    def _write(self, block: memoryview, hashed: Future[str]) -> None:
        try:
            self._file.write(block)
        finally:
            with suppress(CancelledError):
                hashed.exception()  # waits
            self._threads.free.release()

    def _finished(self) -> Entry:
        try:
            for write in self._writes:
                write.result()
            self._file.finish()
        except BaseException:
            self._file.abandon()
            raise
        finally:
            self._threads.files.release()
        return {"bytes": self._bytes, "block_bytes": BLOCK_BYTES, "sha256": [h.result() for h in self._hashes]}


class BlockReader:
    """Reads parts of a file and checks every block that they are in.

    Parameters
    ----------
    place, name
        Where it is.
    entry
        What the manifest says of it.
    threads
        Pool that reads and hashes.

    Raises
    ------
    DamagedError
        If the file is missing or has another size.
    """

    def __init__(self, place: Directory, name: str, entry: Entry, threads: ThreadPoolExecutor) -> None:
        self._where, self._entry, self._threads = f"{place}/{name}", entry, threads
        try:
            self._file = place.reader(name)
        except FileNotFoundError:
            raise DamagedError(
                f"{self._where} is missing, but the manifest lists it; copy the checkpoint again"
            ) from None
        self.size: int = entry["bytes"]
        if self._file.size != self.size:
            self._file.close()
            raise DamagedError(
                f"{self._where} has {self._file.size:,} bytes, the manifest says {self.size:,}; copy the checkpoint "
                "again"
            )
        self._block_bytes: int = entry["block_bytes"]
        self._blocks: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._unused: list[memoryview] = []

    def read_into(self, start: int, out: memoryview, ahead_to: int | None = None) -> None:
        """Fill ``out`` from byte ``start`` on.

        Parameters
        ----------
        start
            First byte.
        out
            As many bytes as are wanted.
        ahead_to
            Byte up to which the caller will read on; blocks before it are read ahead.

        Raises
        ------
        DamagedError
            If a block is not what was written.
        """
        stop, size = start + len(out), self._block_bytes
        if stop > self.size:
            raise DamagedError(f"{self._where} ends at byte {self.size:,}, before what was to be read")
        last = -(-max(stop, ahead_to or 0) // size)
        at = start
        while at < stop:
            number = at // size
            for ahead in range(number, min(number + BLOCKS_UNDER_WAY, last)):
                self._begin(ahead)
            block = self._blocks[number].result()
            first = at - number * size
            count = min(len(block) - first, stop - at)
            out[at - start : at - start + count] = block[first : first + count]
            at += count

    def verify(self) -> Iterator[int]:
        """Read all of it; gives the bytes of one block after the other."""
        size = self._block_bytes
        for number in range(-(-self.size // size)):
            for ahead in range(number, min(number + BLOCKS_UNDER_WAY, -(-self.size // size))):
                self._begin(ahead)
            yield len(self._blocks[number].result())

    def close(self) -> None:
        """Close the file."""
        for future in self._blocks.values():
            if not future.cancel():
                future.exception()  # nothing may be read from a closed file
        self._blocks.clear()
        self._file.close()

    def _begin(self, number: int) -> None:
        """Have a block read, in the place of the one that was used least recently."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return
        if len(self._blocks) > BLOCKS_UNDER_WAY:
            _, oldest = self._blocks.popitem(last=False)
            self._unused.append(oldest.result())
        self._blocks[number] = self._threads.submit(self._read, number, self._unused.pop() if self._unused else None)

    def _read(self, number: int, buffer: memoryview | None) -> memoryview:
        size, hashes = self._block_bytes, self._entry["sha256"]
        start, stop = number * size, min((number + 1) * size, self.size)
        whole = memoryview(bytearray(min(size, self.size))) if buffer is None else memoryview(buffer.obj)
        block = whole[: stop - start]
        self._file.read_into(block, start)
        found = hashlib.sha256(block).hexdigest()
        if found != hashes[number]:
            raise DamagedError(
                f"{self._where}: block {number} of {len(hashes)} (bytes {start:,} … {stop - 1:,}) has SHA-256 "
                f"{found[:12]}…, the manifest says {hashes[number][:12]}…: its content has changed; copy the "
                "checkpoint again"
            )
        return block


class VerifiedFiles:
    """Files of a checkpoint, opened when they are first read.

    Parameters
    ----------
    place
        The checkpoint's directory.
    entries
        By name, what its manifest says of each.
    """

    def __init__(self, place: Directory, entries: Mapping[str, Entry]) -> None:
        self.place, self._entries = place, entries
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="hotbed-read")
        self._open: dict[str, BlockReader] = {}

    def __getitem__(self, name: str) -> BlockReader:
        if name not in self._entries:
            raise CheckpointError(f"{self.place} speaks of a file {name}, which its manifest does not list")
        if name not in self._open:
            if len(self._open) >= 2:  # each holds a few blocks
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = BlockReader(self.place, name, self._entries[name], self._threads)
        return self._open[name]

    def verify(self) -> Iterator[int]:
        """Read all of them; gives the bytes of one block after the other."""
        for name in self._entries:
            yield from self[name].verify()

    def __enter__(self) -> VerifiedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._open.values():
            reader.close()
        self._threads.shutdown(wait=True)
