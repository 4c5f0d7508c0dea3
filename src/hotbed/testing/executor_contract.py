"""Test those methods of a `concurrent.futures.Executor` that `hotbed.prepare` calls.

::

    class TestMyExecutor(ExecutorContract):
        def make(self):
            return MyExecutor()

Calls may run in other processes, and may be repeated. If a worker dies, the executor must repeat the worker's call or
raise a `concurrent.futures.BrokenExecutor`. Set ``own_processes = False`` if calls run in the calling process.
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
    """Return ``2 * x + more``."""
    return 2 * x + more


def ones(n: int) -> np.ndarray:
    """Return an array of ``n`` float64."""
    return np.ones(n)


def _fail(message: str) -> None:
    raise DataError(message)


def _die_once(file: Path) -> int:
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


class ExecutorContract(ABC):
    """Tests that every executor must pass."""

    own_processes: ClassVar[bool] = True  # whether calls run in other processes, which must see the same files

    @abstractmethod
    def make(self) -> Executor:
        """Return an executor that accepts calls."""

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        """Yield the executor, and shut it down after the test."""
        made = self.make()
        try:
            yield made
        finally:
            made.shutdown()

    def test_more_calls_than_workers(self, executor: Executor) -> None:
        futures = {executor.submit(double, i, more=1): i for i in range(50)}
        assert all(isinstance(future, Future) for future in futures)
        for future in as_completed(futures, _DEADLINE_S):
            assert future.result() == 2 * futures[future] + 1
            assert future.done() and not future.cancelled() and future.exception() is None
        assert list(executor.map(double, range(20), timeout=_DEADLINE_S)) == [2 * i for i in range(20)]

    def test_errors_keep_their_type_and_message_and_later_calls_run(self, executor: Executor) -> None:
        with pytest.raises(DataError, match=r"^day_0, line 3: wrong$") as caught:
            executor.submit(_fail, "day_0, line 3: wrong").result(_DEADLINE_S)
        assert type(caught.value) is DataError
        assert executor.submit(double, 2).result(_DEADLINE_S) == 4

    def test_done_callbacks_are_called_once(self, executor: Executor) -> None:
        seen: list[object] = []
        called = threading.Event()
        future = executor.submit(double, 1)
        future.add_done_callback(lambda f: (seen.append(f), called.set()))
        assert called.wait(_DEADLINE_S)
        assert seen == [future]

    def test_shutdown_waits_for_all_calls_and_refuses_later_ones(self, executor: Executor) -> None:
        futures = [executor.submit(double, i) for i in range(8)]
        executor.shutdown(wait=True)
        assert all(future.done() for future in futures)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(double, 1)

    def test_waiting_calls_can_be_cancelled(self, executor: Executor) -> None:
        futures = [executor.submit(double, i) for i in range(200)]
        kept = [future for future in futures if not future.cancel()]
        assert not wait(kept, _DEADLINE_S).not_done
        assert all(future.cancelled() or future.result() == 2 * i for i, future in enumerate(futures))

    def test_results_of_32_mb(self, executor: Executor) -> None:
        for future in [executor.submit(ones, 4_000_000) for _ in range(3)]:
            assert future.result(_DEADLINE_S).sum() == 4_000_000

    def test_a_call_of_a_killed_worker_is_repeated_or_fails(self, executor: Executor, tmp_path: Path) -> None:
        if not self.own_processes:
            pytest.skip("calls run in this process")
        future = executor.submit(_die_once, tmp_path / "killed")
        error = future.exception(_DEADLINE_S)
        assert (tmp_path / "killed").exists()
        assert isinstance(error, BrokenExecutor) or future.result() != os.getpid()
