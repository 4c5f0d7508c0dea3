"""Define every operation, in plain PyTorch. Runs on any device; slow; the oracle of all kernel tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import (
    ACTIVE,
    BASE,
    FIXED,
    OUT,
    POOLING,
    RAGGED_ROW,
    RUN,
    START,
    BagLayout,
    Groups,
    Occurrences,
    Rows,
    RuleStep,
)
from hotbed.ops.reference_cache import cache_find, cache_read, cache_take, cache_use, cache_write
from hotbed.ops.reference_interaction import interaction, interaction_backward
from hotbed.ops.reference_rules import apply_rule, block_sum, blocks_of
from hotbed.ops.rows import cells_of, random_bits, read_rows, table_of, write_rows
from hotbed.specs import divisors

NAME = "reference"
TAKES_STRIDED_ROWS = True

__all__ = [
    "NAME",
    "TAKES_STRIDED_ROWS",
    "cache_find",
    "cache_read",
    "cache_take",
    "cache_use",
    "cache_write",
    "divisors",
    "gather",
    "group",
    "initial_values_",
    "interaction",
    "interaction_backward",
    "lookup",
    "occurrences",
    "segment_sum",
    "spread",
    "square_blocks",
    "update",
    "weight_gradient",
]

# -- initial values ------------------------------------------------------------------------------------------------


def initial_values_(out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
    """Fill ``out`` with the initial values of a rectangle of a table.

    Cell (r, c) is ``float(k − 2²³) · float32(bound / 2²³)`` where k is the upper 24 bits of a 32-bit hash of
    (seed, r, c), see `hotbed.ops.rows`. One float32 multiply, so every backend gets the same bits.

    Parameters
    ----------
    out
        ``[len(rows), len(cols)]`` float32.
    seed
        32-bit seed of the table.
    rows, cols
        Which cells of the table; strided ranges are allowed, and any rows ``[n]`` int64.
    bound
        Values are uniform on ``[−bound, bound)``; with 0 they are 0, never −0.
    """
    launches["reference.initial_values"] += 1
    if bound == 0:
        out.zero_()
        return
    row = (
        torch.arange(rows.start, rows.stop, rows.step, dtype=torch.int64, device=out.device)
        if isinstance(rows, range)
        else rows
    )
    col = torch.arange(cols.start, cols.stop, cols.step, dtype=torch.int64, device=out.device)
    k = random_bits(torch.tensor(seed, device=out.device), row, col) >> 8
    out.copy_((k - (1 << 23)).float() * torch.tensor(bound / (1 << 23), dtype=torch.float32, device=out.device))


# -- lookup --------------------------------------------------------------------------------------------------------


def lookup(rows: Rows, bags: BagLayout, out: Tensor) -> None:
    """Pool the rows of each bag into ``out [B, width, D]`` at ``room + position``; other places are unchanged.

    A bag's vector is the float32 sum of its rows (times their weights) in bag order, starting from the first row. Some
    poolings divide the sum (`divisors`). An empty bag yields zeros. The vector is rounded to the nearest value of the
    dtype of ``out`` (float32, bfloat16 or float16).
    """
    launches["reference.lookup"] += 1
    for feature in bags.features.tolist():
        first, lengths = _bounds(bags, feature)
        pooled = torch.zeros(bags.batch_size, rows.dim, dtype=torch.float32, device=out.device)
        for j in range(int(lengths.max()) if len(lengths) else 0):
            live = lengths > j
            at = first[live] + j
            each = read_rows(rows, bags.ids[at].long() + feature[BASE])
            if bags.weights is not None:
                each = each * bags.weights[at, None]
            pooled[live] = each if j == 0 else pooled[live] + each
        if feature[POOLING]:
            pooled /= divisors(feature[POOLING], lengths)[:, None]
        out[:, bags.room + feature[OUT]] = pooled.to(out.dtype)


def gather(rows: Rows, slots: Tensor, out: Tensor) -> None:
    """Copy the rows at slots ``[n]`` of any tables, in any order, to ``out [n, D]`` float32."""
    launches["reference.gather"] += 1
    out.copy_(read_rows(rows, slots))


def weight_gradient(rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
    """Compute the gradient of the per-id weights: each id's row times the gradient of its bag's vector.

    Columns are added as in `block_sum`; the sum is divided as in the lookup. ``width`` and ``room`` of ``bags``
    describe ``grad […, D]``. ``out`` is parallel to ``bags.ids``; entries of ids of other arenas are unchanged.
    """
    launches["reference.weight_gradient"] += 1
    for feature in bags.features.tolist():
        _, lengths = _bounds(bags, feature)
        sample = torch.repeat_interleave(torch.arange(bags.batch_size, device=out.device), lengths)
        at = slice(feature[START], feature[START] + len(sample))
        each = read_rows(rows, bags.ids[at].long() + feature[BASE])
        dots = block_sum(each * grad[sample * bags.width + bags.room + feature[OUT]].float())
        out[at] = dots / divisors(feature[POOLING], lengths)[sample] if feature[POOLING] else dots


def _bounds(bags: BagLayout, feature: list[int]) -> tuple[Tensor, Tensor]:
    """Position of the first id and number of ids of each bag of a feature: ``[B]``, ``[B]``."""
    if feature[FIXED] >= 0:
        sample = torch.arange(bags.batch_size, device=bags.ids.device)
        return feature[START] + sample * feature[FIXED], torch.full_like(sample, feature[FIXED])
    offsets = bags.offsets[feature[RAGGED_ROW]]
    return feature[START] + offsets[:-1], offsets.diff()


# -- segments ------------------------------------------------------------------------------------------------------


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id, in feature, then sample, then bag order."""
    launches["reference.occurrences"] += 1
    slots: list[Tensor] = []
    owners: list[Tensor] = []
    scales: list[Tensor] = []
    for feature in bags.features.tolist():
        first, lengths = _bounds(bags, feature)
        sample = torch.repeat_interleave(torch.arange(bags.batch_size, device=first.device), lengths)
        at = slice(feature[START], feature[START] + len(sample))
        slots.append(bags.ids[at].long() + feature[BASE])
        owners.append(sample * bags.width + bags.room + feature[OUT])
        scale = (
            torch.ones(len(sample), dtype=torch.float32, device=first.device)
            if bags.weights is None
            else bags.weights[at]
        )
        scales.append(scale / divisors(feature[POOLING], lengths)[sample] if feature[POOLING] else scale)
    scaled = bags.weights is not None or bags.has_divisors
    return Occurrences(torch.cat(slots), torch.cat(owners), torch.cat(scales) if scaled else None)


