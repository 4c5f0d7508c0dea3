"""Whether a benchmark fits into memory, before any of it is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from hotbed.bench.limits import COPY_BYTES
from hotbed.bench.meter import EVICT_BYTES
from hotbed.bench.options import OpsOptions
from hotbed.errors import RecipeError
from hotbed.optim import Rule
from hotbed.specs import row_bytes
from hotbed.train.report import size

_MEMINFO = Path("/proc/meminfo")


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


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = _MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
