# pyright: basic, reportCallIssue=false
"""Rows of every dtype in Numba: where they are, reading them as float32, rounding them back.

Kernels take a `RowArrays`. What a narrow row's bits mean is looked up at run time (``kind``), once per row, so there is
one compiled kernel for all dtypes. Definitions: `hotbed.ops.narrow`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hotbed.ops.cpu_hash import cell_bits, row_key
from hotbed.ops.cpu_instructions import (
    bits_of,
    float_of,
    float_to_half,
    half_to_float,
    load,
    peek,
    poke,
    prefetch_bytes,
)
from hotbed.ops.cpu_runtime import kernel
from hotbed.ops.layout import FIRST_NARROW, FIRST_WIDE, SCALE_BLOCK, WIDE_ROWS, Rows
from hotbed.ops.narrow import INT8_NAN, MIN_EXPONENT

WIDE, BF16, FP16, INT8, FP8 = range(5)
"""What the narrow rows of an arena are; `WIDE`: there are none, and slots are positions in ``wide``."""

_KINDS = {torch.float32: WIDE, torch.bfloat16: BF16, torch.float16: FP16, torch.int8: INT8, torch.float8_e4m3fn: FP8}
_NO_BYTES = np.empty(0, np.uint8)
_NO_PAIRS = np.empty(0, np.uint16)
_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class RowArrays(NamedTuple):
    """`Rows` as kernels take them: flat arrays; narrow rows are in ``pairs`` (bf16, fp16) or ``bytes`` (int8, fp8)."""

    dim: int
    kind: int
    wide: np.ndarray
    pairs: np.ndarray
    bytes: np.ndarray
    exponents: np.ndarray
    tables: np.ndarray


def row_arrays(rows: Rows) -> RowArrays:
    """Views of an arena's tensors."""
    kind = _KINDS[rows.narrow.dtype]
    return RowArrays(
        rows.dim,
        kind,
        rows.wide.view(-1).numpy(),
        rows.narrow.view(torch.uint16).view(-1).numpy() if kind in (BF16, FP16) else _NO_PAIRS,
        rows.narrow.view(torch.uint8).view(-1).numpy() if kind in (INT8, FP8) else _NO_BYTES,
        rows.exponents.view(-1).numpy(),
        rows.tables.numpy(),
    )


@kernel(inline="always")
def place(rows, table, row):
    """Whether a row of a table is wide, and its position in ``wide`` or among the narrow rows."""
    wide_rows = rows.tables[table, WIDE_ROWS]
    if row < wide_rows:
        return True, rows.tables[table, FIRST_WIDE] + row
    return False, rows.tables[table, FIRST_NARROW] + row - wide_rows


@kernel(inline="always")
def prefetch_row(rows, wide, at):
    """Bring a row closer."""
    if wide:
        prefetch_bytes(rows.wide, at * rows.dim, rows.dim * 4)
    elif rows.kind <= FP16:
        prefetch_bytes(rows.pairs, at * rows.dim, rows.dim * 2)
    else:
        prefetch_bytes(rows.bytes, at * rows.dim, rows.dim)
        if rows.kind == INT8:
            blocks = (rows.dim + SCALE_BLOCK - 1) // SCALE_BLOCK
            prefetch_bytes(rows.exponents, at * blocks, blocks)


@kernel()
def power_of_two(exponent):
    """``2^exponent`` for −126 … 127."""
    return float_of(np.uint32((exponent + 127) << 23))


@kernel()
def read_narrow(rows, at, out):
    """Narrow row ``at`` as float32 into ``out[:dim]``."""
    dim = rows.dim
    first = at * dim
    if rows.kind == BF16:
        for d in range(dim):
            out[d] = load(rows.pairs, first + d)
    elif rows.kind == FP16:
        for d in range(dim):
            out[d] = half_to_float(peek(rows.pairs, first + d))
    elif rows.kind == FP8:
        for d in range(dim):
            out[d] = peek(_FP8, np.int64(peek(rows.bytes, first + d)))
    else:
        blocks = (dim + SCALE_BLOCK - 1) // SCALE_BLOCK
        for block in range(blocks):
            scale = power_of_two(np.int64(rows.exponents[at * blocks + block]))
            for d in range(block * SCALE_BLOCK, min((block + 1) * SCALE_BLOCK, dim)):
                q = np.int8(peek(rows.bytes, first + d))
                poke(out, d, np.float32(q) * scale if q != INT8_NAN else np.float32(np.nan))


