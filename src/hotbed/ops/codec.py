"""Codecs: vectors as the bytes that cross a wire, and back. Plain PyTorch, any device.

An encoded vector is a row of bytes, so that every collective can carry it (Gloo knows no fp8 and no 16-bit integers).
For a value x of a row whose largest magnitude is m, all finite:

========  ===========  ==================================================================================
codec     bytes a row  largest error
========  ===========  ==================================================================================
``fp32``  4 D          none
``bf16``  2 D          2⁻⁸ |x| + 2⁻¹³⁴; from 3.39e38 on it arrives as infinity
``fp16``  2 D          2⁻¹¹ |x| + 2⁻²⁵; from 65,520 on it arrives as infinity
``int8``  D + 4        m / 254 + 2⁻¹¹⁹: steps of m / 127
``fp8``   D + 4        2⁻⁴ |x| + 2⁻¹⁰ m / 448 + 2⁻¹¹⁷: e4m3, of x · 448 / m
========  ===========  ==================================================================================

int8 and fp8 besides some roundings of float32. A row with an infinity or NaN arrives as NaN where the codec scales,
so that an overflow is never hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Codec = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
_CAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SCALE_BYTES = 4
_SMALLEST_SCALE = 2.0**-126
"""Below, a float32 has fewer digits, and a value over its scale could be too large for the codec."""


def encoded_bytes(codec: Codec, dim: int) -> int:
    """Bytes of an encoded vector of ``dim`` values."""
    return _CAST[codec].itemsize * dim if codec in _CAST else dim + _SCALE_BYTES


def encode(values: Tensor, codec: Codec) -> Tensor:
    """Vectors ``[n, D]`` float32 as ``[n, encoded_bytes]`` uint8."""
    if codec in _CAST:
        return values.to(_CAST[codec]).contiguous().view(torch.uint8)
    scale = values.abs().amax(dim=1, keepdim=True) / _LARGEST[codec]
    scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(torch.isfinite(scale), scale, torch.nan)
    scaled = torch.where(scale > 0, values / scale, 0.0)  # 0 where all are, and where the scale is NaN
    narrow = scaled.round().to(torch.int8) if codec == "int8" else scaled.to(torch.float8_e4m3fn)
    return torch.cat([narrow.view(torch.uint8), scale.view(-1).view(torch.uint8).view(-1, _SCALE_BYTES)], dim=1)


def decode(encoded: Tensor, codec: Codec) -> Tensor:
    """Vectors ``[n, D]`` float32 from what `encode` made of them."""
    if codec in _CAST:
        return encoded.view(_CAST[codec]).float()
    narrow, scale = encoded[:, :-_SCALE_BYTES], encoded[:, -_SCALE_BYTES:].flatten().clone()  # a clone is aligned
    values = narrow.view(torch.int8 if codec == "int8" else torch.float8_e4m3fn).float()
    return values * scale.view(torch.float32)[:, None]
