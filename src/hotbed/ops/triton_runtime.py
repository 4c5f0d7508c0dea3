# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Provide the common parts of Triton kernels: compiler options, tile sizes, constants and random bits.

Kernels are not autotuned, because the bits of a run would then depend on timings. Two rules determine the tiles
instead. First, a program processes about `TILE` elements. Four warps then have eight 16-byte loads per thread in
flight, which covers the latency of a random row. Second, one program processes whole rows, because otherwise a sum over
columns would need a second kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from hotbed.ops import layout

TILE = 4096
"""Elements per program of a kernel that keeps one value per element. With two values, use half of it."""

STRICT: dict[str, Any] = {"enable_fp_fusion": False}
"""Compiler options of every launch. A fused multiply-add would round once, but the reference rounds twice."""


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, by: int) -> int:
    """Return ``n / by`` rounded up."""
    return -(-n // by)


def rows_per_program(columns: int, elements: int) -> int:
    """Return the number of rows of ``columns`` (a power of two) in a tile of ``elements``, from 1 to 128."""
    return min(max(elements // columns, 1), 128)


@cache
def programs(device: torch.device) -> int:
    """Return the number of programs for work of a size that only the device knows: 32 per multiprocessor.

    This is several times the number of concurrent programs, so that the last wave is short. It is small enough that
    idle programs cost almost no time.
    """
    return 32 * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)


START = tl.constexpr(layout.START)
FIXED = tl.constexpr(layout.FIXED)
RAGGED_ROW = tl.constexpr(layout.RAGGED_ROW)
BASE = tl.constexpr(layout.BASE)
POOLING = tl.constexpr(layout.POOLING)
OUT = tl.constexpr(layout.OUT)
TABLE = tl.constexpr(layout.TABLE)
FEATURE = tl.constexpr(layout.TABLE + 1)
"""Columns of `BagLayout.features`."""

FIRST_SLOT = tl.constexpr(layout.FIRST_SLOT)
WIDE_ROWS = tl.constexpr(layout.WIDE_ROWS)
FIRST_WIDE = tl.constexpr(layout.FIRST_WIDE)
FIRST_NARROW = tl.constexpr(layout.FIRST_NARROW)
FIRST_ROW = tl.constexpr(layout.FIRST_ROW)
ROW_STEP = tl.constexpr(layout.ROW_STEP)
FIRST_COL = tl.constexpr(layout.FIRST_COL)
TABLE_ENTRY = tl.constexpr(layout.FIRST_COL + 1)
"""Columns of `Rows.tables`."""

ACTIVE = tl.constexpr(layout.ACTIVE)
LR = tl.constexpr(layout.LR)
MAX_GRAD_NORM = tl.constexpr(layout.MAX_GRAD_NORM)
MAX_NORM = tl.constexpr(layout.MAX_NORM)
L2 = tl.constexpr(layout.L2)
DECAY = tl.constexpr(layout.DECAY)
OWN = tl.constexpr(layout.OWN)

RUN = tl.constexpr(layout.RUN)
LONG = tl.constexpr(layout.LONG)
BLOCK = tl.constexpr(layout.BLOCK)
SCALE_BLOCK = tl.constexpr(layout.SCALE_BLOCK)


@triton.jit
def random_bits(seed, row, col):
    """Return 32 random bits per element, ``[R, C]`` uint32.

    ``seed`` is a scalar or ``[R]`` of 32-bit integers, ``row`` is ``[R]`` int64, and ``col`` is ``[1 or R, C]``.
    """
    key = _mix32((row & 0xFFFFFFFF).to(tl.uint32) ^ seed.to(tl.uint32))
    key = _mix32(key ^ (row >> 32).to(tl.uint32) ^ 0x9E3779B9)
    return _mix32(key[:, None] + col.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _mix32(x):
    """Apply MurmurHash3's 32-bit finalizer. ``x`` is uint32, so products wrap and shifts are logical."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
