"""Compute the area under the ROC curve, over all samples and per group."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import BatchError


class GroupedAUC(NamedTuple):
    """Mean AUC over groups, the number of groups in it, and the number of groups left out for having one class."""

    value: float
    groups: int
    left_out: int


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Return the exact area under the ROC curve. Ties count half (mid-ranks).

    All arguments are ``[N]``. Scores may be logits or probabilities, because only their order matters. A label between
    0 and 1 is counted as a fraction of a positive. The value is NaN if there are not both positives and negatives.
    Raise `BatchError` if a label is not in [0, 1].
    """
    return grouped_auc(scores, labels, torch.zeros_like(scores, dtype=torch.uint8), weights).value


def grouped_auc(scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None) -> GroupedAUC:
    """Return the mean AUC of groups, weighted by their total weights (GAUC; Zhu et al., arXiv 1706.06978 §5.2).

    ``groups [N]`` has any integer dtype. The other arguments are as in `auc`. The value is NaN if no group has both
    classes.
    """
    check_labels(labels[:, None])
    if not len(scores):
        return GroupedAUC(math.nan, 0, 0)
    # Order samples by group, then by score, with two sorts. The second sort is stable.
    scores, order = scores.sort()
    if bool((groups != groups[0]).any()):
        groups, by_group = groups[order].sort(stable=True)
        scores, order = scores[by_group], order[by_group]
        new_group = groups.diff() != 0
    else:
        new_group = torch.zeros(len(scores) - 1, dtype=torch.bool, device=scores.device)
    weight = torch.ones_like(scores, dtype=torch.float64) if weights is None else weights[order].double()
    positive = labels[order].double() * weight
    negative = weight - positive
    # A run is a sequence of equal scores within a group. Its positives beat all negatives before the run and half of
    # the negatives in the run.
    run_end = _ends((scores.diff() != 0) | new_group)
    group_end = _ends(new_group)
    run_positive, run_negative = _sums(positive, run_end), _sums(negative, run_end)
    group_of_run = torch.searchsorted(group_end, run_end)
    group_positive, group_negative = _sums(positive, group_end), _sums(negative, group_end)
    negative_before_group = group_negative.cumsum(0) - group_negative
    before = run_negative.cumsum(0) - run_negative - negative_before_group[group_of_run]
    beaten = torch.zeros_like(group_positive).index_add_(0, group_of_run, run_positive * (before + run_negative / 2))
    # Count samples, because a difference of rounded weight sums may be nonzero without samples.
    both = (_sums((positive > 0).double(), group_end) > 0) & (_sums((negative > 0).double(), group_end) > 0)
    group_weight = (group_positive + group_negative)[both]
    group_auc = beaten[both] / (group_positive[both] * group_negative[both])
    value = (group_auc * group_weight).sum() / group_weight.sum()
    return GroupedAUC(float(value), int(both.sum()), int((~both).sum()))


def _ends(change: Tensor) -> Tensor:
    """Return the position of the last element of each run, from ``[N − 1]`` flags "the next element starts a run"."""
    last = torch.tensor([len(change)], device=change.device)
    return torch.cat([change.nonzero()[:, 0], last])


def _sums(values: Tensor, ends: Tensor) -> Tensor:
    totals = values.cumsum(0)[ends]
    return totals.diff(prepend=totals.new_zeros(1))


def check_labels(labels: Tensor) -> None:
    """Raise `BatchError` unless all labels ``[B, T]`` are in [0, 1], where binary cross-entropy and AUC are defined."""
    bad = ~((labels >= 0) & (labels <= 1))
    if bool(bad.any()):
        sample, task = bad.nonzero()[0].tolist()
        raise BatchError(
            f"label: got {float(labels[sample, task])} at sample {sample:,} of {len(labels):,}, column {task}, "
            "expected 0 to 1. Map labels in the source, e.g. -1 and 1 with (labels > 0).float()"
        )
