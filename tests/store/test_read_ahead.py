"""Rows that another thread reads ahead are those that are trained, whatever is written meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotbed.ops import cpu_cache
from hotbed.optim import Adam
from hotbed.store import Storage
from hotbed.store.file_records import FileRecords
from hotbed.store.read_ahead import ReadAhead
from hotbed.store.records import Use
from tests.store.test_lazy_store import CACHED, drive, everything, made


@pytest.mark.parametrize("storage", [*CACHED.values(), Storage("disk")], ids=[*CACHED, "no cache"])
def test_another_thread_reads_ahead_while_rows_are_trained(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.store.row_cache.needs_staging", lambda _: True)
    moments = list(Adam.rule.moments)
    store, dense = made(storage, "int8", moments), made(None, "int8", moments)
    draw = torch.Generator().manual_seed(2)
    actions = [("update", torch.randint(0, 60, (20,), generator=draw).tolist()) for _ in range(40)]
    done = threading.Event()

    def ahead() -> None:
        of_thread = torch.Generator().manual_seed(3)
        while not done.is_set():
            store.prefetch(torch.randint(0, 60, (20,), generator=of_thread))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ahead)
        drive(store, Adam.rule, actions)
        done.set()
        waiting.result()
    drive(dense, Adam.rule, actions)
    assert everything(store, moments) == everything(dense, moments)


class BlockedRecords(FileRecords):
    """Waits before it takes what is written, for a test to do something else meanwhile."""

    hold = False

    def __init__(self, directory: Path) -> None:
        super().__init__(64, directory)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def _write(self, numbers: torch.Tensor, records: torch.Tensor) -> None:
        if self.hold:
            self.entered.set()
            assert self.go_on.wait(60)
        super()._write(numbers, records)


def test_what_is_read_ahead_while_it_is_written_is_never_what_it_was_before(tmp_path: Path) -> None:
    below = BlockedRecords(tmp_path)
    records = ReadAhead(below)
    slots, out = torch.arange(8), torch.empty(8, 64, dtype=torch.uint8)
    old, new = (torch.full((4, 64), value, dtype=torch.uint8) for value in (1, 2))
    records.write(slots[:4], old)
    below.hold = True
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(records.write, slots, torch.cat([new, new]))  # four are there already, four are not
        assert below.entered.wait(60)
        records.prefetch(slots)
        below.go_on.set()
        written.result()
    assert records.read(slots, out).all() and out.eq(2).all()
    records.prefetch(slots)
    assert records.read(slots, out).all() and out.eq(2).all()
    assert records.counted.ahead == 4 + 8
    below.close()


@pytest.fixture(params=[False], ids=lambda keeps: "kept" if keeps else "not kept")
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReadAhead]:
    """Records of `SLOTS` over a file; a parameter of a test says whether lookups are kept."""
    below = FileRecords(64, tmp_path)
    records = ReadAhead(below, keeps=request.param)
    records.write(SLOTS, VALUES)
    yield records
    below.close()


SLOTS = torch.arange(30)
VALUES = torch.arange(30 * 64).view(30, 64).byte()


def look_up(records: ReadAhead, slots: Tensor, use: Use = "lookup") -> int:
    """Check the records that are read; return the number of bytes that were read from the file for them."""
    before, out = records.below.counted.read_bytes, torch.empty(len(slots), 64, dtype=torch.uint8)
    assert records.read(slots, out, use=use).all()
    assert torch.equal(out, VALUES[slots])
    return records.below.counted.read_bytes - before


def test_rows_that_were_read_ahead_are_used_once_by_lookups_and_stay_for_them(records: ReadAhead) -> None:
    records.prefetch(SLOTS[:10])
    assert look_up(records, SLOTS[:3], use="update") == 0  # of the batch before, which shares rows with this one
    records.write(SLOTS[:2], VALUES[:2])
    for part in (SLOTS[5:10], SLOTS[2:5]):  # as several ranks ask for them
        assert look_up(records, part) == 0
    assert records.counted.ahead == 8
    assert look_up(records, SLOTS[:2]) == 0
    assert records.counted.ahead == 10 and not records._batches


@pytest.mark.parametrize("records", [True], indirect=True)
def test_what_a_lookup_has_read_is_kept_as_it_was_written_since(records: ReadAhead) -> None:
    below = records.below
    wanted, out, whole = torch.tensor([7, 2, 7, 31]), torch.empty(4, 60, dtype=torch.uint8), torch.empty(4, 64).byte()
    assert records.read(wanted, out).tolist() == [True, True, True, False]  # the first bytes, as lookups do
    assert torch.equal(out[:3], VALUES[wanted[:3], :60])
    assert look_up(records, torch.tensor([2, 7]), use="update") == 0
    records.write(torch.tensor([7]), VALUES[:1])
    below.drain()  # what waits to be written is not read from the file
    read = below.counted.read_bytes
    assert records.read(torch.tensor([2, 3, 7, 32]), whole, use="update").tolist() == [True, True, True, False]
    assert torch.equal(whole[:3], VALUES[[2, 3, 0]]) and below.counted.read_bytes == read + 64
    records.prefetch(torch.tensor([2, 7]))
    assert records.read(torch.tensor([7, 2]), whole[:2]).all()
    assert torch.equal(whole[:2], VALUES[[0, 2]]) and below.counted.read_bytes == read + 64
    for _ in range(10):
        records.read(SLOTS[:10], torch.empty(10, 64).byte())
    assert records.nbytes == 4 * 640
    records.clear()
    assert records.nbytes == 0 and not records.read(wanted, out, use="update").any()


def test_only_without_a_cache_lookups_are_kept() -> None:
    for cache_rows in (0, 100):
        store = made(Storage("disk", cache_rows=cache_rows), "fp32", [])
        drive(store, Adam.rule, [("write", [1, 2, 3]), ("lookup", [1, 2])])
        read_ahead = next(layer for layer in store.records.layers() if isinstance(layer, ReadAhead))
        assert (read_ahead.nbytes > 0) == (cache_rows == 0)


@pytest.mark.parametrize(("records", "batches"), [(False, 1), (True, 2)], indirect=["records"])
def test_rows_that_no_lookup_asks_for_keep_no_later_batches(records: ReadAhead, batches: int) -> None:
    records.prefetch(SLOTS[:10])  # the last is never looked up
    for _ in range(20):
        look_up(records, SLOTS[:9])
        records.prefetch(SLOTS[:9])
    assert len(records._batches) == batches


@pytest.mark.parametrize("records", [False, True], indirect=True)
def test_what_is_read_for_the_next_step_forgets_nothing_of_this_one(records: ReadAhead) -> None:
    first, second, third = SLOTS[:10], SLOTS[5:15], SLOTS[20:]
    for part in (first, second, third):
        records.prefetch(part)
    look_up(records, first)
    records.prefetch(SLOTS[:15])  # of the next step, which has most of the rows of this one
    look_up(records, second)
    assert look_up(records, third) == 0


def test_a_read_ahead_that_fails_keeps_nothing_that_is_written(
    records: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.below.drain()
    monkeypatch.setattr("hotbed.ops.cpu_cache.read_records", lambda *_: 0)
    with pytest.raises(OSError, match="could not be read"):
        records.prefetch(SLOTS)
    assert records._written is None


_NUMBERS = st.integers(0, 30)


@given(kept=st.sets(_NUMBERS), wanted=st.lists(st.tuples(_NUMBERS, st.booleans())), looks_up=st.booleans())
def test_what_is_found_is_what_a_dictionary_finds(
    kept: set[int], wanted: list[tuple[int, bool]], looks_up: bool
) -> None:
    values = np.array(sorted(kept), np.int64)
    waiting = values % 3 > 0
    still, new, found = dict(zip(values.tolist(), waiting.tolist(), strict=True)), 0, 0
    expected = list[int]()
    for value, is_there in wanted:
        if looks_up and still.get(value):
            still[value], new, found = False, new + (not is_there), found + 1
        expected.append(values.tolist().index(value) if value in kept and not is_there else -1)
    there, out = np.array([is_there for _, is_there in wanted], bool), np.empty(len(wanted), np.int64)
    asked = np.array([value for value, _ in wanted], np.int64)
    counted = cpu_cache.find_more(values, waiting, asked, there, out, looks_up)
    assert counted == (new, found) and out.tolist() == expected and waiting.tolist() == list(still.values())
    assert there.tolist() == [is_there or value in kept for value, is_there in wanted]
