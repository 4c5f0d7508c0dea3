"""Run pure tasks on an executor: threads or processes here, a Dask or Ray cluster, or any that a user has made.

A task is a function of its arguments that writes its result under a name of its own, whole or not at all. So it does
not matter where it runs, how often, or in which order: a worker that is killed costs a repetition.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from shutil import rmtree
from typing import Any, Generic, TypeVar
from uuid import uuid4
from weakref import WeakSet

from hotbed.data.clusters import LOCAL, Cluster, dask_cluster, on_worker, ray_cluster, versions
from hotbed.errors import SpecError, WorkerError
from hotbed.machine import usable_cores

A = TypeVar("A")
R = TypeVar("R")

_log = logging.getLogger("hotbed")

_START_AGAIN = (
    "what was done is kept: start the same command again, with less --memory or fewer --workers if it ran out"
)
_FROM_CHECKPOINT = "see what they have logged, give them more memory if it ran out, and go on from the last checkpoint"
_RETRIES = 4
_IN_FLIGHT = 64


@dataclass(eq=False)
class Pending(Generic[A, R]):
    """A task that was begun, and the future of its present attempt; of one that was given up, ``attempts`` is 0."""

    task: Callable[[A], R]
    argument: A
    future: Future[R]
    attempts: int = 1


class Tasks:
    """Run tasks on an executor, again where their workers were lost."""

    def __init__(
        self,
        make: Callable[[], Executor],  # called again when the processes of the executor have died
        in_flight: Callable[[], int],  # number of tasks to submit at once; called again when as many have ended
        *,
        lost: tuple[type[BaseException], ...] = (BrokenExecutor,),  # errors that mean that workers were lost
        retries: int = 0,  # how often the task of a lost worker is submitted again
        make_anew: bool = False,  # whether a retry needs a new executor, because all processes of a pool end with one
        can_cancel: bool = False,  # whether a cancelled task does not run
        elsewhere: bool = False,  # whether other machines run tasks, so that versions and files are checked
    ) -> None:
        self._make, self._in_flight, self._lost = make, in_flight, lost
        self._retries, self._make_anew, self._can_cancel, self._elsewhere = retries, make_anew, can_cancel, elsewhere
        self._executor = make()
        self._lock = threading.Lock()
        self._pending = WeakSet[Pending[Any, Any]]()  # those that somebody may ask for

    @staticmethod
    def of(executor: Executor) -> Tasks:
        """Tasks on an executor that a user has made, which stays open."""
        return Tasks(lambda: executor, lambda: _IN_FLIGHT, retries=_RETRIES, elsewhere=True)

    def map(self, task: Callable[[A], R], arguments: Iterable[A]) -> Iterator[R]:
        """Results in the order of the arguments; the first error in that order is raised when the others have ended."""
        left, running = iter(arguments), deque[Pending[A, R]]()
        most, ended = self._in_flight(), 0
        try:
            while True:
                for argument in islice(left, max(0, most - len(running))):
                    running.append(self.submit(task, argument))
                if not running:
                    return
                result = self.result(running[0], advice=_START_AGAIN)
                running.popleft()
                ended += 1
                if ended == most:
                    most, ended = self._in_flight(), 0
                yield result
        finally:
            if self._can_cancel:
                for pending in running:
                    self.cancel(pending)
            # Of tasks that run on a cluster nothing else says when they have ended, and write no more.
            wait([pending.future for pending in running if not pending.future.cancelled()])

    def _is_lost(self, future: Future[Any]) -> bool:
        if future.cancelled():
            return issubclass(CancelledError, self._lost)
        return future.done() and isinstance(future.exception(), self._lost)

    def _submitted(self, task: Callable[[A], R], argument: A) -> Future[R]:
        """A future, which has failed already where workers were lost before the task was taken."""
        try:
            if self._elsewhere:
                return self._executor.submit(on_worker, versions(), task, argument)
            return self._executor.submit(task, argument)
        except self._lost as error:
            failed = Future[R]()
            failed.set_exception(error)
            return failed

    def submit(self, task: Callable[[A], R], argument: A) -> Pending[A, R]:
        """Begin a task, which `result` waits for. This, `result` and `cancel` are safe from several threads."""
        with self._lock:
            pending = Pending(task, argument, self._submitted(task, argument))
            self._pending.add(pending)
        return pending

    def result(self, pending: Pending[A, R], *, advice: str = _FROM_CHECKPOINT) -> R:
        """Wait for a task, which is run again where workers were lost; where they always are, say what to do."""
        while True:
            future = pending.future
            try:
                return future.result()
            except self._lost as error:
                self._submit_again(pending, future, error, advice)
            except (ImportError, RuntimeError) as error:
                # Dask's scheduler reads tasks, too, and raises its error from this one.
                missing = error if isinstance(error, ImportError) else error.__cause__
                if not self._elsewhere or not isinstance(missing, ImportError):
                    raise
                raise WorkerError(
                    f"a worker cannot import {missing.name or missing}; install on all workers what is installed here, "
                    "and on the scheduler of Dask"
                ) from error

    def cancel(self, pending: Pending[A, R]) -> None:
        """Give up a task, whose result nobody wants."""
        with self._lock:
            pending.attempts = 0
        pending.future.cancel()

    def _submit_again(self, pending: Pending[A, R], failed: Future[R], error: BaseException, advice: str) -> None:
        """Submit a task again whose worker was lost, and all others that were lost with it."""
        with self._lock:
            if not pending.attempts:
                raise CancelledError
            if pending.future is not failed:
                return  # another thread did
            reason = " ".join(str(error).split()) or type(error).__name__
            if pending.attempts > self._retries:
                times = f", {pending.attempts} times at the same task" if pending.attempts > 1 else ""
                raise WorkerError(f"workers died, or cannot be reached{times} ({reason}); {advice}") from None
            pending.attempts += 1
            if self._make_anew:
                self._executor.shutdown()
                self._executor = self._make()
            others = [one for one in self._pending if one is not pending and one.attempts and self._is_lost(one.future)]
            _log.warning("workers died (%s); %d tasks are run again", reason, 1 + len(others))
            for one in (pending, *others):
                one.future = self._submitted(one.task, one.argument)

    def close(self) -> None:
        """Wait for the executor's end."""
        self._executor.shutdown()


