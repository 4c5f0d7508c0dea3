"""Distributions are compared by known figures, with intervals that hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hotbed.data.drafting.profile import BINS, bins_of, upper_edge
from hotbed.data.inspection import estimate_rate, jensen_shannon, rate_change, stability_index


def test_known_values() -> None:
    a, b = np.array([50, 50]), np.array([25, 75])
    assert stability_index(a, b) == pytest.approx(0.25 * math.log(2) + 0.25 * math.log(1.5))
    assert jensen_shannon(a, b) == pytest.approx(0.0487949)
    assert jensen_shannon(np.array([1, 0]), np.array([0, 7])) == pytest.approx(1)
    assert (stability_index(a, 3 * a), jensen_shannon(a, 3 * a)) == (0, 0)
    assert stability_index(np.array([100, 0]), np.array([0, 100])) > 1  # and not infinite
    assert math.isnan(jensen_shannon(a, np.zeros(2)))


@pytest.mark.parametrize("value", [-1e6, -3.0, -1e-4, 0.0, 1e-4, 0.3, 1.0, 7.0, 1e9])
def test_the_upper_edge_of_a_numbers_bin_is_just_above_it(value: float) -> None:
    edge = upper_edge(int(bins_of(torch.tensor([value], dtype=torch.float64))[0]))
    assert value <= edge * (1 + 1e-12 * math.copysign(1, edge))
    assert abs(edge - value) <= abs(value) * (2**0.25 - 1) * 1.0001
    assert int(bins_of(torch.tensor([math.nan]))[0]) == BINS - 1


def test_intervals_of_rates() -> None:
    assert estimate_rate(0, 100) == pytest.approx((0, 0, 0.0369935), abs=1e-6)
    assert estimate_rate(56, 70) == pytest.approx((0.8, 0.6918, 0.8770), abs=1e-4)
    assert all(map(math.isnan, estimate_rate(0, 0)))
    # The example of Newcombe (1998), table II, row (a): 56/70 − 48/80.
    change = rate_change(estimate_rate(48, 80), estimate_rate(56, 70))
    assert change == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_intervals_hold_the_true_change_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1_000):
        first, second = random.binomial(500, 0.03), random.binomial(800, 0.05)
        _, low, high = rate_change(estimate_rate(first, 500), estimate_rate(second, 800))
        held += low <= 0.02 <= high
    assert 925 <= held <= 980
