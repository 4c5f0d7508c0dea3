"""Convert rows between float32 and their stored or transmitted dtype, in plain PyTorch on any device.

*Random bits* are a hash of (seed, row, column). Therefore an element has the same bits on every device and rank.

*Low-precision rows* (the tensor ``narrow``) have fewer bits than float32. Values are rounded to their dtype:

==========  =========================  ==============================================
dtype       torch                      values
==========  =========================  ==============================================
``bf16``    bfloat16                   8 bits of precision, exponents of float32
``fp16``    float16                    11 bits, ±65,504
``fp8``     float8_e4m3fn              4 bits, ±448; NaN above
``int8``    int8 and an exponent per   q · 2^e, q from −127 to 127 (−128 is NaN), as
            block of 128 columns       MXINT8 of the OCP Microscaling Formats, except
                                       for the size of a block
==========  =========================  ==============================================

A scale is a power of two. Therefore ``q · 2^e`` and its inverse are exact in every backend, and representable values do
not change. The exponent of a block never decreases. It grows to the smallest exponent that holds the largest value.

*Codecs* encode vectors as the bytes that ranks exchange, and decode them. An encoded vector is a row of bytes, so that
every collective supports it (Gloo has no fp8 and no 16-bit integers). The table has the errors for a value x of a
finite row with largest magnitude m:

========  ===========  ==================================================================================
codec     bytes a row  largest error
========  ===========  ==================================================================================
``fp32``  4 D          none
``bf16``  2 D          2⁻⁸ |x| + 2⁻¹³⁴; from 3.39e38 on it arrives as infinity
``fp16``  2 D          2⁻¹¹ |x| + 2⁻²⁵; from 65,520 on it arrives as infinity
``int8``  D + 4        m / 254 + 2⁻¹¹⁹: steps of m / 127
``fp8``   D + 4        2⁻⁴ |x| + 2⁻¹⁰ m / 448 + 2⁻¹¹⁷: e4m3, of x · 448 / m
========  ===========  ==================================================================================

int8 and fp8 have some additional float32 rounding. With these codecs, a row with an infinity or NaN is decoded as NaN,
so that an overflow is never hidden.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hotbed.config.parallel_memory import Codec
from hotbed.ops.layout import (
    FIRST_COL,
    FIRST_NARROW,
    FIRST_ROW,
    FIRST_SLOT,
    FIRST_WIDE,
    ROW_STEP,
    SCALE_BLOCK,
    WIDE_ROWS,
    Rows,
)


def random_bits(seeds: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Return 32 random bits per element, ``[n, D]`` int64, for rows ``[n]`` and columns ``[D]`` or ``[n, D]``.

    The bits are two rounds of MurmurHash3's 32-bit finalizer over the halves of the row, and a third round over the
    column. The column is added as a multiple of the golden ratio. ``seeds`` are 32-bit, 0-d or one per row.
    """
    key = _mix32(_mix32((rows & 0xFFFFFFFF) ^ seeds) ^ (rows >> 32) ^ 0x9E3779B9)
    return _mix32((key[:, None] + cols * 0x9E3779B9) & 0xFFFFFFFF)


def step_seeds(table_seeds: Tensor, steps: Tensor) -> Tensor:
    """Return the seeds ``[T]`` of stochastic rounding for tables with these 32-bit seeds in these steps (int64)."""
    return _mix32(_mix32((steps & 0xFFFFFFFF) ^ table_seeds) ^ (steps >> 32) ^ 0x9E3779B9)


