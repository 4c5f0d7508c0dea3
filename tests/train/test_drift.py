"""Protects: days that differ have a high index, whatever the size of their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotbed.data.drafting.profile import BINS, bins_of
from hotbed.train.workflows.daily_training import stability


def index(a: Tensor, b: Tensor) -> float:
    def counted(values: Tensor) -> dict[str, dict[str, int]]:
        bins, counts = bins_of(values).unique(return_counts=True)
        return {"x": dict(zip(map(str, bins.tolist()), counts.tolist(), strict=True))}

    return stability(counted(a), counted(b))["x"]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.02, 1.0, 1e6, 1e15])
def test_it_sees_numbers_of_any_size(scale: float) -> None:
    """Click rates of one to three per cent were in one bin once."""
    draw = torch.Generator().manual_seed(1)
    day, next_day, other = (scale * torch.rand(20_000, generator=draw).double() for _ in range(3))
    assert index(day, next_day) < 0.02
    assert index(day, 0.6 * other) > 0.25
    assert index(day, other + scale) > 1
    assert index(day, -other) > 1


def test_bins_rise_with_numbers() -> None:
    values = torch.tensor([-torch.inf, -1e30, -3.0, -0.1, -1e-12, 0.0, 1e-12, 0.1, 0.2, 3.0, 1e15, torch.inf])
    bins = bins_of(values)
    assert bins.tolist() == sorted(bins.tolist())
    assert len(set(bins.tolist())) == len(values) - 1  # no finite number above 2^64 is told from infinity
    assert bins_of(torch.tensor([torch.nan])).tolist() == [BINS - 1]
    assert int(bins.min()) >= 0 and int(bins.max()) < BINS - 1
