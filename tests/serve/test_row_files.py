"""Protects: changed records are read after the swap and not before, and take no memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.serve.row_files import ChangedRecords, RecordFiles
from tests.matrix import examples

SIZE = 12
ROWS = (40, 1, 30)


def records_of(seed: int, count: int) -> Tensor:
    return torch.randint(256, (count, SIZE), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def files(folder: Path, records: Tensor) -> RecordFiles:
    """Records in several files, as those of the tables of an arena are."""
    paths, firsts, first = [], [], 0
    for i, rows in enumerate(ROWS):
        path = folder / f"{i}.rows"
        records[first : first + rows].numpy().tofile(path)
        paths.append(path)
        firsts.append(first)
        first += rows
    return RecordFiles(SIZE, paths, firsts)


def read(records: RecordFiles | ChangedRecords, slots: Tensor) -> Tensor:
    out = torch.zeros(len(slots), SIZE, dtype=torch.uint8)
    assert bool(records.read(slots, out).all())
    return out


@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_what_was_swapped_in_is_read_whatever_was_staged(data: st.DataObject) -> None:
    total = sum(ROWS)
    slots_of = st.lists(st.integers(0, total - 1), unique=True, max_size=30)
    with tempfile.TemporaryDirectory() as folder:
        want = records_of(0, total)
        changed = ChangedRecords(files(Path(folder), want), total, folder)
        nbytes = changed.nbytes
        for seed in range(1, 6):
            slots, again = torch.tensor(data.draw(slots_of), dtype=torch.int64), data.draw(slots_of)
            new = records_of(seed, len(slots))
            changed.stage(slots, new)
            wanted = torch.tensor([*again, *again, *slots.tolist()], dtype=torch.int64)
            assert torch.equal(read(changed, wanted), want[wanted])
            what = data.draw(st.sampled_from(["swap", "discard", "replace"]))
            if what == "discard":
                changed.discard()
            else:
                want[slots] = new
                changed.swap()
            if what == "replace":
                want = records_of(100 + seed, total)
                (Path(folder) / "new").mkdir(exist_ok=True)
                changed.stage_below(files(Path(folder) / "new", want))
                changed.swap()
                changed.tidy()
                assert changed.disk_bytes == 0
            assert torch.equal(read(changed, wanted), want[wanted])
        assert changed.nbytes == nbytes
        changed.close()


def test_a_slot_that_is_staged_twice_has_what_was_staged_last(tmp_path: Path) -> None:
    changed = ChangedRecords(files(tmp_path, records_of(0, sum(ROWS))), sum(ROWS), tmp_path)
    for seed in (1, 2, 3):
        for again in (10 * seed, seed):
            changed.stage(torch.tensor([3]), records_of(again, 1))
        changed.swap()
        assert torch.equal(read(changed, torch.tensor([3])), records_of(seed, 1))


def test_what_is_given_up_takes_no_disk(tmp_path: Path) -> None:
    changed = ChangedRecords(files(tmp_path, records_of(0, sum(ROWS))), sum(ROWS), tmp_path)
    slots = torch.arange(sum(ROWS))
    changed.stage(slots, records_of(1, sum(ROWS)))
    assert changed.disk_bytes > 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".rows"}  # a killed server leaves no file
    changed.discard()
    assert changed.disk_bytes == 0
    changed.stage(torch.tensor([5]), records_of(2, 1))
    changed.swap()
    changed.stage(slots, records_of(3, sum(ROWS)))
    changed.discard()
    assert torch.equal(read(changed, torch.tensor([5])), records_of(2, 1))


def test_files_may_be_removed_while_they_are_read(tmp_path: Path) -> None:
    want = records_of(0, sum(ROWS))
    opened = files(tmp_path, want)
    for path in tmp_path.iterdir():
        path.unlink()
    slots = torch.arange(sum(ROWS)).flip(0)
    assert torch.equal(read(opened, slots), want[slots])


def test_a_file_that_ends_early_is_told(tmp_path: Path) -> None:
    opened = files(tmp_path, records_of(0, sum(ROWS)))
    (tmp_path / "2.rows").write_bytes(b"123")
    with pytest.raises(StoreError, match=r"row 7 of .*2\.rows cannot be read \(it ends before byte 96\)"):
        read(opened, torch.tensor([48, 3]))
    with pytest.raises(StoreError, match="read-only"):
        opened.write(torch.tensor([1]), records_of(0, 1))
    with pytest.raises(StoreError, match="read-only"):
        opened.clear()


def test_a_directory_that_no_file_can_be_made_in_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"no file for changed rows can be created in .*file"):
        ChangedRecords(files(tmp_path, records_of(0, sum(ROWS))), sum(ROWS), tmp_path / "file")
