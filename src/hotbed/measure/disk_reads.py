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
"""Size of one read: a page, which a record of a row is read with."""
THREADS = 16
"""Threads that read at once, for the rate."""
_READS_PER_THREAD = 512
_SINGLE_READS = 32
_PART = 8 << 20


class DiskRates(NamedTuple):
    """What was measured; ``read`` and ``latency`` have a value for each repeat."""

    read: list[float]  # bytes/s of `THREADS` threads that read pages at random
    latency: list[float]  # seconds of a single read by one thread, medians
    how: str  # how the page cache was avoided, in words


def disk_rates(folder: Path, nbytes: int, repeats: int) -> DiskRates:
    """Measure the disk of a directory with a file of ``nbytes``, which is removed afterwards."""
    with _file(folder, nbytes) as path:
        opened, how = _open(path)
        try:
            places = random.Random(0)

            def offsets(count: int) -> list[int]:
                return [places.randrange(nbytes // READ_BYTES) * READ_BYTES for _ in range(count)]

            latency: list[float] = []
            rates: list[float] = []
            with ThreadPoolExecutor(THREADS) as pool:
                for _ in range(repeats):
                    _drop(opened)
                    latency.append(statistics.median(_read(opened, [at]) for at in offsets(_SINGLE_READS)))
                    jobs = [offsets(_READS_PER_THREAD) for _ in range(THREADS)]
                    start = time.perf_counter()
                    list(pool.map(partial(_read, opened), jobs))
                    rates.append(THREADS * _READS_PER_THREAD * READ_BYTES / (time.perf_counter() - start))
        finally:
            os.close(opened)
    return DiskRates(rates, latency, how)


def _read(opened: int, offsets: list[int]) -> float:
    """Read pages one after the other; return the seconds that it takes."""
    page = mmap.mmap(-1, READ_BYTES)  # aligned, as direct reads need it
    start = time.perf_counter()
    for at in offsets:
        if hasattr(os, "preadv"):
            os.preadv(opened, [page], at)
        else:
            os.lseek(opened, at, os.SEEK_SET)
            os.read(opened, READ_BYTES)
    return time.perf_counter() - start


@contextmanager
def _file(folder: Path, nbytes: int) -> Generator[Path]:
    """Make a file of real blocks that no file system can compress away, and remove it."""
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
            f"the disk of {folder} cannot be measured with a file of {nbytes:,} bytes ({error.strerror or error}); "
            "name another DIR, or free some space"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def _open(path: Path) -> tuple[int, str]:
    """Open a file to be read past the page cache; return its descriptor, and how the cache is avoided."""
    direct: int = getattr(os, "O_DIRECT", 0)
    if direct and hasattr(os, "preadv"):
        with suppress(OSError):  # some file systems, as tmpfs was for long, have none
            opened = os.open(path, os.O_RDONLY | direct)
            try:
                os.preadv(opened, [mmap.mmap(-1, READ_BYTES)], 0)
                return opened, "O_DIRECT"
            except OSError:
                os.close(opened)
                raise
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    if _drop(opened):
        return opened, "page cache dropped before each measurement"
    return opened, "through the page cache, which cannot be dropped here: it is memory that was measured"


def _drop(opened: int) -> bool:
    """Drop what the page cache has of a file; False where the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
