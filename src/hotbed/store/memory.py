"""Tensors in the memory of a device, and in the host's memory as a device sees it."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.ops import cpu_memory

_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: for all contexts, and into the address space of devices."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised tensor; see `cpu_memory.empty`."""
    return cpu_memory.empty(shape, dtype) if device.type == "cpu" else torch.empty(*shape, dtype=dtype, device=device)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero-filled tensor; see `cpu_memory.zeros`."""
    return cpu_memory.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(*shape, dtype=dtype, device=device)


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised tensor in the host's memory for what goes to a device or comes from it.

    Page-locked, so that copies are asynchronous and at full speed; torch reuses it only after they have ended.
    """
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero-filled tensor of a device that lies in the host's memory; kernels read and write it there, in place.

    For CUDA the memory is page-locked, so that it has one address for host and device (unified virtual addressing), in
    huge pages. torch's own page-locked memory is not used: it comes in sizes of powers of two, and is never returned.

    Raises
    ------
    StoreError
        If it is more than this machine's memory, cannot be page-locked, or the system is not Linux.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or not nbytes:
        return zeros(shape, dtype, device)
    if sys.platform != "linux":
        raise StoreError(
            "rows in the host's memory that a device reads in place (host 'uva') need Linux, where host and device "
            "have one address for them; use host 'records'"
        )
    if nbytes > host_bytes():
        raise StoreError(
            f"{nbytes:,} bytes of rows or moments do not fit into this machine's memory of {host_bytes():,} bytes; use "
            "host 'records', whose rows come to be when they are trained, tier 'disk', or more ranks"
        )
    index = cast("int | None", device.index)
    place = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return torch.as_tensor(_PageLocked(nbytes, place), device=place).view(dtype).view(*shape)


def host_bytes() -> int:
    """Memory of this machine."""
    if sys.platform == "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 36


class _PageLocked:
    """Bytes of the host's memory that torch takes for a device's, by the CUDA array interface.

    The tensor that is made of it keeps it; when both are gone the memory is unlocked and returned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Pages of its own, which no other memory that is locked shares.
        memory = cpu_memory.zeros((max(nbytes, cpu_memory.HUGE_PAGE_BYTES),), torch.uint8)
        address = memory.data_ptr()
        cudart: Any = torch.cuda.cudart()
        try:
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
    cudart.cudaHostUnregister(memory.data_ptr())