@kernel()
def write_narrow(rows, at, values, seed, row, first_col):
    """Round ``values[:dim]`` stochastically into narrow row ``at``: ``row`` of a table, from ``first_col`` on."""
    dim = rows.dim
    first = at * dim
    key = row_key(seed, row)
    if rows.kind == BF16:
        for d in range(dim):
            random = cell_bits(key, first_col + d)
            bits = bits_of(values[d])
            if np.isnan(values[d]):
                rounded = np.uint32(bits | np.uint32(0x400000))
            elif np.isinf(values[d]):
                rounded = bits
            else:
                rounded = np.uint32(bits + np.uint32(random >> np.uint32(16)))
            poke(rows.pairs, first + d, np.uint16(rounded >> np.uint32(16)))
    elif rows.kind == FP16:
        for d in range(dim):
            random = cell_bits(key, first_col + d)
            poke(rows.pairs, first + d, float_to_half(_rounded(values[d], random, -14, 10)))
    elif rows.kind == FP8:
        for d in range(dim):
            random = cell_bits(key, first_col + d)
            poke(rows.bytes, first + d, _fp8_bits(_rounded(values[d], random, -6, 3)))
    else:
        blocks = (dim + SCALE_BLOCK - 1) // SCALE_BLOCK
        for block in range(blocks):
            begin, end = block * SCALE_BLOCK, min((block + 1) * SCALE_BLOCK, dim)
            exponent = max(np.int64(rows.exponents[at * blocks + block]), _exponent_for(values, begin, end))
            rows.exponents[at * blocks + block] = np.int8(exponent)
            inverse = power_of_two(-exponent)
            for d in range(begin, end):
                random = cell_bits(key, first_col + d)
                q = _up_or_down(np.abs(values[d]) * inverse, random)
                q = np.float32(-q) if values[d] < 0 else q
                poke(rows.bytes, first + d, np.uint8(np.int8(q)) if np.isfinite(values[d]) else np.uint8(0x80))


@kernel(inline="always")
def _up_or_down(y, random):
    """Round ``y ≥ 0`` to one of the two next integers."""
    low = np.floor(y)
    u = np.float32(np.int32(random >> np.uint32(8))) * np.float32(2.0**-24)
    return low + np.float32(1) if u < y - low else low


@kernel()
def _rounded(x, random, smallest, digits):
    """Round a float32 to a format of ``digits`` mantissa bits and exponents from ``smallest`` on; still a float32."""
    if not np.isfinite(x):
        return x
    quantum = max(np.int64((bits_of(x) >> np.uint32(23)) & np.uint32(0xFF)) - 127, smallest) - digits
    q = _up_or_down(np.abs(x) * power_of_two(-quantum), random) * power_of_two(quantum)
    return np.float32(-q) if bits_of(x) >> np.uint32(31) else q


@kernel()
def _fp8_bits(x):
    """Bits of a value that e4m3fn can represent; NaN for what is larger."""
    bits = bits_of(x)
    sign = np.uint8((bits >> np.uint32(24)) & np.uint32(0x80))
    magnitude = np.abs(x)
    if not magnitude <= np.float32(448):
        return np.uint8(sign | np.uint8(0x7F))
    if magnitude < np.float32(2.0**-6):
        return np.uint8(sign | np.uint8(magnitude * np.float32(512)))
    exponent = np.int64((bits >> np.uint32(23)) & np.uint32(0xFF)) - 127
    mantissa = np.int64((bits >> np.uint32(20)) & np.uint32(7))
    return np.uint8(sign | np.uint8((exponent + 7) * 8 + mantissa))


@kernel()
def _exponent_for(values, begin, end):
    """Smallest int8 exponent that holds ``values[begin:end]``; infinities and NaN do not count."""
    largest = np.float32(0)
    for d in range(begin, end):
        x = np.abs(values[d])
        if x > largest and x <= np.float32(3.4028234663852886e38):
            largest = x
    bits = bits_of(largest)
    needed = np.int64(bits >> np.uint32(23)) - 127 - 6
    if (bits & np.uint32(0x7FFFFF)) > np.uint32(0x7E0000):
        needed += 1
    return max(needed, MIN_EXPONENT)
