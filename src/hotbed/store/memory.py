"""Allocate tensors in device memory, or in host memory that the device can address; explain what does not fit."""

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
"""Where ``/proc`` and ``/sys`` are."""
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: files of the limit and of what is used; in ``memory.stat``, what can be reclaimed."""
CHECKED_BYTES = 64 << 20
"""Fewer bytes are allocated without asking how many are free."""
_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: for all contexts, and into the address space of devices."""


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised tensor; see `large_tensors.empty`."""
    with _explained(shape, dtype, device):
        if device.type == "cpu":
            return large_tensors.empty(shape, dtype)
        return torch.empty(*shape, dtype=dtype, device=device)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a zero-filled tensor; see `large_tensors.zeros`."""
    with _explained(shape, dtype, device):
        if device.type == "cpu":
            return large_tensors.zeros(shape, dtype)
        return torch.zeros(*shape, dtype=dtype, device=device)


def refuse_too_many(nbytes: int, device: torch.device, by_tier: Mapping[Tier, int] | None = None) -> None:
    """Raise `StoreError` for more bytes of rows than are free in the host's memory.

    The system would grant them, and kill the process when it fills them with initial values. ``by_tier`` is what all
    rows and moments would take in each memory, for the message.
    """
    if device.type != "cpu" or nbytes < CHECKED_BYTES:
        return
    free = available_bytes(device)
    if free is not None and nbytes > free:
        shares = ", ".join(f"{tier} {count:,}" for tier, count in (by_tier or {}).items())
        raise StoreError(_too_many(nbytes, device) + (f". Bytes by tier: {shares}" if shares else ""))


def available_bytes(device: torch.device) -> int | None:
    """Count bytes that can still be allocated within the limits of this process's control groups; None if unknown."""
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
    """Yield what each control group that this process is in may still take."""
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
            continue  # in a container the group's own path need not be there


@contextmanager
def _explained(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Generator[None]:
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StoreError(_too_many(math.prod(shape) * dtype.itemsize, device)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed for lack of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's allocator of the CPU raises a plain RuntimeError.
    text = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or text in str(error)


def why_out_of_memory(error: Exception) -> str | None:
    """Explain an error if it is one of memory that is not of tables, as of a model's layers or a batch."""
    if not is_out_of_memory(error):
        return None
    device = torch.device("cuda" if isinstance(error, torch.OutOfMemoryError) else "cpu")
    reason = (str(error).strip() or "out of memory").splitlines()[0]
    return (
        f"{reason}; {available_bytes(device) or 0:,} bytes of {device.type} memory are free: lower train.batch_size or "
        "the model's sizes, or give tables another memory with memory.tier host or disk"
    )


def _too_many(nbytes: int, device: torch.device) -> str:
    free = available_bytes(device)
    there = "more than the system gives" if free is None else f"but {free:,} bytes of it are free"
    host = None if device.type == "cpu" else available_bytes(torch.device("cpu"))
    tier = "disk" if host is None or nbytes > host else "host"
    return (
        f"{nbytes:,} bytes of {device.type} memory are needed for rows or moments at once, {there}; memory.tier {tier} "
        f"(Cut(tier='{tier}')) would hold them, for only rows that are trained take room there, or use more ranks, "
        "fewer rows or columns, or a narrower dtype"
    )


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised tensor in the host's memory for copies to a device or from it.

    Page-locked, so that copies are asynchronous and at full speed; torch reuses it only after they have ended.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of the host to a device, without waiting for it; on the CPU they stay where they are."""
    if device.type == "cpu":
        return values
    staged = staging(values.shape, values.dtype, device)
    return staged.copy_(values).to(device, non_blocking=True)


class Arriving:
    """Copy values of a device to page-locked memory of the host; `wait` gives the copies when they have arrived.

    Values that are on the host already are given as they are.
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
        """Wait for what the device was given before these copies, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


def to_host(values: Tensor) -> Tensor:
    """Copy values of a device to page-locked memory of the host, and wait until they have arrived."""
    return Arriving(values).wait()[0]


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros in the host's memory, which kernels of the device read and write in place.

    For CUDA the memory is page-locked, so that it has one address for host and device (unified virtual addressing), in
    huge pages. torch's own page-locked memory is not used, because it comes in sizes of powers of two and is never
    returned. Raise `StoreError` if the memory is too small or cannot be page-locked, or the system is not Linux.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or not nbytes:
        return allocate_zeros(shape, dtype, device)
    if sys.platform != "linux":
        raise StoreError(
            "rows in the host's memory that a device reads in place (host 'uva') need Linux, where host and device "
            "have one address for them; use host 'records'"
        )
    if nbytes > host_bytes():
        raise StoreError(
            f"{nbytes:,} bytes of rows or moments do not fit into this machine's memory of {host_bytes():,} bytes; use "
            "host 'records', whose rows are materialized on their first update, tier 'disk', or more ranks"
        )
    index = cast("int | None", device.index)
    place = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return torch.as_tensor(_PageLocked(nbytes, place), device=place).view(dtype).view(*shape)


def host_bytes() -> int:
    """Return the bytes of memory of this machine."""
    if sys.platform == "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 36


class _PageLocked:
    """Offer bytes of the host's memory to torch as a device's, by the CUDA array interface.

    The tensor that is made of it keeps it; when both are gone the memory is unlocked and returned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Pages of its own, which no other memory that is locked shares.
        memory = large_tensors.zeros((max(nbytes, large_tensors.HUGE_PAGE_BYTES),), torch.uint8)
        address = memory.data_ptr()
        cudart: Any = torch.cuda.cudart()
        try:
            with torch.cuda.device(device):  # else the current device would get a context, and its memory
                torch.cuda.check_error(cudart.cudaHostRegister(address, memory.nbytes, _PORTABLE | _MAPPED))
        except RuntimeError as error:
            raise StoreError(
                f"{memory.nbytes:,} bytes of the host's memory cannot be page-locked ({error}); this machine has "
                f"{host_bytes():,} bytes; use host 'records', tier 'disk', or more ranks"
            ) from None
        weakref.finalize(self, _unlock, memory, device).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _unlock(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still be at work on it
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        cudart.cudaHostUnregister(memory.data_ptr())
