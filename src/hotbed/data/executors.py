"""Run pure tasks on an executor: local threads or processes, a Dask or Ray cluster, or any user's executor.

The result of a task depends only on its argument. If a task writes a file, the file appears atomically under a unique
name. So a task may run on any worker, repeatedly and in any order, and a killed worker costs only a repetition.

A cluster either exists already, or is started on this machine (``dask:local``, ``ray:local``). Dask and Ray provide
scheduling, retries, addresses and authentication. hotbed adds `RayExecutor`, and errors that name the worker
(`run_on_worker`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import platform
import re
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from shutil import rmtree
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar
from uuid import uuid4
from weakref import WeakSet

from typing_extensions import override

from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.machine import release, usable_cores

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("hotbed")

LOCAL = "local"
"""Address of a cluster that is started on this machine, and stopped afterwards."""
STARTED_HERE = ("threads", "processes", f"dask:{LOCAL}", f"ray:{LOCAL}")
"""Executors that start workers on this machine. Only for these, the caller can set the number of workers."""
_RESUME_COMMAND = "Run the same command again to resume, with less --memory or fewer --workers if memory ran out"
_RESUME_CHECKPOINT = "See the workers' logs, increase their memory if it ran out, and resume from the last checkpoint"
_RETRIES = 4
_IN_FLIGHT = 64
_CONNECT_S = 8


@dataclass(eq=False)
class RunningTask(Generic[A, R]):
    """A task that `Tasks.submit` has submitted, with the future of its latest attempt."""

    task: Callable[[A], R]
    argument: A
    future: Future[R]  # of the current attempt
    attempts: int = 1  # 0 if the task was cancelled


class Tasks:
    """Run tasks on an executor, and repeat tasks of lost workers."""

    def __init__(
        self,
        make: Callable[[], Executor],  # creates the executor; also called for a retry with ``recreate``
        in_flight: Callable[[], int],  # returns the limit of unfinished tasks; called again after that number of tasks
        *,
        lost: tuple[type[BaseException], ...] = (BrokenExecutor,),  # errors that mean that a worker was lost
        retries: int = 0,  # how often a task is submitted again at most because its worker was lost
        recreate: bool = False,  # whether a retry needs a new executor, because a pool ends with any of its processes
        can_cancel: bool = False,  # whether a cancelled task does not run
        elsewhere: bool = False,  # whether workers may be on other machines, so that they check versions and files
    ) -> None:
        self._make, self._in_flight, self._lost = make, in_flight, lost
        self._retries, self._recreate, self._can_cancel, self._elsewhere = retries, recreate, can_cancel, elsewhere
        self._executor = make()
        self._lock = threading.Lock()
        self._running = WeakSet[RunningTask[Any, Any]]()

    @staticmethod
    def of(executor: Executor) -> Tasks:
        """Return `Tasks` that run on an executor of the user. The executor stays open."""
        return Tasks(lambda: executor, lambda: _IN_FLIGHT, retries=_RETRIES, elsewhere=True)

    def map(self, task: Callable[[A], R], arguments: Iterable[A]) -> Iterator[R]:
        """Yield results in the order of the arguments. An error is raised after all running tasks have ended."""
        left, running = iter(arguments), deque[RunningTask[A, R]]()
        most, ended = self._in_flight(), 0
        try:
            while True:
                for argument in islice(left, max(0, most - len(running))):
                    running.append(self.submit(task, argument))
                if not running:
                    return
                result = self.result(running[0], advice=_RESUME_COMMAND)
                running.popleft()
                ended += 1
                if ended == most:
                    most, ended = self._in_flight(), 0
                yield result
        finally:
            if self._can_cancel:
                for one in running:
                    self.cancel(one)
            # Tasks on a cluster may still write files, so the caller must not clean up before they have ended.
            wait([one.future for one in running if not one.future.cancelled()])

    def submit(self, task: Callable[[A], R], argument: A) -> RunningTask[A, R]:
        """Submit a task. `submit`, `result` and `cancel` are thread-safe."""
        with self._lock:
            running = RunningTask(task, argument, self._submit(task, argument))
            self._running.add(running)
        return running

    def result(self, running: RunningTask[A, R], *, advice: str = _RESUME_CHECKPOINT) -> R:
        """Return the result of a task. Repeat the task if its worker is lost. The final error ends with ``advice``."""
        while True:
            future = running.future
            try:
                return future.result()
            except self._lost as error:
                self._retry(running, future, error, advice)
            except (ImportError, RuntimeError) as error:
                # Dask's scheduler also unpickles tasks. Its ImportError is the cause of a RuntimeError.
                missing = error if isinstance(error, ImportError) else error.__cause__
                if not self._elsewhere or not isinstance(missing, ImportError):
                    raise
                raise WorkerError(
                    f"a worker cannot import {missing.name or missing}. Install the packages of this process on all "
                    "workers, and on Dask's scheduler"
                ) from error

    def cancel(self, running: RunningTask[A, R]) -> None:
        """Cancel a task, and do not repeat it if its worker is lost."""
        with self._lock:
            running.attempts = 0
        running.future.cancel()

    def close(self) -> None:
        """Wait until the executor has stopped."""
        self._executor.shutdown()

    def _submit(self, task: Callable[[A], R], argument: A) -> Future[R]:
        """Submit a task. The returned future has failed already if workers were lost before they accepted the task."""
        try:
            if self._elsewhere:
                return self._executor.submit(run_on_worker, versions(), task, argument)
            return self._executor.submit(task, argument)
        except self._lost as error:
            failed = Future[R]()
            failed.set_exception(error)
            return failed

    def _retry(self, running: RunningTask[A, R], failed: Future[R], error: BaseException, advice: str) -> None:
        """Submit the task ``running`` again, because its worker was lost, and all other tasks of lost workers."""
        with self._lock:
            if not running.attempts:
                raise CancelledError
            if running.future is not failed:
                return  # another thread has submitted the task again
            reason = " ".join(str(error).split()) or type(error).__name__
            if running.attempts > self._retries:
                times = f" {running.attempts} times while they ran the same task" if running.attempts > 1 else ""
                raise WorkerError(f"workers were killed or are unreachable{times} ({reason}). {advice}") from None
            running.attempts += 1
            if self._recreate:
                self._executor.shutdown()
                self._executor = self._make()
            others = [one for one in self._running if one is not running and one.attempts and self._is_lost(one.future)]
            _log.warning("workers were killed (%s); repeating %d tasks", reason, 1 + len(others))
            for one in (running, *others):
                one.future = self._submit(one.task, one.argument)

    def _is_lost(self, future: Future[Any]) -> bool:
        if future.cancelled():
            return issubclass(CancelledError, self._lost)
        return future.done() and isinstance(future.exception(), self._lost)


@contextmanager
def task_directory(out: Path) -> Generator[Path]:
    """Yield a hidden directory for a task's result, and rename the directory to ``out`` when the body succeeds.

    A task may run twice at the same time, e.g. because its worker seemed lost. Each run then has its own directory, and
    the first result is kept. A run fails if it ends after the preparation has removed the parent directory.
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
    """Yield `Tasks` that run on the executor with this name, or on the user's executor, which stays open.

    `hotbed.prepare` uses this function. A `Loader` needs the value of `hotbed.data.open_readers`.
    """
    if isinstance(executor, Executor):
        yield Tasks.of(executor)
        return
    scheme, _, address = executor.partition(":")
    count = workers or usable_cores()
    if scheme in _CLUSTERS:
        connect, example = _CLUSTERS[scheme]
        if not address:
            raise SpecError(f"executor: got {executor!r}, expected an address, e.g. {example}")
        if workers is not None and executor not in STARTED_HERE:
            raise SpecError(
                f"workers: got {workers:,}, expected null, because the cluster {executor} has its own workers. Remove "
                "workers"
            )
        # Addresses of Ray's client servers also begin with the executor's name: ray://HOST:10001.
        with connect(f"{scheme}:{address}" if address.startswith("//") else address, workers) as cluster:
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
            f"executor: got {executor!r}, expected threads, processes, dask:ADDRESS or ray:ADDRESS. Use dask:local or "
            "ray:local to start a cluster on this machine"
        )
    tasks = Tasks(lambda: _LOCAL[executor](count), lambda: 2 * count, retries=_RETRIES, recreate=True, can_cancel=True)
    try:
        yield tasks
    finally:
        tasks.close()


