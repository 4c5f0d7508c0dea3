"""The definition of every operation, in plain PyTorch. Runs on any device; slow; the oracle of all kernel tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import BASE, BLOCK, FIXED, MEAN, RAGGED_ROW, RUN, START, BagLayout, Groups, Occurrences, RuleStep

NAME = "reference"

# -- initial values ------------------------------------------------------------------------------------------------


def initial_values_(out: Tensor, *, seed: int, rows: range, cols: range, bound: float) -> None:
    """Fill ``out`` with the initial values of a rectangle of a table.

    Cell (r, c) is ``float(k − 2²³) · float32(bound / 2²³)`` where k is the upper 24 bits of a 32-bit hash of
    (seed, r, c): two rounds of MurmurHash3's finalizer over the halves of r, a third over the column added as a
    multiple of the golden ratio. One float32 multiply, so every backend gets the same bits.

    Parameters
    ----------
    out
        ``[len(rows), len(cols)]`` float32.
    seed
        32-bit seed of the table.
    rows, cols
        Which cells of the table; strided ranges are allowed.
    bound
        Values are uniform on ``[−bound, bound)``.
    """
    launches["reference.initial_values"] += 1
    row = torch.arange(rows.start, rows.stop, rows.step, dtype=torch.int64, device=out.device)
    col = torch.arange(cols.start, cols.stop, cols.step, dtype=torch.int64, device=out.device)
    key = _mix32(_mix32((row & 0xFFFFFFFF) ^ seed) ^ (row >> 32) ^ 0x9E3779B9)
    k = _mix32((key[:, None] + col * 0x9E3779B9) & 0xFFFFFFFF) >> 8
    out.copy_((k - (1 << 23)).float() * torch.tensor(bound / (1 << 23), dtype=torch.float32, device=out.device))


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on int64 tensors (torch lacks unsigned arithmetic)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


# -- lookup --------------------------------------------------------------------------------------------------------


def lookup(weight: Tensor, bags: BagLayout) -> Tensor:
    """Pool the rows of each bag.

    A bag's vector is the sum of its rows (times their weights) in bag order, starting from the first; mean pooling
    then divides by the number of ids. An empty bag gives zeros.

    Parameters
    ----------
    weight
        Arena ``[S, D]``.
    bags
        Bags of ``F`` features × ``B`` samples.

    Returns
    -------
    Tensor
        ``[B, F, D]``.
    """
    launches["reference.lookup"] += 1
    out = weight.new_zeros(bags.batch_size, len(bags.features), weight.shape[1])
    for f, feature in enumerate(bags.features.tolist()):
        first, lengths = _bounds(bags, feature)
        for j in range(int(lengths.max()) if len(lengths) else 0):
            live = lengths > j
            at = first[live] + j
            rows = weight[bags.ids[at].long() + feature[BASE]]
            if bags.weights is not None:
                rows = rows * bags.weights[at, None]
            out[live, f] = rows if j == 0 else out[live, f] + rows
        if feature[MEAN]:
            out[:, f] /= lengths.clamp(min=1)[:, None]
    return out


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
    for f, feature in enumerate(bags.features.tolist()):
        first, lengths = _bounds(bags, feature)
        sample = torch.repeat_interleave(torch.arange(bags.batch_size, device=first.device), lengths)
        start = int(first[0]) if len(first) else 0
        at = slice(start, start + len(sample))
        slots.append(bags.ids[at].long() + feature[BASE])
        owners.append(sample * len(bags.features) + f)
        scale = (
            torch.ones(len(sample), dtype=torch.float32, device=first.device)
            if bags.weights is None
            else bags.weights[at]
        )
        scales.append(scale / lengths[sample] if feature[MEAN] else scale)
    scaled = bags.weights is not None or bags.has_mean
    return Occurrences(torch.cat(slots), torch.cat(owners), torch.cat(scales) if scaled else None)


def group(slots: Tensor) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs of `RUN` occurrences."""
    launches["reference.group"] += 1
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


# -- update --------------------------------------------------------------------------------------------------------


