"""What runs the tasks of a preparation changes nothing of what is made."""

import os
import platform
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import pytest
from prepare_cases import SMALL, digests

from hotbed.data.executors import Tasks, open_tasks, run_on_worker, versions
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.testing.executor_contract import ExecutorContract, double

pytestmark = pytest.mark.usefixtures("small_groups")


class TestThreads(ExecutorContract):
    own_processes = False

    def make(self) -> Executor:
        return ThreadPoolExecutor(2)


@pytest.mark.full
class TestProcesses(ExecutorContract):
    def make(self) -> Executor:
        return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


@pytest.mark.parametrize(
    ("executor", "workers"),
    [
        ("threads", 2),
        ("threads", 4),
        ("processes", 2),
        *(pytest.param("processes", n, marks=pytest.mark.full) for n in (1, 4)),
    ],
)
def test_the_same_bytes(raw: Path, expected: dict[str, str], tmp_path: Path, executor: str, workers: int) -> None:
    report = prepare(raw, tmp_path / "out", **SMALL, executor=executor, workers=workers)
    assert digests(tmp_path / "out") == expected
    assert len(expected) == 1 + 2 + 8 + 1 and report.samples["test"] > 0


def test_an_executor_of_ones_own_stays_open(raw: Path, expected: dict[str, str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        prepare(raw, tmp_path / "out", **SMALL, executor=pool)
        assert digests(tmp_path / "out") == expected
        assert pool.submit(double, 2).result() == 4


def die_once(place: str) -> str:
    """End this process at once, but the second time return the name of the file that says so."""
    file = Path(place)
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_tasks_of_workers_that_die_are_run_again(tmp_path: Path) -> None:
    with open_tasks("processes", 1) as tasks:
        assert list(tasks.map(die_once, [str(tmp_path / "0"), str(tmp_path / "0")])) == ["0", "0"]


@pytest.mark.full
def test_tasks_that_always_kill_their_worker_end_in_an_error() -> None:
    message = r"workers were killed or are unreachable 5 times .* .*terminated abruptly.* Run the same command"
    with open_tasks("processes", 1) as tasks, pytest.raises(WorkerError, match=message):
        list(tasks.map(die, [0, 1]))


def test_the_first_error_in_order_is_raised() -> None:
    def fail(i: int) -> int:
        if i in (3, 7):
            raise SpecError(f"task {i}")
        return i

    with open_tasks("threads", 4) as tasks, pytest.raises(SpecError, match="task 3"):
        list(tasks.map(fail, range(10)))


def test_an_executor_that_takes_no_tasks() -> None:
    """Its error is raised when the tasks that it has taken have ended."""
    pool, ended = ThreadPoolExecutor(1), list[int]()

    def arguments() -> Iterator[int]:
        yield 1
        pool.shutdown(wait=False)
        yield 2

    with open_tasks(pool) as tasks, pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        list(tasks.map(ended.append, arguments()))
    assert ended == [1]


def test_more_tasks_are_submitted_when_workers_come() -> None:
    """How many is asked for again when as many have ended."""
    slots, submitted = iter([1, 3, 3]), list[int]()

    def arguments() -> Iterator[int]:
        for i in range(6):
            submitted.append(i)
            yield i

    with ThreadPoolExecutor(1) as pool:
        results = Tasks(lambda: pool, lambda: next(slots)).map(abs, arguments())
        seen = [(result, len(submitted)) for result in results]
    assert seen == [(0, 1), (1, 4), (2, 5), (3, 6), (4, 6), (5, 6)]


def test_workers_that_are_lost_before_a_task_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> NoReturn:
        raise ConnectionError("the scheduler is gone")

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(pool, "submit", submit)
        tasks = Tasks(lambda: pool, lambda: 4, lost=(ConnectionError,))
        with pytest.raises(WorkerError, match=r"workers were killed or are unreachable \(the scheduler is gone\)"):
            list(tasks.map(double, range(9)))


@pytest.mark.parametrize(("kind", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_cluster_whose_package_is_not_installed(monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"executor {kind}:x needs {kind.title()}. pip install 'hotbed\[{kind}\]'"
    with pytest.raises(SpecError, match=message), open_tasks(f"{kind}:x"):
        pass


@pytest.mark.parametrize("executor", ["dask:", "ray:", "ray"])
def test_a_cluster_without_an_address(executor: str) -> None:
    with (
        pytest.raises(
            SpecError, match=rf"executor: got '{executor}', expected an address, e.g. {executor[:4].strip(':')}:"
        ),
        open_tasks(executor),
    ):
        pass


def other_versions(_: int) -> None:
    raise AssertionError("a worker of other versions runs no task")


def test_a_worker_of_other_versions_is_named() -> None:
    message = rf"worker on {re.escape(platform.node())}: got pyarrow \d\S* \(expected 1.2.3\)"
    with pytest.raises(WorkerError, match=message):
        run_on_worker({**versions(), "pyarrow": "1.2.3"}, other_versions, 1)


def test_a_worker_that_does_not_find_a_file_is_named(tmp_path: Path) -> None:
    message = rf"worker on {re.escape(platform.node())} \(process {os.getpid()}, in .*\) does not find .*gone.parquet"
    with ThreadPoolExecutor(1) as pool, open_tasks(pool) as tasks, pytest.raises(DataError, match=message):
        list(tasks.map(Path.read_bytes, [tmp_path / "gone.parquet"]))
