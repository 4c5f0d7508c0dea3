"""What killed processes leave beside datasets and in metrics.jsonl is cleared up by those that come after them."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from hotbed.errors import DataError
from hotbed.files import new_directory, new_file
from hotbed.train import Trainer
from hotbed.train.runs.callbacks import JsonLines

MARKER = "made.txt"


def make(path: Path, text: str, *, dies: bool = False, overwrite: bool = False) -> None:
    with new_directory(path, marker=MARKER, overwrite=overwrite) as directory:
        (directory / MARKER).write_text(text)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def die_making(path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=make, args=(path, "half"), kwargs={"dies": True})
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_directory_that_a_killed_process_was_filling_is_removed_by_the_next(tmp_path: Path) -> None:
    die_making(tmp_path / "data")
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == [".data.unfinished"]
    make(tmp_path / "data", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / MARKER).read_text() == "whole"


def die_writing(path: Path) -> None:
    with new_file(path) as file:
        file.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_that_a_killed_process_was_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows[1].parquet"
    process = multiprocessing.get_context("spawn").Process(target=die_writing, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with new_file(path) as first:
        first.write_text("first")
        with new_file(path) as second:
            second.write_text("second")
        assert first.read_text() == "first"  # it is being written, and stays
        assert path.read_text() == "second"
    assert [file.name for file in tmp_path.iterdir()] == ["rows[1].parquet"]
    assert path.read_text() == "first"


def test_a_directory_that_another_process_is_filling_stays(tmp_path: Path) -> None:
    with new_directory(tmp_path / "data", marker=MARKER) as first:
        (first / MARKER).write_text("first")
        make(tmp_path / "other", "other")
        with pytest.raises(DataError, match="made at once"), new_directory(tmp_path / "data", marker=MARKER):
            assert first.is_dir()
            raise DataError("made at once")
        assert (first / MARKER).read_text() == "first"
    assert (tmp_path / "data" / MARKER).read_text() == "first"


def test_a_dataset_that_a_killed_process_was_replacing_is_put_back(tmp_path: Path) -> None:
    make(tmp_path / "data", "old")
    (tmp_path / "data").rename(tmp_path / ".data.old-01234567")  # between its two renames
    with pytest.raises(DataError, match="exists already"):
        make(tmp_path / "data", "new")
    assert (tmp_path / "data" / MARKER).read_text() == "old"
    make(tmp_path / "data", "new", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / MARKER).read_text() == "new"


def test_what_was_replaced_by_a_process_that_was_then_killed_is_removed(tmp_path: Path) -> None:
    make(tmp_path / "data", "new")
    make(tmp_path / ".data.old-01234567", "old")
    make(tmp_path / "data", "newer", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_line_that_a_full_disk_cut_short_is_removed(tmp_path: Path) -> None:
    class AtStepThree:
        step = 3

    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "train", "step": 2}\n{"event": "tra')
    JsonLines(file).on_train_start(cast("Trainer", AtStepThree()))
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["train", "resume"]
