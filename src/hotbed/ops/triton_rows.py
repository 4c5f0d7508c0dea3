# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Locate rows, load them as float32, round into them, and fill in initial values in Triton; see `hotbed.ops.rows`.

The element type of ``narrow`` is the dtype of low-precision rows. float8_e4m3fn is passed as uint8. It is decoded and
encoded by integer arithmetic, because not every GPU supports it. bfloat16 is also converted by integer arithmetic,
because the interpreter's conversions are wrong. Stochastic rounding uses integers too. Therefore the bits are the same
on every device.

Kernels are compiled separately for three types of arena. float32 arenas have only wide rows. Other arenas have
low-precision rows, and ``HAS_WIDE`` is set if they also have wide rows. A row is then a masked load from each of two
arrays. The load with an empty mask reads nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops import rows
from hotbed.ops.backend import launches
from hotbed.ops.layout import Rows
from hotbed.ops.triton_runtime import (
    FIRST_COL,
    FIRST_NARROW,
    FIRST_ROW,
    FIRST_SLOT,
    FIRST_WIDE,
    ROW_STEP,
    SCALE_BLOCK,
    STRICT,
    TABLE_ENTRY,
    TILE,
    WIDE_ROWS,
    ceil_div,
    power_of_two,
    random_bits,
    rows_per_program,
)

