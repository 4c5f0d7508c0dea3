"""The narrow formats, decoded by hand: the value of every bit pattern, and what lies next to a number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
DTYPES = {"fp32": torch.float32, **NARROW}
SCALE_BLOCK = 128
MIN_EXPONENT, MAX_EXPONENT = -120, 122


def _values(exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> np.ndarray:
    """Value (float64) of every pattern of a sign, these exponent bits and these mantissa bits."""
    pattern = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    mantissa = pattern % 2**mantissa_bits
    exponent = pattern // 2**mantissa_bits % 2**exponent_bits
    sign = np.where(pattern // 2 ** (mantissa_bits + exponent_bits), -1.0, 1.0)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    value = sign * fraction * 2.0 ** (np.maximum(exponent, 1) - (2 ** (exponent_bits - 1) - 1))
    if infinities:
        special = exponent == 2**exponent_bits - 1
        return np.where(special, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    return np.where(
        pattern % 2 ** (exponent_bits + mantissa_bits) == 2 ** (exponent_bits + mantissa_bits) - 1, np.nan, value
    )


VALUES = {
    torch.bfloat16: _values(8, 7, infinities=True),
    torch.float16: _values(5, 10, infinities=True),
    torch.float8_e4m3fn: _values(4, 3, infinities=False),
}
_GRIDS = {dtype: np.unique(values[np.isfinite(values)]) for dtype, values in VALUES.items()}
LARGEST = {dtype: float(grid[-1]) for dtype, grid in _GRIDS.items()}


def bits(x: Tensor) -> np.ndarray:
    """The bit patterns of a tensor, as non-negative integers; int8 as it is."""
    if x.dtype == torch.int8:
        return x.numpy().astype(np.int64)
    size = x.element_size()
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return x.view(as_int).numpy().astype(np.int64) & (2 ** (8 * size) - 1)


def quanta(exponents: Tensor, dim: int) -> np.ndarray:
    """Distance of neighbouring int8 values ``[n, dim]`` (float64)."""
    return np.repeat(2.0 ** exponents.numpy().astype(np.float64), SCALE_BLOCK, axis=1)[:, :dim]


def decode(x: Tensor, exponents: Tensor | None = None) -> np.ndarray:
    """Rows ``[n, D]`` in float64, which holds every value of every format."""
    if x.dtype == torch.float32:
        return x.numpy().astype(np.float64)
    if x.dtype == torch.int8:
        q = bits(x)
        assert exponents is not None
        return np.where(q == -128, np.nan, q * quanta(exponents, x.shape[1]))
    return VALUES[x.dtype][bits(x)]


def neighbours(x: np.ndarray, dtype: torch.dtype, exponents: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The largest value of a format that is at most x, and the smallest that is at least x; ±∞ where there is none."""
    x = x.astype(np.float64)
    if dtype == torch.float32:
        return x, x
    if dtype == torch.int8:
        assert exponents is not None
        quantum = quanta(exponents, x.shape[1])
        low, high = np.floor(x / quantum), np.ceil(x / quantum)
        return np.where(low < -127, -np.inf, low * quantum), np.where(high > 127, np.inf, high * quantum)
    grid = np.concatenate([[-np.inf], _GRIDS[dtype], [np.inf]])
    return grid[np.searchsorted(grid, x, side="right") - 1], grid[np.searchsorted(grid, x, side="left")]


def smallest_exponents(x: np.ndarray) -> np.ndarray:
    """Smallest int8 exponents ``[n, blocks]`` whose largest value, 127 · 2^e, reaches every finite x: by trying all."""
    choices = range(MIN_EXPONENT, MAX_EXPONENT + 1)
    largest = np.where(np.isfinite(x), np.abs(x.astype(np.float64)), 0.0)
    blocks = [largest[:, c : c + SCALE_BLOCK].max(axis=1) for c in range(0, x.shape[1], SCALE_BLOCK)]
    return np.array([[next(e for e in choices if m <= 127 * 2.0**e) for m in block] for block in blocks]).T
