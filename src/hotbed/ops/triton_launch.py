"""What all Triton launches share: compiler options and the rules for tile sizes.

There is no autotuning: a configuration that depends on a timing would make the bits of a run depend on it too. Tiles
are cut by two rules instead. A program works on about `TILE` elements, because four warps then have eight 16-byte loads
per thread in flight, enough to cover the latency of a random row; and a row is never split over programs, because a
reduction over its columns would then need a second launch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

TILE = 4096
"""Elements per program of a kernel that keeps one value per element (twice as many registers → half of it)."""

STRICT: dict[str, Any] = {"enable_fp_fusion": False}
"""Compiler options of every launch: a fused multiply-add would round once where the reference rounds twice."""


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, by: int) -> int:
    """Return ``n / by`` rounded up."""
    return -(-n // by)


def rows_per_program(columns: int, elements: int) -> int:
    """How many rows of ``columns`` (a power of two) make a tile of ``elements``: at least 1, at most 128."""
    return min(max(elements // columns, 1), 128)


@cache
def programs(device: torch.device) -> int:
    """How many programs share work whose amount only the device knows: 32 per multiprocessor.

    Several times what fits at once, so that the last wave is short; few enough that those without work cost nothing.
    """
    return 32 * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)