def _mix32(x: Tensor) -> Tensor:
    """Apply MurmurHash3's 32-bit finalizer to int64 tensors, because torch has no unsigned arithmetic."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


MIN_EXPONENT = -120
"""Smallest exponent of an int8 block, so that ``2^±e`` are normal numbers."""

INT8_NAN = -128

_FP8_LIMIT = 464.0  # half a rounding step above the largest value
_INFINITY = 0x7F800000
_MANTISSA = 0x7FFFFF
_LARGEST_MANTISSA = 0x7E0000  # of 127 / 64


def block_count(dim: int) -> int:
    """Return the number of exponents of an int8 row."""
    return -(-dim // SCALE_BLOCK)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return exactly ``2^exponent`` as float32, for int exponents from −126 to 127."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def exponents_of(values: Tensor) -> Tensor:
    """Return the smallest int8 exponents ``[n, blocks]`` that hold the finite values of ``values [n, D]`` float32."""
    magnitude = values.view(torch.int32) & 0x7FFFFFFF
    magnitude = torch.where(magnitude < _INFINITY, magnitude, 0)
    bits = torch.cat([block.amax(1, keepdim=True) for block in magnitude.split(SCALE_BLOCK, dim=1)], dim=1)
    needed = (bits >> 23) - 127 - 6 + ((bits & _MANTISSA) > _LARGEST_MANTISSA).int()
    return needed.clamp(min=MIN_EXPONENT).to(torch.int8)


def widen(narrow: Tensor, exponents: Tensor) -> Tensor:
    """Convert rows ``[n, D]`` exactly to float32. Only int8 rows use ``exponents [n, blocks]``."""
    if narrow.dtype != torch.int8:
        return narrow.to(torch.float32)
    values = narrow.to(torch.float32) * _by_column(power_of_two(exponents), narrow.shape[1])
    return values.masked_fill(narrow == INT8_NAN, torch.nan)


def round_nearest(values: Tensor, dtype: torch.dtype, exponents: Tensor) -> Tensor:
    """Round ``values [n, D]`` float32 to the nearest, ties to even. int8 uses ``exponents [n, blocks]``."""
    if dtype != torch.int8:
        return _cast(values, dtype)
    q = torch.round(values * _by_column(power_of_two(-exponents), values.shape[1]))
    return q.where(q.abs() <= 127, INT8_NAN).to(torch.int8)  # only infinities and NaN are outside ±127


def round_stochastic(values: Tensor, dtype: torch.dtype, exponents: Tensor, random: Tensor) -> Tensor:
    """Round ``[n, D]`` float32 to a neighbour in ``dtype``, with probabilities that make the mean exact.

    Representable values do not change, including infinities and NaN (int8: NaN). Values above the largest one become
    infinity (fp8: NaN). Only int8 uses ``exponents [n, blocks]`` int8. ``random [n, D]`` has 32 bits per element. The
    upper 24 bits are used, or the upper 16 for bf16.
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
    """Round to the nearest. Values beyond float8_e4m3fn become NaN (some versions of torch would return ±448)."""
    if dtype == torch.float8_e4m3fn:
        values = torch.where(
            values.abs() <= _FP8_LIMIT, values, torch.copysign(torch.full_like(values, torch.nan), values)
        )
    return values.to(dtype)


def _by_column(of_blocks: Tensor, dim: int) -> Tensor:
    """Repeat the values of blocks ``[n, blocks]`` for each column, ``[n, D]``."""
    if of_blocks.shape[1] == 1:
        return of_blocks.expand(-1, dim)
    return of_blocks[:, :, None].expand(-1, -1, SCALE_BLOCK).flatten(1)[:, :dim]


def table_of(rows: Rows, slots: Tensor) -> Tensor:
    """Return the table of each slot."""
    return torch.searchsorted(rows.tables[:, FIRST_SLOT].contiguous(), slots, right=True) - 1


