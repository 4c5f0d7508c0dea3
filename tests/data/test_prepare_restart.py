"""A preparation that was killed goes on where it was, and makes what an undisturbed one makes."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import pytest
from prepare_cases import SMALL, dataset, digests

from hotbed.data import executors, write_synthetic_log
from hotbed.data.executors import Tasks
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError, WorkerError

PLACES = [
    ("hotbed.data.preparation.raw_inputs", "_parse", 2),
    ("hotbed.data.preparation.raw_inputs", "_parse", 0),
    ("hotbed.data.preparation.counting", "_sum_counts", 40),
    ("hotbed.data.preparation.counting", "write_vocabulary", 5),
    ("hotbed.data.preparation.encoded_rows", "_write_binary", 1),
    ("hotbed.data.formats.split_binary", "SplitBinaryWriter.append_dataset", 1),
    ("hotbed.data.preparation.prepare_dataset", "rmtree", 1),
]
"""Functions, and how often they are called before the process is killed in one."""

DYING = """
import importlib, os, signal, sys
sys.path.insert(0, {tests!r})
from test_prepare_restart import prepared
from pathlib import Path
import hotbed.data.preparation.prepare_dataset
for module, name, calls in {places!r}:
    owner = importlib.import_module(module)
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    def dying(*args, original=getattr(owner, name), left=[calls], **options):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)
    pid = os.fork()
    if pid == 0:
        setattr(owner, name, dying)
        prepared(Path({log!r}), Path({out!r}))
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, (module, name)
    print(module, name, len(list(Path({out!r}).parent.glob(".out.unfinished-*"))), Path({out!r}).exists())
"""


def prepared(log: Path, out: Path, **options: Any) -> None:
    """Prepare in parts of 32 KiB, and groups of 300 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.data.preparation.raw_inputs.PART_BYTES", 1 << 15)
        patch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", 300)
        prepare(log, out, threshold=2, workers=1, **options)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    write_synthetic_log(path, 600)
    return path


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
@pytest.mark.parametrize("places", [PLACES[3:6:2], pytest.param(PLACES, marks=pytest.mark.full)], ids=("two", "all"))
def test_killed_at_every_pass(log: Path, tmp_path: Path, places: list[tuple[str, str, int]]) -> None:
    """One after the other, each killed a pass later, into one directory."""
    prepared(log, tmp_path / "whole/out")
    out = tmp_path / "killed/out"
    code = DYING.format(tests=str(Path(__file__).parent), places=places, log=str(log), out=str(out))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2:] for line in done.stdout.splitlines()] == [["1", "False"]] * len(places)
    prepared(log, out)
    assert digests(out) == digests(tmp_path / "whole/out")
    assert list(out.parent.iterdir()) == [out]


def lose_workers(tasks: Tasks, task: Any, arguments: Any, error: type[BaseException] = WorkerError) -> Any:
    if task.__name__ == "encode_group":
        raise error("workers died")
    return map(task, arguments)