# -- local executors -------------------------------------------------------------------------------------------------


def _begin_process() -> None:
    """Let polars use one thread, and let this process exit when its parent process exits."""
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_LOCAL: dict[str, Callable[[int], Executor]] = {
    "threads": partial(ThreadPoolExecutor, thread_name_prefix="prepare"),
    # Processes are spawned, because a forked process inherits locks that other threads hold, and may deadlock.
    "processes": partial(ProcessPoolExecutor, mp_context=get_context("spawn"), initializer=_begin_process),
}


# -- clusters --------------------------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """A cluster that this process is connected to."""

    executor: Executor
    lost: tuple[type[BaseException], ...]  # errors of lost workers, or of a lost cluster
    slots: Callable[[], int]  # returns how many tasks can now run at once, which changes when workers join or leave
    can_cancel: bool  # whether a cancelled task does not run


@contextmanager
def dask_cluster(address: str, workers: int | None = None) -> Generator[Cluster]:
    """Connect to the scheduler of a Dask cluster (``tcp://HOST:8786``), or start one on this machine (``local``)."""
    try:
        from distributed import Client, KilledWorker, LocalCluster
        from distributed.comm.core import CommClosedError
    except ImportError:
        raise SpecError(f"executor dask:{address} needs Dask. pip install 'hotbed[dask]'") from None
    with ExitStack() as stack:
        target: Any = address
        if address == LOCAL:
            # Dask does not limit memory, because it would also count other tasks' memory. Each task bounds its own.
            options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None, "memory_limit": 0}
            target = stack.enter_context(LocalCluster(n_workers=workers or usable_cores(), **options))
        try:
            if address != LOCAL:
                _check_scheduler(address)
            # Results are fetched directly from workers, because the scheduler would be a bottleneck.
            client = Client(target, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=True)
        except (OSError, ValueError) as error:
            raise WorkerError(
                f"the scheduler dask:{address} is unreachable ({error}). Check that the scheduler is running, or use "
                "dask:local to start a cluster on this machine"
            ) from None
        stack.callback(client.close)
        lost = (KilledWorker, CommClosedError, CancelledError)
        with client.get_executor(pure=False) as executor:
            yield Cluster(executor, lost, partial(_dask_slots, client), can_cancel=False)


