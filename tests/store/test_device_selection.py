"""Lists whose length the host need not know are those that it would make itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.store.device_selection import PendingSelection, list_set_bits, padded_positions, sort_slots

masks = st.lists(st.booleans(), max_size=40)


@given(masks)
def test_padded_positions_begin_with_those_that_are_meant(mask: list[bool]) -> None:
    expected = [i for i, is_meant in enumerate(mask) if is_meant]
    at = list_set_bits(torch.tensor(mask, dtype=torch.bool))
    assert at.tolist() == expected
    if mask:
        padded, count = padded_positions(torch.tensor(mask))
        assert padded[: int(count)].tolist() == expected and count.shape == (1,)
        assert len(padded) == len(mask) and all(0 <= i < len(mask) for i in padded.tolist())


@given(masks, st.data())
def test_a_list_is_the_same_whether_its_length_is_known_or_not(mask: list[bool], data: st.DataObject) -> None:
    slots = torch.tensor(data.draw(st.permutations(range(len(mask)))), dtype=torch.int64)
    known, unknown = (
        PendingSelection(torch.tensor(mask, dtype=torch.bool), slots, is_apart=a).wait() for a in (False, True)
    )
    assert known.at.tolist() == unknown.at.tolist() and known.slots.tolist() == unknown.slots.tolist()
    assert known.slots.tolist() == slots[torch.tensor(mask, dtype=torch.bool)].tolist()
    some = torch.arange(0, len(known.at), 2)
    assert unknown.subset(some).slots.tolist() == known.slots.tolist()[::2]
    assert unknown.subset(some).at.tolist() == known.at.tolist()[::2]


@given(st.lists(st.integers(-2, 9), max_size=30))
def test_rising_slots_are_distinct_and_not_negative(slots: list[int]) -> None:
    assert sort_slots(torch.tensor(slots, dtype=torch.int64)).tolist() == sorted({s for s in slots if s >= 0})