def update(
    step: RuleStep,
    weight: Tensor,
    state: Mapping[str, Tensor],
    occurrences: Occurrences,
    groups: Groups,
    grad: Tensor,
) -> None:
    """Sum the gradient of each distinct slot and apply the rule to its row, once.

    The gradient of a row is the canonical sum: its occurrences (times their factors) left to right in runs of `RUN`,
    then the runs left to right, then times ``step.inv_scale``.

    Parameters
    ----------
    step
        The rule (its formulas are those of ``_RULES`` below), hyperparameters, gradient factor and gate.
    weight
        Arena ``[S, D]``, updated in place.
    state
        The rule's moments by name, ``[S]`` or ``[S, D]``, updated in place.
    occurrences, groups
        From `occurrences` and `group` of the same ids.
    grad
        Gradient of the pooled vectors ``[B · F, D]``.
    """
    launches["reference.update"] += 1
    count = int(groups.counts[0])
    if count == 0 or not bool(step.gate):
        return
    rows = groups.rows[:count]
    total = _canonical_sum(occurrences, groups, grad) * step.inv_scale
    values = step.hyper[torch.searchsorted(step.bases, rows, right=True) - 1]
    active = values[:, 0] != 0
    rows, total, values = rows[active], total[active], values[active]
    _RULES[step.rule.name](weight, state, rows, total, *(values[:, 1 + i] for i in range(len(step.rule.hyper))))


def _canonical_sum(occurrences: Occurrences, groups: Groups, grad: Tensor) -> Tensor:
    """Gradient of each group ``[U, D]``."""

    def left_to_right(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        acc = values[starts]
        for j in range(1, int(lengths.max())):
            live = lengths > j
            acc[live] = acc[live] + values[starts[live] + j]
        return acc

    count, runs = groups.counts.tolist()
    each = grad[occurrences.bags[groups.order]]
    if occurrences.scale is not None:
        each = each * occurrences.scale[groups.order, None]
    run_starts = groups.run_starts[: runs + 1]
    group_runs = groups.group_runs[: count + 1]
    per_run = left_to_right(each, run_starts[:-1], run_starts.diff())
    return left_to_right(per_run, group_runs[:-1], group_runs.diff())


def block_sum(x: Tensor) -> Tensor:
    """Sum over the last dim ``D``: halving trees inside blocks of `BLOCK` columns, then the blocks in column order."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    total = x[..., 0, 0]
    for b in range(1, x.shape[-2]):
        total = total + x[..., b, 0]
    return total


def _sgd(weight: Tensor, state: Mapping[str, Tensor], rows: Tensor, g: Tensor, lr: Tensor) -> None:
    weight[rows] -= lr[:, None] * g


def _rowwise_adagrad(
    weight: Tensor, state: Mapping[str, Tensor], rows: Tensor, g: Tensor, lr: Tensor, eps: Tensor
) -> None:
    v = state["sum_of_squares"][rows] + block_sum(g * g) / g.shape[1]
    state["sum_of_squares"][rows] = v
    weight[rows] -= (lr / (v.sqrt() + eps))[:, None] * g


_RULES = {"sgd": _sgd, "rowwise_adagrad": _rowwise_adagrad}


# -- interaction ---------------------------------------------------------------------------------------------------


def interaction(dense: Tensor, embeddings: Tensor, width: int) -> Tensor:
    """Dot interaction of DLRM (Naumov et al. 2019).

    The n = F + 1 vectors of a sample (``dense`` first) are multiplied pairwise; the strict lower triangle of the Gram
    matrix, row by row, follows ``dense``; zeros fill up to ``width``.

    Parameters
    ----------
    dense
        ``[B, D]``.
    embeddings
        ``[B, F, D]``.
    width
        Columns of the result, at least ``D + n (n − 1) / 2``.

    Returns
    -------
    Tensor
        ``[B, width]``.
    """
    launches["reference.interaction"] += 1
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    gram = vectors @ vectors.transpose(1, 2)
    i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=dense.device)
    out = torch.cat([dense, gram[:, i, j]], dim=1)
    return torch.nn.functional.pad(out, (0, width - out.shape[1]))


def interaction_backward(grad: Tensor, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients ``[B, D]``, ``[B, F, D]`` of `interaction` from ``grad [B, width]``."""
    launches["reference.interaction_backward"] += 1
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    n, dim = vectors.shape[1:]
    i, j = torch.tril_indices(n, n, -1, device=dense.device)
    gram = grad.new_zeros(len(grad), n, n)
    gram[:, i, j] = grad[:, dim : dim + len(i)]
    out = (gram + gram.transpose(1, 2)) @ vectors
    return out[:, 0] + grad[:, :dim], out[:, 1:]
