# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Allocate large CPU tensors: in huge pages, and in memory that is used again.

*Huge pages.* Random rows of a large arena miss the TLB on 4 KiB pages; with transparent huge pages they rarely do.

*Recycling.* glibc returns blocks over 32 MiB to the system when they are freed, so a fresh result of that size costs a
page fault per 4 KiB: for ``[4096, 26, 128]`` float32 more than the lookup that fills it (docs/log.md). Blocks for
results are kept and handed out again once no tensor refers to them.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Size of a transparent huge page on x86-64, and on AArch64 with 4 KiB base pages."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""What Linux says of transparent huge pages; the choice is in brackets."""

PAGE_BYTES = 4096
"""Least size of a block of memory."""

MAX_FREE_BYTES = 2 << 30
"""Memory kept for later; blocks that have waited longest are given up first."""

_returned: deque[mmap.mmap] = deque()
"""Blocks nobody refers to any more. The garbage collector appends here at any moment, so no lock may be needed to."""
_free: list[mmap.mmap] = []
_lock = threading.Lock()
_observers: list[Callable[[Tensor], None]] = []


@contextmanager
def observing(observer: Callable[[Tensor], None]) -> Generator[None]:
    """Call ``observer`` with each tensor that `zeros` and `empty` map inside; no operation of torch makes these."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zero-filled CPU tensor, in huge pages where it is large and the system is Linux."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not _is_mapped(nbytes):
        return torch.zeros(*shape, dtype=dtype, device="cpu")
    return _tensor(_aligned(_map(nbytes), nbytes), dtype, shape)


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised CPU tensor; a large one reuses the memory of an earlier one that is no longer in use."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not _is_mapped(nbytes):
        return torch.empty(*shape, dtype=dtype, device="cpu")
    with _lock:
        while _returned:
            _free.append(_returned.popleft())
        fitting = [block for block in _free if nbytes <= len(block) - HUGE_PAGE_BYTES <= 2 * nbytes]
        block = min(fitting, key=len) if fitting else None
        if block is not None:
            _free.remove(block)
        while sum(map(len, _free)) > MAX_FREE_BYTES:
            _free.pop(0)
    if block is None:
        block = _map(with_room(nbytes))
    array = _aligned(block, nbytes)
    # torch holds the array for as long as any tensor shares its storage.
    weakref.finalize(array, _returned.append, block).atexit = False
    return _tensor(array, dtype, shape)


def huge_pages_are_off() -> bool:
    """Whether Linux gives nobody transparent huge pages; not where it does not say."""
    try:
        return "[never]" in HUGE_PAGES.read_text(encoding="utf-8")
    except OSError:
        return False


def page_bytes(nbytes: int) -> int:
    """Size of the pages in which `zeros` and `empty` have so many bytes."""
    return HUGE_PAGE_BYTES if _is_mapped(nbytes) and not huge_pages_are_off() else PAGE_BYTES


def with_room(nbytes: int) -> int:
    """Round a size up to whole pages and by a quarter at most, so that sizes that vary fit into one another's memory.

    As of what follows the distinct rows of a batch.
    """
    step = max(1 << max(nbytes.bit_length() - 3, 0), PAGE_BYTES)
    return -(-nbytes // step) * step


def _is_mapped(nbytes: int) -> bool:
    """Whether a tensor of so many bytes gets a map of its own, in huge pages."""
    return sys.platform == "linux" and nbytes >= HUGE_PAGE_BYTES


def _tensor(array: np.ndarray[tuple[int], np.dtype[np.uint8]], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    made = torch.from_numpy(array)
    for observer in _observers:
        observer(made)
    return made.view(dtype).view(*shape)


def _map(nbytes: int) -> mmap.mmap:
    # Anonymous maps are zero-filled at first touch; one page more than needed leaves room to align the start.
    block = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _aligned(block: mmap.mmap, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    whole = np.frombuffer(block, np.uint8)
    skip = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[skip : skip + nbytes]