def cells_of(rows: Rows, slots: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row ``[n]`` and columns ``[n, D]`` of slots in their tables, counted in the whole table."""
    entry = rows.tables[table]
    row = entry[:, FIRST_ROW] + (slots - entry[:, FIRST_SLOT]) * entry[:, ROW_STEP]
    return row, entry[:, FIRST_COL, None] + torch.arange(rows.dim, device=slots.device)


def read_rows(rows: Rows, slots: Tensor) -> Tensor:
    """Return rows ``[n, D]`` as float32."""
    wide, at = locate_rows(rows, slots)
    out = torch.empty(len(slots), rows.dim, dtype=torch.float32, device=slots.device)
    out[wide] = rows.wide[at[wide]]
    at = at[~wide]
    out[~wide] = widen(_bits(rows.narrow)[at].view(rows.narrow.dtype), _exponents(rows, at))
    return out


def write_rows(rows: Rows, slots: Tensor, values: Tensor, random: Tensor | None) -> None:
    """Overwrite distinct rows with float32 values ``[n, D]``, rounded to the dtype of the row.

    With ``random [n, D]`` (see `random_bits`), rounding is stochastic, otherwise to the nearest. The exponents of int8
    rows never decrease.
    """
    wide, at = locate_rows(rows, slots)
    if not len(rows.narrow):  # indexing with masks would synchronize with the device
        rows.wide[at] = values
        return
    if len(rows.wide):
        rows.wide[at[wide]] = values[wide]
        at, values, random = at[~wide], values[~wide], None if random is None else random[~wide]
    write_narrow(rows, at, values, random)


def write_narrow(rows: Rows, at: Tensor | slice, values: Tensor, random: Tensor | None = None) -> None:
    """Overwrite the rows at positions ``at`` of ``rows.narrow``, as `write_rows` does."""
    exponents = _exponents(rows, at)
    dtype = rows.narrow.dtype
    if dtype == torch.int8:
        exponents = torch.maximum(exponents, exponents_of(values))
        rows.exponents[at] = exponents
    if random is None:
        narrow = round_nearest(values, dtype, exponents)
    else:
        narrow = round_stochastic(values, dtype, exponents, random)
    _bits(rows.narrow)[at] = _bits(narrow)


def locate_rows(rows: Rows, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of slots with wide rows, and the position of each slot in ``wide`` or ``narrow``."""
    table = rows.tables[table_of(rows, slots)]
    row = slots - table[:, FIRST_SLOT]
    wide = row < table[:, WIDE_ROWS]
    return wide, torch.where(wide, table[:, FIRST_WIDE] + row, table[:, FIRST_NARROW] + row - table[:, WIDE_ROWS])


def _exponents(rows: Rows, at: Tensor | slice) -> Tensor:
    """Return the exponents ``[n, blocks]`` of int8 rows, or an empty tensor for other dtypes."""
    return rows.exponents[at] if rows.narrow.dtype == torch.int8 else rows.exponents


def _bits(narrow: Tensor) -> Tensor:
    """Return a view as unsigned bytes if torch cannot index the dtype."""
    return narrow.view(torch.uint8) if narrow.dtype == torch.float8_e4m3fn else narrow


def rows_of(vectors: Tensor) -> Rows:
    """Return vectors ``[n, D]`` float32 as the rows of one table."""
    return Rows(
        wide=vectors,
        narrow=vectors[:0],
        exponents=torch.empty(0, 0, dtype=torch.int8, device=vectors.device),
        tables=_one_table(vectors.device),
    )


@lru_cache
def _one_table(device: torch.device) -> Tensor:
    """Return `Rows.tables` for one table of any number of wide rows. It is cached to avoid a copy to the GPU."""
    return torch.tensor([[0, 1 << 62, 0, 0, 0, 1, 0]], device=device)


_CAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SCALE_BYTES = 4
_SMALLEST_SCALE = 2.0**-126
"""Smallest normal float32. Smaller scales have fewer digits, so a scaled value could exceed the codec's range."""


def encoded_bytes(codec: Codec, dim: int) -> int:
    """Return the bytes of an encoded vector of ``dim`` values."""
    return _CAST[codec].itemsize * dim if codec in _CAST else dim + _SCALE_BYTES


def encode(values: Tensor, codec: Codec) -> Tensor:
    """Encode vectors ``[n, D]`` float32 as ``[n, encoded_bytes]`` uint8."""
    if codec in _CAST:
        return values.to(_CAST[codec]).contiguous().view(torch.uint8)
    scale = values.abs().amax(dim=1, keepdim=True) / _LARGEST[codec]
    scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(torch.isfinite(scale), scale, torch.nan)
    scaled = torch.where(scale > 0, values / scale, 0.0)  # 0 if the whole row is 0, or the scale is NaN
    narrow = scaled.round().to(torch.int8) if codec == "int8" else scaled.to(torch.float8_e4m3fn)
    return torch.cat([narrow.view(torch.uint8), scale.view(-1).view(torch.uint8).view(-1, _SCALE_BYTES)], dim=1)


def decode(encoded: Tensor, codec: Codec) -> Tensor:
    """Decode vectors ``[n, D]`` float32 from the bytes of `encode`."""
    if codec in _CAST:
        return encoded.view(_CAST[codec]).float()
    narrow, scale = encoded[:, :-_SCALE_BYTES], encoded[:, -_SCALE_BYTES:].flatten().clone()  # a clone is aligned
    values = narrow.view(torch.int8 if codec == "int8" else torch.float8_e4m3fn).float()
    return values * scale.view(torch.float32)[:, None]
