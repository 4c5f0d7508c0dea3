"""Counts of values are exact up to a bound, and estimates beyond it are within their errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotbed.data.drafting.profile import SHOWN, SeenValues, ValueCounts
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.data.hashing import mix

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