_MIN_EXPONENT = tl.constexpr(rows.MIN_EXPONENT)
_INT8_NAN = tl.constexpr(rows.INT8_NAN)
_MANTISSA = tl.constexpr(0x7FFFFF)
_LARGEST_MANTISSA = tl.constexpr(0x7E0000)  # of 127 / 64
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_QUIET = tl.constexpr(0x400000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


class RowPointers(NamedTuple):
    """Pointers to the tensors of `Rows` for kernels."""

    wide: Any  # [W, D] float32
    narrow: Any  # [S − W, D] bfloat16, float16, int8, uint8 (float8_e4m3fn), or float32 if all rows are wide
    exponents: Any  # [S − W, ⌈D / 128⌉] int8
    tables: Any  # [T, 7] int64


class Places(NamedTuple):
    """Positions of the rows of a tile, ``[R]`` int64 each."""

    wide: Any  # row of `RowPointers.wide`, or −1
    narrow: Any  # row of `RowPointers.narrow`, or −1
    row: Any  # row in its table
    col: Any  # column 0 as a column of its table


def row_pointers(rows: Rows) -> RowPointers:
    """Return the pointers to an arena's rows."""
    bits = rows.narrow.view(torch.uint8) if rows.narrow.dtype == torch.float8_e4m3fn else rows.narrow
    return RowPointers(rows.wide, bits, rows.exponents, rows.tables)


@triton.jit
def locate(rows, slot, table, HAS_WIDE: tl.constexpr):
    """Return the positions of slots ``[R]`` of ``table`` (scalar or ``[R]``). Slots below 0 have no position."""
    # In a float32 arena, the positions of wide rows are their slots.
    if rows.narrow.dtype.element_ty == tl.float32:
        return Places(slot, slot, slot, slot)
    else:
        entry = rows.tables + table * TABLE_ENTRY
        row = slot - tl.load(entry + FIRST_SLOT)
        of_table = tl.load(entry + FIRST_ROW) + row * tl.load(entry + ROW_STEP)
        col = tl.load(entry + FIRST_COL) + row * 0
        if HAS_WIDE:
            wide_rows = tl.load(entry + WIDE_ROWS)
            wide = tl.where((slot >= 0) & (row < wide_rows), tl.load(entry + FIRST_WIDE) + row, -1)
            narrow = tl.where((slot >= 0) & (row >= wide_rows), tl.load(entry + FIRST_NARROW) + row - wide_rows, -1)
            return Places(wide, narrow, of_table, col)
        else:
            return Places(slot, tl.where(slot >= 0, tl.load(entry + FIRST_NARROW) + row, -1), of_table, col)


@triton.jit
def place_number(places, HAS_WIDE: tl.constexpr):
    """Return positions as one number: n for row n of ``narrow``, −2 − n for row n of ``wide``, −1 for no row."""
    if HAS_WIDE:
        return tl.where(places.wide >= 0, -2 - places.wide, places.narrow)
    else:
        return places.narrow


@triton.jit
def numbered(rows, slot, table, number, HAS_WIDE: tl.constexpr):
    """Return what `locate` returns, from `place_number` ``[R]``, so that row addresses need no further reads."""
    places = locate(rows, slot, table, HAS_WIDE)
    if rows.narrow.dtype.element_ty == tl.float32:
        return places
    else:
        return Places(tl.where(number < -1, -2 - number, -1), tl.maximum(number, -1), places.row, places.col)


@triton.jit
def load_rows(rows, places, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WIDE: tl.constexpr):
    """Load rows ``[R, BLOCK_D]`` as float32. Columns beyond D, and rows without a position, are zero."""
    if rows.narrow.dtype.element_ty == tl.float32:
        return _load(rows.wide, places.wide, D, BLOCK_D)
    elif HAS_WIDE:
        wide = _load(rows.wide, places.wide, D, BLOCK_D)
        return tl.where((places.wide >= 0)[:, None], wide, _widen(rows, places.narrow, D, BLOCK_D))
    else:
        return _widen(rows, places.narrow, D, BLOCK_D)


@triton.jit
def store_rows(rows, places, where, values, seed, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WIDE: tl.constexpr):
    """Overwrite rows with ``values [R, BLOCK_D]`` (zeros beyond D) ``where [R]``.

    Low-precision rows are rounded stochastically. Their random bits depend on ``seed [R]``, row and column. Exponents
    of int8 rows never decrease. They are read for all rows, so that the load does not wait for ``where``.
    """
    element: tl.constexpr = rows.narrow.dtype.element_ty
    wide, narrow = tl.where(where, places.wide, -1), tl.where(where, places.narrow, -1)
    if HAS_WIDE:
        _store(rows.wide, wide, values, D, BLOCK_D)
    if element != tl.float32:
        random = random_bits(seed, places.row, places.col[:, None] + tl.arange(0, BLOCK_D)[None, :])
    if element == tl.bfloat16:
        _store(rows.narrow, narrow, _stochastic_bfloat16(values, random), D, BLOCK_D)
    if element == tl.float16:
        bits = _stochastic_float(values, random, -14, 10, 0x7C00, 0x7E00).to(tl.uint16)
        sign = (_bits(values) >> 31 << 15).to(tl.uint16)
        _store(rows.narrow, narrow, (bits | sign).to(tl.float16, bitcast=True), D, BLOCK_D)
    if element == tl.uint8:
        bits = _stochastic_float(values, random, -6, 3, 0x7F, 0x7F).to(tl.uint8)
        sign = (_bits(values) >> 31 << 7).to(tl.uint8)
        _store(rows.narrow, narrow, bits | sign, D, BLOCK_D)
    if element == tl.int8:
        exponents = tl.maximum(_load_exponents(rows, places.narrow, D, BLOCK_D), _exponents_of(values, BLOCK_D))
        _store_exponents(rows, narrow, exponents, D, BLOCK_D)
        _store(rows.narrow, narrow, _stochastic_int8(values, random, _by_column(exponents, BLOCK_D)), D, BLOCK_D)


@triton.jit
def as_float32(x):
    """Convert float32, bfloat16 or float16 exactly to float32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_nearest(x, dtype: tl.constexpr):
    """Round float32 to the nearest float32, bfloat16 or float16, ties to even."""
    if dtype == tl.bfloat16:
        bits = _bits(x)
        rounded = tl.where(_is_nan(bits), _NAN, bits + 0x7FFF + (bits >> 16 & 1))
        return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


# -- loading and storing ---------------------------------------------------------------------------------------------


@triton.jit
def _load(array, at, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load elements ``[R, BLOCK_D]`` of rows. Columns beyond D, and rows with ``at`` −1, are zero."""
    col = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(array + at[:, None] * D + col, mask=(at >= 0)[:, None] & (col < D), other=0)


@triton.jit
def _store(array, at, values, D: tl.constexpr, BLOCK_D: tl.constexpr):
    col = tl.arange(0, BLOCK_D)[None, :]
    tl.store(array + at[:, None] * D + col, values, mask=(at >= 0)[:, None] & (col < D))


@triton.jit
def _widen(rows, at, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Convert low-precision rows exactly to float32."""
    raw = _load(rows.narrow, at, D, BLOCK_D)
    if raw.dtype == tl.int8:
        scale = _power_of_two(_by_column(_load_exponents(rows, at, D, BLOCK_D), BLOCK_D))
        return tl.where(raw == _INT8_NAN, float("nan"), raw.to(tl.float32)) * scale
    elif raw.dtype == tl.uint8:
        code = raw.to(tl.int32) & 0x7F
        digits = (code & 7) + tl.where(code >= 8, 8, 0)
        values = digits.to(tl.float32) * _power_of_two(tl.maximum(code >> 3, 1) - 10)
        bits = tl.where(code == 0x7F, _NAN, _bits(values)) | raw.to(tl.uint32) >> 7 << 31
        return bits.to(tl.float32, bitcast=True)
    else:
        return as_float32(raw)


# -- exponents of int8 rows, [R, blocks] int32 -----------------------------------------------------------------------


@triton.jit
def _exponent_cells(at, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the offsets of the exponents of these rows, and a mask of existing exponents."""
    BLOCKS: tl.constexpr = (D + SCALE_BLOCK - 1) // SCALE_BLOCK
    block = tl.arange(0, (BLOCK_D + SCALE_BLOCK - 1) // SCALE_BLOCK)[None, :]
    return at[:, None] * BLOCKS + block, (at >= 0)[:, None] & (block < BLOCKS)


@triton.jit
def _load_exponents(rows, at, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cell, mask = _exponent_cells(at, D, BLOCK_D)
    return tl.load(rows.exponents + cell, mask=mask, other=0).to(tl.int32)


@triton.jit
def _store_exponents(rows, at, exponents, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cell, mask = _exponent_cells(at, D, BLOCK_D)
    tl.store(rows.exponents + cell, exponents.to(tl.int8), mask=mask)


@triton.jit
def _exponents_of(values, BLOCK_D: tl.constexpr):
    """Return the smallest exponents that hold all finite values."""
    BLOCKS: tl.constexpr = (BLOCK_D + SCALE_BLOCK - 1) // SCALE_BLOCK
    bits = tl.where(_is_finite(_bits(values)), _bits(values) & _MAGNITUDE, 0).to(tl.int32)
    largest = tl.max(tl.reshape(bits, [values.shape[0], BLOCKS, BLOCK_D // BLOCKS]), axis=2)
    needed = (largest >> 23) - 127 - 6 + ((largest & _MANTISSA) > _LARGEST_MANTISSA).to(tl.int32)
    return tl.maximum(needed, _MIN_EXPONENT)


@triton.jit
def _by_column(exponents, BLOCK_D: tl.constexpr):
    """Repeat exponents ``[R, blocks]`` for each column, ``[R, BLOCK_D]``."""
    R: tl.constexpr = exponents.shape[0]
    BLOCKS: tl.constexpr = exponents.shape[1]
    return tl.reshape(tl.broadcast_to(exponents[:, :, None], [R, BLOCKS, BLOCK_D // BLOCKS]), [R, BLOCK_D])


# -- rounding --------------------------------------------------------------------------------------------------------


@triton.jit
def _stochastic_bfloat16(values, random):
    bits = _bits(values)
    rounded = tl.where(_is_finite(bits), bits + (random >> 16), bits | tl.where(_is_nan(bits), _QUIET, 0))
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _stochastic_float(
    values, random, SMALLEST: tl.constexpr, DIGITS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):
    """Return magnitude bits (int32) of a format with smallest exponent ``SMALLEST`` and ``DIGITS`` mantissa bits.

    The value is ``q · 2^(e − DIGITS)``, and the leading bit of q is ``2^DIGITS``. The magnitude bits are
    ``(e − SMALLEST) · 2^DIGITS + q``. This also holds for subnormal numbers, where q has no leading bit, and for q that
    was rounded up to the next exponent.
    """
    bits = _bits(values)
    finite = _is_finite(bits)
    exponent = tl.maximum((bits >> 23 & 0xFF).to(tl.int32) - 127, SMALLEST)
    quanta = _quanta(tl.where(finite, values, 0.0), random, tl.where(finite, exponent, 0) - DIGITS)
    code = tl.minimum((exponent - SMALLEST << DIGITS) + quanta, LARGEST)
    return tl.where(_is_nan(bits), NAN, code)


@triton.jit
def _stochastic_int8(values, random, exponents):
    finite = _is_finite(_bits(values))
    quanta = _quanta(tl.where(finite, values, 0.0), random, exponents)
    return tl.where(finite, tl.where(values < 0, -quanta, quanta), _INT8_NAN).to(tl.int8)


@triton.jit
def _quanta(values, random, exponent):
    """Round ``|values| / 2^exponent`` to int32, up or down with probabilities that make the mean exact."""
    y = tl.abs(values) * _power_of_two(-exponent)
    low = tl.floor(y)
    up = (random >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) < y - low
    return low.to(tl.int32) + up.to(tl.int32)


# -- bits of float32 -------------------------------------------------------------------------------------------------


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _is_finite(bits):
    return (bits & _INFINITY) != _INFINITY


@triton.jit
def _is_nan(bits):
    return (bits & _MAGNITUDE) > _INFINITY


@triton.jit
def _power_of_two(exponent):
    """Return exactly ``2^exponent`` for int32 exponents from −126 to 127."""
    return (exponent + 127 << 23).to(tl.float32, bitcast=True)


# -- initial values --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed", "row_start", "row_step", "rows", "col_start", "col_step"])
def _initial_kernel(
    out,  # [rows, cols] float32
    which,  # [rows] int64; unused if rows are a range
    row_stride,
    col_stride,
    seed,
    row_start,
    row_step,
    rows,
    col_start,
    col_step,
    scale,  # bound / 2²³
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ANY_ROWS: tl.constexpr,
):
    """Compute ``out[r, c] = float(k − 2²³) · scale``. k is the upper 24 bits of hash(seed, r, c)."""
    at_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at_col = tl.arange(0, BLOCK_COLS)
    if ANY_ROWS:
        row = tl.load(which + at_row, mask=at_row < rows, other=0)
    else:
        row = row_start.to(tl.int64) + at_row * row_step
    col = col_start.to(tl.int64) + at_col.to(tl.int64) * col_step
    k = random_bits(seed, row, col[None, :]) >> 8
    value = (k.to(tl.int32) - (1 << 23)).to(tl.float32) * scale
    mask = (at_row < rows)[:, None] & (at_col < COLS)[None, :]
    tl.store(out + at_row[:, None] * row_stride + at_col[None, :] * col_stride, value, mask=mask)


def initial_values_(out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
    """Fill ``out`` with the initial values of a rectangle of a table, see `hotbed.ops.reference.initial_values_`."""
    launches["triton.initial_values"] += 1
    if out.numel() == 0:
        return
    if bound == 0:
        out.zero_()
        return
    block_cols = power_of_two(len(cols))
    block_rows = rows_per_program(block_cols, TILE)
    first, step = (rows.start, rows.step) if isinstance(rows, range) else (0, 1)
    with torch.cuda.device_of(out):
        _initial_kernel[(ceil_div(len(rows), block_rows),)](
            out,
            out if isinstance(rows, range) else rows,
            out.stride(0),
            out.stride(1),
            seed,
            first,
            step,
            len(rows),
            cols.start,
            cols.step,
            bound / (1 << 23),
            COLS=len(cols),
            BLOCK_COLS=block_cols,
            BLOCK_ROWS=block_rows,
            ANY_ROWS=not isinstance(rows, range),
            **STRICT,
        )