def _check_scheduler(address: str) -> None:
    """Raise `OSError` or `ValueError` unless a scheduler answers. A `Client` alone would wait for a minute."""
    from distributed.comm.core import connect
    from distributed.security import Security

    async def ask() -> None:
        arguments: dict[str, Any] = Security().get_connection_args("client")
        comm = await connect(address, timeout=_CONNECT_S, **arguments)
        await comm.close()

    def run() -> None:
        try:
            answered.set_result(asyncio.run(ask()))
        except BaseException as error:
            answered.set_exception(error)

    answered = Future[None]()
    # In a thread, because name resolution may exceed the timeout.
    threading.Thread(target=run, name="reach dask", daemon=True).start()
    try:
        answered.result(_CONNECT_S + 1)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {_CONNECT_S} s") from None


def _dask_slots(client: Any) -> int:
    try:
        return sum(client.nthreads().values())
    except OSError:  # the scheduler is lost, so tasks will fail
        return 0


@contextmanager
def ray_cluster(address: str, workers: int | None = None) -> Generator[Cluster]:
    """Connect to a Ray cluster, or start one on this machine (``local``) for ``workers`` tasks (default: cores).

    On a machine of the cluster, the address is ``auto`` (the cluster of this machine or of ``RAY_ADDRESS``) or
    ``HOST:6379``. On other machines, it is ``ray://HOST:10001``, the address of Ray's client server (``pip install
    'ray[client]'``). If this process is already connected, the connection is used and stays open.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise SpecError(f"executor ray:{address} needs Ray. pip install 'hotbed[ray]'") from None
    was_connected: bool = ray.is_initialized()
    if not was_connected:
        _connect_ray(ray, address, workers)
    elif address not in ("auto", connected := str(ray.get_runtime_context().gcs_address)):
        raise SpecError(f"executor: got ray:{address}, but this process is connected to ray:{connected}. Use ray:auto")
    try:
        with RayExecutor() as executor:
            yield Cluster(executor, (BrokenExecutor,), lambda: int(ray.cluster_resources().get("CPU", 0)), True)
    finally:
        if not was_connected:
            ray.shutdown()


def _connect_ray(ray: Any, address: str, workers: int | None) -> None:
    """Connect to a cluster, and then restore the handler of SIGTERM, because Ray's handler would end the process."""
    found = re.fullmatch(r"(?:ray://)?(?P<host>[^/]+):(?P<port>\d{1,5})", address)
    if found is None and address not in ("auto", LOCAL):
        raise SpecError(
            f"executor: got 'ray:{address}', expected ray:auto, ray:HOST:6379, ray://HOST:10001 (a client server) or "
            "ray:local (a cluster on this machine)"
        )
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == LOCAL:
        options |= {"num_cpus": workers or usable_cores(), "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if found is not None:  # checked before Ray connects, because Ray would try for minutes
            socket.create_connection((found["host"].strip("[]"), int(found["port"])), _CONNECT_S).close()
        ray.init(address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())
        if "ersion mismatch" in reason:
            raise WorkerError(
                f"the cluster ray:{address} runs a different version of Ray or Python than this process ({reason}). "
                "Install the versions of the cluster"
            ) from None
        raise WorkerError(
            f"the cluster ray:{address} is unreachable ({reason}). Check that the cluster is running, or use ray:local "
            "to start a cluster on this machine. If the cluster requires a token, set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN_PATH to the token's file"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


class RayExecutor(ThreadPoolExecutor):
    """Run calls as tasks of the Ray cluster that this process is connected to.

    One thread waits for each running task. A call can be cancelled until it has a thread. Calls must be repeatable,
    because Ray repeats tasks of killed workers (3 times by default). Arrays in results are read-only views of Ray's
    object store.
    """

    def __init__(self, tasks: int = 1024) -> None:
        super().__init__(tasks, thread_name_prefix="ray")
        self._ray: Any = import_module("ray")
        self._task: Any = self._ray.remote(_call)

    @override
    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit a call and return its future, which raises `BrokenExecutor` if workers are lost repeatedly."""
        return super().submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        errors = self._ray.exceptions
        try:
            result, error, stack = self._ray.get(self._task.remote(fn, args, kwargs))
        except errors.RayTaskError as failed:  # importing or pickling has failed before or after the call
            missing = re.search(r"No module named '([\w.]+)'", str(failed.cause))
            if missing is not None:
                raise ModuleNotFoundError(missing[0], name=missing[1]) from None
            raise failed.cause from None
        except errors.RayError as lost:
            raise BrokenExecutor(f"Ray: {lost}") from lost
        if error is not None:
            raise error from _RaisedByWorker(stack)
        return result


class _RaisedByWorker(Exception):  # noqa: N818
    """The traceback of an error on a worker, as text."""


def _call(
    fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[R, None, str] | tuple[None, BaseException, str]:
    """Return the result of a call, or the error and its traceback. Ray would change the type of a raised error."""
    try:
        return fn(*args, **kwargs), None, ""
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__qualname__}: {error}")
        return None, error, f"on {platform.node()}:\n{stack}"


_CLUSTERS: dict[str, tuple[Callable[[str, int | None], AbstractContextManager[Cluster]], str]] = {
    "dask": (dask_cluster, "dask:tcp://HOST:8786, or dask:local to start a cluster on this machine"),
    "ray": (ray_cluster, "ray:HOST:6379, ray:auto on a machine of the cluster, or ray:local to start one"),
}
"""The function that connects to a cluster, and examples of addresses, by the cluster's scheme."""

_DECIDE_BYTES = ("numpy", "pyarrow", "polars")
"""Packages besides hotbed that determine the written bytes, so their versions must be equal."""


@cache
def versions() -> Mapping[str, str]:
    """Return the versions, by package, that must be equal in all processes that write the same dataset."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hotbed": release(), "Python": python, **{name: version(name) for name in _DECIDE_BYTES}}


def run_on_worker(expected: Mapping[str, str], task: Callable[[A], R], argument: A) -> R:
    """Run a task on a worker of a cluster. Errors about wrong versions and missing files name the worker."""
    different = {name: (here, expected[name]) for name, here in versions().items() if here != expected[name]}
    if different:
        found = ", ".join(f"{name} {here} (expected {there})" for name, (here, there) in different.items())
        raise WorkerError(
            f"the worker on {platform.node()}: got {found}. Different versions may write different bytes. Install the "
            "expected versions on all workers, and run the command again"
        )
    try:
        return task(argument)
    except FileNotFoundError as error:
        raise DataError(
            f"the worker on {platform.node()} (process {os.getpid()}, in {Path.cwd()}) does not find "
            f"{error.filename or error}. Use paths that exist on all workers: on a shared disk, or URIs"
        ) from error
