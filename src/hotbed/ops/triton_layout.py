"""The numbers of `hotbed.ops.layout` as Triton constants."""

from __future__ import annotations

import triton.language as tl

from hotbed.ops import layout

START = tl.constexpr(layout.START)
FIXED = tl.constexpr(layout.FIXED)
RAGGED_ROW = tl.constexpr(layout.RAGGED_ROW)
BASE = tl.constexpr(layout.BASE)
MEAN = tl.constexpr(layout.MEAN)
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
BLOCK = tl.constexpr(layout.BLOCK)
SCALE_BLOCK = tl.constexpr(layout.SCALE_BLOCK)
