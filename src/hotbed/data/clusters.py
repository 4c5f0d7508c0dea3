"""Use a cluster that exists already as a `concurrent.futures.Executor`: Dask's own, and a thin one over Ray's tasks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from typing_extensions import override

from hotbed.errors import SpecError, WorkerError

P = ParamSpec("P")
T = TypeVar("T")

_RETRIES = 8
_CONNECT_S = 30


class Cluster(NamedTuple):
    """An executor, and the errors by which it says that workers, or the cluster, were lost."""

    executor: Executor
    lost: tuple[type[BaseException], ...]


@contextmanager
def dask_cluster(address: str) -> Generator[Cluster]:
    """Connect to the scheduler of a Dask cluster (``tcp://HOST:8786``).

    Raises
    ------
    SpecError
        If Dask is not installed.
    WorkerError
        If the scheduler does not answer.
    """
    try:
        from distributed import Client, KilledWorker
        from distributed.comm import CommClosedError
    except ImportError:
        raise SpecError(f"executor dask:{address} needs Dask; pip install 'hotbed[dask]'") from None
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkerError(f"the scheduler dask:{address} cannot be reached ({error}); is it running there?") from None
    try:
        with client.get_executor(retries=_RETRIES, pure=False) as executor:
            yield Cluster(executor, (KilledWorker, CommClosedError, CancelledError))
    finally:
        client.close()


@contextmanager
def ray_cluster(address: str) -> Generator[Cluster]:
    """Connect to a Ray cluster: ``auto`` on one of its nodes, ``HOST:6379``, or ``ray://HOST:10001`` from elsewhere.

    Raises
    ------
    SpecError
        If Ray is not installed.
    WorkerError
        If the cluster does not answer.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise SpecError(f"executor ray:{address} needs Ray; pip install 'hotbed[ray]'") from None
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(f"the cluster ray:{address} cannot be reached ({error}); is it running there?") from None
    try:
        with RayExecutor() as executor:
            yield Cluster(executor, (RayError,))
    finally:
        ray.shutdown()


class RayExecutor(Executor):
    """Run calls as tasks of the Ray cluster that this process is connected to.

    Calls must be repeatable: one whose worker dies is run again. No more than ``most`` are handed to Ray at once; the
    others wait here, and can be cancelled.

    Parameters
    ----------
    most
        Calls that Ray has at once.
    retries
        How often a call is run again when its worker has died.
    """

    def __init__(self, most: int = 1024, retries: int = _RETRIES) -> None:
        import ray

        self._task = ray.remote(_call).options(max_retries=retries)
        self._most = most
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._is_down = False
        self._changed = threading.Condition()

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append((future, lambda: self._task.remote(fn, args, kwargs)))
        self._hand_on()
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`."""
        with self._changed:
            self._is_down = True
            cancelled = list(self._waiting) if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
        for future, _ in cancelled:
            future.cancel()
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: not self._running and not self._waiting)

    def _hand_on(self) -> None:
        """Hand calls to Ray, as long as it has room for more."""
        while True:
            with self._changed:
                if not self._waiting or self._running >= self._most:
                    self._changed.notify_all()
                    return
                future, start = self._waiting.popleft()
                self._running += 1
            if not future.set_running_or_notify_cancel():
                self._ended()
                continue
            try:
                start().future().add_done_callback(partial(self._finish, future))
            except Exception as error:  # what cannot be pickled
                future.set_exception(error)
                self._ended()

    def _finish(self, future: Future[Any], done: Future[Any]) -> None:
        from ray.exceptions import RayTaskError

        error = done.exception()
        if isinstance(error, RayTaskError):  # the task's own
            error = error.cause
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)
        self._ended()
        self._hand_on()

    def _ended(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)