@contextmanager
def task_directory(out: Path) -> Generator[Path]:
    """Give a hidden directory to write a task's result into, and rename it to ``out`` when the body succeeds.

    A task may run twice at once, where a worker is taken for lost: each run has a directory of its own, and what is
    there first stays. Nothing is made where the preparation has ended, and has taken the directory of results away.
    """
    unfinished = out.with_name(f".{out.name}.unfinished-{uuid4().hex[:8]}")
    unfinished.mkdir()
    try:
        yield unfinished
        try:
            unfinished.rename(out)
        except OSError:
            if not out.is_dir():
                raise
    finally:
        rmtree(unfinished, ignore_errors=True)


@contextmanager
def open_tasks(executor: str | Executor, workers: int | None = None) -> Generator[Tasks]:
    """Make an executor by its name, or take one that a user has made, which stays open; what `hotbed.prepare` runs on.

    What reads for a `Loader` is opened by `hotbed.data.open_readers`.
    """
    if isinstance(executor, Executor):
        yield Tasks.of(executor)
        return
    kind, _, address = executor.partition(":")
    count = workers or usable_cores()
    if kind in _CLUSTERS:
        connect, example = _CLUSTERS[kind]
        if not address:
            raise SpecError(f"executor is {executor!r}, needs an address, such as {example}")
        if workers is not None and executor not in STARTED_HERE:
            raise SpecError(f"workers is {workers:,}, but {executor} has workers of its own; leave it out")
        # Ray's client servers have the scheme of the executor: ray://HOST:10001.
        with connect(f"{kind}:{address}" if address.startswith("//") else address, workers) as cluster:
            yield Tasks(
                lambda: cluster.executor,
                lambda: max(_IN_FLIGHT, 2 * cluster.slots()),
                lost=cluster.lost,
                retries=_RETRIES,
                can_cancel=cluster.can_cancel,
                elsewhere=True,
            )
        return
    if executor not in _LOCAL:
        raise SpecError(
            f"executor is {executor!r}, must be threads, processes, dask:ADDRESS or ray:ADDRESS (dask:local and "
            "ray:local start a cluster on this machine)"
        )
    tasks = Tasks(lambda: _LOCAL[executor](count), lambda: 2 * count, retries=_RETRIES, make_anew=True, can_cancel=True)
    try:
        yield tasks
    finally:
        tasks.close()


_CLUSTERS: dict[str, tuple[Callable[[str, int | None], AbstractContextManager[Cluster]], str]] = {
    "dask": (dask_cluster, "dask:tcp://HOST:8786, or dask:local to start a cluster on this machine"),
    "ray": (ray_cluster, "ray:HOST:6379, ray:auto on a machine of the cluster, or ray:local to start one"),
}
"""Connects to a cluster, and an example of its address."""


STARTED_HERE = ("threads", "processes", f"dask:{LOCAL}", f"ray:{LOCAL}")
"""Executors whose workers are started on this machine, so that their number can be chosen."""


def _threads(workers: int) -> Executor:
    return ThreadPoolExecutor(workers, thread_name_prefix="prepare")


def _processes(workers: int) -> Executor:
    # A process that is forked while other threads run may hang in their locks.
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_process)


_LOCAL: dict[str, Callable[[int], Executor]] = {"threads": _threads, "processes": _processes}


def _begin_process() -> None:
    """Compute on one thread, and end when the process that gives the tasks does."""
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
