"""Allocate tensors in device memory, or in host memory that the device can address, and explain failures."""

from __future__ import annotations

import errno
import math
import os
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hotbed import large_tensors
from hotbed.errors import StoreError
from hotbed.machine import control_groups
from hotbed.specs import Tier

ROOT = Path("/")
"""Parent directory of ``/proc`` and ``/sys``."""
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files with the limit and the usage, and the key of reclaimable bytes in
``memory.stat``."""
CHECKED_BYTES = 64 << 20
"""Allocations below this size are not compared with the free memory."""
_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: valid in all contexts, and mapped into the address space of devices."""


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor. See `large_tensors.empty`."""
    with _explained(shape, dtype, device):
        if device.type == "cpu":
            return large_tensors.empty(shape, dtype)
        return torch.empty(*shape, dtype=dtype, device=device)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a zero-filled tensor. See `large_tensors.zeros`."""
    with _explained(shape, dtype, device):
        if device.type == "cpu":
            return large_tensors.zeros(shape, dtype)
        return torch.zeros(*shape, dtype=dtype, device=device)


def refuse_too_many(nbytes: int, device: torch.device, by_tier: Mapping[Tier, int] | None = None) -> None:
    """Raise `StoreError` if ``nbytes`` of rows are more than the free memory of the host.

    Otherwise the allocation would succeed, and the system would kill the process when initial values are written. The
    message shows ``by_tier``, the bytes of all rows and moments in each memory.
    """
    if device.type != "cpu" or nbytes < CHECKED_BYTES:
        return
    free = available_bytes(device)
    if free is not None and nbytes > free:
        shares = ", ".join(f"{tier} {count:,}" for tier, count in (by_tier or {}).items())
        raise StoreError(_too_many(nbytes, device) + (f". Bytes by tier: {shares}" if shares else ""))


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated within the limits of this process's control groups. None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = (ROOT / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    if "MemAvailable" not in found:
        return None
    return min([found["MemAvailable"] + found.get("SwapFree", 0), *_of_groups()])


def _of_groups() -> Iterator[int]:
    """Yield the bytes that each control group of this process may still allocate."""
    for folder, group_version in control_groups("memory", ROOT):
        limit, used, cache = _GROUP_FILES[group_version]
        try:
            most = (folder / limit).read_text(encoding="utf-8").strip()
            if most == "max":
                continue
            stat = dict(s.split() for s in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
            reclaimable = int(stat.get(cache, 0))
            yield max(int(most) - int((folder / used).read_text(encoding="utf-8")) + reclaimable, 0)
        except (OSError, ValueError):
            continue  # in a container, the path of the group may be missing


@contextmanager
def _explained(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Generator[None]:
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StoreError(_too_many(math.prod(shape) * dtype.itemsize, device)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed for lack of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # The CPU allocator of torch raises a plain RuntimeError.
    text = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or text in str(error)


def why_out_of_memory(error: Exception) -> str | None:
    """Return advice for an out-of-memory error outside of tables, e.g. of a layer. None for other errors."""
    if not is_out_of_memory(error):
        return None
    device = torch.device("cuda" if isinstance(error, torch.OutOfMemoryError) else "cpu")
    reason = (str(error).strip() or "out of memory").splitlines()[0]
    return (
        f"{reason}; {available_bytes(device) or 0:,} bytes of {device.type} memory are free. Reduce train.batch_size "
        "or the sizes of the model's layers, or move tables to other memory with memory.tier host or disk"
    )


def _too_many(nbytes: int, device: torch.device) -> str:
    free = available_bytes(device)
    expected = "less" if free is None else f"at most the {free:,} free bytes"
    host = None if device.type == "cpu" else available_bytes(torch.device("cpu"))
    tier = "disk" if host is None or nbytes > host else "host"
    return (
        f"rows or moments in {device.type} memory: got {nbytes:,} bytes, expected {expected}. Use memory.tier {tier} "
        f"(Cut(tier='{tier}')), where only trained rows take memory, or more ranks, fewer rows or columns, or a "
        "smaller dtype"
    )


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor in the host's memory for copies to or from a device.

    The memory is page-locked, so that copies are asynchronous and fast. torch reuses it only after the copies.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to a device, without synchronization. For the CPU, return the values themselves."""
    if device.type == "cpu":
        return values
    staged = staging(values.shape, values.dtype, device)
    return staged.copy_(values).to(device, non_blocking=True)


class HostCopy:
    """Start copies of device tensors to page-locked memory of the host. `wait` returns the finished copies.

    Tensors that are on the host are not copied.
    """

    def __init__(self, *values: Tensor) -> None:
        self._copied = None
        if values[0].device.type != "cuda":
            self._values = tuple(v.cpu() for v in values)
            return
        self._values, self._copied = tuple(staging(v.shape, v.dtype, v.device) for v in values), torch.cuda.Event()
        for arriving, value in zip(self._values, values, strict=True):
            arriving.copy_(value, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(values[0].device))

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(v.nbytes for v in self._values)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the copies, and so for all device work that was queued before them, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


def to_host(values: Tensor) -> Tensor:
    """Return a copy of device values in page-locked memory of the host, with one synchronization."""
    return HostCopy(values).wait()[0]


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros in the host's memory, which kernels on the device read and write in place.

    For CUDA, the memory is page-locked and uses huge pages. Host and device see it at the same address (unified virtual
    addressing). torch's page-locked memory is not used, because its sizes are powers of two and it is never released.
    Raise `StoreError` if there is too little memory, if it cannot be page-locked, or if the system is not Linux.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or not nbytes:
        return allocate_zeros(shape, dtype, device)
    if sys.platform != "linux":
        raise StoreError(
            f"memory.host: got 'uva' on {sys.platform}, expected Linux, where a device can read the host's memory in "
            "place. Use memory.host 'records'"
        )
    if nbytes > host_bytes():
        raise StoreError(
            f"rows or moments in the host's memory: got {nbytes:,} bytes, expected at most {host_bytes():,} bytes. Use "
            "memory.host 'records', where only trained rows take memory, memory.tier 'disk', or more ranks"
        )
    index = cast("int | None", device.index)
    place = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return torch.as_tensor(_PageLocked(nbytes, place), device=place).view(dtype).view(*shape)


def host_bytes() -> int:
    """Return this machine's bytes of memory."""
    if sys.platform == "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 36


class _PageLocked:
    """Page-locked host memory that torch sees as device memory, through the CUDA array interface.

    The tensor made from this object keeps it alive. The memory is unlocked and freed after the tensor.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # The memory has pages of its own, because a page must not be locked twice.
        memory = large_tensors.zeros((max(nbytes, large_tensors.HUGE_PAGE_BYTES),), torch.uint8)
        address = memory.data_ptr()
        cudart: Any = torch.cuda.cudart()
        try:
            with torch.cuda.device(device):  # otherwise a context, which takes memory, is created on the current device
                torch.cuda.check_error(cudart.cudaHostRegister(address, memory.nbytes, _PORTABLE | _MAPPED))
        except RuntimeError as error:
            raise StoreError(
                f"cannot page-lock {memory.nbytes:,} of {host_bytes():,} bytes of the host's memory ({error}). Use "
                "memory.host 'records', memory.tier 'disk', or more ranks"
            ) from None
        weakref.finalize(self, _unlock, memory, device).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _unlock(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # because kernels may still use the memory
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        cudart.cudaHostUnregister(memory.data_ptr())
