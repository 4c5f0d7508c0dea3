"""Grouping equal slots and cutting the groups into runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import BatchError
from hotbed.ops import BagLayout, Occurrences, cpu

from .cases import RUN, naive_runs, valid

SLOTS = {
    "none": [],
    "one": [2**40],
    "all_equal_31": [4] * 31,
    "all_equal_32": [4] * 32,
    "all_equal_33": [4] * 33,
    "all_equal_64": [4] * 64,
    "over_1024": [3] * 1100 + [1] * 40 + [3],
    "all_different": list(range(50, 0, -1)),
    "alternating": [5, 2] * 70,
    "beyond_32_bits": [2**33, 0, 2**33 + 1, 2**33] * 20,
}


def occurrences_of(slots: list[int], segments: tuple[int, ...] | None = None) -> Occurrences:
    cuts = None if segments is None else torch.tensor(segments)
    return Occurrences(torch.tensor(slots, dtype=torch.int64), torch.arange(len(slots)), None, cuts)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Numba cannot compile while hypothesis watches which lines run."""
    for segments in (None, (0, 1, 2)):
        cpu.group(occurrences_of([0, 1], segments))


@pytest.mark.parametrize("name", SLOTS)
def test_group(backend, name):
    slots = SLOTS[name]
    groups = backend.ops.group(backend.put(occurrences_of(slots)))
    runs = naive_runs(slots)
    order = [i for of_slot in runs.values() for run in of_slot for i in run]
    starts = [0]
    first_run = [0]
    for of_slot in runs.values():
        starts += [starts[-1] + sum(map(len, of_slot[: i + 1])) for i in range(len(of_slot))]
        first_run.append(first_run[-1] + len(of_slot))
    assert valid(groups) == (order, list(runs), starts, first_run)
    assert len(groups.rows) == len(slots)
    assert len(groups.run_starts) == len(groups.group_runs) == len(slots) + 1


@pytest.mark.parametrize("limit", [2**31, 2**31 - 1, 4, None])
def test_a_limit_of_slots_changes_nothing(backend, limit):
    """It only says that shorter keys can be sorted."""
    found = occurrences_of([2**31 - 2, 0, 2**31 - 2, 7] * 20 if limit is None or limit > 4 else [3, 0, 3, 1] * 20)
    groups = backend.ops.group(backend.put(replace(found, limit=limit)))
    assert valid(groups) == valid(backend.ops.group(backend.put(found)))
    assert groups.rows.dtype == torch.int64


@settings(max_examples=30)
@given(slots=st.lists(st.integers(0, 6) | st.integers(0, 2**40), max_size=150))
def test_groups_partition_the_occurrences(backend, slots):
    groups = backend.ops.group(backend.put(occurrences_of(slots)))
    order, rows, run_starts, group_runs = valid(groups)
    assert sorted(order) == list(range(len(slots)))
    assert rows == sorted(set(slots))
    assert run_starts[0] == 0 and run_starts[-1] == len(slots)
    assert group_runs[0] == 0 and group_runs[-1] == len(run_starts) - 1
    for row, first, last in zip(rows, group_runs, group_runs[1:], strict=False):
        members = order[run_starts[first] : run_starts[last]]
        assert members == sorted(members), "equal slots keep their order"
        assert {slots[i] for i in members} == {row}
        lengths = [run_starts[r + 1] - run_starts[r] for r in range(first, last)]
        assert all(length == RUN for length in lengths[:-1]) and 0 < lengths[-1] <= RUN


def test_occurrences_of_several_batches_follow_each_other():
    """Bags are numbered through; where only some have factors, those of the others are 1."""
    first = Occurrences(torch.tensor([4, 2]), torch.tensor([0, 5]), None)
    second = Occurrences(torch.tensor([2]), torch.tensor([1]), torch.tensor([0.5]))
    assert Occurrences.concatenate([first], [6]) is first
    both = Occurrences.concatenate([first, second, first], [6, 3, 6])
    assert both.slots.tolist() == [4, 2, 2, 4, 2]
    assert both.bags.tolist() == [0, 5, 7, 9, 14]
    assert both.scale.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert Occurrences.concatenate([first, first], [6, 6]).scale is None


@settings(max_examples=50)
@given(
    tables=st.lists(st.lists(st.integers(0, 3) | st.integers(0, 2**30), max_size=80), min_size=1, max_size=6),
    threads=st.integers(1, 4),
)
def test_sorting_table_by_table_changes_nothing(tables, threads):
    slots = [slot + i * 2**31 for i, of_table in enumerate(tables) for slot in of_table]
    ends = [0, *accumulate(len(t) for t in tables)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected, found = (valid(cpu.group(occurrences_of(slots, s))) for s in (None, tuple(ends)))
    finally:
        torch.set_num_threads(before)
    assert found == expected


def bags_of(bases: list[int], lengths: list[int]) -> BagLayout:
    """Two samples of ``lengths[f]`` ids each for every feature, whose tables begin at ``bases``."""
    starts = [0, *accumulate(2 * n for n in lengths)]
    features = [
        [start, n, -1, base, 0, f, f] for f, (start, n, base) in enumerate(zip(starts, lengths, bases, strict=False))
    ]
    ids, offsets = torch.zeros(starts[-1], dtype=torch.int64), torch.empty(0, 3, dtype=torch.int64)
    return BagLayout(ids, torch.tensor(features), offsets, None, 2, starts[-1], False, len(bases))


@pytest.mark.parametrize(
    ("bases", "lengths", "segments"),
    [
        ([0, 10, 20], [1, 2, 3], (0, 2, 6, 12)),
        ([0, 0, 20], [1, 2, 3], (0, 6, 12)),  # two features share a table
        ([0, 10, 20], [1, 0, 3], (0, 2, 2, 8)),
        ([0, 20, 10], [1, 2, 3], None),
        ([5], [4], (0, 8)),
    ],
)
def test_occurrences_know_where_tables_begin(bases, lengths, segments):
    found = cpu.occurrences(bags_of(bases, lengths)).segments
    assert (None if found is None else tuple(found.tolist())) == segments


def test_a_sort_key_holds_slot_and_place():
    with pytest.raises(BatchError, match=r"got 63 \+ 2 bits for 2 ids and the largest slot"):
        cpu.group(occurrences_of([2**62, 0]))
