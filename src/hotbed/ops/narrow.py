"""Rows narrower than float32: what their bits mean, and how values are rounded into them. Plain PyTorch, any device.

==========  =========================  ==============================================
dtype       torch                      values
==========  =========================  ==============================================
``bf16``    bfloat16                   8 bits of precision, exponents of float32
``fp16``    float16                    11 bits, ±65,504
``fp8``     float8_e4m3fn              4 bits, ±448; NaN above
``int8``    int8 and an exponent per   q · 2^e, q from −127 to 127 (−128 is NaN), as
            block of 128 columns       MXINT8 of the OCP Microscaling Formats, but for
                                       the size of a block
==========  =========================  ==============================================

A scale is a power of two, so ``q · 2^e`` and the way back are exact in every backend, and a value that can be
represented stays as it is. The exponent of a block only grows: to the smallest that holds its largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.layout import SCALE_BLOCK

MIN_EXPONENT = -120
"""Smallest exponent of an int8 block, so that ``2^±e`` are normal numbers."""

INT8_NAN = -128

_FP8_LIMIT = 464.0  # half a quantum above the largest value
_MANTISSA = 0x7FFFFF
_LARGEST_MANTISSA = 0x7E0000  # of 127 / 64


def block_count(dim: int) -> int:
    """Exponents of an int8 row."""
    return -(-dim // SCALE_BLOCK)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2^exponent`` as float32 for int exponents from −126 to 127, exactly."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def exponents_of(values: Tensor) -> Tensor:
    """Smallest int8 exponents ``[n, blocks]`` that hold float32 values ``[n, D]``; infinities and NaN do not count."""
    magnitude = torch.where(values.isfinite(), values.abs(), 0.0)
    padded = torch.nn.functional.pad(magnitude, (0, -values.shape[1] % SCALE_BLOCK))
    bits = padded.unflatten(1, (-1, SCALE_BLOCK)).amax(2).view(torch.int32)
    needed = (bits >> 23) - 127 - 6 + ((bits & _MANTISSA) > _LARGEST_MANTISSA).int()
    return needed.clamp(min=MIN_EXPONENT).to(torch.int8)


def widen(narrow: Tensor, exponents: Tensor) -> Tensor:
    """Rows ``[n, D]`` as float32, exactly; ``exponents [n, blocks]`` are read for int8."""
    if narrow.dtype != torch.int8:
        return narrow.to(torch.float32)
    values = narrow.to(torch.float32) * power_of_two(_by_column(exponents, narrow.shape[1]))
    return values.masked_fill(narrow == INT8_NAN, torch.nan)


def round_nearest(values: Tensor, dtype: torch.dtype, exponents: Tensor) -> Tensor:
    """Float32 values ``[n, D]`` rounded to the nearest, ties to even; int8 by these exponents ``[n, blocks]``."""
    if dtype != torch.int8:
        return _cast(values, dtype)
    q = torch.round(values * power_of_two(-_by_column(exponents, values.shape[1])))
    return q.masked_fill(~values.isfinite(), INT8_NAN).to(torch.int8)


def round_stochastic(values: Tensor, dtype: torch.dtype, exponents: Tensor, random: Tensor) -> Tensor:
    """Round to one of the two neighbours, up in magnitude with the probability that makes the mean right.

    Parameters
    ----------
    values
        ``[n, D]`` float32. What can be represented stays as it is, infinities and NaN too (int8: NaN).
    dtype
        Of the result. Above its largest value lies infinity (fp8: NaN).
    exponents
        ``[n, blocks]`` int8, large enough for the values; read for int8.
    random
        ``[n, D]`` int64, 32 random bits each; the upper 24 are used, 16 for bf16.
    """
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        rounded = torch.where(values.isfinite(), bits + (random >> 16), bits) & 0xFFFF0000
        rounded = torch.where(values.isnan(), bits | 0x400000, rounded)
        return (rounded >> 16).to(torch.uint16).view(torch.bfloat16)
    if dtype == torch.int8:
        quantum = _by_column(exponents, values.shape[1]).to(torch.int32)
    else:
        smallest, digits = (-14, 10) if dtype == torch.float16 else (-6, 3)
        quantum = (((bits >> 23) & 0xFF) - 127).clamp(min=smallest).to(torch.int32) - digits
        quantum = torch.where(values.isfinite(), quantum, 0)
    y = values.abs() * power_of_two(-quantum)
    low = torch.floor(y)
    q = torch.copysign(low + ((random >> 8).float() * 2.0**-24 < y - low).float(), values)
    if dtype == torch.int8:
        return q.masked_fill(~values.isfinite(), INT8_NAN).to(torch.int8)
    return _cast(torch.where(values.isfinite(), q * power_of_two(quantum), values), dtype)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest; what float8_e4m3fn cannot hold becomes NaN (versions of torch differ: some give ±448)."""
    if dtype == torch.float8_e4m3fn:
        values = torch.where(
            values.abs() <= _FP8_LIMIT, values, torch.copysign(torch.full_like(values, torch.nan), values)
        )
    return values.to(dtype)


def _by_column(exponents: Tensor, dim: int) -> Tensor:
    """Exponents ``[n, blocks]`` as ``[n, D]``."""
    return exponents.repeat_interleave(SCALE_BLOCK, dim=1)[:, :dim]
