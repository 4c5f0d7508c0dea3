"""What runs the tasks of a preparation changes nothing of what is made."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from prepare_cases import SMALL, dataset, digests

from hotbed.data.executors import Tasks, open_tasks
from hotbed.data.prepare import prepare
from hotbed.errors import SpecError, WorkerError
from hotbed.testing.executor import ExecutorContract, double


class TestThreads(ExecutorContract):
    def make(self) -> Executor:
        return ThreadPoolExecutor(2)


@pytest.fixture(autouse=True, scope="module")
def small_groups() -> Iterator[None]:
    """Several tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.data.pieces._GROUP_ROWS", 300)
        yield


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def expected(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(raw, out, **SMALL, workers=1)
    return digests(out)


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
    message = r"workers died, or cannot be reached .*terminated abruptly.* start the same command again"
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


def test_workers_that_are_lost_before_a_task_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> NoReturn:
        raise ConnectionError("the scheduler is gone")

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(pool, "submit", submit)
        tasks = Tasks(lambda: pool, 4, lost=(ConnectionError,))
        with pytest.raises(WorkerError, match=r"cannot be reached \(the scheduler is gone\); what was done is kept"):
            list(tasks.map(double, range(9)))


def test_dask_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = r"executor dask:x needs Dask; pip install 'hotbed\[dask\]'"
    with pytest.raises(SpecError, match=message), open_tasks("dask:x"):
        pass
