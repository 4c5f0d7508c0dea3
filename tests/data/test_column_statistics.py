"""Protects that columns measured in parts, in any order, have the statistics that NumPy finds in the whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotbed.data.files.column_statistics import SAMPLE, ColumnStatistics

SHARES = np.linspace(0, 1, 65)
ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.7e9, 2.0**62, 5e-324])
VALUES = st.lists(st.one_of(st.floats(-1e9, 1e9), ODD), max_size=60)


def measured(parts: list[NDArray[np.float64]]) -> ColumnStatistics:
    statistics, first = ColumnStatistics(), 0
    for part in parts:
        statistics.add(part, first)
        first += len(part)
    return statistics


@given(st.lists(VALUES, max_size=4))
def test_parts_have_the_statistics_of_the_whole(parts: list[list[float]]) -> None:
    arrays = [np.array(part, dtype=np.float64) for part in parts]
    whole = np.concatenate([np.empty(0), *arrays])
    finite = whole[np.isfinite(whole)]
    found = measured(arrays)
    assert (found.count, found.missing) == (len(finite), len(whole) - len(finite))
    if len(finite):
        assert (found.low, found.high) == (finite.min(), finite.max())
        size = np.abs(finite).max() + 1e-300  # products of numbers next to 0 are rounded to it
        assert math.isclose(found.mean, finite.mean(), rel_tol=1e-12, abs_tol=1e-12 * size)
        assert math.isclose(found.deviation, finite.std(), rel_tol=1e-9, abs_tol=1e-9 * size)
        np.testing.assert_array_equal(found.quantiles(SHARES), np.quantile(finite, SHARES))


@given(st.lists(VALUES, min_size=1, max_size=4), st.randoms())
def test_the_order_in_which_parts_are_merged_does_not_matter(parts: list[list[float]], random: object) -> None:
    firsts = np.cumsum([0, *map(len, parts)])
    several: list[ColumnStatistics] = []
    for part, first in zip(parts, firsts, strict=False):
        statistics = ColumnStatistics()
        statistics.add(np.array(part, dtype=np.float64), int(first))
        several.append(statistics)
    found: list[ColumnStatistics] = []
    for order in (several, several[::-1]):
        whole = ColumnStatistics()
        for statistics in order:
            whole.merge(statistics)
        found.append(whole)
    one, other = found
    assert (one.count, one.missing, one.low, one.high) == (other.count, other.missing, other.low, other.high)
    assert math.isclose(one.mean, other.mean, rel_tol=1e-9, abs_tol=1e-9 * max(abs(one.low), abs(one.high), 1))
    if one.count:
        np.testing.assert_array_equal(one.quantiles(SHARES), other.quantiles(SHARES))


def test_a_large_column_is_sampled_alike_in_any_order() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(3, 2, 5 * SAMPLE)
    parts = np.array_split(values, 7)
    found = measured(parts)
    backwards, first = ColumnStatistics(), len(values)
    for part in parts[::-1]:
        first -= len(part)
        backwards.add(part, first)
    np.testing.assert_array_equal(found.quantiles(SHARES), backwards.quantiles(SHARES))
    ranks = np.searchsorted(np.sort(values), found.quantiles(SHARES)) / len(values)
    assert np.abs(ranks - SHARES).max() < 0.008  # four standard deviations of a sample's quantile
    assert math.isclose(found.mean, values.mean(), rel_tol=1e-12)
    assert math.isclose(found.deviation, values.std(), rel_tol=1e-12)


def test_a_large_offset_costs_no_digits() -> None:
    """Seconds since 1970, of one hour."""
    values = 1.7e9 + np.random.default_rng(1).uniform(0, 3600, 10_000)
    found = measured(np.array_split(values, 13))
    assert found.deviation == pytest.approx(values.std(), rel=1e-9)
    assert found.usual_distance()[0] == np.quantile(values, 0.5)


def test_values_too_large_to_square_are_told() -> None:
    assert measured([np.array([1e300, -1e300])]).deviation == math.inf
    assert measured([np.array([1e300, 1e300])]).deviation == 0
    assert math.isfinite(measured([np.array([1.7e308, -1.7e308, 0, 0])]).usual_distance()[1])
    assert ColumnStatistics().deviation == 0
