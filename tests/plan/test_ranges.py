"""Strided ranges against sets of their numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotbed.plan.tiling import common_positions, count_common, first_common

ranges = st.builds(
    lambda start, length, step: range(start, start + length, step),
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(1, 9),
)


@given(a=ranges, b=ranges)
def test_what_two_ranges_have_in_common(a: range, b: range):
    common = sorted(set(a) & set(b))
    assert first_common(a, b) == (common[0] if common else None)
    assert count_common(a, b) == len(common)
    places = common_positions(a, b)
    assert [a[i] for i in places] == common
    assert places == range(len(a)) or common != list(a), "all of a range are its places in order"
