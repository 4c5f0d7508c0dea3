"""Records of a file are where they were put last, nothing is overwritten that is read, and files stay short."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.plan.limits import FILE_SPACE
from hotbed.store.file_records import SPACE, Segments


class File:
    """A file as a list: which record, in which version, is at each place."""

    def __init__(self, per_segment: int) -> None:
        self.segments, self.per = Segments(per_segment), per_segment
        self.places: dict[int, tuple[int, int]] = {}
        self.versions: dict[int, int] = {}

    def write(self, numbers: list[int]) -> None:
        for number in numbers:
            self.versions[number] = self.versions.get(number, 0) + 1
        self.put(numbers)
        while len(left := self.segments.emptiest()):
            self.put(left.tolist())

    def put(self, numbers: list[int]) -> None:
        wanted = torch.tensor(numbers, dtype=torch.int64)
        places = self.segments.take(len(numbers))
        assert len(set(places.tolist())) == len(numbers)
        for number, place in zip(numbers, places.tolist(), strict=True):
            self.places[place] = number, self.versions[number]
        self.segments.put(wanted, places)

    def read(self) -> list[tuple[int, int]]:
        numbers = torch.tensor(sorted(self.versions), dtype=torch.int64)
        return [self.places[place] for place in self.segments.positions(numbers).tolist()]


WRITES = st.lists(st.sets(st.integers(0, 60), max_size=20), max_size=60)


@settings(max_examples=60, deadline=None)
@given(WRITES, st.integers(1, 9))
def test_records_are_where_they_were_put_last_and_the_file_stays_short(writes: list[set[int]], per: int) -> None:
    file = File(per)
    for numbers in writes:
        file.write(sorted(numbers))
        assert file.read() == sorted(file.versions.items())
        records = len(file.versions)
        in_a_write = -(-20 // per) + 1
        assert file.segments.end <= (SPACE * records / per + 1 + 8 + in_a_write + 16) * per
    assert file.segments.positions(torch.tensor([-1, 61, 10**6])).tolist() == [-1, -1, -1]


@settings(max_examples=60, deadline=None)
@given(WRITES, st.integers(0, 59), st.integers(0, 59))
def test_what_is_read_is_not_overwritten_meanwhile(writes: list[set[int]], begin: int, end: int) -> None:
    file = File(4)
    begun, seen = None, list[tuple[int, tuple[int, int]]]()
    for step, numbers in enumerate(writes):
        if step == begin:
            begun = file.segments.begin_read()
            known = torch.tensor(sorted(file.versions), dtype=torch.int64)
            seen = [(place, file.places[place]) for place in file.segments.positions(known).tolist()]
        file.write(sorted(numbers))
        if begun is not None:
            assert [file.places[place] for place, _ in seen] == [record for _, record in seen]
            if step >= end:
                file.segments.end_read(begun)
                begun = None


def test_segments_whose_records_have_moved_on_are_written_again() -> None:
    file = File(4)
    for _ in range(100):
        file.write([0, 1, 2, 3])
    assert file.segments.end == 2 * 4
    begun = file.segments.begin_read()
    for _ in range(5):
        file.write([0, 1, 2, 3])
    assert file.segments.end == (2 + 4) * 4  # what may be read stays
    file.segments.end_read(begun)
    for _ in range(100):
        file.write([0, 1, 2, 3])
    assert file.segments.end == (2 + 4) * 4


def test_neighbours_in_a_write_are_neighbours_in_the_file() -> None:
    segments = Segments(4)
    assert segments.take(10).tolist() == list(range(10))
    segments.put(torch.arange(10), torch.arange(10))
    assert segments.take(3).tolist() == [10, 11, 12] and segments.end == 13
    assert segments.nbytes > 0


def test_plans_know_how_long_files_are() -> None:
    assert FILE_SPACE == SPACE
