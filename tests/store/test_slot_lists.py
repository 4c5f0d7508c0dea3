"""Protects: lists of slots that are read piece by piece are the sorted slots, whatever is added or marked later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.store import hash_index as keyed
from hotbed.store import slot_lists
from hotbed.store.hash_index import MemoryRecords
from hotbed.store.slot_lists import MaskedSlots, SlotTensor, SortedSlots, UpdatedMask
from tests.matrix import examples

MOST = 1 << 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_lists, "PIECE", 8)
    monkeypatch.setattr(keyed, "PIECE", 8)
    monkeypatch.setattr(keyed, "_INTERVALS", 4)
    monkeypatch.setattr(keyed, "_WAITING", 5)


def same(found: SortedSlots, expected: list[int], data: st.DataObject, most: int = MOST) -> None:
    """Compare all that a list of slots is asked for with a sorted list."""
    assert len(found) == len(expected)
    assert found[:].tolist() == expected
    start, stop = (data.draw(st.integers(0, len(expected) + 1)) for _ in range(2))
    assert found[start:stop].tolist() == expected[start:stop]
    slot = data.draw(st.one_of(st.sampled_from([0, *expected]), st.integers(0, MOST)))
    assert found.below(slot) == sum(s < slot for s in expected)
    part = found.part(min(start, len(expected)), len(expected))
    assert [s for chunk in part.chunks(3) for s in chunk.tolist()] == expected[start:]
    assert part.below(slot) == sum(s < slot for s in expected[start:])
    cuts = part.cuts(4).tolist()
    assert cuts == sorted(cuts) and (not len(part) or min(cuts) >= part[:1].item())
    asked = sorted({min(slot, most - 1), *expected})
    numbers = found.number(torch.tensor(asked, dtype=torch.int64)).tolist()
    assert [s for s, n in zip(asked, numbers, strict=True) if n >= 0] == expected
    there = [n for n in numbers if n >= 0]
    assert len(set(there)) == len(there) and all(n < found.numbers for n in there)


SLOTS = st.one_of(st.integers(0, 60), st.integers(0, MOST - 1), st.integers(MOST - 20, MOST - 1))


@given(first=st.sets(SLOTS, max_size=60), later=st.sets(SLOTS, max_size=20), data=st.data())
@settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))
def test_records_are_listed_as_they_were(first: set[int], later: set[int], data: st.DataObject) -> None:
    records = MemoryRecords(4, MOST)
    order = torch.tensor(data.draw(st.permutations(sorted(first))), dtype=torch.int64)
    records.write(order, torch.zeros(len(order), 4, dtype=torch.uint8))
    before, touched = records.slots(), records.update_collector()
    changes = data.draw(st.lists(st.sampled_from(sorted(first) or [0]), max_size=12)) if first else []
    for slot in changes:
        touched.add(torch.tensor([slot, slot]))
    new = torch.tensor(sorted(later - first), dtype=torch.int64)
    records.write(new, torch.zeros(len(new), 4, dtype=torch.uint8))
    touched.add(new)
    changed = touched.slots()
    touched.add(order)  # after the list was made
    same(before, sorted(first), data)
    same(changed, sorted({*changes, *(later - first)}), data)
    same(records.slots(), sorted(first | later), data)


def test_a_piece_does_not_count_the_slots_behind_it() -> None:
    """An interval with too many slots is divided again, into intervals that may end behind it."""
    slots = torch.tensor([*range(9), (1 << 38) - 3, MOST - 16])
    records = MemoryRecords(4, MOST)
    records.write(slots, torch.zeros(len(slots), 4, dtype=torch.uint8))
    assert len(records.slots()) == len(slots) and records.slots()[:].tolist() == slots.tolist()


@given(slots=st.sets(st.integers(0, 70), max_size=40), count=st.integers(71, 90), data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_masks_and_tensors_are_listed(slots: set[int], count: int, data: st.DataObject) -> None:
    mask = UpdatedMask(count, torch.device("cpu"))
    mask.add(torch.tensor(sorted(slots), dtype=torch.int64))
    found = mask.slots()
    mask.add(torch.arange(count))
    same(found, sorted(slots), data, most=count)
    same(SlotTensor(torch.tensor(sorted(slots), dtype=torch.int64)), sorted(slots), data)


def test_a_mask_of_nothing_is_an_empty_list() -> None:
    assert MaskedSlots(torch.empty(0, dtype=torch.bool))[:].tolist() == []
