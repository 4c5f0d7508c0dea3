"""Use a Dask or Ray cluster that exists already as a `concurrent.futures.Executor`.

The cluster brings scheduling, retries and its own addresses, ports and authentication; hotbed adds a thread per task of
Ray that waits for it (`RayExecutor`), and errors that name the worker they come from (`on_worker`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import platform
import re
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from typing_extensions import override

from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.machine import release, usable_cores

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

_CONNECT_S = 8
LOCAL = "local"
"""Address of a cluster that is started on this machine, and ended afterwards."""


class Cluster(NamedTuple):
    """A cluster that this process is connected to."""

    executor: Executor
    lost: tuple[type[BaseException], ...]  # errors that mean that workers, or the whole cluster, were lost
    slots: Callable[[], int]  # returns the tasks that workers run at a time, because workers come and go
    can_cancel: bool  # whether a cancelled call does not run, and writes nothing


@contextmanager
def dask_cluster(address: str, workers: int | None = None) -> Generator[Cluster]:
    """Connect to the scheduler of a Dask cluster (``tcp://HOST:8786``), or start a cluster here (``local``)."""
    try:
        from distributed import Client, KilledWorker, LocalCluster
        from distributed.comm.core import CommClosedError
    except ImportError:
        raise SpecError(f"executor dask:{address} needs Dask; pip install 'hotbed[dask]'") from None
    with ExitStack() as stack:
        place: Any = address
        if address == LOCAL:
            # Tasks bound their own memory, and a worker must not be killed for that of another process.
            options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None, "memory_limit": 0}
            place = stack.enter_context(LocalCluster(n_workers=workers or usable_cores(), **options))
        try:
            if address != LOCAL:
                _reach_scheduler(address)
            # Results come from the workers that have them: through the scheduler it would be the bottleneck.
            client = Client(place, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=True)
        except (OSError, ValueError) as error:
            raise WorkerError(
                f"the scheduler dask:{address} cannot be reached ({error}); is it running there? dask:local starts a "
                "cluster on this machine"
            ) from None
        stack.callback(client.close)
        lost = (KilledWorker, CommClosedError, CancelledError)
        with client.get_executor(pure=False) as executor:
            yield Cluster(executor, lost, partial(_dask_slots, client), can_cancel=False)


def _reach_scheduler(address: str) -> None:
    """Raise an `OSError` or a `ValueError` unless a scheduler answers; a `Client` would wait for a minute to end."""
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
    threading.Thread(target=run, name="reach dask", daemon=True).start()  # looking a name up may take longer
    try:
        answered.result(_CONNECT_S + 1)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {_CONNECT_S} s") from None


def _dask_slots(client: Any) -> int:
    try:
        return sum(client.nthreads().values())
    except OSError:  # the scheduler is gone, as the tasks will say
        return 0


@contextmanager
def ray_cluster(address: str, workers: int | None = None) -> Generator[Cluster]:
    """Connect to a Ray cluster, or start one here (``local``), with ``workers`` tasks at once (default: one per core).

    An address is ``auto`` (the cluster of this machine or of ``RAY_ADDRESS``), ``HOST:6379`` on a machine of the
    cluster, or ``ray://HOST:10001`` from any other machine, through Ray's client server (``pip install
    'ray[client]'``). If this process is already connected, that connection is used, and left as it was.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise SpecError(f"executor ray:{address} needs Ray; pip install 'hotbed[ray]'") from None
    was_connected: bool = ray.is_initialized()
    if not was_connected:
        _connect(ray, address, workers)
    elif address not in ("auto", connected := str(ray.get_runtime_context().gcs_address)):
        raise SpecError(f"executor is ray:{address}, but this process is connected to ray:{connected}; use ray:auto")
    try:
        with RayExecutor() as executor:
            yield Cluster(executor, (BrokenExecutor,), lambda: int(ray.cluster_resources().get("CPU", 0)), True)
    finally:
        if not was_connected:
            ray.shutdown()


def _connect(ray: Any, address: str, workers: int | None) -> None:
    """Join a cluster; a SIGTERM goes to who had it before, and not to Ray, which would end the process."""
    place = re.fullmatch(r"(?:ray://)?(?P<host>[^/]+):(?P<port>\d{1,5})", address)
    if place is None and address not in ("auto", LOCAL):
        raise SpecError(
            f"executor is 'ray:{address}', must be ray:auto, ray:HOST:6379, or ray://HOST:10001 for a client server, "
            "or ray:local for a cluster on this machine"
        )
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == LOCAL:
        options |= {"num_cpus": workers or usable_cores(), "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if place is not None:  # Ray itself tries for minutes
            socket.create_connection((place["host"].strip("[]"), int(place["port"])), _CONNECT_S).close()
        ray.init(address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())
        if "ersion mismatch" in reason:
            raise WorkerError(
                f"the cluster ray:{address} has other versions ({reason}); install the same as on the cluster"
            ) from None
        raise WorkerError(
            f"the cluster ray:{address} cannot be reached ({reason}); is it running there? ray:local starts a cluster "
            "on this machine. If it asks for a token, set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that has it"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


class RayExecutor(ThreadPoolExecutor):
    """Run calls as tasks of the Ray cluster that this process is connected to.

    A thread waits for each task that Ray has, and calls that wait for a thread can be cancelled. Calls must be
    repeatable: Ray gives one whose worker has died to another, 3 times by default. Results come through Ray's object
    store, and arrays in them are read-only views of it.
    """

    def __init__(self, tasks: int = 1024) -> None:
        super().__init__(tasks, thread_name_prefix="ray")
        self._ray: Any = import_module("ray")
        self._task: Any = self._ray.remote(_outcome)

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor.submit`; workers that die again and again are a `BrokenExecutor`."""
        return super().submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        errors = self._ray.exceptions
        try:
            result, error, stack = self._ray.get(self._task.remote(fn, args, kwargs))
        except errors.RayTaskError as failed:  # before or after the call: what cannot be imported or pickled
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
    """The traceback of an error of a worker, as text, which is what this process has of it."""


def _outcome(
    fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[T, None, str] | tuple[None, BaseException, str]:
    """What a call returns, or what it raises, with its traceback: Ray would raise an error of a type of its own."""
    try:
        return fn(*args, **kwargs), None, ""
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        return None, _portable(error), f"on {platform.node()}:\n{stack}"


def _portable(error: BaseException) -> BaseException:
    """An error that arrives."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__qualname__}: {error}")
    return error


_DECIDE_BYTES = ("numpy", "pyarrow", "polars")
"""Packages beside hotbed whose version may change what is written."""


@cache
def versions() -> Mapping[str, str]:
    """Versions that must be the same in all processes that write one dataset."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hotbed": release(), "Python": python, **{name: version(name) for name in _DECIDE_BYTES}}


def on_worker(asked: Mapping[str, str], task: Callable[[A], T], argument: A) -> T:
    """Run a task on a worker of a cluster, and name the worker in the errors that are about it."""
    unlike = {name: (here, asked[name]) for name, here in versions().items() if here != asked[name]}
    if unlike:
        found = ", ".join(f"{name} {here} and not {there}" for name, (here, there) in unlike.items())
        raise WorkerError(
            f"the worker on {platform.node()} has {found}, so it might write other bytes; install on all workers what "
            "is installed where the command runs, and start it again"
        )
    try:
        return task(argument)
    except FileNotFoundError as error:
        raise DataError(
            f"the worker on {platform.node()} (process {os.getpid()}, in {Path.cwd()}) does not find "
            f"{error.filename or error}; all workers need the input and the output at the same paths, on a shared disk "
            "or at a URI"
        ) from error
