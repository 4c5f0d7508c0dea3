"""Write and read files in blocks. Writing records each block's SHA-256, and reading verifies a block before its use.

So a part of a file can be verified without the rest, and messages report which block is damaged. Background threads
hash, write and read.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

from hotbed.checkpoint.manifest import FileEntry
from hotbed.checkpoint.storage import Directory
from hotbed.errors import CheckpointError, DamagedError
from hotbed.machine import apart

BLOCK_BYTES = 16 << 20
"""Bytes of a block. The last block of a file may be shorter."""
BLOCKS_TO_WRITE = 1
"""Number of blocks that are hashed and written while the next block is filled."""
BLOCKS_READ = 5
"""Number of verified blocks of remote files that are cached in memory."""
BLOCKS_AHEAD = 4
"""Number of blocks that are verified concurrently when a caller reads sequentially."""
FILES_OPEN = 64
"""Number of files of a checkpoint that stay open, because tiles alternate between files."""
HASHED_AT_ONCE = 1 << 20
"""Bytes of a local file's block that are read and hashed together."""
FILES_UNDER_WAY = 8
"""Number of unfinished files that may be open."""


class BlockWriters:
    """Threads that hash and write the blocks of files."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(BLOCKS_TO_WRITE + 1)
        self._buffers: list[memoryview] = []
        self.files = threading.Semaphore(FILES_UNDER_WAY)
        """Counts the files that may still be opened."""
        self.hashing, self.writing, self.finishing = (
            ThreadPoolExecutor(count, f"hotbed-{name}") for name, count in (("hash", 2), ("write", 1), ("sync", 1))
        )

    def buffer(self) -> memoryview:
        """Return memory for a block. Wait until a previous block is written, if necessary."""
        self._free.acquire()
        return self._buffers.pop() if self._buffers else apart(BLOCK_BYTES)

    def release(self, buffer: memoryview | None) -> None:
        """Return the memory of a block, or None if the memory cannot be reused."""
        if buffer is not None:
            self._buffers.append(buffer)
        self._free.release()

    def close(self) -> None:
        """Stop the threads. Blocks that are not being written are dropped."""
        for pool in (self.hashing, self.writing):
            pool.shutdown(wait=True, cancel_futures=True)
        self.finishing.shutdown(wait=True)


class BlockWriter:
    """Write a file sequentially, with threads that the files of a checkpoint share."""

    def __init__(self, place: Directory, name: str, threads: BlockWriters) -> None:
        self._threads = threads
        threads.files.acquire()
        self._file = place.writer(name)
        self._block = threads.buffer()
        self._filled = 0
        self._hashes: list[Future[str]] = []
        self._writes: list[Future[None]] = []
        self._bytes = 0

    def write(self, data: memoryview) -> None:
        """Append a copy of some bytes."""
        self._bytes += len(data)
        while data:
            part = data[: BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._send()

    def finish(self) -> Future[FileEntry]:
        """Return a future of the file's entry. It completes when the file survives a power failure."""
        if self._filled:
            self._send()
        self._threads.release(self._block)
        return self._threads.finishing.submit(self._finish)

    def abandon(self) -> None:
        """Close the incomplete file."""
        for write in self._writes:
            if write.cancel():
                self._threads.release(None)
        self._threads.release(self._block)
        self._file.abandon()
        self._threads.files.release()

    def _send(self) -> None:
        """Start hashing and writing the block. Raise errors of earlier blocks."""
        for write in self._writes:
            if write.done():
                write.result()
        self._writes = [write for write in self._writes if not write.done()]
        block, size = self._block, self._filled
        hashed = self._threads.hashing.submit(lambda: hashlib.sha256(block[:size]).hexdigest())
        self._hashes.append(hashed)
        self._writes.append(self._threads.writing.submit(self._write, block, size, hashed))
        self._block, self._filled = self._threads.buffer(), 0

    def _write(self, block: memoryview, size: int, hashed: Future[str]) -> None:
        try:
            self._file.write(block[:size])
        finally:
            with suppress(CancelledError):
                hashed.exception()  # waits until the block is hashed
            self._threads.release(block)

    def _finish(self) -> FileEntry:
        try:
            for write in self._writes:
                write.result()
            self._file.finish()
        except BaseException:
            self._file.abandon()
            raise
        finally:
            self._threads.files.release()
        return FileEntry(bytes=self._bytes, block_bytes=BLOCK_BYTES, sha256=[h.result() for h in self._hashes])


