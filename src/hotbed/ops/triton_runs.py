# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""List the runs of a batch for the kernels that sum them, so that these search for nothing.

What a run needs (its slot, the table of that, its first bag) and the bags of all occurrences are written one after the
other, in the order in which the kernels take them. A kernel that reads a line of the list then knows all addresses of
rows, moments and hyperparameters at once: two reads depend on each other, the line and what it points at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.layout import RUN, Groups, Occurrences, Rows
from hotbed.ops.triton_rows import locate, place_number, row_pointers
from hotbed.ops.triton_runtime import FIRST_SLOT, LONG, STRICT, TABLE_ENTRY, ceil_div
from hotbed.ops.triton_segment import runs_of

_BLOCK = 512
"""Positions per program: four per thread of four warps."""


class RunList(NamedTuple):
    """What kernels get of a batch's runs: ``[N]`` by run as in `RunOrder`, or by position in ``order``."""

    slots: Any  # int64, of the run: where its sum is to go
    tables: Any  # int32, of the run: its slot's
    places: Any  # int64, of the run: `place_number` of its slot; or anything where all rows are float32
    partials: Any  # int32, of the run: row of the scratch buffer, −1 where it is its slot's only run
    first_bags: Any  # int32, of the run: of its first occurrence
    starts: Any  # int64, of the run: its first position
    kinds: Any  # int8, of the run
    numbers: Any  # int32, of the position: group, counted from 1
    bags: Any  # int32, of the position
    scale: Any  # float32, of the position; or anything where occurrences have no factors
    bounds: Any  # [2] int32: number of runs of a single occurrence; first run that is the first of several
    group_runs: Any  # [N + 1] int64, as in `Groups`
    counts: Any  # [2] int64, as in `Groups`


@triton.jit
def _tables_of(entries, tables, slot, live, halvings):
    """Table of each slot: the last that starts at or before it."""
    low = tl.zeros(slot.shape, tl.int32)
    high = low + tables - 1
    for _ in range(halvings):
        middle = (low + high + 1) // 2
        right = tl.load(entries + middle * TABLE_ENTRY + FIRST_SLOT, mask=live, other=0) <= slot
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["tables", "halvings", "total", "nowhere"])
def _list_kernel(
    runs,  # RunList, of which slots, tables, places, partials, first_bags, bags, scale and bounds are written
    rows,  # [≥ groups]: slot of each group
    stored,  # RowPointers; read where PLACED
    order,  # [N]
    bags,  # [N]
    scale,  # [N]; read where SCALED
    entries,  # [T, 7], see Rows.tables
    tables,  # T
    halvings,  # that shrink T tables to one
    total,  # N
    nowhere,  # slot of padding, which is listed as −1
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PLACED: tl.constexpr,
    HAS_WIDE: tl.constexpr,
):
    """Look everything up that follows from a run, or from a position.

    Slot 3 once and slot 7 forty times, of one table::

        kinds [0, 8, 33]   →   slots [3, 7, 7], partials [−1, 3, 0], bounds [1, 2]
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_order = i < total
    at = tl.load(order + i, mask=in_order, other=0)
    tl.store(runs.bags + i, tl.load(bags + at, mask=in_order, other=0).to(tl.int32), mask=in_order)
    if SCALED:
        tl.store(runs.scale + i, tl.load(scale + at, mask=in_order, other=0.0), mask=in_order)

    count = tl.load(runs.counts + 1)
    live = i < count
    kind = tl.load(runs.kinds + i, mask=live, other=0).to(tl.int32)
    next_kind = tl.load(runs.kinds + i + 1, mask=i + 1 < count, other=-1).to(tl.int32)
    start = tl.load(runs.starts + i, mask=live, other=0)
    end = start + tl.minimum(tl.maximum(kind, 1), RUN)
    number = tl.load(runs.numbers + start, mask=live, other=1)
    behind = tl.load(runs.numbers + start - 1, mask=live & (start > 0), other=0)
    ahead = tl.load(runs.numbers + end, mask=live & (end < total), other=0)
    partial = tl.where(
        (behind != number) & (ahead != number), -1, 2 * (start // RUN) + (ahead != number).to(tl.int64)
    ).to(tl.int32)
    slot = tl.load(rows + number - 1, mask=live, other=0)
    first = tl.load(order + start, mask=live, other=0)
    table = _tables_of(entries, tables, slot, live, halvings)
    slot = tl.where(slot == nowhere, -1, slot)
    tl.store(runs.slots + i, slot, mask=live)
    tl.store(runs.tables + i, table, mask=live)
    if PLACED:
        tl.store(runs.places + i, place_number(locate(stored, slot, table, HAS_WIDE), HAS_WIDE), mask=live)
    tl.store(runs.partials + i, partial, mask=live)
    tl.store(runs.first_bags + i, tl.load(bags + first, mask=live, other=0).to(tl.int32), mask=live)

    # Kinds rise, so each bound is between two runs that one lane sees, or before the first, or behind the last.
    last = i == count - 1
    tl.store(runs.bounds + i * 0, i * 0, mask=(i == 0) & (kind != 0))
    tl.store(runs.bounds + i * 0, i + 1, mask=live & (kind == 0) & (last | (next_kind != 0)))
    tl.store(runs.bounds + i * 0 + 1, i * 0, mask=(i == 0) & (kind == LONG))
    tl.store(runs.bounds + i * 0 + 1, i + 1, mask=live & (kind != LONG) & (last | (next_kind == LONG)))


def list_runs(occurrences: Occurrences, groups: Groups, group_slots: Tensor, rows: Rows | None) -> RunList:
    """List the runs of a batch with at least one occurrence.

    ``group_slots [≥ groups]`` has the slot of each group; the first slot without a row is padding. Without ``rows``,
    the slots belong to no table and none is padding.
    """
    runs, total, device = runs_of(groups), len(groups.order), groups.order.device
    scaled = occurrences.scale is not None
    slots = torch.empty(total, dtype=torch.int64, device=device)
    # Each begins at a multiple of 16 bytes, for which kernels are compiled.
    lines = torch.empty(4, ceil_div(total, 4) * 4, dtype=torch.int32, device=device)
    of_table, partials, first_bags, bags = lines.unbind()
    scale = torch.empty(total, dtype=torch.float32, device=device) if scaled else bags
    bounds = torch.empty(2, dtype=torch.int32, device=device)
    placed = rows is not None and rows.narrow.dtype != torch.float32
    found = RunList(
        slots,
        of_table,
        torch.empty_like(slots) if placed else slots,
        partials,
        first_bags,
        runs.starts,
        runs.kinds,
        runs.numbers,
        bags,
        scale,
        bounds,
        groups.group_runs,
        groups.counts,
    )
    tables = 1 if rows is None else len(rows.tables)
    pointers = row_pointers(rows) if rows is not None and placed else groups.counts
    _list_kernel[(ceil_div(total, _BLOCK),)](
        found,
        group_slots,
        pointers,
        groups.order,
        occurrences.bags,
        occurrences.scale if scaled else bags,
        groups.counts if rows is None else rows.tables,
        tables,
        (tables - 1).bit_length(),
        total,
        -1 if rows is None else len(rows.wide) + len(rows.narrow),
        RUN=RUN,
        BLOCK=_BLOCK,
        SCALED=scaled,
        PLACED=placed,
        HAS_WIDE=rows is not None and placed and len(rows.wide) > 0,
        **STRICT,
    )
    return found
