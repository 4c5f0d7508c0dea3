"""Use a Dask cluster that exists already as a `concurrent.futures.Executor`."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

from hotbed.errors import SpecError, WorkerError

P = ParamSpec("P")
T = TypeVar("T")

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
        from distributed.comm.core import CommClosedError
    except ImportError:
        raise SpecError(f"executor dask:{address} needs Dask; pip install 'hotbed[dask]'") from None
    try:
        # Results come from the workers that have them: through the scheduler it would be the bottleneck.
        client = Client(address, timeout=_CONNECT_S, set_as_default=False, direct_to_workers=True)
    except (OSError, ValueError) as error:
        raise WorkerError(f"the scheduler dask:{address} cannot be reached ({error}); is it running there?") from None
    try:
        with client.get_executor(pure=False) as executor:
            yield Cluster(executor, (KilledWorker, CommClosedError, CancelledError))
    finally:
        client.close()