class BlockCache:
    """The most recently used verified blocks of some files, and the threads that read and hash blocks."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="hotbed-read")
        self._blocks: OrderedDict[tuple[BlockReader, int], Future[memoryview]] = OrderedDict()
        self._unused: list[memoryview] = []

    def begin(self, file: BlockReader, number: int) -> Future[memoryview]:
        """Start reading a block into the memory of the least recently used block, unless it is cached."""
        key = file, number
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        if len(self._blocks) >= BLOCKS_READ:
            _, oldest = self._blocks.popitem(last=False)
            if oldest.exception() is None:
                self._unused.append(oldest.result())
        buffer = self._unused.pop() if self._unused else None
        self._blocks[key] = self._threads.submit(file.read_block, number, buffer)
        return self._blocks[key]

    def submit(self, check: Callable[[int], None], number: int) -> Future[None]:
        """Start verifying a block that is not cached."""
        return self._threads.submit(check, number)

    def forget(self, file: BlockReader) -> None:
        """Remove the blocks of a file before it is closed."""
        for key in [key for key in self._blocks if key[0] is file]:
            future = self._blocks.pop(key)
            if not future.cancel() and future.exception() is None:  # waits, because the file will be closed
                self._unused.append(future.result())

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=True)


class BlockReader:
    """Read parts of a file, and verify all blocks that contain them.

    A block of a local file is hashed once. Its parts are read from the file again, which is usually in the page cache.
    Blocks of a remote file are in the `BlockCache`. Raise `DamagedError` if the file does not exist, or if its size
    differs from its manifest entry.
    """

    def __init__(self, place: Directory, name: str, entry: FileEntry, cache: BlockCache) -> None:
        self._where, self._entry, self._cache = f"{place}/{name}", entry, cache
        try:
            self._file = place.reader(name)
        except FileNotFoundError:
            raise DamagedError(
                f"{self._where} is missing, but the manifest lists it. Copy the checkpoint again"
            ) from None
        self.size = entry.bytes
        if self._file.size != self.size:
            self._file.close()
            raise DamagedError(
                f"{self._where}: got {self._file.size:,} bytes, expected {self.size:,} by the manifest. Copy the "
                "checkpoint again"
            )
        self._block_bytes = entry.block_bytes
        self._checks: dict[int, Future[None]] = {}

    def read_into(self, start: int, out: memoryview, ahead_to: int | None = None) -> None:
        """Fill ``out`` with the bytes from ``start`` on. Raise `DamagedError` if a block has changed.

        Blocks before byte ``ahead_to`` are prefetched, if the caller passes it because it will read them next.
        """
        stop, size = start + len(out), self._block_bytes
        if stop > self.size:
            raise DamagedError(f"{self._where} ends at byte {self.size:,}, before the end of the requested bytes")
        last = -(-max(stop, ahead_to or 0) // size)
        at = start
        while at < stop:
            number = at // size
            first, count = at - number * size, min((number + 1) * size, stop) - at
            part = out[at - start : at - start + count]
            if self._file.is_local:
                self._check(number, last)
                self._file.read_into(part, at)
            else:
                part[:] = self._block(number, last)[first : first + count]
            at += count

    def verify(self) -> Iterator[int]:
        """Verify all blocks. Yield the number of bytes of each block."""
        size = self._block_bytes
        for number in range(-(-self.size // size)):
            (self._check if self._file.is_local else self._block)(number, -(-self.size // size))
            yield min(size, self.size - number * size)

    def close(self) -> None:
        """Close the file."""
        self._cache.forget(self)
        for check in self._checks.values():
            if not check.cancel():
                check.exception()  # waits, because the file will be closed
        self._checks.clear()
        self._file.close()

    def _check(self, number: int, last: int) -> None:
        """Verify a block if needed, and start verifying the next blocks before ``last``."""
        for ahead in range(number, max(min(number + BLOCKS_AHEAD, last), number + 1)):
            if ahead not in self._checks:
                self._checks[ahead] = self._cache.submit(self._check_block, ahead)
        self._checks[number].result()

    def _check_block(self, number: int) -> None:
        start, stop = number * self._block_bytes, min((number + 1) * self._block_bytes, self.size)
        found, buffer = hashlib.sha256(), memoryview(bytearray(min(HASHED_AT_ONCE, stop - start)))
        for at in range(start, stop, len(buffer)):
            part = buffer[: stop - at]
            self._file.read_into(part, at)
            found.update(part)
        self._check_hash(number, found.hexdigest())

    def _block(self, number: int, last: int) -> memoryview:
        """Return a verified block, and prefetch the next blocks before ``last``."""
        wanted = self._cache.begin(self, number)
        for ahead in range(number + 1, min(number + BLOCKS_AHEAD, last)):
            self._cache.begin(self, ahead)
        return wanted.result()

    def read_block(self, number: int, buffer: memoryview | None) -> memoryview:
        """Read and verify a block. Use the memory ``buffer`` if it is passed."""
        start, stop = number * self._block_bytes, min((number + 1) * self._block_bytes, self.size)
        if buffer is None or len(memoryview(buffer.obj)) < stop - start:
            buffer = apart(stop - start)
        block = memoryview(buffer.obj)[: stop - start]
        self._file.read_into(block, start)
        self._check_hash(number, hashlib.sha256(block).hexdigest())
        return block

    def _check_hash(self, number: int, found: str) -> None:
        """Raise `DamagedError` if a block's SHA-256 differs from the manifest."""
        hashes, start = self._entry.sha256, number * self._block_bytes
        stop = min(start + self._block_bytes, self.size)
        if found != hashes[number]:
            raise DamagedError(
                f"{self._where}: block {number} of {len(hashes)} (bytes {start:,} … {stop - 1:,}): its content has "
                f"changed: got SHA-256 {found[:12]}…, expected {hashes[number][:12]}… by the manifest. Copy the "
                "checkpoint again"
            )


class VerifiedFiles:
    """Files of a checkpoint, which are opened on first use. Several instances may share a ``cache``."""

    def __init__(self, place: Directory, entries: Mapping[str, FileEntry], cache: BlockCache | None = None) -> None:
        self.place, self._entries = place, entries
        self._cache, self._owns_cache = cache or BlockCache(), cache is None
        self._open: dict[str, BlockReader] = {}

    def __getitem__(self, name: str) -> BlockReader:
        if name not in self._entries:
            raise CheckpointError(f"{self.place}: got a reference to file {name}, expected files of the manifest")
        if name not in self._open:
            if len(self._open) >= FILES_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = BlockReader(self.place, name, self._entries[name], self._cache)
        return self._open[name]

    def verify(self) -> Iterator[int]:
        """Verify all blocks of all files. Yield the number of bytes of each block."""
        for name in self._entries:
            yield from self[name].verify()

    def __enter__(self) -> VerifiedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._open.values():
            reader.close()
        if self._owns_cache:
            self._cache.close()
