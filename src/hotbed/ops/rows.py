"""Rows of an arena by slot, as float32 values: reading, and writing with rounding. Plain PyTorch, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.layout import FIRST_COL, FIRST_NARROW, FIRST_ROW, FIRST_SLOT, FIRST_WIDE, ROW_STEP, WIDE_ROWS, Rows
from hotbed.ops.narrow import exponents_of, round_nearest, round_stochastic, widen


def table_of(rows: Rows, slots: Tensor) -> Tensor:
    """Table of each slot."""
    return torch.searchsorted(rows.tables[:, FIRST_SLOT].contiguous(), slots, right=True) - 1


def cells_of(rows: Rows, slots: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Row ``[n]`` and columns ``[n, D]`` that slots of these tables hold, counted in the whole table."""
    entry = rows.tables[table]
    row = entry[:, FIRST_ROW] + (slots - entry[:, FIRST_SLOT]) * entry[:, ROW_STEP]
    return row, entry[:, FIRST_COL, None] + torch.arange(rows.dim, device=slots.device)


def read_rows(rows: Rows, slots: Tensor) -> Tensor:
    """Rows ``[n, D]`` as float32."""
    wide, at = places(rows, slots)
    out = torch.empty(len(slots), rows.dim, dtype=torch.float32, device=slots.device)
    out[wide] = rows.wide[at[wide]]
    at = at[~wide]
    out[~wide] = widen(_bits(rows.narrow)[at].view(rows.narrow.dtype), _exponents(rows, at))
    return out


def write_rows(rows: Rows, slots: Tensor, values: Tensor, random: Tensor | None) -> None:
    """Overwrite distinct rows with float32 values ``[n, D]``, rounding what is narrow.

    ``random [n, D]`` (see `random_bits`) rounds stochastically, None to the nearest. Exponents of int8 rows only grow.
    """
    wide, at = places(rows, slots)
    rows.wide[at[wide]] = values[wide]
    at, values = at[~wide], values[~wide]
    exponents = _exponents(rows, at)
    dtype = rows.narrow.dtype
    if dtype == torch.int8:
        exponents = torch.maximum(exponents, exponents_of(values))
        rows.exponents[at] = exponents
    if random is None:
        narrow = round_nearest(values, dtype, exponents)
    else:
        narrow = round_stochastic(values, dtype, exponents, random[~wide])
    _bits(rows.narrow)[at] = _bits(narrow)


def places(rows: Rows, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Which slots are wide, and the position of each in ``wide`` or ``narrow``."""
    table = rows.tables[table_of(rows, slots)]
    row = slots - table[:, FIRST_SLOT]
    wide = row < table[:, WIDE_ROWS]
    return wide, torch.where(wide, table[:, FIRST_WIDE] + row, table[:, FIRST_NARROW] + row - table[:, WIDE_ROWS])


def _exponents(rows: Rows, at: Tensor) -> Tensor:
    """Exponents of narrow rows ``[n, blocks]``; nothing where rows are not int8."""
    return rows.exponents[at] if rows.narrow.dtype == torch.int8 else rows.exponents


def _bits(narrow: Tensor) -> Tensor:
    """The same memory as unsigned bytes where torch cannot index the dtype."""
    return narrow.view(torch.uint8) if narrow.dtype == torch.float8_e4m3fn else narrow


def rows_of(vectors: Tensor) -> Rows:
    """Vectors ``[n, D]`` float32 as the rows of one table."""
    return Rows(
        wide=vectors,
        narrow=vectors[:0],
        exponents=torch.empty(0, 0, dtype=torch.int8, device=vectors.device),
        tables=torch.tensor([[0, len(vectors), 0, 0, 0, 1, 0]], device=vectors.device),
    )