def group(occurrences: Occurrences) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs of `RUN` occurrences."""
    launches["reference.group"] += 1
    slots = occurrences.slots
    total = len(slots)
    ordered, order = torch.sort(slots, stable=True)
    rows, lengths = torch.unique_consecutive(ordered, return_counts=True)
    runs = (lengths + RUN - 1) // RUN
    group_runs = torch.nn.functional.pad(runs.cumsum(0), (1, 0))
    of_group = torch.repeat_interleave(torch.arange(len(rows), device=slots.device), runs)
    within = torch.arange(len(of_group), device=slots.device) - group_runs[of_group]
    run_starts = (lengths.cumsum(0) - lengths)[of_group] + within * RUN
    run_starts = torch.nn.functional.pad(run_starts, (0, 1), value=total)

    def padded(t: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(t, (0, size - len(t)))

    return Groups(
        order,
        padded(rows, total),
        padded(run_starts, total + 1),
        padded(group_runs, total + 1),
        torch.tensor([len(rows), len(of_group)], device=slots.device),
    )


def spread(groups: Groups, values: Tensor) -> Tensor:
    """Return ``values[g] [N]`` for every occurrence of group g, in the original order: the inverse of grouping.

    The first ``values [≥ number of groups]`` int64 belong to the groups.
    """
    launches["reference.spread"] += 1
    count = int(groups.counts[0])
    lengths = groups.run_starts[groups.group_runs[: count + 1]].diff()
    out = torch.empty_like(groups.order)
    out[groups.order] = torch.repeat_interleave(values[:count], lengths)
    return out


# -- segment sum and update ----------------------------------------------------------------------------------------


def segment_sum(occurrences: Occurrences, groups: Groups, grad: Tensor, places: Tensor | None, out: Tensor) -> None:
    """Sum the gradient ``[…, D]`` of each distinct slot: the gradient of `update`, before ``step.inv_scale``.

    The sum of a slot is the canonical sum: its occurrences as float32 (times their factors) are added left to right in
    runs of `RUN`, then the runs left to right. Group g goes to row ``places[g]`` (distinct) of ``out [n, D]`` float32,
    or to row g without ``places``. Other rows are unchanged.
    """
    launches["reference.segment_sum"] += 1
    count = int(groups.counts[0])
    if count:
        to = slice(count) if places is None else places[:count]
        out[to] = _canonical_sum(occurrences, groups, grad.float())


def square_blocks(occurrences: Occurrences, groups: Groups, grad: Tensor, inv_scale: Tensor, out: Tensor) -> None:
    """Sum the squares of each distinct slot's gradient in blocks of 16 columns, for rows that are cut by column.

    ``inv_scale`` multiplies the sum of a slot before it is squared. ``out [≥ groups, ⌈D / 16⌉]`` float32 gets halving
    trees inside blocks.
    """
    launches["reference.square_blocks"] += 1
    count = int(groups.counts[0])
    if count:
        total = _canonical_sum(occurrences, groups, grad.float()) * inv_scale
        out[:count] = blocks_of(total * total)


def update(
    step: RuleStep, rows: Rows, state: Mapping[str, Tensor], occurrences: Occurrences, groups: Groups, grad: Tensor
) -> None:
    """Sum the gradient of each distinct slot and apply the rule to its row, once.

    The gradient of a row is the canonical sum of `segment_sum` times ``step.inv_scale``. The rule is `apply_rule`. A
    narrow row is then rounded stochastically (`round_stochastic`) with the bits of `random_bits` keyed by
    (``step.seeds``, row, column). Rows and moments (``state``: ``[S]`` or ``[S, D]`` by name) are updated in place.
    """
    launches["reference.update"] += 1
    count = int(groups.counts[0])
    if count == 0 or not bool(step.gate):
        return
    slots = groups.rows[:count]
    total = _canonical_sum(occurrences, groups, grad.float()) * step.inv_scale
    table = table_of(rows, slots)
    active = (step.hyper[table, ACTIVE] != 0) & (slots < len(rows.wide) + len(rows.narrow))  # else padding
    slots, total, table = slots[active], total[active], table[active]
    moments = {m.name: state[m.name][slots] for m in step.rule.moments}
    given = None if step.mean_squares is None else step.mean_squares[:count][active]
    new = apply_rule(step.rule, read_rows(rows, slots), moments, total, step.hyper[table], given)
    for name, moment in moments.items():
        state[name][slots] = moment
    write_rows(rows, slots, new, random_bits(step.seeds[table], *cells_of(rows, slots, table)))


def _canonical_sum(occurrences: Occurrences, groups: Groups, grad: Tensor) -> Tensor:
    """Gradient of each group ``[U, D]``."""

    def left_to_right(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        acc = values[starts]
        for j in range(1, int(lengths.max())):
            live = lengths > j
            acc[live] = acc[live] + values[starts[live] + j]
        return acc

    count, runs = groups.counts.tolist()
    each = grad.flatten(0, -2)[occurrences.bags[groups.order]]
    if occurrences.scale is not None:
        each = each * occurrences.scale[groups.order, None]
    run_starts = groups.run_starts[: runs + 1]
    group_runs = groups.group_runs[: count + 1]
    per_run = left_to_right(each, run_starts[:-1], run_starts.diff())
    return left_to_right(per_run, group_runs[:-1], group_runs.diff())
