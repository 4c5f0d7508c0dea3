"""Records in memory or in a file are read as they were written last, and what fails says so and loses nothing."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.ops import cpu_cache
from hotbed.store.file_records import FileRecords, Segments
from hotbed.store.hash_index import MemoryRecords, find_positions
from hotbed.store.records import Records


def fill(count: int, value: int = 1) -> Tensor:
    return torch.full((count, 64), value, dtype=torch.uint8)


def read(records: Records, slots: Tensor) -> Tensor:
    """Read records of 64 bytes that exist."""
    out = fill(len(slots), 0)
    assert records.read(slots, out).all()
    return out


def test_of_records_that_wait_to_be_written_the_newest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write = threading.Event(), cpu_cache.write_records

    def late(*args: Any) -> int:
        may_write.wait()
        return write(*args)

    monkeypatch.setattr(cpu_cache, "write_records", late)
    records = FileRecords(64, tmp_path)
    found: list[list[int]] = []
    for i in (1, 2, 3):
        records.write(torch.arange(i, 10), fill(10 - i, i))
    for _ in ("waiting", "written"):
        found.append(read(records, torch.arange(1, 10))[:, 0].tolist())
        may_write.set()
        records.drain()
    records.close()
    assert found == [[1, 2, 3, 3, 3, 3, 3, 3, 3]] * 2


def test_a_file_that_lost_its_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = FileRecords(64, tmp_path)
    records.write(torch.arange(10), fill(10))
    records.drain()
    os.ftruncate(records._file, 5 * 64)
    with pytest.raises(OSError, match=r"rows in .* could not be read: the file has become shorter"):
        read(records, torch.arange(10))
    os.ftruncate(records._file, 10 * 64)
    monkeypatch.setattr("hotbed.ops.cpu_cache.read_records", lambda *_: 3)
    with pytest.raises(OSError, match=r"rows in .* could not be read"):
        read(records, torch.arange(10))
    records.close()


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = FileRecords(64, tmp_path)
    values = torch.randint(0, 255, (10, 64), dtype=torch.uint8)
    monkeypatch.setattr("hotbed.ops.cpu_cache.write_records", lambda *_: 3)
    monkeypatch.setattr("os.pwrite", _full)
    records.write(torch.arange(10), values)
    with pytest.raises(OSError, match=f"rows in {tmp_path} could not be written: .*No space left"):
        records.clear()
    with pytest.raises(OSError, match="No space left"):
        records.write(torch.arange(3), values[:3])
    assert torch.equal(read(records, torch.arange(10)), values)


def _full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"no file for rows can be created in .*file/rows .*Use another"):
        FileRecords(64, tmp_path / "file" / "rows")


def test_writing_waits_for_room(tmp_path: Path) -> None:
    records = FileRecords(64, tmp_path, limit_bytes=640)
    for i in range(20):
        records.write(torch.arange(i, i + 10), fill(10, i))
    assert read(records, torch.arange(29))[:, 0].tolist() == [min(i, 19) for i in range(29)]
    assert records.disk_bytes >= 29 * 64
    records.drain()
    assert records.disk_bytes == 20 * 10 * 64  # nothing is overwritten yet


@pytest.mark.parametrize("fails", [False, True])
def test_records_that_are_moved_to_keep_the_file_short_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr("hotbed.store.file_records.Segments", partial(Segments, 4))
    records, draw = FileRecords(64, tmp_path), torch.Generator().manual_seed(0)
    expected = torch.zeros(400, 64, dtype=torch.uint8)
    for step in range(120):
        some = torch.randperm(400, generator=draw)[: 400 if step == 0 else 30]
        expected[some] = torch.randint(0, 255, (len(some), 64), generator=draw, dtype=torch.uint8)
        records.write(some, expected[some])
        if step < 60:
            records.drain()  # else segments become free while they are read, and the file gets longer
            assert records.disk_bytes < (1.5 * 400 + 40 * 4) * 64
        assert torch.equal(read(records, torch.arange(400)), expected)
    records.drain()
    moved = records.counted.written_bytes // 64 - 400 - 119 * 30
    assert moved > 0
    if fails:  # what could not be moved is where it was
        monkeypatch.setattr("hotbed.ops.cpu_cache.read_records", lambda *_: 0)
        monkeypatch.setattr("os.pread", _full)
        for _ in range(9):
            some = torch.randperm(400, generator=draw)[:30]
            try:
                records.write(some, expected[some])
            except OSError:
                break
        with pytest.raises(OSError, match=r"rows in .* could not be read: .*No space left"):
            records.drain()
        monkeypatch.undo()
        assert torch.equal(read(records, torch.arange(400)), expected)
    records.close()


def test_more_rows_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.store.memory.host_bytes", lambda: 640)
    records = MemoryRecords(64, 1000)
    records.write(torch.arange(10), fill(10))
    with pytest.raises(StoreError, match="got 11 of 64 bytes"):
        records.write(torch.arange(11), fill(11))


@given(st.sets(st.integers(0, 60)), st.lists(st.integers(-1, 65)))
def test_values_are_found_among_rising_ones_in_any_order(of: set[int], wanted: list[int]) -> None:
    rising = sorted(of)
    found = find_positions(torch.tensor(rising, dtype=torch.int64), torch.tensor(wanted, dtype=torch.int64))
    assert found.tolist() == [rising.index(value) if value in of else -1 for value in wanted]


def test_a_writer_that_fails_in_any_way_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = FileRecords(64, tmp_path, limit_bytes=640)

    def fails(*_: object) -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(records._segments, "take", fails)
    with pytest.raises(MemoryError, match="no memory is left"):
        for _ in range(3):
            records.write(torch.arange(10), fill(10))
        records.drain()
    assert torch.equal(read(records, torch.arange(10)), fill(10))
    records.close()
