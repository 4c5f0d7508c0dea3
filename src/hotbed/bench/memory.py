"""Whether a benchmark fits into memory, before any of it is allocated."""

from __future__ import annotations

import torch

from hotbed.bench.limits import COPY_BYTES
from hotbed.bench.meter import EVICT_BYTES
from hotbed.bench.options import OpsOptions
from hotbed.errors import RecipeError
from hotbed.optim import Rule
from hotbed.specs import row_bytes
from hotbed.store.memory import available_bytes
from hotbed.train.report import size


def table_bytes(options: OpsOptions, rule: Rule) -> int:
    """Bytes of all rows and moments."""
    dim, narrow = options.dim, options.dtype != "fp32"
    total = 0
    for rows in options.rows_per_table:
        wide = min(options.fp32_rows, rows) if narrow else rows
        total += wide * row_bytes("fp32", dim) + (rows - wide) * row_bytes(options.dtype, dim)
        total += sum(rows * (dim if moment.per == "element" else 1) * 4 for moment in rule.moments)
    return total


def check_memory(options: OpsOptions, rule: Rule, device: torch.device, batch_bytes: int) -> None:
    """Refuse what does not fit.

    Parameters
    ----------
    options
        Tables.
    rule
        Whose moments there are.
    device
        Where they go.
    batch_bytes
        What else is needed, besides what measuring takes.

    Raises
    ------
    RecipeError
        If it is more than is free.
    """
    tables = table_bytes(options, rule)
    needed = tables + batch_bytes + EVICT_BYTES + 2 * COPY_BYTES
    free = available_bytes(device)
    if free is not None and needed > free:
        raise RecipeError(
            f"{options.tables} tables of {sum(options.rows_per_table):,} rows in all × {options.dim} columns "
            f"({options.dtype}) with the moments of {options.optimizer} take {size(tables)}, and measuring "
            f"{size(needed - tables)} more, but {size(free)} of {device.type} memory is free; lower --rows or "
            "--tables, or choose a narrower --dtype"
        )
