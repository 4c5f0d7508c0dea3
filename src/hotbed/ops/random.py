"""Random numbers by counter: a hash of (seed, row, column), so a cell has the same bits wherever it is computed."""

from __future__ import annotations

from torch import Tensor


def random_bits(seeds: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """32 random bits per cell, ``[n, D]`` int64.

    Two rounds of MurmurHash3's 32-bit finalizer over the halves of the row, a third over the column added as a
    multiple of the golden ratio.

    Parameters
    ----------
    seeds
        32-bit seeds, 0-d or one per row, int64.
    rows
        ``[n]`` int64.
    cols
        ``[D]`` int64, or ``[n, D]`` where they differ from row to row.
    """
    key = _mix32(_mix32((rows & 0xFFFFFFFF) ^ seeds) ^ (rows >> 32) ^ 0x9E3779B9)
    return _mix32((key[:, None] + cols * 0x9E3779B9) & 0xFFFFFFFF)


def step_seeds(table_seeds: Tensor, steps: Tensor) -> Tensor:
    """Seeds ``[T]`` of the stochastic rounding in these steps of tables with these 32-bit seeds (int64)."""
    return _mix32(_mix32((steps & 0xFFFFFFFF) ^ table_seeds) ^ (steps >> 32) ^ 0x9E3779B9)


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on int64 tensors (torch lacks unsigned arithmetic)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
