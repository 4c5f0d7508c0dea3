"""Measure random reads from a disk, past the page cache where the system allows it."""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
import uuid
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hotbed.errors import RecipeError

READ_BYTES = 4096
"""Bytes of one read, a page, which is also the unit of reads of rows."""
THREADS = 16
"""Threads that read concurrently when the rate is measured."""
_READS_PER_THREAD = 512
_SINGLE_READS = 32
_PART = 8 << 20


class DiskRates(NamedTuple):
    """Measurements of a disk. ``read`` and ``latency`` have one value per repeat."""

    read: list[float]  # bytes/s of random reads by `THREADS` threads
    latency: list[float]  # median seconds of a single read by one thread
    how: str  # description of how the page cache was avoided


def disk_rates(folder: Path, nbytes: int, repeats: int) -> DiskRates:
    """Measure random reads from the disk of a directory, past the page cache if the system allows it.

    The reads are from a file of ``nbytes``, which is removed afterwards.
    """
    with _temporary_file(folder, nbytes) as path:
        opened, how = _open_direct(path)
        try:
            random_pages = random.Random(0)

            def offsets(count: int) -> list[int]:
                return [random_pages.randrange(nbytes // READ_BYTES) * READ_BYTES for _ in range(count)]

            latency: list[float] = []
            rates: list[float] = []
            with ThreadPoolExecutor(THREADS) as pool:
                for _ in range(repeats):
                    _drop_page_cache(opened)
                    latency.append(statistics.median(_read_pages(opened, [at]) for at in offsets(_SINGLE_READS)))
                    jobs = [offsets(_READS_PER_THREAD) for _ in range(THREADS)]
                    start = time.perf_counter()
                    list(pool.map(partial(_read_pages, opened), jobs))
                    rates.append(THREADS * _READS_PER_THREAD * READ_BYTES / (time.perf_counter() - start))
        finally:
            os.close(opened)
    return DiskRates(rates, latency, how)


def _read_pages(opened: int, offsets: list[int]) -> float:
    """Read pages one after another, and return the seconds of all reads."""
    page = mmap.mmap(-1, READ_BYTES)  # aligned, which direct reads require
    start = time.perf_counter()
    for at in offsets:
        if hasattr(os, "preadv"):
            os.preadv(opened, [page], at)
        else:
            os.lseek(opened, at, os.SEEK_SET)
            os.read(opened, READ_BYTES)
    return time.perf_counter() - start


@contextmanager
def _temporary_file(folder: Path, nbytes: int) -> Generator[Path]:
    """Yield a file of random bytes, which file systems cannot compress, and remove it afterwards."""
    part = random.Random(1).randbytes(min(_PART, nbytes))
    path = folder / f".hotbed-{uuid.uuid4().hex[:8]}.disk"
    try:
        with path.open("xb") as file:
            for start in range(0, nbytes, len(part)):
                file.write(part[: nbytes - start])
            file.flush()
            os.fsync(file.fileno())
        yield path
    except OSError as error:
        raise RecipeError(
            f"the disk of {folder} cannot be measured with a file of {nbytes:,} bytes ({error.strerror or error}). "
            "Use another DIR, or free some space"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def _open_direct(path: Path) -> tuple[int, str]:
    """Open a file for reads past the page cache. Return its descriptor, and how the cache is avoided."""
    direct: int = getattr(os, "O_DIRECT", 0)
    if direct and hasattr(os, "preadv"):
        with suppress(OSError):  # some file systems have no direct reads, e.g. older tmpfs
            opened = os.open(path, os.O_RDONLY | direct)
            try:
                os.preadv(opened, [mmap.mmap(-1, READ_BYTES)], 0)
                return opened, "O_DIRECT"
            except OSError:
                os.close(opened)
                raise
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    if _drop_page_cache(opened):
        return opened, "page cache dropped before each measurement"
    return opened, "through the page cache, which this system cannot drop, so memory was measured"


def _drop_page_cache(opened: int) -> bool:
    """Drop a file's pages from the page cache. Return False if the system cannot do this."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
