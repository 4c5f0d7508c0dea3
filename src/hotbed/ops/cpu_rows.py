# pyright: basic, reportCallIssue=false
"""Rows of every dtype in Numba: where they are. What is in them: `hotbed.ops.cpu_narrow`.

Kernels take a `RowArrays`. What a narrow row's bits mean is looked up at run time (``kind``), once per row, so there is
one compiled kernel for all dtypes. Definitions: `hotbed.ops.narrow`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hotbed.ops.cpu_instructions import prefetch_bytes
from hotbed.ops.cpu_narrow import BF16, FP8, FP16, INT8, WIDE
from hotbed.ops.cpu_runtime import kernel
from hotbed.ops.layout import FIRST_NARROW, FIRST_WIDE, SCALE_BLOCK, WIDE_ROWS, Rows

_KINDS = {torch.float32: WIDE, torch.bfloat16: BF16, torch.float16: FP16, torch.int8: INT8, torch.float8_e4m3fn: FP8}
_NO_BYTES = np.empty(0, np.uint8)


class RowArrays(NamedTuple):
    """`Rows` as kernels take them: flat arrays, that of narrow rows of bytes."""

    dim: int
    kind: int
    wide: np.ndarray
    narrow: np.ndarray
    exponents: np.ndarray
    tables: np.ndarray


def row_arrays(rows: Rows) -> RowArrays:
    """Views of an arena's tensors."""
    kind = _KINDS[rows.narrow.dtype]
    return RowArrays(
        rows.dim,
        kind,
        rows.wide.view(-1).numpy(),
        _NO_BYTES if kind == WIDE else rows.narrow.view(torch.uint8).view(-1).numpy(),
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
    else:
        nbytes = rows.dim * (2 if rows.kind <= FP16 else 1)
        prefetch_bytes(rows.narrow, at * nbytes, nbytes)
        if rows.kind == INT8:
            blocks = (rows.dim + SCALE_BLOCK - 1) // SCALE_BLOCK
            prefetch_bytes(rows.exponents, at * blocks, blocks)
