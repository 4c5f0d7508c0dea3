"""Tensors in the memory that belongs to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.ops import cpu_memory


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
