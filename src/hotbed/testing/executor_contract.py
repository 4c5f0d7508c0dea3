"""Check an executor: the contract of `concurrent.futures.Executor`, as far as preparation needs it.

A test class of an executor subclasses `ExecutorContract` and says how to make one::

    class TestMyExecutor(ExecutorContract):
        def make(self):
            return MyExecutor()

Calls are repeatable and may run in other processes, so a worker that dies must cost a repetition, or a
`concurrent.futures.BrokenExecutor`. Where calls run in the process that asks, set ``own_processes = False``.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed, wait
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from hotbed.errors import DataError

_DEADLINE_S = 300


def double(x: int, *, more: int = 0) -> int:
    """Twice a number."""
    return 2 * x + more


def fail(message: str) -> None:
    """Raise a `DataError`."""
    raise DataError(message)


def ones(n: int) -> np.ndarray:
    """An array of ``n`` float64."""
    return np.ones(n)


def die_once(file: Path) -> int:
    """Kill this process, but return its number when the file is there, which says that one was killed before."""
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


class ExecutorContract(ABC):
    """What every executor must do; the tests of a subclass run for the executor that its `make` returns.

    Attributes
    ----------
    own_processes
        Whether calls run in processes of their own, which see the same files.
    """

    own_processes: ClassVar[bool] = True

    @abstractmethod
    def make(self) -> Executor:
        """Make an executor that is ready."""

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        """An executor, which is shut down at the end."""
        made = self.make()
        try:
            yield made
        finally:
            made.shutdown()

    def test_submit(self, executor: Executor) -> None:
        """Arguments arrive, and results come back."""
        future = executor.submit(double, 4, more=1)
        assert isinstance(future, Future)
        assert future.result(_DEADLINE_S) == 9
        assert future.done() and not future.cancelled() and future.exception() is None

    def test_many(self, executor: Executor) -> None:
        """More calls than there are workers; each has its own result."""
        futures = {executor.submit(double, i): i for i in range(50)}
        assert {futures[f]: f.result() for f in as_completed(futures, _DEADLINE_S)} == {i: 2 * i for i in range(50)}

    def test_map_is_in_order(self, executor: Executor) -> None:
        """Whatever ends first."""
        assert list(executor.map(double, range(20), timeout=_DEADLINE_S)) == [2 * i for i in range(20)]

    def test_errors_keep_their_type_and_message(self, executor: Executor) -> None:
        """They are not wrapped into another type, and calls after them are run."""
        future = executor.submit(fail, "day_0, line 3: wrong")
        with pytest.raises(DataError, match=r"^day_0, line 3: wrong$") as caught:
            future.result(_DEADLINE_S)
        assert type(caught.value) is DataError
        assert executor.submit(double, 2).result(_DEADLINE_S) == 4

    def test_done_callbacks(self, executor: Executor) -> None:
        """They are called once each, with the future."""
        seen: list[object] = []
        called = threading.Event()
        future = executor.submit(double, 1)
        future.add_done_callback(lambda f: (seen.append(f), called.set()))
        assert called.wait(_DEADLINE_S)
        assert seen == [future]

    def test_waits_for_all_at_the_end(self, executor: Executor) -> None:
        """`shutdown` returns when all calls have ended."""
        futures = [executor.submit(double, i) for i in range(8)]
        executor.shutdown(wait=True)
        assert all(future.done() for future in futures)

    def test_takes_no_calls_after_its_end(self, executor: Executor) -> None:
        """A `RuntimeError` says so."""
        executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(double, 1)

    def test_calls_that_wait_can_be_cancelled(self, executor: Executor) -> None:
        """Those that had ended or had begun before are not; nobody waits for the others."""
        futures = [executor.submit(double, i) for i in range(200)]
        for future in futures:
            future.cancel()
        _, left = wait([future for future in futures if not future.cancelled()], _DEADLINE_S)
        assert not left
        assert all(future.cancelled() or future.result() == 2 * i for i, future in enumerate(futures))

    def test_large_results(self, executor: Executor) -> None:
        """Of 32 MB each."""
        for future in [executor.submit(ones, 4_000_000) for _ in range(3)]:
            assert future.result(_DEADLINE_S).sum() == 4_000_000

    def test_a_worker_that_is_killed(self, executor: Executor, tmp_path: Path) -> None:
        """Its call is repeated by another, or is known to be lost; in no case does anybody wait for ever."""
        if not self.own_processes:
            pytest.skip("calls run in this process")
        future = executor.submit(die_once, tmp_path / "killed")
        error = future.exception(_DEADLINE_S)
        assert (tmp_path / "killed").exists()
        assert isinstance(error, BrokenExecutor) or future.result() != os.getpid()