@pytest.mark.parametrize("error", [WorkerError, KeyboardInterrupt])
def test_what_is_done_is_kept_when_workers_are_lost_or_the_user_interrupts(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Tasks, "map", partialmethod(lose_workers, error=error))
        prepared(log, tmp_path / "out")
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == [".out.unfinished"]
    for name in ("raw_inputs._parse", "counting._ValueCounts", "counting.write_vocabulary"):
        monkeypatch.setattr(f"hotbed.data.preparation.{name}", None)  # all that is done
    prepared(log, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_text_files_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CSV file was converted to is touched whenever it is used, which changes nothing."""
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    pc_csv.write_csv(pq.read_table(dataset(tmp_path, files=1)).drop_columns("tags"), tmp_path / "raw.csv")
    options = {**SMALL, "schema": replace(SMALL["schema"], sparse=SMALL["schema"].sparse[:1])}
    with monkeypatch.context() as patch, pytest.raises(WorkerError):
        patch.setattr(Tasks, "map", lose_workers)
        prepare(tmp_path / "raw.csv", tmp_path / "out", **options)
    (kept,) = (tmp_path / "tables").glob("*.parquet")
    os.utime(kept, (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr("hotbed.data.preparation.counting._ValueCounts", None)  # all is counted
        prepare(tmp_path / "raw.csv", tmp_path / "out", **options)
    assert not list(tmp_path.glob(".out*"))


def test_tasks_that_run_twice_at_once(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster that takes a worker for lost; a third run was killed, and has left what it wrote."""
    prepared(log, tmp_path / "once")
    original, nested = executors.task_directory, set[Path]()
    again: list[Any] = []

    @contextmanager
    def within(out: Path) -> Generator[Path]:
        with original(out) as directory:
            yield directory
            if out not in nested:
                nested.add(out)
                shutil.copytree(directory, out.with_name(f".{out.name}.unfinished-killed"))
                again[-1]()
                assert out.is_dir()

    def run(tasks: Tasks, task: Any, arguments: Any) -> Any:
        for argument in arguments:
            again.append(lambda task=task, argument=argument: task(argument))
            yield task(argument)

    for module in ("counting", "encoded_rows"):
        monkeypatch.setattr(f"hotbed.data.preparation.{module}.task_directory", within)
    monkeypatch.setattr(Tasks, "map", run)
    prepared(log, tmp_path / "twice")
    assert nested and digests(tmp_path / "twice") == digests(tmp_path / "once")


def test_other_options_begin_anew(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(WorkerError):
        patch.setattr(Tasks, "map", lose_workers)
        prepared(log, tmp_path / "out")
    prepared(log, tmp_path / "out", test_rows=7)
    prepared(log, tmp_path / "whole", test_rows=7)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_two_at_once_are_refused(log: Path, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "write":
            with pytest.raises(DataError, match=r"out is being made by another process; wait for it, or choose"):
                prepared(log, tmp_path / "out")

    prepared(log, tmp_path / "out", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_same_bytes_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that do not fit are spilled as runs, which are merged in several rounds."""
    (tmp_path / "raw").mkdir()
    raw = dataset(tmp_path / "raw")
    prepare(raw, tmp_path / "much/out", **SMALL, workers=1)
    counting = importlib.import_module("hotbed.data.preparation.counting")
    runs: list[int] = []
    original = counting._merge_all

    def merged(of_table: Any, job: Any) -> Any:
        runs.append(len(of_table))
        return original(of_table, job)

    monkeypatch.setattr(counting, "_merge_all", merged)
    monkeypatch.setattr(counting, "_MOST_RUNS", 2)
    monkeypatch.setattr(counting, "_FEWEST_BATCH_ROWS", 3)
    monkeypatch.setattr(counting, "_ROW_BYTES", 1 << 30)  # few rows at once
    monkeypatch.setattr(
        "hotbed.data.preparation.raw_inputs._GROUP_BYTES", 1
    )  # a task for each of 24 row groups, 20 rows at once
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._FEWEST_ROWS", 20)
    monkeypatch.setattr("hotbed.data.preparation.prepare_dataset.CountJob", lambda *a: counting.CountJob(*a[:-1], 500))
    prepare(raw, tmp_path / "little/out", **SMALL, workers=1)
    assert min(runs) > 48  # more than two of a task
    little, much = (tmp_path / name / "out/vocabulary" for name in ("little", "much"))
    assert digests(little) == digests(much)


def test_runs_of_long_values_are_read_in_shorter_batches(tmp_path: Path) -> None:
    counting = importlib.import_module("hotbed.data.preparation.counting")
    rows: list[int] = []
    for length in (1, 4000):
        values = sorted(f"{i:0{length}d}" for i in range(2000))
        pq.write_table(pa.table({"value": values, "count": [1] * 2000}), tmp_path / "run.parquet")
        with pq.ParquetFile(tmp_path / "run.parquet") as run:
            rows.append(counting._batch_rows(run, 16 << 20))
        merged = pa.concat_tables(counting._merge_open([tmp_path / "run.parquet"], 1 << 30))
        assert merged["value"].to_pylist() == values
    assert rows[0] > 100_000 and rows[1] < 5_000


def test_vocabularies_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = dataset(tmp_path)
    counting = importlib.import_module("hotbed.data.preparation.counting")
    monkeypatch.setattr("hotbed.data.preparation.prepare_dataset.MergeJob", lambda *a: counting.MergeJob(*a[:-1], 1000))
    message = "table 'user', .* at least 2 times: got .* expected at most 1,000"
    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "out", **SMALL)
    assert prepare(raw, tmp_path / "out", **SMALL, top_k=5).rows["user"] == 6
