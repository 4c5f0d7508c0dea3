"""Protects counts, estimates and statistics of columns: exact up to a bound, within their errors beyond it."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hotbed.data.drafting.profile import SHOWN, SeenValues, ValueCounts
from hotbed.data.files.column_statistics import SAMPLE, ColumnStatistics
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.data.hashing import mix
from hotbed.data.inspection import estimate_rate, jensen_shannon, rate_change, stability_index

ROWS = 60_000


def counted(values: Any, most_distinct: int, parts: int = 7, earlier: ValueCounts | None = None) -> ValueCounts:
    found = ValueCounts(most_distinct, earlier)
    array = values if isinstance(values, pa.Array) else pa.array(values)
    for start in range(0, len(array), -(-len(array) // parts)):
        found.add(array[start : start + -(-len(array) // parts)])
    return found


def drawn(seed: int, values: int = 20_000, exponent: float = 1.05) -> np.ndarray[Any, Any]:
    return ZipfLaw(values, exponent).draw((seed, 1), np.arange(ROWS, dtype=np.uint64))


@pytest.mark.parametrize("as_text", [False, True], ids=["integers", "text"])
def test_few_values_are_counted_exactly(as_text: bool) -> None:
    values = [f"v{i}" if as_text else int(i) for i in drawn(1, 500)]
    expected = Counter(map(str, values))
    found = counted(values, 1_000)
    assert found.distinct == (len(expected), 0.0)
    assert (found.total, found.hottest_error) == (ROWS, 0)
    assert dict(found.hottest).items() <= expected.items()
    assert [n for _, n in found.hottest] == sorted(expected.values(), reverse=True)[:SHOWN]
    sizes = [1, 10, len(expected), 10**6]
    falling = sorted(expected.values(), reverse=True)
    assert found.top_shares(sizes) == pytest.approx([sum(falling[:n]) / ROWS for n in sizes])


@pytest.mark.parametrize("seed", range(3))
def test_many_values_are_estimated_within_the_error(seed: int) -> None:
    values = drawn(seed)
    expected = Counter(values.tolist())
    found = counted(values, 2_048)
    estimate = found.distinct
    assert estimate.error / estimate.value == pytest.approx(1 / np.sqrt(2_047))
    assert abs(estimate.value - len(expected)) < 4 * estimate.error
    assert [int(v) for v, _ in found.hottest[:3]] == [v for v, _ in expected.most_common(3)]
    for value, count in found.hottest:
        assert expected[int(value)] <= count <= expected[int(value)] + found.hottest_error
    assert 0 < found.hottest_error < ROWS / 256


def test_what_comes_out_does_not_depend_on_the_parts_while_all_are_counted() -> None:
    values = drawn(1)
    first, second = (counted(values, 1 << 16, parts) for parts in (1, 50))
    assert (first.hottest, first.distinct) == (second.hottest, second.distinct)


@pytest.mark.parametrize("bounds", [(1 << 16, 1 << 16), (2_048, 1 << 16), (1 << 16, 2_048), (2_048, 2_048)])
def test_unseen_values(bounds: tuple[int, int]) -> None:
    """Also where the hottest value is new, and none of those that are sampled."""
    before, after = drawn(1), drawn(2) + 3_000
    unknown = ~np.isin(after, before)
    assert unknown.mean() > 0.2
    found = counted(after, bounds[1], earlier=counted(before, bounds[0]))
    assert found.unseen_share.value == pytest.approx(unknown.mean(), rel=1e-3)
    assert (found.unseen_share.error > 0) == (bounds[0] == 2_048)
    distinct = len(np.unique(after[unknown]))
    estimate = found.unseen_values
    assert abs(estimate.value - distinct) <= 4 * estimate.error + 1e-6 * distinct
    if bounds == (1 << 16, 1 << 16):
        assert (found.unseen_share, estimate) == ((unknown.mean(), 0.0), (distinct, 0.0))


def test_nothing_is_unseen_in_the_same_values() -> None:
    values = drawn(1)
    for bounds in ((2_048, 2_048), (2_048, 4_096), (1 << 16, 2_048)):
        found = counted(values, bounds[1], earlier=counted(values, bounds[0]))
        assert (found.unseen_share.value, found.unseen_values.value) == (0.0, 0.0)


def test_values_that_are_taken_for_seen_are_as_many_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.drafting.profile._BITS", 16)
    seen, hashes = SeenValues(), mix(np.arange(60_000, dtype=np.uint64))
    seen.add(hashes[:10_000])
    assert seen.has(hashes[:10_000]).all()
    wrong = seen.has(hashes[10_000:]).mean()
    assert 0.02 < seen.false_rate < 0.06 and wrong == pytest.approx(seen.false_rate, rel=0.1)
    values = np.arange(60_000)
    found = counted(values[10_000:], 1 << 16, earlier=counted(values[:30_000], 20_000))
    share = found.unseen_share
    assert share.error > 0 and abs(share.value - 0.6) < 4 * share.error


@pytest.mark.parametrize("most_distinct", [1 << 16, 1_024])
def test_the_exponent_of_zipfs_law(most_distinct: int) -> None:
    assert counted(drawn(1, 2_000, 1.2), most_distinct).zipf_exponent() == pytest.approx(1.2, abs=0.08)
    assert counted([1, 2, 3], most_distinct, 1).zipf_exponent() is None


def test_equal_numbers_are_one_value_whatever_their_type() -> None:
    found = ValueCounts()
    for array in (pa.array([1, 2], pa.int8()), pa.array([1.0, 2.5]), pa.array([2], pa.uint64())):
        found.add(array)
    assert found.distinct.value == 3
    assert dict(found.hottest)["1"] == 2


def test_of_many_values_that_are_alike_none_is_hot() -> None:
    found = counted(np.arange(20_000).repeat(3), 2_048)
    assert (found.ranked, found.hottest, found.zipf_exponent()) == (0, [], None)
    assert found.top_shares([]) == [] and found.top_shares([1]) == [0.0]
    assert found.distinct.value == pytest.approx(20_000, rel=0.1)


def test_nothing() -> None:
    found = ValueCounts()
    found.add(pa.array([], pa.int64()))
    assert (found.total, found.hottest, found.distinct.value) == (0, [], 0)
    assert np.isnan(found.top_shares([1])).all() and found.zipf_exponent() is None
    assert (found.unseen_share, found.unseen_values) == ((0.0, 0.0), (0.0, 0.0))


# -- distributions are compared --------------------------------------------------------------------------------------


def test_known_values() -> None:
    a, b = np.array([50, 50]), np.array([25, 75])
    assert stability_index(a, b) == pytest.approx(0.25 * math.log(2) + 0.25 * math.log(1.5))
    assert jensen_shannon(a, b) == pytest.approx(0.0487949)
    assert jensen_shannon(np.array([1, 0]), np.array([0, 7])) == pytest.approx(1)
    assert (stability_index(a, 3 * a), jensen_shannon(a, 3 * a)) == (0, 0)
    assert stability_index(np.array([100, 0]), np.array([0, 100])) > 1  # and not infinite
    assert math.isnan(jensen_shannon(a, np.zeros(2)))


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


# -- columns measured in parts ---------------------------------------------------------------------------------------


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
