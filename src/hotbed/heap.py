"""Set what glibc's heap shares among threads, and keeps for later.

glibc lets every few threads allocate from a heap of their own (an arena), and what one thread allocates and another
frees goes back to the first one's. Batches and rows do that all the time, so free pieces pile up in each arena
(`share_heap`). And it returns large blocks to the system when they are freed, so each activation and gradient of a step
is mapped anew, at a page fault per 4 KiB (`keep_heap`).

Commands do so when they start; a library leaves the process's heap alone.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h, see mallopt(3)
HEAPS = 2
"""How many arenas the threads of a `hotbed` command share: with 1 or 2 an hour of training stays flat, with glibc's own
8 per core two thirds of its heap were free pieces after three minutes, and still more later (docs/log.md)."""


def share_heap(environment: Mapping[str, str]) -> bool:
    """Let all threads of this process allocate from few arenas of glibc; return whether this was set.

    Arenas of running threads stay, so call it before threads are started. ``MALLOC_ARENA_MAX`` or ``GLIBC_TUNABLES`` in
    the environment have precedence. Return False if the C library is not glibc.
    """
    return _set_heap(environment, {"MALLOC_ARENA_MAX": "arena_max"}, {_M_ARENA_MAX: HEAPS})


KEPT_BLOCK_BYTES = 1 << 30
"""Blocks up to this size come from the heap, which keeps them; larger ones go back to the system once freed."""
KEPT_BYTES = (1 << 31) - 1
"""Free memory at the end of the heap that is kept: mallopt takes no more."""


_kept = threading.Event()


def keep_heap(environment: Mapping[str, str]) -> bool:
    """Let glibc keep freed blocks for the next step; return whether this was set.

    Without it, a DLRM's step maps 130 MB of activations and gradients anew, with 33,000 page faults: 6 to 22 % of its
    time (docs/log.md). ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES`` in the environment
    have precedence. Return False if the C library is not glibc.
    """
    names = {"MALLOC_MMAP_THRESHOLD_": "mmap_threshold", "MALLOC_TRIM_THRESHOLD_": "trim_threshold"}
    options = {_M_MMAP_THRESHOLD: KEPT_BLOCK_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    if not _set_heap(environment, names, options):
        return False
    _kept.set()
    return True


def heap_is_kept() -> bool:
    """Whether `keep_heap` has succeeded in this process; nothing takes that back."""
    return _kept.is_set()


def apart(nbytes: int) -> memoryview:
    """Return zeroed memory that is no part of the heap and goes back to the system as soon as it is freed.

    A long-lived block between the blocks of steps keeps these from being joined, and a heap that keeps what is freed
    then grows with every step.
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))


def _set_heap(environment: Mapping[str, str], names: Mapping[str, str], options: Mapping[int, int]) -> bool:
    """Set options of glibc's heap, unless a variable of these names, or its tunable, is set."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(name in environment or f"glibc.malloc.{tunable}" in tunables for name, tunable in names.items()):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    done = [bool(libc.mallopt(option, value)) for option, value in options.items()]  # all, even after one that failed
    return all(done)
