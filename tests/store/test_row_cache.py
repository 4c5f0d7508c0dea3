"""A cache in a device's memory loses nothing that is on its way: lists of what a write missed, and what is evicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.store.hash_index import MemoryRecords
from hotbed.store.records import Traffic
from hotbed.store.row_cache import CachedRecords

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def apart(monkeypatch: pytest.MonkeyPatch, rows: int) -> CachedRecords:
    """A cache as in a device's memory, over records that have 3, 50 and 7."""
    monkeypatch.setattr("hotbed.store.row_cache.needs_staging", lambda _: True)
    below = MemoryRecords(64, 100)
    below.write(torch.tensor([3, 50, 7]), torch.tensor([3, 50, 7], dtype=torch.uint8)[:, None].repeat(1, 64))
    return CachedRecords(below, rows, device=DEVICE)


def read(records: CachedRecords, slots: list[int]) -> list[int | None]:
    """The first byte of each record, None where there is none."""
    out = torch.zeros(len(slots), 64, dtype=torch.uint8, device=records.device)
    there = records.read(torch.tensor(slots, dtype=torch.int64, device=records.device), out)
    return [int(row[0]) if is_there else None for row, is_there in zip(out, there, strict=True)]


def write(records: CachedRecords, slots: list[int], value: int) -> None:
    values = torch.full((len(slots), 64), value, dtype=torch.uint8, device=records.device)
    records.write(torch.tensor(slots, dtype=torch.int64, device=records.device), values)


def known(records: CachedRecords) -> list[int]:
    """The slots that have a record here or below; nothing is written below for it but what leaves."""
    records.forget(torch.empty(0, dtype=torch.int64))  # so that it has what was written last
    own = records._tags.keys[records._tags.keys >= 0].cpu()
    return torch.cat([records.below.slots()[:], own]).unique().tolist()


def test_a_cache_on_a_device_brings_what_there_is_and_returns_only_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    records = apart(monkeypatch, rows=2)
    assert read(records, [50, 8, 3]) == [50, None, 3] and read(records, []) == []
    assert records.counted == Traffic(misses=3, to_device_bytes=2 * 64)
    assert read(records, [8, 9]) == [None, None] and read(records, [3, 50]) == [3, 50]
    assert read(records, [7, 7]) == [7, 7]  # twice, and in the place of one that nobody has changed
    assert records.counted == Traffic(hits=2, misses=7, to_device_bytes=4 * 64)


def test_what_leaves_a_cache_on_a_device_is_below_before_anyone_misses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    records = apart(monkeypatch, rows=2)
    write(records, [10, 11], 1)  # known to the device only, until somebody asks
    assert records.below.slots()[:].tolist() == [3, 7, 50] and known(records) == [3, 7, 10, 11, 50]
    assert read(records, [3, 7]) == [3, 7] and read(records, [10, 11]) == [1, 1]
    write(records, [12, 13, 14], 2)  # one of them finds no place
    assert read(records, [10, 11, 12, 13, 14, 3]) == [1, 1, 2, 2, 2, 3]
    assert known(records) == [3, 7, 10, 11, 12, 13, 14, 50]
    write(records, [20, 21, 22], 3)
    records.forget(torch.tensor([20, 21, 22]))
    assert read(records, [20, 21, 22, 12]) == [None, None, None, 2]
    write(records, [20], 4)
    records.clear()
    assert read(records, [20, 3]) == [None, None]


def test_writes_alone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    records = apart(monkeypatch, rows=4)
    before = records.nbytes
    for i in range(30):
        write(records, [60 + i, 20 + i], i)
        assert len(records._leaving) <= 2 and records.nbytes <= before + 6 * (64 + 8)
    assert read(records, [60, 20, 89, 49]) == [0, 0, 29, 29]


def test_what_is_written_while_it_is_read_below_is_not_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread, between a miss and what is kept of it."""
    records = apart(monkeypatch, rows=2)
    below: Any = records.below
    plain = below.read

    def read_late(slots: Tensor, out: Tensor, **options: Any) -> Tensor:
        there = plain(slots, out, **options)
        write(records, [3], 99)
        return there

    with monkeypatch.context() as patch:
        patch.setattr(below, "read", read_late)
        assert read(records, [3, 7]) == [3, 7]
    assert read(records, [3]) == [99] and int((records._tags.keys == 3).sum()) == 1
    assert read(records, [20, 50]) == [None, 50] and read(records, [3]) == [99]


def test_a_write_that_could_not_be_kept_is_kept_by_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    records = apart(monkeypatch, rows=2)
    write(records, [20], 5)

    def full(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(records, "_gather", full)
        with pytest.raises(torch.OutOfMemoryError):
            read(records, [3])
    assert read(records, [20, 3]) == [5, 3]


@pytest.mark.parametrize("is_apart", [True, False], ids=["device", "host"])
def test_what_takes_the_place_of_what_cannot_be_written_is_there_once(
    monkeypatch: pytest.MonkeyPatch, is_apart: bool
) -> None:
    records = apart(monkeypatch, rows=4)
    if not is_apart:
        records = CachedRecords(records.below, 4)
    write(records, [10, 11, 12, 13], 1)
    assert read(records, [99]) == [None]  # so that all of them may give way

    def full(*_: Tensor) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(records.below, "write", full)
        with pytest.raises(OSError, match="no space left"):
            write(records, [14, 15], 2)
            read(records, [10])
    assert known(records) == [3, 7, 10, 11, 12, 13, 14, 15, 50]
    assert len(records._tags.keys.unique()) == 4
    assert read(records, [10, 11, 12, 13, 14, 15]) == [1, 1, 1, 1, 2, 2]
