# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Allocate large CPU tensors in huge pages, and reuse their memory.

*Huge pages.* Random rows of a large arena cause TLB misses with pages of 4 KiB, but rarely with huge pages.

*Reuse.* glibc returns freed blocks above 32 MiB to the system. A new result of this size then costs a page fault per
4 KiB. For ``[4096, 26, 128]`` float32, this takes longer than the lookup that fills the result. Therefore the
blocks of results are kept, and reused when no tensor refers to them (docs/decisions/cpu.md).
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
"""File with the system's setting of transparent huge pages. The active choice is in brackets."""

PAGE_BYTES = 4096
"""Size of a normal page, and least size of a block."""

MAX_FREE_BYTES = 2 << 30
"""Limit of the memory that is kept for reuse. The oldest blocks are freed first."""

_returned: deque[mmap.mmap] = deque()
"""Blocks without references. The garbage collector may append at any moment, so appending must not need a lock."""
_free: list[mmap.mmap] = []
_lock = threading.Lock()
_observers: list[Callable[[Tensor], None]] = []


@contextmanager
def observing(observer: Callable[[Tensor], None]) -> Generator[None]:
    """Call ``observer`` with each tensor that `zeros` or `empty` maps in the body. torch does not see these tensors."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a zero-filled CPU tensor. On Linux, large tensors use huge pages."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not _is_mapped(nbytes):
        return torch.zeros(*shape, dtype=dtype, device="cpu")
    return _tensor(_aligned(_map(nbytes), nbytes), dtype, shape)


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialized CPU tensor. Large tensors reuse the memory of tensors that no longer exist."""
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
    # torch keeps the array alive while any tensor shares its storage.
    weakref.finalize(array, _returned.append, block).atexit = False
    return _tensor(array, dtype, shape)


def huge_pages_are_off() -> bool:
    """Return whether the system disables transparent huge pages. False if it does not report this."""
    try:
        return "[never]" in HUGE_PAGES.read_text(encoding="utf-8")
    except OSError:
        return False


def page_bytes(nbytes: int) -> int:
    """Return the page size of a tensor of ``nbytes`` from `zeros` or `empty`."""
    return HUGE_PAGE_BYTES if _is_mapped(nbytes) and not huge_pages_are_off() else PAGE_BYTES


def with_room(nbytes: int) -> int:
    """Round a size up to whole pages, by at most a quarter, so that tensors of similar sizes can reuse memory.

    For example, the number of distinct rows differs between batches.
    """
    step = max(1 << max(nbytes.bit_length() - 3, 0), PAGE_BYTES)
    return -(-nbytes // step) * step


def _is_mapped(nbytes: int) -> bool:
    """Return whether a tensor of ``nbytes`` gets its own mapping, in huge pages."""
    return sys.platform == "linux" and nbytes >= HUGE_PAGE_BYTES


def _tensor(array: np.ndarray[tuple[int], np.dtype[np.uint8]], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    made = torch.from_numpy(array)
    for observer in _observers:
        observer(made)
    return made.view(dtype).view(*shape)


def _map(nbytes: int) -> mmap.mmap:
    # The system fills anonymous pages with zeros on first use. One additional page allows to align the start.
    block = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _aligned(block: mmap.mmap, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    whole = np.frombuffer(block, np.uint8)
    skip = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[skip : skip + nbytes]
